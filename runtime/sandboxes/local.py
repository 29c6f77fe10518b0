"""Sandboxes on this machine: a process group of its own, in its own folder, that outlives the host.

Owns the folder of each sandbox and the process group of its keeper. It isolates work and failures, not secrets: what
runs in it has the rights of the host's user.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from runtime.sandboxes import keeper
from runtime.sandboxes.base import (
    TAIL_BYTES,
    Created,
    Inspection,
    SandboxFault,
    SandboxRef,
    SandboxSpec,
    check_output_bytes,
)
from runtime.sandboxes.keeper import (
    EXIT_FILE,
    KEEPER_LOG,
    OLDER_OUTPUT_FILE,
    OUTPUT_FILE,
    PID_FILE,
    SPEC_FILE,
    WORK_FOLDER,
    process_start,
    write_whole,
)
from sql.errors import InputRefused

_STARTED_WITHIN_S = 30.0
_KILL_ROUNDS = 100
_MARK = "RUNLANE_RUNNER_SANDBOX"


class LocalProvider:
    """Runs each sandbox as processes of this machine below ``folder``.

    Sandboxes of one machine and folder are one provider to the database, however many hosts share them.
    ``output_bytes``: how much of what it prints is kept, the beginning and the end.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, output_bytes: int = 1_048_576
    ) -> None:
        default = Path(tempfile.gettempdir()) / f"runlane-sandboxes-{os.getuid()}"
        self.folder = Path(folder) if folder is not None else default
        self.key = f"local@{socket.gethostname()}:{self.folder}"
        self._output_bytes = check_output_bytes(output_bytes)

    async def create(self, spec: SandboxSpec) -> Created:
        """Start the command in a new session. Asked again, answers the sandbox that is there.

        Cut short, it still comes to its end first: a sandbox that is made behind its deletion's back would stay.
        """
        return await trio.to_thread.run_sync(self._create, spec)

    async def inspect(self, ref: SandboxRef) -> Inspection:
        """Whether its processes live, and how its command ended."""
        return await trio.to_thread.run_sync(self._inspect, ref.sandbox, abandon_on_cancel=True)

    async def delete(self, ref: SandboxRef) -> str:
        """Kill its processes and remove its folder."""
        return await trio.to_thread.run_sync(self._delete, ref.sandbox)

    async def names(self) -> Sequence[str]:
        """The sandboxes that have a folder."""

        def read() -> list[str]:
            with contextlib.suppress(FileNotFoundError):
                return sorted(entry.name for entry in self.folder.iterdir() if entry.name[0] != ".")
            return []

        return await trio.to_thread.run_sync(read, abandon_on_cancel=True)

    # --- in a thread -----------------------------------------------------------------------------------

    def _home(self, sandbox: str) -> Path:
        if not sandbox or sandbox.startswith(".") or "/" in sandbox or "\x00" in sandbox:
            raise InputRefused("sandbox", f"{sandbox!r} is no name of a sandbox")
        return self.folder / sandbox

    def _create(self, spec: SandboxSpec) -> Created:
        home = self._home(spec.sandbox)
        (home / WORK_FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
        known = _read(home / PID_FILE)
        if known is not None:
            return Created(str(known["pid"]))
        order = {
            "command": [sys.executable if word == "python" else word for word in spec.command],
            "memory_bytes": spec.memory_bytes,
            "cpu_s": spec.cpu_s,
            "ceiling_s": spec.ceiling_s,
            "output_bytes": self._output_bytes,
        }
        write_whole(home / SPEC_FILE, order)
        with (home / KEEPER_LOG).open("wb") as said_to:
            started = subprocess.run(
                # By its path and isolated: it needs nothing but the standard library, and starts in a blink.
                [sys.executable, "-IS", keeper.__file__, str(home)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **spec.env, _MARK: spec.sandbox},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said_to,
                check=False,
                timeout=_STARTED_WITHIN_S,
            )
        known = _read(home / PID_FILE)
        if started.returncode or known is None:
            said = (home / KEEPER_LOG).read_text("utf-8", "replace").strip()[-500:]
            raise SandboxFault(
                f"the keeper of sandbox {spec.sandbox} did not start: {said or 'no reason given'}"
            )
        return Created(str(known["pid"]))

    def _inspect(self, sandbox: str) -> Inspection:
        home = self._home(sandbox)
        if not home.is_dir():
            return Inspection("absent")
        ended = _read(home / EXIT_FILE)
        if ended is None and _lives(_read(home / PID_FILE)):
            return Inspection("running")
        # It may have ended between the two looks.
        diagnostics = _read(home / EXIT_FILE)
        if diagnostics is None:
            diagnostics = {"reason": "its processes are gone without a word"}
            with contextlib.suppress(OSError):
                diagnostics["ended_at"] = (home / PID_FILE).stat().st_mtime  # the keeper's last mark
        output = b""
        for name in (OLDER_OUTPUT_FILE, OUTPUT_FILE):
            with contextlib.suppress(OSError):
                output += (home / name).read_bytes()
        return Inspection(
            "ended", {**diagnostics, "output_tail": output[-TAIL_BYTES:].decode("utf-8", "replace")}
        )

    def _delete(self, sandbox: str) -> str:
        home = self._home(sandbox)
        if not home.is_dir():
            return "already_absent"
        _kill(_read(home / PID_FILE), sandbox)
        # Renamed first: from here on nobody finds it, and a removal that is cut short goes on at the next one.
        home.rename(self.folder / f".{sandbox}")
        for rest in self.folder.glob(".*"):
            shutil.rmtree(rest, ignore_errors=True)
        return "deleted"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found


def _lives(known: dict[str, Any] | None) -> bool:
    """Whether the keeper is still this very process."""
    if known is None:
        return False
    return process_start(known["pid"]) == (known["start"], True)


def _kill(known: dict[str, Any] | None, sandbox: str) -> None:
    """End every process of the sandbox, also what has left its process group."""
    if known is not None:
        now = process_start(known["pid"])
        # Without its leader a group's number is given to nobody else as long as the group has members.
        if now is None or now[0] == known["start"]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(known["pid"], signal.SIGKILL)
    mark = f"{_MARK}={sandbox}".encode()
    for _ in range(_KILL_ROUNDS):
        left = False
        for entry in Path("/proc").glob("[0-9]*/environ"):  # where the platform has it
            with contextlib.suppress(OSError):
                if mark in entry.read_bytes().split(b"\x00"):
                    left = True
                    os.kill(int(entry.parent.name), signal.SIGKILL)
        if not left:  # also none that was started while we looked
            return
        time.sleep(0.02)
    raise SandboxFault(f"processes of sandbox {sandbox} do not end")
