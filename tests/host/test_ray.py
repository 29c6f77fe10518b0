"""Sandboxes on Ray: a real cluster of one node, and a fake where only that shows an edge for certain."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from runtime.sandboxes import RayProvider, SandboxRef, keeper
from runtime.sandboxes.base import SandboxFault
from sql.errors import InputRefused
from tests.host.test_detached import hosting
from tests.host.test_providers import (
    test_a_sandbox_from_its_making_to_its_end,
    test_how_a_command_ended_is_told,
)
from tests.support import sandboxed
from tests.support.fake_ray import Ray, pretended_ray
from tests.support.hosts import ROOT, Hosts, eventually
from tests.support.ray_cluster import RAY, marked, ray_cluster
from tests.support.sites import REF, Site, ended, gone, spec

# The contract of every provider, on the real cluster.
__all__ = ["test_a_sandbox_from_its_making_to_its_end", "test_how_a_command_ended_is_told"]

WITHIN_S = 40.0
# A command with a child that has left its session.
FAMILY = (
    "import subprocess, sys, time; wait = 'import time; time.sleep(60)'; "
    "subprocess.Popen([sys.executable, '-c', wait], start_new_session=True); print('up', flush=True); time.sleep(60)"
)
ALONE = "import time; print('up', flush=True); time.sleep(60)"


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    if not RAY.exists():
        pytest.skip("Ray is not installed (extra ray)")
    with ray_cluster(cpus=4) as url:
        yield url


@pytest.fixture
def provider(cluster: str) -> RayProvider:
    return RayProvider(cluster, runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})


@pytest.fixture
def site(provider: RayProvider) -> Site:
    return Site(provider)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Ray]:
    with pretended_ray(tmp_path) as service:
        yield service


async def test_a_play_runs_on_ray_and_a_killed_runner_is_found_out(
    hosts: Hosts, provider: RayProvider
) -> None:
    """H-12, I-22, I-25: from the reservation to the confirmed deletion and the bill."""
    async with hosting(hosts, provider, sandboxed.boxed, heartbeat_timeout_s=2.0) as rt:
        plain = await rt.submit(sandboxed.boxed, {"echo": "plain"})
        killed = await rt.submit(sandboxed.boxed, {"echo": "killed", "work_s": 1.0})

        async def started() -> int:
            logs = [fact.payload for fact in await rt.facts(killed.run_id) if fact.type == "run.log"]
            return logs[0]["fields"]["pid"] if logs else 0

        os.kill(await eventually(started, within_s=WITHIN_S), signal.SIGKILL)
        assert (await plain.result(timeout=WITHIN_S))["echo"] == "plain"
        assert (await killed.result(timeout=WITHIN_S))["attempt"] == 2
        lost, completed = await rt.attempts(killed.run_id)
        assert (lost.outcome, completed.outcome) == ("lost", "completed")
        assert lost.error is not None
        assert "by SIGKILL" in lost.error["message"]

        async def billed() -> bool:
            records = [record.run_id for record in await rt.compute_records()]
            return records.count(plain.run_id) == 2 and records.count(killed.run_id) == 4

        await eventually(billed, within_s=WITHIN_S)


async def test_processes_end_with_the_worker_of_ray(site: Site) -> None:
    token = secrets.token_hex(8)
    await site.provider.create(spec(FAMILY, env={"BOX": token}))

    def commands() -> dict[int, str]:
        return {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in marked(f"BOX={token}")}

    async def up() -> bool:
        return sum("time.sleep(60)" in line for line in commands().values()) == 2

    await eventually(up, within_s=WITHIN_S)
    (worker,) = [pid for pid, line in commands().items() if line.startswith("ray::JobSupervisor")]
    os.kill(worker, signal.SIGKILL)

    async def nothing_left() -> bool:
        return not marked(f"BOX={token}")

    await eventually(nothing_left, within_s=WITHIN_S)
    assert "JobSupervisor" in (await ended(site)).diagnostics["reason"]
    assert await site.provider.delete(REF) == "deleted"
    await gone(site)


# --- at the edges --------------------------------------------------------------------------------------


async def test_what_ray_writes_about_a_deleted_job_is_deleted_too(fake: Ray) -> None:
    provider = RayProvider(fake.url)
    await provider.create(spec("print('done')"))
    await ended(Site(provider))
    assert await provider.delete(REF) == "deleted"
    assert fake.jobs == {}
    # Its looking for it waits until Ray has written.
    assert (await provider.inspect(REF)).state == "absent"
    assert fake.jobs == {}

    # A host that died in between: another one finds what Ray has written.
    await provider.create(spec("print('done')"))
    await ended(Site(provider))
    assert await provider.delete(REF) == "deleted"
    await eventually(lambda: _answer(bool(fake.jobs)), within_s=WITHIN_S)
    other = RayProvider(fake.url)
    assert await other.names() == []
    assert fake.jobs == {}
    assert (await other.inspect(REF)).state == "absent"


async def test_a_job_that_finds_no_room(fake: Ray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.sandboxes.ray_jobs._STOPPED_WITHIN_S", 0.3)
    fake.full = True
    provider = RayProvider(fake.url, start_s=0.3)
    with pytest.raises(SandboxFault, match=r"has not started within 0\.3 s: It may be waiting for resources"):
        await provider.create(spec("import time; time.sleep(60)"))
    with pytest.raises(SandboxFault, match="was asked to stop and is still PENDING"):
        await provider.delete(REF)
    fake.full = False
    assert await provider.delete(REF) == "deleted"
    assert (await provider.inspect(REF)).state == "absent"


async def test_a_job_that_cannot_be_started(fake: Ray) -> None:
    fake.jobs[f"runlane-{REF.sandbox}"] = {
        "status": "FAILED", "message": "runtime_env setup failed", "metadata": {"runlane_run": "run"},
    }  # fmt: skip
    with pytest.raises(SandboxFault, match="could not be started: runtime_env setup failed"):
        await RayProvider(fake.url).create(spec("pass"))


async def test_only_ray_itself_says_that_a_job_is_absent(fake: Ray) -> None:
    """I-22: whatever else answers at the address knows nothing."""
    with pytest.raises(SandboxFault, match="HTTP 404"):
        await RayProvider(f"{fake.url}/elsewhere").inspect(SandboxRef("a/b"))
    with pytest.raises(SandboxFault, match="no answer from the dashboard of Ray"):
        await RayProvider("http://127.0.0.1:9").inspect(REF)


async def _answer(value: bool) -> bool:
    return value


def test_what_can_never_work_is_refused() -> None:
    for wrong in (
        {"url": "ray://head:10001"},
        {"output_bytes": 10},
        {"call_s": 0},
        {"runtime_env": {"pip": {1}}},
    ):
        with pytest.raises(InputRefused):
            RayProvider(**wrong)


# --- the keeper in the foreground -----------------------------------------------------------------------


def kept(program: str, **more: Any) -> subprocess.Popen[bytes]:
    """A keeper of a Python program."""
    order = {"command": ["python", "-c", program], "output_bytes": 2_048}
    limits = {"memory_bytes": None, "cpu_s": None, "ceiling_s": None}
    return subprocess.Popen(
        [sys.executable, "-IS", keeper.__file__],
        env={**os.environ, keeper.SPEC_VARIABLE: json.dumps({**order, **limits, **more})},
        stdout=subprocess.PIPE,
    )


def heard(process: subprocess.Popen[bytes]) -> tuple[str, dict[str, Any]]:
    """What a keeper printed until its end: the command's words and its own report."""
    words, _, report = process.communicate(timeout=WITHIN_S)[0].decode().rpartition(keeper.REPORT)
    return words, json.loads(report)


