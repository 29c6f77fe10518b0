"""What breaks under a host: processes, backends, links, servers, actors, and other people's transactions.

Whatever breaks, each run ends once and each fact reaches the ledger once.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from actors.core import Life, WakeFlag
from runtime import Context, HostFailed, Runtime, play
from runtime._throwaway import throwaway_server
from runtime.embedded import EmbeddedServer
from sql import admission, claim, settle
from sql import status as status_door
from sql.calls import new_token
from sql.errors import StatementTooSlow
from tests.support.callers import open_caller
from tests.support.hosted import PLAYS, endless, naps, quick
from tests.support.hosts import Hosts, eventually, host_process, until
from tests.support.proxies import ActorProxy, actor_proxy
from tests.traps.servers import frozen


@play("works")
async def works(ctx: Context, data: Any) -> Any:
    ctx.log("working", n=data)
    ctx.progress(1, 2)
    await trio.sleep(0.02)
    return data


async def again(rt: Runtime, actor: str, restarts: int, *, within_s: float = 15.0) -> None:
    """Wait until an actor has restarted that often and is ready."""

    async def ready() -> bool:
        now = rt.readiness()["actors"][actor]
        return bool(now["restarts"] >= restarts and now["state"] == "ready")

    await eventually(ready, within_s=within_s)


def healthy(rt: Runtime) -> bool:
    return bool(rt.readiness()["ready"])


async def healthy_again(rt: Runtime, *, within_s: float = 15.0) -> None:
    async def ready() -> bool:
        return healthy(rt)

    await eventually(ready, within_s=within_s)


async def terminate(hosts: Hosts, *pids: int) -> None:
    await hosts.ask(*[f"SELECT pg_terminate_backend({pid})" for pid in pids])


# These connect when there is something for them, and so have nothing to lose before.
ON_DEMAND = {"waits", "receipts", "rates", "circuits", "maintenance"}


def with_connection(rt: Runtime) -> list[str]:
    """The actors that always have a connection."""
    without = {"watchdog", "executors", *ON_DEMAND}
    return [name for name in rt.readiness()["actors"] if name not in without]


# --- processes -------------------------------------------------------------------------------------------


@pytest.mark.modes
async def test_what_a_killed_host_was_doing_is_finished_by_another_exactly_once(hosts: Hosts) -> None:
    short: dict[str, Any] = {"lease_s": 2.0, "renew_every_s": 0.5, "slots": 60}
    async with host_process(hosts, **short) as first:
        async with hosts.open() as client:
            handles = await client.submit_many(
                [("busy", 0.05)] * 60 + [("busy", 1.2)] * 30 + [("naps", 0.3)] * 20 + [("quick", 1)] * 50
            )

            async def under_way() -> bool:
                rows = await hosts.ask(
                    "SELECT count(*) FILTER (WHERE status = 'completed') AS done,"
                    " count(*) FILTER (WHERE status = 'running') AS live FROM @.runs"
                )
                return bool(rows[0]["done"] >= 20 and rows[0]["live"] >= 20)

            await eventually(under_way, within_s=20.0)
            first.signal(signal.SIGKILL)
            await first.ended()
            killed_at = trio.current_time()
            held = await hosts.leases(first.host_id)
            assert held > 0
            async with hosts.open(*PLAYS, **short) as second:
                for handle in handles:
                    await second.handle(handle.run_id).result(timeout=20)
                assert trio.current_time() - killed_at < 2.0 + 1.0 + 6.0
                await hosts.check([handle.run_id for handle in handles])
        rows = await hosts.ask("SELECT outcome, count(*) FROM @.attempts GROUP BY outcome")
        outcomes = {row["outcome"]: row["count"] for row in rows}
        assert outcomes["expired"] == held
        assert outcomes["completed"] == len(handles)


async def test_a_play_that_kills_its_host_each_time_is_given_up_at_its_crash_cap(hosts: Hosts) -> None:
    """1.16: each crash is an attempt with a cause, and they are counted."""
    short: dict[str, Any] = {"lease_s": 0.6, "renew_every_s": 0.2, "crash_cap": 1, "backstop_s": 0.3}
    async with hosts.open(works, **short) as client:
        handle = None
        for crash in (1, 2):
            async with host_process(hosts, **short) as process:
                handle = handle or await client.submit("endless")
                await until(client, handle.run_id, "running", within_s=15.0)
                process.signal(signal.SIGKILL)
                await process.ended()
                await until(client, handle.run_id, "queued" if crash == 1 else "failed", within_s=15.0)
        assert handle is not None
        status = await client.status(handle.run_id)
        assert (status.attempt, status.crashes, status.failures) == (2, 2, 0)
        assert [attempt.outcome for attempt in await client.attempts(handle.run_id)] == ["expired", "expired"]
        await hosts.check([handle.run_id])


# --- backends --------------------------------------------------------------------------------------------


async def test_every_actors_backend_is_terminated_in_turn_while_500_runs_pass_through(
    alone: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runlane")
    handles: list[Any] = []
    async with alone.open(works, naps, slots=40) as rt:
        actors = with_connection(rt)
        assert {"listener", "admission", "claim", "leases", "settle", "facts", "control", "watch"} <= {
            *actors
        }
        done = trio.Event()

        async def load() -> None:
            while len(handles) < 500 or not done.is_set():
                handles.extend(
                    await rt.submit_many([(works, n) for n in range(18)] + [(naps, 0.3), (naps, 0.25)])
                )
                await handles[-5].result(timeout=30)
                # A broken link is found when it is used: use all.
                poke(rt)
                await (await rt.submit(works, 1, delay=1000)).cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(load)
            for actor in actors:
                (pid,) = await alone.backends(actor)
                await terminate(alone, pid)
                await again(rt, actor, 1)
                assert await alone.backends(actor) != [pid]
            done.set()
        with trio.fail_after(60):
            for handle in handles:
                await handle.result()
        await healthy_again(rt)
        assert all(rt.readiness()["actors"][actor]["restarts"] >= 1 for actor in actors)
        assert rt.readiness()["actors"]["executors"]["restarts"] == 0
        await alone.check([handle.run_id for handle in handles])
        rows = await alone.ask(
            "SELECT status, max(crashes) AS crashes FROM @.runs GROUP BY status ORDER BY status"
        )
        assert [tuple(row) for row in rows] == [("cancelled", 0), ("completed", 0)]
    assert "event=crash" not in caplog.text


async def test_an_outage_does_not_use_up_restart_budgets(alone: Hosts) -> None:
    """4.4: more breaks than any intensity allows, and the host goes on."""
    async with alone.open(quick) as rt:
        for number in range(1, 7):
            (pid,) = await alone.backends("settle")
            await terminate(alone, pid)
            assert await (await rt.submit(quick, number)).result(timeout=10) == number
            await again(rt, "settle", number)
        assert await (await rt.submit(quick, 1)).result(timeout=10) == 1
        assert healthy(rt)


async def test_all_backends_at_once(alone: Hosts) -> None:
    """2.6: a worker that loses every connection during a play starts no second attempt."""
    async with alone.open(endless, works, slots=40, lease_s=6.0) as rt:
        handle = await rt.submit(endless)
        await until(rt, handle.run_id, "running")
        handles = await rt.submit_many([(works, n) for n in range(100)])
        await terminate(alone, *await alone.backends())
        for one in handles:
            await one.result(timeout=20)
        await healthy_again(rt)
        status = await handle.status()
        assert (status.status, status.attempt) == ("running", 1)
        await alone.check([one.run_id for one in handles])


async def test_losing_the_listener_for_a_while_loses_no_lease(alone: Hosts) -> None:
    """1.13, 3.3: without its ear a host still renews, claims and delivers, and does not spin."""
    async with alone.open(endless, works, lease_s=1.5, renew_every_s=0.4) as rt, alone.open() as client:
        handles = await rt.submit_many([(endless, None)] * 5)
        for handle in handles:
            await until(rt, handle.run_id, "running")
        deaf_until = trio.current_time() + 4.0
        terminated = 0
        while trio.current_time() < deaf_until:
            pids = await alone.backends("listener")
            await terminate(alone, *pids)
            terminated += len(pids)
            assert await (await client.submit("works", 1)).result(timeout=10) == 1
            await trio.sleep(0.05)
        assert terminated >= 3
        # Restarts back off: no busy loop.
        assert rt.readiness()["actors"]["listener"]["restarts"] <= 25
        for handle in handles:
            status = await handle.status()
            assert (status.status, status.attempt, status.crashes) == ("running", 1, 0)
        await healthy_again(rt)


@pytest.fixture(scope="module")
def own() -> Iterator[EmbeddedServer]:
    """A server of these tests' own, which they may stop and freeze."""
    with throwaway_server() as server:
        yield server


