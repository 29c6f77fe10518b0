"""The processes of local sandboxes, seen from outside: when each runner began and ended, whatever anybody says of it.

Owns the watch over a provider's folder. It reads what the system knows of processes, and nothing that a host, a keeper
or a runner writes beyond the keeper's number.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import attrs
import trio

from runtime.sandboxes.keeper import EXIT_FILE, PID_FILE, process_start

_TICKS = os.sysconf("SC_CLK_TCK")
_LOOK_S = 0.03


@attrs.define(eq=False)
class Life:
    """The runner's process of one sandbox. Times are seconds since the epoch; ``ended`` is None while it lives."""

    sandbox: str
    keeper: int
    pid: int
    began: float
    ended: float | None = None
    harmed: str = ""
    """What was done to it."""

    @property
    def seconds(self) -> float:
        assert self.ended is not None
        return self.ended - self.began


@attrs.define
class Watch:
    """Everything that ever lived below ``folder``."""

    folder: Path
    lives: dict[str, Life] = attrs.field(factory=dict)

    @property
    def alive(self) -> list[Life]:
        return [life for life in self.lives.values() if life.ended is None]

    def kill_rest(self) -> None:
        """What a test that failed has left behind."""
        for known in self.folder.glob(f"*/{PID_FILE}"):
            with contextlib.suppress(OSError):
                os.killpg(json.loads(known.read_text())["pid"], signal.SIGKILL)

    async def run(self) -> None:
        """Watch until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                for home in self.folder.glob("[!.]*"):
                    if home.name not in self.lives:
                        life = _born(home)
                        if life is not None:
                            self.lives[home.name] = life
                            nursery.start_soon(_until_ended, life)
                await trio.sleep(_LOOK_S)


def _born(home: Path) -> Life | None:
    try:
        keeper = json.loads((home / PID_FILE).read_text())["pid"]
        pid = int(Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None  # not yet, or not any more
    started = process_start(pid)
    if started is None or (home / EXIT_FILE).exists():
        return None
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - int(started[0]) / _TICKS
    return Life(home.name, keeper, pid, time.time() - since_boot)


async def _until_ended(life: Life) -> None:
    try:
        descriptor = os.pidfd_open(life.pid)
    except ProcessLookupError:
        life.ended = time.time()
        return
    try:
        await trio.lowlevel.wait_readable(descriptor)
        life.ended = time.time()
    finally:
        os.close(descriptor)
