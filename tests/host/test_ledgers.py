"""Ledgers of every kind, through a host: order, exactly once, and what becomes of each answer."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import attrs
import pytest
import trio

from runtime import (
    Context,
    Delivery,
    Lane,
    LedgerRejected,
    LedgerRetry,
    MemoryLedger,
    PostgresLedger,
    Runtime,
    play,
)
from tests.support.hosts import Hosts, eventually
from tests.support.proxies import actor_proxy

LIFE = ["run.created", "run.started", "run.completed"]


@play("echo")
async def echo(_: Context, data: Any) -> Any:
    return data


@play("talks")
async def talks(ctx: Context, data: int) -> int:
    for number in range(data):
        ctx.log(f"line {number}")
    ctx.progress(1, 1)
    await ctx.sleep(0.25)
    ctx.log("after")
    return data


async def acknowledged(hosts: Hosts, *, within_s: float = 20.0) -> None:
    """Wait until every fact of both lanes is acknowledged."""

    async def whole() -> bool:
        return not await hosts.value(
            """SELECT (SELECT count(*) FROM @.runs WHERE acked_seq < last_seq OR lane_expires_at IS NOT NULL)
                    + (SELECT count(*) FROM @.lanes WHERE acked_seq < last_seq OR lane_expires_at IS NOT NULL)"""
        )

    await eventually(whole, within_s=within_s, every_s=0.03)


@attrs.define(eq=False)
class Scripted:
    """A user's ledger that has ``append`` only, and answers as told before it takes anything."""

    answers: list[Any] = attrs.field(factory=list)
    kept: MemoryLedger = attrs.field(factory=MemoryLedger)
    seen: list[Delivery] = attrs.field(factory=list)
    at: list[float] = attrs.field(factory=list)

    async def append(self, delivery: Delivery) -> None:
        self.seen.append(delivery)
        self.at.append(trio.current_time())
        if self.answers:
            answer = self.answers.pop(0)
            if answer == "hang":
                await trio.sleep_forever()
            if isinstance(answer, float):
                await trio.sleep(answer)
            elif answer == "apply and fail":
                await self.kept.append(delivery)
                raise ConnectionError("the answer was lost")
            elif answer is not None:
                raise answer
        await self.kept.append(delivery)


def assert_delivered(ledger: MemoryLedger, run_ids: list[str]) -> None:
    """In order, none lost. (The ledger itself refuses what is out of order or differs.)"""
    for run_id in run_ids:
        for lane in Lane:
            seqs = [fact.seq for fact in ledger.facts(run_id, lane)]
            assert seqs == list(range(1, len(seqs) + 1))
        assert ledger.facts(run_id, Lane.LIFECYCLE)[-1].type == "run.completed"


# --- what arrives ------------------------------------------------------------------------------------------


@pytest.mark.modes
async def test_a_memory_ledger_has_every_fact_once_and_in_order(hosts: Hosts) -> None:
    ledger = MemoryLedger()
    async with hosts.open(echo, talks, ledger=ledger, slots=100, delivery_prefix=3) as rt:
        handles = await rt.submit_many([(echo, number) for number in range(300)] + [(talks, 20)] * 10)
        for handle in handles:
            await handle.result(timeout=30)
        await acknowledged(hosts)
        run_ids = [handle.run_id for handle in handles]
        assert_delivered(ledger, run_ids)
        assert ledger.repeated == 0
        # The same as the log.
        for run_id in (run_ids[0], run_ids[-1]):
            assert list(ledger.facts(run_id)) == await rt.facts(run_id)
        assert len(ledger.facts(run_ids[-1], Lane.OBSERVABILITY)) == 20 + 20 + 1
        for delivery in ledger.deliveries:
            first, last = delivery.facts[0].seq, delivery.facts[-1].seq
            assert delivery.delivery_key == f"{delivery.run_id}:{delivery.lane.label}:{first}-{last}"
            assert 1 <= len(delivery.facts) <= 3
            assert re.fullmatch("[0-9a-f]{64}", delivery.digest)
            assert delivery.attempt == 1
        await hosts.check(ledger=False)


