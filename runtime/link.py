"""How the verbs of a client reach the database: through the actors of a runtime in this process, or otherwise.

Owns what the verbs need of whoever carries their calls, and the carrier that hands them to actors. It checks no
argument and interprets no answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import trio

from actors.admission import Admission
from actors.control import CancelRequest, EventRequest, FailRequest
from actors.schedules import Change
from runtime import host as composition
from runtime.config import RuntimeConfig
from runtime.submit import Submissions
from sql.admission import Admitted, Submission
from sql.connection import Session
from sql.control import Cancellation, Cancelled, Failed, Failure
from sql.events import Sending
from sql.status import Terminal

T = TypeVar("T")

_CHUNK = 500


class Link(Protocol):
    """Carries the calls of verbs. Each may be asked again after a lost answer, and is, until its deadline.

    All raise ``OutcomeUnknown`` when there is no answer within ``config.operation_timeout_s``.
    """

    @property
    def config(self) -> RuntimeConfig:
        """The settings in force."""
        ...

    @property
    def submissions(self) -> Submissions:
        """The checks of new runs."""
        ...

    async def admit(self, items: Sequence[Submission]) -> list[Admitted]:
        """Admit in chunks, each on its own; one answer per item, in order."""
        ...

    async def cancel(self, item: Cancellation) -> Cancelled:
        """End a run as cancelled."""
        ...

    async def send(self, item: Sending) -> str:
        """Send an event; how it was answered, never ``busy``."""
        ...

    async def fail(self, item: Failure) -> Failed:
        """End a parked run as failed; never answered ``busy``."""
        ...

    async def ask(self, read: Callable[[Session], Awaitable[T]]) -> T:
        """The answer of ``read(session)``, which may be called more than once."""
        ...

    async def change(self, make: Callable[[Session], Awaitable[T | None]]) -> T:
        """The answer of a write to a schedule, which is made again as long as that is None: somebody holds the row."""
        ...

    async def ended(self, run_id: str, timeout_s: float) -> Terminal | None:
        """How the run ended, as soon as it has; None when it has not after ``timeout_s``, which may be infinite."""
        ...


class ActorLink:
    """The link of a runtime: messages to its actors."""

    def __init__(self, host: composition.Host) -> None:
        self._host = host
        self.config = host.config
        self.submissions = host.submissions

    async def admit(self, items: Sequence[Submission]) -> list[Admitted]:
        """As ``Link.admit``."""
        deadline = self._deadline()
        messages = [
            Admission(list(items[start : start + _CHUNK]), deadline) for start in range(0, len(items), _CHUNK)
        ]
        await composition.send_by(deadline, self._host.admissions, *messages)
        # A little later than the actor's own deadline, whose error says more.
        return [
            answer
            for message in messages
            for answer in await message.reply.wait(deadline - trio.current_time() + 1.0)
        ]

    async def cancel(self, item: Cancellation) -> Cancelled:
        """As ``Link.cancel``."""
        request, deadline = CancelRequest(item), self._deadline()
        await composition.send_by(deadline, self._host.requests, request)
        return await request.reply.wait(deadline - trio.current_time())

    async def send(self, item: Sending) -> str:
        """As ``Link.send``."""
        deadline = self._deadline()
        request = EventRequest(item, deadline)
        await composition.send_by(deadline, self._host.requests, request)
        # A little later than the actor's own deadline, whose error says more.
        return await request.reply.wait(deadline - trio.current_time() + 1.0)

    async def fail(self, item: Failure) -> Failed:
        """As ``Link.fail``."""
        deadline = self._deadline()
        request = FailRequest(item, deadline)
        await composition.send_by(deadline, self._host.requests, request)
        return await request.reply.wait(deadline - trio.current_time() + 1.0)

    async def ask(self, read: Callable[[Session], Awaitable[T]]) -> T:
        """As ``Link.ask``, on the connection that reads share."""
        answer: T = await composition.ask(self._host.queries, read, self.config.operation_timeout_s)
        return answer

    async def change(self, make: Callable[[Session], Awaitable[T | None]]) -> T:
        """As ``Link.change``."""
        change = Change(make, self._deadline())
        await composition.send_by(change.deadline, self._host.changes, change)
        # A little later than the actor's own deadline, whose error says more.
        answer: T = await change.reply.wait(change.deadline - trio.current_time() + 1.0)
        return answer

    async def ended(self, run_id: str, timeout_s: float) -> Terminal | None:
        """As ``Link.ended``."""
        running_here = self._host.attempts.get(run_id) is not None
        reply = self._host.waiters.add(run_id, running_here=running_here)
        if not running_here:
            self._host.hints.wake_watch.set()
        try:
            with trio.move_on_after(timeout_s):
                return await reply.wait()
        finally:
            self._host.waiters.discard(run_id, reply)
        return None

    def _deadline(self) -> float:
        return trio.current_time() + self.config.operation_timeout_s
