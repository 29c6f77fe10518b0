"""The processes of a measurement: each side of a comparison runs in a fresh interpreter.

Owns the children, their specification and their answer, one line of JSON each. It signals only what it started. What a
child does is in the scenario's own module; ``bench.child`` is its entry.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import attrs
import trio

from actors.core import bounded_cleanup
from bench.figures import BenchFailed

_START_S = 60.0
_STOP_S = 60.0
_TERM_S = 10.0


def _command(name: str, spec: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-m", "bench.child", name, json.dumps(dict(spec))]


async def measured(name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Run a child to its end and return what it measured. Raises BenchFailed with its last words."""
    done = await trio.run_process(
        _command(name, spec),
        capture_stdout=True,
        capture_stderr=True,
        check=False,
        start_new_session=True,  # Ctrl-C is for us: we end the child, then its schema, then its server
    )
    if done.returncode != 0:
        raise BenchFailed(
            f"the child {name} ended with exit code {done.returncode}: {_last_words(done.stderr)}"
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@attrs.define(eq=False)
class Child:
    """A child that runs until it is told to end. ``started`` is the line that it began with."""

    name: str
    process: trio.Process
    started: dict[str, Any] = attrs.field(factory=dict)
    _unread: bytes = b""

    async def line(self) -> dict[str, Any]:
        """The next line that it prints. Raises BenchFailed when it ends instead."""
        assert self.process.stdout is not None
        while b"\n" not in self._unread:
            chunk = await self.process.stdout.receive_some()
            if not chunk:
                raise BenchFailed(f"the child {self.name} ended early, exit code {await self.process.wait()}")
            self._unread += chunk
        text, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def ended(self) -> int:
        """Its exit code. Raises BenchFailed if it does not end."""
        with trio.move_on_after(_STOP_S):
            return await self.process.wait()
        raise BenchFailed(f"the child {self.name} did not end within {_STOP_S:g} s")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)


@contextlib.asynccontextmanager
async def running(name: str, spec: Mapping[str, Any]) -> AsyncIterator[Child]:
    """A child for the length of the block, entered when it says that it is ready."""
    process = await trio.lowlevel.open_process(
        _command(name, spec),
        stdin=subprocess.PIPE,  # its end tells the child that we are gone, however we went
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    child = Child(name, process)
    try:
        with trio.move_on_after(_START_S) as limit:
            child.started = await child.line()
        if limit.cancelled_caught:
            raise BenchFailed(f"the child {name} was not ready within {_START_S:g} s")
        yield child
    finally:
        with bounded_cleanup(_TERM_S):
            if process.poll() is None:
                process.terminate()
            await process.wait()
        if process.poll() is None:
            process.kill()
            with bounded_cleanup(_TERM_S):
                await process.wait()


def say(answer: Mapping[str, Any]) -> None:
    """In a child: print one line of JSON, now."""
    sys.stdout.write(json.dumps(dict(answer)) + "\n")
    sys.stdout.flush()


async def until_parent_is_gone(scope: trio.CancelScope) -> None:
    """In a child of ``running``: cancel the scope when the parent ends, however it ended."""
    # A duplicate: closing it leaves the process its stdin.
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as stream:
        async for _ in stream:
            pass
    scope.cancel()


def _last_words(stderr: bytes) -> str:
    lines = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "(it said nothing)"
