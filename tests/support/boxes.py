"""What a pretended service runs for a sandbox: processes of this machine, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs


@attrs.define
class Box:
    """A sandbox's folder, which is its home, its environment, and the processes that were started in it."""

    folder: Path
    env: Mapping[str, str]
    processes: list[subprocess.Popen[bytes]] = attrs.field(factory=list)

    def start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process in a session of its own; what it prints is in ``said``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        environ = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "HOME": str(self.folder),
            **self.env,
        }
        with self.said.open("ab") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    @property
    def said(self) -> Path:
        """What its processes have printed."""
        return self.folder / "said"

    def destroy(self) -> None:
        """End all of it."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@attrs.define
class Mood:
    """How a pretended service is: well, silent (``hang``), or answering nothing but errors (``fail``)."""

    failing: bool = False
    _speaks: threading.Event = attrs.field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self._speaks.set()

    def hang(self, on: bool) -> None:
        """Answer nothing from now on, or go on."""
        if on:
            self._speaks.clear()
        else:
            self._speaks.set()

    def fail(self, on: bool) -> None:
        """Answer nothing but errors from now on, or go on."""
        self.failing = on

    def wait(self) -> None:
        """Return when it speaks."""
        self._speaks.wait(60)
