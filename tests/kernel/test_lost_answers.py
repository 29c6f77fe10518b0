"""The lost-answer matrix: every writing call, its answer lost, made again: one effect, the same answer."""

from __future__ import annotations

import pytest

from sql import admission, claim
from sql.facts import append
from sql.types import Lane
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import open_kernel, saying
from tests.support.transitions import TRANSITIONS, Situation, clear_away, left_behind, prepare_run

pytestmark = pytest.mark.modes

# What a lost claim of lanes took comes back by itself when its lease ends; nobody reads it back.
NOT_REPEATED = {"lifecycle claim", "observability claim"}
# The same request in an open transaction: only its end tells whether it is recorded.
WAITS_FOR_ITSELF = {"cancel_run", "push result"}
NORMAL = Situation(run="running", lifecycle="free", observability="free")


@pytest.mark.parametrize("name", [name for name in TRANSITIONS if name not in NOT_REPEATED])
async def test_a_call_made_again_has_one_effect_and_the_same_answer(dsn: str, schema: str, name: str) -> None:
    """D-10, E-7, E-21."""
    transition = TRANSITIONS[name]
    situation = transition.needs.over(NORMAL)
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as old:
        await kernel.freeze_clock()

        # The answer was lost after the commit.
        subject = await prepare_run(kernel, situation, "lost-after")
        before = await left_behind(kernel, subject)
        first = subject.plain(await transition.call(kernel, subject))
        after = await left_behind(kernel, subject)
        assert after != before, "the call did nothing"
        for _ in range(2):
            assert subject.plain(await transition.call(kernel, subject)) == first
            assert await left_behind(kernel, subject) == after
        await check_invariants(kernel.session)
        await clear_away(kernel, subject)

        # The old backend finishes late: it still works when the call is made again, and then commits.
        subject = await prepare_run(kernel, situation, "lost-early")
        await old.begin()
        late = subject.plain(await transition.call(old.doors(kernel), subject))
        if name not in WAITS_FOR_ITSELF:
            assert not transition.settled(subject.plain(await transition.call(kernel, subject)))
        await old.commit()
        assert late == first
        for _ in range(2):
            assert subject.plain(await transition.call(kernel, subject)) == first
            assert await left_behind(kernel, subject) == after

        # The old backend never finished.
        await check_invariants(kernel.session)
        await clear_away(kernel, subject)
        subject = await prepare_run(kernel, situation, "never-done")
        await old.begin()
        await transition.call(old.doors(kernel), subject)
        await old.rollback()
        assert subject.plain(await transition.call(kernel, subject)) == first
        assert await left_behind(kernel, subject) == after


@pytest.mark.parametrize("lane", list(Lane))
async def test_a_lost_claim_of_lanes_comes_back_with_the_same_members(
    dsn: str, schema: str, lane: Lane
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        subject = await prepare_run(kernel, NORMAL, "run")
        (lost,) = await kernel.claim_lanes(lane, token=1, prefix=2, lease_s=30.0)
        await kernel.say(subject.fence, 4, lane)
        assert await kernel.claim_lanes(lane, token=2) == []
        await kernel.advance(30.0)
        (again,) = await kernel.claim_lanes(lane, token=2, prefix=8)
        assert (again.seqs, again.payloads, again.created_ats) == (lost.seqs, lost.payloads, lost.created_ats)
        assert (lost.attempt, again.attempt) == (1, 2)
        assert (await kernel.acknowledge(lost)).answer == "lost"
        await check_invariants(kernel.session)


async def test_a_lost_claim_is_read_back_whole_and_only_that(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        for _ in range(5):
            await kernel.submit()
        first = await kernel.claim(3, token=7)
        await kernel.claim(token=8)
        back = await claim.read_back(kernel.session, owner=kernel.owner, token=7)
        assert {(item.run_id, item.attempt, item.input) for item in back} == {
            (item.run_id, item.attempt, item.input) for item in first
        }
        assert await claim.read_back(kernel.session, owner=kernel.owner + 1, token=7) == []
        await kernel.complete(first[0])
        assert len(await claim.read_back(kernel.session, owner=kernel.owner, token=7)) == 2
        held = await claim.held(kernel.session, owner=kernel.owner)
        assert len(held) == 4
        assert (first[1].run_id, 1, 7) in held


async def test_facts_are_counted_by_ordinal_whatever_is_repeated(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        facts = [saying(item, n, Lane(n % 2)) for n in range(1, 7)]
        assert await append(kernel.session, facts[:3]) == ["done"] * 3
        assert await append(kernel.session, facts[1:5]) == ["done"] * 4
        assert await append(kernel.session, [facts[4], facts[5], facts[5]]) == ["done"] * 3
        assert await append(kernel.session, facts) == ["done"] * 6
        assert await kernel.fact_types(item.run_id) == ["run.created", "run.started"] + ["run.progress"] * 3
        assert await kernel.fact_types(item.run_id, Lane.OBSERVABILITY) == ["run.log"] * 3
        await check_invariants(kernel.session)


async def test_a_host_that_registers_again_changes_nothing_but_what_it_says(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        for cap in (5, 2):
            plays = {"alpha": admission.PlayRules(cap), "beta": admission.PlayRules(5)}
            await admission.register_host(
                kernel.session, host=1, name="host-1", pid=1, version="test", plays=plays
            )
        rows = await kernel.fetch("SELECT name, crash_cap FROM @schema@.plays ORDER BY name")
        assert [tuple(row) for row in rows] == [("alpha", 2), ("beta", 5)]
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.hosts") == 1
