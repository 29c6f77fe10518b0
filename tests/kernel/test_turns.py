"""Turns: organisations share a queue evenly, however much each has in it, and nobody is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from sql import claim
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel
from tests.support.queues import queue_many

pytestmark = pytest.mark.modes


async def queue(kernel: Kernel, count: int, org: str | None, play: str = "alpha", **fields: object) -> None:
    await kernel.admit([kernel.submission(play, org_id=org, **fields) for _ in range(count)])


def by_org(items: Sequence[claim.Claimed]) -> Counter[str | None]:
    return Counter(item.org_id for item in items)


async def claim_on(kernel: Kernel, times: int, limit: int) -> list[list[claim.Claimed]]:
    """Some claims in a row, each beginning where the last one left off."""
    stand, taken = claim.Stand(), []
    for _ in range(times):
        answer = await kernel.claim_answer(limit, stand=claim.Stand(None, stand.cursors))
        stand = answer.stand
        taken.append(answer.items)
    return taken


async def test_one_run_does_not_wait_behind_a_full_queue(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await queue(kernel, 200, "flood")
        await queue(kernel, 1, "one")
        await queue(kernel, 1, None)
        assert by_org(await kernel.claim(3)) == {"flood": 1, "one": 1, None: 1}
        await check_invariants(kernel.session)


async def test_a_claim_is_shared_evenly(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        for org in ("a", "b", "c", None):
            await queue(kernel, 40, org)
        assert by_org(await kernel.claim(40)) == {"a": 10, "b": 10, "c": 10, None: 10}


async def test_what_one_leaves_of_its_share_goes_to_those_who_have_more(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await queue(kernel, 100, "a")
        await queue(kernel, 100, "b")
        await queue(kernel, 2, "c")
        await queue(kernel, 1, None)
        answer = await kernel.claim_answer(43)
        assert by_org(answer.items) == {"a": 20, "b": 20, "c": 2, None: 1}
        assert answer.next_due_s == pytest.approx(0.0, abs=0.001)


async def test_what_another_queue_leaves_goes_to_those_without_organisation_too(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await queue(kernel, 2, None)
        await queue(kernel, 1, "a")
        await queue(kernel, 1, None, "beta")
        assert by_org(await kernel.claim(4)) == {None: 3, "a": 1}


async def test_small_claims_come_round_to_everybody(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        orgs = [f"org-{number}" for number in range(7)]
        for org in [*orgs, None]:
            await queue(kernel, 5, org)
        taken = await claim_on(kernel, 16, 1)
        first, second = taken[:8], taken[8:]
        for round_ in (first, second):
            assert by_org([item for items in round_ for item in items]) == dict.fromkeys([*orgs, None], 1)
        assert by_org([item for items in await claim_on(kernel, 3, 8) for item in items]) == dict.fromkeys(
            [*orgs, None], 3
        )


async def test_within_a_turn_the_oldest_is_first(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        made: dict[str, list[str]] = {"a": [], "b": []}
        for _ in range(4):
            for org, ids in made.items():
                ids.append(await kernel.submit(org_id=org))
                await kernel.advance(0.001)
        taken = [item.run_id for items in await claim_on(kernel, 3, 2) for item in items]
        assert [run_id for run_id in taken if run_id in made["a"]] == made["a"][:3]
        assert [run_id for run_id in taken if run_id in made["b"]] == made["b"][:3]


async def test_an_oldest_turn_gives_one_place_to_who_has_waited_longest(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        (old,) = [await kernel.submit(org_id="z")]
        await kernel.advance(1.0)
        for org in ("a", "b", "c"):
            await queue(kernel, 10, org)
        for limit in (1, 2):
            before = await kernel.fetchval("SELECT min(due_at) FROM @schema@.runs WHERE status = 'queued'")
            taken = await kernel.claim(limit, oldest=True)
            assert min(item.was_due_at for item in taken if item.was_due_at) == before
            assert (old in {item.run_id for item in taken}) == (limit == 1)


async def test_higher_priorities_still_go_first(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await queue(kernel, 10, "low", priority=-1)
        await queue(kernel, 3, "high", priority=1)
        await queue(kernel, 3, "middle")
        assert by_org(await kernel.claim(7)) == {"high": 3, "middle": 3, "low": 1}


async def test_nothing_starves_under_a_flood_of_higher_priority(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await queue(kernel, 30, "low", priority=-2)
        stand = claim.Stand()
        taken: list[claim.Claimed] = []
        for turn in range(1, 61):
            await queue(kernel, 3, "high", priority=2)
            answer = await kernel.claim_answer(
                2, oldest=turn % 4 == 0, stand=claim.Stand(None, stand.cursors)
            )
            stand = answer.stand
            taken += answer.items
        assert by_org(taken) == {"high": 90, "low": 30}


async def test_those_who_only_sleep_cost_their_neighbours_nothing(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        for number in range(40):
            await queue(kernel, 1, f"sleeper-{number}", delay_s=60.0)
        await queue(kernel, 1, "due")
        answer = await kernel.claim_answer(1)
        assert by_org(answer.items) == {"due": 1}
        answer = await kernel.claim_answer(5)
        assert (answer.items, answer.next_due_s, answer.stand.walking) == ([], 60.0, False)


async def walk_to_the_end(
    kernel: Kernel, stand: claim.Stand, limit: int
) -> tuple[Counter[str | None], int, float | None]:
    """Claim as a host does until nobody's turn is left: who was claimed, in how many claims, when the next is due."""
    taken: Counter[str | None] = Counter()
    for count in range(1, 40):
        answer = await kernel.claim_answer(limit, stand=claim.Stand(None, stand.cursors))
        stand = answer.stand
        taken += by_org(answer.items)
        if len(answer.items) < limit and not stand.walking:
            return taken, count, answer.next_due_s
        assert answer.next_due_s is not None
        assert answer.next_due_s <= 0
    raise AssertionError(f"still walking after {count} claims that took {taken}")


