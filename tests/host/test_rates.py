"""Rate scopes as plays use them: two hosts, order, refusals, probes that die."""

from __future__ import annotations

import itertools
import time
from datetime import datetime
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from actors.rates import Acquire, Release
from runtime import (
    CapacityUnavailable,
    Context,
    InputRefused,
    RunFailed,
    Runtime,
    SyncContext,
    play,
)
from sql.calls import new_token
from sql.rates import Result, Slot
from tests.support import hosted
from tests.support.hosts import Hosts, eventually, host_process


@attrs.define
class Grants:
    """When, by the database's clock, and in which order."""

    at: list[datetime] = attrs.field(factory=list)
    order: list[Any] = attrs.field(factory=list)

    def never_more_than(self, per_s: float, burst: float) -> None:
        at = sorted(self.at)
        for first, last in itertools.combinations_with_replacement(range(len(at)), 2):
            window_s = (at[last] - at[first]).total_seconds()
            assert last - first + 1 <= burst + per_s * window_s + 1e-6, (first, last, window_s)


async def results(rt: Runtime, handles: list[Any], within_s: float = 20.0) -> list[Any]:
    with trio.fail_after(within_s):
        return [await handle.result() for handle in handles]


@pytest.mark.modes
async def test_two_hosts_share_a_rate(hosts: Hosts) -> None:
    grants = Grants()

    @play("calls")
    async def calls(ctx: Context, data: int) -> str:
        for _ in range(3):
            async with ctx.rate("api") as permit:
                grants.at.append(permit.granted_at)
        return ctx.run_id

    async with hosts.open(calls, slots=8) as one, hosts.open(calls, slots=8) as two:
        assert await one.set_rate("api", per_s=50, burst=5)
        assert not await two.set_rate("api", per_s=50, burst=5)
        handles = await one.submit_many([(calls, n) for n in range(24)])
        started = time.monotonic()
        await results(one, handles)
        assert len(grants.at) == 72
        grants.never_more_than(50, 5)
        assert time.monotonic() - started < 6.0  # nothing is wasted: 67 slots of 20 ms
        owners = await hosts.value("SELECT count(DISTINCT owner) FROM @.attempts")
        assert owners == 2
        (scope,) = await two.rates()
        assert (scope.used, scope.waiting, scope.state) == (72.0, 0, "open")

        async def all_back() -> bool:
            return (await two.rates())[0].in_flight == 0

        await eventually(all_back)
        await hosts.check([handle.run_id for handle in handles])


async def test_first_come_first_served(hosts: Hosts) -> None:
    grants = Grants()

    @play("many")
    async def many(ctx: Context) -> None:
        async def one(number: int) -> None:
            async with ctx.rate("api"):
                grants.order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(one, number)
                await trio.testing.wait_all_tasks_blocked()

    async with hosts.open(many) as rt:
        await rt.set_rate("api", per_s=100, max_in_flight=1)
        await (await rt.submit(many)).result(timeout=15)
        assert grants.order == list(range(20))


async def test_only_so_many_are_in_flight(hosts: Hosts) -> None:
    inside = most = 0

    @play("holds")
    async def holds(ctx: Context) -> None:
        nonlocal inside, most
        async with ctx.rate("browser"):
            inside += 1
            most = max(most, inside)
            await trio.sleep(0.05)
            inside -= 1

    async with hosts.open(holds, slots=10) as one, hosts.open(holds, slots=10) as two:
        await one.set_rate("browser", max_in_flight=3)
        started = time.monotonic()
        await results(two, await one.submit_many([(holds, None)] * 24))
        assert most == 3
        assert time.monotonic() - started < 6.0


@pytest.mark.modes
async def test_after_a_refusal_one_probes_and_the_others_follow_in_their_order(hosts: Hosts) -> None:
    calls: list[tuple[float, int]] = []

    @play("careful")
    async def careful(ctx: Context, data: int) -> None:
        async with ctx.rate("api") as permit:
            calls.append((time.monotonic(), data))
            if data == 0 and ctx.attempt == 1:
                permit.retry_after(1.0)
                raise CapacityUnavailable("429", retry_after=0.1)
            await trio.sleep(0.3 if len(calls) == 2 else 0)

    async with hosts.open(careful) as one, hosts.open(careful) as two:
        await one.set_rate("api", per_s=20)
        first = await one.submit(careful, 0)

        async def blocked() -> bool:
            return [scope.state for scope in await two.rates()] == ["blocked"]

        await eventually(blocked)
        rest = await two.submit_many([(careful, n) for n in range(1, 13)])
        await results(one, [first, *rest])
        times = [at for at, _ in calls]
        assert times[1] - times[0] >= 0.9, "nobody before the block is over"
        assert times[2] - times[1] >= 0.25, "nobody before the probe has come back"
        gaps = [later - earlier for earlier, later in itertools.pairwise(times[2:])]
        assert sum(gaps) >= (len(gaps) - 1) * 0.05 - 0.05, "no herd"
        assert (await first.status()).failures == 0
        (scope,) = await one.rates()
        assert scope.state == "open"
        assert scope.refused_at is not None
        await hosts.check([handle.run_id for handle in [first, *rest]])


