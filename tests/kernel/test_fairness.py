"""Who is next: claims of runs by priority, play and age, claims of lanes by rank and age, and nothing in the way."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta

import pytest

from sql import claim, control, lanes
from sql.types import Lane
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes


async def submit_many(kernel: Kernel, count: int, play: str = "alpha", **fields: int) -> list[str]:
    """Runs that are due one after the other, a millisecond apart."""
    made = []
    for _ in range(count):
        made.append(await kernel.submit(play, **fields))
        await kernel.advance(0.001)
    return made


async def test_within_a_bucket_the_oldest_is_first(dsn: str, schema: str) -> None:
    """D-1."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        made = await submit_many(kernel, 6)
        assert {item.run_id for item in await kernel.claim(2)} == set(made[:2])
        assert {item.run_id for item in await kernel.claim(3)} == set(made[2:5])
        assert {item.run_id for item in await kernel.claim(3)} == set(made[5:])


async def test_higher_priorities_go_first_and_lower_ones_get_the_rest(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        made = {priority: await submit_many(kernel, 2, priority=priority) for priority in (-2, 0, 2)}
        assert {item.run_id for item in await kernel.claim(3)} == {*made[2], made[0][0]}
        assert {item.run_id for item in await kernel.claim(3)} == {made[0][1], *made[-2]}


async def test_an_oldest_turn_takes_who_has_waited_longest(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        (old,) = await submit_many(kernel, 1, priority=-2)
        await submit_many(kernel, 3, priority=2)
        assert {item.run_id for item in await kernel.claim(1, oldest=True)} == {old}


async def test_plays_of_one_priority_share_a_claim(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await submit_many(kernel, 20, "alpha")
        await submit_many(kernel, 20, "beta")
        assert Counter(item.play for item in await kernel.claim(10)) == {"alpha": 5, "beta": 5}


async def test_what_one_play_leaves_of_its_share_goes_to_its_equals_first(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await submit_many(kernel, 20, "alpha")
        await submit_many(kernel, 1, "beta")
        await submit_many(kernel, 20, "beta", priority=-1)
        taken = await kernel.claim(10)
        assert Counter(item.play for item in taken) == {"alpha": 9, "beta": 1}
        assert len({item.run_id for item in taken}) == 10
        await check_invariants(kernel.session)


async def test_a_locked_run_holds_up_nobody(dsn: str, schema: str) -> None:
    """D-1."""
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        await kernel.freeze_clock()
        made = await submit_many(kernel, 4)
        await caller.begin()
        await caller.fetch(
            kernel.render("SELECT 1 FROM @schema@.runs WHERE run_id = ANY ($1) FOR UPDATE"), made[:2]
        )
        answer = await kernel.claim_answer(3)
        assert {item.run_id for item in answer.items} == set(made[2:])
        assert answer.next_due_s is not None
        assert answer.next_due_s <= 0  # somebody is due, only not to be had now
        await caller.rollback()
        assert len(await kernel.claim()) == 2


async def test_the_next_due_time_is_of_the_buckets_served(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()

        async def next_due(plays: list[str], limit: int = 1) -> float | None:
            return (await kernel.claim_answer(limit, plays=plays)).next_due_s

        assert await next_due(["alpha"]) is None
        await kernel.submit(delay_s=7.5)
        await kernel.submit("beta", delay_s=2.0)
        assert await next_due(["alpha"]) == 7.5
        assert await next_due(["alpha", "beta"]) == 2.0
        await kernel.submit()
        assert await next_due(["alpha"], limit=1) == 0.0  # the limit was reached: look again
        assert await next_due(["alpha"], limit=1) == 7.5


async def test_the_low_water_mark_skips_what_is_due_before_it(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        early = await submit_many(kernel, 1)
        late = await submit_many(kernel, 2)
        mark = await kernel.fetchval("SELECT due_at FROM @schema@.runs WHERE run_id = $1", late[0])
        assert {item.run_id for item in await kernel.claim(stand=claim.Stand(mark))} == set(late)
        assert await kernel.claim(stand=claim.Stand(mark + timedelta(seconds=1))) == []
        assert {item.run_id for item in await kernel.claim()} == set(early)


async def test_lanes_go_by_rank(dsn: str, schema: str) -> None:
    """O-6."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        # Each has its admission delivered, and then: progress, a wait, an end; and one is new.
        progress, wait, end = [await kernel.started() for _ in range(3)]
        await kernel.deliver()
        await kernel.say(progress, 1)
        await kernel.advance(1.0)
        await kernel.park(wait, nap=50.0)
        await kernel.advance(1.0)
        await kernel.complete(end)
        await kernel.advance(1.0)
        new = await kernel.submit()
        order = [(await kernel.claim_lanes(limit=1))[0].run_id for _ in range(4)]
        assert order == [new, end.run_id, wait.run_id, progress.run_id]
        assert await kernel.claim_lanes(limit=1) == []


async def test_an_oldest_turn_takes_the_lane_that_has_waited_longest(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        progress = await kernel.started()
        await kernel.deliver()
        await kernel.say(progress, 1)
        await kernel.advance(1.0)
        await submit_many(kernel, 5)
        (prefix,) = await kernel.claim_lanes(limit=1, oldest=True)
        assert prefix.run_id == progress.run_id


async def test_blocked_lanes_and_lanes_in_flight_hide_nobody(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await submit_many(kernel, 6)
        blocked, held = await kernel.claim_lanes(limit=2)
        assert await kernel.hand_back(blocked, ending="blocked", reason="rejected") == "done"
        await lanes.renew(kernel.session, Lane.LIFECYCLE, [held], lease_s=500.0)
        await kernel.advance(31.0)  # the held lane's due time has passed, its lease has not
        seen = [prefix.run_id for _ in range(3) for prefix in await kernel.claim_lanes(limit=2)]
        assert len(seen) == len(set(seen)) == 4
        assert not {blocked.run_id, held.run_id} & set(seen)
        await check_invariants(kernel.session)


async def test_live_leases_do_not_hide_a_lapsed_one(dsn: str, schema: str) -> None:
    # Fault 1.2: a page full of rows that are not to be swept must not hide the one behind them.
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await submit_many(kernel, 8)
        live = await kernel.claim(7)
        for item in live:
            await kernel.renew(item, 1000.0)
        await kernel.advance(0.5)
        (dead,) = await kernel.claim(1)
        await kernel.advance(61.0)
        passes = [await kernel.expire(limit=4) for _ in range(2)]
        assert [(done.expired, done.pushed) for done in passes] == [(0, 4), (1, 3)]
        assert await kernel.status(dead.run_id) == "queued"
        await check_invariants(kernel.session)


async def test_locked_runs_do_not_hide_requests_to_cancel_behind_them(dsn: str, schema: str) -> None:
    # Fault 1.2, for the sweep of cancellations.
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        made = sorted([await kernel.submit() for _ in range(5)])
        await caller.begin()
        await caller.fetch(
            kernel.render("SELECT 1 FROM @schema@.runs WHERE run_id = ANY ($1) FOR UPDATE"), made[:3]
        )
        for run_id in made:
            await kernel.fetchval("SELECT @schema@.cancel_run($1)", run_id)
        assert await control.sweep(kernel.session, limit=2) == (2, 2)
        assert [await kernel.status(run_id) for run_id in made] == ["queued"] * 3 + ["cancelled"] * 2
        await caller.rollback()
        assert await control.sweep(kernel.session, limit=2) == (2, 1)
        assert await control.sweep(kernel.session, limit=2) == (1, 0)


async def test_a_marked_run_does_not_speak_for_its_bucket(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        (marked,) = await submit_many(kernel, 1, "alpha")
        (older,) = await submit_many(kernel, 1, "beta")
        await submit_many(kernel, 1, "alpha")
        await kernel.fetchval("SELECT @schema@.cancel_run($1)", marked)
        assert {item.run_id for item in await kernel.claim(1, oldest=True)} == {older}


async def test_marked_runs_do_not_use_up_a_claim(dsn: str, schema: str) -> None:
    """D-1, O-4."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        made = await submit_many(kernel, 4)
        for run_id in made[:2]:
            await kernel.fetchval("SELECT @schema@.cancel_run($1)", run_id)
        assert {item.run_id for item in await kernel.claim(2)} == set(made[2:])
