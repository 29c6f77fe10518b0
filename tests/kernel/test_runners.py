"""Detached attempts: handed over, heard of, ended by their runner or from outside, each exactly once."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC
from functools import partial
from typing import Any

import attrs
import pytest

from sql import billing, facts, limits, runners, sandboxes, settle
from sql.claim import Claimed
from sql.types import Lane
from tests.kernel.test_plans import Batch, rows_read
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

PROVIDER = "local@here"
TIMEOUT_S = 30.0


@asynccontextmanager
async def checked(dsn: str, schema: str) -> AsyncIterator[Kernel]:
    """A kernel whose tables are in order at the end."""
    async with open_kernel(dsn, schema) as kernel:
        yield kernel
        await check_invariants(kernel.session)


def name_of(item: Claimed) -> str:
    return f"{item.run_id}-{item.attempt}"


async def reserve(kernel: Kernel, item: Claimed, provider: str = PROVIDER) -> str:
    reservation = sandboxes.Reservation(item.run_id, item.attempt, item.token, name_of(item), provider)
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


async def wanted(kernel: Kernel, *, token: int = 7, limit: int = 9) -> list[sandboxes.Obligation]:
    """Claim what is to be deleted now."""
    found, _ = await sandboxes.claim_cleanup(
        kernel.session, [PROVIDER], token=token, limit=limit, lease_s=30.0
    )
    return found


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
    """D-19, E-23, E-24, E-30, E-31: the first result stands, with the logs that came before it."""
    async with checked(dsn, schema) as kernel:
        item = await detached(kernel)
        assert await kernel.status(item.run_id) == "running"
        assert await beat(kernel, item) == "ok"
        heartbeat = "SELECT heartbeat_at FROM @schema@.runners"
        heard_at = await kernel.fetchval(heartbeat)
        assert await detach(kernel, item) == "done"  # asked again after a lost answer
        assert await kernel.fetchval(heartbeat) == heard_at is not None
        assert await kernel.say(item, 1, Lane.OBSERVABILITY) == "done"
        assert (await push(kernel, item)).answer == "settled"
        assert await kernel.say(item, 2, Lane.OBSERVABILITY) == "lost"
        again = await push(kernel, item)
        assert (again.answer, again.first) == ("settled", True)
        other = await push(kernel, item, "failed", payload=json.dumps({"error": {"message": "no"}}))
        assert (other.answer, other.first) == ("settled", False)
        assert await kernel.status(item.run_id) == "completed"
        assert await beat(kernel, item) == "ended"
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runners") == 0
        assert (await kernel.fact_types(item.run_id))[-1] == "run.completed"


async def test_strangers_hear_nothing(dsn: str, schema: str) -> None:
    """E-25."""
    async with checked(dsn, schema) as kernel:
        item = await detached(kernel)
        assert await beat(kernel, item, token=1) == "unknown"
        assert (await push(kernel, item, token=1)).answer == "unknown"
        assert await runners.read_attempt(kernel.session, item.run_id, item.attempt, 1) is None
        known = await runners.read_attempt(kernel.session, item.run_id, item.attempt, item.token)
        assert known is not None
        assert known.play == "alpha"
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runner_results") == 0


async def test_a_heartbeat_waits_for_no_disk_and_nothing_else_does_without(dsn: str, schema: str) -> None:
    async with checked(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await detached(kernel)
        shown = "SELECT current_setting('synchronous_commit')"
        await caller.begin()
        assert await beat(caller.doors(kernel), item) == "ok"
        assert (await caller.fetch(shown))[0][0] == "off"
        await caller.commit()
        assert (await caller.fetch(shown))[0][0] == "on"


async def test_a_runner_that_is_too_early_is_told_so(dsn: str, schema: str) -> None:
    async with checked(dsn, schema) as kernel:
        item = await kernel.started()
        assert await beat(kernel, item) == "early"


async def test_a_silent_runner_is_lost_only_while_it_stays_silent(dsn: str, schema: str) -> None:
    """E-25, E-26, E-27."""
    async with checked(dsn, schema) as kernel:
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


async def test_one_runner_can_be_looked_at(dsn: str, schema: str) -> None:
    """H-11, H-17."""
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        look = partial(runners.read_runner, kernel.session)
        item = await kernel.started()
        assert await look(item.run_id, 1) is None  # on a host
        assert await reserve(kernel, item) == "reserved"
        assert await detach(kernel, item) == "done"
        await kernel.advance(2)
        assert await look(item.run_id, 2) is None
        before = await look(item.run_id, 1)
        assert before is not None
        assert (before.status, before.sandbox, before.provider) == ("running", name_of(item), PROVIDER)
        assert (before.heartbeat_at, before.heartbeat, before.silent_s) == (None, None, 2.0)
        assert await beat(kernel, item) == "ok"
        heard = await look(item.run_id, 1)
        assert heard is not None
        assert heard.heartbeat_at is not None
        assert heard.heartbeat == f"{heard.heartbeat_at.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"
        assert (heard.updated_at, heard.silent_s) == (heard.heartbeat_at, 0.0)
        assert await beat(kernel, item) == "ok"
        again = await look(item.run_id, 1)
        assert again is not None
        assert again.heartbeat != heard.heartbeat  # though the clock stands
        assert (await push(kernel, item)).answer == "settled"
        over = await look(item.run_id, 1)
        assert over is not None
        assert (over.status, over.sandbox, over.heartbeat) == ("completed", name_of(item), None)


async def test_a_run_whose_runners_are_lost_too_often_fails(dsn: str, schema: str) -> None:
    """D-23, D-25, E-26."""
    async with checked(dsn, schema) as kernel:
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
    """D-24, E-13, E-32, O-4, O-5, O-8."""
    async with checked(dsn, schema) as kernel:
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


async def test_a_page_of_runners_that_were_heard_of_is_followed_by_the_next_at_once(
    dsn: str, schema: str
) -> None:
    """H-8: however many hearts beat, a sweep gets to the one that does not."""
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        items = [await detached(kernel) for _ in range(3)]
        await kernel.advance(TIMEOUT_S)
        for item in items[:2]:
            assert await beat(kernel, item) == "ok"
        pages = [await runners.sweep(kernel.session, [PROVIDER], limit=1, look_s=10.0) for _ in range(4)]
        assert [[one.run_id for one in found] for found, _ in pages] == [[], [], [items[2].run_id], []]
        assert [next_due_s for _, next_due_s in pages] == [0, 0, 0, 10]


async def test_past_its_ceiling_a_run_fails_however_alive_its_runner_is(dsn: str, schema: str) -> None:
    """D-18, D-23, D-25, D-26."""
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        assert await reserve(kernel, item) == "reserved"
        assert await detach(kernel, item, ceiling_s=40.0) == "done"
        await kernel.advance(39)
        await beat(kernel, item)
        assert await sweep(kernel) == []
        await kernel.advance(1)
        (silent,) = await sweep(kernel)
        assert (silent.finding, silent.over_s) == ("ceiling", 0.0)
        await beat(kernel, item)
        assert await judge(kernel, silent, "ceiling") == "done"
        assert await kernel.status(item.run_id) == "failed"


async def test_one_providers_backlog_hides_nobody_elses_and_is_walked_through(dsn: str, schema: str) -> None:
    """H-8, H-9."""
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        for provider in (PROVIDER, PROVIDER, PROVIDER, "elsewhere"):
            item = await kernel.started()
            assert await reserve(kernel, item, provider) == "reserved"
            assert await detach(kernel, item) == "done"
        await kernel.advance(TIMEOUT_S)
        seen: list[runners.Silent] = []
        pages = []
        for limit in (1, 0, -5):  # never less than one
            found, next_due_s = await runners.sweep(
                kernel.session, [PROVIDER, "elsewhere"], limit=limit, look_s=10.0
            )
            assert next_due_s == 0  # there may be more
            pages.append(sorted(one.provider for one in found))
            seen += found
        assert pages == [["elsewhere", PROVIDER], [PROVIDER], [PROVIDER]]
        assert len({one.run_id for one in seen}) == 4


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (partial(push, outcome="completed"), "completed"),
        (partial(push, outcome="failed", payload='{"error": {"message": "no"}}'), "failed"),
        (partial(push, outcome="retried", payload='{"error": {"message": "no"}}', delay_s=5.0), "retried"),
        (partial(push, outcome="deferred", payload='{"error": {"message": "no"}}', delay_s=5.0), "deferred"),
        (partial(push, outcome="released", payload="{}"), "released"),
        (
            partial(
                push, outcome="parked", payload="{}", waits='[{"key": "k", "kind": "event", "name": "n"}]'
            ),
            "parked",
        ),
        (lambda kernel, item: kernel.cancel(item.run_id), "cancelled"),
        (lambda kernel, item: judged(kernel, "lost"), "lost"),
        (lambda kernel, item: judged(kernel, "ceiling"), "ceiling"),
    ],
)
async def test_however_a_detached_attempt_ends_its_sandbox_is_wanted_back_and_its_bill_is_due(
    dsn: str, schema: str, end: Callable[[Kernel, Claimed], Awaitable[Any]], outcome: str
) -> None:
    """I-37, J-1, and D-24's way out for what was parked."""
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await detached(kernel)
        assert await wanted(kernel) == []
        await end(kernel, item)
        assert await kernel.fetchval("SELECT outcome FROM @schema@.attempts") == outcome
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runners") == 0
        (due,) = await wanted(kernel)
        assert due.sandbox == name_of(item)
        assert await kernel.fetchval("SELECT due_at <= @schema@.clock() FROM @schema@.billing_jobs")


