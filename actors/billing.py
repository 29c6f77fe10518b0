"""Billing: what ended runs have used is told once, when all of it is settled.

Owns when jobs are finalised. It knows no prices and tells nobody: the records are there to be read.
"""

from __future__ import annotations

import logging
import random

import trio

from actors.core import Life
from actors.hints import Hints
from sql import billing as door
from sql.connection import SessionOptions

log = logging.getLogger("runlane.billing")

_BATCH = 200
_AGAIN_S = 30.0


class Billing:
    """``grace_s``: a sandbox that its provider never gave back counts up to its ceiling and this."""

    def __init__(self, options: SessionOptions, hints: Hints, *, grace_s: float) -> None:
        self._options = options
        self._hints = hints
        self._grace_s = grace_s

    async def run(self, life: Life) -> None:
        """Finalise until asked to stop."""
        async with life.session(self._options) as session:
            life.ready()
            look_at: float | None = None
            while True:
                await self._hints.billing.wait(look_at)
                if life.stopping.is_set():
                    return
                life.beat()
                done = await door.finalise(session, limit=_BATCH, grace_s=self._grace_s, again_s=_AGAIN_S)
                if done.finalised:
                    log.info("event=billed runs=%d", done.finalised)
                look_at = None
                if done.next_due_s is not None:
                    look_at = trio.current_time() + max(0.0, done.next_due_s) + random.uniform(0.0, 0.5)
