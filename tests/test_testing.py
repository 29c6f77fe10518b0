"""The pytest plugin for users: real runs on a schema of the test's own, with a clock that the test moves."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime import Context, InputRefused, ResultTimeout, RunFailed, SyncContext, play
from runtime.testing import Lab, RunInline
from tests.support import servers
from tests.support.callers import open_caller
from tests.support.hosts import ROOT, eventually, until
from tests.support.sandboxed import boxed

HOUR = 3600.0


@play("sleepy")
async def sleepy(ctx: Context, hours: int) -> int:
    for _ in range(hours):
        await ctx.sleep(HOUR)
    return ctx.attempt


@play("moody", retries=3, backoff_s=600, backoff_max_s=7200)
def moody(ctx: SyncContext, data: Any) -> str:
    if ctx.failures < 3:
        raise ValueError("not yet")
    return f"{data} after {ctx.failures}"


@play("hopeless")
async def hopeless(_: Context) -> None:
    raise ValueError("never")


@play("works")
async def works(_: Context, data: Any) -> Any:
    await trio.sleep(data)
    return data


@play("forever")
async def forever(_: Context) -> None:
    await trio.sleep_forever()


def test_a_play_is_run_to_its_end_in_no_time(run_inline: RunInline) -> None:
    began = time.monotonic()
    assert run_inline(sleepy, 24) == 25
    assert run_inline(moody, "fine") == "fine after 3"
    assert run_inline(works, 0, delay=86_400) == 0
    with pytest.raises(RunFailed, match="ValueError: never"):
        run_inline(hopeless)
    assert time.monotonic() - began < 20


def test_a_play_in_a_sandbox_is_run_to_its_end(run_inline: RunInline) -> None:
    assert run_inline(boxed, {"echo": "hello"})["echo"] == "hello"


def test_a_run_that_does_not_end_says_where_it_stands(run_inline: RunInline) -> None:
    with pytest.raises(ResultTimeout, match=r"within 0\.5 s: it is running, after 1 attempts"):
        run_inline(forever, timeout=0.5)


async def test_sleeps_are_over_as_soon_as_the_clock_says_so(runlane: Lab) -> None:
    async with runlane.open(sleepy) as rt:
        began = time.monotonic()
        handle = await rt.submit(sleepy, 2)
        for attempt in (1, 2):
            status = await until(rt, handle.run_id, "waiting")
            assert (status.attempt, status.wait_kind) == (attempt, "sleep")
            runlane.clock.advance(HOUR - 60)
            await trio.sleep(0.05)
            assert (await handle.status()).status == "waiting"
            runlane.clock.advance(61)

            async def next_attempt(attempt: int = attempt) -> bool:
                return (await handle.status()).attempt > attempt

            await eventually(next_attempt, within_s=2)
        assert await handle.result(5) == 3
        assert time.monotonic() - began < 10


async def test_what_runs_keeps_its_lease_while_the_clock_moves(runlane: Lab) -> None:
    async with runlane.open(works, lease_s=5.0, renew_every_s=1.0) as rt:
        handle = await rt.submit(works, 1.5)
        await until(rt, handle.run_id, "running")
        for _ in range(20):
            runlane.clock.advance(HOUR)
            await trio.sleep(0.02)
        assert await handle.result(10) == 1.5
        status = await handle.status()
        assert (status.attempt, status.crashes) == (1, 0)
        assert status.finished_at is not None
        assert status.finished_at - status.created_at > timedelta(hours=19)


async def test_schedules_and_delays_go_by_the_clock(runlane: Lab) -> None:
    async with runlane.open(works) as rt:
        await rt.schedule("hourly", works, 0, every_s=3600)
        late = await rt.submit(works, 0, delay=2 * HOUR)
        for fires in (1, 2, 3):
            runlane.clock.advance(HOUR)

            async def fired(fires: int = fires) -> bool:
                return len(await rt.fires("hourly")) == fires

            await eventually(fired, within_s=3)
        assert await late.result(5) == 0


async def test_the_clock_waits_for_whoever_has_read_it(runlane: Lab) -> None:
    async with open_caller(runlane.config().dsn or "", runlane.config().schema) as caller:
        before = runlane.clock.now()
        await caller.begin()
        await caller.fetchval(f"SELECT {runlane.config().schema}.clock()")
        async with trio.open_nursery() as nursery:

            async def advance() -> None:
                now = await trio.to_thread.run_sync(runlane.clock.advance, HOUR)
                assert now - before >= timedelta(hours=1)
                ended.set()

            ended = trio.Event()
            nursery.start_soon(advance)
            await trio.sleep(0.3)
            assert not ended.is_set()
            await caller.commit()
            with trio.fail_after(2):
                await ended.wait()
    for bad in (-1, float("nan"), "1", True):
        with pytest.raises(InputRefused, match="seconds"):
            runlane.clock.advance(bad)  # type: ignore[arg-type]


# --- as a user has it ------------------------------------------------------------------------------------

PROJECT = {
    "conftest.py": 'pytest_plugins = ["runtime.testing"]\n',
    "shop.py": """
        from dataclasses import dataclass

        from runtime import Context, play


        @dataclass
        class Order:
            item: str
            days: int


        @play("remind", retries=1, backoff_s=3600, backoff_max_s=3600)
        async def remind(ctx: Context, order: Order) -> str:
            await ctx.sleep(order.days * 86_400)
            if ctx.failures == 0:
                raise RuntimeError("the mail server is away")
            return f"reminded of {order.item}"
        """,
    "test_shop.py": """
        import asyncio

        from shop import Order, remind


        def test_inline(run_inline):
            assert run_inline(remind, Order("tea", 30)) == "reminded of tea"


        def test_step_by_step(runlane):
            with runlane.start(remind) as rt, open("schemas.txt", "w") as seen:
                seen.write(runlane.config().schema)
                handle = rt.submit(remind, Order("tea", 2))
                assert runlane.until(rt, handle.run_id, "waiting").wait_kind == "sleep"
                runlane.clock.advance(2 * 86_400)
                assert runlane.finish(rt, handle.run_id) == "reminded of tea"
                assert [one.outcome for one in rt.attempts(handle.run_id)] == ["parked", "retried", "completed"]


        def test_on_asyncio(runlane):
            async def main():
                async with runlane.start(remind) as rt:
                    handle = await rt.aio.submit(remind, Order("tea", 0))
                    assert (await handle.status()).play == "remind"

            asyncio.run(main())
        """,
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


@pytest.mark.parametrize("own_server", [False, True], ids=["a given server", "the embedded one"])
def test_in_a_project_of_a_user(project: Path, server: str, own_server: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNLANE_")}
    environment["PYTHONPATH"] = str(ROOT)
    if not own_server:
        environment["RUNLANE_TEST_DSN"] = server
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", str(project)],
        cwd=project, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    schema = (project / "schemas.txt").read_text()
    assert servers.ask(server, f"SELECT to_regnamespace('{schema}')")[0][0] is None


def test_it_costs_nothing_when_it_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "test_nothing.py").write_text(
        "import sys\ndef test_nothing():\n    assert 'runtime' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