@pytest.fixture
def alone_on_own(own: EmbeddedServer, schema: str, notify: bool) -> Hosts:
    own.join()
    return Hosts(own.dsn, schema, notify)


@pytest.mark.parametrize("actor", ["settle", "claim", "leases"])
async def test_a_frozen_backend_is_given_up_at_the_statements_deadline(
    alone_on_own: Hosts, actor: str
) -> None:
    """4.1: a server process that stops answering holds nobody past its deadline."""
    hosts = alone_on_own
    async with hosts.open(works, endless, statement_timeout_s=1.0, connect_timeout_s=2.0, lease_s=12.0) as rt:
        long = await rt.submit(endless)
        await until(rt, long.run_id, "running")
        pids = await hosts.backends(actor)
        with frozen(pids[0]):
            frozen_at = trio.current_time()
            handle = await rt.submit(works, 1, delay=0.05)
            assert await handle.result(timeout=20) == 1
            await again(rt, actor, 1, within_s=20.0)
            # The statement's deadline, and the wait for the frozen predecessor to end.
            assert trio.current_time() - frozen_at < 1.0 + 5.0 + 5.0
        await healthy_again(rt)
        assert (await long.status()).attempt == 1
        await hosts.check([handle.run_id])


# --- the server ------------------------------------------------------------------------------------------


