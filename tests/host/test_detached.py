"""Detached plays, with real processes: made, heard of, ended, lost, cancelled, deleted, billed."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime import Play, RunCancelled, Runtime
from runtime.sandboxes import LocalProvider, SandboxProvider
from tests.support import sandboxed
from tests.support.hosts import Hosts, eventually

WITHIN_S = 40.0


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return LocalProvider(tmp_path / "sandboxes")


@asynccontextmanager
async def hosting(
    hosts: Hosts, provider: SandboxProvider, *plays: Play, **more: Any
) -> AsyncIterator[Runtime]:
    """A host with the provider. At its end nothing of a sandbox may be left."""
    settings = {"health_port": 0, "heartbeat_timeout_s": 3.0, **more}
    async with hosts.open(*plays, sandboxes={"local": provider}, **settings) as rt:
        yield rt
        await gone(hosts, provider)


async def gone(hosts: Hosts, provider: SandboxProvider) -> None:
    """Every obligation ends confirmed, and no process or folder is left."""

    async def confirmed() -> bool:
        (row,) = await hosts.ask("SELECT count(*) FROM @.sandboxes WHERE confirmed_at IS NULL")
        return int(row[0]) == 0

    await eventually(confirmed, within_s=WITHIN_S)
    assert await provider.names() == []


async def types(rt: Runtime, run_id: str) -> list[str]:
    return [fact.type for fact in await rt.facts(run_id)]


async def test_a_play_runs_in_a_sandbox_and_takes_no_slot(hosts: Hosts, provider: LocalProvider) -> None:
    async with hosting(hosts, provider, sandboxed.boxed, slots=1) as rt:
        inputs = [{"echo": n, "work_s": 1.0} for n in range(3)]
        handles = [await rt.submit(sandboxed.boxed, each, terminal_performance="full") for each in inputs]
        outputs = [await handle.result(timeout=WITHIN_S) for handle in handles]
        assert [output["echo"] for output in outputs] == [0, 1, 2]
        assert len({output["pid"] for output in outputs} | {os.getpid()}) == 4
        facts = await rt.facts(handles[0].run_id)
        assert [fact.type for fact in facts] == [
            "run.created", "run.started", "run.waiting", "run.progress", "run.completed", "run.log",
        ]  # fmt: skip
        details = (await rt.status(handles[0].run_id, full=True)).details
        assert details is not None
        assert details.runtime_backend == provider.key  # N-3
        assert details.performance is not None
        assert details.performance.sandbox_s >= 1.0
        assert details.performance.usage is not None  # E-35: as its runner measured it
        assert details.performance.usage.cpu_s > 0
        assert details.performance.usage.peak_memory_bytes > 2**20
        assert details.runner is None  # it is over

        async def billed() -> bool:
            rows = await hosts.ask("SELECT kind, count(DISTINCT run_id), count(*) FROM @.compute_records GROUP BY 1")
            return sorted(map(tuple, rows)) == [("runner", 3, 3), ("sandbox", 3, 3)]

        await eventually(billed, within_s=WITHIN_S)


async def test_a_plain_function_fails_and_sleeps_in_a_sandbox_too(
    hosts: Hosts, provider: LocalProvider
) -> None:
    plays = (sandboxed.boxed_sync, sandboxed.boxed_fails, sandboxed.boxed_naps)
    async with hosting(hosts, provider, *plays) as rt:
        sync = await rt.submit(sandboxed.boxed_sync, {})
        fails = await rt.submit(sandboxed.boxed_fails, {})
        naps = await rt.submit(sandboxed.boxed_naps, {"nap_s": 1.0})
        assert (await sync.result(timeout=WITHIN_S))["pid"] != os.getpid()
        assert await fails.result(timeout=WITHIN_S) == 2
        assert await naps.result(timeout=WITHIN_S) == 2
        assert [each.outcome for each in await rt.attempts(naps.run_id)] == ["parked", "completed"]


async def test_a_runner_that_dies_is_found_out_and_the_run_goes_on(
    hosts: Hosts, provider: LocalProvider
) -> None:
    async with hosting(hosts, provider, sandboxed.boxed_dies) as rt:
        handle = await rt.submit(sandboxed.boxed_dies, {})
        assert await handle.result(timeout=WITHIN_S) == 2
        first, second = await rt.attempts(handle.run_id)
        assert (first.outcome, second.outcome) == ("lost", "completed")
        assert first.error is not None
        assert "exit code 7" in first.error["message"]
        assert "about to die \\x00" in first.error["message"]


async def test_steps_are_recorded_from_a_sandbox(hosts: Hosts, provider: LocalProvider) -> None:
    async with hosting(hosts, provider, sandboxed.boxed_steps) as rt:
        handle = await rt.submit(sandboxed.boxed_steps, {})
        output = await handle.result(timeout=WITHIN_S)
        assert output["first"] != output["mine"]  # of the attempt before
        assert output["doubled"] == [2 * n for n in range(20)]
        assert [each.outcome for each in await rt.attempts(handle.run_id)] == ["lost", "completed"]


async def test_a_sandbox_reaches_everything_that_a_play_may_ask(
    hosts: Hosts, provider: LocalProvider
) -> None:
    async with hosting(hosts, provider, sandboxed.boxed_parent, sandboxed.boxed_child) as rt:
        await rt.set_rate("slow", per_s=100.0)
        handle = await rt.submit(sandboxed.boxed_parent, {})

        async def waits() -> bool:
            return (await rt.status(handle.run_id)).status == "waiting"

        await eventually(waits, within_s=WITHIN_S)
        await rt.send_event(handle.run_id, "go", {"by": "test"})
        output = await handle.result(timeout=WITHIN_S)
        assert output["child"] == 40
        assert output["event"] == {"by": "test"}
        assert output["attempt"] >= 2


async def test_a_frozen_runner_loses_to_its_successor(hosts: Hosts, provider: LocalProvider) -> None:
    async with hosting(hosts, provider, sandboxed.boxed, heartbeat_timeout_s=1.0) as rt:
        handle = await rt.submit(sandboxed.boxed, {"work_s": 2.0, "echo": "x"})

        async def started() -> int:
            logs = [fact.payload for fact in await rt.facts(handle.run_id) if fact.type == "run.log"]
            return logs[0]["fields"]["pid"] if logs else 0

        pid = await eventually(started, within_s=WITHIN_S)
        details = (await rt.status(handle.run_id, full=True)).details
        assert details is not None
        assert details.runner is not None  # H-17
        assert (details.runner.status, details.runner.provider) == ("running", provider.key)
        os.kill(pid, signal.SIGSTOP)
        output = await handle.result(timeout=WITHIN_S)
        assert output["attempt"] == 2
        assert output["pid"] != pid
        assert [each.outcome for each in await rt.attempts(handle.run_id)] == ["lost", "completed"]


async def test_cancelling_ends_the_runner(hosts: Hosts, provider: LocalProvider) -> None:
    """O-8."""
    async with hosting(hosts, provider, sandboxed.boxed) as rt:
        handle = await rt.submit(sandboxed.boxed, {"work_s": 60.0})

        async def detached() -> bool:
            return "run.waiting" in await types(rt, handle.run_id)

        await eventually(detached, within_s=WITHIN_S)
        assert (await handle.cancel()).won
        with pytest.raises(RunCancelled):
            await handle.result(timeout=5)


async def test_a_host_may_go_while_a_runner_works(hosts: Hosts, provider: LocalProvider) -> None:
    async with hosts.open(
        sandboxed.boxed, sandboxes={"local": provider}, health_port=0, heartbeat_timeout_s=5.0
    ) as rt:
        port = rt.health_port
        handle = await rt.submit(sandboxed.boxed, {"work_s": 2.0})

        async def detached() -> bool:
            return "run.waiting" in await types(rt, handle.run_id)

        await eventually(detached, within_s=WITHIN_S)
    await trio.sleep(0.5)
    async with hosting(hosts, provider, sandboxed.boxed, health_port=port) as rt:
        assert (await rt.handle(handle.run_id).result(timeout=WITHIN_S))["attempt"] == 1
