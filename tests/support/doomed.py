"""Hosts that are killed at one exact point each: ``python -m tests.support.doomed SETTINGS FOLDER``.

For each of ``POINTS`` a host is forked that serves the point's own play, and that kills itself, with SIGKILL, right
before or right after that call of the database or of the provider. Says on stdout, as JSON, how each of them ended.

Its provider's sandboxes are files: whoever reads them is the runner.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import trio

from runtime import Context, Play, Runtime, RuntimeConfig, play
from runtime.sandboxes import Created, Inspection, SandboxRef, SandboxSpec
from sql import billing, runners, sandboxes

_LAUNCH = ("reserve", "create", "record_custody", "detach")
_CLEANUP = ("claim_cleanup", "delete", "accept", "inspect", "confirm")
_CALLS = (*_LAUNCH, "push", *_CLEANUP, "finalise")
POINTS = tuple(f"{when}-{call}" for call in _CALLS for when in ("before", "after"))
"""In the order of a run's life."""

_DOORS = {
    "reserve": sandboxes,
    "record_custody": sandboxes,
    "detach": runners,
    "push": runners,
    "claim_cleanup": sandboxes,
    "accept": sandboxes,
    "confirm": sandboxes,
    "finalise": billing,
}
# Hosts look at these when they start, too, and find what the dead before them left: they count once these were called.
_COUNTS_AFTER = {**{call: {"push"} for call in _CLEANUP}, "finalise": {"push", "confirm"}}
_SURVIVES_S = 30.0


def attempts_after(point: str) -> int:
    """Which attempt completes the run whose first host dies there."""
    handed_over = point == "after-detach" or point.partition("-")[2] not in _LAUNCH
    return 1 if handed_over else 2


def _play_of(point: str) -> Play:
    async def nothing(ctx: Context, data: dict[str, Any]) -> None: ...

    return play(point, sandbox="filed", ceiling_s=600)(nothing)


PLAYS = {point: _play_of(point) for point in POINTS}
"""The play of each point. None of them ever runs here."""

globals().update(PLAYS)  # a host takes only plays that their runners would find at the top level of a module


@attrs.define
class Filed:
    """A provider whose sandboxes are files below ``folder``; whatever it was asked to make is in ``made`` for ever."""

    folder: Path
    key: str = "filed"

    @property
    def made(self) -> Path:
        return self.folder.with_name("made")

    async def create(self, spec: SandboxSpec) -> Created:
        """What its runner is told is in the file."""
        with self.made.open("a") as made:
            made.write(spec.sandbox + "\n")
        draft = self.folder.with_name(spec.sandbox)
        draft.write_text(json.dumps(dict(spec.env)))
        draft.replace(self.folder / spec.sandbox)
        return Created(f"f-{spec.sandbox}")

    async def inspect(self, ref: SandboxRef) -> Inspection:
        """Whether there is a file."""
        return Inspection("running" if (self.folder / ref.sandbox).exists() else "absent")

    async def delete(self, ref: SandboxRef) -> str:
        """No file any more."""
        try:
            (self.folder / ref.sandbox).unlink()
        except FileNotFoundError:
            return "already_absent"
        return "deleted"

    async def names(self) -> Sequence[str]:
        """The files."""
        return [path.name for path in self.folder.iterdir()]


# --- a host that dies ------------------------------------------------------------------------------------


class _Doom:
    def __init__(self, point: str) -> None:
        self._when, _, self._call = point.partition("-")
        self._seen: set[str] = set()

    def wrapped(self, name: str, call: Any) -> Any:
        """``call``, with this process's death before or after it where it is this host's point."""

        @functools.wraps(call)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts = name == self._call and _COUNTS_AFTER.get(name, set()) <= self._seen
            if counts and self._when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            answer = await call(*args, **kwargs)
            self._seen.add(name)
            if counts and (name != "claim_cleanup" or answer[0]):
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return wrapper


async def _host(settings: dict[str, Any], folder: Path, point: str) -> None:
    doom = _Doom(point)
    for name, door in _DOORS.items():
        setattr(door, name, doom.wrapped(name, getattr(door, name)))

    class Doomed(Filed):
        create = doom.wrapped("create", Filed.create)
        inspect = doom.wrapped("inspect", Filed.inspect)
        delete = doom.wrapped("delete", Filed.delete)

    config = RuntimeConfig(**settings)
    async with Runtime.open(config, plays=[PLAYS[point]], sandboxes={"filed": Doomed(folder)}) as runtime:
        await runtime.wait_for_signal()


def main(settings: dict[str, Any], folder: Path) -> None:
    """One after the other."""
    for point in POINTS:
        pid = os.fork()
        if not pid:
            trio.run(_host, settings, folder, point)
            os._exit(0)
        ends_at = time.monotonic() + _SURVIVES_S
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < ends_at:
            time.sleep(0.01)
        died = os.WIFSIGNALED(ended[1])
        if ended == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        sys.stdout.write(json.dumps({"point": point, "died": died}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
