"""Claim: due runs of the plays that this host serves, for its free slots.

Owns when to claim and how many. It never runs a play: executors do, and no claim is kept that no executor has.
"""

from __future__ import annotations

import math
import random

import attrs
import trio

from actors.attempts import Attempts, Start
from actors.core import Backoff, Life, Portion
from actors.hints import Hints
from sql import claim as door
from sql.calls import new_token
from sql.connection import Session, SessionOptions

# The most runs per claim: large enough to make round trips rare, small enough to leave other hosts a share.
_BATCH = 500
# Every fourth turn takes whoever has waited longest.
_OLDEST_EVERY = 4
# What a claim skipped because somebody held it is behind the low-water mark: it is found from the front of the index.
_FRONT_EVERY_S = 0.25
# At most one claim per 10 ms and host when claims do not come back full.
_PACE_S = 0.010


class Claim:
    """``caught_up`` says that the last claim left nothing due: a new run may be admitted straight into a slot."""

    def __init__(
        self,
        options: SessionOptions,
        buckets: door.Buckets,
        attempts: Attempts,
        hints: Hints,
        start: Start,
        *,
        owner: int,
        lease_s: float,
    ) -> None:
        self.caught_up = False
        self._options = options
        self._buckets = buckets
        self._attempts = attempts
        self._hints = hints
        self._start = start
        self._owner = owner
        self._lease_s = lease_s
        self._asked: int | None = None
        self._sent_at = 0.0
        self._turn = 0
        self._stand = door.Stand()
        self._front_at = -math.inf
        self._empty_handed = Backoff(first_s=0.005, max_s=1.0)
        self._portion = Portion(_BATCH)

    async def run(self, life: Life) -> None:
        """Claim until asked to stop."""
        async with life.session(self._options) as session:
            await self._read_back(session)
            life.ready()
            due_at: float | None = trio.current_time()
            while not life.stopping.is_set():
                hinted = await self._hints.wake_claim.wait(due_at)
                life.beat()
                if life.stopping.is_set():
                    return
                if hinted:
                    freed, more = self._hints.freed.clear(), self._hints.runs.clear()
                    if not more and not (freed and not self.caught_up):
                        continue
                if self._attempts.free <= 0:
                    self.caught_up = False
                    due_at = None  # a freed slot wakes us
                    continue
                due_at = await self._claim(session)

    async def _claim(self, session: Session) -> float | None:
        """One claim; the trio time of the next, None for when somebody says so."""
        limit = min(self._attempts.free, self._portion.most)
        self._turn += 1
        self._sent_at = trio.current_time()
        stand = self._stand
        if stand.low_water is None or self._sent_at >= self._front_at + _FRONT_EVERY_S:
            stand = attrs.evolve(stand, low_water=None)
            self._front_at = self._sent_at
        self._asked = new_token()
        # What this claim asks for is taken until the answer is here: admission fills other slots meanwhile.
        self._attempts.reserved += limit
        try:
            with self._portion.adapt():
                answer = await door.claim(
                    session,
                    self._buckets,
                    owner=self._owner,
                    token=self._asked,
                    limit=limit,
                    lease_s=self._lease_s,
                    oldest=self._turn % _OLDEST_EVERY == 0,
                    stand=stand,
                )
        finally:
            self._attempts.reserved -= limit
        self._asked = None
        self._start(answer.items, self._sent_at)
        if answer.items:
            self._hints.started.set()
        self._stand = answer.stand
        got = len(answer.items)
        self.caught_up = got < limit and (answer.next_due_s is None or answer.next_due_s > 0)
        next_at = self._next_turn(got, limit, answer)
        if stand.low_water is None:
            return next_at
        return min(self._front_at + _FRONT_EVERY_S, math.inf if next_at is None else next_at)

    def _next_turn(self, got: int, limit: int, answer: door.Claims) -> float | None:
        now = trio.current_time()
        if got == limit:
            self._empty_handed.reset()
            return now
        if got:
            self._empty_handed.reset()
        if answer.next_due_s is None:
            return None
        if answer.next_due_s <= 0:
            # Somebody's turn is still to come; or something is due that somebody else holds: look again soon, and ever
            # less often.
            return now + (_PACE_S if got or answer.stand.walking else self._empty_handed.next())
        self._empty_handed.reset()
        return now + max(answer.next_due_s, _PACE_S * random.uniform(0.5, 1.0))

    async def _read_back(self, session: Session) -> None:
        """Start what the last life's claim took, if its answer was lost."""
        if self._asked is not None:
            claims = await door.read_back(session, owner=self._owner, token=self._asked)
            self._start([c for c in claims if not self._attempts.holds(c.run_id, c.attempt)], self._sent_at)
            self._asked = None
