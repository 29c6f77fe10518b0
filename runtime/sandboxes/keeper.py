"""The keeper of a local sandbox: a process that stays when its host dies, and says how the sandbox's command ended.

Run with a folder, it returns as soon as the keeper stands in a session of its own. Owns the files in the folder. It
knows nothing of runs, and needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

SPEC_FILE = "spec.json"
PID_FILE = "pid.json"
EXIT_FILE = "exit.json"
KEEPER_LOG = "keeper.log"
OUTPUT_FILE = "output"
OLDER_OUTPUT_FILE = "output.older"
WORK_FOLDER = "work"

_CHUNK = 65_536
# What is read of a pipe that others still write to when the command is over.
_MOST_REST = 256


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
    try:
        process = subprocess.Popen(
            spec["command"],
            cwd=home / WORK_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: _limit(
                spec
            ),  # a process of one thread: nothing can hold a lock across the fork
        )
    except OSError as exc:
        write_whole(
            home / EXIT_FILE, {"reason": f"the command could not be started: {exc}", "ended_at": time.time()}
        )
        return
    assert process.stdout is not None
    reason = _watch(process, process.stdout, home, spec)
    code = process.wait()
    write_whole(
        home / EXIT_FILE,
        {
            "reason": reason,
            "exit_code": code if code >= 0 else None,
            "signal": signal.Signals(-code).name if code < 0 else None,
            "ended_at": time.time(),
        },
    )


def _limit(spec: dict[str, Any]) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if spec["memory_bytes"] is not None:
        with contextlib.suppress(ValueError, OSError):  # not on every platform
            resource.setrlimit(resource.RLIMIT_AS, (spec["memory_bytes"],) * 2)
    if spec["cpu_s"] is not None:
        seconds = max(1, int(spec["cpu_s"]))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


def _watch(process: subprocess.Popen[bytes], output: IO[bytes], home: Path, spec: dict[str, Any]) -> str:
    """Keep what the command prints until it ends or is over its ceiling. Why it ended."""
    half = spec["output_bytes"] // 2
    ends_at = None if spec["ceiling_s"] is None else time.monotonic() + spec["ceiling_s"]
    kept = (home / OUTPUT_FILE).open("wb")
    try:
        said_all = False
        rest = _MOST_REST
        while True:
            ended = process.poll() is not None
            if not ended and ends_at is not None and time.monotonic() >= ends_at:
                process.kill()
                return "it was over its ceiling"
            ready, _, _ = select.select([] if said_all else [output], [], [], 0.0 if ended else 0.2)
            chunk = os.read(output.fileno(), _CHUNK) if ready else b""
            said_all = said_all or (bool(ready) and not chunk)
            if ended and (not chunk or not rest):
                break
            if chunk:
                rest -= ended
                if kept.tell() + len(chunk) > half:
                    # The latest half at least is always there, also when we are killed.
                    kept.close()
                    (home / OUTPUT_FILE).replace(home / OLDER_OUTPUT_FILE)
                    kept = (home / OUTPUT_FILE).open("wb")
                kept.write(chunk[-half:])
                kept.flush()
    finally:
        kept.close()
    return "its command has ended"


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