@pytest.mark.modes
async def test_a_users_ledger_needs_append_only(hosts: Hosts) -> None:
    ledger = Scripted()
    async with hosts.open(echo, talks, ledger=ledger) as rt:
        handles = await rt.submit_many([(echo, number) for number in range(40)] + [(talks, 10)] * 3)
        for handle in handles:
            await handle.result(timeout=30)
        await acknowledged(hosts)
        assert_delivered(ledger.kept, [handle.run_id for handle in handles])
        assert ledger.kept.repeated == 0
        assert (await handles[0].status()).facts_delivered == 3


async def test_the_two_ways_to_feed_the_read_model_give_the_same(hosts: Hosts) -> None:
    rows: list[list[Any]] = []
    for in_database in (True, False):
        async with hosts.open(echo, talks, ledger=PostgresLedger(in_database=in_database)) as rt:
            handles = await rt.submit_many([(echo, number) for number in range(100)] + [(talks, 15)] * 5)
            for handle in handles:
                await handle.result(timeout=30)
            await hosts.check([handle.run_id for handle in handles])
        rows.append(
            await hosts.ask(
                """SELECT play, status, attempts, applied_seq, applied_facts, output, error, progress_done,
                          (SELECT count(*) FROM @.ledger_logs g WHERE g.run_id = l.run_id) AS lines
                     FROM @.ledger_runs l ORDER BY play, output::text""",
            )
        )
        await hosts.ask(
            "TRUNCATE @.ledger_runs, @.ledger_logs, @.runs, @.facts, @.lanes, @.attempts, @.waits"
        )
    assert len(rows[0]) == 105
    assert [tuple(row) for row in rows[0]] == [tuple(row) for row in rows[1]]


async def test_facts_of_two_hosts_reach_one_ledger_in_order(hosts: Hosts) -> None:
    ledger = MemoryLedger()
    async with hosts.open(echo, talks, ledger=ledger) as rt, hosts.open(echo, talks, ledger=ledger) as other:
        handles = [
            *await rt.submit_many([(echo, number) for number in range(150)]),
            *await other.submit_many([(talks, 5)] * 20),
        ]
        for handle in handles:
            await handle.result(timeout=30)
        await acknowledged(hosts)
        assert_delivered(ledger, [handle.run_id for handle in handles])
        assert ledger.repeated == 0


# --- answers -----------------------------------------------------------------------------------------------


@pytest.mark.modes
@pytest.mark.parametrize(
    "answer", [LedgerRetry(0.3), ConnectionError("away"), "hang", "apply and fail", KeyError("own")], ids=str
)
async def test_a_redelivery_is_the_same_delivery(hosts: Hosts, answer: Any) -> None:
    """Same key, members and digest, although more was said meanwhile; only the attempt differs."""
    hold = trio.Event()

    @play("works")
    async def works(ctx: Context) -> None:
        await hold.wait()
        ctx.progress(1)
        ctx.progress(2)

    ledger = Scripted([answer, LedgerRetry(0.05)])
    async with hosts.open(works, ledger=ledger, delivery_timeout_s=0.5) as rt:
        handle = await rt.submit(works)

        async def begun() -> bool:
            return bool(ledger.seen)

        await eventually(begun)
        hold.set()
        await handle.result(timeout=10)
        await acknowledged(hosts)
        first, second, third = ledger.seen[:3]
        assert (first.attempt, second.attempt, third.attempt) == (1, 2, 3)
        for again in (second, third):
            assert (again.delivery_key, again.facts, again.digest) == (
                first.delivery_key,
                first.facts,
                first.digest,
            )
        assert ledger.kept.facts(handle.run_id)[0].type == "run.created"
        assert_delivered(ledger.kept, [handle.run_id])
        assert ledger.kept.repeated == (len(first.facts) if answer == "apply and fail" else 0)
        if isinstance(answer, LedgerRetry):
            assert 0.3 <= ledger.at[1] - ledger.at[0] < 1.5
        elif answer != "hang":
            # The lane's own backoff, which is about a second.
            assert 0.4 <= ledger.at[1] - ledger.at[0] < 3.0


