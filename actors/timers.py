"""Timers: leases that have run out, whoever held them.

Owns when to look for expired leases. Every host looks; the database lets each row be taken once. (Claims take due
sleepers directly.)
"""

from __future__ import annotations

import logging
import random

import trio

from actors.core import Backoff, Life
from actors.hints import Hints
from sql import timers as door
from sql.connection import SessionOptions

log = logging.getLogger("runlane.timers")

_BATCH = 500


class Timers:
    """``crash_cap`` counts for plays that no host has registered."""

    def __init__(self, options: SessionOptions, hints: Hints, *, crash_cap: int) -> None:
        self._options = options
        self._hints = hints
        self._crash_cap = crash_cap

    async def run(self, life: Life) -> None:
        """Expire leases until asked to stop."""
        held = Backoff(first_s=0.005, max_s=1.0)
        async with life.session(self._options) as session:
            life.ready()
            look_at: float | None = None
            while not life.stopping.is_set():
                await self._hints.timers.wait(look_at)
                life.beat()
                if life.stopping.is_set():
                    return
                pass_ = await door.expire(session, limit=_BATCH, crash_cap=self._crash_cap)
                if pass_.expired:
                    log.warning("event=leases_expired count=%d failed=%d", pass_.expired, pass_.failed)
                    self._hints.everywhere(["runs"])
                    self._hints.lanes.set()
                    if pass_.failed:
                        self._hints.everywhere(["terminals", "wakes"])
                look_at = self._next_look(pass_, held)

    def _next_look(self, pass_: door.Expiry, held: Backoff) -> float | None:
        if pass_.next_due_s is None:
            return None
        now = trio.current_time()
        if pass_.next_due_s <= 0:
            # A full batch: more at once. Otherwise somebody holds the row, or another host is at it.
            return now if pass_.expired + pass_.pushed >= _BATCH else now + held.next()
        held.reset()
        # Hosts share this work: a little apart, so that they do not all look in the same millisecond.
        return now + pass_.next_due_s + random.uniform(0.0, 0.02)
