"""A Postgres to test against: started in a temporary folder, stopped and removed at the end, however that comes.

Owns the folder and the process that cleans up after a killed test run: ``python -m runtime._throwaway FOLDER
SERVER_FOLDER BINARIES`` waits until its input ends, which is when the run is over, and does nothing if all is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.embedded import EmbeddedServer, embedded_server

# A crash of the machine does not matter. A crash of the server does, so that synchronous_commit stays on.
SETTINGS = {"fsync": "off", "full_page_writes": "off"}
_LEAVE_S = 60.0


def new_folder() -> Path:
    """A temporary folder that the embedded server's account can enter."""
    folder = Path(tempfile.mkdtemp(prefix="runlane-test-"))
    if os.geteuid() == 0:
        folder.chmod(0o755)
    return folder


@contextmanager
def throwaway_server(binaries: Path | None = None) -> Iterator[EmbeddedServer]:
    """A server of its own, joined; ``leave()`` and ``join()`` stop and start it on the way. Blocks."""
    folder = new_folder()
    server = EmbeddedServer.of(folder, settings=SETTINGS, binaries=binaries)
    with _reaped(folder, server.folder, server.binaries):
        try:
            server.join()
            yield server
        finally:
            server.leave()
            # Two where the server's account cannot enter the temp folder.
            for path in {folder, server.folder}:
                shutil.rmtree(path)


@contextmanager
def _reaped(*places: Path) -> Iterator[None]:
    """Have the server stopped and its folders removed even if this process is killed in the block."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "runtime._throwaway", *map(str, places)],
        stdin=subprocess.PIPE,
        cwd=Path(__file__).parents[1],
        start_new_session=True,  # the signal that ends the run is not for it
    )
    try:
        yield
    finally:
        reaper.communicate(timeout=_LEAVE_S)


def _reap(folder: Path, server_folder: Path, binaries: Path) -> None:
    sys.stdin.read()
    if not folder.exists():
        return
    if (server_folder / "pgdata").exists():
        # Its last user stops a server, and the killed run is no user any more.
        with embedded_server(server_folder, binaries=binaries):
            pass
    for left in {folder, server_folder}:
        shutil.rmtree(left)


if __name__ == "__main__":
    _reap(*map(Path, sys.argv[1:]))
