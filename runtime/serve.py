"""``serve``: a process that hosts plays until a signal.

Owns how plays and providers of sandboxes are found by name, what a signal means, and the one line that says the host
is ready. It never decides how a host stops: the runtime does.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import trio

from actors.core.groups import leaves
from runtime.api import Runtime
from runtime.config import RuntimeConfig
from runtime.plays import Play, index_plays
from runtime.sandboxes import SandboxProvider
from runtime.schedules import Schedule
from sql.errors import ConfigError, RunlaneError

log = logging.getLogger("runlane.serve")

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_STDIN = 0


# --- finding plays -----------------------------------------------------------------------------------


def load_plays(targets: Sequence[str]) -> list[Play]:
    """The plays that ``module:attr`` targets name, each once.

    ``attr`` is a play, a list or tuple of plays, or a module; without it, all plays of the module are taken, those in
    lists of its own, too. The current directory is importable. Raises ConfigError, also where there is none, and
    InvalidPlay; for an error inside the module it is a ConfigError with the module's own part of the traceback as a
    note.
    """
    plays = list(index_plays(one for one in _named(targets) if not isinstance(one, Schedule)).values())
    if not plays:
        raise ConfigError(
            f"--plays {' '.join(map(repr, targets))}: there is no play in it, so nothing to host"
        )
    return plays


def load_schedules(targets: Sequence[str]) -> list[Schedule]:
    """The schedules among what the targets name, as for ``load_plays``."""
    return [one for one in _named(targets) if isinstance(one, Schedule)]


def load_sandboxes(target: str) -> dict[str, SandboxProvider]:
    """The providers of sandboxes by name that a ``module:attr`` target names, a dict. Raises ConfigError."""
    option = f"--sandboxes {target!r}"
    value = _value(target, option)
    if not isinstance(value, Mapping) or not all(
        isinstance(name, str) and hasattr(one, "key") and callable(getattr(one, "create", None))
        for name, one in value.items()
    ):
        raise ConfigError(f"{option}: it is no dict of providers by their names")
    return dict(value)


def _named(targets: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for target in targets:
        for one in _named_by(target):
            if one not in found:
                found.append(one)
    return found


def _named_by(target: str) -> list[Any]:
    value = _value(target, f"--plays {target!r}")
    if isinstance(value, ModuleType):
        return [one for thing in vars(value).values() for one in _in_module(thing)]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _in_module(thing: Any) -> list[Play | Schedule]:
    """The plays and schedules that a global of a module is, or is a list of."""
    things = list(thing) if isinstance(thing, (list, tuple)) else [thing]
    return things if all(isinstance(one, (Play, Schedule)) for one in things) else []


def _value(target: str, option: str) -> Any:
    """What a target names. ``option``: how an error begins."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    name, colon, attribute = target.partition(":")
    if name.endswith(".py"):
        module = name.removesuffix(".py").replace("/", ".").lstrip(".")
        raise ConfigError(f"{option}: write a module, without .py: {module}{colon}{attribute}")
    if not _MODULE.fullmatch(name) or (colon and not attribute):
        raise ConfigError(f"{option}: write it as module or module:attr")
    value: Any = _module(name, option)
    for part in attribute.split(".") if attribute else ():
        if not hasattr(value, part):
            raise ConfigError(f"{option}: {name} has no {attribute!r}")
        value = getattr(value, part)
    return value


def _module(name: str, option: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            problem = f"there is no module {missing!r} here or on sys.path"
        else:
            problem = f"{name} imports {missing!r}, which is not there"
        raise ConfigError(f"{option}: {problem}") from error
    except RunlaneError:
        raise
    except Exception as error:  # the module is the user's: it may raise anything
        raise _import_failed(option, error) from error


def _import_failed(option: str, error: Exception) -> ConfigError:
    """One line that says what and where, and the frames that are neither ours nor the import system's as a note."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in (__file__, importlib.__file__) and not frame.filename.startswith("<frozen ")
    ]
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if frames and not isinstance(error, SyntaxError):  # which says itself where it is
        said += f" ({frames[-1].filename}, line {frames[-1].lineno})"
    failure = ConfigError(f"{option}: importing it failed: {said}")
    if frames:
        failure.add_note("".join(traceback.format_list(frames)).rstrip())
    return failure


# --- hosting -----------------------------------------------------------------------------------------


class _Stop:
    """What the signals ask for. The first one stops a host that is still starting, too."""

    def __init__(self) -> None:
        self.starting = trio.CancelScope()
        self.asked = trio.Event()
        self.runtime: Runtime | None = None

    def ask(self) -> None:
        """The first call stops the host in good order, every further one skips the grace period."""
        if self.asked.is_set() and self.runtime is not None:
            self.runtime.hurry()
        self.asked.set()
        if self.runtime is None:
            self.starting.cancel()


async def serve(
    config: RuntimeConfig,
    plays: Sequence[Play],
    announce: Callable[[Runtime], None],
    *,
    schedules: Sequence[Schedule] = (),
    sandboxes: Mapping[str, SandboxProvider] | None = None,
    stop_with_stdin: bool = False,
) -> None:
    """Host the plays until SIGTERM or SIGINT (or the end of stdin), and return when everything is handed back.

    ``announce`` is called once, when the host is ready. Raises HostFailed when the host gave up.
    """
    stop = _Stop()
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(_watch_signals, stop)
            if stop_with_stdin:
                nursery.start_soon(_watch_stdin, stop)
            with stop.starting:
                await _host(config, plays, schedules, sandboxes, announce, stop)
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        failure = _main_error(group)
    if failure is not None:
        raise failure


async def _host(
    config: RuntimeConfig,
    plays: Sequence[Play],
    schedules: Sequence[Schedule],
    sandboxes: Mapping[str, SandboxProvider] | None,
    announce: Callable[[Runtime], None],
    stop: _Stop,
) -> None:
    async with Runtime.open(config, plays=plays, schedules=schedules, sandboxes=sandboxes) as runtime:
        stop.runtime = runtime
        announce(runtime)
        await stop.asked.wait()
        running = runtime.readiness()["slots"]["used"]
        log.info("event=stopping running=%d grace_s=%g", running, runtime.config.grace_s)


async def _watch_signals(stop: _Stop, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            log.info("event=signal name=%s", signal.Signals(number).name)
            stop.ask()


async def _watch_stdin(stop: _Stop) -> None:
    # A duplicate: closing it leaves the process its stdin.
    async with trio.lowlevel.FdStream(os.dup(_STDIN)) as stream:
        async for _ in stream:
            pass
    log.info("event=stdin_ended")
    stop.ask()


def _main_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The only error in the group, or the first if all are of ours; else the group."""
    found = leaves(group)
    return found[0] if len(found) == 1 or all(isinstance(one, RunlaneError) for one in found) else group


def ready(runtime: Runtime) -> dict[str, Any]:
    """What the ready line says. ``health`` is None without a health server."""
    port, name = runtime.health_port, runtime.config.health_host
    where = f"[{name}]" if ":" in name else name
    return {
        "event": "ready",
        "host": runtime.host_id,
        "pid": os.getpid(),
        "schema": runtime.config.schema,
        "plays": ",".join(runtime.plays),
        "health": None if port is None else f"http://{where}:{port}",
    }