@pytest.mark.parametrize("sleepers", [255, 256, 257, 600, 1100])
async def test_a_walk_among_sleepers_goes_on_until_it_is_through(
    dsn: str, schema: str, sleepers: int
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await queue_many(kernel, 1, orgs=sleepers, delay_s=3600.0)
        await queue(kernel, 4, "a")
        await queue(kernel, 4, "b")
        taken, count, next_due_s = await walk_to_the_end(kernel, claim.Stand(), 3)
        assert taken == {"a": 4, "b": 4}
        assert count <= 16
        assert next_due_s == pytest.approx(3600.0, abs=60.0)


@pytest.mark.parametrize("full", [100, 255, 256, 257, 511, 1100])
async def test_a_walk_among_full_limits_goes_on_until_it_is_through(dsn: str, schema: str, full: int) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await queue_many(kernel, 2, orgs=full)
        await kernel.execute(
            "INSERT INTO @schema@.limits (kind, name, max_running) SELECT 'org', 'org-' || n, 0 "
            "FROM generate_series(1, $1::integer) AS n",
            full,
        )
        for cursors in ((), await _somewhere(kernel)):
            taken, count, next_due_s = await walk_to_the_end(kernel, claim.Stand(None, cursors), 3)
            assert (taken, next_due_s) == ({}, None)
            assert count <= full // 250 + 2
        await queue(kernel, 2, "free")
        taken, count, next_due_s = await walk_to_the_end(kernel, claim.Stand(), 3)
        assert (taken, next_due_s) == ({"free": 2}, None)
        assert count <= 2 * (full // 250 + 2)


async def _somewhere(kernel: Kernel) -> tuple[int | None, ...]:
    """A walk that was left after it had found somebody."""
    await queue(kernel, 3, "found")
    answer = await kernel.claim_answer(1)
    while not answer.items:
        answer = await kernel.claim_answer(1, stand=answer.stand)
    assert answer.stand.walking
    await kernel.execute("DELETE FROM @schema@.runs WHERE org_id = 'found' AND status = 'queued'")
    return answer.stand.cursors


async def test_a_locked_run_of_a_turn_holds_up_nobody(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        await queue(kernel, 3, "a")
        await queue(kernel, 3, "b")
        await caller.begin()
        await caller.fetch(kernel.render("SELECT 1 FROM @schema@.runs WHERE org_id = 'a' FOR UPDATE"))
        answer = await kernel.claim_answer(4)
        assert by_org(answer.items) == {"b": 3}
        assert answer.next_due_s is not None
        assert answer.next_due_s <= 0  # somebody is due, only not to be had now
        await caller.rollback()
        assert by_org(await kernel.claim(4)) == {"a": 3}


async def test_marked_runs_use_up_nobodys_turn(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await queue(kernel, 4, "a")
        await queue(kernel, 4, "b")
        for row in await kernel.fetch("SELECT run_id FROM @schema@.runs WHERE org_id = 'a' LIMIT 3"):
            await kernel.fetchval("SELECT @schema@.cancel_run($1)", row["run_id"])
        assert by_org(await kernel.claim(8)) == {"a": 1, "b": 4}


async def test_turns_and_plain_runs_of_several_plays(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        for play in ("alpha", "beta"):
            for org in ("a", "b", None):
                await queue(kernel, 20, org, play)
        taken = await kernel.claim(24)
        assert Counter((item.play, item.org_id) for item in taken) == {
            (play, org): 4 for play in ("alpha", "beta") for org in ("a", "b", None)
        }
        assert len({item.run_id for item in taken}) == 24
        await check_invariants(kernel.session)


async def test_keys_of_one_organisation_are_one_turn(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        for number in range(30):
            await queue(kernel, 1, "keys", extras=f'{{"concurrency_key": "k{number}"}}')
        await queue(kernel, 30, "b")
        await queue(kernel, 30, "c")
        assert by_org(await kernel.claim(30)) == {"keys": 10, "b": 10, "c": 10}
