"""The keeper of a sandbox: the process that runs its command, keeps what it prints and says how it ended.

Run with a folder, it returns as soon as the keeper stands in a session of its own, which stays when its host dies; owns
the files in the folder. Run without, it stays in the foreground of whoever looks after it, prints what it keeps, and
ends with all that has come of the command. It knows nothing of runs, and needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, Protocol

SPEC_FILE = "spec.json"
PID_FILE = "pid.json"
EXIT_FILE = "exit.json"
KEEPER_LOG = "keeper.log"
OUTPUT_FILE = "output"
OLDER_OUTPUT_FILE = "output.older"
WORK_FOLDER = "work"

# In the foreground: what to keep, and what the line begins with that says how it ended.
SPEC_VARIABLE = "RUNLANE_RUNNER_SPEC"
REPORT = "runlane keeper: "

_CHUNK = 65_536
_MARK_EVERY_S = 0.2
# What is read of a pipe that others still write to when the command is over.
_MOST_REST = 256
_STOPS = (signal.SIGTERM, signal.SIGINT)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Output(Protocol):
    """Keeps some of what a command prints."""

    def write(self, chunk: bytes) -> None:
        """Take the next part."""
        ...

    def mark(self) -> None:
        """The command lives. Called a few times a second."""
        ...


def process_start(pid: int) -> tuple[str, bool] | None:
    """When a process began, as the system counts it, and whether it is more than a zombie; None: there is no such
    process. The same number with another start is another process."""
    stat = Path(f"/proc/{pid}/stat")
    if stat.parent.parent.joinpath("self").exists():
        try:
            # The name, in parentheses, may hold anything; what comes after the last one is fields 3 and up.
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return fields[19], fields[0] not in ("Z", "X")
    shown = subprocess.run(
        ["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split(maxsplit=1)
    return (shown[1].strip(), not shown[0].startswith("Z")) if len(shown) == 2 else None


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """All or nothing: whoever reads the file finds the whole of it."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(content))
    draft.replace(path)


def main(home: Path) -> int:
    """Leave a keeper behind and return."""
    told, tell = os.pipe()
    if os.fork():
        os.close(tell)
        return 0 if os.read(told, 1) else 1  # the end of the pipe without a word: it did not come up
    os.close(told)
    os.setsid()
    pid = os.getpid()
    started = process_start(pid)
    write_whole(home / PID_FILE, {"pid": pid, "start": started[0] if started else None})
    os.write(tell, b"+")
    os.close(tell)
    _keep(home, json.loads((home / SPEC_FILE).read_text()))
    return 0


