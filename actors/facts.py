"""Facts: what live attempts say, in groups.

Owns when log lines and progress go to the database: a short while after they were said, so that they travel together,
or at once when an attempt is about to end. It never makes a play wait.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from actors.attempts import Attempt, Attempts, Why
from actors.core import Backoff, EndOfMailbox, Life, Mailbox, WakeFlag, commit_in_groups
from actors.hints import Hints
from sql import facts as door
from sql.connection import Session, SessionOptions
from sql.errors import Deadlock, ItemFault, LockTimedOut, SerializationLost
from sql.types import Lane

log = logging.getLogger("runlane.facts")

_BATCH = 500


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
        """Store what these attempts have said; those whose row is locked are returned."""
        busy: list[Attempt] = []
        told_to: set[int] = set()

        async def commit(items: Sequence[Attempt]) -> None:
            sayings = [saying for attempt in items for saying in attempt.number()]
            told_to.update(saying.lane for saying in sayings)
            answers = iter(await door.append(session, sayings) if sayings else [])
            for attempt in items:
                told = [next(answers) for _ in attempt.unstored]
                if "busy" in told:
                    busy.append(attempt)
                    continue
                self._stored(attempt)
                if "lost" in told and self._attempts.get(attempt.run_id) is attempt:
                    self._attempts.lose(attempt, Why.LOST)

        def refuse(attempt: Attempt, fault: ItemFault) -> None:
            if isinstance(fault, (LockTimedOut, Deadlock, SerializationLost)):
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