async def judged(kernel: Kernel, verdict: str) -> None:
    await kernel.advance(700.0 if verdict == "ceiling" else TIMEOUT_S)
    (silent,) = await sweep(kernel)
    assert await judge(kernel, silent, verdict) == "done"


async def test_a_runner_may_park_retry_and_go_on_elsewhere(dsn: str, schema: str) -> None:
    """D-35, E-30."""
    async with checked(dsn, schema) as kernel:
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
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        assert await reserve(kernel, item) == "reserved"
        assert await reserve(kernel, item) == "reserved"
        # The host dies here: what it asked for is found by its name.
        await kernel.advance(121)
        (due,) = await wanted(kernel)
        assert (due.sandbox, due.provider_id) == (name_of(item), None)
        assert await detach(kernel, item) == "lost"  # too late: it is being deleted
        assert (
            await sandboxes.accept(kernel.session, due, outcome="deleted", routing_domain="eu") == "accepted"
        )
        accepted_at = (await sandboxes.read(kernel.session, run_id=item.run_id))[0].accepted_at
        await kernel.advance(5)
        await sandboxes.postpone(kernel.session, due, delay_s=1.0)
        await kernel.advance(1)
        (due,) = await wanted(kernel, token=8)
        assert due.accepted_at == accepted_at
        confirm = sandboxes.confirm
        assert await confirm(kernel.session, due, outcome="deleted", routing_domain="eu") == "completed"
        assert (
            await confirm(kernel.session, due, outcome="deleted", routing_domain="eu") == "already_completed"
        )
        (record,) = await sandboxes.read(kernel.session, run_id=item.run_id)
        assert (record.state, record.accepted_at, record.routing_domain) == ("gone", accepted_at, "eu")


