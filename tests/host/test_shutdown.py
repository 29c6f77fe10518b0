"""Leaving the block, signals, and cancellation from outside: every lease goes back in time, and nobody hangs."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import attrs
import pytest
import trio

from runtime import Context, HostStopping, MemoryLedger, OutcomeUnknown, Runtime, SyncContext, play
from tests.support.hosted import PLAYS, busy, deaf, endless, quick
from tests.support.hosts import Hosts, eventually, host_process, until


async def all_running(hosts: Hosts, count: int, *, within_s: float = 20.0) -> None:
    async def there() -> bool:
        return await hosts.leases() == count

    await eventually(there, within_s=within_s, every_s=0.02)


@attrs.define
class Starts:
    """Counts the attempts that begin, and tells when all runs of a new host have."""

    wanted: int
    runs: set[str] = attrs.field(factory=set)
    all: trio.Event = attrs.field(factory=trio.Event)
    at: float = 0.0

    def __call__(self, run_id: str) -> None:
        self.runs.add(run_id)
        self.at = time.time()
        if len(self.runs) == self.wanted:
            self.all.set()


# --- leases go back ----------------------------------------------------------------------------------------


@pytest.mark.modes
async def test_leaving_the_block_under_load_hands_every_lease_to_another_host_at_once(hosts: Hosts) -> None:
    """10.1, 10.3: within the release budget, taken over in milliseconds, and nothing is charged."""
    count = 200
    starts = Starts(count)

    @play("endless")
    async def elsewhere(ctx: Context, _: Any) -> None:
        starts(ctx.run_id)
        await trio.sleep_forever()

    async with hosts.open(elsewhere, slots=count, lease_s=60.0, renew_every_s=10.0) as second:
        async with hosts.open(endless, slots=count, lease_s=60.0, renew_every_s=10.0, grace_s=0.1) as first:
            # The second host has no free slot yet: it takes nothing while the first is filled.
            second._host.attempts.reserved += count
            handles = await first.submit_many([(endless, None)] * count)
            await all_running(hosts, count)
            second._host.attempts.reserved -= count
            left_at = trio.current_time()
        took_s = trio.current_time() - left_at
        assert took_s < 0.1 + 2.0 + 1.0
        assert await hosts.leases(first.host_id) == 0
        with trio.fail_after(10):
            await starts.all.wait()
        released_at = await hosts.value(
            "SELECT extract(epoch FROM max(ended_at))::float8 FROM @.attempts WHERE outcome = 'released'"
        )
        # 100 ms on an idle machine; this one may be busy, and without notifications it is the backstop.
        assert starts.at - released_at < (0.5 if hosts.notify else 1.5)
        status = await second.status(handles[0].run_id)
        assert (status.attempt, status.failures, status.crashes) == (2, 0, 0)
        assert {attempt.outcome for attempt in await second.attempts(handles[0].run_id)} == {"released"}
    assert await hosts.leases() == 0
    await hosts.check()


async def test_plays_that_end_within_the_grace_are_settled_not_handed_back(hosts: Hosts) -> None:
    async with hosts.open(busy, grace_s=3.0) as rt:
        handles = await rt.submit_many([(busy, 0.3)] * 10)
        await all_running(hosts, 10)
        left_at = trio.current_time()
    assert trio.current_time() - left_at < 2.0
    async with hosts.open() as rt:
        for handle in handles:
            assert await rt.handle(handle.run_id).result(timeout=5) == 1
            assert (await rt.status(handle.run_id)).attempt == 1
        # What they said last is there, too.
        facts = await rt.facts(handles[0].run_id)
        assert [fact.payload["message"] for fact in facts if fact.type == "run.log"] == ["at work"]
        await hosts.check([handle.run_id for handle in handles])


async def test_a_play_in_its_grace_keeps_its_lease_and_can_be_cancelled(hosts: Hosts) -> None:
    """9.6, 10.5: renewals and cancellations go on while a host drains."""
    async with trio.open_nursery() as nursery:
        stopped = trio.Event()
        running = trio.Event()
        handles: list[Any] = []

        async def host() -> None:
            async with hosts.open(
                busy, endless, grace_s=6.0, shutdown_budget_s=12.0, lease_s=1.5, renew_every_s=0.3
            ) as rt:
                handles.extend([await rt.submit(busy, 2.5), await rt.submit(endless)])
                for handle in handles:
                    await until(rt, handle.run_id, "running")
                running.set()
            stopped.set()

        nursery.start_soon(host)
        await running.wait()
        async with hosts.open() as client:
            assert await client.handle(handles[0].run_id).result(timeout=10) == 1
            assert not stopped.is_set()
            asked_at = trio.current_time()
            assert (await client.cancel(handles[1].run_id)).won
            with trio.fail_after(5):
                await stopped.wait()
            assert trio.current_time() - asked_at < 3.0
    await hosts.check([handle.run_id for handle in handles])


@pytest.mark.parametrize("kind", ["thread", "shielded"])
async def test_a_play_that_ignores_everything_loses_its_lease_in_time(hosts: Hosts, kind: str) -> None:
    go = trio.Event()
    in_thread = threading.Event()
    late: list[str] = []

    @play("shielded")
    async def shielded(ctx: Context) -> str:
        with trio.CancelScope(shield=True):
            await go.wait()
        late.append("async")
        return "late"

    @play("thread")
    def thread(ctx: SyncContext) -> str:
        in_thread.wait(20)
        late.append("thread")
        return "late"

    stubborn = thread if kind == "thread" else shielded
    ended = trio.Event()
    begun = trio.Event()
    ids: list[str] = []

    async def host() -> None:
        async with hosts.open(stubborn, endless, grace_s=0.1, release_budget_s=1.0) as rt:
            ids.append((await rt.submit(stubborn)).run_id)
            ids.append((await rt.submit(endless)).run_id)
            for run_id in ids:
                await until(rt, run_id, "running")
            begun.set()
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(host)
        try:
            with trio.fail_after(10):
                await begun.wait()
            left_at = trio.current_time()
            await all_running(hosts, 0, within_s=5.0)
            assert trio.current_time() - left_at < 0.1 + 1.0 + 1.0
            assert late == []
            if kind == "thread":
                with trio.fail_after(5):
                    await ended.wait()
        finally:
            go.set()
            in_thread.set()
        with trio.fail_after(10):
            await ended.wait()

    @play(kind)
    async def again(ctx: Context) -> str:
        return f"attempt {ctx.attempt}"

    async with hosts.open(again) as rt:
        assert await rt.handle(ids[0]).result(timeout=10) == "attempt 2"
        await hosts.check([ids[0]])


async def test_hurry_skips_the_grace_but_not_the_release(hosts: Hosts) -> None:
    async with hosts.open(endless, grace_s=20.0, shutdown_budget_s=40.0) as rt:
        await rt.submit_many([(endless, None)] * 20)
        await all_running(hosts, 20)
        rt.hurry()
        left_at = trio.current_time()
    assert trio.current_time() - left_at < 3.0
    assert await hosts.leases() == 0
    outcomes = await hosts.ask("SELECT DISTINCT outcome FROM @.attempts")
    assert [row[0] for row in outcomes] == ["released"]


async def test_hurry_while_the_grace_runs(hosts: Hosts) -> None:
    """10.8: a hard stop that comes during a soft one."""
    async with trio.open_nursery() as nursery:
        async with hosts.open(endless, grace_s=20.0, shutdown_budget_s=40.0) as rt:
            await rt.submit(endless)
            await all_running(hosts, 1)

            async def later() -> None:
                await rt._host.supervisor.stopping.wait()
                await trio.sleep(0.3)
                rt.hurry()

            nursery.start_soon(later)
            left_at = trio.current_time()
        assert 0.3 <= trio.current_time() - left_at < 4.0
    assert await hosts.leases() == 0


async def test_a_cancellation_from_outside_stops_in_order_too(hosts: Hosts) -> None:
    ran: list[str] = []

    @play("tidy")
    async def tidy(_: Context) -> None:
        try:
            await trio.sleep_forever()
        finally:
            ran.append("finally")

    with trio.move_on_after(60) as scope:
        async with hosts.open(tidy, grace_s=20.0, shutdown_budget_s=40.0) as rt:
            await rt.submit(tidy)
            await all_running(hosts, 1)
            cancelled_at = trio.current_time()
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() - cancelled_at < 4.0
    assert ran == ["finally"]
    assert await hosts.leases() == 0


async def test_a_host_that_is_cancelled_while_it_starts_leaves_nothing(alone: Hosts) -> None:
    async with alone.open(quick):
        pass
    for milliseconds in (0, 2, 5, 10, 20, 40, 80, 160):
        with trio.move_on_after(milliseconds / 1000):
            async with alone.open(quick):
                await trio.sleep_forever()

    async def gone() -> bool:
        return not await alone.backends()

    await eventually(gone)
    assert await alone.leases() == 0


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("kind", ["instead", "finally", "nursery"])
async def test_what_a_play_makes_of_its_cancellation_is_no_failure(
    hosts: Hosts, kind: str, retries: int
) -> None:
    begun = trio.Event()

    @play("turns", retries=retries)
    async def turns(_: Context) -> None:
        if kind == "nursery":
            async with trio.open_nursery() as nursery:
                nursery.start_soon(turns_it)
                nursery.start_soon(turns_it)
        await turns_it()

    async def turns_it() -> None:
        try:
            begun.set()
            await trio.sleep_forever()
        except trio.Cancelled:
            if kind == "instead":
                raise ConnectionError("interrupted") from None
            raise
        finally:
            if kind != "instead":
                raise ConnectionError("interrupted")

    async with hosts.open(turns) as rt:
        handle = await rt.submit(turns)
        with trio.fail_after(10):
            await begun.wait()
    async with hosts.open() as client:
        status = await client.status(handle.run_id)
        assert (status.status, status.attempt, status.failures, status.crashes) == ("queued", 1, 0, 0)
        (attempt,) = await client.attempts(handle.run_id)
        assert attempt.outcome == "released"
    await hosts.check()


# --- callers ---------------------------------------------------------------------------------------------


async def test_calls_in_flight_at_shutdown_are_answered_or_refused_and_nobody_hangs(hosts: Hosts) -> None:
    outcomes: dict[str, int] = {}

    async def caller(rt: Runtime, number: int) -> None:
        verbs = (
            lambda: rt.submit(quick, number),
            lambda: rt.runs(limit=1),
            lambda: rt.cancel("r1"),
            lambda: rt.status("r0"),
            lambda: rt.handle("r0").result(),
        )
        while True:
            try:
                await verbs[number % len(verbs)]()
                outcome = "answered"
            except (HostStopping, OutcomeUnknown) as exc:
                outcomes[type(exc).__name__] = outcomes.get(type(exc).__name__, 0) + 1
                return
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            await trio.lowlevel.checkpoint()

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery, hosts.open(quick, endless) as rt:
            for number in range(3):
                await rt.submit(endless, run_id=f"r{number}", delay=1000)
            for number in range(40):
                nursery.start_soon(caller, rt, number)
            await trio.sleep(0.3)
    assert outcomes["HostStopping"] + outcomes.get("OutcomeUnknown", 0) == 40
    assert outcomes["answered"] > 40
    await hosts.check(ledger=False)


async def test_every_submit_that_was_answered_is_there_and_none_is_half(hosts: Hosts) -> None:
    """10.7: what was answered before the end is in the database, with all of its facts."""
    answered: list[str] = []

    async def submitter(rt: Runtime) -> None:
        try:
            while True:
                answered.extend(handle.run_id for handle in await rt.submit_many([(quick, 1)] * 20))
        except (HostStopping, OutcomeUnknown):
            pass

    async with trio.open_nursery() as nursery, hosts.open(quick, slots=50) as rt:
        for _ in range(5):
            nursery.start_soon(submitter, rt)
        await trio.sleep(0.5)
    assert len(answered) > 100
    assert await hosts.leases() == 0
    async with hosts.open(quick, slots=200) as rt:
        await hosts.check(answered)


async def test_deliveries_in_flight_are_finished_or_handed_back(hosts: Hosts) -> None:
    class Slow(MemoryLedger):
        append_many = None  # type: ignore[assignment]  # one delivery per call

        async def append(self, delivery: Any) -> None:
            await trio.sleep(0.05)
            await super().append(delivery)

    slow = Slow()
    async with hosts.open(quick, ledger=slow, lane_lease_s=60.0) as rt:
        handles = await rt.submit_many([(quick, number) for number in range(100)])
        for handle in handles:
            await handle.result(timeout=20)
        left_at = trio.current_time()
    assert trio.current_time() - left_at < 6.0
    assert await hosts.value("SELECT count(*) FROM @.runs WHERE lane_expires_at IS NOT NULL") == 0
    # The next host goes on at once where this one stopped, with the same ledger.
    async with hosts.open(quick, ledger=slow):

        async def whole() -> bool:
            return not await hosts.value("SELECT count(*) FROM @.runs WHERE acked_seq < last_seq")

        await eventually(whole, within_s=20.0)
    for handle in handles:
        assert [fact.type for fact in slow.facts(handle.run_id)] == [
            "run.created",
            "run.started",
            "run.completed",
        ]
    assert slow.repeated <= 16


# --- processes ---------------------------------------------------------------------------------------------


async def test_sigterm_ends_a_host_with_exit_code_0_and_no_lease(hosts: Hosts) -> None:
    async with hosts.open() as client, host_process(hosts) as process:
        handles = await client.submit_many([("endless", None)] * 15 + [("deaf", 0.2)] * 3)
        await all_running(hosts, 18)
        sent_at = trio.current_time()
        process.signal(signal.SIGTERM)
        assert await process.ended() == 0
        assert trio.current_time() - sent_at < 6.0
        assert (await process.line())["stopped"] is True
        assert await hosts.leases() == 0
        assert {(await client.status(handle.run_id)).status for handle in handles[:15]} == {"queued"}
        await hosts.check()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_skips_the_grace_not_the_release(hosts: Hosts, second: signal.Signals) -> None:
    async with hosts.open() as client, host_process(hosts, grace_s=30.0, shutdown_budget_s=60.0) as process:
        handle = await client.submit("endless")
        await all_running(hosts, 1)
        process.signal(signal.SIGTERM)
        await trio.sleep(0.3)
        assert process.popen.poll() is None
        assert (await client.status(handle.run_id)).status == "running"
        sent_at = trio.current_time()
        process.signal(second)
        assert await process.ended() == 0
        assert trio.current_time() - sent_at < 5.0
        assert await hosts.leases() == 0
        assert (await client.status(handle.run_id)).status == "queued"


async def test_a_deaf_thread_does_not_hold_the_process(hosts: Hosts) -> None:
    async with hosts.open() as client, host_process(hosts) as process:
        await client.submit(deaf.name, 60)
        await all_running(hosts, 1)
        process.signal(signal.SIGTERM)
        assert await process.ended(10) == 0
        assert await hosts.leases() == 0


def test_the_plays_of_other_processes_are_all_used() -> None:
    assert {play.name for play in PLAYS} == {
        "quick", "busy", "endless", "deaf", "naps", "holder", "stepping", "rated",
    }  # fmt: skip
