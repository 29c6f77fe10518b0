"""Local sandboxes: real processes, what they print, how they end, and that nothing of them stays."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import trio

from runtime.sandboxes import Inspection, LocalProvider, SandboxRef, SandboxSpec
from tests.support.hosts import eventually

REF = SandboxRef("box")


@pytest.fixture
def provider(tmp_path: Path) -> LocalProvider:
    return LocalProvider(tmp_path / "sandboxes", output_bytes=8_192)


def spec(program: str, *, ceiling_s: float | None = None) -> SandboxSpec:
    command = ("python", "-c", program)
    return SandboxSpec(sandbox="box", run_id="run", attempt=1, command=command, env={}, ceiling_s=ceiling_s)


async def ended(provider: LocalProvider) -> Inspection:
    async def over() -> Inspection | None:
        found = await provider.inspect(REF)
        return None if found.state == "running" else found

    found: Inspection = await eventually(over, within_s=20.0)
    return found


async def test_the_last_words_of_a_command_are_kept(provider: LocalProvider) -> None:
    await provider.create(spec("import os; os.write(1, b'x' * 100_000 + b'the end'); os._exit(3)"))
    found = await ended(provider)
    assert (found.state, found.diagnostics["exit_code"]) == ("ended", 3)
    assert found.diagnostics["output_tail"].endswith("xthe end")
    kept = sum(file.stat().st_size for file in provider.folder.joinpath("box").glob("output*"))
    assert kept <= 8_192
    assert await provider.delete(REF) == "deleted"
    assert await provider.delete(REF) == "already_absent"
    assert (await provider.inspect(REF)).state == "absent"


async def test_a_ceiling_holds_for_what_says_nothing_any_more(provider: LocalProvider) -> None:
    await provider.create(spec("import os, time; os.close(1); os.close(2); time.sleep(60)", ceiling_s=0.5))
    found = await ended(provider)
    assert found.diagnostics["signal"] == "SIGKILL"
    assert found.diagnostics["reason"] == "it was over its ceiling"
    await provider.delete(REF)


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="has no real-time signals")
async def test_a_signal_without_a_name_is_told_by_its_number(provider: LocalProvider) -> None:
    number = signal.SIGRTMIN + 6
    await provider.create(spec(f"import os; os.kill(os.getpid(), {number})"))
    found = await ended(provider)
    assert found.diagnostics["signal"] == f"signal {number}"
    await provider.delete(REF)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
async def test_what_has_left_the_group_is_killed_too(provider: LocalProvider) -> None:
    child = f"import subprocess; subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(60)']"
    await provider.create(spec(child + ", start_new_session=True)"))
    await ended(provider)
    assert _marked()
    assert await provider.delete(REF) == "deleted"
    assert not _marked()


async def test_its_end_is_known_though_nobody_was_left_to_tell(provider: LocalProvider) -> None:
    made = await provider.create(spec("import time; time.sleep(60)"))
    await trio.sleep(1.0)
    killed_at = time.time()
    os.killpg(int(made.provider_id), signal.SIGKILL)
    found = await ended(provider)
    assert found.diagnostics["ended_at"] == pytest.approx(killed_at, abs=0.9)
    await provider.delete(REF)


def _marked() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if b"RUNLANE_RUNNER_SANDBOX=box" in entry.read_bytes().split(b"\x00"):
                found.append(entry.parent.name)
        except OSError:
            continue
    return found


async def test_asked_again_it_answers_the_sandbox_that_is_there(provider: LocalProvider) -> None:
    one = await provider.create(spec("import time; time.sleep(60)"))
    assert await provider.create(spec("import time; time.sleep(60)")) == one
    assert await provider.names() == ["box"]
    assert (await provider.inspect(REF)).state == "running"
    await provider.delete(REF)
    assert await provider.names() == []