@pytest.mark.timeout(120)
async def test_a_host_that_dies_with_its_holds_gives_them_up_with_its_leases(hosts: Hosts) -> None:
    async with hosts.open(hosted.rated, lease_s=6.0) as rt:
        await rt.set_rate("browser", max_in_flight=1)
        async with host_process(hosts, lease_s=2.0, renew_every_s=0.5, slots=1) as other:
            # Only the other host can have it: this one does not know the play.
            stuck = await rt.submit("holder")
            assert (await other.line())["holds"] == stuck.run_id
            waiting = await rt.submit(hosted.rated)
            await trio.sleep(0.3)
            assert not (await waiting.status()).terminal
            killed_at = time.monotonic()
            other.popen.kill()
            await waiting.result(timeout=20)
            assert time.monotonic() - killed_at < 10.0


async def test_a_cancelled_wait_gives_its_slot_back(hosts: Hosts) -> None:
    @play("impatient")
    async def impatient(ctx: Context) -> float:
        async with ctx.rate("slow"):
            pass
        with trio.move_on_after(0.2):
            async with ctx.rate("slow"):
                raise AssertionError("not yet")
        with pytest.raises(CapacityUnavailable, match="the next slot is") as caught:
            async with ctx.rate("slow", timeout=5):
                raise AssertionError("not so soon")
        return caught.value.retry_after

    async with hosts.open(impatient) as rt:
        await rt.set_rate("slow", per_s=0.1)
        # The first slot that was given up is the next one's again: about 10 s, not 20.
        assert 8.0 < await (await rt.submit(impatient)).result(timeout=15) <= 10.0

        async def all_back() -> bool:
            (scope,) = await rt.rates()
            return scope.in_flight + scope.waiting == 0

        await eventually(all_back)


async def test_a_wait_too_long_defers_the_run_free_of_charge(hosts: Hosts) -> None:
    @play("patient")
    async def patient(ctx: Context) -> int:
        async with ctx.rate("slow", timeout=0):
            return ctx.attempt

    async with hosts.open(patient) as rt:
        await rt.set_rate("slow", per_s=2.0)
        handles = await rt.submit_many([(patient, None)] * 3)
        assert max(await results(rt, handles)) > 1
        for handle in handles:
            assert (await handle.status()).failures == 0


async def test_threads_have_rates_too(hosts: Hosts) -> None:
    @play("threaded")
    def threaded(ctx: SyncContext) -> str:
        with ctx.rate("api", cost=2) as permit:
            assert permit.granted_at.tzinfo is not None
        try:
            with ctx.rate("api") as permit:
                permit.retry_after(0.2)
                raise ValueError("429")
        except ValueError:
            pass
        with ctx.rate("api"):
            return "probed"

    async with hosts.open(threaded) as rt:
        await rt.set_rate("api", per_s=100, burst=5)
        assert await (await rt.submit(threaded)).result(timeout=10) == "probed"
        (scope,) = await rt.rates()
        assert scope.used == 4.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "nowhere"}, "there is no rate scope 'nowhere'"),
        ({"name": 3}, "name: must be 1 to 128 of"),
        ({"name": "api", "cost": 0}, "cost: must be a number above 0"),
        ({"name": "api", "cost": float("nan")}, "cost"),
        ({"name": "api", "timeout": -1}, "timeout"),
    ],
)
async def test_bad_calls_are_refused_by_name(hosts: Hosts, arguments: dict[str, Any], message: str) -> None:
    @play("wrong")
    async def wrong(ctx: Context) -> None:
        async with ctx.rate(**arguments):
            pass

    async with hosts.open(wrong) as rt:
        await rt.set_rate("api", per_s=1)
        with pytest.raises(RunFailed, match=message):
            await (await rt.submit(wrong)).result(timeout=10)
        with pytest.raises(InputRefused, match="per_s: must be a finite number"):
            await rt.set_rate("api", per_s="5")  # type: ignore[arg-type]
        with pytest.raises(InputRefused, match=r"per_s: must be from 0\.00001"):
            await rt.set_rate("api", per_s=-5)


async def test_the_actor_starts_anew_and_everybody_still_gets_a_slot_once(hosts: Hosts) -> None:
    grants = Grants()

    @play("calls")
    async def calls(ctx: Context) -> None:
        for _ in range(5):
            async with ctx.rate("api") as permit:
                grants.at.append(permit.granted_at)

    async with hosts.open(calls) as rt:
        await rt.set_rate("api", per_s=40)
        handles = await rt.submit_many([(calls, None)] * 12)
        for _ in range(3):
            await trio.sleep(0.2)
            for pid in await hosts.backends("rates"):
                await hosts.ask(f"SELECT pg_terminate_backend({pid})")
        await results(rt, handles)
        assert len(grants.at) == 60
        grants.never_more_than(40, 1)
        (scope,) = await rt.rates()
        assert scope.used == 60.0


async def test_who_asks_again_for_the_same_slot_goes_on_waiting_for_it(hosts: Hosts) -> None:
    @play("asks")
    async def asks(ctx: Context) -> list[bool]:
        box, attempt = ctx._doors.rates, ctx._attempt
        async with ctx.rate("browser"):
            # As a runner behind the gateway does, whose request ended before its slot came.
            slot = Slot("browser", new_token(), 1.0, attempt.run_id, attempt.attempt)
            first, second = Acquire(slot), Acquire(slot)
            box.send_nowait(first)
            await trio.sleep(0.1)
            box.send_nowait(second)
            await trio.sleep(0.1)
        await second.reply.wait(5.0)
        box.send_nowait(Release(Result("browser", slot.token, "done")))
        return [first.reply.done, second.reply.done, not box.in_flight]

    async with hosts.open(asks) as rt:
        await rt.set_rate("browser", max_in_flight=1)
        assert await (await rt.submit(asks)).result(timeout=15) == [False, True, True]
