"""Hosts as processes of their own, through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLAYS = "tests.support.plays"
PATIENCE_S = 30.0


def environment(**variables: str) -> dict[str, str]:
    """Our own environment with these ``RUNLANE_*`` variables in place of the ones it has."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RUNLANE_") or name.startswith("RUNLANE_TEST_")
    }
    return kept | {f"RUNLANE_{name.upper()}": value for name, value in variables.items()}


def spawn(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    """``python -m runtime …`` with pipes on all three ends, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "runtime", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**variables),
        start_new_session=True,
    )


@contextmanager
def serving(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A ready host and its ready line; killed at the end if it is still there."""
    process = spawn("serve", "--json", *arguments, **variables)
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                _, said = process.communicate(timeout=PATIENCE_S)
                raise AssertionError(f"the host did not start: {said}")
            yield process, json.loads(line)
        finally:
            process.kill()
            process.communicate(timeout=PATIENCE_S)
