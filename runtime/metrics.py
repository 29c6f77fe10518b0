"""What a host counts, in Prometheus' terms.

Owns the names, labels and buckets. It keeps numbers in memory only and never asks the database: whoever
learns something reports it here. Lags are measured on the database clock by the caller.

Labels come from the host's own plays and from fixed sets, never from data, so that their number stays small.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sql.types import FACT_TYPES

CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The content type of ``Metrics.render()``."""

LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0)
"""Upper bounds of the lag histograms, from a millisecond to five minutes."""


class _LagHistogram(Collector):
    """A histogram that takes many observations in one call: a sort and one bisection per bucket.

    ``prometheus_client``'s own takes a lock and a Python call for each.
    """

    def __init__(self, name: str, documentation: str, label: str | None = None) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = [] if label is None else [label]
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}

    def observe(self, label_value: str, values: Sequence[float]) -> None:
        """Add ``values`` (seconds); what is below zero counts as zero."""
        ordered = sorted(value if value > 0.0 else 0.0 for value in values)
        below = [bisect_right(ordered, bound) for bound in LAG_BUCKETS_S]
        added = [upper - lower for lower, upper in pairwise([0, *below, len(ordered)])]
        with self._lock:
            counts = self._counts.get(label_value, [0] * len(added))
            self._counts[label_value] = [old + new for old, new in zip(counts, added, strict=True)]
            self._sums[label_value] = self._sums.get(label_value, 0.0) + sum(ordered)

    def collect(self) -> Iterator[Metric]:
        """The histogram in Prometheus' form, with cumulative buckets."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        with self._lock:
            snapshot = [(label, counts, self._sums[label]) for label, counts in self._counts.items()]
        for label, counts, total in snapshot:
            running = 0
            buckets: list[tuple[str, float]] = []
            for bound, count in zip([*map(str, LAG_BUCKETS_S), "+Inf"], counts, strict=True):
                running += count
                buckets.append((bound, float(running)))
            family.add_metric([label] if self._labels else [], buckets, total)
        yield family


class _Registry(CollectorRegistry):
    """A registry without the ``_created`` series of counters: in the text format they are metrics of their own,
    which no query here needs."""

    def collect(self) -> Iterator[Metric]:
        """Every metric."""
        for metric in super().collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Metrics:
    """The metrics of one host, in a registry of its own; two hosts in one process do not meet."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = _Registry()
        self._clock = clock
        self._counted_at: float | None = None
        self._kept_at: float | None = None
        registry = self.registry
        self._runs_claimed = Counter(
            "runlane_runs_claimed", "Attempts that this host claimed.", ["play"], registry=registry
        )
        self._runs_ended = Counter(
            "runlane_runs_ended",
            "Runs that ended on this host.",
            ["play", "status"],
            registry=registry,
        )
        self._attempts_deferred = Counter(
            "runlane_attempts_deferred",
            "Attempts that this host put back for want of capacity or of a dependency.",
            ["play"],
            registry=registry,
        )
        self._actor_restarts = Counter(
            "runlane_actor_restarts", "Restarts of an actor after an error.", ["actor"], registry=registry
        )
        self._leases_released = Counter(
            "runlane_leases_released", "Leases handed back before they ended.", registry=registry
        )
        self._leases_lost = Counter(
            "runlane_leases_lost", "Leases found lost: expired, taken over or cancelled.", registry=registry
        )
        self._deliveries = Counter(
            "runlane_deliveries",
            "Deliveries to the ledger by outcome.",
            ["outcome"],
            registry=registry,
        )
        self._lane_backlog = Gauge(
            "runlane_lane_backlog", "Lanes that have facts to deliver.", ["lane"], registry=registry
        )
        self._lanes_blocked = Gauge(
            "runlane_lanes_blocked", "Lanes that wait for an operator.", registry=registry
        )
        self._runs = Gauge(
            "runlane_runs",
            "Runs by status, as last counted; see runlane_backlog_age_seconds.",
            ["status"],
            registry=registry,
        )
        self._circuits = Gauge(
            "runlane_circuits", "Circuits that are not closed, by state.", ["state"], registry=registry
        )
        self._rates_paused = Gauge(
            "runlane_rates_paused", "Rate scopes that a provider's refusal has paused.", registry=registry
        )
        age = Gauge(
            "runlane_backlog_age_seconds",
            "Age of the figures of runlane_runs, runlane_circuits and the like.",
            registry=registry,
        )
        age.set_function(self._age_s)
        self._runs_kept = Gauge(
            "runlane_runs_kept",
            "All runs that are there by status, as maintenance last counted them; see runlane_runs_kept_age_seconds.",
            ["status"],
            registry=registry,
        )
        kept_age = Gauge(
            "runlane_runs_kept_age_seconds", "Age of the figures of runlane_runs_kept.", registry=registry
        )
        kept_age.set_function(self._kept_age_s)
        self._maintained = Counter(
            "runlane_maintained", "What this host's maintenance has done.", ["what"], registry=registry
        )
        self._slots = Gauge("runlane_slots", "Slots of this host.", ["state"], registry=registry)
        self._orphan_sandboxes = Gauge(
            "runlane_orphan_sandboxes",
            "Sandboxes at a provider that nobody here answers for, as last counted.",
            ["provider"],
            registry=registry,
        )
        self._claim_lag = _LagHistogram(
            "runlane_claim_lag_seconds", "From due to claimed, on the database clock."
        )
        self._delivery_lag = _LagHistogram(
            "runlane_delivery_lag_seconds",
            "From a fact's commit to its acknowledgement, on the database clock.",
            "type",
        )
        self._fire_lag = _LagHistogram(
            "runlane_fire_lag_seconds", "From a schedule's fire to its run, on the database clock."
        )
        registry.register(self._claim_lag)
        registry.register(self._fire_lag)
        registry.register(self._delivery_lag)

    # --- runs ---

    def claimed(self, play: str, count: int = 1) -> None:
        """This host claimed ``count`` attempts of a play."""
        self._runs_claimed.labels(play).inc(count)

    def observe_claim(self, lags_s: Sequence[float]) -> None:
        """How long claimed runs had been due, in seconds."""
        if lags_s:
            self._claim_lag.observe("", lags_s)

    def fired(self, lags_s: Sequence[float]) -> None:
        """How late this host made the runs of schedules, in seconds; those of missed fires are late."""
        if lags_s:
            self._fire_lag.observe("", lags_s)

    def ended(self, play: str, status: str, count: int = 1) -> None:
        """``count`` runs of a play ended here with a terminal status."""
        self._runs_ended.labels(play, status).inc(count)

    def deferred(self, play: str, count: int = 1) -> None:
        """``count`` attempts of a play were deferred."""
        self._attempts_deferred.labels(play).inc(count)

    def set_slots(self, *, used: int, free: int) -> None:
        """The slots of this host now."""
        self._slots.labels("used").set(used)
        self._slots.labels("free").set(free)

    def orphans(self, provider: str, names: Sequence[str]) -> None:
        """Sandboxes that exist at a provider and have no obligation in the database."""
        self._orphan_sandboxes.labels(provider).set(len(names))

    # --- leases and actors ---

    def leases_released(self, count: int = 1) -> None:
        """``count`` leases were handed back."""
        self._leases_released.inc(count)

    def leases_lost(self, count: int = 1) -> None:
        """``count`` leases turned out to be lost."""
        self._leases_lost.inc(count)

    def actor_restarted(self, actor: str) -> None:
        """An actor was restarted after an error."""
        self._actor_restarts.labels(actor).inc()

    # --- delivery ---

    def delivered(self, outcome: str, count: int = 1) -> None:
        """``count`` deliveries ended as ``outcome``: one word of a fixed set, such as ``applied``."""
        self._deliveries.labels(outcome).inc(count)

    def observe_delivery(self, type_name: str, lags_s: Sequence[float]) -> None:
        """The lags of acknowledged facts of one type, in seconds; made for many at once."""
        if lags_s:
            self._delivery_lag.observe(type_name if type_name in FACT_TYPES else "other", lags_s)

    # --- figures that somebody counted in the database ---

    def set_backlog(
        self, *, runs: Mapping[str, int], lanes: Mapping[str, int], blocked: int, age_s: float = 0.0
    ) -> None:
        """Runs by status, undelivered facts by lane and blocked lanes, as counted ``age_s`` seconds ago.

        Replaces the figures of the last call: a status or lane that is missing is zero.
        """
        for gauge, figures in ((self._runs, runs), (self._lane_backlog, lanes)):
            gauge.clear()
            for label, count in figures.items():
                gauge.labels(label).set(count)
        self._lanes_blocked.set(blocked)
        self._counted_at = self._clock() - age_s

    def set_kept(self, runs: Mapping[str, int], *, age_s: float) -> None:
        """All runs by status, as maintenance counted them ``age_s`` seconds ago."""
        self._runs_kept.clear()
        for status, count in runs.items():
            self._runs_kept.labels(status).set(count)
        self._kept_at = self._clock() - age_s

    def maintained(self, what: str, count: int) -> None:
        """Maintenance did ``what`` so often: one word of a fixed set, such as ``runs_deleted``."""
        self._maintained.labels(what).inc(count)

    def set_shared(self, *, circuits: Mapping[str, int], rates_paused: int) -> None:
        """Circuits by state and paused rate scopes, as counted together with the backlog."""
        for state, count in circuits.items():
            self._circuits.labels(state).set(count)
        self._rates_paused.set(rates_paused)

    def _age_s(self) -> float:
        return self._since(self._counted_at)

    def _kept_age_s(self) -> float:
        return self._since(self._kept_at)

    def _since(self, moment: float | None) -> float:
        return float("nan") if moment is None else max(0.0, self._clock() - moment)

    def render(self) -> bytes:
        """Everything in the text format; its content type is ``CONTENT_TYPE``."""
        return generate_latest(self.registry)
