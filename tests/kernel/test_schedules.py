"""Schedules in the kernel: one run per fire, whoever fires; definitions, pauses, repairs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import attrs
import pytest
import trio

from actors.cron import Timing
from actors.schedules import MOST_FIRES, firing
from sql import due, schedules
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

NOON = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)


@asynccontextmanager
async def frozen(dsn: str, schema: str) -> AsyncIterator[Kernel]:
    """A kernel whose clock stands at noon."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await kernel.advance(12 * 3600)
        yield kernel


def definition(name: str = "nightly", **fields: Any) -> schedules.Definition:
    given: dict[str, Any] = {
        "play": "alpha",
        "input": '{"n": 1}',
        "cron": None if "every_s" in fields else "0 * * * *",
        "every_s": None,
        "timezone": "UTC",
        "missed": "last",
    }
    return schedules.Definition(name=name, **{**given, **fields})


async def put(kernel: Kernel, name: str = "nightly", **fields: Any) -> str:
    item = definition(name, **fields)
    return await schedules.put(kernel.session, item, Timing(item.cron, item.every_s, item.timezone).after)


async def fire(kernel: Kernel, *, within: int = 100) -> list[str]:
    """What a host does that looks: the answers per schedule."""
    found, _ = await schedules.due(kernel.session, limit=within)
    answers = await schedules.fire(kernel.session, [firing(item) for item in found])
    return [answer.answer for answer in answers]


async def fired(kernel: Kernel, name: str = "nightly") -> list[datetime]:
    """Fire times of the runs that there are, oldest first."""
    found = await schedules.fires(kernel.session, name, limit=MOST_FIRES)
    assert all(one.status is not None for one in found)
    runs = await kernel.fetchval("SELECT count(*) FROM @schema@.runs WHERE labels ->> 'schedule' = $1", name)
    assert runs == len(found)
    return [one.fire_at for one in reversed(found)]


async def one(kernel: Kernel, name: str = "nightly") -> schedules.ScheduleStatus:
    (found,) = await schedules.read(kernel.session, [name])
    return found


# --- firing --------------------------------------------------------------------------------------------


