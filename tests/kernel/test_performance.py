"""What a terminal says of how its run went: where its launch asked for that, and what was measured (E-33 to E-41)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sql import facts, status
from sql.claim import Claimed
from sql.performance import performance_of
from sql.types import Performance, Usage
from tests.kernel.test_runners import checked, detached, push
from tests.support.kernel import LEASE_S, Kernel, open_kernel

pytestmark = pytest.mark.modes

USAGE = {"cpu_s": 1.25, "peak_memory_bytes": 1048576}
KEYS = {"performance", "performance_unavailable"}


def asking(level: str | None) -> dict[str, Any]:
    return {} if level is None else {"extras": json.dumps({"terminal_performance": level})}


async def terminal(kernel: Kernel, run_id: str) -> dict[str, Any]:
    last = (await facts.read(kernel.session, run_id))[-1]
    assert last.type in ("run.completed", "run.failed", "run.cancelled")
    payload: dict[str, Any] = last.payload
    return payload


async def complete(kernel: Kernel, item: Claimed) -> None:
    await kernel.complete(item, 1)


async def fail(kernel: Kernel, item: Claimed) -> None:
    await kernel.settle(item, "failed", payload='{"error": {"message": "no"}}')


async def expire(kernel: Kernel, item: Claimed) -> None:
    await kernel.execute("UPDATE @schema@.plays SET crash_cap = 0")
    await kernel.advance(LEASE_S + 1)
    assert (await kernel.expire()).failed == 1


async def fail_parked(kernel: Kernel, item: Claimed) -> None:
    await kernel.park(item, nap=60.0)
    await kernel.fail_waiting(item.run_id, 1, "sleep", "nap")


@pytest.mark.parametrize("end", [complete, fail, expire, fail_parked])
async def test_only_a_launch_that_asks_hears_of_it(dsn: str, schema: str, end: Any) -> None:
    """E-37: whoever ends it, and however; a launch that says nothing has a receiver that does not know the keys."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        for level in (None, "basic", "full", "of the future"):
            item = await kernel.started(**asking(level))
            await end(kernel, item)
            said = await terminal(kernel, item.run_id)
            assert KEYS & set(said) == (KEYS if level in ("basic", "full") else set()), level
            if level in ("basic", "full"):
                assert said["performance_unavailable"] is None
                assert "usage" not in said["performance"]


