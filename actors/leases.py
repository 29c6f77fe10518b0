"""Leases: this host's live attempts keep theirs.

Owns renewal by explicit list, what a lost lease or a recorded cancellation means for the play, and the comparison of
what the database believes with what runs. Last to stop, so that plays in their grace period keep their leases. A play
whose lease cannot be renewed in time is stopped by its own scope's deadline, database or not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from actors.attempts import Attempt, Attempts, Why
from actors.core import Backoff, Life, Mailbox
from actors.hints import Hints
from sql import claim, leases, settle
from sql.connection import Session, SessionOptions
from sql.settle import Settlement

log = logging.getLogger("runlane.leases")

_BATCH = 500
# A hint that somebody was cancelled renews at once, but not more often than this.
_PACE_S = 0.025


class Leases:
    """``on_lost(count)`` is told of leases found gone."""

    def __init__(
        self,
        options: SessionOptions,
        attempts: Attempts,
        hints: Hints,
        endings: Mailbox[Settlement],
        *,
        owner: int,
        lease_s: float,
        renew_every_s: float,
        on_lost: Callable[[int], None],
    ) -> None:
        self._options = options
        self._attempts = attempts
        self._hints = hints
        self._endings = endings
        self._owner = owner
        self._lease_s = lease_s
        self._renew_every_s = renew_every_s
        self._on_lost = on_lost
        self._strangers: frozenset[tuple[str, int]] = frozenset()
        self._compared_at = -float("inf")

    async def run(self, life: Life) -> None:
        """Renew until asked to stop."""
        async with life.session(self._options) as session:
            life.ready()
            while True:
                if not life.stopping.is_set():
                    await self._hints.wake_leases.wait(self._next_pass())
                life.beat()
                if life.stopping.is_set():
                    await self._release_all(session)
                    return
                now = trio.current_time()
                hinted = self._hints.renew.clear()
                if not len(self._attempts) or not (hinted or now >= (self._next_pass() or now)):
                    continue  # a new attempt: its turn comes
                await self._renew(session, now if hinted else now - self._renew_every_s * 0.75)
                if now - self._compared_at >= self._renew_every_s:
                    self._compared_at = now
                    await self._compare(session)
                await trio.sleep(_PACE_S)

    async def _release_all(self, session: Session) -> None:
        """Everybody else has stopped: whatever the database still believes to run here goes back now."""
        locked = Backoff(first_s=0.005, max_s=0.25)
        while held := await claim.held(session, owner=self._owner):
            back = [Settlement(run_id, number, token, "released") for run_id, number, token in held]
            answers = await settle.settle(session, back)
            released = sum(answer.answer == "done" for answer in answers)
            log.warning("event=released_at_stop count=%d locked=%d", released, len(held) - released)
            self._hints.elsewhere("runs")
            for attempt in self._attempts:
                self._attempts.remove(attempt)
            if released == len(held):
                return
            await trio.sleep(locked.next())

    def _next_pass(self) -> float | None:
        """When the first attempt has to be renewed; None while there is none."""
        oldest = min((attempt.renewed for attempt in self._attempts), default=None)
        return None if oldest is None else oldest + self._renew_every_s

    async def _renew(self, session: Session, older_than: float) -> None:
        todo = self._attempts.due_for_renewal(older_than)
        for start in range(0, len(todo), _BATCH):
            batch = todo[start : start + _BATCH]
            sent_at = trio.current_time()
            answers = await leases.renew(
                session, [attempt.claimed for attempt in batch], lease_s=self._lease_s
            )
            for attempt, answer in zip(batch, answers, strict=True):
                self._answered(attempt, answer, sent_at)

    def _answered(self, attempt: Attempt, answer: leases.Renewal, sent_at: float) -> None:
        if answer.cancel and answer.answer != "lost":
            self._hints.control.set()
        if answer.answer == "renewed":
            self._attempts.renewed(attempt, sent_at)
        elif answer.answer == "busy":
            # Its lease stands as it was: ask again soon, not at once.
            attempt.renewed = sent_at - 0.9 * self._renew_every_s
        elif answer.answer == "lost" and self._attempts.get(attempt.run_id) is attempt and attempt.holds_slot:
            if answer.cancel:  # by somebody elsewhere: nothing is wrong
                self._attempts.lose(attempt, Why.CANCELLED)
                return
            log.warning("event=lease_lost run=%s attempt=%d", attempt.run_id, attempt.attempt)
            self._on_lost(1)
            self._attempts.lose(attempt, Why.LOST)

    async def _compare(self, session: Session) -> None:
        """Hand back what the database believes to run here and does not.

        Only what was missing here twice in a row: between a claim's commit and its answer there is nothing wrong.
        """
        held = await claim.held(session, owner=self._owner)
        strangers = frozenset(
            (run_id, number) for run_id, number, _ in held if not self._attempts.holds(run_id, number)
        )
        for run_id, number, token in held:
            if (run_id, number) in strangers & self._strangers:
                log.warning("event=lease_without_task run=%s attempt=%d", run_id, number)
                self._endings.send_nowait(Settlement(run_id, number, token, "released"))
        self._strangers = strangers