async def test_a_rejected_delivery_blocks_its_lane_visibly_and_no_other(hosts: Hosts) -> None:
    """M-11."""

    @attrs.define(eq=False)
    class Picky(Scripted):
        async def append(self, delivery: Delivery) -> None:
            self.seen.append(delivery)
            if delivery.facts[0].payload.get("input") == "poison":
                raise LedgerRejected("we do not take poison")
            await self.kept.append(delivery)

    ledger = Picky()
    async with hosts.open(echo, ledger=ledger) as rt:
        bad = await rt.submit(echo, "poison")
        good = await rt.submit_many([(echo, number) for number in range(20)])
        assert await bad.result(timeout=10) == "poison"
        for handle in good:
            await handle.result(timeout=10)

        async def blocked() -> bool:
            return (await bad.status()).lane_blocked is not None

        await eventually(blocked)
        assert "we do not take poison" in ((await bad.status()).lane_blocked or "")
        for handle in good:

            async def whole(run_id: str = handle.run_id) -> bool:
                status = await rt.status(run_id)
                return status.facts_delivered == status.facts_last

            await eventually(whole)
        await trio.sleep(1.0)
        assert Counter(delivery.run_id for delivery in ledger.seen)[bad.run_id] == 1
        assert (await bad.status()).facts_delivered == 0
        metrics = (await rt._host.view.metrics()).decode()
        assert re.search(r"blocked\S* 1\.0", metrics), metrics
        await hosts.check(ledger=False)


