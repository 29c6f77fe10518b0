"""The blocking client: the verbs from any thread, without trio, whatever happens to its connection."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import trio

from runtime import (
    Context,
    DuplicateRun,
    HostStopping,
    IdempotencyConflict,
    InputRefused,
    OutcomeUnknown,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    RunNotFound,
    Submit,
    SyncClient,
    UnknownPlay,
    play,
)
from sql.errors import DatabaseUnreachable, LockTimedOut, SchemaNotReady
from tests.support.callers import open_caller
from tests.support.hosts import Hosts, eventually


@play("echo")
async def echo(_: Context, data: Any) -> Any:
    return data


@play("boom")
async def boom(_: Context, data: Any) -> None:
    raise ValueError(data)


@play("forever")
async def forever(_: Context) -> None:
    await trio.sleep_forever()


async def blocking(work: Callable[[SyncClient], Any], hosts: Hosts, **settings: Any) -> Any:
    """Run ``work`` with a client in a thread, as a program without trio would."""

    def body() -> Any:
        with SyncClient.open(hosts.config(**settings)) as client:
            return work(client)

    return await trio.to_thread.run_sync(body)


async def test_the_verbs(hosts: Hosts) -> None:
    def work(client: SyncClient) -> None:
        handle = client.submit("echo", {"n": 1}, labels={"a": "b"}, surface="sdk", idempotency_key="i")
        assert handle.created
        assert handle.result(10) == {"n": 1}
        assert handle.status().status == "completed"
        assert not client.submit("echo", {"n": 1}, idempotency_key="i").created
        with pytest.raises(IdempotencyConflict):
            client.submit("echo", {"n": 2}, idempotency_key="i")
        handles = client.submit_many([Submit("echo", n) for n in range(1200)])
        assert [one.result(20) for one in handles[::100]] == list(range(0, 1200, 100))
        assert [run.run_id for run in client.runs(labels={"a": "b"})] == [handle.run_id]
        assert client.facts(handle.run_id)[0].payload["surface"] == "sdk"
        assert [one.outcome for one in client.attempts(handle.run_id)] == ["completed"]

        with pytest.raises(RunFailed, match="ValueError: no"):
            client.submit("boom", "no").result(10)
        running = client.submit("forever")
        with pytest.raises(ResultTimeout):
            running.result(0.05)
        assert running.cancel(reason="enough").won
        with pytest.raises(RunCancelled, match="enough"):
            client.handle(running.run_id).result(10)

        client.submit("forever", unique_key="k")
        with pytest.raises(DuplicateRun):
            client.submit("forever", unique_key="k")
        assert client.submit("forever", unique_key="k", on_conflict="replace").created

    async with hosts.open(echo, boom, forever):
        await blocking(work, hosts)


async def test_the_verbs_of_schedules(hosts: Hosts) -> None:
    def work(client: SyncClient) -> None:
        assert client.schedule("nightly", "echo", 1, every_s=3600).name == "nightly"
        assert [one.name for one in client.schedules()] == ["nightly"]
        client.pause_schedule("nightly")
        assert client.schedules()[0].paused_at is not None
        assert client.fires("nightly") == []
        assert client.delete_schedule("nightly")

    async with hosts.open(echo):
        await blocking(work, hosts)


async def test_bad_input_is_refused_by_name(hosts: Hosts) -> None:
    def work(client: SyncClient) -> None:
        with pytest.raises(UnknownPlay, match="nobody"):
            client.submit("nobody")
        with pytest.raises(RunNotFound):
            client.status("missing")
        with pytest.raises(RunNotFound):
            client.result("missing")
        with pytest.raises(RunNotFound):
            client.cancel("missing")
        for field, options in (
            ("priority", {"priority": 9}),
            ("run_id", {"run_id": "a b"}),
            ("delay", {"delay": -1}),
        ):
            with pytest.raises(InputRefused) as caught:
                client.submit("echo", **options)
            assert caught.value.field == field

    async with hosts.open(echo):
        await blocking(work, hosts)


async def names(hosts: Hosts) -> set[str]:
    """Who is connected."""
    rows = await hosts.ask(
        "SELECT DISTINCT application_name FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'runlane %' AND application_name NOT IN ('runlane maintenance')"
    )
    return {row[0] for row in rows}


async def test_many_threads_share_one_connection(alone: Hosts) -> None:
    def work(client: SyncClient) -> list[Any]:
        outputs: list[Any] = []

        def one(number: int) -> None:
            outputs.append(client.submit("echo", number).result(20))

        threads = [threading.Thread(target=one, args=(number,)) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(outputs)

    async with alone.open(echo):
        before = await names(alone)
        with trio.fail_after(40):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(blocking, lambda _: time.sleep(1.0), alone)
                await trio.sleep(0.5)
                assert await names(alone) - before == {"runlane sync client"}
                assert len(await alone.backends("sync client")) == 1
        assert await blocking(work, alone) == list(range(40))
        assert await alone.backends("sync client") == []


async def test_a_lost_connection_is_replaced_and_nothing_is_submitted_twice(hosts: Hosts) -> None:
    stop = threading.Event()

    def work(client: SyncClient) -> list[str]:
        made: list[str] = []
        while not stop.is_set():
            made.append(client.submit("echo", len(made)).run_id)
        assert client.handle(made[-1]).result(20) == len(made) - 1
        return made

    async with hosts.open(echo):
        made: list[str] = []

        async def client() -> None:
            made.extend(await blocking(work, hosts))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(client)
            seen: set[int] = set()
            for _ in range(5):

                async def another() -> list[int]:
                    return [pid for pid in await hosts.backends("sync client") if pid not in seen]

                (pid,) = await eventually(another)
                seen.add(pid)
                await trio.sleep(0.05)
                await hosts.ask(f"SELECT pg_terminate_backend({pid})")
            stop.set()
        assert await hosts.value("SELECT count(*) FROM @.runs") == len(made) == len(set(made))
        await hosts.check(made)


async def test_a_wait_outlives_its_connection(hosts: Hosts) -> None:
    async with hosts.open(forever) as rt:
        handle = await rt.submit(forever)
        opened, ended = threading.Event(), trio.Event()

        def work(client: SyncClient) -> Any:
            opened.set()
            return client.result(handle.run_id)

        async def wait() -> None:
            with pytest.raises(RunCancelled):
                await blocking(work, hosts)
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.to_thread.run_sync(opened.wait)
            (pid,) = await hosts.backends("sync client")
            await hosts.ask(f"SELECT pg_terminate_backend({pid})")
            await trio.sleep(0.2)
            assert not ended.is_set()
            await handle.cancel()
            with trio.fail_after(10):
                await ended.wait()


async def test_a_key_in_an_open_transaction_is_waited_for_until_the_deadline(hosts: Hosts) -> None:
    async with hosts.open(echo), open_caller(hosts.dsn, hosts.schema) as caller:
        await caller.begin()
        await caller.fetch(f"""SELECT {hosts.schema}.submit_run('echo', '1', '{{"idempotency_key": "k"}}')""")

        def work(client: SyncClient, key: str = "k") -> Any:
            return client.submit("echo", 1, idempotency_key=key)

        with pytest.raises(LockTimedOut, match="idempotency key"):
            await blocking(work, hosts, operation_timeout_s=0.6, statement_timeout_s=0.5)
        assert (await blocking(partial(work, key="other"), hosts)).created
        async with trio.open_nursery() as nursery:

            async def again() -> None:
                assert not (await blocking(work, hosts)).created

            nursery.start_soon(again)
            await trio.sleep(0.2)
            await caller.commit()


async def test_a_cancellation_of_a_locked_run_is_recorded(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt, open_caller(hosts.dsn, hosts.schema) as caller:
        handle = await rt.submit(echo, delay=3600)
        await caller.begin()
        await caller.fetch(f"SELECT 1 FROM {hosts.schema}.runs WHERE run_id = $1 FOR UPDATE", handle.run_id)
        outcome = await blocking(lambda client: client.cancel(handle.run_id, by="me"), hosts)
        assert (outcome.won, outcome.status) == (False, "pending")
        await caller.rollback()
        with pytest.raises(RunCancelled):
            await handle.result(10)


async def test_waiting_calls_end_when_the_client_is_closed(hosts: Hosts) -> None:
    async with hosts.open(forever):

        def body() -> None:
            client = SyncClient.open(hosts.config())
            handle = client.submit("forever")
            threading.Timer(0.3, client.close).start()
            with pytest.raises(HostStopping, match="closed"):
                handle.result()
            with pytest.raises(HostStopping, match="closed"):
                handle.status()
            client.close()

        await trio.to_thread.run_sync(body)


async def test_a_database_that_is_away(hosts: Hosts) -> None:
    with pytest.raises(SchemaNotReady, match="runlane migrate"):
        await blocking(lambda _: None, hosts)
    with pytest.raises(DatabaseUnreachable):
        await blocking(lambda _: None, hosts, dsn="postgresql://nobody@127.0.0.1:1/none")
    async with hosts.open(echo):

        def work(client: SyncClient) -> None:
            client._link.line.options = client._link.line.options.__class__("postgresql://x@127.0.0.1:1/x")
            client._link.line._loop.call_soon_threadsafe(client._link.line._hang_up)
            began = time.monotonic()
            with pytest.raises(OutcomeUnknown, match="asking again is safe"):
                client.submit("echo")
            assert time.monotonic() - began < 3

        await blocking(work, hosts, operation_timeout_s=1.0, statement_timeout_s=0.5)


async def test_it_changes_nothing_for_a_program_on_asyncio_or_after_a_fork(hosts: Hosts) -> None:  # T18
    script = """
        import asyncio, os, sys
        before = (asyncio.get_event_loop_policy(), asyncio.new_event_loop, asyncio.get_running_loop)
        from runtime import HostStopping, RuntimeConfig, SyncClient

        with SyncClient.open(RuntimeConfig(dsn=sys.argv[1], schema=sys.argv[2])) as client:
            assert client.submit("echo", 5).result(20) == 5

            async def main():
                return await asyncio.to_thread(client.submit("echo", 6).result, 20)

            assert asyncio.run(main()) == 6
            child = os.fork()
            if child == 0:
                try:
                    client.runs()
                except HostStopping as exc:
                    assert "fork" in str(exc), exc
                    with SyncClient.open(RuntimeConfig(dsn=sys.argv[1], schema=sys.argv[2])) as own:
                        assert own.submit("echo", 7).result(20) == 7
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert client.submit("echo", 8).result(20) == 8
        assert (asyncio.get_event_loop_policy(), asyncio.new_event_loop, asyncio.get_running_loop) == before
        print("trio_asyncio" in sys.modules)
    """

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), hosts.dsn, hosts.schema],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    async with hosts.open(echo):
        done = await trio.to_thread.run_sync(run)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
