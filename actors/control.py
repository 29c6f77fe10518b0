"""Control: requests to cancel runs or to fail waiting ones, events for them, and the sweep of recorded cancellations.

Owns when a cancellation is tried, recorded and carried out, and when the others are asked again. It never waits for a
locked row longer than its short patience: then a request to cancel is recorded, and the sweep carries it out.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import attrs
import trio

from actors.attempts import Attempts, Why
from actors.core import Backoff, Life, Mailbox, Reply, commit_in_groups
from actors.hints import Hints
from sql import control as door
from sql import events
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault, LockTimedOut

log = logging.getLogger("runlane.control")

_BATCH = 200
# How long a locked row is tried again before the request is recorded and the caller hears "pending".
_PATIENCE_S = 0.25


@attrs.define(slots=True, eq=False)
class CancelRequest:
    """A request and where its answer goes."""

    item: door.Cancellation
    reply: Reply[door.Cancelled] = attrs.field(factory=Reply)


@attrs.define(slots=True, eq=False)
class EventRequest:
    """An event to send and where its answer goes. ``deadline`` is on the trio clock: past it nobody waits."""

    item: events.Sending
    deadline: float
    reply: Reply[str] = attrs.field(factory=Reply)


@attrs.define(slots=True, eq=False)
class FailRequest:
    """A parked run to fail and where its answer goes. ``deadline`` is on the trio clock: past it nobody waits."""

    item: door.Failure
    deadline: float
    reply: Reply[door.Failed] = attrs.field(factory=Reply)


Request: TypeAlias = CancelRequest | EventRequest | FailRequest


class Control:
    """Requests arrive in ``mailbox``; the hint ``control`` says that cancellations are recorded in the database."""

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Request],
        attempts: Attempts,
        hints: Hints,
        *,
        owner: int,
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._attempts = attempts
        self._hints = hints
        self._owner = owner

    async def run(self, life: Life) -> None:
        """Cancel and sweep until the mailbox ends."""
        backoff = Backoff(first_s=0.005, max_s=1.0)
        held = Backoff(first_s=0.005, max_s=0.25)
        busy: list[EventRequest | FailRequest] = []
        async with life.session(self._options) as session:
            life.ready()
            sweep_at: float | None = None
            send_at: float | None = None
            while True:
                times = [at for at in (sweep_at, send_at) if at is not None]
                await self._mailbox.wake.wait(min(times, default=None))
                life.beat()
                requests = self._mailbox.take_nowait(_BATCH)
                await commit_in_groups(
                    [request for request in requests if isinstance(request, CancelRequest)],
                    lambda items: self._cancel(session, items),
                    fail=self._refuse,
                )
                others = busy + [request for request in requests if not isinstance(request, CancelRequest)]
                busy.clear()
                await commit_in_groups(
                    [request for request in others if isinstance(request, EventRequest)],
                    lambda items: self._send(session, items, busy),
                    fail=self._refuse,
                )
                await commit_in_groups(
                    [request for request in others if isinstance(request, FailRequest)],
                    lambda items: self._fail(session, items, busy),
                    fail=self._refuse,
                )
                if not busy:
                    held.reset()
                send_at = trio.current_time() + held.next() if busy else None
                if len(self._mailbox):
                    self._mailbox.wake.set()
                elif self._mailbox.closed:
                    return
                due = sweep_at is not None and trio.current_time() >= sweep_at
                if not (self._hints.control.clear() or due):
                    continue
                cancelled, remaining = await door.sweep(session, limit=_BATCH)
                if cancelled:
                    self._tell()
                    backoff.reset()
                sweep_at = trio.current_time() + backoff.next() if remaining else None

    async def _cancel(self, session: Session, requests: Sequence[CancelRequest]) -> None:
        patience = trio.current_time() + _PATIENCE_S
        backoff = Backoff(first_s=0.002, max_s=0.05)
        while requests:
            mark = trio.current_time() >= patience
            answers = await door.cancel(session, [request.item for request in requests], mark=mark)
            busy = []
            for request, answer in zip(requests, answers, strict=True):
                if answer.answer == "busy":
                    busy.append(request)
                else:
                    self._answered(request, answer)
            requests = busy
            if busy:
                await trio.sleep(backoff.next())

    async def _fail(
        self, session: Session, requests: Sequence[FailRequest], busy: list[EventRequest | FailRequest]
    ) -> None:
        answers = await door.fail(session, [request.item for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            if answer.answer == "busy" and request.deadline > trio.current_time():
                busy.append(request)
                continue
            self._mailbox.done([request])
            if answer.answer == "busy":
                request.reply.set_error(LockTimedOut(f"run {request.item.run_id!r} is held by somebody else"))
            else:
                request.reply.set_result(answer)
        if any(answer.answer == "failed" for answer in answers):
            self._hints.everywhere(["terminals", "wakes"])
            self._hints.lanes.set()

    async def _send(
        self, session: Session, requests: Sequence[EventRequest], busy: list[EventRequest | FailRequest]
    ) -> None:
        answers = await events.send(session, [request.item for request in requests])
        for request, answer in zip(requests, answers, strict=True):
            if answer == "busy" and request.deadline > trio.current_time():
                busy.append(request)
                continue
            self._mailbox.done([request])
            if answer == "busy":
                request.reply.set_error(
                    LockTimedOut(f"event id {request.item.event_id!r} is held by a transaction that is open")
                )
            else:
                request.reply.set_result(answer)
        if {"delivered", "kept"} & set(answers):
            self._hints.everywhere(["wakes"])

    def _answered(self, request: CancelRequest, answer: door.Cancelled) -> None:
        self._mailbox.done([request])
        request.reply.set_result(answer)
        if answer.answer == "pending":
            self._hints.control.set()
            self._hints.elsewhere("control")
        elif answer.answer == "cancelled":
            attempt = self._attempts.get(request.item.run_id)
            if attempt is not None:
                self._attempts.lose(attempt, Why.CANCELLED)
            elif answer.owner != self._owner:
                # Also when it is not known whose attempt that was, because the first answer was lost.
                self._hints.elsewhere("control")
            # An attempt that has lost its fence no longer counts against a limit.
            self._hints.everywhere(["terminals"] if answer.owner is None else ["runs", "terminals"])
            self._hints.lanes.set()
            if answer.kin:
                self._hints.everywhere(["wakes"])
                self._hints.control.set()  # its children are asked to end, too

    def _refuse(self, request: Request, fault: ItemFault) -> None:
        self._mailbox.done([request])
        request.reply.set_error(fault)

    def _tell(self) -> None:
        self._hints.everywhere(["control", "runs", "terminals", "wakes"])
        self._hints.lanes.set()