async def test_a_fire_is_a_run_with_the_schedules_input_and_labels(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        assert (
            await put(
                kernel,
                org_id="acme",
                priority=1,
                labels='{"team": "ops"}',
                extras='{"concurrency_key": "k"}',
                release_id="v1",
            )
            == "created"
        )
        assert await fire(kernel) == []
        _, next_s = await schedules.due(kernel.session, limit=1)
        assert next_s == 3600.0
        await kernel.advance(3600)
        assert await fire(kernel) == ["done"]
        assert await fire(kernel) == []
        (row,) = await kernel.fetch(
            "SELECT r.*, f.payload #>> '{input,n}' AS n FROM @schema@.runs r JOIN @schema@.facts f USING (run_id)"
        )
        assert (row["play"], row["org_id"], row["priority"], row["release_id"], row["n"]) == (
            "alpha", "acme", 1, "v1", "1",
        )  # fmt: skip
        assert row["labels"] == '{"team": "ops", "fire_at": "2030-01-01T13:00:00Z", "schedule": "nightly"}'
        assert row["concurrency_key"] == "k"
        assert row["bucket"] == await kernel.fetchval("SELECT @schema@.bucket_of('alpha', 'v1', NULL, 1)")
        stands = await one(kernel)
        assert (stands.last_run_id, stands.last_fire_at) == (row["run_id"], NOON + timedelta(hours=1))
        assert stands.next_fire_at == NOON + timedelta(hours=2)
        await check_invariants(kernel.session)


async def test_many_firers_make_one_run_per_fire(dsn: str, schema: str) -> None:  # L-4
    async with frozen(dsn, schema) as kernel:
        for number in range(20):
            await put(kernel, f"s-{number}", every_s=60)
        done: list[str] = []

        async def race(owner: int) -> None:
            async with open_kernel(dsn, schema, owner=owner) as other:
                for _ in range(40):
                    done.extend(answer for answer in await fire(other) if answer == "done")

        async with trio.open_nursery() as nursery:
            for owner in (2, 3, 4):
                nursery.start_soon(race, owner)
            for _ in range(10):
                await kernel.advance(60)
                await trio.sleep(0.01)
        await fire(kernel)
        for number in range(20):
            found = await fired(kernel, f"s-{number}")
            assert len(found) == len(set(found))
            assert found[-1] == NOON + timedelta(minutes=10)
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runs") >= len(done)


async def test_a_lost_answer_fires_nothing_twice(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel)
        await kernel.advance(3600)
        found, _ = await schedules.due(kernel.session, limit=10)
        items = [firing(item) for item in found]
        assert [answer.answer for answer in await schedules.fire(kernel.session, items)] == ["done"]
        assert [answer.answer for answer in await schedules.fire(kernel.session, items)] == ["lost"]
        assert await fired(kernel) == [NOON + timedelta(hours=1)]


async def test_who_fires_waits_for_nobody_and_a_rollback_fires_nothing(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await put(kernel, "a")
        await put(kernel, "b")
        await kernel.advance(3600)
        await caller.begin()
        await caller.fetch(kernel.render("SELECT * FROM @schema@.schedules WHERE name = 'a' FOR UPDATE"))
        assert sorted(await fire(kernel)) == ["done", "lost"]
        assert await fired(kernel, "a") == []
        await caller.rollback()

        # Killed between the fire and its commit.
        await caller.begin()
        assert await fire(caller.doors(kernel)) == ["done"]
        assert await fire(kernel) == ["lost"]
        await caller.rollback()
        assert await fire(kernel) == ["done"]
        assert await fired(kernel, "a") == await fired(kernel, "b") == [NOON + timedelta(hours=1)]


async def test_a_clock_that_goes_back_and_forth_fires_nothing_twice(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel)
        await kernel.advance(3600)
        await fire(kernel)
        await kernel.advance(-7200)
        assert await fire(kernel) == []
        # Even if the schedule is made anew in the past.
        await schedules.delete(kernel.session, "nightly")
        await put(kernel)
        await kernel.advance(7200)
        assert await fire(kernel) == ["done"]
        assert await fired(kernel) == [NOON + timedelta(hours=1)]


async def test_what_was_computed_from_an_older_definition_is_void(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel)
        await kernel.advance(3600)
        found, _ = await schedules.due(kernel.session, limit=10)
        assert await put(kernel, input='{"n": 2}') == "changed"
        assert [answer.answer for answer in await schedules.fire(kernel.session, [firing(found[0])])] == [
            "lost"
        ]
        assert await fire(kernel) == ["done"]
        assert await kernel.fetchval("SELECT payload #>> '{input,n}' FROM @schema@.facts") == "2"


@pytest.mark.parametrize(
    ("missed", "expected"),
    [("last", [5]), ("all", [1, 2, 3, 4, 5]), ("skip", [])],
)
async def test_missed_fires(dsn: str, schema: str, missed: str, expected: list[int]) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel, missed=missed)
        await kernel.advance(5 * 3600 + 61)
        assert await fire(kernel) == ["done"]
        assert await fired(kernel) == [NOON + timedelta(hours=n) for n in expected]
        assert (await one(kernel)).next_fire_at == NOON + timedelta(hours=6)
        await kernel.advance(3600 - 61 + 59)
        await fire(kernel)  # late, but not missed
        assert (await fired(kernel))[-1] == NOON + timedelta(hours=6)


@pytest.mark.parametrize("timing", [{"cron": "* * * * * *"}, {"every_s": 1}])
async def test_what_is_made_up_for_is_bounded(dsn: str, schema: str, timing: dict[str, Any]) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel, missed="all", **timing)
        await kernel.advance(90 * 86_400)
        await fire(kernel)
        found = await fired(kernel)
        now = NOON + timedelta(days=90)
        assert found == [now - timedelta(seconds=n) for n in reversed(range(MOST_FIRES))]
        assert (await one(kernel)).next_fire_at == now + timedelta(seconds=1)


# --- definitions ---------------------------------------------------------------------------------------


async def test_declaring_again_changes_nothing(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel, every_s=3600)
        await kernel.advance(1800)
        assert await put(kernel, every_s=3600) == "unchanged"
        assert (await one(kernel)).next_fire_at == NOON + timedelta(hours=1)
        assert await put(kernel, every_s=3600, priority=2) == "changed"
        assert (await one(kernel)).next_fire_at == NOON + timedelta(hours=1)
        assert await put(kernel, every_s=60) == "changed"
        assert (await one(kernel)).next_fire_at == NOON + timedelta(minutes=31)
        assert await put(kernel, play="gamma") == "unknown_play"
        assert await put(kernel, environment="staging") == "environment"


async def test_a_pause_fires_nothing_and_what_came_meanwhile_was_missed(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel, missed="all")
        for _ in range(2):
            assert await schedules.pause(kernel.session, "nightly", paused=True) == "done"
        since = (await one(kernel)).paused_at
        assert since == NOON
        await kernel.advance(2 * 3600)
        assert await put(kernel, missed="all", priority=1) == "changed"  # a pause outlives a change
        assert (await schedules.due(kernel.session, limit=10)) == ([], None)
        assert await schedules.pause(kernel.session, "nightly", paused=False) == "done"
        await fire(kernel)
        assert await fired(kernel) == [NOON + timedelta(hours=n) for n in (1, 2)]
        assert await schedules.pause(kernel.session, "none", paused=True) == "missing"


async def test_a_host_that_read_before_a_pause_fires_nothing_after_it(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel)
        await kernel.advance(3600)
        found, _ = await schedules.due(kernel.session, limit=10)
        await schedules.pause(kernel.session, "nightly", paused=True)
        assert [answer.answer for answer in await schedules.fire(kernel.session, [firing(found[0])])] == [
            "lost"
        ]


