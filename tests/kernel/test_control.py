"""Failing a parked run: fenced by the very wait that was judged, never a wake, and behind every request to cancel."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sql import control, facts
from sql.claim import Claimed
from sql.errors import KernelRefused
from sql.waits import Wait
from tests.kernel.test_runners import detached, push
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, child_of, open_kernel

ANSWER = Wait("answer", "event", "answer", delay_s=600.0)


async def parked(kernel: Kernel, wait: Wait = ANSWER, **fields: Any) -> Claimed:
    item = await kernel.started(**fields)
    await kernel.park_on(item, wait)
    return item


async def fail(
    kernel: Kernel, item: Claimed, wait: Wait = ANSWER, request: str = "f"
) -> tuple[str, str | None]:
    answer = await kernel.fail_waiting(item.run_id, item.attempt, wait.kind, wait.key, request)
    return answer.answer, answer.status


WAITS = [
    Wait("nap", "sleep", delay_s=600.0),
    ANSWER,
    Wait("yes", "approval", "deploy"),
]


@pytest.mark.parametrize("wait", WAITS, ids=[wait.kind for wait in WAITS])
async def test_a_parked_run_fails_without_waking(
    dsn: str, schema: str, wait: Wait
) -> None:  # D-27, D-28, E-9
    async with open_kernel(dsn, schema) as kernel:
        item = await parked(kernel, wait)
        assert await fail(kernel, item, wait) == ("failed", "failed")
        assert await fail(kernel, item, wait) == ("failed", "failed")  # D-33
        assert await fail(kernel, item, wait, "another") == ("not_applicable", "failed")
        log = await facts.read(kernel.session, item.run_id)
        assert [fact.type for fact in log] == ["run.created", "run.started", "run.waiting", "run.failed"]
        assert log[-1].payload == {
            "attempt": 1,
            "failures": 0,
            "error": {"error_type": "FailedWhileWaiting", "message": "why", "traceback": None},
            "request_id": "f",
            "by": "tester",
        }
        assert await kernel.claim() == []
        await check_invariants(kernel.session)


async def test_only_the_wait_that_was_judged(dsn: str, schema: str) -> None:  # D-29, D-31, D-35
    async with open_kernel(dsn, schema) as kernel:
        item = await parked(kernel)
        for attempt, kind, key in ((2, "event", "answer"), (1, "sleep", "answer"), (1, "event", "other")):
            answer = await kernel.fail_waiting(item.run_id, attempt, kind, key)
            assert (answer.answer, answer.status) == ("fence_lost", "waiting")
        # It has gone on and waits for the same again: another attempt, another wait.
        await kernel.send(item.run_id, "answer")
        await kernel.sweep_wakes()
        (again,) = await kernel.claim()
        assert await fail(kernel, item) == ("not_applicable", "running")
        await kernel.park_on(again, Wait("answer 2", "event", "answer"))
        assert await fail(kernel, item) == ("fence_lost", "waiting")
        await kernel.cancel(item.run_id)
        assert await fail(kernel, again) == ("not_applicable", "cancelled")
        answer = await kernel.fail_waiting("nobody", 1, "event", "answer")
        assert (answer.answer, answer.status) == ("missing", None)
        queued = await kernel.submit()
        assert (await kernel.fail_waiting(queued, 0, "event", "answer")).answer == "not_applicable"
        await check_invariants(kernel.session)


async def test_what_has_come_meanwhile_is_not_lost(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await parked(kernel)
        await kernel.send(item.run_id, "answer", 1)
        await kernel.sweep_wakes()  # due, and not claimed yet
        assert await fail(kernel, item) == ("fence_lost", "waiting")
        (again,) = await kernel.claim()
        assert json.loads(again.waits["answer"].payload or "") == 1


async def test_what_runs_in_a_sandbox_does_not_wait_and_what_waits_says_for_what(
    dsn: str, schema: str
) -> None:
    """D-29, D-32."""
    async with open_kernel(dsn, schema) as kernel:
        away = await detached(kernel)
        assert await fail(kernel, away, Wait(away.run_id, "detached_runner")) == ("not_applicable", "running")
        item = await parked(kernel)
        with pytest.raises(KernelRefused, match="runs_status_check"):
            await kernel.execute("UPDATE @schema@.runs SET wait_kind = NULL WHERE run_id = $1", item.run_id)


async def test_a_request_to_cancel_keeps_no_end_out_that_comes_first(dsn: str, schema: str) -> None:
    """O-5."""
    async with open_kernel(dsn, schema) as kernel:
        completed, failed, away = await kernel.started(), await kernel.started(), await detached(kernel)
        for item in (completed, failed, away):
            assert await kernel.fetchval("SELECT @schema@.cancel_run($1)", item.run_id) == "pending"
        assert (await kernel.complete(completed)).answer == "done"
        assert (await kernel.settle(failed, "failed", payload='{"error": {}}')).answer == "done"
        assert (await push(kernel, away)).answer == "settled"
        assert await control.sweep(kernel.session, limit=10) == (0, 0)
        ends = [await kernel.status(item.run_id) for item in (completed, failed, away)]
        assert ends == ["completed", "failed", "completed"]
        await check_invariants(kernel.session)


async def test_a_request_to_cancel_goes_before_it(dsn: str, schema: str) -> None:  # D-30, E-14, E-15, O-4
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await parked(kernel)
        await caller.begin()
        await caller.fetchval(kernel.render("SELECT @schema@.cancel_run($1)"), item.run_id)
        other = await parked(kernel)
        assert await fail(kernel, other) == ("failed", "failed")
        await caller.commit()
        assert await fail(kernel, item) == ("fence_lost", "waiting")
        assert await kernel.status(item.run_id) == "waiting"


async def test_a_locked_run_is_busy_and_rolled_back_means_never(dsn: str, schema: str) -> None:  # D-34
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        item = await parked(kernel)
        await caller.begin()
        doors = caller.doors(kernel)
        assert (await doors.fail_waiting(item.run_id, 1, "event", "answer")).answer == "failed"
        assert await fail(kernel, item) == ("busy", "waiting")
        await caller.rollback()
        assert await kernel.fact_types(item.run_id) == ["run.created", "run.started", "run.waiting"]
        assert await fail(kernel, item) == ("failed", "failed")


async def test_a_parent_hears_that_its_child_was_failed(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.start_child(item)
        (child,) = await kernel.claim()
        await kernel.park_on(child, ANSWER)
        await kernel.park_on(item, Wait("kid", "child", child_of(item.run_id)))
        assert (await kernel.fail_waiting(child.run_id, 1, "event", "answer")).woke
        assert await kernel.sweep_wakes() == (1, False)
        (again,) = await kernel.claim()
        assert json.loads(again.waits["kid"].payload or "")["status"] == "failed"
