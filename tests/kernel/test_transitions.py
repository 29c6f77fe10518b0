"""Single transitions where the model is too coarse: batches, odd values, what the ledger and the readers say."""

from __future__ import annotations

import json

import pytest

from sql import control, facts, lanes, settle, status
from sql.errors import KernelRefused
from sql.types import Lane
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import LEASE_S, open_kernel, saying

pytestmark = pytest.mark.modes


async def test_what_an_old_attempt_says_is_lost_even_beside_the_live_one(dsn: str, schema: str) -> None:
    """K-5, O-2."""
    async with open_kernel(dsn, schema) as kernel:
        old = await kernel.started()
        await kernel.settle(old, "released")
        (live,) = await kernel.claim()
        said = [
            saying(old, 1, payload={"by": "old"}),
            saying(live, 1, payload={"by": "live"}),
            saying(old, 2, Lane.OBSERVABILITY, {"by": "old"}),
            saying(live, 2, Lane.OBSERVABILITY, {"by": "live"}),
        ]
        assert await facts.append(kernel.session, said) == ["lost", "done", "lost", "done"]
        assert await kernel.say(live, 3) == "done"
        by = [fact.payload.get("by") for fact in await facts.read(kernel.session, live.run_id)]
        assert [who for who in by if who] == ["live", "live"]
        await check_invariants(kernel.session)


async def test_two_ends_of_one_attempt_in_one_call_have_one_winner(dsn: str, schema: str) -> None:
    """E-2, E-7, O-2."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        answers = await settle.settle(
            kernel.session,
            [
                settle.Settlement(item.run_id, item.attempt, item.token, outcome)
                for outcome in ("completed", "failed")
            ],
        )
        assert sorted(answer.answer for answer in answers) == ["done", "lost"]
        await check_invariants(kernel.session)


async def test_one_busy_run_leaves_the_rest_of_a_batch_alone(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        for _ in range(5):
            await kernel.submit()
        items = await kernel.claim()
        for item in items:
            await kernel.say(item, 1, Lane.OBSERVABILITY)
        await caller.begin()
        for table in ("runs", "lanes"):
            locked = items[1:2] if table == "runs" else items[3:4]
            await caller.fetch(
                kernel.render(f"SELECT 1 FROM @schema@.{table} WHERE run_id = ANY ($1) FOR UPDATE"),
                [item.run_id for item in locked],
            )
        said = [saying(item, 2, Lane.OBSERVABILITY) for item in items]
        assert await facts.append(kernel.session, said) == ["done", "busy", "done", "busy", "done"]
        settlements = [
            settle.Settlement(item.run_id, item.attempt, item.token, "completed") for item in items
        ]
        answers = await settle.settle(kernel.session, settlements)
        assert [answer.answer for answer in answers] == ["done", "busy", "done", "done", "done"]
        requests = [control.Cancellation(item.run_id, "r") for item in items]
        cancelled = await control.cancel(kernel.session, requests, mark=False)
        assert [answer.answer for answer in cancelled] == ["completed", "busy", *["completed"] * 3]
        await caller.rollback()
        assert await facts.append(kernel.session, said) == ["lost", "done", "lost", "lost", "lost"]
        assert (await settle.settle(kernel.session, settlements))[1].answer == "done"
        await check_invariants(kernel.session)


async def test_a_claim_begins_the_next_attempt_with_a_fence_of_its_own(dsn: str, schema: str) -> None:
    """D-1, D-2: it runs at once; the run's first start stays, the attempt before has ended."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        run_id = await kernel.submit()
        stands = """SELECT status, attempt, started_at, attempt_at, lease_token, lease_expires_at - attempt_at AS lease
                      FROM @schema@.runs"""
        await kernel.advance(1.0)
        await kernel.claim()
        (first,) = await kernel.fetch(stands)
        assert (first["status"], first["attempt"], first["started_at"]) == ("running", 1, first["attempt_at"])
        assert first["lease"].total_seconds() == LEASE_S
        await kernel.advance(1.0)
        assert await kernel.claim() == []
        await kernel.advance(LEASE_S)
        assert (await kernel.expire()).expired == 1
        await kernel.claim()
        (second,) = await kernel.fetch(stands)
        assert (second["status"], second["attempt"], second["started_at"]) == (
            "running",
            2,
            first["started_at"],
        )
        assert second["attempt_at"] > first["attempt_at"]
        assert second["lease_token"] != first["lease_token"]
        (ended,) = await status.read_attempts(kernel.session, run_id)
        assert (ended.attempt, ended.outcome) == (1, "expired")
        await check_invariants(kernel.session)