async def test_compute_is_told_once_and_by_the_databases_clock(dsn: str, schema: str) -> None:
    """E-28, E-29."""
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await detached(kernel, org_id="acme")
        finalise = billing.finalise

        async def pass_() -> billing.Finalised:
            return await finalise(kernel.session, limit=10, grace_s=60.0, again_s=30.0)

        await kernel.advance(20)
        assert (await push(kernel, item)).answer == "settled"
        assert (await pass_()).postponed == 1  # its sandbox still stands
        await kernel.advance(10)
        (due,) = await wanted(kernel)
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


# --- capacity ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "other"),
    [
        ("sandbox", "", {"org_id": "acme"}),
        ("sandbox", PROVIDER, {"org_id": "acme"}),
        ("sandbox_org", "acme", {"org_id": "acme"}),
    ],
)
async def test_sandboxes_are_limited_until_their_provider_takes_the_deletion(
    dsn: str, schema: str, kind: str, name: str, other: dict[str, Any]
) -> None:
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await limits.set_limit(kernel.session, kind, name, 1)
        one, two = await detached(kernel, **other), await kernel.started(**other)
        assert await reserve(kernel, two) == "full"
        (limit,) = await limits.read(kernel.session)
        assert (limit.kind, limit.name, limit.max_running, limit.running) == (kind, name, 1, 1)
        assert (await push(kernel, one)).answer == "settled"
        assert await reserve(kernel, two) == "full"  # over, but it still stands
        (due,) = await wanted(kernel)
        await sandboxes.accept(kernel.session, due, outcome="deleted", routing_domain=None)
        assert await reserve(kernel, two) == "reserved"
        assert await reserve(kernel, two) == "reserved"  # asked again: it takes up one place


