"""What a host shows of itself: liveness, readiness and metrics.

Owns the figures of one host, gathered from its actors. It asks the database only for the backlog, and only when
somebody reads metrics.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs
import trio

from actors.attempts import Attempts
from actors.core import Supervisor
from actors.delivery import Observe
from actors.listener import Listener
from actors.watchdog import Watchdog
from runtime.metrics import Metrics
from sql.circuits import Shared
from sql.claim import Claimed
from sql.errors import RunlaneError
from sql.settle import Settled, Settlement
from sql.status import Backlog
from sql.types import TERMINAL_STATUSES

log = logging.getLogger("runlane.view")

# Counted again only when somebody looks and the figures are older than this.
_BACKLOG_AGE_S = 15.0
_COUNT_S = 1.0
_OBSERVER_LOG_EVERY_S = 60.0


@attrs.define(eq=False)
class View:
    """The host as ``runtime.health`` serves it, and where actors report what they did."""

    host: Mapping[str, Any]
    metrics_: Metrics
    reports: Reports
    attempts: Attempts
    supervisor: Supervisor
    listener: Listener
    watchdog: Watchdog
    count: Callable[[], Awaitable[tuple[Backlog, Shared]]]
    oldest_snapshot_s: float | None = None
    _counted_at: float | None = None
    _restarts: dict[str, int] = attrs.field(factory=dict)

    # --- as the health server asks -------------------------------------------------------------------

    def alive(self) -> bool:
        """False once an actor has given up: only a restart helps."""
        return all(health.state != "failed" for health in self.supervisor.health.values())

    def readiness(self) -> dict[str, Any]:
        """Whether this host takes work, and why not."""
        actors = {name: health.as_dict() for name, health in self.supervisor.health.items()}
        draining = self.supervisor.stopping.is_set()
        errors = [health for health in self.supervisor.health.values() if health.state == "outage"]
        seen = self.listener.reachable_at
        missing = self.listener.schema_missing
        return {
            "ready": self.supervisor.ready and not missing,
            "draining": draining,
            "database": {
                "reachable": not errors and seen is not None,
                "answered_s_ago": None if seen is None else round(time.monotonic() - seen, 3),
                "last_error": errors[0].last_error if errors else None,
                "oldest_snapshot_s": self.oldest_snapshot_s,
            },
            "schema": {"name": self.host["schema"], "ready": not missing, "missing": list(missing)},
            "actors": actors,
            "slots": {"used": self.attempts.used, "free": self.attempts.slots - self.attempts.used},
            "longest_stall_s": round(self.watchdog.longest_stall_s, 3),
            "host": dict(self.host),
        }

    async def metrics(self) -> bytes:
        """Prometheus' text."""
        await self._count()
        self.reports.flush()
        self.metrics_.set_slots(used=self.attempts.used, free=self.attempts.slots - self.attempts.used)
        for name, health in self.supervisor.health.items():
            for _ in range(health.restarts - self._restarts.get(name, 0)):
                self.metrics_.actor_restarted(name)
            self._restarts[name] = health.restarts
        return self.metrics_.render()

    async def _count(self) -> None:
        now = time.monotonic()
        if self._counted_at is not None and now - self._counted_at < _BACKLOG_AGE_S:
            return
        counted: tuple[Backlog, Shared] | None = None
        with contextlib.suppress(RunlaneError), trio.move_on_after(_COUNT_S):
            counted = await self.count()
        if counted is None:
            return  # the database is away: the figures stay, and their age says so
        backlog, shared = counted
        self._counted_at = now
        self.oldest_snapshot_s = backlog.oldest_snapshot_s
        self.metrics_.set_backlog(
            runs={"queued": backlog.queued, "waiting": backlog.waiting, "running": backlog.running},
            lanes={"lifecycle": backlog.lifecycle, "observability": backlog.observability},
            blocked=backlog.blocked,
        )
        if backlog.kept_age_s is not None:
            self.metrics_.set_kept(backlog.kept, age_s=backlog.kept_age_s)
        self.metrics_.set_shared(
            circuits={"open": shared.circuits_open, "half_open": shared.circuits_half_open},
            rates_paused=shared.rates_paused,
        )


class Reports:
    """Where actors report what happened, run by run; kept as plain counts until somebody reads metrics.

    ``on_delivery`` is the user's: what it raises is logged, once a minute at most, and changes nothing.
    """

    def __init__(
        self,
        metrics: Metrics,
        on_delivery: Observe | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._on_delivery = on_delivery
        self._clock = clock
        self._observer_failures = 0
        self._observer_logged_at = -math.inf
        self._claimed: Counter[str] = Counter()
        self._ended: Counter[tuple[str, str]] = Counter()
        self._deferred: Counter[str] = Counter()
        self._released = 0

    def claimed(self, claims: Sequence[Claimed]) -> None:
        """Claims arrived."""
        self._claimed.update([claimed.play for claimed in claims])
        self._metrics.observe_claim([claimed.lag_s for claimed in claims])

    def settled(self, item: Settlement, answer: Settled) -> None:
        """An attempt ended."""
        if answer.answer != "done":
            return
        if item.outcome in TERMINAL_STATUSES:
            self._ended[item.play, item.outcome] += 1
        elif item.outcome == "released":
            self._released += 1
        elif item.outcome == "deferred":
            self._deferred[item.play] += 1

    def delivered(self, types: Sequence[str], lags_s: Sequence[float]) -> None:
        """Facts were acknowledged."""
        by_type: dict[str, list[float]] = defaultdict(list)
        for type_, lag_s in zip(types, lags_s, strict=True):
            by_type[type_].append(lag_s)
        for type_, lags in by_type.items():
            self._metrics.observe_delivery(type_, lags)
        self._metrics.delivered("acknowledged", len(types))
        if types and self._on_delivery is not None:
            try:
                self._on_delivery(types, lags_s)
            except Exception as exc:  # the observer is the user's: a delivery does not depend on it
                self._observer_failed(exc)

    def _observer_failed(self, error: Exception) -> None:
        self._observer_failures += 1
        now = self._clock()
        if now - self._observer_logged_at >= _OBSERVER_LOG_EVERY_S:
            self._observer_logged_at = now
            log.error(
                "event=delivery_observer_failed failures=%d error=%r",
                self._observer_failures,
                f"{type(error).__name__}: {error}",
                exc_info=error,
            )

    def flush(self) -> None:
        """Bring the metrics up to date."""
        for play, count in self._claimed.items():
            self._metrics.claimed(play, count)
        for (play, status), count in self._ended.items():
            self._metrics.ended(play, status, count)
        for play, count in self._deferred.items():
            self._metrics.deferred(play, count)
        self._metrics.leases_released(self._released)
        self._claimed.clear()
        self._ended.clear()
        self._deferred.clear()
        self._released = 0
