"""Executors: one task per live attempt.

Owns the tasks that run plays and what happens when they stop: an ending goes to settle, a shutdown gives every lease
back. It never touches the database, so no lost connection ends a play.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence

import trio

from actors.attempts import Attempt, Attempts, Why
from actors.core import Life, Mailbox, Probe, bounded_cleanup
from sql.claim import Claimed
from sql.settle import Settlement

log = logging.getLogger("runlane.executors")

Execute = Callable[[Attempt], Awaitable[Settlement | None]]
"""Runs the play of an attempt inside ``attempt.scope`` and says how it ended; None: the fence is gone, there is
nothing to settle."""


class Executors:
    """Stop: running plays get until the stop budget's end, then each is cancelled and its lease handed back.

    A cancelled play has ``cleanup_s`` to end; after that its lease goes back although it still runs.
    """

    def __init__(
        self,
        attempts: Attempts,
        execute: Execute,
        endings: Mailbox[Settlement],
        *,
        cleanup_s: float,
        on_start: Callable[[Sequence[Claimed]], None],
    ) -> None:
        self.started = Probe("executors.started")
        self._attempts = attempts
        self._execute = execute
        self._endings = endings
        self._cleanup_s = cleanup_s
        self._on_start = on_start
        self._nursery: trio.Nursery | None = None
        # Not that of whoever starts a task: a play would find the loop of that actor's session in it, and could use it
        # until the connection is replaced.
        self._context = contextvars.copy_context()
        self._idle = trio.Event()
        self._tasks = 0

    def start(self, claims: Sequence[Claimed], sent_at: float) -> None:
        """Start a task for each claim. A claim that cannot be started is handed back at once."""
        if claims:
            self._on_start(claims)
        for claimed in claims:
            attempt = self._attempts.add(claimed, sent_at)
            if self._nursery is None:
                self._release(attempt)
            else:
                self._tasks += 1
                self._context.run(self._nursery.start_soon, self._run, attempt)

    async def run(self, life: Life) -> None:
        """Keep the tasks until asked to stop, then until they have ended."""
        if life.number > 1:
            # The tasks of the last life are gone; their leases must not wait for their end.
            for attempt in self._attempts:
                if attempt.holds_slot:
                    self._release(attempt)
        self._tasks = 0
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                self._attempts.accept(True)
                life.ready()
                try:
                    await life.stopping.wait()
                    self._close()
                    await self._all_ended()
                except trio.Cancelled:
                    self._close()
                    self._stop_all()
                    with bounded_cleanup(self._cleanup_s):
                        await self._all_ended()
                    for attempt in self._attempts:
                        if attempt.holds_slot:
                            log.warning("event=play_ignores_cancellation run=%s", attempt.run_id)
                            self._release(attempt)
                    raise
        finally:
            self._close()

    def _close(self) -> None:
        self._nursery = None
        self._attempts.accept(False)

    async def _all_ended(self) -> None:
        while self._tasks:
            self._idle = trio.Event()
            await self._idle.wait()

    def _stop_all(self) -> None:
        for attempt in self._attempts:
            if attempt.holds_slot:
                attempt.stop(Why.SHUTDOWN)

    # A Ctrl-C that lands in a play would end one attempt and leave the others' leases: the main task gets it.
    @trio.lowlevel.enable_ki_protection
    async def _run(self, attempt: Attempt) -> None:
        self.started.hit(attempt)
        settled = False
        try:
            ending = await self._execute(attempt)
            if ending is None:
                self._attempts.remove(attempt)
            else:
                self._settle(attempt, ending)
            settled = True
        finally:
            if not settled and attempt.holds_slot:
                self._release(attempt)
            self._attempts.ended(attempt)
            self._tasks -= 1
            if not self._tasks:
                self._idle.set()

    def _release(self, attempt: Attempt) -> None:
        attempt.stop(Why.SHUTDOWN)
        self._settle(attempt, released(attempt))

    def _settle(self, attempt: Attempt, ending: Settlement) -> None:
        if not attempt.holds_slot:
            return  # handed back or lost meanwhile: what its play says now counts for nothing
        if self._attempts.get(attempt.run_id) is attempt:
            self._endings.send_nowait(ending)
        self._attempts.give_up_slot(attempt)


def released(attempt: Attempt) -> Settlement:
    """The ending that hands a lease back and charges nothing."""
    return Settlement(attempt.run_id, attempt.attempt, attempt.token, "released")
