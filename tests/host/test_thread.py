"""A runtime in a thread beside a program on asyncio, or on nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import attrs
import httpx
import pytest
import trio

from runtime import (
    Context,
    HostFailed,
    HostStopping,
    MemoryLedger,
    ResultTimeout,
    RunCancelled,
    Runtime,
    RuntimeConfig,
    Submit,
    play,
)
from runtime.thread import RuntimeThread
from sql.errors import DatabaseUnreachable
from tests.support.hosts import QUICK, ROOT, Hosts
from tests.support.sandboxed import Pretended


@play("echo")
async def echo(_: Context, data: Any) -> Any:
    return data


@play("forever")
async def forever(_: Context) -> None:
    await trio.sleep_forever()


@pytest.fixture
def config(hosts: Hosts) -> RuntimeConfig:
    return hosts.config()


def started(config: RuntimeConfig) -> RuntimeThread:
    return Runtime.start_in_thread(config, plays=[echo, forever])


def test_blocking_verbs_from_many_threads(config: RuntimeConfig) -> None:
    with started(config) as rt, concurrent.futures.ThreadPoolExecutor(20) as pool:
        outputs = pool.map(lambda number: rt.submit(echo, number).result(20), range(100))
        assert list(outputs) == list(range(100))
        assert len(rt.submit_many([Submit("echo", 1), ("echo", 2)])) == 2
        running = rt.submit(forever)
        with pytest.raises(ResultTimeout):
            running.result(0.05)
        assert rt.handle(running.run_id).cancel().won
        assert rt.runtime.plays.keys() == {"echo", "forever"}
        assert rt.failure is None
    assert rt.failure is None
    with pytest.raises(HostStopping):
        rt.submit(echo, 1)
    rt.close()


def test_verbs_awaited_from_asyncio(config: RuntimeConfig) -> None:
    async def main() -> None:
        async with started(config) as rt:
            handles = await asyncio.gather(*[rt.aio.submit(echo, number) for number in range(50)])
            assert await asyncio.gather(*[handle.result(20) for handle in handles]) == list(range(50))
            assert [handle.created for handle in await rt.aio.submit_many([("echo", 1)])] == [True]
            running = await rt.aio.submit(forever)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await running.result()
            assert not rt._calls  # the wait was given up, in the thread, too
            assert (await rt.aio.handle(running.run_id).cancel(reason="enough")).won
            with pytest.raises(RunCancelled, match="enough"):
                await running.result(10)
        with pytest.raises(HostStopping):
            await rt.aio.runs()

    asyncio.run(main())


def test_calls_that_wait_hear_of_the_stop(config: RuntimeConfig) -> None:
    with started(config) as rt, concurrent.futures.ThreadPoolExecutor(5) as pool:
        handle = rt.submit(forever)
        waiting = [pool.submit(handle.result) for _ in range(5)]
        while len(rt._calls) < 5:
            time.sleep(0.01)
        rt.close()
        for one in waiting:
            with pytest.raises(HostStopping):
                one.result(10)


def test_a_host_that_gives_up_says_so_everywhere(config: RuntimeConfig) -> None:
    def fail(rt: RuntimeThread) -> None:
        error = HostFailed("actor claim gave up")
        rt._in_thread(lambda: rt.runtime._course.fail(error))

    with pytest.raises(HostFailed, match="claim"), started(config) as rt:  # noqa: PT012 - the block is what is tested
        threading.Timer(0.2, fail, [rt]).start()
        rt.submit(forever).result()
    assert isinstance(rt.failure, HostFailed)
    with pytest.raises(HostFailed):
        rt.submit(echo, 1)
    with pytest.raises(HostFailed):
        rt.close()

    async def main() -> None:
        async with started(config) as rt:
            handle = await rt.aio.submit(forever)
            fail(rt)
            with pytest.raises(HostFailed):
                await handle.result()

    with pytest.raises(HostFailed, match="claim"):
        asyncio.run(main())


def test_a_start_that_fails_raises_where_somebody_waits_for_it(config: RuntimeConfig) -> None:
    away = attrs.evolve(config, dsn="postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(DatabaseUnreachable), started(away):
        pytest.fail("it cannot have started")
    rt = started(away)
    with pytest.raises(DatabaseUnreachable):
        rt.submit(echo, 1)

    async def main() -> None:
        async with started(away):
            pytest.fail("it cannot have started")

    with pytest.raises(DatabaseUnreachable):
        asyncio.run(main())
    early = started(config)
    early.close()  # before it was ready
    with pytest.raises(HostStopping):
        early.submit(echo, 1)


def test_an_error_of_the_block_leaves_it(config: RuntimeConfig) -> None:
    with pytest.raises(ZeroDivisionError), started(config):
        raise ZeroDivisionError


def test_a_program_that_forgets_to_close_ends_in_order(config: RuntimeConfig, hosts: Hosts) -> None:
    script = """
        import json, sys, time
        from runtime import Runtime, RuntimeConfig
        from tests.host.test_thread import forever

        rt = Runtime.start_in_thread(RuntimeConfig(**json.loads(sys.argv[1])), plays=[forever])
        handle = rt.submit(forever, run_id="left")
        while handle.status().status != "running":
            time.sleep(0.01)
    """
    settings = json.dumps({"dsn": hosts.dsn, "schema": hosts.schema, **QUICK})
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), settings],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with started(config) as rt:
        (attempt, *_) = rt.attempts("left")
        assert attempt.outcome == "released"


def test_a_thread_is_given_what_a_runtime_is(config: RuntimeConfig) -> None:
    opened, started = (inspect.signature(one) for one in (Runtime.open, Runtime.start_in_thread))
    assert opened.parameters == started.parameters
    ledger = MemoryLedger()
    seen: list[str] = []
    with Runtime.start_in_thread(
        config,
        plays=[echo],
        receivers={"books": ledger},
        on_delivery=lambda types, _: seen.extend(types),
        sandboxes={"given": Pretended()},
    ) as rt:
        run_id = rt.submit(echo, 1, receiver="books").run_id
        assert rt.result(run_id, timeout=20) == 1
        while len(seen) < 3:
            time.sleep(0.02)
    assert ledger.run_ids() == (run_id,)


def test_beside_a_web_app(config: RuntimeConfig, hosts: Hosts) -> None:
    settings = json.dumps({"dsn": hosts.dsn, "schema": hosts.schema, "notify": hosts.notify, **QUICK})
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.webapp", settings],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        transport = httpx.HTTPTransport(retries=5)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=20) as client:
            with concurrent.futures.ThreadPoolExecutor(10) as pool:
                answers = list(pool.map(lambda n: client.post(f"/double/{n}").json(), range(40)))
            assert [answer["output"] for answer in answers] == [2 * n for n in range(40)]
            assert client.get(f"/runs/{answers[0]['run']}").json() == {"status": "completed"}
            assert client.get("/runs/missing").status_code == 404
            run_id = client.post("/forever").json()["run"]
            again = client.post("/forever")
            assert (again.status_code, again.json()["detail"]) == (409, run_id)
            while client.get(f"/runs/{run_id}").json() != {"status": "running"}:
                time.sleep(0.02)
        process.terminate()
        out, said = process.communicate(timeout=20)
        assert (process.returncode, json.loads(out)) == (0, {"stopped": True}), said
    finally:
        process.kill()
        process.communicate()
    with started(config) as rt:
        assert rt.attempts(run_id)[0].outcome == "released"
