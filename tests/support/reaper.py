"""Ends a test server whose test run was killed: ``python -m tests.support.reaper FOLDER SERVER_FOLDER BINARIES``.

Waits until its input ends, which is when the run is over, however it ended. Does nothing if the folder is gone.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from runtime.embedded import embedded_server


def main(folder: Path, server_folder: Path, binaries: Path) -> None:
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
    main(*map(Path, sys.argv[1:]))
