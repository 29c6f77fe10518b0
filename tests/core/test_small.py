"""Backoff, budgets, groups, probes, health, cleanup."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from actors.core import (
    ActorHealth,
    Backoff,
    Budget,
    Probe,
    bounded_cleanup,
    hidden_by,
    leaves,
    only,
)

# --- backoff ------------------------------------------------------------------------------------------


def test_backoff_doubles_up_to_its_maximum_and_starts_again() -> None:
    backoff = Backoff(first_s=1, max_s=5, jitter=0)
    assert [backoff.next() for _ in range(5)] == [1, 2, 4, 5, 5]
    backoff.reset()
    assert backoff.next() == 1


def test_backoff_jitter_only_shortens() -> None:
    assert Backoff(first_s=4, max_s=9, jitter=0.5, random=lambda: 1.0).next() == 2
    assert Backoff(first_s=4, max_s=9, jitter=0.5, random=lambda: 0.0).next() == 4


def test_backoff_survives_a_very_long_outage() -> None:
    backoff = Backoff(first_s=0.1, max_s=5, jitter=0)
    for _ in range(5000):
        delay = backoff.next()
    assert delay == 5


# --- budgets ------------------------------------------------------------------------------------------


async def test_budget_shares_what_is_left(autojump_clock: trio.testing.MockClock) -> None:
    budget = Budget(10)
    assert budget.share(4) == 4
    await trio.sleep(8)
    assert budget.share(4) == pytest.approx(2)
    with budget.scope(4) as scope:
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert budget.left() == 0
    assert budget.share(1) == 0


# --- groups -------------------------------------------------------------------------------------------


def test_leaves_and_only() -> None:
    """T9, fault 17.5: the nesting of groups says nothing."""
    first, second = ValueError("1"), KeyError("2")
    nested = ExceptionGroup("a", [ExceptionGroup("b", [first]), ExceptionGroup("c", [second])])
    assert leaves(nested) == [first, second]
    assert leaves(first) == [first]
    assert only(ExceptionGroup("a", [ExceptionGroup("b", [first])])) is first
    assert only(nested) is nested
    assert only(first) is first


async def test_hidden_by_finds_what_a_cancellation_covered() -> None:
    """T15: a cleanup that awaits under cancellation hides the error."""
    with trio.CancelScope() as scope:
        try:
            try:
                raise KeyError("true error")
            finally:
                scope.cancel()
                await trio.lowlevel.checkpoint()
        except trio.Cancelled as exc:
            found = hidden_by(exc)
            raise
    assert isinstance(found, KeyError)
    assert hidden_by(ValueError("alone")) is None


# --- probes -------------------------------------------------------------------------------------------


async def test_probe_is_silent_unless_armed() -> None:
    probe = Probe("p")
    probe.hit(1)
    await probe.gate(2)
    probe.arm()
    probe.hit(3)
    assert await probe.wait() == 3


async def test_probe_wait_ends(autojump_clock: trio.testing.MockClock) -> None:
    with pytest.raises(trio.TooSlowError):
        await Probe("p").wait(1)


async def test_probe_holds_the_code_at_a_gate(autojump_clock: trio.testing.MockClock) -> None:
    probe, steps = Probe("p").hold(), []

    async def code() -> None:
        steps.append("before")
        await probe.gate("here")
        steps.append("after")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(code)
        assert await probe.wait() == "here"
        await trio.testing.wait_all_tasks_blocked()
        assert steps == ["before"]
        probe.release()
    assert steps == ["before", "after"]


# --- health and cleanup -------------------------------------------------------------------------------


def test_health_keeps_errors_to_one_line() -> None:
    health = ActorHealth("claim")
    health.failed_with(ValueError("first\nsecond" + "x" * 1000))
    assert health.last_error is not None
    assert "\n" not in health.last_error
    assert len(health.last_error) == 500
    health.become("ready")
    assert health.ready
    assert health.as_dict()["state"] == "ready"


async def test_bounded_cleanup_runs_under_cancellation_and_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """T8: a shield and a deadline, both."""
    steps = []
    start = trio.current_time()
    with trio.CancelScope() as outer:
        outer.cancel()
        with bounded_cleanup(2) as scope:
            await trio.sleep(1)
            steps.append("first second")
            await trio.sleep(100)
            steps.append("never")
        assert scope.cancelled_caught
    assert steps == ["first second"]
    assert trio.current_time() - start == 2