async def test_runs_belong_to_the_release_whose_host_started_last(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await put(kernel, "a", release_id="v1")
        await put(kernel, "b", release_id="v1", play="beta")
        await put(kernel, "c", release_id="v1", environment="staging")

        async def adopt() -> int:
            return await schedules.adopt(kernel.session, ["alpha"], release_id="v2", environment=None)

        await caller.begin()
        await caller.fetch(kernel.render("SELECT * FROM @schema@.schedules WHERE name = 'a' FOR UPDATE"))
        assert await adopt() == 1
        await caller.rollback()
        assert await adopt() == 0
        found = {one.name: one.release_id for one in await schedules.read(kernel.session)}
        assert found == {"a": "v2", "b": "v1", "c": "v1"}
        await kernel.advance(3600)
        assert await fire(kernel) == ["done"] * 3
        rows = await kernel.fetch(
            "SELECT labels ->> 'schedule' AS s, release_id, environment FROM @schema@.runs"
        )
        assert {tuple(row) for row in rows} == {("a", "v2", None), ("b", "v1", None), ("c", "v1", "staging")}


# --- fires and their repair ----------------------------------------------------------------------------


async def lost(kernel: Kernel) -> schedules.Fire:
    """A fire whose run is gone."""
    await put(kernel)
    await kernel.advance(3600)
    await fire(kernel)
    await kernel.execute("DELETE FROM @schema@.facts")
    await kernel.execute("DELETE FROM @schema@.runs")
    (found,) = await schedules.fires(kernel.session, "nightly", limit=10)
    assert found.status is None
    return found


async def test_a_lost_run_is_submitted_again_once(dsn: str, schema: str) -> None:  # L-4
    async with frozen(dsn, schema) as kernel:
        gone = await lost(kernel)
        outcome, run_id = await schedules.repair(kernel.session, "nightly", gone.fire_at)
        assert outcome == "repaired"
        assert run_id != gone.run_id
        assert await schedules.repair(kernel.session, "nightly", gone.fire_at) == ("existing", run_id)
        assert await fired(kernel) == [gone.fire_at]
        assert (
            await kernel.fetchval("SELECT labels ->> 'fire_at' FROM @schema@.runs") == "2030-01-01T13:00:00Z"
        )


async def test_only_what_was_recorded_is_repaired(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        gone = await lost(kernel)

        async def repair(name: str, fire_at: datetime) -> str:
            return (await schedules.repair(kernel.session, name, fire_at))[0]

        assert await repair("nightly", gone.fire_at + timedelta(hours=1)) == "no_fire"
        assert await repair("weekly", gone.fire_at) == "no_schedule"
        await caller.begin()
        outcome, _ = await schedules.repair(caller.doors(kernel).session, "nightly", gone.fire_at)
        assert outcome == "repaired"
        assert await repair("nightly", gone.fire_at) == "busy"
        await caller.rollback()
        assert await repair("nightly", gone.fire_at) == "repaired"


async def test_a_deleted_schedule_fires_nothing_and_is_deleted_once(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel)
        await kernel.advance(3600)
        found, _ = await schedules.due(kernel.session, limit=10)
        assert await schedules.delete(kernel.session, "nightly") == "done"
        assert await schedules.delete(kernel.session, "nightly") == "missing"
        assert [answer.answer for answer in await schedules.fire(kernel.session, [firing(found[0])])] == [
            "lost"
        ]
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runs") == 0


async def test_held_rows_are_answered_busy(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await put(kernel)
        await caller.begin()
        await caller.fetch(kernel.render("SELECT * FROM @schema@.schedules FOR UPDATE"))
        calls: list[Callable[[], Awaitable[str]]] = [
            lambda: put(kernel, priority=1),
            lambda: schedules.pause(kernel.session, "nightly", paused=True),
            lambda: schedules.delete(kernel.session, "nightly"),
        ]
        with trio.fail_after(3):
            for call in calls:
                assert await call() == "busy"


async def test_fires_need_read_committed(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await put(kernel)
        await kernel.advance(3600)
        found, _ = await schedules.due(kernel.session, limit=10)
        await caller.begin("repeatable read")
        with pytest.raises(asyncpg.PostgresError, match="need READ COMMITTED"):
            await schedules.fire(caller.doors(kernel).session, [firing(found[0])])
        await caller.rollback()


async def test_the_next_due_read_knows_of_schedules(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:

        async def next_s() -> float | None:
            return (await due.next_due(kernel.session, host=1, buckets=[1], receivers=[""])).schedules_s

        assert await next_s() is None
        await put(kernel)
        assert await next_s() == 3600.0
        await schedules.pause(kernel.session, "nightly", paused=True)
        assert await next_s() is None


def test_firing_follows_the_definition_as_it_was_read() -> None:
    item = schedules.DueSchedule(
        "n", NOON, 1, "0 12 * * *", None, "UTC", "skip", NOON + timedelta(seconds=61)
    )
    assert firing(item) == schedules.Firing(item, [], NOON + timedelta(days=1))
    on_time = attrs.evolve(item, now=NOON + timedelta(seconds=60))
    assert firing(on_time).fire_ats == [NOON]
