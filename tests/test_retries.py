"""What an error of a play means for its run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime import (
    CapacityUnavailable,
    DependencyUnavailable,
    Fatal,
    InputRefused,
    PayloadRefused,
    Retry,
    RunlaneError,
    play,
)
from runtime.plays import Play
from runtime.retries import Verdict, backoff_s, judge


def policy(**options: Any) -> Play:
    @play("p", **options)
    async def body(ctx: Any) -> None: ...

    return body


def verdict(failure: BaseException, failures: int = 0, **options: Any) -> Verdict:
    return judge(policy(**options), failure, failures, outage_max_s=900.0)


def test_retries_are_counted_and_then_the_run_has_failed() -> None:
    outcomes = [verdict(ValueError("no"), failures, retries=2).outcome for failures in range(3)]
    assert outcomes == ["retried", "retried", "failed"]
    payload = json.loads(verdict(ValueError("no"), 2, retries=2).payload)
    assert (payload["failures"], payload["error"]["message"]) == (3, "no")


@pytest.mark.parametrize(
    "failure",
    [
        Fatal("no such account"),
        KeyError("subclass of LookupError"),
        PayloadRefused("output", "too large"),
        ExceptionGroup("of a nursery", [ValueError(), ExceptionGroup("inner", [Fatal("no")])]),
        ExceptionGroup("of a nursery", [Retry(after=3), KeyError()]),
        ExceptionGroup("mixed", [Fatal("no"), CapacityUnavailable()]),
    ],
)
def test_final_errors_are_not_tried_again(failure: Exception) -> None:
    assert verdict(failure, retries=9, final=LookupError).outcome == "failed"


def test_the_cause_of_a_fatal_error_is_kept() -> None:
    try:
        try:
            raise ValueError("the account is gone")
        except ValueError as exc:
            raise Fatal("no such account") from exc
    except Fatal as failure:
        error = json.loads(verdict(failure, retries=9).payload)["error"]
    assert error["message"] == "no such account"
    assert "ValueError: the account is gone" in error["traceback"]


def test_backoff_grows_to_its_limit_and_jitter_stays_in_its_part() -> None:
    options = {"backoff_s": 2.0, "backoff_factor": 3.0, "backoff_max_s": 50.0}
    exact = policy(**options, backoff_jitter=0)
    assert [backoff_s(exact, n) for n in (0, 1, 2, 3, 10_000)] == [2.0, 6.0, 18.0, 50.0, 50.0]
    drawn = [backoff_s(policy(**options, backoff_jitter=0.25), 1) for _ in range(200)]
    assert 4.5 <= min(drawn) < 4.8 < 5.7 < max(drawn) <= 6.0
    assert max(drawn) - min(drawn) > 1.0


def test_a_retry_may_choose_its_delay() -> None:
    assert verdict(Retry(after=42), retries=1).delay_s == 42.0
    assert verdict(Retry("busy"), retries=1, backoff_s=3, backoff_jitter=0).delay_s == 3.0
    assert verdict(ExceptionGroup("two", [Retry(after=4), Retry(after=7)]), retries=1).delay_s == 7.0
    assert verdict(Retry(after=42)).outcome == "failed"


def test_deferrals_cost_nothing_and_only_an_outage_is_bounded() -> None:
    free = verdict(CapacityUnavailable("no sandbox", retry_after=10))
    assert (free.outcome, free.outage_max_s) == ("deferred", None)
    assert 10.0 <= free.delay_s <= 12.0
    assert json.loads(free.payload)["error"]["kind"] == "capacity_unavailable"

    out = verdict(DependencyUnavailable("crm", retry_after=10), final=Exception)
    assert (out.outcome, out.outage_max_s) == ("deferred", 900.0)
    error = json.loads(out.payload)["error"]
    assert (error["kind"], error["dependency"]) == ("dependency_unavailable", "crm")
    assert error["message"] == "crm: is unavailable"
    over = json.loads(out.overdue)
    assert over["failures"] == 1
    assert over["error"]["message"].endswith("the outage has lasted longer than outage_max_s=900")
    assert verdict(DependencyUnavailable("crm"), outage_max_s=5).outage_max_s == 5.0


def test_a_group_is_a_deferral_only_if_all_of_it_is() -> None:
    both = verdict(ExceptionGroup("g", [CapacityUnavailable(), DependencyUnavailable("crm", retry_after=60)]))
    assert (both.outcome, both.outage_max_s) == ("deferred", 900.0)
    assert both.delay_s >= 60.0
    assert verdict(ExceptionGroup("g", [CapacityUnavailable(), ValueError()])).outcome == "failed"


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), True, "5", None, 2_592_001])
def test_bad_delays_are_refused_by_name(seconds: Any) -> None:
    with pytest.raises(InputRefused, match=r"^retry_after: must be a number of seconds from 0\.1"):
        CapacityUnavailable("no", retry_after=seconds)
    with pytest.raises(InputRefused, match="retry_after"):
        DependencyUnavailable("crm", retry_after=seconds)
    if seconds is not None:
        with pytest.raises(InputRefused, match="after"):
            Retry(after=seconds)


def test_they_are_errors_of_ours() -> None:
    for error in (Fatal("a"), Retry(), CapacityUnavailable(), DependencyUnavailable("a")):
        assert isinstance(error, RunlaneError)