async def get(port: int, path: str) -> tuple[int, Any]:
    """A request to the health server."""
    with trio.fail_after(5):
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(f"GET {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join([chunk async for chunk in stream])
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


async def test_a_restart_of_the_server_is_waited_out(
    own: EmbeddedServer, alone_on_own: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """3.1, 4.3, 4.4: back without a restart of the host, one line per outage, and readiness says so meanwhile."""
    hosts = alone_on_own
    async with hosts.open(works, endless, slots=40, health_port=0, lease_s=15.0) as rt:
        assert rt.health_port is not None
        long = await rt.submit(endless)
        handles = await rt.submit_many([(works, n) for n in range(100)])
        assert (await get(rt.health_port, "/readyz"))[0] == 200
        caplog.set_level(logging.INFO, "runlane")
        caplog.clear()
        await trio.to_thread.run_sync(own.leave)
        try:

            async def unready() -> bool:
                return (await get(rt.health_port or 0, "/readyz"))[0] == 503

            await eventually(unready, within_s=5.0)
            code, body = await get(rt.health_port, "/readyz")
            assert code == 503
            assert json.loads(body)["database"]["reachable"] is False
            assert (await get(rt.health_port, "/livez"))[0] == 200
            before = time.process_time()
            await trio.sleep(2.0)
            assert time.process_time() - before < 1.0
            lines = [record for record in caplog.records if record.name.startswith("runlane")]
            assert 1 <= len(lines) <= 6, [record.getMessage() for record in lines]
        finally:
            await trio.to_thread.run_sync(own.join)

        async def ready() -> bool:
            return (await get(rt.health_port or 0, "/readyz"))[0] == 200

        await eventually(ready, within_s=20.0)
        outages = [record for record in caplog.records if "event=outage" in record.getMessage()]
        assert 2 <= len(outages) <= 6, [record.getMessage() for record in outages]
        for handle in handles:
            await handle.result(timeout=20)
        started = trio.current_time()
        assert await (await rt.submit(works, 1)).result(timeout=10) == 1
        assert trio.current_time() - started < 1.0
        status = await long.status()
        assert (status.status, status.attempt) == ("running", 1)
        await hosts.check([handle.run_id for handle in handles])


async def test_a_host_can_stop_while_the_server_is_away(own: EmbeddedServer, alone_on_own: Hosts) -> None:
    """4.1: nothing to reach, and still inside the budget."""
    hosts = alone_on_own
    try:
        async with hosts.open(endless, grace_s=0.2, release_budget_s=1.0, shutdown_budget_s=5.0) as rt:
            handle = await rt.submit(endless)
            await until(rt, handle.run_id, "running")
            await trio.to_thread.run_sync(own.leave)
            left_at = trio.current_time()
        assert trio.current_time() - left_at < 5.0 + 2.0
    finally:
        await trio.to_thread.run_sync(own.join)


async def test_a_play_stops_before_its_lease_can_lapse_when_the_server_is_away(
    own: EmbeddedServer, alone_on_own: Hosts
) -> None:
    """2.5: trust counts from when the last renewal was sent, on the monotonic clock."""
    hosts = alone_on_own
    stopped: list[float] = []
    up = trio.Event()

    @play("holds")
    async def holds(ctx: Context) -> int:
        if ctx.attempt > 1:
            return ctx.attempt
        up.set()
        try:
            await trio.sleep_forever()
        finally:
            stopped.append(trio.current_time())

    async with hosts.open(holds, lease_s=2.0, renew_every_s=0.5) as rt:
        handle = await rt.submit(holds)
        await up.wait()
        away_at = trio.current_time()
        await trio.to_thread.run_sync(own.leave)
        try:

            async def gave_up() -> bool:
                return bool(stopped)

            await eventually(gave_up, within_s=5.0)
            assert stopped[0] - away_at < 2.0
        finally:
            await trio.to_thread.run_sync(own.join)
        assert await handle.result(timeout=15) == 2
        await hosts.check([handle.run_id])


# --- the network -----------------------------------------------------------------------------------------


@asynccontextmanager
async def through_proxy(hosts: Hosts, *plays: Any, **more: Any) -> AsyncIterator[tuple[Runtime, ActorProxy]]:
    """A host whose connections go through a proxy, with every statement prepared once."""
    async with actor_proxy(hosts.dsn) as proxy:
        settings = {"dsn": proxy.dsn, "statement_timeout_s": 1.0, "connect_timeout_s": 2.0, **more}
        async with hosts.open(*plays, **settings) as rt:
            for delay in (None, 0.05):
                warm = await rt.submit(works, 0, delay=delay)
                await warm.result(timeout=10)
            parked = await rt.submit(naps, 0.25)
            await parked.result(timeout=10)
            cancelled = await rt.submit(endless)
            await until(rt, cancelled.run_id, "running")
            await cancelled.cancel()
            await hosts.delivered([warm.run_id, parked.run_id, cancelled.run_id])
            yield rt, proxy


async def scenario(rt: Runtime, actor: str) -> Any:
    """One thing that makes the actor call the database; gives the run's handle and what it must give back."""
    if actor == "control":
        handle = await rt.submit(endless)
        await until(rt, handle.run_id, "running")
        return handle, "cancelled"
    if actor == "settle park":
        return await rt.submit(naps, 0.3), 2
    # A delayed run goes through the claim; others may be admitted already claimed.
    return await rt.submit(works, 7, delay=0.05 if actor == "claim" else None), 7


LOST = ["admission", "claim", "settle", "settle park", "facts", "outbox", "control", "watch", "leases"]


@pytest.mark.parametrize("actor", LOST)
async def test_a_call_whose_link_breaks_has_one_effect(hosts: Hosts, actor: str) -> None:
    """4.1, 4.2, 4.6: the next life asks again, and the caller gets its answer (E-16, E-21)."""
    name = actor.split()[0]
    async with through_proxy(hosts, works, naps, endless, lease_s=9.0, renew_every_s=0.5) as (rt, proxy):
        long = await rt.submit(endless)
        await until(rt, long.run_id, "running")
        run_ids: list[str] = []
        for break_ in (proxy.lose_next_answer, proxy.reset, proxy.blackhole):
            restarts = rt.readiness()["actors"][name]["restarts"]
            if actor == "control":
                handle, expected = await scenario(rt, actor)
                link = break_(name)
                outcome = await handle.cancel(reason="lost")
                assert (outcome.won, outcome.status) == (True, "cancelled")
            else:
                link = break_(name)
                handle, expected = await scenario(rt, actor)
                if actor == "watch":
                    assert (await rt.status(handle.run_id)).run_id == handle.run_id
                assert await handle.result(timeout=20) == expected
            if break_ == proxy.lose_next_answer:
                with trio.fail_after(10):
                    await link.answer_lost.wait()
            await again(rt, name, restarts + 1, within_s=20.0)
            assert proxy.of(name) is not link
            facts = [fact.type for fact in await rt.facts(handle.run_id)]
            assert (
                len([one for one in facts if one in ("run.created", "run.completed", "run.cancelled")]) == 2
            )
            if expected == 7:
                assert facts.count("run.log") == 1
                assert facts.count("run.started") == 1
            run_ids.append(handle.run_id)
        await hosts.check(run_ids)
        await healthy_again(rt)
        status = await long.status()
        assert (status.status, status.attempt) == ("running", 1)


async def test_callers_in_flight_when_every_link_breaks_get_their_answers(hosts: Hosts) -> None:
    async with through_proxy(hosts, works, naps, endless, slots=40) as (rt, proxy):
        handles: list[Any] = []

        async def submit(number: int) -> None:
            handles.append(await rt.submit(works, number, run_id=f"run-{number}"))

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(submit, number)
            await trio.sleep(0.01)
            for link in list(proxy.links):
                link.reset()
        assert len(handles) == 200
        assert all(handle.created for handle in handles)
        for handle in handles:
            await handle.result(timeout=20)
        await hosts.check([handle.run_id for handle in handles])


async def test_endings_that_pile_up_while_settle_is_away_are_all_kept(hosts: Hosts) -> None:
    """Back-pressure: claims stop, nothing overflows, and no play is started twice."""
    count = 4_000
    async with through_proxy(hosts, quick, works, naps, endless, slots=10, statement_timeout_s=3.0) as (
        rt,
        proxy,
    ):
        proxy.blackhole("settle")
        handles = await rt.submit_many([(quick, number) for number in range(count)])
        await again(rt, "settle", 1, within_s=20.0)
        with trio.fail_after(60):
            for number, handle in enumerate(handles):
                assert await handle.result() == number
        assert rt.readiness()["actors"]["executors"]["restarts"] == 0
        # The parked and the cancelled one of the warm-up.
        assert await hosts.value("SELECT count(*) FROM @.attempts WHERE outcome <> 'completed'") == 2
        await hosts.check([handle.run_id for handle in handles], within_s=40.0)


async def test_a_port_that_refuses_for_a_while(hosts: Hosts) -> None:
    async with through_proxy(hosts, works, naps, endless) as (rt, proxy):
        proxy.refuses = True
        for link in list(proxy.links):
            link.reset()
        await trio.sleep(1.0)
        assert not healthy(rt)
        proxy.refuses = False
        assert await (await rt.submit(works, 5)).result(timeout=15) == 5
        await healthy_again(rt)


# --- actors ------------------------------------------------------------------------------------------------


class Injected(Exception):
    pass


def poke(rt: Runtime) -> None:
    """Wake every actor."""
    for flag in vars(rt._host.hints).values():
        if isinstance(flag, WakeFlag):
            flag.set()


async def test_each_actor_crashes_once_and_is_restarted_and_counted(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash: set[str] = set()
    original = Life.beat

    def beat(life: Life) -> None:
        if life.name in crash:
            crash.remove(life.name)
            raise Injected(life.name)
        original(life)

    monkeypatch.setattr(Life, "beat", beat)
    handles: list[Any] = []
    async with hosts.open(works, endless, slots=40) as rt:
        long = await rt.submit(endless)
        await until(rt, long.run_id, "running")
        actors = ["watchdog", *with_connection(rt)]
        for actor in actors:
            crash.add(actor)
            poke(rt)
            handles += await rt.submit_many([(works, number) for number in range(10)])
            throwaway = await rt.submit(works, 1, delay=1000)
            await throwaway.cancel()
            await again(rt, actor, 1)
        # The executors hand back what ran when they crashed.
        assert rt._host.executors._nursery is not None

        async def fails() -> None:
            raise Injected("executors")

        rt._host.executors._nursery.start_soon(fails)
        await again(rt, "executors", 1)
        for handle in handles:
            await handle.result(timeout=20)
        status = await until(rt, long.run_id, "running")
        assert (status.attempt, status.crashes, status.failures) == (2, 0, 0)
        restarts = {name: actor["restarts"] for name, actor in rt.readiness()["actors"].items()}
        assert restarts == dict.fromkeys([*actors, "executors"], 1) | dict.fromkeys(ON_DEMAND, 0)
        assert rt.readiness()["actors"]["claim"]["last_error"]
        await hosts.check([handle.run_id for handle in handles])


@pytest.mark.parametrize("actor", ["claim", "settle", "outbox"])
async def test_an_actor_that_crashes_for_ever_makes_the_host_give_up(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, actor: str
) -> None:
    original = Life.beat

    def beat(life: Life) -> None:
        if life.name == actor:
            raise Injected(actor)
        original(life)

    with pytest.raises(HostFailed, match=actor) as caught:  # noqa: PT012 - the block is what is tested
        async with hosts.open(works, endless) as rt:
            await rt.submit(endless)
            monkeypatch.setattr(Life, "beat", beat)
            with trio.fail_after(30):
                while True:
                    poke(rt)
                    await rt.submit(works, 1)
                    await trio.sleep(0.05)
    assert isinstance(caught.value.__cause__, Injected)
    monkeypatch.undo()
    # Where settle is what is broken, nothing can be handed back.
    assert actor == "settle" or await hosts.leases() == 0


async def test_a_lease_without_a_task_is_handed_back(hosts: Hosts) -> None:
    """1.9: the database believes that this host runs it, and it does not."""
    async with hosts.open(naps):
        pass
    async with hosts.open(endless, renew_every_s=0.3, lease_s=30.0) as rt:
        long = await rt.submit(endless)
        ghost = await rt.submit("naps", 1)
        await until(rt, long.run_id, "running")
        async with hosts.session() as session:
            found = await admission.play_buckets(session, ["naps"], release_id=None, environment=None)
            answer = await claim.claim(
                session,
                claim.Buckets.of(found),
                owner=int(rt.host_id),
                token=new_token(),
                limit=1,
                lease_s=30.0,
                oldest=False,
                stand=claim.Stand(),
            )
        assert [one.run_id for one in answer.items] == [ghost.run_id]
        status = await until(rt, ghost.run_id, "queued", within_s=5.0)
        assert (status.attempt, status.crashes) == (1, 0)
        (attempt,) = await rt.attempts(ghost.run_id)
        assert attempt.outcome == "released"
        assert (await rt.status(long.run_id)).status == "running"


async def test_without_notifications_everything_starts_within_the_backstop(hosts: Hosts) -> None:
    """3.8, 9.3: hints are hints."""
    quiet = Hosts(hosts.dsn, hosts.schema, notify=False)
    backstop_s = 0.8
    async with (
        quiet.open(works, endless, backstop_s=backstop_s) as rt,
        quiet.open(backstop_s=backstop_s) as client,
    ):
        for _ in range(3):
            submitted_at = trio.current_time()
            handle = await client.submit("works", 1)
            assert await handle.result(timeout=10) == 1
            # One to start, one to hear of the end.
            assert trio.current_time() - submitted_at < 2 * backstop_s + 1.0
        long = await client.submit("endless")
        await until(rt, long.run_id, "running")
        assert (await client.cancel(long.run_id)).won

        async def free() -> bool:
            return bool(rt.readiness()["slots"]["used"] == 0)

        # The renewal's answer carries it.
        await eventually(free, within_s=2.5)


async def test_a_slot_that_admission_did_not_need_is_not_forgotten(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim that found every slot reserved is woken when one is free after all, without the backstop."""
    held = trio.Event()
    release = trio.Event()
    original = admission.admit

    async def admit(*args: Any, **kwargs: Any) -> Any:
        answers = await original(*args, **kwargs)
        if args[1][0].idempotency_key == "again":
            held.set()
            await release.wait()
        return answers

    async with hosts.open(quick, slots=1, backstop_s=60.0) as rt:
        first = await rt.submit(quick, 1, idempotency_key="again")
        await first.result(timeout=10)
        due_soon = await rt.submit(quick, 2, delay=0.5)
        await trio.sleep(0.2)
        assert rt._host.attempts.free == 1
        monkeypatch.setattr("actors.admission.door.admit", admit)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(rt.submit, quick, 1, idempotency_key="again"))
            await held.wait()
            await trio.sleep(0.6)
            assert (await due_soon.status()).status == "queued"
            release.set()
        assert await due_soon.result(timeout=3) == 2


async def test_a_burst_at_a_host_with_few_slots_starts_at_an_idle_one_at_once(hosts: Hosts) -> None:
    """Not only when somebody looks at the backstop."""
    started: list[str] = []
    elsewhere = trio.Event()

    @play("burst")
    async def here(ctx: Context) -> None:
        started.append("here")
        await trio.sleep_forever()

    @play("burst")
    async def there(ctx: Context) -> None:
        started.append("there")
        if started.count("there") == 6:
            elsewhere.set()
        await trio.sleep_forever()

    async with (
        hosts.open(there, backstop_s=12.0),
        hosts.open(here, slots=4, backstop_s=12.0) as busy,
    ):
        await busy.submit_many([(here, None)] * 10)
        with trio.fail_after(2.0):
            await elsewhere.wait()


async def test_a_run_that_is_claimed_again_by_its_host_ends_its_older_attempt(hosts: Hosts) -> None:
    """The database gave the lease up although this host, by its own clock, still has it."""
    over = trio.Event()
    go = trio.Event()

    @play("twice")
    async def twice(ctx: Context) -> int:
        if ctx.attempt == 1:
            try:
                await trio.sleep_forever()
            finally:
                over.set()
        await go.wait()
        return ctx.attempt

    # No renewal comes before the end of this test to find out.
    async with hosts.open(twice, lease_s=180.0, renew_every_s=60.0) as rt:
        handle = await rt.submit(twice)
        await until(rt, handle.run_id, "running")
        await hosts.ask("UPDATE @.runs SET lease_expires_at = clock_timestamp(), due_at = clock_timestamp()")
        with trio.fail_after(10):
            await over.wait()
        go.set()
        assert await handle.result(timeout=10) == 2
        assert [attempt.outcome for attempt in await rt.attempts(handle.run_id)] == ["expired", "completed"]

        async def free() -> bool:
            return bool(rt.readiness()["slots"]["used"] == 0)

        await eventually(free)
        await hosts.check([handle.run_id])


# --- statements that take too long --------------------------------------------------------------------------


async def test_endings_that_are_too_heavy_for_one_statement_go_in_smaller_portions(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = settle.settle
    sizes: list[int] = []
    at_once = trio.Event()

    async def heavy(session: Any, items: Any) -> Any:
        sizes.append(len(items))
        await session.execute("SELECT pg_sleep($1)", 0.05 * len(items))
        return await original(session, items)

    @play("together")
    async def together(_: Context, data: int) -> int:
        await at_once.wait()
        return data

    async with hosts.open(together):
        pass
    monkeypatch.setattr("actors.settle._BATCH", 64)
    monkeypatch.setattr("actors.settle.door.settle", heavy)
    async with hosts.open(together, slots=48, statement_timeout_s=1.0) as rt:
        handles = await rt.submit_many([(together, number) for number in range(48)])

        async def all_running() -> bool:
            return await hosts.leases() == 48

        await eventually(all_running)
        at_once.set()
        for number, handle in enumerate(handles):
            assert await handle.result(timeout=20) == number
        assert max(sizes) > 20  # which is too slow
        assert rt.readiness()["actors"]["settle"]["restarts"] >= 1
        await hosts.check([handle.run_id for handle in handles])


async def test_a_read_that_is_too_slow_fails_alone(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    original = status_door.read_runs
    asked: list[str] = []

    async def read_runs(session: Any, run_ids: Any) -> Any:
        asked.extend(run_ids)
        if "slow" in run_ids:
            await session.execute("SELECT pg_sleep(60)")
        return await original(session, run_ids)

    async with hosts.open(works):
        pass
    monkeypatch.setattr(status_door, "read_runs", read_runs)
    async with hosts.open(works, statement_timeout_s=0.7) as rt:
        handle = await rt.submit(works, 1, run_id="quick")
        await handle.result(timeout=10)
        failed: list[BaseException] = []

        async def slow() -> None:
            with pytest.raises(StatementTooSlow) as caught:
                await rt.status("slow")
            failed.append(caught.value)

        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(slow)
                await trio.testing.wait_all_tasks_blocked()
                for _ in range(20):
                    assert (await rt.status("quick")).status == "completed"
        assert len(failed) == 1
        assert asked.count("slow") == 2
        await again(rt, "watch", 2)
        assert (await rt.status("quick")).status == "completed"
        assert rt.readiness()["actors"]["watch"]["restarts"] == 2


# --- other people's transactions ---------------------------------------------------------------------------


async def test_recorded_cancellations_are_carried_out_while_others_keep_coming(hosts: Hosts) -> None:
    async with hosts.open(works, endless) as rt, open_caller(hosts.dsn, hosts.schema) as caller:
        victim = await rt.submit(endless)
        ended = await rt.submit(works, 1)
        await ended.result(timeout=10)
        await until(rt, victim.run_id, "running")
        asked = 0

        async def keep_cancelling() -> None:
            nonlocal asked
            while True:
                assert (await rt.cancel(ended.run_id)).status == "completed"
                asked += 1

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(keep_cancelling)
            await caller.begin()
            await caller.fetch(
                f"SELECT 1 FROM {hosts.schema}.runs WHERE run_id = $1 FOR UPDATE", victim.run_id
            )
            await hosts.ask(f"SELECT * FROM @.cancel_run('{victim.run_id}')")
            assert (await victim.status()).status == "running"
            assert await hosts.value("SELECT count(*) FROM @.cancellations") == 1
            await caller.rollback()
            assert asked > 0  # they keep coming
            await until(rt, victim.run_id, "cancelled", within_s=5.0)
            nursery.cancel_scope.cancel()
        assert await hosts.value("SELECT count(*) FROM @.cancellations") == 0


@asynccontextmanager
async def undisturbed(hosts: Hosts, rt: Runtime, *, but: tuple[str, ...] = ()) -> AsyncIterator[None]:
    """While the block runs, submits and results stay quick; at its end no lease has lapsed."""
    slowest = 0.0
    finished = trio.Event()

    async def keep_submitting() -> None:
        nonlocal slowest
        number = 0
        while not finished.is_set():
            started = trio.current_time()
            delay = 0.01 if number % 2 else None
            handle = await rt.submit(works, number, idempotency_key=f"other-{number}", delay=delay)
            assert await handle.result(timeout=10) == number
            slowest = max(slowest, trio.current_time() - started)
            number += 1
        assert number > 5

    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_submitting)
        yield
        finished.set()
    assert slowest < 1.5
    except_for = " AND run_id NOT IN ('" + "', '".join(but) + "')" if but else ""
    assert await hosts.value(f"SELECT coalesce(max(crashes), 0) FROM @.runs WHERE true{except_for}") == 0
    assert await hosts.value(f"SELECT count(*) FROM @.attempts WHERE outcome = 'expired'{except_for}") == 0


HOLD_S = 3.0
SHORT: dict[str, Any] = {"lease_s": 1.5, "renew_every_s": 0.4, "slots": 30}


@pytest.mark.modes
async def test_a_callers_open_cancellation_delays_nobody(hosts: Hosts) -> None:
    """O-3."""
    async with hosts.open(works, endless, **SHORT) as rt, open_caller(hosts.dsn, hosts.schema) as caller:
        handles = await rt.submit_many([(endless, None)] * 5)
        for handle in handles:
            await until(rt, handle.run_id, "running")
        victim = handles[0]
        await caller.begin()
        await caller.fetch(f"SELECT * FROM {hosts.schema}.cancel_run($1)", victim.run_id)
        async with undisturbed(hosts, rt):
            await trio.sleep(HOLD_S)
            assert (await victim.status()).status == "running"
        await caller.commit()
        await until(rt, victim.run_id, "cancelled", within_s=5.0)
        for handle in handles[1:]:
            status = await handle.status()
            assert (status.status, status.attempt) == ("running", 1)


@pytest.mark.modes
async def test_an_uncommitted_idempotency_key_delays_only_its_own(hosts: Hosts) -> None:
    async with hosts.open(works, endless, **SHORT) as rt, open_caller(hosts.dsn, hosts.schema) as caller:
        long = await rt.submit(endless)
        await caller.begin()
        row = await caller.fetchrow(
            f"SELECT * FROM {hosts.schema}.submit_run('works', '7', $1)",
            json.dumps({"idempotency_key": "held"}),
        )
        answers: list[Any] = []

        async def same() -> None:
            answers.append(await rt.submit(works, 7, idempotency_key="held"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(same)
            async with undisturbed(hosts, rt):
                await trio.sleep(HOLD_S)
                assert answers == []
            await caller.commit()

            async def answered() -> bool:
                return bool(answers)

            await eventually(answered, within_s=5.0)
        assert (answers[0].run_id, answers[0].created) == (row["run_id"], False)
        assert await answers[0].result(timeout=10) == 7
        assert (await long.status()).attempt == 1


async def test_a_run_that_was_locked_when_it_was_due_starts_soon_after(hosts: Hosts) -> None:
    """What a claim skipped is not behind its low-water mark for long, whatever else is claimed."""
    async with (
        hosts.open(works, backstop_s=60.0, **SHORT) as rt,
        open_caller(hosts.dsn, hosts.schema) as caller,
    ):
        locked = await rt.submit(works, 1, delay=0.4)
        await caller.begin()
        await caller.fetch(f"SELECT 1 FROM {hosts.schema}.runs WHERE run_id = $1 FOR UPDATE", locked.run_id)
        async with undisturbed(hosts, rt):
            await trio.sleep(1.5)
            assert (await locked.status()).status == "queued"
            await caller.rollback()
            assert await locked.result(timeout=2.5) == 1


@pytest.mark.modes
async def test_a_lock_on_one_runs_row_delays_only_that_run(hosts: Hosts) -> None:
    async with hosts.open(works, endless, **SHORT) as rt, open_caller(hosts.dsn, hosts.schema) as caller:
        locked, other, queued = await rt.submit_many([(endless, None), (endless, None), ("works", 5)])
        for handle in (locked, other):
            await until(rt, handle.run_id, "running")
        await queued.result(timeout=10)
        await caller.begin()
        await caller.fetch(f"SELECT 1 FROM {hosts.schema}.runs WHERE run_id = $1 FOR UPDATE", locked.run_id)
        async with undisturbed(hosts, rt, but=(locked.run_id,)):
            asked_at = trio.current_time()
            outcome = await rt.cancel(locked.run_id, reason="while locked")
            assert (outcome.won, outcome.status) == (False, "pending")
            assert trio.current_time() - asked_at < 1.5
            await trio.sleep(HOLD_S)
        await caller.rollback()
        await until(rt, locked.run_id, "cancelled", within_s=8.0)
        status = await other.status()
        assert (status.status, status.attempt) == ("running", 1)