async def test_the_last_place_is_given_once(dsn: str, schema: str) -> None:
    async with checked(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await limits.set_limit(kernel.session, "sandbox", "", 1)
        one, two = await kernel.started(), await kernel.started()
        await caller.begin()
        assert await reserve(caller.doors(kernel), one) == "reserved"
        assert await reserve(kernel, two) == "busy"
        await caller.commit()
        assert await reserve(kernel, two) == "full"


async def test_other_organisations_are_not_limited(dsn: str, schema: str) -> None:
    async with checked(dsn, schema) as kernel:
        await limits.set_limit(kernel.session, "sandbox_org", "acme", 0)
        await limits.set_limit(kernel.session, "sandbox", "elsewhere", 0)
        assert await reserve(kernel, await kernel.started(org_id="acme")) == "full"
        assert await reserve(kernel, await kernel.started(org_id="zeta")) == "reserved"
        assert await reserve(kernel, await kernel.started()) == "reserved"


# --- what is lost on the way -------------------------------------------------------------------------


async def test_a_reservation_and_the_end_of_its_run_exclude_each_other(dsn: str, schema: str) -> None:
    """E-6."""
    async with checked(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        await caller.begin()
        await caller.fetch(kernel.render("SELECT 1 FROM @schema@.runs FOR NO KEY UPDATE"))
        assert await reserve(kernel, item) == "busy"
        await caller.rollback()
        await kernel.complete(item)
        assert await reserve(kernel, item) == "lost"


_Call = Callable[[Kernel, Claimed], Awaitable[Any]]


async def _reserve(kernel: Kernel, item: Claimed) -> Any:
    return await reserve(kernel, item)


async def _detach(kernel: Kernel, item: Claimed) -> Any:
    return await detach(kernel, item)


async def _push(kernel: Kernel, item: Claimed) -> Any:
    return await push(kernel, item)


async def _fail(kernel: Kernel, item: Claimed) -> Any:
    return await push(kernel, item, "failed", payload=json.dumps({"error": {"message": "no"}}))


async def _park(kernel: Kernel, item: Claimed) -> Any:
    waits = json.dumps([{"key": "nap", "kind": "sleep", "delay_s": 60}])
    return await push(kernel, item, "parked", payload="{}", waits=waits)


@pytest.mark.parametrize(
    ("call", "before", "unsettled"),
    [
        (_reserve, "started", "busy"),
        (_detach, "reserved", "busy"),
        (_push, "detached", "recorded"),
        (_fail, "detached", "recorded"),
        (_park, "detached", "recorded"),
    ],
)
async def test_a_call_made_again_has_one_effect_and_the_same_answer(
    dsn: str, schema: str, call: _Call, before: str, unsettled: str
) -> None:
    """E-1, E-21, E-23, E-30."""
    async with checked(dsn, schema) as kernel, open_caller(dsn, schema) as old:
        await kernel.freeze_clock()

        async def prepare() -> Claimed:
            item = await kernel.started()
            if before != "started":
                assert await reserve(kernel, item) == "reserved"
            if before == "detached":
                assert await detach(kernel, item) == "done"
            return item

        async def left(item: Claimed) -> list[Any]:
            tables = ("runs", "runners", "runner_results", "sandboxes", "attempts", "facts", "billing_jobs")
            found = [
                await kernel.fetch(f"SELECT t::text FROM @schema@.{table} t WHERE run_id = $1", item.run_id)
                for table in tables
            ]
            return [sorted(row[0] for row in rows) for rows in found]

        # The answer was lost after the commit.
        item = await prepare()
        untouched = await left(item)
        first = await call(kernel, item)
        after = await left(item)
        assert after != untouched
        assert await call(kernel, item) == first
        assert await left(item) == after

        # It was not made after all.
        item = await prepare()
        untouched = await left(item)
        await old.begin()
        await call(old.doors(kernel), item)
        await old.rollback()
        assert await left(item) == untouched
        assert await call(kernel, item) == first

        # Somebody holds the run: nothing waits, and the same call gets there.
        item = await prepare()
        await old.begin()
        await old.fetch(
            kernel.render("SELECT 1 FROM @schema@.runs WHERE run_id = $1 FOR UPDATE"), item.run_id
        )
        answer = await call(kernel, item)
        assert getattr(answer, "answer", answer) == unsettled
        await old.rollback()
        assert await call(kernel, item) == first


# --- deleting and billing ----------------------------------------------------------------------------


async def test_what_is_known_of_a_sandboxs_end_is_kept_with_it_after_it_is_gone(
    dsn: str, schema: str
) -> None:
    """E-19: where it was and what became of it, in one place, whatever becomes of its run's worker."""
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await detached(kernel)
        end = {"exit_code": 137, "output_tail": "killed"}
        await sandboxes.record_diagnostics(kernel.session, name_of(item), end)
        await push(kernel, item, "failed", payload='{"error": {"message": "no"}}')
        (due,) = await wanted(kernel)
        for step in (sandboxes.accept, sandboxes.confirm):
            await step(kernel.session, due, outcome="deleted", routing_domain="eu")
        (record,) = await sandboxes.read(kernel.session, run_id=item.run_id)
        assert (record.state, record.provider_id, record.routing_domain) == ("gone", "p-1", "eu")
        assert record.diagnostics == end
        (terminal,) = [
            fact for fact in await facts.read(kernel.session, item.run_id) if fact.type == "run.failed"
        ]
        assert "exit_code" not in json.dumps(terminal.payload)


async def test_what_nobody_has_seen_may_still_come_into_being(dsn: str, schema: str) -> None:
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        assert await reserve(kernel, item) == "reserved"
        await sandboxes.give_up(kernel.session, [name_of(item)])
        (due,) = await wanted(kernel)
        assert not due.certain
        await kernel.advance(120)
        (due,) = await wanted(kernel, token=8)
        assert due.certain


async def test_every_answer_about_a_deletion_is_its_own(dsn: str, schema: str) -> None:
    """I-21, I-23, I-25, I-27 to I-34 but I-33, I-42: claimed by one, oldest first; told once; never rewritten."""
    async with checked(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await kernel.freeze_clock()
        accept, confirm = sandboxes.accept, sandboxes.confirm
        items = []
        for _ in range(2):
            items.append(await detached(kernel, org_id="acme"))
            await push(kernel, items[-1])
            await kernel.advance(1)
        (first,) = await wanted(kernel, limit=1)
        assert first.sandbox == name_of(items[0])  # the longest due
        (second,) = await wanted(kernel, token=8)
        assert second.sandbox == name_of(items[1])
        assert await wanted(kernel, token=9) == []  # under lease
        how = {"outcome": "deleted", "routing_domain": "eu"}

        stranger = attrs.evolve(first, token=9)
        missing = attrs.evolve(first, sandbox="no-such-box")
        for write in (accept, confirm):
            assert await write(kernel.session, stranger, **how) == "lease_lost"
            assert await write(kernel.session, missing, **how) == "missing_obligation"
            await caller.begin()
            await caller.fetch(kernel.render("SELECT 1 FROM @schema@.sandboxes FOR UPDATE"))
            assert await write(kernel.session, first, **how) == "busy"
            await caller.rollback()

        assert await accept(kernel.session, first, **how) == "accepted"
        accepted_at = (await sandboxes.read(kernel.session, run_id=first.run_id))[0].accepted_at
        await kernel.advance(5)
        assert await accept(kernel.session, first, **how) == "accepted"
        # Another cleaner goes on by the first moment.
        await kernel.advance(30)
        again, second = sorted(await wanted(kernel, token=10), key=lambda one: one.run_id != first.run_id)
        assert again.accepted_at == accepted_at
        assert await confirm(kernel.session, first, **how) == "lease_lost"
        assert await confirm(kernel.session, again, **how) == "completed"
        assert (
            await confirm(kernel.session, again, outcome="deleted", routing_domain="us")
            == "already_completed"
        )
        await sandboxes.postpone(kernel.session, again, delay_s=0.0, error="late", block="never")
        (record,) = await sandboxes.read(kernel.session, run_id=first.run_id)
        assert (record.state, record.accepted_at, record.routing_domain) == ("gone", accepted_at, "eu")
        assert (record.org_id, record.last_error, record.block_reason) == ("acme", None, None)

        # The routing domain that is known is not replaced, and what was looked at elsewhere is not it.
        await sandboxes.record_custody(kernel.session, [sandboxes.Custody(second.sandbox, "p-9", "asia")])
        assert await confirm(kernel.session, second, **how) == "wrong_routing_domain"
        assert (
            await confirm(kernel.session, second, outcome="already_absent", routing_domain=None)
            == "completed"
        )

        rows = await kernel.fetch(
            "SELECT event_id, routing_domain, details::text FROM @schema@.sandbox_events"
        )
        assert {tuple(row) for row in rows} == {
            # Filed under no domain, seen in one.
            (f"{first.sandbox}:delete_accepted", None, '{"outcome": "deleted", "routing_domain": "eu"}'),
            (f"{first.sandbox}:delete_confirmed", None, '{"outcome": "deleted", "routing_domain": "eu"}'),
            (f"{second.sandbox}:delete_confirmed", "asia", '{"outcome": "already_absent"}'),
        }


async def test_a_blocked_obligation_begins_anew_when_an_operator_says_so(dsn: str, schema: str) -> None:
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await detached(kernel)
        await push(kernel, item)
        claim = sandboxes.claim_cleanup
        (due,), _ = await claim(kernel.session, [PROVIDER], token=7, limit=9, lease_s=30.0)
        assert (due.failures, due.certain) == (0, True)
        await sandboxes.postpone(kernel.session, due, delay_s=1.0, error="no", block="no more")
        await kernel.advance(600)
        assert await claim(kernel.session, [PROVIDER], token=8, limit=9, lease_s=30.0) == ([], None)
        (record,) = await sandboxes.read(kernel.session, run_id=item.run_id)
        assert (record.state, record.failures, record.block_reason) == ("blocked", 1, "no more")
        assert await sandboxes.retry(kernel.session, due.sandbox)
        assert not await sandboxes.retry(kernel.session, due.sandbox)
        (due,), _ = await claim(kernel.session, [PROVIDER], token=8, limit=9, lease_s=30.0)
        assert (due.failures, due.tries) == (0, 1)


@pytest.mark.parametrize(("ceiling_s", "billed_s"), [(100.0, 160.0), (None, 80.0)])
async def test_what_its_provider_never_takes_is_billed_to_a_ceiling_once(
    dsn: str, schema: str, ceiling_s: float | None, billed_s: float
) -> None:
    """J-3, J-4, J-6."""
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        assert await reserve(kernel, item) == "reserved"
        await sandboxes.record_custody(kernel.session, [sandboxes.Custody(name_of(item), "p-1")])
        assert await detach(kernel, item, ceiling_s=ceiling_s) == "done"
        await kernel.advance(20)
        await push(kernel, item)

        async def pass_() -> billing.Finalised:
            return await billing.finalise(kernel.session, limit=10, grace_s=60.0, again_s=1.0)

        await kernel.advance(billed_s - 21)
        assert (await pass_()).finalised == 0
        await kernel.advance(1)
        assert (await pass_()).finalised == 1
        records = {one.kind: one for one in await billing.read(kernel.session)}
        assert re.fullmatch(f"{item.run_id}:late-resource:[0-9a-f]{{64}}", records["late_sandbox"].record_id)
        assert {kind: one.seconds for kind, one in records.items()} == {
            "runner": 20.0,
            "late_sandbox": billed_s,
        }
        (due,) = await wanted(kernel)
        assert (
            await sandboxes.confirm(kernel.session, due, outcome="deleted", routing_domain=None)
        ) == "completed"
        assert (await pass_()).finalised == 0
        assert len(await billing.read(kernel.session)) == 2


@pytest.mark.parametrize(
    ("said", "billed_s"),
    [
        ({"ended_at": 12.0}, 12.0),
        ({"ended_at": -5.0}, 0.0),
        ({"ended_at": 900.0}, 60.0),
        ({}, 60.0),
        (None, 60.0),
    ],
)
async def test_a_lost_runner_is_billed_until_its_provider_saw_it_end(
    dsn: str, schema: str, said: dict[str, float] | None, billed_s: float
) -> None:
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await detached(kernel)
        began_at = float(await kernel.fetchval("SELECT extract(epoch FROM @schema@.clock())"))
        await kernel.advance(60)
        (silent,) = await sweep(kernel)
        if said is not None:
            found = {name: began_at + seconds for name, seconds in said.items()}
            await sandboxes.record_diagnostics(kernel.session, silent.sandbox, found)
        assert await judge(kernel, silent) == "done"
        assert await kernel.cancel(item.run_id) == "cancelled"
        (due,) = await wanted(kernel)
        await sandboxes.accept(kernel.session, due, outcome="deleted", routing_domain=None)
        await kernel.advance(60)
        assert (await billing.finalise(kernel.session, limit=9, grace_s=60.0, again_s=1.0)).finalised == 1
        records = {one.kind: one.seconds for one in await billing.read(kernel.session)}
        assert records == {"runner": pytest.approx(billed_s, abs=1e-5), "sandbox": 60.0}


async def test_what_a_deletion_found_is_billed_though_nobody_wrote_down_that_it_was_made(
    dsn: str, schema: str
) -> None:
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        assert await reserve(kernel, item) == "reserved"
        await kernel.complete(item)
        await kernel.advance(120)
        (due,) = await wanted(kernel)
        await sandboxes.accept(kernel.session, due, outcome="deleted", routing_domain=None)
        assert (await billing.finalise(kernel.session, limit=9, grace_s=60.0, again_s=1.0)).finalised == 1
        (record,) = await billing.read(kernel.session)
        assert (record.kind, record.seconds) == ("sandbox", 120.0)


async def test_what_never_was_costs_nothing(dsn: str, schema: str) -> None:
    async with checked(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        assert await reserve(kernel, item) == "reserved"
        await sandboxes.give_up(kernel.session, [name_of(item)])
        await kernel.complete(item)
        await kernel.advance(61)
        done = await billing.finalise(kernel.session, limit=10, grace_s=60.0, again_s=1.0)
        assert done.finalised == 1
        assert await billing.read(kernel.session) == []


# --- what a sweep costs ------------------------------------------------------------------------------

_PARKED = """
INSERT INTO @schema@.sandboxes (sandbox, provider, run_id, attempt, created_at, due_at, certain_at)
SELECT 'box-' || n, 'local@here', 'parked-' || n, 1, t, 'infinity', t
  FROM (SELECT n, clock_timestamp() AS t FROM generate_series(1, 10000) AS n) AS g;
INSERT INTO @schema@.runners (run_id, attempt, token, provider, sandbox, started_at, heartbeat_timeout_s, ceiling_at,
        heartbeat_at, due_at)
SELECT 'parked-' || n, 1, n, 'local@here', 'box-' || n, t - interval '1 hour', 30, 'infinity',
       CASE WHEN n <= 50 THEN t - interval '40 s' ELSE t - interval '5 s' END,
       CASE WHEN n <= 100 THEN t - interval '1 s' ELSE t + interval '1 hour' END
  FROM (SELECT n, clock_timestamp() AS t FROM generate_series(1, 10000) AS n) AS g
"""


async def test_a_sweep_over_ten_thousand_runners_reads_only_what_is_due(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        for table in ("runners", "sandboxes"):
            await kernel.execute(f"ALTER TABLE @schema@.{table} SET (autovacuum_enabled = off)")
        for statement in _PARKED.split(";"):
            await kernel.execute(statement)
        took_s = []

        async def page(doors: Kernel, _: Batch) -> None:
            started = time.perf_counter()
            found, next_due_s = await runners.sweep(doors.session, [PROVIDER], limit=100, look_s=10.0)
            took_s.append(time.perf_counter() - started)
            assert len(found) == 50  # of the 100 that are due the others were heard of
            assert next_due_s is not None

        batch = Batch([])
        for _ in range(7):
            read = await rows_read(caller, kernel, page, batch)
            assert sum(read.values()) < 2_000, read
        assert min(took_s) < 0.05, took_s
