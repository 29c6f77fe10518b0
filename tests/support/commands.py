"""What tests of the command line need: what a command did, and what to wait for."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import attrs


@attrs.frozen
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def refused(self, code: int, *words: str) -> None:
        """It ended with this code and one line that has these words."""
        assert self.code == code, self
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("Error: ")
        for word in words:
            assert word in lines[0]


Command = Callable[..., Answer]


def closed_port() -> int:
    """A port of this machine at which nobody listens."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])


def until_running(runlane: Command, run_id: str) -> None:
    """Wait until a run executes; the commands themselves are the pause between two looks."""
    while runlane("status", run_id, "--json", "--facts", "0").json["status"] != "running":
        pass
