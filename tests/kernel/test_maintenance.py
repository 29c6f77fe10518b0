"""Maintenance in the kernel: what may go goes, in bounded passes, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest
import trio

from sql import bundle, claim, maintenance
from sql.types import Lane
from tests.kernel.test_schedules import fire, put
from tests.support.callers import Caller, open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

DAY_S = 86_400.0

# Tables whose rows name a run and do not go with it.
STAY = {
    "runs": "goes itself",
    "ledger_runs": "by setting",
    "ledger_logs": "by setting",
    "rate_holds": "end by their own time, in their scope",
    "compute_records": "for whoever bills, who asks later",
    "wakes": "swept within moments",
    "unique_keys": "a window may outlive its run; forget_unique_keys() takes them",
}


@asynccontextmanager
async def frozen(dsn: str, schema: str) -> AsyncIterator[Kernel]:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        yield kernel


async def ended(kernel: Kernel, *, lines: int = 2, delivered: bool = True) -> str:
    """A run that has logged, slept and ended."""
    run_id = await kernel.submit()
    item = await claimed(kernel, run_id)
    await kernel.park(item, nap=0.0)
    item = await claimed(kernel, run_id)
    for number in range(lines):
        assert await kernel.say(item, number + 1, Lane.OBSERVABILITY) == "done"
    await kernel.complete(item, "out")
    if delivered:
        await deliver(kernel)
    return run_id


async def claimed(kernel: Kernel, run_id: str) -> claim.Claimed:
    return next(item for item in await kernel.claim() if item.run_id == run_id)


async def deliver(kernel: Kernel) -> None:
    for lane in Lane:
        await kernel.deliver(lane)


async def purge(
    kernel: Kernel, *, age_s: float = DAY_S, limit: int = 1_000, ledger: bool = True, start: object = None
) -> maintenance.Pass:
    return await maintenance.purge_runs(
        kernel.session,
        age_s=age_s,
        limit=limit,
        ledger=ledger,
        start=start,  # type: ignore[arg-type]
    )


async def run_ids(kernel: Kernel) -> set[str]:
    return {row["run_id"] for row in await kernel.fetch("SELECT run_id FROM @schema@.runs")}


async def tables_of_runs(kernel: Kernel) -> set[str]:
    rows = await kernel.fetch(
        "SELECT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid"
        " WHERE c.relnamespace = '@schema@'::regnamespace AND c.relkind = 'r' AND a.attname = 'run_id'"
    )
    return {row["relname"] for row in rows}


# --- retention -----------------------------------------------------------------------------------------


async def test_a_run_goes_with_all_it_has_left(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        old = await ended(kernel)
        await kernel.advance(DAY_S)
        new = await ended(kernel)
        await kernel.advance(1.0)
        gone = await purge(kernel)
        assert (gone.items, gone.next_from) == (1, None)
        assert gone.rows > 10
        assert await run_ids(kernel) == {new}
        for table in await tables_of_runs(kernel):
            assert not await kernel.fetch(f"SELECT 1 FROM @schema@.{table} WHERE run_id = $1", old), table
        assert (await purge(kernel)).items == 0
        await check_invariants(kernel.session)


async def test_every_table_of_runs_is_provided_for(dsn: str, schema: str) -> None:
    text = re.search(r"FUNCTION @schema@\.forget_runs\(.*?\n\$\$;", bundle.functions(), re.DOTALL)
    assert text is not None
    named = set(re.findall(r"DELETE FROM (\w+)", text[0]))
    async with open_kernel(dsn, schema) as kernel:
        assert await tables_of_runs(kernel) - set(STAY) == named - set(STAY) - {"sandbox_events"}


async def test_the_read_model_can_be_kept(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        run_id = await ended(kernel)
        await kernel.advance(DAY_S + 1)
        assert (await purge(kernel, ledger=False)).items == 1
        assert await run_ids(kernel) == set()
        for table, rows in (("ledger_runs", 1), ("ledger_logs", 2)):
            assert (
                len(await kernel.fetch(f"SELECT 1 FROM @schema@.{table} WHERE run_id = $1", run_id)) == rows
            )


async def test_nothing_open_undelivered_or_blocked_goes(dsn: str, schema: str) -> None:  # F-111
    async with frozen(dsn, schema) as kernel:
        kept = {
            "queued": await kernel.submit(delay_s=90 * DAY_S),
            "undelivered": await ended(kernel, delivered=False),
        }
        await kernel.execute("UPDATE @schema@.runs SET lane_due_at = 'infinity'")
        await kernel.execute("UPDATE @schema@.lanes SET lane_due_at = 'infinity'")
        kept["logs undelivered"] = await ended(kernel, delivered=False)
        await kernel.deliver(Lane.LIFECYCLE)
        await kernel.execute("UPDATE @schema@.lanes SET lane_due_at = 'infinity'")
        kept["logs blocked"] = await ended(kernel, delivered=False)
        await kernel.deliver(Lane.LIFECYCLE)
        (prefix,) = await kernel.claim_lanes(Lane.OBSERVABILITY)
        assert await kernel.hand_back(prefix, ending="blocked", reason="poison") == "done"
        kept["blocked"] = await ended(kernel, delivered=False)
        await kernel.deliver(Lane.OBSERVABILITY)
        (prefix,) = await kernel.claim_lanes()
        assert await kernel.hand_back(prefix, ending="blocked", reason="poison") == "done"
        kept["running"] = await kernel.submit()
        await kernel.claim(lease_s=90 * DAY_S)
        child = await ended(kernel)
        await kernel.execute(
            "UPDATE @schema@.runs SET parent_id = $1 WHERE run_id = $2", kept["running"], child
        )
        kept["its parent is open"] = child
        kept["a sandbox is not gone"] = await ended(kernel)
        kept["not billed yet"] = await ended(kernel)
        await kernel.execute(
            "INSERT INTO @schema@.sandboxes (created_at, due_at, certain_at, attempt, sandbox, provider, run_id)"
            " VALUES (now(), now(), now(), 1, 'box', 'local', $1)",
            kept["a sandbox is not gone"],
        )
        await kernel.execute(
            "INSERT INTO @schema@.billing_jobs (created_at, due_at, run_id) VALUES (now(), now(), $1)",
            kept["not billed yet"],
        )
        await kernel.advance(30 * DAY_S)
        assert await purge(kernel) == maintenance.Pass(0, 0, None)
        assert await run_ids(kernel) == set(kept.values())
        assert len(await run_ids(kernel)) == 9
        await kernel.execute("UPDATE @schema@.sandboxes SET confirmed_at = now()")
        await kernel.execute("UPDATE @schema@.billing_jobs SET finalised_at = now()")
        await kernel.execute(
            "INSERT INTO @schema@.sandbox_events (happened_at, event_id, sandbox, type, details)"
            " VALUES (now(), 'box:delete_confirmed', 'box', 'delete_confirmed', '{}')"
        )
        assert (await purge(kernel)).items == 2
        for table in ("sandboxes", "sandbox_events", "billing_jobs"):
            assert await kernel.fetchval(f"SELECT count(*) FROM @schema@.{table}") == 0


async def test_what_somebody_holds_stays_and_holds_up_nobody(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        held = {table: await ended(kernel) for table in ("runs", "lanes", "ledger_runs")}
        free = await ended(kernel)
        await kernel.advance(2 * DAY_S)
        await caller.begin()
        for table, run_id in held.items():
            await caller.fetch(
                kernel.render(f"SELECT 1 FROM @schema@.{table} WHERE run_id = $1 FOR NO KEY UPDATE"), run_id
            )
        with trio.fail_after(3):
            assert (await purge(kernel)).items == 1
        assert free not in await run_ids(kernel)
        await caller.rollback()
        assert (await purge(kernel)).items == 3


async def test_two_hosts_at_once_do_no_harm(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        for _ in range(4):
            await ended(kernel)
        await kernel.advance(2 * DAY_S)
        await caller.begin()
        assert (await purge(caller.doors(kernel), limit=2)).items == 2
        assert (await purge(kernel)).items == 2
        await caller.commit()
        assert await run_ids(kernel) == set()


async def test_passes_are_bounded_and_go_past_what_has_to_stay(dsn: str, schema: str) -> None:  # F-112
    async with frozen(dsn, schema) as kernel:
        stay = [await ended(kernel) for _ in range(5)]  # all in one moment
        await kernel.execute("UPDATE @schema@.lanes SET last_seq = last_seq + 1, lane_due_at = 'infinity'")
        order = []
        for _ in range(6):
            await kernel.advance(1)
            order.append(await ended(kernel))
        await kernel.advance(2 * DAY_S)
        start, passes, gone = None, 0, []
        while True:
            before = await run_ids(kernel)
            pass_ = await purge(kernel, limit=2, start=start)
            assert pass_.items <= 2
            gone += sorted(before - await run_ids(kernel), key=order.index)
            passes, start = passes + 1, pass_.next_from
            if start is None:
                break
        assert gone == order  # those that ended first first
        assert await run_ids(kernel) == set(stay)
        assert passes <= 8


async def test_fires_go_with_their_runs(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        await put(kernel)
        await kernel.advance(3600)
        await fire(kernel)
        (item,) = await kernel.claim()
        await kernel.complete(item)
        await deliver(kernel)
        await kernel.advance(DAY_S)
        assert (await purge(kernel)).items == 1
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.fires") == 0


async def test_hosts_that_are_long_gone_are_forgotten(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel, open_kernel(dsn, schema, owner=2):
        await kernel.execute("UPDATE @schema@.hosts SET seen_at = @schema@.clock() WHERE host = 1")
        await kernel.execute(
            "UPDATE @schema@.hosts SET seen_at = @schema@.clock() - interval '1 day' WHERE host = 2"
        )
        assert await maintenance.forget_hosts(kernel.session, age_s=DAY_S, limit=10) == 0
        assert await maintenance.forget_hosts(kernel.session, age_s=DAY_S - 1, limit=10) == 1
        assert [row["host"] for row in await kernel.fetch("SELECT host FROM @schema@.hosts")] == [1]


# --- log bodies ----------------------------------------------------------------------------------------


async def bodies(kernel: Kernel, table: str = "facts") -> dict[tuple[str, int], dict[str, object]]:
    lane = " WHERE lane = 1" if table == "facts" else ""
    rows = await kernel.fetch(f"SELECT run_id, seq, payload FROM @schema@.{table}{lane}")
    return {(row["run_id"], row["seq"]): json.loads(row["payload"]) for row in rows}


async def test_delivered_log_bodies_go_and_their_rows_stay(dsn: str, schema: str) -> None:  # F-110, A-9
    async with frozen(dsn, schema) as kernel:
        old = await ended(kernel)
        undelivered = await ended(kernel, delivered=False)
        await kernel.advance(7 * DAY_S)
        fresh = await kernel.started()
        await kernel.say(fresh, 1, Lane.OBSERVABILITY)
        await kernel.advance(1)
        pass_ = await maintenance.scrub_logs(kernel.session, age_s=7 * DAY_S, limit=100, start=None)
        assert (pass_.items, pass_.next_from) == (2, None)
        found = await bodies(kernel)
        assert found[old, 1] == {"$scrubbed": True}
        assert len(found) == 5
        assert found[undelivered, 1] == {"message": "line 1"}
        assert found[fresh.run_id, 1] == {"message": "line 1"}
        again = await maintenance.scrub_logs(kernel.session, age_s=7 * DAY_S, limit=100, start=None)
        assert again.items == 0

        await deliver(kernel)
        for _ in range(2):
            await maintenance.scrub_logs(kernel.session, age_s=7 * DAY_S, limit=100, start=None)
        assert (await bodies(kernel))[undelivered, 2] == {"$scrubbed": True}
        lines = await bodies(kernel, "ledger_logs")
        assert {line["message"] for line in lines.values()} == {"line 1", "line 2"}  # delivered before
        pass_ = await maintenance.scrub_ledger_logs(kernel.session, age_s=7 * DAY_S, limit=100, start=None)
        assert pass_.items == 4
        await check_invariants(kernel.session)


async def test_what_a_play_logged_cannot_keep_its_body(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        item = await kernel.started()
        line = {"attempt": 1, "message": "m", "fields": {"$scrubbed": True}}
        await kernel.say(item, 1, Lane.OBSERVABILITY, line)
        await deliver(kernel)
        await kernel.advance(DAY_S)
        await maintenance.scrub_logs(kernel.session, age_s=1.0, limit=10, start=None)
        assert list((await bodies(kernel)).values()) == [{"attempt": 1, "$scrubbed": True}]


async def test_scrubs_are_bounded_and_go_past_what_is_undelivered(dsn: str, schema: str) -> None:  # F-112
    async with frozen(dsn, schema) as kernel:
        await ended(kernel, lines=5, delivered=False)
        await kernel.execute("UPDATE @schema@.lanes SET lane_due_at = 'infinity'")
        await kernel.advance(1)
        for _ in range(3):
            await ended(kernel, lines=3)
            await kernel.advance(1)
        await kernel.advance(DAY_S)
        start, done = None, []
        while True:
            pass_ = await maintenance.scrub_logs(kernel.session, age_s=DAY_S, limit=2, start=start)
            done.append(pass_.items)
            start = pass_.next_from
            if start is None:
                break
        assert sum(done) == 9
        assert max(done) == 2
        assert len(done) <= 9


@pytest.mark.parametrize("table", ["facts", "ledger_logs"])
async def test_the_scrubbed_is_not_read_again(dsn: str, schema: str, table: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        lane = "1, 'run.log', " if table == "facts" else ""
        columns = "lane, type, " if table == "facts" else ""
        await kernel.execute(
            f"INSERT INTO @schema@.{table} (run_id, {columns}seq, created_at, payload)"
            f" SELECT 'r-' || n / 100, {lane}n, clock_timestamp() - interval '9 days',"
            """ CASE WHEN n <= 20000 THEN '{"$scrubbed": true}'::jsonb ELSE '{"message": "m"}' END"""
            " FROM generate_series(1, 20010) AS n"
        )
        await kernel.execute(
            "INSERT INTO @schema@.lanes (run_id, lane_receiver, last_seq, acked_seq, lane_due_at)"
            " SELECT 'r-' || n, '', 30000, 30000, clock_timestamp() FROM generate_series(0, 201) AS n"
        )
        scrub = maintenance.scrub_logs if table == "facts" else maintenance.scrub_ledger_logs

        async def rows_read(expected: int) -> int:
            before = await read(caller, kernel)
            pass_ = await scrub(caller.doors(kernel).session, age_s=7 * DAY_S, limit=1_000, start=None)
            assert pass_.items == expected
            return await read(caller, kernel) - before

        await caller.begin()
        assert await rows_read(10) < 200
        assert await rows_read(0) < 50
        await caller.rollback()


async def read(caller: Caller, kernel: Kernel) -> int:
    """Rows and index entries that this transaction has made the server read."""
    return int(
        await caller.fetchval(
            kernel.render(
                "SELECT coalesce(sum(pg_stat_get_xact_tuples_returned(oid)), 0) FROM pg_class"
                " WHERE relnamespace = '@schema@'::regnamespace AND relkind IN ('r', 'i')"
            )
        )
    )


# --- counts --------------------------------------------------------------------------------------------


async def test_runs_are_counted_page_by_page(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        for _ in range(3):
            await ended(kernel)
        for _ in range(4):
            await kernel.submit(delay_s=60.0)
        state, pages = await maintenance.count_runs(kernel.session, state=None, limit=2), 1
        began = await kernel.fetchval("SELECT @schema@.clock()")
        while state is not None:
            assert await kernel.fetchval("SELECT count(*) FROM @schema@.status_counts") == 0
            await kernel.advance(1)
            state, pages = await maintenance.count_runs(kernel.session, state=state, limit=2), pages + 1
        assert pages == 4
        rows = await kernel.fetch("SELECT status, runs, counted_at FROM @schema@.status_counts")
        assert {row["status"]: row["runs"] for row in rows if row["runs"]} == {"completed": 3, "queued": 4}
        assert {row["counted_at"] for row in rows} == {began}
        assert len(rows) == 6


async def test_an_empty_table_is_counted(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        assert await maintenance.count_runs(kernel.session, state=None, limit=2) is None
        assert await kernel.fetchval("SELECT sum(runs) FROM @schema@.status_counts") == 0


# --- chores --------------------------------------------------------------------------------------------

NAMES = ("retention", "logs", "counts")


async def test_a_chore_is_one_hosts_at_a_time(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        taken = []
        while (one := await maintenance.claim(kernel.session, NAMES, lease_s=60)) is not None:
            taken.append(one)
        assert sorted(one.name for one in taken) == sorted(NAMES)
        assert await maintenance.finish(kernel.session, taken[0], next_s=600, state='{"at": 1}')
        assert not await maintenance.finish(kernel.session, taken[0], next_s=600, state=None)  # asked again
        await kernel.advance(60)
        # Those whose hosts have died are due again; the one that is done is not.
        again = [await maintenance.claim(kernel.session, NAMES, lease_s=60) for _ in range(3)]
        assert {one.name for one in again if one} == {one.name for one in taken[1:]}
        assert not await maintenance.finish(kernel.session, taken[1], next_s=600, state=None)  # too late
        await kernel.advance(540)
        found = {
            one.name: one.state
            for _ in NAMES
            if (one := await maintenance.claim(kernel.session, NAMES, lease_s=9))
        }
        assert found[taken[0].name] == '{"at": 1}'


async def test_the_chores_of_newer_hosts_are_left_to_them(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel:
        await kernel.execute("UPDATE @schema@.chores SET name = 'later' WHERE name = 'logs'")
        found = [await maintenance.claim(kernel.session, NAMES, lease_s=60) for _ in range(3)]
        assert {one.name for one in found if one} == {"retention", "counts"}


async def test_a_chore_whose_row_is_held_is_passed_over(dsn: str, schema: str) -> None:
    async with frozen(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        one = await maintenance.claim(kernel.session, ["logs"], lease_s=60)
        assert one is not None
        await caller.begin()
        await caller.fetch(kernel.render("SELECT 1 FROM @schema@.chores FOR UPDATE"))
        with trio.fail_after(3):
            assert await maintenance.claim(kernel.session, NAMES, lease_s=60) is None
            assert not await maintenance.finish(kernel.session, one, next_s=1, state=None)
        await caller.rollback()
        assert one.claim == await kernel.fetchval("SELECT @schema@.clock()") + timedelta(seconds=60)
