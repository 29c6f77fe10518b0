"""The metrics of a host: names, histograms made in batches, and a registry of its own."""

from __future__ import annotations

import math

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from runtime.metrics import LAG_BUCKETS_S, Metrics


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """The rendered values by name and label values, these in the order of the labels' names."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            found[sample.name, tuple(sample.labels.values())] = sample.value
    return found


def test_everything_that_is_reported_is_rendered() -> None:
    metrics = Metrics()
    metrics.claimed("audit", 2)
    metrics.claimed("audit")
    metrics.ended("audit", "completed", 4)
    metrics.observe_claim([0.002, 0.004])
    metrics.set_slots(used=3, free=7)
    metrics.leases_released(5)
    metrics.deferred("audit", 11)
    metrics.set_shared(circuits={"open": 12, "half_open": 13}, rates_paused=14)
    metrics.leases_lost()
    metrics.actor_restarted("claim")
    metrics.delivered("applied", 6)
    metrics.observe_delivery("run.completed", [0.2])
    metrics.set_backlog(runs={"queued": 8, "running": 9}, lanes={"lifecycle": 10}, blocked=1)
    found = samples(metrics)
    expected = {
        ("runlane_runs_claimed_total", ("audit",)): 3.0,
        ("runlane_runs_ended_total", ("audit", "completed")): 4.0,
        ("runlane_claim_lag_seconds_count", ()): 2.0,
        ("runlane_slots", ("used",)): 3.0,
        ("runlane_slots", ("free",)): 7.0,
        ("runlane_leases_released_total", ()): 5.0,
        ("runlane_attempts_deferred_total", ("audit",)): 11.0,
        ("runlane_circuits", ("open",)): 12.0,
        ("runlane_circuits", ("half_open",)): 13.0,
        ("runlane_rates_paused", ()): 14.0,
        ("runlane_leases_lost_total", ()): 1.0,
        ("runlane_actor_restarts_total", ("claim",)): 1.0,
        ("runlane_deliveries_total", ("applied",)): 6.0,
        ("runlane_delivery_lag_seconds_count", ("run.completed",)): 1.0,
        ("runlane_runs", ("queued",)): 8.0,
        ("runlane_runs", ("running",)): 9.0,
        ("runlane_lane_backlog", ("lifecycle",)): 10.0,
        ("runlane_lanes_blocked", ()): 1.0,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert found["runlane_claim_lag_seconds_sum", ()] == pytest.approx(0.006)


def test_counters_come_without_the_time_of_their_making() -> None:
    metrics = Metrics()
    metrics.claimed("audit")
    assert b"runlane_runs_claimed_total" in metrics.render()
    assert b"_created" not in metrics.render()
    assert b"# HELP runlane_lane_backlog Lanes that have" in metrics.render()
    # Only ours: the library's own switch is one for the whole process.
    other = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("other", "", registry=other)
    assert b"other_created" in prometheus_client.generate_latest(other)


def test_a_fresh_host_renders_and_says_that_nothing_was_counted() -> None:
    found = samples(Metrics())
    assert found["runlane_leases_lost_total", ()] == 0.0
    assert math.isnan(found["runlane_backlog_age_seconds", ()])


def test_the_counted_figures_have_an_age_and_replace_the_last_ones() -> None:
    now = 100.0
    metrics = Metrics(clock=lambda: now)
    metrics.set_backlog(runs={"queued": 8}, lanes={}, blocked=1, age_s=2.5)
    now = 101.0
    assert samples(metrics)["runlane_backlog_age_seconds", ()] == 3.5
    metrics.set_backlog(runs={"running": 1}, lanes={}, blocked=0)
    found = samples(metrics)
    assert found["runlane_backlog_age_seconds", ()] == 0.0
    assert [key for key in found if key[0] == "runlane_runs"] == [("runlane_runs", ("running",))]


lags = st.floats(-1.0, 1_000.0) | st.sampled_from(LAG_BUCKETS_S)


@given(st.lists(st.lists(lags, max_size=8), max_size=5))
def test_batches_of_lags_count_as_one_by_one(batches: list[list[float]]) -> None:
    metrics = Metrics()
    reference = prometheus_client.Histogram("lag", "", buckets=LAG_BUCKETS_S, registry=None)
    for batch in batches:
        metrics.observe_delivery("run.log", batch)
        for lag in batch:
            reference.observe(max(0.0, lag))
    if not any(batches):
        assert not [
            key for key in samples(metrics) if key[0].startswith("runlane_delivery_lag_seconds_bucket")
        ]
        return
    found = samples(metrics)
    for family in reference.collect():
        for sample in family.samples:
            if sample.name == "lag_bucket":
                key = ("runlane_delivery_lag_seconds_bucket", (sample.labels["le"], "run.log"))
                assert found[key] == sample.value
            elif sample.name in ("lag_count", "lag_sum"):
                name = sample.name.replace("lag", "runlane_delivery_lag_seconds")
                assert found[name, ("run.log",)] == pytest.approx(sample.value)


def test_two_hosts_in_one_process_do_not_meet_and_the_global_registry_is_left_alone() -> None:
    one, two = Metrics(), Metrics()
    one.claimed("audit")
    assert ("runlane_runs_claimed_total", ("audit",)) not in samples(two)
    assert b"runlane" not in prometheus_client.generate_latest(prometheus_client.REGISTRY)
