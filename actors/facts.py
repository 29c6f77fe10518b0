"""Facts: what live attempts say, in groups.

Owns when log lines and progress go to the database: a short while after they were said, so that they travel together,
or at once when an attempt is about to end. It never makes a play wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from actors.attempts import Attempt, Attempts, Why
from actors.core import (
    PASSING_FAULTS,
    Backoff,
    EndOfMailbox,
    Life,
    Mailbox,
    Portion,
    WakeFlag,
    commit_in_groups,
)
from actors.hints import Hints
from sql import facts as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault
from sql.types import Lane

log = logging.getLogger("runlane.facts")

_BATCH = 500
_MOST_SAYINGS = 5_000


class Facts:
    """Attempts with something to say arrive in ``mailbox``, each once per flush; ``hurry`` flushes at once."""

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Attempt],
        attempts: Attempts,
        hints: Hints,
        *,
        flush_s: float,
    ) -> None:
        self.hurry = WakeFlag()
        self._options = options
        self._mailbox = mailbox
        self._attempts = attempts
        self._hints = hints
        self._flush_s = flush_s
        self._locked = Backoff(first_s=0.002, max_s=0.25)
        self._portion = Portion(_MOST_SAYINGS)

    async def run(self, life: Life) -> None:
        """Store what is said until the mailbox ends."""
        async with life.session(self._options) as session:
            life.ready()
            busy: list[Attempt] = []
            while True:
                try:
                    batch = await self._take(busy)
                except EndOfMailbox:
                    return
                life.beat()
                busy = await self._store(session, batch)

    async def _take(self, busy: list[Attempt]) -> list[Attempt]:
        if busy:
            await trio.sleep(self._locked.next())
            return busy + self._mailbox.take_nowait(_BATCH)
        self._locked.reset()
        first = await self._mailbox.take(1)
        if not self._mailbox.closed:
            await self.hurry.wait(trio.current_time() + self._flush_s)
        return first + self._mailbox.take_nowait(_BATCH)

    async def _store(self, session: Session, batch: Sequence[Attempt]) -> list[Attempt]:
        """Store what these attempts have said; those whose row is locked, or that have more to say, are returned."""
        busy: list[Attempt] = []
        told_to: set[int] = set()

        async def commit(items: Sequence[Attempt]) -> None:
            room = self._portion.most
            parts = []
            for attempt in items:
                part = attempt.number()[:room]
                room -= len(part)
                parts.append(part)
            sayings = [saying for part in parts for saying in part]
            told_to.update(saying.lane for saying in sayings)
            with self._portion.adapt():
                answers = iter(await door.append(session, sayings) if sayings else [])
            for attempt, part in zip(items, parts, strict=True):
                told = [next(answers) for _ in part]
                if "lost" in told:
                    self._stored(attempt)
                    if self._attempts.get(attempt.run_id) is attempt:
                        self._attempts.lose(attempt, Why.LOST)
                elif "busy" in told:
                    busy.append(attempt)
                elif len(part) < len(attempt.unstored):
                    attempt.mark_stored(len(part))
                    self._locked.reset()
                    busy.append(attempt)
                else:
                    self._stored(attempt)

        def refuse(attempt: Attempt, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                busy.append(attempt)
                return
            log.error("event=unstorable_facts run=%s error=%r", attempt.run_id, str(fault))
            self._stored(attempt)

        await commit_in_groups(batch, commit, fail=refuse)
        if Lane.LIFECYCLE in told_to:
            self._hints.lanes.set()
        if Lane.OBSERVABILITY in told_to:
            self._hints.logs.set()
        return busy

    def _stored(self, attempt: Attempt) -> None:
        self._mailbox.done([attempt])
        attempt.mark_stored()
        attempt.queued = bool(attempt.waiting)
        if attempt.queued and not self._mailbox.closed:
            # Said while this flush was under way.
            self._mailbox.send_nowait(attempt)