def _keep(home: Path, spec: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the host's terminal is not meant for us
    output = _Latest(home, spec["output_bytes"] // 2)
    try:
        ended = _run(spec, output, home / WORK_FOLDER)
    finally:
        output.close()
    write_whole(home / EXIT_FILE, ended)


class _Latest:
    """Keeps the latest half at least in files, also when we are killed."""

    def __init__(self, home: Path, half: int) -> None:
        self._home = home
        self._half = half
        self._file = (home / OUTPUT_FILE).open("wb")

    def write(self, chunk: bytes) -> None:
        if self._file.tell() + len(chunk) > self._half:
            self._file.close()
            (self._home / OUTPUT_FILE).replace(self._home / OLDER_OUTPUT_FILE)
            self._file = (self._home / OUTPUT_FILE).open("wb")
        self._file.write(chunk[-self._half :])
        self._file.flush()

    def mark(self) -> None:
        """Should we be killed, the time of our file says until when we saw the command live."""
        with contextlib.suppress(OSError):  # somebody else removed the folder
            os.utime(self._home / PID_FILE)

    def close(self) -> None:
        self._file.close()


def stay(spec: dict[str, Any]) -> int:
    """Keep a command here until it ends, or until we are asked to end it or our parent is gone. The exit code.

    Of what it prints the first half of ``output_bytes`` is passed on at once, the last at the end; then comes a line
    that says how it ended. Where the system has /proc, nothing that it has started is left then.
    """
    _ask_of_the_system(_PR_SET_CHILD_SUBREAPER, 1)
    for number in _STOPS:
        signal.signal(number, _stop)
    _ask_of_the_system(_PR_SET_PDEATHSIG, signal.SIGTERM)
    command = [sys.executable if word == "python" else word for word in spec["command"]]
    output = _Passed(spec["output_bytes"] // 2)
    try:
        ended = _run({**spec, "command": command}, output)
        output.end()
        _print(f"{REPORT}{json.dumps(ended)}\n".encode())
    finally:
        _end_children()
    if ended["signal"] is not None:
        return 128 + int(signal.Signals[ended["signal"]])
    return 127 if ended["exit_code"] is None else int(ended["exit_code"])


class _Passed:
    """Passes the first half on, and keeps the last for the end."""

    def __init__(self, half: int) -> None:
        self._half = half
        self._room = half
        self._last = b""
        self._left_out = 0

    def write(self, chunk: bytes) -> None:
        passed, rest = chunk[: self._room], chunk[self._room :]
        if passed:
            self._room -= len(passed)
            _print(passed)
        last = self._last + rest
        self._last = last[-self._half :]
        self._left_out += len(last) - len(self._last)

    def mark(self) -> None:
        pass

    def end(self) -> None:
        if self._left_out:
            _print(f"\n[{self._left_out} bytes left out]\n".encode())
        _print(self._last + b"\n")


def _print(words: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk is no reason to end the command
        sys.stdout.buffer.write(words)
        sys.stdout.buffer.flush()


def _ask_of_the_system(option: int, value: int) -> None:
    with contextlib.suppress(AttributeError, OSError):  # only Linux has it
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _stop(*_: object) -> None:
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


def _end_children() -> None:
    """Kill what is left of the command, also what has left its session: orphans become children of ours."""
    if not Path("/proc/self/stat").exists():
        return
    while True:
        for child in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    us, found = str(os.getpid()), []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text("utf-8", "replace").rpartition(")")[2].split()[1] == us:
                found.append(int(stat.parent.name))
    return found


def _run(spec: dict[str, Any], output: Output, folder: Path | None = None) -> dict[str, Any]:
    """Run the command to its end, in a folder, or as long as we live. How it ended."""
    try:
        process = subprocess.Popen(
            spec["command"],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A process of one thread: nothing can hold a lock across the fork.
            preexec_fn=lambda: _prepare(spec, ends_with_us=folder is None),
        )
    except OSError as exc:
        reason = f"the command could not be started: {exc}"
        return {"reason": reason, "exit_code": None, "signal": None, "ended_at": time.time()}
    assert process.stdout is not None
    reason = _watch(process, process.stdout, output, spec["ceiling_s"])
    code = process.wait()
    return {
        "reason": reason,
        "exit_code": code if code >= 0 else None,
        "signal": _signal_name(-code) if code < 0 else None,
        "ended_at": time.time(),
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Python names only the first and the last of the real-time signals
        return f"signal {number}"


def _prepare(spec: dict[str, Any], ends_with_us: bool) -> None:
    if ends_with_us:
        _ask_of_the_system(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if spec["memory_bytes"] is not None:
        with contextlib.suppress(ValueError, OSError):  # not on every platform
            resource.setrlimit(resource.RLIMIT_AS, (spec["memory_bytes"],) * 2)
    if spec["cpu_s"] is not None:
        seconds = max(1, int(spec["cpu_s"]))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


def _watch(process: subprocess.Popen[bytes], said: IO[bytes], output: Output, ceiling_s: float | None) -> str:
    """Keep what the command prints until it ends or is over its ceiling. Why it ended."""
    ends_at = None if ceiling_s is None else time.monotonic() + ceiling_s
    said_all = False
    rest = _MOST_REST
    mark_at = 0.0
    while True:
        ended = process.poll() is not None
        if not ended and ends_at is not None and time.monotonic() >= ends_at:
            process.kill()
            return "it was over its ceiling"
        if not ended and time.monotonic() >= mark_at:
            output.mark()
            mark_at = time.monotonic() + _MARK_EVERY_S
        ready, _, _ = select.select([] if said_all else [said], [], [], 0.0 if ended else 0.2)
        chunk = os.read(said.fileno(), _CHUNK) if ready else b""
        said_all = said_all or (bool(ready) and not chunk)
        if ended and (not chunk or not rest):
            return "its command has ended"
        if chunk:
            rest -= ended
            output.write(chunk)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        raise SystemExit(main(Path(sys.argv[1])))
    raise SystemExit(stay(json.loads(os.environ[SPEC_VARIABLE])))
