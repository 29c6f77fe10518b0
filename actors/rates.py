"""Rates: the slots of rate scopes that this host's attempts ask for, in groups.

Owns when a slot is asked for, and asked for again: at once, at its moment, or when somebody else is done. It never
grants anything itself: the database does, for all hosts.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from itertools import count, islice

import attrs
import trio

from actors.core import PASSING_FAULTS, Backoff, Life, Mailbox, Portion, Reply, commit_in_groups
from actors.hints import Hints
from sql import rates as door
from sql.connection import Session, SessionOptions
from sql.errors import LEAST_WAIT_S, MOST_WAIT_S, CapacityUnavailable, InputRefused, ItemFault

log = logging.getLogger("runlane.rates")

_BATCH = 500
# Of those that wait for somebody else, so many ask at a time for all of them.
_FRONT = 20
# A probe that takes longer no longer keeps the others waiting.
_PROBE_S = 30.0
_SWEEP_EVERY_S = 60.0
# A slot is granted up to so long ahead, and its holder sleeps until its moment: so one call starts many, and a refusal
# finds no more than this granted already. Half of it is for asking in company.
_AHEAD_S = 0.1
_COMPANY_S = _AHEAD_S / 2
# The end of a block is not asked for a hair before it has come.
_SLACK_S = 0.0005


@attrs.define(slots=True, eq=False)
class Acquire:
    """An attempt wants a slot. ``reply`` is when it is granted for, by the database's clock and by trio's.

    ``most_s``: a wait that is known to be longer is refused at once, as CapacityUnavailable.
    """

    slot: door.Slot
    most_s: float = math.inf
    reply: Reply[tuple[datetime, float]] = attrs.field(factory=Reply)


@attrs.define(slots=True, eq=False)
class Release:
    """What became of a slot. Nobody waits for the answer."""

    result: door.Result


class Rates:
    """Messages arrive in ``mailbox``, whose wake flag is ``hints.wake_rates``: there may also be a hint that a slot has
    become free elsewhere."""

    def __init__(self, options: SessionOptions, mailbox: Mailbox[Acquire | Release], hints: Hints) -> None:
        self._options = options
        self._mailbox = mailbox
        self._hints = hints
        self._portion = Portion(_BATCH)
        self._forget()

    def _forget(self) -> None:
        """Everything unanswered is in the mailbox again, and comes with the same tokens."""
        self._timed: list[tuple[float, int, Acquire]] = []
        self._order = count()
        self._wanted: dict[int, Acquire] = {}
        self._lines: dict[str, _Line] = defaultdict(_Line)
        self._releases: list[Release] = []
        self._locked = Backoff(first_s=0.001, max_s=0.05)

    async def run(self, life: Life) -> None:
        """Ask and release until the mailbox ends. Connects when somebody first wants something."""
        self._forget()
        life.ready()
        if not await self._mailbox.arrives():
            return
        sweep_at = trio.current_time()
        async with life.session(self._options) as session:
            while True:
                await self._mailbox.wake.wait(self._next())
                life.beat()
                self._sort(self._mailbox.take_nowait(_BATCH))
                if self._hints.rates.clear():
                    for line in self._lines.values():
                        line.look_at = -math.inf
                await self._report(session)
                await self._ask(session)
                if len(self._mailbox):
                    self._mailbox.wake.set()
                elif self._mailbox.closed and not self._releases:
                    return
                if trio.current_time() >= sweep_at:
                    sweep_at = trio.current_time() + _SWEEP_EVERY_S
                    await door.sweep(session, limit=_BATCH)

    # --- who is to be asked for ------------------------------------------------------------------------

    def _sort(self, mail: Sequence[Acquire | Release]) -> None:
        for message in mail:
            if isinstance(message, Acquire):
                self._forget_one(
                    message.slot.token
                )  # asked for again: whoever asked before has stopped listening
                self._wanted[message.slot.token] = message
                self._at(message, -math.inf)
                continue
            self._releases.append(message)
            if message.result.result == "unused":
                self._forget_one(message.result.token)

    def _forget_one(self, token: int) -> None:
        wanted = self._wanted.pop(token, None)
        if wanted is not None:
            self._lines[wanted.slot.scope].waiting.pop(token, None)
            self._mailbox.done([wanted])

    def _at(self, message: Acquire, when: float) -> None:
        heapq.heappush(self._timed, (when, next(self._order), message))

    def _next(self) -> float | None:
        """When to look again without being woken; None for never."""
        looks = [line.look_at for line in self._lines.values() if line.waiting]
        if self._timed:
            looks.append(self._timed[0][0])
        if self._releases:
            looks.append(trio.current_time() + self._locked.next())
        return max(min(looks), trio.current_time()) if looks else None

    def _due(self) -> list[Acquire]:
        """Those whose moment has come, and the front of each line whose turn it is to look."""
        now = trio.current_time()
        due: list[Acquire] = []
        until = now + _COMPANY_S if self._timed and self._timed[0][0] <= now else now
        while self._timed and self._timed[0][0] <= until and len(due) < self._portion.most:
            message = heapq.heappop(self._timed)[2]
            if self._wanted.get(message.slot.token) is message:
                due.append(message)
        for line in self._lines.values():
            if line.look_at <= now:
                due += islice(line.waiting.values(), _FRONT)
        return due

    # --- calls ---------------------------------------------------------------------------------------

    async def _report(self, session: Session) -> None:
        todo, self._releases = self._releases, []

        async def commit(items: Sequence[Release]) -> None:
            with self._portion.adapt():
                answers = await door.release(session, [item.result for item in items])
            for item, answer in zip(items, answers, strict=True):
                if answer.answer == "busy":
                    self._releases.append(item)
                    continue
                self._mailbox.done([item])
                if answer.waiting:
                    self._hints.everywhere(["rates"])

        def refuse(item: Release, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                self._releases.append(item)
                return
            log.error("event=unreleased scope=%s error=%r", item.result.scope, str(fault))
            self._mailbox.done([item])  # its attempt's lease ends it

        await commit_in_groups(todo, commit, fail=refuse)

    async def _ask(self, session: Session) -> None:
        async def commit(items: Sequence[Acquire]) -> None:
            with self._portion.adapt():
                answers = await door.acquire(
                    session, [item.slot for item in items], ahead_s=_AHEAD_S, probe_s=_PROBE_S
                )
            now = trio.current_time()
            busy = [item for item, answer in zip(items, answers, strict=True) if answer.answer == "busy"]
            if busy:
                again_at = now + self._locked.next()
                for item in busy:
                    self._at(item, again_at)
            else:
                self._locked.reset()
            for item, answer in zip(items, answers, strict=True):
                if answer.answer != "busy":
                    self._answered(item, answer, now)

        def refuse(item: Acquire, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                self._at(item, trio.current_time() + self._locked.next())
            else:
                self._forget_one(item.slot.token)
                item.reply.set_error(fault)

        await commit_in_groups(self._due(), commit, fail=refuse)

    def _answered(self, item: Acquire, answer: door.Granted, now: float) -> None:
        scope = item.slot.scope
        line = self._lines[scope]
        if answer.started_at is not None:
            self._forget_one(item.slot.token)
            item.reply.set_result((answer.started_at, now + (answer.wait_s or 0.0)))
            line.look_at = -math.inf  # there may be more for those that are next
            line.backoff.reset()
        elif answer.answer == "unknown":
            self._forget_one(item.slot.token)
            reason = f"there is no rate scope {scope!r}: declare it with rt.set_rate({scope!r}, per_s=…)"
            item.reply.set_error(InputRefused("name", reason))
        elif answer.wait_s is not None and answer.wait_s > item.most_s:
            self._forget_one(item.slot.token)
            reason = f"rate scope {scope}: the next slot is {answer.wait_s:.1f} s away"
            wait_s = min(max(answer.wait_s, LEAST_WAIT_S), MOST_WAIT_S)
            item.reply.set_error(CapacityUnavailable(reason, retry_after=wait_s))
        elif answer.answer == "wait":
            assert answer.wait_s is not None
            line.waiting.pop(item.slot.token, None)
            self._at(item, now + max(answer.wait_s - _COMPANY_S, 0.0))
        else:
            line.waiting.setdefault(item.slot.token, item)
            line.look_at = now + (line.backoff.next() if answer.wait_s is None else answer.wait_s + _SLACK_S)


@attrs.define(eq=False)
class _Line:
    """Those of one scope whose turn depends on others, first come first, and when the front of them looks again."""

    waiting: dict[int, Acquire] = attrs.field(factory=dict)
    look_at: float = math.inf
    backoff: Backoff = attrs.field(factory=lambda: Backoff(first_s=0.02, max_s=1.0))
