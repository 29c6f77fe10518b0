"""Listener: the host's ear and clock.

Owns the LISTEN connection, the notifications this host sends, and one regular read of what is due next in every queue,
which is both the clock of a host whose notifications were lost and the probe of its connection. It never does the work
that it wakes somebody for.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence

import trio

from actors.core import Life, WakeFlag
from actors.hints import Hints
from sql import deployment, due, runners
from sql.calls import channel
from sql.connection import Session, SessionOptions

# Committing a notification takes a lock of the whole server: hosts send at most one batch per moment.
_PACE_S = 0.020
# What is due later than this is found by the next regular read.
_SLACK_S = 0.001


class Listener:
    """``reachable_at`` is the monotonic time of the last answer: the host's view of the database's health.

    ``schema_missing`` names what the schema lacked when the connection was made.

    ``notify`` False neither sends nor hears notifications.
    """

    def __init__(
        self,
        options: SessionOptions,
        hints: Hints,
        *,
        host: int,
        buckets: Sequence[int],
        receivers: Sequence[str],
        providers: Sequence[str],
        backstop_s: float,
        notify: bool,
    ) -> None:
        self.reachable_at: float | None = None
        self.schema_missing: tuple[str, ...] = ()
        self._options = options
        self._hints = hints
        self._host = host
        self._buckets = buckets
        self._receivers = receivers
        self._providers = providers
        self._backstop_s = backstop_s
        self._notify = notify
        self._kinds = {channel(options.schema, kind): kind for kind in due.CHANNELS}

    async def run(self, life: Life) -> None:
        """Listen, send and look until asked to stop."""
        lost = WakeFlag()

        def on_lost() -> None:
            lost.set()
            self._hints.to_send.set()

        async with life.session(self._options, on_lost=on_lost) as session:
            if self._notify:
                await session.listen(self._kinds, self._heard)
            self.schema_missing = (await deployment.check(session)).missing
            # Whatever was missed while nobody listened is found by looking, after LISTEN is in force.
            look_at = trio.current_time()
            pace_until = look_at
            life.ready()
            while True:
                if life.stopping.is_set():
                    await self._send(session)
                    return
                now = trio.current_time()
                if now >= look_at:
                    await self._look(session)
                    look_at = now + self._backstop_s * random.uniform(0.85, 1.0)
                life.beat()
                await self._hints.to_send.wait(look_at)
                if lost.is_set:
                    await self._look(session)  # raises: the connection is gone
                if not life.stopping.is_set():
                    await trio.sleep_until(pace_until)
                    await self._send(session)
                    pace_until = trio.current_time() + _PACE_S

    def _heard(self, name: str) -> None:
        self._hints.here(self._kinds[name])

    async def _send(self, session: Session) -> None:
        kinds = self._hints.take_outgoing()
        if kinds and self._notify:
            try:
                await due.notify(session, kinds)
            except BaseException:
                for kind in kinds:
                    self._hints.elsewhere(kind)  # the next life sends them
                raise

    async def _look(self, session: Session) -> None:
        seen = await due.next_due(session, host=self._host, buckets=self._buckets, receivers=self._receivers)
        self.reachable_at = time.monotonic()
        hints = self._hints
        if _soon(seen.runs_s, self._backstop_s):
            hints.runs.set()
        if _soon(seen.lifecycle_s, self._backstop_s):
            hints.lanes.set()
        if _soon(seen.observability_s, self._backstop_s):
            hints.logs.set()
        if _soon(seen.leases_s, self._backstop_s):
            hints.timers.set()
        if _soon(seen.schedules_s, self._backstop_s):
            hints.schedules.set()
        if _soon(seen.chores_s, 0.0):
            hints.chores.set()
        if seen.cancellations:
            hints.control.set()
        if seen.wakes:
            hints.wakes.set()
        hints.terminals.set()
        if self._providers:
            await self._look_detached(session)

    async def _look_detached(self, session: Session) -> None:
        seen = await runners.next_due(session, self._providers)
        if _soon(seen.runners_s, self._backstop_s):
            self._hints.runners.set()
        if _soon(seen.sandboxes_s, self._backstop_s):
            self._hints.cleanup.set()
        if _soon(seen.billing_s, self._backstop_s):
            self._hints.billing.set()


def _soon(seconds: float | None, backstop_s: float) -> bool:
    """Whether somebody has to look before the next regular read."""
    return seconds is not None and seconds <= backstop_s + _SLACK_S and not math.isnan(seconds)
