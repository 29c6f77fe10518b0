"""Fixtures for the command line: with nothing, with a schema, with a host."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator

import pytest

from runtime.cli import cli
from tests.support import hosting
from tests.support.commands import Answer, Command
from tests.support.servers import ask


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process, with no RUNLANE_* variable set."""
    for name in list(os.environ):
        if name.startswith("RUNLANE_"):
            monkeypatch.delenv(name)

    def command(*arguments: str, stdin: bytes = b"") -> Answer:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(args=list(arguments), prog_name="runlane")
        said = capsys.readouterr()
        code = ended.value.code
        return Answer(code if isinstance(code, int) else 0, said.out, said.err)

    return command


@pytest.fixture
def runlane(bare: Command, monkeypatch: pytest.MonkeyPatch, dsn: str, schema: str, notify: bool) -> Command:
    """The same with the database and schema of the test, which is there, and the play ``echo`` in it."""
    monkeypatch.setenv("RUNLANE_DSN", dsn)
    monkeypatch.setenv("RUNLANE_SCHEMA", schema)
    monkeypatch.setenv("RUNLANE_NOTIFY", str(notify))
    assert bare("migrate").code == 0
    ask(dsn, f"INSERT INTO {schema}.plays VALUES (now(), 5, 'echo')")
    return bare


@pytest.fixture
def served(runlane: Command, dsn: str, schema: str, notify: bool) -> Iterator[Command]:
    """The same with a host that serves the test plays."""
    with hosting.serving("--plays", hosting.PLAYS, dsn=dsn, schema=schema, notify=str(notify)):
        yield runlane
