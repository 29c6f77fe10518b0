"""Detached attempts: handed over, heard of, ended by their runner or from outside, each exactly once."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sql import billing, runners, sandboxes, settle
from sql.claim import Claimed
from tests.support.callers import open_caller
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

PROVIDER = "local@here"
TIMEOUT_S = 30.0


def name_of(item: Claimed) -> str:
    return f"{item.run_id}-{item.attempt}"


async def reserve(kernel: Kernel, item: Claimed) -> str:
    reservation = sandboxes.Reservation(item.run_id, item.attempt, item.token, name_of(item), PROVIDER)
    (answer,) = await sandboxes.reserve(kernel.session, [reservation], due_s=120.0)
    return answer


async def detach(kernel: Kernel, item: Claimed, *, ceiling_s: float | None = 600.0) -> str:
    detachment = runners.Detachment(
        item.run_id, item.attempt, item.token, name_of(item), TIMEOUT_S, ceiling_s
    )
    (answer,) = await runners.detach(kernel.session, [detachment])
    return answer


async def detached(kernel: Kernel, **fields: Any) -> Claimed:
    item = await kernel.started(**fields)
    assert await reserve(kernel, item) == "reserved"
    await sandboxes.record_custody(kernel.session, [sandboxes.Custody(name_of(item), "p-1")])
    assert await detach(kernel, item) == "done"
    return item


async def beat(kernel: Kernel, item: Claimed, *, token: int | None = None) -> str:
    (answer,) = await runners.beat(
        kernel.session, [runners.Beat(item.run_id, item.attempt, token or item.token)]
    )
    return answer


async def push(kernel: Kernel, item: Claimed, outcome: str = "completed", **fields: Any) -> runners.Pushed:
    fields.setdefault("payload", json.dumps({"output": 1}))
    token = fields.pop("token", item.token)
    (answer,) = await runners.push(
        kernel.session, [settle.Settlement(item.run_id, item.attempt, token, outcome, **fields)]
    )
    return answer


async def sweep(kernel: Kernel, look_s: float = 10.0) -> list[runners.Silent]:
    found, _ = await runners.sweep(kernel.session, [PROVIDER], limit=100, look_s=look_s)
    return found


async def judge(kernel: Kernel, silent: runners.Silent, verdict: str = "lost", crash_cap: int = 5) -> str:
    error = json.dumps({"error_type": "RunnerLost", "message": "gone"})
    (answer,) = await runners.judge(
        kernel.session, [runners.Verdict(silent, verdict, error)], crash_cap=crash_cap
    )
    return answer


async def test_a_detached_attempt_ends_by_its_runners_word_once(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await detached(kernel)
        assert await kernel.status(item.run_id) == "running"
        assert await detach(kernel, item) == "done"  # asked again after a lost answer
        assert await beat(kernel, item) == "ok"
        assert (await push(kernel, item)).answer == "settled"
        again = await push(kernel, item)
        assert (again.answer, again.first) == ("settled", True)
        other = await push(kernel, item, "failed", payload=json.dumps({"error": {"message": "no"}}))
        assert (other.answer, other.first) == ("settled", False)
        assert await kernel.status(item.run_id) == "completed"
        assert await beat(kernel, item) == "ended"
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runners") == 0
        assert (await kernel.fact_types(item.run_id))[-1] == "run.completed"


async def test_strangers_hear_nothing(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await detached(kernel)
        assert await beat(kernel, item, token=1) == "unknown"
        assert (await push(kernel, item, token=1)).answer == "unknown"
        assert await runners.read_attempt(kernel.session, item.run_id, item.attempt, 1) is None
        known = await runners.read_attempt(kernel.session, item.run_id, item.attempt, item.token)
        assert known is not None
        assert known.play == "alpha"
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runner_results") == 0


async def test_a_runner_that_is_too_early_is_told_so(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        assert await beat(kernel, item) == "early"


async def test_a_silent_runner_is_lost_only_while_it_stays_silent(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await detached(kernel)
        assert await sweep(kernel) == []
        await kernel.advance(TIMEOUT_S - 1)
        assert await beat(kernel, item) == "ok"
        await kernel.advance(2)
        assert await sweep(kernel) == []  # heard of: due again later
        await kernel.advance(TIMEOUT_S)
        (silent,) = await sweep(kernel)
        assert silent.finding == "stale"
        assert await sweep(kernel) == []  # somebody is looking
        assert await beat(kernel, item) == "ok"
        assert await judge(kernel, silent) == "moved"
        await kernel.advance(TIMEOUT_S + 10)
        (silent,) = await sweep(kernel)
        assert await judge(kernel, silent) == "done"
        assert await judge(kernel, silent) == "done"  # asked again after a lost answer
        assert await kernel.status(item.run_id) == "queued"
        # It comes back, too late.
        assert await beat(kernel, item) == "ended"
        late = await push(kernel, item)
        assert (late.answer, late.first) == ("late", True)
        (again,) = await kernel.claim()
        assert again.attempt == 2
        assert await beat(kernel, item) == "superseded"
        assert await kernel.status(item.run_id) == "running"


async def test_a_run_whose_runners_are_lost_too_often_fails(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await kernel.execute("UPDATE @schema@.plays SET crash_cap = 1")
        item = await detached(kernel)
        await kernel.advance(TIMEOUT_S)
        assert await judge(kernel, (await sweep(kernel))[0]) == "done"
        (item,) = await kernel.claim()
        assert await reserve(kernel, item) == "reserved"
        assert await detach(kernel, item) == "done"
        await kernel.advance(TIMEOUT_S)
        assert await judge(kernel, (await sweep(kernel))[0]) == "done"
        assert await kernel.status(item.run_id) == "failed"


async def test_a_result_or_a_cancellation_wins_over_a_verdict(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        one, two = await detached(kernel), await detached(kernel)
        await kernel.advance(TIMEOUT_S)
        silent = {each.run_id: each for each in await sweep(kernel)}
        async with open_caller(dsn, schema) as caller:
            await caller.begin()
            await caller.fetch(
                kernel.render("SELECT 1 FROM @schema@.runs WHERE run_id = $1 FOR UPDATE"), one.run_id
            )
            assert (await push(kernel, one)).answer == "recorded"
            await caller.rollback()
        await kernel.fetchval("SELECT @schema@.cancel_run($1)", two.run_id)
        assert await judge(kernel, silent[one.run_id]) == "moved"
        assert await judge(kernel, silent[two.run_id]) == "moved"
        assert await runners.settle_results(kernel.session, limit=10) == (1, 0)
        assert await kernel.status(one.run_id) == "completed"
        assert await beat(kernel, two) == "cancelled"
        assert await kernel.cancel(two.run_id) == "cancelled"
        assert await beat(kernel, two) == "cancelled"


async def test_past_its_ceiling_a_run_fails_however_alive_its_runner_is(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        assert await reserve(kernel, item) == "reserved"
        assert await detach(kernel, item, ceiling_s=40.0) == "done"
        await kernel.advance(39)
        await beat(kernel, item)
        assert await sweep(kernel) == []
        await kernel.advance(1)
        (silent,) = await sweep(kernel)
        assert silent.finding == "ceiling"
        await beat(kernel, item)
        assert await judge(kernel, silent, "ceiling") == "done"
        assert await kernel.status(item.run_id) == "failed"


async def test_a_runner_may_park_retry_and_go_on_elsewhere(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await detached(kernel)
        waits = json.dumps([{"key": "nap", "kind": "sleep", "delay_s": 60}])
        assert (await push(kernel, item, "parked", payload="{}", waits=waits)).answer == "settled"
        assert await kernel.status(item.run_id) == "waiting"
        (sandbox,) = await sandboxes.read(kernel.session, run_id=item.run_id)
        assert sandbox.state == "deleting"
        await kernel.advance(60)
        (item,) = await kernel.claim()
        assert await reserve(kernel, item) == "reserved"
        assert await detach(kernel, item) == "done"
        error = json.dumps({"error": {"message": "again"}})
        assert (await push(kernel, item, "retried", payload=error, delay_s=5.0)).answer == "settled"
        assert await kernel.status(item.run_id) == "queued"


async def test_an_obligation_is_there_before_the_sandbox_and_ends_confirmed(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        assert await reserve(kernel, item) == "reserved"
        assert await reserve(kernel, item) == "reserved"
        # The host dies here: what it asked for is found by its name.
        await kernel.advance(121)
        (due,), _ = await sandboxes.claim_cleanup(kernel.session, [PROVIDER], token=7, limit=10, lease_s=30.0)
        assert (due.sandbox, due.provider_id) == (name_of(item), None)
        assert await detach(kernel, item) == "lost"  # too late: it is being deleted
        assert (
            await sandboxes.accept(kernel.session, due, outcome="deleted", routing_domain="eu") == "accepted"
        )
        accepted_at = (await sandboxes.read(kernel.session, run_id=item.run_id))[0].accepted_at
        await kernel.advance(5)
        await sandboxes.postpone(kernel.session, due, delay_s=1.0)
        await kernel.advance(1)
        (due,), _ = await sandboxes.claim_cleanup(kernel.session, [PROVIDER], token=8, limit=10, lease_s=30.0)
        assert due.accepted_at == accepted_at
        confirm = sandboxes.confirm
        assert await confirm(kernel.session, due, outcome="deleted", routing_domain="eu") == "completed"
        assert (
            await confirm(kernel.session, due, outcome="deleted", routing_domain="eu") == "already_completed"
        )
        (record,) = await sandboxes.read(kernel.session, run_id=item.run_id)
        assert (record.state, record.accepted_at, record.routing_domain) == ("gone", accepted_at, "eu")


async def test_compute_is_told_once_and_by_the_databases_clock(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await detached(kernel, org_id="acme")
        finalise = billing.finalise

        async def pass_() -> billing.Finalised:
            return await finalise(kernel.session, limit=10, most_s=600.0, grace_s=60.0, again_s=30.0)

        await kernel.advance(20)
        assert (await push(kernel, item)).answer == "settled"
        assert (await pass_()).postponed == 1  # its sandbox still stands
        await kernel.advance(10)
        (due,), _ = await sandboxes.claim_cleanup(kernel.session, [PROVIDER], token=7, limit=10, lease_s=30.0)
        await sandboxes.accept(kernel.session, due, outcome="deleted", routing_domain=None)
        await kernel.advance(30)
        assert (
            await sandboxes.confirm(kernel.session, due, outcome="deleted", routing_domain=None)
        ) == "completed"
        assert (await pass_()).finalised == 1
        assert (await pass_()).finalised == 0
        records = await billing.read(kernel.session)
        assert {(record.kind, record.seconds, record.org_id) for record in records} == {
            ("runner", 20.0, "acme"),
            ("sandbox", 30.0, "acme"),
        }
