"""Parking: the durable waits of one attempt, and the rule by which it parks.

Owns what the attempt stands at, which of its other calls are pending, and when it is told to stop. It never writes to
the database: the waits actor passes waits that are held in memory, and the executor settles the park.

The rule. A run parks only while all of its pending ``ctx`` calls are waits: a step beside them holds it. A sleep longer
than ``park_after_s`` parks at once, and so does whatever an earlier attempt has parked on already. Everything else
(events, approvals, children) is held in memory for ``park_after_s`` first, because what comes in that time costs
neither a park nor another attempt. And a task that has just come back from a wait gets as long to go on before others
park, which would undo it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import trio

from actors.attempts import Attempt, Why
from actors.waits import Stand
from sql.waits import Wait, WaitState

# Tasks that were started beside a wait come to their own waits first, so that all of them count from now.
_TURNS_FOR_SIBLINGS = 3


@attrs.define(slots=True, eq=False)
class _Pending:
    """A wait that a task stands at. ``ready_at``: trio time from which it allows a park."""

    wait: Wait
    task: object
    ready_at: float
    scope: trio.CancelScope | None = None


class Parking:
    """Of one attempt. ``hold(attempt, wait)`` lets the waits actor hold a wait in memory."""

    def __init__(
        self, attempt: Attempt, hold: Callable[[Attempt, Wait], Stand], *, park_after_s: float
    ) -> None:
        self._attempt = attempt
        self._hold = hold
        self._park_after_s = park_after_s
        self._calls = 0
        self._pending: list[_Pending] = []
        self._returned: tuple[object, float] | None = None

    @property
    def waits(self) -> list[Wait]:
        """What the attempt stands at, each once."""
        return list({pending.wait.key: pending.wait for pending in self._pending}.values())

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Surrounds a call of the play that is no wait: while it is pending, the run does not park."""
        self._calls += 1
        self._reconsider()
        try:
            yield
        finally:
            self._calls -= 1
            self._reconsider()

    def returned(self, task: object) -> None:
        """A task has come back from a wait: it may go on before others park."""
        self._returned = (task, trio.current_time())
        self._reconsider()

    async def stand(self, wait: Wait, *, task: object, at_once: bool) -> WaitState:
        """Stand at a wait until it is over, or until the attempt is told to park, which cancels the caller.

        ``at_once``: there is no point in holding it in memory first. ``task`` is who waits.
        """
        now = trio.current_time()
        pending = _Pending(wait, task, now if at_once else now + self._park_after_s)
        self._pending.append(pending)
        self._reconsider()
        stand: Stand | None = None
        try:
            for _ in range(_TURNS_FOR_SIBLINGS):
                await trio.lowlevel.checkpoint()
            while True:
                if self._attempt.why is None and self._allowed_at() <= trio.current_time():
                    # Unwound by cancellation: no `except Exception` of the play can swallow it, every `finally` runs.
                    self._attempt.stop(Why.PARKED)
                if self._attempt.why is not None:
                    await trio.sleep_forever()
                if stand is None:
                    stand = self._hold(self._attempt, wait)
                with trio.CancelScope(deadline=self._allowed_at()) as pending.scope:
                    state = await stand.reply.wait()
                    self.returned(task)
                    return state
        finally:
            pending.scope = None
            if stand is not None:
                stand.dropped = True
            if self._attempt.why is not Why.PARKED:
                self._pending.remove(pending)
                self._reconsider()

    def _allowed_at(self) -> float:
        """Trio time from which the attempt may park, as things stand."""
        if self._calls or not self._pending:
            return math.inf
        allowed_at = max(pending.ready_at for pending in self._pending)
        if self._returned is not None:
            task, returned_at = self._returned
            if all(pending.task is not task for pending in self._pending):
                allowed_at = max(allowed_at, returned_at + self._park_after_s)
        return allowed_at

    def _reconsider(self) -> None:
        allowed_at = self._allowed_at()
        for pending in self._pending:
            if pending.scope is not None:
                pending.scope.deadline = allowed_at