async def test_a_cancelled_run_says_nothing_of_it(dsn: str, schema: str) -> None:
    """E-45."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started(**asking("full"))
        assert await kernel.cancel(item.run_id) == "cancelled"
        assert not KEYS & set(await terminal(kernel, item.run_id))


async def test_it_is_measured_over_all_attempts(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        run_id = await kernel.submit(delay_s=2.0, **asking("basic"))
        await kernel.advance(3.0)
        (item,) = await kernel.claim()
        await kernel.advance(4.5)
        await kernel.settle(item, "retried", delay_s=1.0)
        await kernel.advance(1.0)
        (item,) = await kernel.claim()
        await kernel.advance(0.25)
        await kernel.park(item, nap=100.0)
        await kernel.advance(100.0)
        (item,) = await kernel.claim()
        await kernel.advance(2.0)
        await kernel.complete(item)
        (run,) = [await status.read_run(kernel.session, run_id, full=True)]
        assert run is not None
        assert run.details is not None
        assert run.details.performance == Performance(
            total_s=110.75, queued_s=3.0, host_s=6.75, sandbox_s=0.0, attempts=3
        )
        assert run.details.performance_unavailable is None
        assert (await terminal(kernel, run_id))["performance"]["host_s"] == 6.75


async def test_what_a_runner_used_comes_with_its_own_result_alone(dsn: str, schema: str) -> None:
    """E-22, E-35, E-38: the part that not every receiver takes is left out whole; no output can pass for a measure."""
    async with checked(dsn, schema) as kernel:
        for level, shown in ((None, None), ("basic", {}), ("full", {"usage": USAGE})):
            item = await detached(kernel, **asking(level))
            payload = json.dumps({"output": {"usage": {"cpu_s": 9}}, "usage": USAGE})
            assert (await push(kernel, item, payload=payload)).answer == "settled"
            said = await terminal(kernel, item.run_id)
            assert "usage" not in said
            assert said["output"] == {"usage": {"cpu_s": 9}}
            if shown is None:
                assert not KEYS & set(said)
                continue
            assert {key: said["performance"][key] for key in said["performance"] if key == "usage"} == shown
            spent = said["performance"]
            assert spent["host_s"] == 0
            assert spent["sandbox_s"] == pytest.approx(spent["total_s"] - spent["queued_s"], abs=2e-6)
            assert spent["sandbox_s"] > 0
        item = await detached(kernel, **asking("full"))
        await push(kernel, item, payload=json.dumps({"output": {"usage": USAGE, "performance": USAGE}}))
        said = await terminal(kernel, item.run_id)
        assert "usage" not in said["performance"]
        assert said["performance_unavailable"] is None


@pytest.mark.parametrize(
    "usage",
    [
        {},
        {"cpu_s": 1},
        {"cpu_s": None, "peak_memory_bytes": 1},
        {"cpu_s": -1, "peak_memory_bytes": 1},
        {"cpu_s": "1", "peak_memory_bytes": 1},
        [1, 2],
        "much",
    ],
)
async def test_a_measure_that_cannot_be_is_named_and_costs_nothing_else(
    dsn: str, schema: str, usage: Any
) -> None:
    """E-36."""
    async with checked(dsn, schema) as kernel:
        item = await detached(kernel, **asking("full"))
        payload = json.dumps({"error": {"message": "no"}, "usage": usage})
        assert (await push(kernel, item, "failed", payload=payload)).answer == "settled"
        said = await terminal(kernel, item.run_id)
        assert said["performance_unavailable"] == "invalid_usage"
        assert "usage" not in said["performance"]
        assert said["performance"]["attempts"] == 1


@pytest.mark.parametrize("end", [complete, fail])
async def test_the_ledger_has_it_where_there_is_something(dsn: str, schema: str, end: Any) -> None:
    """E-41."""
    async with open_kernel(dsn, schema) as kernel:
        for level, in_two in ((None, False), ("basic", False), ("basic", True)):
            item = await kernel.started(**asking(level))
            if in_two:
                await kernel.deliver()
            await end(kernel, item)
            await kernel.deliver()
            told = await kernel.fetchval(
                "SELECT performance FROM @schema@.ledger_runs WHERE run_id = $1", item.run_id
            )
            said = (await terminal(kernel, item.run_id)).get("performance")
            assert (None if told is None else json.loads(told)) == said
            assert (said is None) == (level is None)


MEASURED = {"total_s": 3, "queued_s": 1, "host_s": 2.5, "sandbox_s": 0, "attempts": 1}


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        (None, (None, None)),
        ({"output": 1}, (None, None)),
        ({"performance": None, "performance_unavailable": None}, (None, None)),
        ({"performance": MEASURED}, (Performance(3, 1, 2.5, 0, 1), None)),
        ({"performance": {**MEASURED, "usage": USAGE}}, (Performance(3, 1, 2.5, 0, 1, Usage(1.25, 1048576)), None)),
        ({"performance": {**MEASURED, "of the future": 1}}, (Performance(3, 1, 2.5, 0, 1), None)),
        (
            {"performance": MEASURED, "performance_unavailable": "invalid_usage"},
            (Performance(3, 1, 2.5, 0, 1), "invalid_usage"),
        ),
        ({"performance": MEASURED, "performance_unavailable": "of the future"}, (Performance(3, 1, 2.5, 0, 1), None)),
        ({"performance": None, "performance_unavailable": "invalid_usage"}, (None, "invalid_usage")),
        ({"performance": 7}, (None, "invalid_performance")),
        ({"performance": {**MEASURED, "total_s": -1}}, (None, "invalid_performance")),
        ({"performance": {**MEASURED, "attempts": True}}, (None, "invalid_performance")),
        ({"performance": {**MEASURED, "usage": 7}}, (None, "invalid_performance")),
        ({"performance": {}, "performance_unavailable": "invalid_usage"}, (None, "invalid_usage")),
    ],
)  # fmt: skip
def test_what_is_stored_is_read_or_named(payload: Any, found: Any) -> None:
    """E-39, E-40."""
    assert performance_of(payload) == found
