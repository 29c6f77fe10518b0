"""Adoption: what an older generation of workers has left to delete is brought over, pass by pass.

Owns when cleanup looks at the older table, and what is said of it. Whatever is wrong with that table holds up nothing
else. It deletes no sandbox.
"""

from __future__ import annotations

import logging
import math
import random

import trio

from sql import adoption as door
from sql.adoption import OldTable
from sql.connection import Session
from sql.errors import DatabaseError, LinkError
from sql.sandboxes import Obligation

log = logging.getLogger("runlane.cleanup")

_AT_ONCE = 1_000


class Adopter:
    """Looks at one older table, every ``every_s`` seconds. ``look_at``: when next, on trio's clock."""

    def __init__(self, old: OldTable, *, every_s: float) -> None:
        self._old = old
        self._every_s = every_s
        self._said = ""
        self.look_at = -math.inf

    async def look(self, session: Session) -> None:
        """One pass, if it is time for one."""
        now = trio.current_time()
        if now < self.look_at:
            return
        # Also when this pass costs the session: the next life begins with what is ours.
        self.look_at = now + self._every_s * random.uniform(0.8, 1.0)
        try:
            done = await door.adopt(session, self._old, limit=_AT_ONCE)
        except LinkError:
            raise
        except DatabaseError as exc:
            self._say("adoption_failed", f"error={str(exc)!r}")
            return
        if done.settled or done.copied:
            self.look_at = now  # there may be more
            log.info(
                "event=obligations_adopted provider=%s table=%s copied=%d settled=%d",
                self._old.provider,
                self._old.table,
                done.copied,
                done.settled,
            )
        if not done.found:
            self._say("adoption_idle", "reason='there is no such table'")
        elif done.malformed:
            self._say("adoption_malformed", f"rows={done.malformed} see='runlane sandboxes adopt --check'")
        else:
            self._said = ""

    async def confirm(
        self, session: Session, item: Obligation, *, outcome: str, routing_domain: str | None
    ) -> str:
        """``sandboxes.confirm``, with the older row."""
        return await door.confirm(session, self._old, item, outcome=outcome, routing_domain=routing_domain)

    def _say(self, event: str, what: str) -> None:
        """Once, until it is another thing."""
        line = f"event={event} provider={self._old.provider} table={self._old.table} {what}"
        if line != self._said:
            log.warning("%s", line)
        self._said = line
