"""``serve``: how it begins and ends, and how it finds what it hosts."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime import InvalidPlay
from runtime.serve import load_plays, load_sandboxes, load_schedules
from sql.errors import ConfigError
from tests.support import hosting
from tests.support.commands import Command, closed_port, until_running
from tests.support.servers import temporary_folder


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_stops_on_a_signal_and_hands_its_leases_back(
    runlane: Command, dsn: str, schema: str, number: signal.Signals
) -> None:
    with hosting.serving("--plays", hosting.PLAYS, dsn=dsn, schema=schema, grace_s="0") as (process, _):
        runlane("submit", "waits", "--run-id", "w")
        until_running(runlane, "w")
        process.send_signal(number)
        out, err = process.communicate(timeout=hosting.PATIENCE_S)
    assert process.returncode == 0
    assert out == ""
    assert all(line.startswith("time=") for line in err.splitlines()), err
    assert "event=stopping running=1 grace_s=0\n" in err
    shown = runlane("status", "w", "--json").json
    assert (shown["status"], shown["failures"], shown["crashes"]) == ("queued", 0, 0)
    assert [one["outcome"] for one in shown["attempts"]] == ["released"]


def test_a_second_signal_skips_the_grace_period(runlane: Command, dsn: str, schema: str) -> None:
    variables = {"grace_s": "600", "shutdown_budget_s": "700"}
    with hosting.serving("--plays", hosting.PLAYS, dsn=dsn, schema=schema, **variables) as (process, _):
        runlane("submit", "waits", "--run-id", "w")
        until_running(runlane, "w")
        process.terminate()
        _read_until(process.stderr, "event=stopping")
        process.terminate()
        process.communicate(timeout=hosting.PATIENCE_S)
    assert process.returncode == 0
    assert runlane("status", "w", "--json").json["attempts"][0]["outcome"] == "released"


def test_serve_stops_at_the_end_of_stdin_when_asked_to(dsn: str, schema: str) -> None:
    arguments = ["--plays", hosting.PLAYS, "--stop-with-stdin"]
    with hosting.serving(*arguments, dsn=dsn, schema=schema) as (process, _):
        process.communicate(timeout=hosting.PATIENCE_S)
    assert process.returncode == 0


def test_serve_says_where_its_health_is(dsn: str, schema: str) -> None:
    arguments = ["--plays", f"{hosting.PLAYS}:quick", "--health-port", "0", "--slots", "3"]
    with hosting.serving(*arguments, dsn=dsn, schema=schema) as (process, ready):
        assert ready["plays"] == "echo,fails"
        assert (ready["schema"], ready["pid"]) == (schema, process.pid)
        with urllib.request.urlopen(f"{ready['health']}/readyz", timeout=10) as answer:
            state = json.load(answer)
        assert state["ready"] is True
        process.terminate()
        _, err = process.communicate(timeout=hosting.PATIENCE_S)
    assert " slots=3" in err


def test_serve_refuses_what_cannot_work(bare: Command, dsn: str, schema: str) -> None:
    where = ["--dsn", dsn, "--schema", schema]
    bare("serve", "--plays", "no_such_module", *where).refused(2, "no_such_module")
    bare("serve", "--plays", hosting.PLAYS, "--slots", "0", *where).refused(2, "slots")
    # With the providers that it wants, what is missing is the server for their runners.
    boxed = ["--plays", "tests.support.sandboxed:pretended"]
    bare("serve", *boxed, *where).refused(2, "sandboxes=")
    given = ["--sandboxes", "tests.support.sandboxed:providers"]
    bare("serve", *boxed, *given, *where).refused(2, "health_port")
    nowhere = f"postgresql://127.0.0.1:{closed_port()}/db"
    process = hosting.spawn("serve", "--plays", hosting.PLAYS, dsn=nowhere, schema=schema)
    _, err = process.communicate(timeout=hosting.PATIENCE_S)
    assert process.returncode == 6
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("Error: ")


def test_a_taken_health_port_is_one_line(dsn: str, schema: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        process = hosting.spawn(
            "serve", "--plays", hosting.PLAYS, "--health-port", port, dsn=dsn, schema=schema
        )
        _, err = process.communicate(timeout=hosting.PATIENCE_S)
    assert process.returncode == 2
    assert port in err.splitlines()[-1]
    assert "Traceback" not in err


def _read_until(stream: Any, word: str) -> None:
    for line in stream:
        if word in line:
            return
    raise AssertionError(f"{word!r} was never said")


def test_a_signal_while_a_host_starts_its_server_leaves_nothing_behind() -> None:
    with temporary_folder() as folder:
        process = hosting.spawn("serve", "--plays", hosting.PLAYS, embedded_dir=str(folder))
        while not (folder / "lock").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        _, err = process.communicate(timeout=hosting.PATIENCE_S)
        assert process.returncode == 0, err
        assert not (folder / "pgdata/postmaster.pid").exists()


# --- finding plays -----------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of plays into the current directory, and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])

    def write(text: str) -> str:
        name = f"broken_plays_{secrets.token_hex(4)}"
        (tmp_path / f"{name}.py").write_text(text)
        return name

    return write


def test_plays_of_a_module_a_list_and_one_by_one() -> None:
    names = [play.name for play in load_plays([hosting.PLAYS])]
    assert names == ["echo", "fails", "waits", "stubborn", "stepping"]
    assert [play.name for play in load_plays([f"{hosting.PLAYS}:quick"])] == ["echo", "fails"]
    twice = load_plays([f"{hosting.PLAYS}:fails", f"{hosting.PLAYS}:quick"])
    assert [play.name for play in twice] == ["fails", "echo"]
    assert len(load_plays(["tests.support:plays"])) == 5


def test_plays_and_schedules_in_lists_of_a_module_are_found(broken: Callable[[str], str]) -> None:
    name = broken(
        "from runtime import Schedule, play\n"
        "def f(ctx): ...\n"
        "plays = [play('listed')(f)]\n"
        "once = Schedule('once', 'listed', every_s=60)\n"
        "schedules = (once, Schedule('twice', 'listed', every_s=30))\n"
        "others = ['listed', 1]\n"
    )
    assert [play.name for play in load_plays([name])] == ["listed"]
    assert [schedule.name for schedule in load_schedules([name])] == ["once", "twice"]
    with pytest.raises(ConfigError, match="no play in it, so nothing to host"):
        load_plays([f"{name}:schedules"])


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("nothing.here", "no module 'nothing'"),
        ("tests.support.nothing", "no module 'tests.support.nothing'"),
        (f"{hosting.PLAYS}:nothing", "has no 'nothing'"),
        (f"{hosting.PLAYS}:", "module:attr"),
        ("", "module:attr"),
        (".relative", "module:attr"),
        ("tests/support/servers.py", "without .py: tests.support.servers"),
        ("script.py:plays", "without .py: script:plays"),
        ("tests.support.servers", "no play"),
    ],
)
def test_a_bad_target_is_named(target: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_plays([target])


def test_providers_of_sandboxes_are_found_like_plays() -> None:
    assert [*load_sandboxes("tests.support.sandboxed:providers")] == ["pretended"]
    for target, words in {
        "tests.support.nothing:providers": "no module 'tests.support.nothing'",
        "tests.support.sandboxed": "no dict of providers",
        f"{hosting.PLAYS}:quick": "no dict of providers",
        f"{hosting.PLAYS}:nothing": "has no 'nothing'",
    }.items():
        with pytest.raises(ConfigError, match=f"--sandboxes .*{words}"):
            load_sandboxes(target)


def test_what_is_no_play_is_refused() -> None:
    with pytest.raises(InvalidPlay, match="int is not a play"):
        load_plays([f"{hosting.PLAYS}:number"])


def test_a_module_that_imports_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken_plays.py").write_text("import no_such_dependency\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one])
    with pytest.raises(ConfigError, match="my_broken_plays imports 'no_such_dependency'"):
        load_plays(["my_broken_plays"])


def test_a_module_that_does_not_compile_is_one_line(bare: Command, broken: Callable[[str], str]) -> None:
    name = broken("def f(:\n")
    words = f"--plays '{name}': importing it failed: SyntaxError: invalid syntax ({name}.py, line 1)"
    bare("serve", "--plays", name).refused(2, words)


def test_an_error_while_a_module_is_imported_shows_the_users_frames_alone(
    bare: Command, broken: Callable[[str], str], tmp_path: Path
) -> None:
    inner = broken("def f():\n    return 1 / 0\n\nf()\n")
    outer = broken(f"import {inner}\n")
    said = bare("serve", "--plays", outer)
    assert (said.code, said.out) == (2, "")
    first, *frames = said.err.splitlines()
    where = f"({tmp_path / inner}.py, line 2)"
    assert (
        first == f"Error: --plays '{outer}': importing it failed: ZeroDivisionError: division by zero {where}"
    )
    files = [line.split('"')[1] for line in frames if line.startswith("  File ")]
    assert files == [str(tmp_path / f"{name}.py") for name in (outer, inner, inner)]


def test_an_invalid_play_in_a_module_keeps_its_own_error(broken: Callable[[str], str]) -> None:
    name = broken("from runtime import play\n\n@play('no good')\ndef f(ctx): ...\n")
    with pytest.raises(InvalidPlay, match="no good"):
        load_plays([name])