def test_the_beginning_and_the_end_are_kept() -> None:
    process = kept("import os; os.write(1, b'begin' + b'x' * 100_000 + b'the end'); os._exit(3)")
    words, report = heard(process)
    assert words.startswith("begin")
    assert words.rstrip().endswith("xthe end")
    assert len(words) < 2_048 + 50
    assert f"[{100_000 + 12 - 2_048} bytes left out]" in words
    assert (report["exit_code"], report["signal"], process.returncode) == (3, None, 3)


def test_a_ceiling_and_a_command_that_is_none() -> None:
    process = kept("import os, time; os.close(1); os.close(2); time.sleep(60)", ceiling_s=0.3)
    _, report = heard(process)
    assert (report["reason"], report["signal"]) == ("it was over its ceiling", "SIGKILL")
    assert process.returncode == 128 + signal.SIGKILL
    _, report = heard(kept("", command=["no-such-command"]))
    assert "could not be started" in report["reason"]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("program", "number"), [(FAMILY, signal.SIGTERM), (ALONE, signal.SIGKILL)], ids=["stopped", "killed"]
)
async def test_nothing_outlives_a_keeper_that_is_stopped_and_no_command_one_that_is_killed(
    program: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = secrets.token_hex(8)
    monkeypatch.setenv("BOX", token)
    process = kept(program)
    with process:
        assert process.stdout is not None
        assert await trio.to_thread.run_sync(process.stdout.readline) == b"up\n"
        process.send_signal(number)

    async def nothing_left() -> bool:
        return not marked(f"BOX={token}")

    await eventually(nothing_left, within_s=WITHIN_S)
