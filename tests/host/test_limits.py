"""Limits and fair turns across hosts, through the public API: never too many at once, and nobody waits for a poll."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import attrs
import pytest
import trio

from runtime import Client, Context, InputRefused, InvalidPlay, Runtime, Submit, play, submit
from tests.support.hosts import Hosts, host_process, until

# A waiter starts because somebody ended, long before the next look at the database.
_BACKSTOP_S = 30.0


@attrs.define
class Gauge:
    """How many run at once, in all hosts of this process."""

    now: Counter[str] = attrs.field(factory=Counter)
    most: Counter[str] = attrs.field(factory=Counter)
    ended: list[str] = attrs.field(factory=list)

    async def run(self, name: str, seconds: float) -> None:
        self.now[name] += 1
        self.most[name] = max(self.most[name], self.now[name])
        try:
            await trio.sleep(seconds)
        finally:
            self.now[name] -= 1
            self.ended.append(name)


gauge = Gauge()


@pytest.fixture(autouse=True)
def _fresh_gauge() -> None:
    gauge.now.clear()
    gauge.most.clear()
    gauge.ended.clear()


@play("pair", max_running=2)
async def pair(_: Context, data: Any) -> None:
    await gauge.run("pair", 0.01)


@play("sync", concurrency_key=lambda data: data["account"])
async def sync(_: Context, data: Any) -> None:
    await gauge.run(data["account"], 0.01)


@play("team", max_per_key=2)
async def team(ctx: Context, data: Any) -> None:
    await gauge.run(ctx.org_id or "", 0.01)


@play("naps", max_running=1)
async def naps(ctx: Context, data: Any) -> None:
    if ctx.attempt == 1:
        await ctx.sleep(data)


@play("hold", max_running=1)
async def hold(_: Context, data: Any) -> None:
    await trio.sleep_forever()


async def submit_and_wait(rt: Runtime, items: list[Submit]) -> list[str]:
    handles = await rt.submit_many(items)
    for handle in handles:
        await handle.result(timeout=20)
    return [handle.run_id for handle in handles]


async def test_a_play_runs_so_many_times_at_once_on_all_hosts(hosts: Hosts) -> None:
    async with hosts.open(pair, backstop_s=_BACKSTOP_S) as one, hosts.open(pair):
        run_ids = await submit_and_wait(one, [Submit(pair, n) for n in range(60)])
        assert gauge.most == {"pair": 2}
        await hosts.check(run_ids)


async def test_an_organisation_runs_so_many_times_at_once_on_all_hosts(hosts: Hosts) -> None:
    async with hosts.open(team) as one, hosts.open(team):
        await one.set_limit("org", "acme", 3)
        assert [attrs.astuple(limit) for limit in await one.limits()] == [
            ("key", "team", 2, None),
            ("org", "acme", 3, 0),
        ]
        items = [Submit(team, n, org_id=org) for n in range(40) for org in ("acme", "other")]
        run_ids = await submit_and_wait(one, items)
        assert gauge.most["acme"] <= 3
        assert gauge.most["other"] > 3
        await hosts.check(run_ids)


async def test_a_key_of_the_input_runs_one_at_a_time(hosts: Hosts) -> None:
    async with hosts.open(sync) as one, hosts.open(sync):
        items = [Submit("sync", {"account": account}) for _ in range(15) for account in "abcd"]
        run_ids = await submit_and_wait(one, items)
        assert gauge.most == dict.fromkeys("abcd", 1)
        assert len(gauge.ended) == 60
        await hosts.check(run_ids)


async def test_a_key_of_the_caller_goes_before_that_of_the_play(hosts: Hosts) -> None:
    async with hosts.open(sync, team) as rt:
        await submit_and_wait(
            rt, [Submit(sync, {"account": "a"}, concurrency_key=f"own-{n}") for n in range(8)]
        )
        assert gauge.most["a"] > 1
        await submit_and_wait(rt, [Submit(team, n, org_id="o", concurrency_key="k") for n in range(8)])
        assert gauge.most["o"] == 2
        facts = await rt.facts((await rt.submit(sync, {"account": "b"})).run_id)
        assert facts[0].payload["concurrency_key"] == "b"


async def test_who_has_not_the_play_must_give_the_key_of_one_with_a_limit_per_key(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "_KEYED_S", 0.0)
    older = play("sync")(sync.fn)
    async with hosts.open(older) as old, Client.open(hosts.config()) as client:
        await client.submit("sync", {"account": "a"})
        async with hosts.open(sync) as new:  # started last: its limits are the ones that hold
            assert [(limit.kind, limit.name, limit.max_running) for limit in await new.limits()] == [
                ("key", "sync", 1)
            ]
            with pytest.raises(InputRefused, match=r"concurrency_key: play 'sync' .* give the run's key"):
                await client.submit("sync", {"account": "a"})
            with pytest.raises(InputRefused, match="concurrency_key"):
                await client.schedule("hourly", "sync", {"account": "a"}, every_s=3600)
            await client.submit("sync", {"account": "a"}, concurrency_key="a")
            await client.submit(sync, {"account": "a"})
            await new.submit("sync", {"account": "a"})
            await old.submit("sync", {"account": "a"})  # an older host goes on as it is
        async with hosts.open(older):
            await client.submit("sync", {"account": "a"})


async def test_bad_keys_are_refused_by_name(hosts: Hosts) -> None:
    async with hosts.open(sync) as rt:
        for bad, reason in (
            ({}, "the play's function raised KeyError for this input"),
            ({"account": 7}, "must be str, not int"),
            ({"account": ""}, "must have 1 to 255 characters"),
        ):
            with pytest.raises(InputRefused, match=reason) as caught:
                await rt.submit(sync, bad)
            assert caught.value.field == "concurrency_key"
        with pytest.raises(InputRefused) as caught:
            await rt.submit(sync, {"account": "a"}, concurrency_key="a" * 256)
        assert caught.value.field == "concurrency_key"
        for arguments, field in (
            (("play", "sync", 1), "kind"),
            (("org", None, 1), "name"),
            (("sandbox", None, 1), "name"),
            (("sandbox", "a" * 256, 1), "name"),
            (("sandbox_org", "", 1), "org_id"),
            (("org", "a" * 256, 1), "org_id"),
            (("org", "a", -1), "max_running"),
            (("org", "a", True), "max_running"),
        ):
            with pytest.raises(InputRefused) as caught:
                await rt.set_limit(*arguments)
            assert caught.value.field == field


@pytest.mark.parametrize(
    "options", [{"max_running": 0}, {"max_running": 1.5}, {"max_per_key": 0}, {"concurrency_key": "account"}]
)
def test_bad_options_of_a_play_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidPlay, match=f"play 'x': {next(iter(options))} must be"):
        play("x", **options)


async def test_the_next_one_starts_when_one_ends_also_on_another_host(hosts: Hosts, notify: bool) -> None:
    backstop_s = _BACKSTOP_S if notify else 0.5
    async with hosts.open(hold, backstop_s=backstop_s) as one:
        first = await one.submit(hold, 1)
        await until(one, first.run_id, "running")
        async with hosts.open(hold, backstop_s=backstop_s, slots=1) as two:
            second = await two.submit(hold, 2)
            await trio.sleep(0.3)
            assert (await two.status(second.run_id)).status == "queued"
            began = time.perf_counter()
            await two.cancel(first.run_id)
            await until(two, second.run_id, "running")
            assert time.perf_counter() - began < (1.0 if notify else 3.0)
            await two.cancel(second.run_id)


async def test_a_parked_run_holds_no_limit(hosts: Hosts) -> None:
    async with hosts.open(naps, backstop_s=_BACKSTOP_S) as rt:
        long = await rt.submit(naps, 3600)
        await until(rt, long.run_id, "waiting")
        began = time.perf_counter()
        for _ in range(3):
            await (await rt.submit(naps, 0)).result(timeout=10)
        assert time.perf_counter() - began < 5.0
        await rt.cancel(long.run_id)


async def test_a_host_that_dies_holds_no_limit_longer_than_its_leases(hosts: Hosts) -> None:
    # Fault 2.14: the limit outlives the holder's lease, and not for longer.
    async with host_process(hosts, lease_s=2.0, renew_every_s=0.5) as victim, hosts.open() as rt:
        await rt.set_limit("org", "acme", 1)
        held = await rt.submit("endless", org_id="acme")
        await until(rt, held.run_id, "running")
        waiting = await rt.submit("quick", 7, org_id="acme")
        await trio.sleep(2.5)  # past the first lease, which was renewed
        assert (await waiting.status()).status == "queued"
        victim.popen.kill()
        async with host_process(hosts):
            assert await waiting.result(timeout=15) == 7
        await rt.cancel(held.run_id)


async def test_runs_that_wait_do_not_stop_their_own_kind(hosts: Hosts) -> None:
    async with hosts.open(naps, backstop_s=_BACKSTOP_S) as rt:
        began = time.perf_counter()
        await submit_and_wait(rt, [Submit(naps, 1.0) for _ in range(5)])
        assert time.perf_counter() - began < 4.0  # they slept side by side


async def test_one_tenants_queue_does_not_delay_another(hosts: Hosts) -> None:
    slow_down = itertools.repeat(0.05)

    @play("work")
    async def work(ctx: Context, data: Any) -> None:
        await trio.sleep(next(slow_down))
        gauge.ended.append(ctx.org_id or "none")

    async with hosts.open(work, slots=2) as rt:
        flood = await rt.submit_many([Submit(work, n, org_id="flood") for n in range(200)])
        await until(rt, flood[3].run_id, "completed")
        began = len(gauge.ended)
        for org in ("one", None):
            await (await rt.submit(work, 0, org_id=org)).result(timeout=10)
        assert {"one", "none"} <= set(gauge.ended[began:])
        assert len(gauge.ended) - began < 40  # of about 200 that were queued before