async def test_an_attempt_that_waits_for_nothing_is_refused(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        with pytest.raises(KernelRefused, match="waits: "):
            await kernel.park(item)
        assert await kernel.status(item.run_id) == "running"


async def test_a_wait_keeps_its_first_due_time_over_attempts(dsn: str, schema: str) -> None:
    """D-22."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        await kernel.park(item, a=10.0, b=30.0)
        await kernel.advance(10.0)
        (again,) = await kernel.claim()
        assert {key: wait.left_s for key, wait in again.waits.items()} == {"a": None, "b": 20.0}
        assert {key: wait.done for key, wait in again.waits.items()} == {"a": True, "b": False}
        await kernel.park(again, b=30.0)
        await kernel.advance(19.9)
        assert await kernel.claim() == []
        await kernel.advance(0.1)
        (last,) = await kernel.claim()
        assert (last.attempt, {key: wait.done for key, wait in last.waits.items()}) == (
            3,
            {"a": True, "b": True},
        )
        assert await kernel.fact_types(item.run_id) == [
            "run.created", "run.started", "run.waiting", "run.resumed", "run.started", "run.waiting", "run.resumed",
            "run.started",
        ]  # fmt: skip
        await check_invariants(kernel.session)


async def test_crashes_have_a_cap_of_their_own(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await kernel.execute("UPDATE @schema@.plays SET crash_cap = 2")
        run_id = await kernel.submit()
        for crashes in (1, 2, 3):
            (item,) = await kernel.claim()
            await kernel.advance(61.0)
            done = await kernel.expire()
            assert (done.expired, done.failed) == (1, crashes == 3)
            assert (await kernel.complete(item)).answer == "lost"
        (terminal,) = await status.read_terminals(kernel.session, [run_id])
        assert (terminal.status, terminal.payload["error"]["error_type"]) == ("failed", "LeaseExpired")
        assert [record.outcome for record in await status.read_attempts(kernel.session, run_id)] == [
            "expired"
        ] * 3
        record = (await status.read_runs(kernel.session, [run_id]))[run_id]
        assert (record.failures, record.crashes, record.terminal, record.due_at) == (0, 3, True, None)
        await check_invariants(kernel.session)


async def test_cancelling_says_who_won_and_whose_attempt_lost_its_fence(dsn: str, schema: str) -> None:
    """O-1, O-7."""
    async with open_kernel(dsn, schema) as kernel:
        running, done = await kernel.started(), await kernel.started()
        await kernel.complete(done)
        requests = [
            control.Cancellation(running.run_id, "first", "no", "me"),
            control.Cancellation(running.run_id, "second"),
            control.Cancellation(done.run_id, "third"),
            control.Cancellation("nothing", "fourth"),
        ]
        answers = await control.cancel(kernel.session, requests, mark=True)
        assert [answer.answer for answer in answers] == [
            "cancelled",
            "cancelled_before",
            "completed",
            "missing",
        ]
        assert answers[0].owner == kernel.owner
        assert (await kernel.renew(running)).answer == "lost"
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.cancellations") == 0
        await check_invariants(kernel.session)


@pytest.mark.parametrize("value", ['"much"', "null", "1e400", "{}", "[1]", "true"])
async def test_what_a_play_reports_cannot_stop_the_ledger(dsn: str, schema: str, value: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        odd, fine = await kernel.started(), await kernel.started()
        said = [saying(odd, 1), saying(odd, 2), saying(fine, 1)]
        said[1].payload = f'{{"done": {value}, "total": {value}}}'
        assert set(await facts.append(kernel.session, said)) == {"done"}
        assert (await kernel.deliver()).lanes == 2
        rows = await kernel.fetch("SELECT run_id, progress_done, progress_total FROM @schema@.ledger_runs")
        assert {row["run_id"]: tuple(row)[1:] for row in rows} == {
            odd.run_id: (None, None),
            fine.run_id: (1.0, 10.0),
        }
        await check_invariants(kernel.session)


async def test_a_wait_in_the_ledger_ends_with_the_wait(dsn: str, schema: str) -> None:
    """D-21."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        await kernel.park(item, nap=5.0)
        for prefix in (64, 1):  # all at once, and fact by fact
            while (await kernel.deliver(prefix=prefix)).lanes:
                await check_invariants(kernel.session)
            await kernel.advance(5.0)
            (item,) = await kernel.claim()
            await kernel.say(item, 1)
            if prefix == 64:
                await kernel.deliver()
                await check_invariants(kernel.session)
                await kernel.park(item, tea=5.0)


async def test_a_ledger_with_a_gap_blocks_the_lane_and_nobody_else(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        broken, fine = await kernel.started(), await kernel.started()
        await kernel.deliver()
        await kernel.execute("DELETE FROM @schema@.ledger_runs WHERE run_id = $1", broken.run_id)
        await kernel.complete(broken)
        await kernel.complete(fine)
        turn = await kernel.deliver()
        assert (turn.lanes, turn.blocked) == (1, 1)
        record = (await status.read_runs(kernel.session, [broken.run_id]))[broken.run_id]
        assert record.lane_blocked
        assert record.facts_delivered < record.facts_last
        assert (await kernel.deliver()).lanes == 0
        assert (await status.backlog(kernel.session)).blocked == 1


async def test_an_acknowledgement_of_anything_but_the_frozen_prefix_is_lost(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.say(item, 1)
        (prefix,) = await kernel.claim_lanes(prefix=2)
        for seqs in ([1], [1, 2, 3]):
            wrong = lanes.Prefix(prefix.run_id, prefix.lane, prefix.token, 1, seqs, [], [], [])
            assert (await kernel.acknowledge(wrong)).answer == "lost"
        assert await kernel.apply(prefix)
        assert (await kernel.acknowledge(prefix)).answer == "acked"
        await check_invariants(kernel.session)


async def test_a_prefix_that_somebody_may_have_sent_stays_frozen(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        (sent,) = await kernel.claim_lanes(prefix=2)
        await kernel.advance(31.0)
        await kernel.say(item, 1)
        for _ in range(2):  # two later owners find that they cannot send
            (again,) = await kernel.claim_lanes(prefix=8)
            assert (again.seqs, again.attempt) == (sent.seqs, 2)
            assert await kernel.hand_back(again, ending="unsent") == "done"
        await check_invariants(kernel.session)


async def test_a_prefix_that_nobody_has_sent_may_grow(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        (first,) = await kernel.claim_lanes(prefix=8)
        assert await kernel.hand_back(first, ending="unsent") == "done"
        await kernel.say(item, 1)
        (second,) = await kernel.claim_lanes(prefix=8)
        assert (list(second.seqs), second.attempt) == ([1, 2, 3], 1)
        await check_invariants(kernel.session)


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_a_prefix_that_is_sent_again_is_applied_once(dsn: str, schema: str, size: int) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        said = [saying(item, n, Lane(n % 2)) for n in range(1, 9)]
        await facts.append(kernel.session, said)
        for lane in Lane:
            (prefix,) = await kernel.claim_lanes(lane, prefix=size)
            while True:
                assert await kernel.apply(prefix)
                assert await kernel.apply(prefix)
                await check_invariants(kernel.session)
                successor = (await kernel.acknowledge(prefix, prefix=size)).successor
                assert await kernel.apply(prefix)  # a late copy
                await check_invariants(kernel.session)
                if successor is None:
                    break
                prefix = successor


async def test_lags_are_told_once_and_never_negative(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await kernel.started()
        (prefix,) = await kernel.claim_lanes()
        await kernel.apply(prefix)
        await kernel.advance(-3.0)  # the server's clock was set back
        assert (await kernel.acknowledge(prefix)).lags == [("run.created", 0.0), ("run.started", 0.0)]
        assert (await kernel.acknowledge(prefix)).lags == []


async def test_pages_of_runs_follow_each_other_without_gaps(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        made = sorted(
            [await kernel.submit(org_id="o", labels=json.dumps({"n": str(n % 2)})) for n in range(7)],
            reverse=True,
        )

        async def page(after: str | None, **filters: str) -> list[str]:
            wanted = {"status": None, "play": None, "org_id": None, "labels": None} | filters
            return [
                run.run_id for run in await status.list_runs(kernel.session, limit=3, after=after, **wanted)
            ]

        seen: list[str] = []
        while found := await page(seen[-1] if seen else None, org_id="o"):
            seen += found
        assert seen == made
        assert await page(None, org_id="p") == await page(None, status="running") == []
        labelled = await page(None, labels='{"n": "1"}') + await page(None, labels='{"n": "1", "m": "2"}')
        assert len(labelled) == 3


async def test_long_logs_are_read_whole_and_in_order(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        said = [saying(item, n, Lane.OBSERVABILITY if n % 3 else Lane.LIFECYCLE) for n in range(1, 2502)]
        assert set(await facts.append(kernel.session, said)) == {"done"}
        found = [(fact.lane, fact.seq) for fact in await facts.read(kernel.session, item.run_id)]
        assert found == sorted(found)
        assert len(found) == len(set(found)) == 2503
        while (await kernel.deliver(Lane.OBSERVABILITY, prefix=100)).lanes:
            pass
        await check_invariants(kernel.session)


async def test_a_lane_that_is_tried_again_keeps_the_prefix_that_has_been_out(dsn: str, schema: str) -> None:
    """Also when that try never leaves: what the ledger may have seen is delivered again as it was."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        assert await kernel.say(item, 1) == "done"
        assert await kernel.say(item, 2, Lane.OBSERVABILITY) == "done"
        firsts = {}
        for lane in Lane:
            (firsts[lane],) = await kernel.claim_lanes(lane)
            assert await kernel.hand_back(firsts[lane], ending="blocked", reason="rejected") == "done"
            assert await kernel.claim_lanes(lane) == []
            assert await kernel.say(item, 3 + lane.value, lane) == "done"
        assert await kernel.fetchval("SELECT @schema@.retry_lane($1)", item.run_id) is True
        assert await kernel.fetchval("SELECT @schema@.retry_lane($1)", item.run_id) is False
        for lane, first in firsts.items():
            (second,) = await kernel.claim_lanes(lane)
            assert await kernel.hand_back(second, ending="unsent") == "done"
            (third,) = await kernel.claim_lanes(lane)
            for again in (second, third):
                assert (again.seqs, again.payloads) == (first.seqs, first.payloads)
                assert again.attempt == 2
            assert (await kernel.acknowledge(third)).answer == "acked"
            (rest,) = await kernel.claim_lanes(lane)
            assert (rest.seqs[0], rest.attempt) == (first.through + 1, 1)
            assert (await kernel.acknowledge(rest)).answer == "acked"
        await check_invariants(kernel.session, ledger=False)
