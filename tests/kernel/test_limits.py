"""Limits: never more attempts at once than a play, an organisation or a key may have, whoever claims and whenever."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import AsyncExitStack

import pytest
import trio

from sql import admission, claim, limits
from sql.calls import new_token
from sql.errors import InputRefused, KernelRefused
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel
from tests.support.queues import queue_many

pytestmark = pytest.mark.modes


def keyed(key: str) -> str:
    return json.dumps({"concurrency_key": key})


async def register(kernel: Kernel, **rules: admission.PlayRules) -> None:
    """What a host does when it starts."""
    await admission.register_host(
        kernel.session, host=kernel.owner, name="host", pid=1, version="test", plays=rules
    )


async def limit_play(kernel: Kernel, most: int | None, per_key: int | None = None) -> None:
    await register(kernel, alpha=admission.PlayRules(5, most, per_key))


async def submit_many(kernel: Kernel, count: int, play: str = "alpha", **fields: object) -> None:
    await kernel.admit([kernel.submission(play, **fields) for _ in range(count)])


async def running(kernel: Kernel) -> int:
    count: int = await kernel.fetchval("SELECT count(*) FROM @schema@.runs WHERE status = 'running'")
    return count


# --- one claim at a time -----------------------------------------------------------------------------


async def test_a_play_has_at_most_so_many_attempts(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await limit_play(kernel, 3)
        await submit_many(kernel, 4, priority=1)
        await submit_many(kernel, 4, priority=0, org_id="a")
        await submit_many(kernel, 2, "beta")
        answer = await kernel.claim_answer()
        assert Counter(item.play for item in answer.items) == {"alpha": 3, "beta": 2}
        assert {(item.play, item.limited) for item in answer.items} == {("alpha", True), ("beta", False)}
        assert answer.next_due_s is None  # nobody is to look again before an attempt ends
        assert (await kernel.claim_answer()).items == []
        (done, *_) = [item for item in answer.items if item.play == "alpha"]
        await kernel.complete(done)
        assert len(await kernel.claim()) == 1
        await check_invariants(kernel.session)


@pytest.mark.parametrize("limit", [100, 4])
async def test_a_key_of_several_organisations_is_one_key(dsn: str, schema: str, limit: int) -> None:
    """Also within one claim, and whatever room the organisations have."""
    async with open_kernel(dsn, schema) as kernel:
        await limits.set_limit(kernel.session, "org", "full", 0)
        await limit_play(kernel, None, 2)
        for org in ("full", "a", "b", "c"):
            await submit_many(kernel, 2, org_id=org, extras=keyed("k"))
        taken: list[claim.Claimed] = []
        for _ in range(3):
            taken += await kernel.claim(limit)
            assert await running(kernel) == 2
        await submit_many(kernel, 1, org_id="b", extras=keyed("other"))
        assert [item.org_id for item in await kernel.claim(limit)] == ["b"]
        for item in taken:
            await kernel.complete(item)
        assert len(await kernel.claim(limit)) == 2
        await check_invariants(kernel.session)


async def test_a_claim_that_leaves_a_key_behind_says_that_there_is_more(dsn: str, schema: str) -> None:
    """Whichever key it comes to first: nobody else would look at the other one before an attempt ends."""
    async with open_kernel(dsn, schema) as kernel:
        await limits.set_limit(kernel.session, "org", "full", 0)
        await submit_many(kernel, 3, org_id="full")
        await submit_many(kernel, 1, org_id="a")
        await submit_many(kernel, 1, org_id="a", extras=keyed("k"))
        answer = await kernel.claim_answer(3)
        left = 2 - len(answer.items)
        assert left == 0 or answer.next_due_s == pytest.approx(0.0, abs=0.001)
        assert len((await kernel.claim_answer(3)).items) == left


async def test_an_organisation_has_at_most_so_many_attempts(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        assert await limits.set_limit(kernel.session, "org", "a", 2)
        for play in ("alpha", "beta"):
            await submit_many(kernel, 4, play, org_id="a")
            await submit_many(kernel, 4, play, org_id="b")
        answer = await kernel.claim_answer()
        assert Counter(item.org_id for item in answer.items) == {"a": 2, "b": 8}
        assert {(item.org_id, item.limited) for item in answer.items} == {("a", True), ("b", False)}
        assert answer.next_due_s is None
        assert await limits.set_limit(kernel.session, "org", "a", 3)
        assert len(await kernel.claim()) == 1
        assert await limits.set_limit(kernel.session, "org", "a", 0)
        assert await kernel.claim() == []
        assert await limits.set_limit(kernel.session, "org", "a", None)
        assert not await limits.set_limit(kernel.session, "org", "a", None)
        assert len(await kernel.claim()) == 5


async def test_a_key_has_one_attempt_at_a_time_or_what_its_play_says(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await register(kernel, alpha=admission.PlayRules(5, max_per_key=2), beta=admission.PlayRules(5))
        for play in ("alpha", "beta"):
            for key in ("x", "y"):
                await submit_many(kernel, 5, play, extras=keyed(key))
        taken = await kernel.claim()
        assert Counter(item.play for item in taken) == {"alpha": 4, "beta": 2}
        assert all(item.limited for item in taken)
        keys = await kernel.fetch(
            "SELECT play, concurrency_key AS key FROM @schema@.runs WHERE status = 'running'"
        )
        assert Counter(tuple(row) for row in keys) == {
            ("alpha", "x"): 2, ("alpha", "y"): 2, ("beta", "x"): 1, ("beta", "y"): 1,
        }  # fmt: skip
        for item in taken:
            await kernel.complete(item)
        assert len(await kernel.claim()) == 6


async def test_all_three_at_once(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await limit_play(kernel, 7, 2)
        await limits.set_limit(kernel.session, "org", "a", 3)
        for org in ("a", "b", None):
            for key in ("x", "y", "z"):
                await submit_many(kernel, 4, org_id=org, extras=keyed(f"{org}-{key}"))
        taken = await kernel.claim()
        assert len(taken) <= 7
        taken += await kernel.claim()
        assert len(taken) == 7
        assert Counter(item.org_id for item in taken)["a"] <= 3


@pytest.mark.parametrize(
    "ending", ["completed", "failed", "retried", "released", "parked", "cancelled", "expired"]
)
async def test_every_way_to_end_makes_room(dsn: str, schema: str, ending: str) -> None:
    # Fault 1.10, 1.20: what no longer runs is not counted, however it came to an end.
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await limit_play(kernel, 1, 1)
        await limits.set_limit(kernel.session, "org", "a", 1)
        await submit_many(kernel, 2, org_id="a", extras=keyed("x"))
        (item,) = await kernel.claim()
        assert await kernel.claim() == []
        if ending == "parked":
            await kernel.park(item, nap=5.0)
        elif ending == "cancelled":
            await kernel.cancel(item.run_id)
        elif ending == "expired":
            await kernel.advance(61.0)
            assert (await kernel.expire()).expired == 1
        else:
            await kernel.settle(item, ending, payload='{"output": null, "error": {}}', delay_s=5.0)
        (other,) = await kernel.claim()
        if ending != "expired":
            assert other.run_id != item.run_id
        await check_invariants(kernel.session)


async def test_a_sleeper_that_wakes_waits_for_room(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await limit_play(kernel, 1)
        await submit_many(kernel, 2)
        (item,) = await kernel.claim()
        await kernel.park(item, nap=5.0)
        (other,) = await kernel.claim()
        await kernel.advance(6.0)
        answer = await kernel.claim_answer()
        assert (answer.items, answer.next_due_s) == ([], None)
        await kernel.complete(other)
        assert [one.run_id for one in await kernel.claim()] == [item.run_id]
        await check_invariants(kernel.session)


async def test_a_full_limit_hides_nobody(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await limits.set_limit(kernel.session, "org", "full-1", 1)
        await queue_many(kernel, 300, org="full")
        await queue_many(kernel, 300, org="", keys=2)
        await submit_many(kernel, 3, org_id="z")
        await submit_many(kernel, 3)
        first = await kernel.claim(5, oldest=True)
        taken = first + [item for _ in range(3) for item in await kernel.claim(5)]
        assert Counter(item.org_id for item in taken) == {"full-1": 1, "z": 3, None: 5}
        answer = await kernel.claim_answer(5)
        assert (answer.items, answer.next_due_s, answer.stand.walking) == ([], None, False)


async def test_an_oldest_turn_looks_past_those_who_are_held_back(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await limits.set_limit(kernel.session, "org", "full", 0)
        await submit_many(kernel, 3, priority=2, org_id="full")
        await kernel.advance(1.0)
        low = await kernel.submit("beta", priority=-2, org_id="b")
        await kernel.advance(1.0)
        await submit_many(kernel, 3, priority=2, org_id="c")
        assert [item.run_id for item in await kernel.claim(1, oldest=True)] == [low]


async def test_what_is_due_later_is_seen_behind_a_full_limit(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await limit_play(kernel, 1)
        await submit_many(kernel, 3)
        await submit_many(kernel, 1, delay_s=30.0)
        await submit_many(kernel, 1, "beta", org_id="a", delay_s=20.0)
        assert len(await kernel.claim()) == 1
        assert (await kernel.claim_answer()).next_due_s == 20.0
        assert (await kernel.claim_answer(plays=["alpha"])).next_due_s == 30.0


async def test_a_locked_run_behind_a_limit_is_tried_again(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        await limit_play(kernel, 1)
        await limits.set_limit(kernel.session, "org", "a", 1)
        await submit_many(kernel, 1)
        await submit_many(kernel, 1, "beta", org_id="a")
        await caller.begin()
        await caller.fetch(kernel.render("SELECT 1 FROM @schema@.runs FOR UPDATE"))
        answer = await kernel.claim_answer()
        assert answer.items == []
        assert answer.next_due_s is not None
        assert answer.next_due_s <= 0
        await caller.rollback()
        assert len(await kernel.claim()) == 2


# --- admission ---------------------------------------------------------------------------------------


async def test_nothing_limited_is_admitted_as_claimed(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await register(kernel, alpha=admission.PlayRules(5, max_running=1), beta=admission.PlayRules(5))
        await limits.set_limit(kernel.session, "org", "a", 1)
        items = [
            kernel.submission("alpha", claim=True),
            kernel.submission("beta", claim=True, org_id="a"),
            kernel.submission("beta", claim=True, extras=keyed("x")),
            kernel.submission("beta", claim=True, extras='{"receiver": "mine"}'),
            kernel.submission("beta", claim=True, org_id="b"),
            kernel.submission("beta", claim=False),
        ]
        expected = [False, False, False, True, True, False]
        for _ in range(2):  # the first answer was lost
            answers = await kernel.admit(items)
            assert [answer.claimed for answer in answers] == expected
            assert all(answer.created for answer in answers)
        assert await running(kernel) == 2
        assert len(await kernel.claim()) == 4
        await check_invariants(kernel.session)


async def test_submit_run_takes_a_concurrency_key(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        for _ in range(2):
            await kernel.fetch(
                """SELECT * FROM @schema@.submit_run('alpha', '1', '{"concurrency_key": "x"}')"""
            )
        (item,) = await kernel.claim()
        created = await kernel.fetchval(
            "SELECT payload FROM @schema@.facts WHERE run_id = $1 AND seq = 1", item.run_id
        )
        assert json.loads(created)["concurrency_key"] == "x"
        with pytest.raises(KernelRefused, match=r"options\.concurrency_key: must be a string of 1 to 255"):
            await kernel.fetch(
                """SELECT * FROM @schema@.submit_run('alpha', '1', '{"concurrency_key": 7}')"""
            )


async def test_submit_run_wants_the_key_of_a_play_with_a_limit_per_key(dsn: str, schema: str) -> None:
    submit = "SELECT * FROM @schema@.submit_run('alpha', '1', $1)"
    async with open_kernel(dsn, schema) as kernel:
        await kernel.fetch(submit, "{}")
        await register(kernel, alpha=admission.PlayRules(5, max_per_key=2))
        with pytest.raises(KernelRefused, match=r"options\.concurrency_key: play 'alpha' limits .* or null"):
            await kernel.fetch(submit, "{}")
        await kernel.fetch(submit, '{"concurrency_key": "x"}')
        await kernel.fetch(submit, '{"concurrency_key": null}')
        await register(kernel, alpha=admission.PlayRules(5, max_running=2))
        await kernel.fetch(submit, "{}")


# --- many at once ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["play", "org", "key", "all"])
async def test_claimers_at_the_same_time_never_go_over(dsn: str, schema: str, kind: str) -> None:
    async with AsyncExitStack() as stack:
        kernels = [await stack.enter_async_context(open_kernel(dsn, schema, owner=n)) for n in range(1, 5)]
        most = 3
        await limit_play(kernels[0], most if kind in ("play", "all") else None, most)
        if kind in ("org", "all"):
            await limits.set_limit(kernels[0].session, "org", "org-1", most)
        keys = {"key": 1, "all": 2}.get(kind, 0)
        await queue_many(kernels[0], 60, org="org" if kind in ("org", "all") else "", keys=keys)
        left = 60
        over: list[int] = []

        async def work(kernel: Kernel) -> None:
            nonlocal left
            while left:
                items = await kernel.claim(10)
                now = await running(kernel)
                if now > most:
                    over.append(now)
                for item in items:
                    await kernel.complete(item)
                    left -= 1
                if not items:
                    await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            for kernel in kernels:
                nursery.start_soon(work, kernel)
        assert over == []
        assert await kernels[0].claim() == []
        await check_invariants(kernels[0].session, ledger=False)  # the queue's admissions were not delivered


@pytest.mark.parametrize("kind", ["play", "org", "key"])
async def test_a_claim_that_is_not_committed_holds_up_only_its_own_limit(
    dsn: str, schema: str, kind: str
) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        await limit_play(kernel, 2 if kind == "play" else None, 2)
        await limits.set_limit(kernel.session, "org", "a", 2)
        extras = keyed("x") if kind == "key" else None
        await submit_many(kernel, 5, org_id="a" if kind == "org" else None, extras=extras)
        await caller.begin()
        assert len(await caller.doors(kernel).claim(1)) == 1
        await submit_many(kernel, 2, "beta", org_id="b")
        answer = await kernel.claim_answer()
        assert {item.play for item in answer.items} == {"beta"}
        assert answer.next_due_s is not None
        assert answer.next_due_s <= 0  # whoever has the limit's lock lets go of it in a moment
        await caller.commit()
        assert len(await kernel.claim()) == 1
        assert await kernel.claim() == []
        assert await running(kernel) == 4


async def test_a_claim_whose_answer_was_lost_is_counted(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await limit_play(kernel, 2)
        await submit_many(kernel, 5)
        token = new_token()
        await kernel.claim(1, token=token)  # swallowed
        assert len(await kernel.claim()) == 1
        back = await claim.read_back(kernel.session, owner=1, token=token)
        assert [item.limited for item in back] == [True]
        assert await kernel.claim() == []


# --- setting them ------------------------------------------------------------------------------------


async def test_plays_bring_their_limits_and_take_them_away(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await submit_many(kernel, 6)
        unlimited = await kernel.claim(2)
        await limit_play(kernel, 3, 4)
        assert [(one.kind, one.name, one.max_running) for one in await limits.read(kernel.session)] == [
            ("key", "alpha", 4), ("play", "alpha", 3),
        ]  # fmt: skip
        # What ran already is counted.
        assert len(await kernel.claim()) == 1
        assert {one.kind: one.running for one in await limits.read(kernel.session)} == {
            "key": None,
            "play": 3,
        }
        await limit_play(kernel, 2)  # below what runs: nothing ends, nothing starts
        assert await kernel.claim() == []
        await kernel.complete(unlimited[0])
        assert await kernel.claim() == []
        await limit_play(kernel, None)
        assert await limits.read(kernel.session) == []
        assert len(await kernel.claim()) == 3


async def test_limits_are_listed_in_pages(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        for number in range(5):
            await limits.set_limit(kernel.session, "org", f"o{number}", number)
        await kernel.admit([kernel.submission(org_id="o1")])
        await kernel.claim()
        page = await limits.read(kernel.session, limit=3)
        assert [(one.name, one.max_running, one.running) for one in page] == [
            ("o0", 0, 0),
            ("o1", 1, 1),
            ("o2", 2, 0),
        ]
        rest = await limits.read(kernel.session, limit=3, after=page[-1])
        assert [one.name for one in rest] == ["o3", "o4"]


@pytest.mark.parametrize(
    ("kind", "name", "most", "field"),
    [
        ("play", "alpha", 1, "kind"),
        ("team", "a", 1, "kind"),
        ("sandbox", "a" * 256, 1, "name"),
        ("sandbox_org", "", 1, "name"),
        ("sandbox_org", "a", -1, "max_running"),
        ("org", "", 1, "name"),
        ("org", "a" * 256, 1, "name"),
        ("org", "a", -1, "max_running"),
        ("org", "a", 1_000_001, "max_running"),
    ],
)
async def test_bad_limits_are_refused_by_name(
    dsn: str, schema: str, kind: str, name: str, most: int, field: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        with pytest.raises(InputRefused) as caught:
            await limits.set_limit(kernel.session, kind, name, most)
        assert caught.value.field == field
        assert await limits.read(kernel.session) == []
