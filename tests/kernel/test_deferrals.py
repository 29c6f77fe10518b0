"""Deferrals: attempts that go back without a charge, for ever or as long as an outage may last (D-3 to D-13)."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import attrs
import pytest

from sql import status
from sql.claim import Claimed
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

START = datetime(2030, 1, 1, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


async def next_attempt(kernel: Kernel) -> Claimed:
    (item,) = await kernel.claim()
    return item


async def charges(kernel: Kernel, run_id: str) -> tuple[int, int]:
    run = (await status.read_runs(kernel.session, [run_id]))[run_id]
    return run.failures, run.crashes


async def test_capacity_defers_for_ever_and_free(dsn: str, schema: str) -> None:
    """D-3."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        payload = json.dumps({"error": {"kind": "capacity_unavailable", "message": "no sandbox"}})
        for _ in range(30):
            answer = await kernel.settle(item, "deferred", payload=payload, delay_s=3_600.0)
            assert answer.answer == "done"
            assert await kernel.claim() == []
            await kernel.advance(3_600.0)
            item = await next_attempt(kernel)
        assert item.attempt == 31
        assert await charges(kernel, item.run_id) == (0, 0)
        tried = await status.read_attempts(kernel.session, item.run_id)
        assert {(one.outcome, one.error["kind"]) for one in tried} == {("deferred", "capacity_unavailable")}
        await check_invariants(kernel.session)


async def test_an_outage_defers_until_it_has_lasted_too_long(dsn: str, schema: str) -> None:
    """D-4, D-5, D-6, D-7, D-9, D-11."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        for _ in range(9):
            answer = await kernel.defer(item, max_s=900.0, delay_s=60.0)
            assert (answer.answer, answer.status, answer.outage_at) == ("done", "queued", START)
            await kernel.advance(100.0)
            item = await next_attempt(kernel)
        assert item.attempt == 10
        # 900 s to the second is too long: nothing is written, and the attempt is still the caller's.
        for _ in range(2):
            answer = await kernel.defer(item, max_s=900.0)
            assert (answer.answer, answer.status, answer.outage_at) == ("over", "running", START)
        assert await kernel.fact_types(item.run_id) == ["run.created"] + [
            "run.started",
            "run.requeued",
        ] * 9 + ["run.started"]
        assert await charges(kernel, item.run_id) == (0, 0)
        assert (await kernel.defer(item, max_s=900.1)).answer == "done"
        await check_invariants(kernel.session)


async def test_what_a_deferral_writes(dsn: str, schema: str) -> None:
    """D-5, D-6."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        await kernel.advance(2.0)
        await kernel.defer(item, "dependency_unavailable", delay_s=7.0)
        run = (await status.read_runs(kernel.session, [item.run_id]))[item.run_id]
        assert (run.status, run.due_at, run.lease_expires_at, run.wait_kind) == ("queued", at(9), None, None)
        (tried,) = await kernel.fetch("SELECT * FROM @schema@.attempts")
        assert (tried["outcome"], tried["ended_at"], tried["outage_at"]) == ("deferred", at(2), START)
        assert json.loads(tried["error"]) == {"kind": "dependency_unavailable", "message": "no answer"}
        payload = json.loads(await kernel.fetchval("SELECT payload FROM @schema@.facts WHERE seq = 3"))
        assert (payload["reason"], payload["attempt"]) == ("deferred", 1)
        assert payload["error"]["kind"] == "dependency_unavailable"
        assert datetime.fromisoformat(payload["outage_at"]) == START


@pytest.mark.parametrize("between", ["retried", "deferred", "released", "parked", "other kind", "expired"])
async def test_any_other_ending_breaks_the_tail(dsn: str, schema: str, between: str) -> None:
    """D-8."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        await kernel.defer(item)
        await kernel.advance(50.0)
        item = await next_attempt(kernel)
        if between == "parked":
            await kernel.park(item, nap=10.0)
        elif between == "other kind":
            assert (await kernel.defer(item, "else")).outage_at == at(50)
        elif between == "expired":
            await kernel.advance(60.0)
            assert (await kernel.expire()).expired == 1
        else:
            payload = json.dumps({"error": {"kind": "capacity_unavailable"}})
            await kernel.settle(item, between, payload=payload)
        await kernel.advance(100.0)
        begins = 210 if between == "expired" else 150
        for _ in range(2):
            item = await next_attempt(kernel)
            assert (await kernel.defer(item)).outage_at == at(begins)
            await kernel.advance(10.0)
        await check_invariants(kernel.session)


async def test_without_the_fence_there_is_no_start_to_mistake_for_ownership(dsn: str, schema: str) -> None:
    """D-12: a lost fence is told apart from an outage that is over, and names no start."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        old = await kernel.started()
        await kernel.defer(old)
        await kernel.advance(1_000.0)
        item = await next_attempt(kernel)
        for stale in (attrs.evolve(item, token=1), attrs.evolve(item, attempt=7), attrs.evolve(old, token=1)):
            answer = await kernel.defer(stale)
            assert (answer.answer, answer.outage_at) == ("lost", None)
        assert (await kernel.defer(attrs.evolve(item, run_id="nobody"))).status is None
        # An old attempt's own deferral, asked again, is answered again and touches nothing.
        assert (await kernel.defer(old)).answer == "done"
        assert (await kernel.defer(item)).answer == "over"
        # The end is an ordinary, fenced failure: whoever lost the attempt meanwhile cannot end the run.
        assert (await kernel.settle(attrs.evolve(item, token=1), "failed")).answer == "lost"
        assert (await kernel.settle(item, "failed")).answer == "done"
        await check_invariants(kernel.session)


async def test_a_run_that_has_ended_is_not_deferred(dsn: str, schema: str) -> None:
    """D-13: its attempt was ended together with it, so nothing is left half retired."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        assert await kernel.cancel(item.run_id) == "cancelled"
        answer = await kernel.defer(item)
        assert (answer.answer, answer.status, answer.outage_at) == ("lost", "cancelled", None)
        (tried,) = await status.read_attempts(kernel.session, item.run_id)
        assert tried.outcome == "cancelled"
        await check_invariants(kernel.session)


async def test_a_locked_run_is_busy_and_holds_up_nobody(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        held = await kernel.started()
        free = await kernel.started()
        await caller.begin()
        await caller.execute(
            kernel.render("SELECT 1 FROM @schema@.runs WHERE run_id = $1 FOR UPDATE"), held.run_id
        )
        answer = await kernel.defer(held, max_s=0.0)
        assert (answer.answer, answer.outage_at) == ("busy", None)
        assert (await kernel.defer(free)).answer == "done"
        await caller.rollback()
        assert (await kernel.defer(held, max_s=0.0)).answer == "over"
        assert (await kernel.defer(held)).answer == "done"


async def test_the_outage_is_measured_by_the_wall_clock(dsn: str, schema: str) -> None:
    """D-9: inside an old transaction the call still sees now."""
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        await caller.begin()
        await caller.execute("SELECT pg_sleep(0.3)")
        assert (await caller.doors(kernel).defer(item, max_s=0.25)).answer == "over"
        await caller.rollback()
