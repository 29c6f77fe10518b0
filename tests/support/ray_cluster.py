"""A Ray cluster of one node, started for tests and gone after them.

Owns its processes and its folder. Nothing of it is left, whatever happens to the test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RAY = Path(sys.executable).parent / "ray"
_MARK = "RUNLANE_TEST_RAY"
_UP_WITHIN_S = 90.0


@contextmanager
def ray_cluster(*, cpus: int) -> Iterator[str]:
    """The URL of the cluster's dashboard. The nodes' ``python`` is this one."""
    # Short: the path of a socket below it has to fit into 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="rl-ray-", dir="/tmp"))
    mark = f"{_MARK}={folder}"
    port, client_port = _free_ports(2)
    command = [
        *(str(RAY), "start", "--head", "--block", "--no-monitor", "--disable-usage-stats"),
        *(
            "--port=0",
            f"--ray-client-server-port={client_port}",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ),
        *("--dashboard-host=127.0.0.1", f"--dashboard-port={port}", "--dashboard-agent-listen-port=0"),
        *(f"--temp-dir={folder}", f"--num-cpus={cpus}", "--object-store-memory=80000000"),
    ]
    environment = {
        **os.environ,
        _MARK: str(folder),
        "PATH": f"{RAY.parent}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    log = folder / "said"
    with log.open("wb") as said_to:
        head = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=said_to, stderr=said_to, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_up(head, url, log)
        yield url
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(10)
        _end(mark)
        head.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_until_up(head: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up_at = time.monotonic() + _UP_WITHIN_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/api/jobs/", timeout=5):
            return
        if head.poll() is not None or time.monotonic() > give_up_at:
            raise RuntimeError(f"Ray did not start: {log.read_text()[-2_000:]}")
        time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """The processes with that in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in entry.read_bytes().split(b"\x00"):
                found.append(int(entry.parent.name))
    return found


def _end(mark: str) -> None:
    give_up_at = time.monotonic() + 10.0
    while left := marked(mark):
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"processes of Ray do not end: {left}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