async def test_a_lane_is_blocked_after_too_many_failures(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.delivery.MOST_ATTEMPTS", 3)
    ledger = Scripted([LedgerRetry(0.01)] * 10)
    async with hosts.open(echo, ledger=ledger) as rt:
        handle = await rt.submit(echo, 1)

        async def blocked() -> bool:
            return (await handle.status()).lane_blocked is not None

        await eventually(blocked)
        reason = (await handle.status()).lane_blocked or ""
        assert "3 deliveries" in reason
        assert "try again" in reason
        assert [delivery.attempt for delivery in ledger.seen] == [1, 2, 3]


async def test_a_slow_ledger_loses_nothing_and_repeats_nothing(hosts: Hosts) -> None:
    """Slower than its lease would allow without renewals."""

    @attrs.define(eq=False)
    class Slow(Scripted):
        async def append(self, delivery: Delivery) -> None:
            await trio.sleep(0.8)
            await super().append(delivery)

    ledger = Slow()
    async with hosts.open(
        talks, ledger=ledger, delivery_timeout_s=1.5, lane_lease_s=2.0, lane_actors=2, delivery_prefix=2
    ) as rt:
        handles = await rt.submit_many([(talks, 2)] * 3)
        for handle in handles:
            await handle.result(timeout=20)
        await acknowledged(hosts, within_s=30.0)
        assert_delivered(ledger.kept, [handle.run_id for handle in handles])
        assert ledger.kept.repeated == 0


async def test_a_ledger_that_hangs_holds_up_only_its_own_lane(hosts: Hosts) -> None:
    @attrs.define(eq=False)
    class Hangs(Scripted):
        async def append(self, delivery: Delivery) -> None:
            if delivery.facts[0].payload.get("input") == "hang":
                await trio.sleep_forever()
            await super().append(delivery)

    ledger = Hangs()
    async with hosts.open(echo, ledger=ledger, delivery_timeout_s=3.0, lane_lease_s=5.0) as rt:
        stuck = await rt.submit(echo, "hang")
        await stuck.result(timeout=10)
        started = trio.current_time()
        handles = await rt.submit_many([(echo, number) for number in range(30)])
        for handle in handles:

            async def whole(run_id: str = handle.run_id) -> bool:
                return (await rt.status(run_id)).facts_delivered == 3

            await eventually(whole)
        assert trio.current_time() - started < 2.5
        assert (await stuck.status()).facts_delivered == 0


class HostileError(Exception):
    """Cannot even say what is wrong."""

    def __str__(self) -> str:
        return "nul \x00, surrogate \ud800"


UNSTORABLE = "nul \x00, surrogate \ud800, " + "\U0001f600" * 5_000


@pytest.mark.parametrize("batched", [False, True])
async def test_a_reason_that_the_database_does_not_take_blocks_its_lane_all_the_same(
    hosts: Hosts, batched: bool
) -> None:
    class Picky(MemoryLedger):
        async def append(self, delivery: Any) -> None:
            if delivery.facts[0].payload.get("input") == "poison":
                raise LedgerRejected(UNSTORABLE)
            await super().append(delivery)

        async def append_many(self, deliveries: Any) -> Any:
            poison = [one.facts[0].payload.get("input") == "poison" for one in deliveries]
            good = [one for one, bad in zip(deliveries, poison, strict=True) if not bad]
            outcomes = iter(await super().append_many(good))
            return [LedgerRejected(UNSTORABLE) if bad else next(outcomes) for bad in poison]

    if not batched:
        Picky.append_many = None  # type: ignore[assignment, method-assign]
    ledger = Picky()
    async with hosts.open(echo, ledger=ledger) as rt:
        bad = await rt.submit(echo, "poison")
        await bad.result(timeout=10)

        async def blocked() -> str | None:
            return (await bad.status()).lane_blocked

        reason = await eventually(blocked)
        assert reason.startswith("nul \\x00, surrogate \\")
        assert len(reason.encode()) < 3_000
        good = await rt.submit(echo, "good")
        await good.result(timeout=10)

        async def whole() -> bool:
            return (await good.status()).facts_delivered == 3

        await eventually(whole)
        assert {actor["restarts"] for actor in rt.readiness()["actors"].values()} == {0}


@pytest.mark.parametrize("answer", [LedgerRetry(1e13), LedgerRetry(1e300)], ids=str)
async def test_a_retry_in_a_thousand_years_is_scheduled(hosts: Hosts, answer: Any) -> None:
    ledger = Scripted([answer])
    async with hosts.open(echo, ledger=ledger) as rt:
        late = await rt.submit(echo, 1)
        await late.result(timeout=10)

        async def scheduled() -> bool:
            return bool(
                await hosts.value(
                    "SELECT count(*) FROM @.runs WHERE acked_seq = 0 AND lane_attempts = 1"
                    " AND lane_expires_at IS NULL AND lane_error IS NULL"
                    " AND lane_due_at BETWEEN now() + interval '12 hours' AND now() + interval '2 days'"
                )
            )

        await eventually(scheduled)
        good = await rt.submit(echo, 2)
        await good.result(timeout=10)

        async def whole() -> bool:
            return (await good.status()).facts_delivered == 3

        await eventually(whole)
        assert [one.run_id for one in ledger.seen].count(late.run_id) == 1
        assert {actor["restarts"] for actor in rt.readiness()["actors"].values()} == {0}


async def test_an_error_that_cannot_be_stored_is_a_retry(hosts: Hosts) -> None:
    ledger = Scripted([HostileError()])
    async with hosts.open(echo, ledger=ledger) as rt:
        handle = await rt.submit(echo, 1)
        await handle.result(timeout=10)
        await acknowledged(hosts)
        assert_delivered(ledger.kept, [handle.run_id])
        assert ledger.seen[1].delivery_key == ledger.seen[0].delivery_key
        assert {actor["restarts"] for actor in rt.readiness()["actors"].values()} == {0}


async def test_a_retry_comes_when_it_is_due_not_at_the_backstop(hosts: Hosts) -> None:
    ledger = Scripted([LedgerRetry(0.2)])
    async with hosts.open(echo, ledger=ledger, backstop_s=12.0) as rt:
        handle = await rt.submit(echo, 1)
        await handle.result(timeout=10)

        async def whole() -> bool:
            return len(ledger.seen) >= 2

        await eventually(whole, within_s=5.0)
        assert 0.2 <= ledger.at[1] - ledger.at[0] < 2.0
        await acknowledged(hosts, within_s=5.0)
        assert_delivered(ledger.kept, [handle.run_id])


async def test_batches_get_one_outcome_each(hosts: Hosts) -> None:
    class Batched(MemoryLedger):
        calls = 0

        async def append_many(self, deliveries: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                return []  # fewer answers than questions: none counts
            outcomes = list(await super().append_many(deliveries))
            if self.calls == 2:
                outcomes[0] = LedgerRetry(0.01)
            return outcomes

    ledger = Batched()
    async with hosts.open(echo, ledger=ledger) as rt:
        handles = await rt.submit_many([(echo, number) for number in range(60)])
        for handle in handles:
            await handle.result(timeout=10)
        await acknowledged(hosts)
        assert_delivered(ledger, [handle.run_id for handle in handles])
        assert 1 <= ledger.repeated <= 24


async def test_a_payload_that_looks_like_anything_reaches_the_ledger_as_it_is(hosts: Hosts) -> None:
    values = ["\r\n", "\u2028\U0001f600", {"a": [None, True, 1.5, 10**30]}, "x" * 100_000, {"": {}}]
    ledger = MemoryLedger()
    async with hosts.open(echo, ledger=ledger) as rt:
        handles = await rt.submit_many([(echo, value) for value in values])
        for handle in handles:
            await handle.result(timeout=10)
        await acknowledged(hosts)
        for handle, value in zip(handles, values, strict=True):
            facts = ledger.facts(handle.run_id)
            assert facts[0].payload["input"] == value
            assert facts[-1].payload["output"] == value


# --- turns that end otherwise ------------------------------------------------------------------------------


async def test_lanes_are_handed_back_at_shutdown_and_go_on_at_once_elsewhere(hosts: Hosts) -> None:
    ledger = Scripted(["hang"])
    async with hosts.open(echo, ledger=ledger, lane_lease_s=60.0, delivery_timeout_s=30.0) as rt:
        handle = await rt.submit(echo, 1)
        await handle.result(timeout=10)

        async def begun() -> bool:
            return bool(ledger.seen)

        await eventually(begun)
        left_at = trio.current_time()
    assert trio.current_time() - left_at < 6.0
    assert await hosts.value("SELECT count(*) FROM @.runs WHERE lane_expires_at IS NOT NULL") == 0
    async with hosts.open(echo, ledger=ledger):
        await acknowledged(hosts, within_s=5.0)
    assert [fact.type for fact in ledger.kept.facts(handle.run_id)] == LIFE
    first, second = ledger.seen[:2]
    assert (second.delivery_key, second.digest) == (first.delivery_key, first.digest)


@pytest.mark.parametrize("actor", ["lane-1", "outbox", "ledger"])
async def test_a_lost_link_in_a_turn_repeats_at_most_that_turn(alone: Hosts, actor: str) -> None:
    ledger: Any = PostgresLedger(in_database=False) if actor == "ledger" else Scripted()
    async with alone.open(echo, ledger=ledger, lane_actors=1, lane_lease_s=2.5, delivery_timeout_s=1.0) as rt:

        async def connected() -> list[int]:
            return list(await alone.backends(actor))

        handles = await rt.submit_many([(echo, number) for number in range(30)])
        for _ in range(3):
            (pid,) = await eventually(connected)  # again, after the last time
            await alone.ask(f"SELECT pg_terminate_backend({pid})")
            handles += await rt.submit_many([(echo, number) for number in range(30)])
            await trio.sleep(0.2)
        for handle in handles:
            await handle.result(timeout=20)
        await acknowledged(alone)
        assert rt.readiness()["actors"][actor]["restarts"] >= 1
        if isinstance(ledger, Scripted):
            assert_delivered(ledger.kept, [handle.run_id for handle in handles])
        else:
            await alone.check([handle.run_id for handle in handles])


@pytest.mark.parametrize("fault", ["lost answer", "reset", "blackhole"])
async def test_an_acknowledgement_whose_answer_is_lost_is_asked_again(hosts: Hosts, fault: str) -> None:
    """The facts may come again, the same ones; nothing is skipped and nothing is out of order."""
    ledger = Scripted()
    async with actor_proxy(hosts.dsn) as proxy:
        settings: dict[str, Any] = {
            "dsn": proxy.dsn,
            "statement_timeout_s": 1.0,
            "connect_timeout_s": 2.0,
            "lane_actors": 1,
        }
        async with hosts.open(talks, ledger=ledger, **settings) as rt:
            warm = await rt.submit(talks, 1)
            await warm.result(timeout=10)
            await acknowledged(hosts)
            link = {
                "lost answer": proxy.lose_next_answer,
                "reset": proxy.reset,
                "blackhole": proxy.blackhole,
            }[fault]("lane-1")
            handles = await rt.submit_many([(talks, 3)] * 4)
            for handle in handles:
                await handle.result(timeout=20)
            await acknowledged(hosts)
            assert proxy.of("lane-1") is not link
            assert_delivered(ledger.kept, [handle.run_id for handle in handles])
            assert ledger.kept.repeated <= 8 * 8
            await hosts.check(ledger=False)


async def test_one_ledger_object_serves_one_host_after_another(hosts: Hosts) -> None:
    ledger = PostgresLedger(in_database=False)

    async def once(rt: Runtime) -> str:
        handle = await rt.submit(echo, 1)
        await handle.result(timeout=10)
        await hosts.check([handle.run_id])
        return handle.run_id

    for _ in range(2):
        async with hosts.open(echo, ledger=ledger) as rt:
            await once(rt)
