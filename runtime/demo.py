"""The demo: the main job on real input, with a host that dies on the way.

Owns the plot: rounds of audits, the kill, the takeover and the final count. It starts the server (unless a DSN names
another), the host processes and nothing else, and ends all of them whatever happens.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import trio

from actors.core import bounded_cleanup
from actors.core.groups import only
from runtime import _cli_show as cli_show
from runtime import _client
from runtime import demo_report as reporting
from runtime.config import RuntimeConfig
from runtime.demo_audit import audit, installed
from runtime.demo_hosts import HostProcess, Hosts, Lags
from runtime.host import session_options
from runtime.ids import new_run_id
from sql import deployment, reconcile, status, submit
from sql.connection import Session, open_session
from sql.types import RunStatus

FOLDER = Path(".runlane/demo")
_FOREIGN_SCHEMA = "runlane_demo"
_TICK_S = 0.2
_SCRAPE_EVERY_S = 1.0
# A frozen host's statements in flight end within this time, so that what it still holds then is what it dies with.
_SETTLE_S = 0.2
_KILL_AT = 0.3
_LIMIT_S = 120.0
_DELIVERY_S = 20.0
_CLEANUP_S = 25.0


def run_demo(dsn: str | None, schema: str | None, *, seconds: float, as_json: bool) -> bool:
    """Run the demo; whether every check held. ``seconds`` is how long audits are submitted.

    Raises KeyboardInterrupt after everything was stopped, when a signal came; DemoFailed, EmbeddedError,
    DatabaseError or ConfigError when it could not go on.
    """
    console = cli_show.console(stderr=as_json)
    config = _config(dsn, schema)
    folder = Path(config.embedded_dir or FOLDER).absolute()
    with reporting.Screen(console) as screen:
        if config.dsn is None:
            screen.event(f"starting Postgres in {config.embedded_dir}")
        with _client.reachable(config) as found:
            demo = Demo(found, Hosts(found, folder), screen, seconds, _status_command(config, dsn))
            counted = trio.run(demo.run)
        if counted is None:
            raise KeyboardInterrupt
    outcome = reporting.report(counted, demo.example())
    if as_json:
        cli_show.print_json(outcome.as_json())
    else:
        reporting.show(outcome, console)
    return outcome.held


def _config(dsn: str | None, schema: str | None) -> RuntimeConfig:
    given: dict[str, Any] = {"dsn": dsn, "schema": schema}
    config = RuntimeConfig.from_env(**{name: value for name, value in given.items() if value is not None})
    if config.dsn is None:
        return attrs.evolve(config, embedded_dir=str(Path(config.embedded_dir or FOLDER).absolute()))
    if schema is None and "RUNLANE_SCHEMA" not in os.environ:
        # Our hosts would also deliver and expire for whoever else uses that database.
        return attrs.evolve(config, schema=_FOREIGN_SCHEMA)
    return config


def _status_command(config: RuntimeConfig, dsn: str | None) -> str:
    """The beginning of a complete command that shows a run after the demo has ended; its id comes last."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    words = [str(python), "-m", "runtime"]
    if config.schema != "runlane" and os.environ.get("RUNLANE_SCHEMA") != config.schema:
        words += ["--schema", config.schema]
    if dsn is not None:
        # The DSN itself may hold a password, and what is printed is kept.
        return f"RUNLANE_DSN=… {shlex.join(words)} status"
    if config.dsn is None:
        return f"RUNLANE_EMBEDDED_DIR={shlex.quote(str(config.embedded_dir))} {shlex.join(words)} status"
    return f"{shlex.join(words)} status"


@attrs.define(eq=False)
class Demo:
    """One performance."""

    _config: RuntimeConfig
    _hosts: Hosts
    _screen: reporting.Screen
    _seconds: float
    _command: str
    _name: str = attrs.field(factory=new_run_id)
    _distributions: list[str] = attrs.field(factory=installed)
    _rounds: int = 0
    _runs: list[str] = attrs.field(factory=list)
    _open: dict[str, RunStatus | None] = attrs.field(factory=dict)
    _victim: HostProcess | None = None
    _in_flight: frozenset[str] = frozenset()
    _accounts: list[reconcile.Account] = attrs.field(factory=list)
    _interrupted: bool = False

    async def run(self) -> reporting.Counted | None:
        """Play it to the end; None when a signal came first. Every host is gone when this returns."""
        counted: reporting.Counted | None = None
        try:
            async with trio.open_nursery() as nursery:
                work = trio.CancelScope()
                await nursery.start(self._watch_signals, work)
                with work:
                    counted = await self._play()
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise only(group) from None
        return None if self._interrupted else counted

    def example(self) -> str:
        """The command that shows one run, if possible one that was taken over."""
        taken = [one.run_id for one in self._accounts if one.attempts_expired]
        return f"{self._command} {(taken or self._runs)[0]}"

    async def _watch_signals(
        self, work: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(*_client.SIGNALS) as signals:
            task_status.started()
            async for _ in signals:
                if self._interrupted:
                    self._hosts.kill()
                else:
                    self._screen.event("interrupted: stopping the hosts")
                self._interrupted = True
                work.cancel()

    # --- the plot ------------------------------------------------------------------------------------

    async def _play(self) -> reporting.Counted:
        started = trio.current_time()
        stopped_in_order = False
        self._screen.event(f"{len(self._distributions)} distributions to audit, again and again")
        try:
            async with (
                open_session(session_options(self._config), "demo") as session,
                trio.open_nursery() as nursery,
            ):
                await deployment.ensure(session)
                async with trio.open_nursery() as starting:
                    for _ in range(2):
                        starting.start_soon(self._start_host)
                nursery.start_soon(self._scrape_on)
                await self._audit(session, nursery)
                await self._delivered(session)
                await self._hosts.scrape()
                terminals = await self._terminals(session)
                nursery.cancel_scope.cancel()
            stopped_in_order = await self._hosts.stop()
        finally:
            with bounded_cleanup(_CLEANUP_S):
                await self._hosts.stop()
        lags, measured = Lags(), 0
        for host in self._hosts.all:
            lags.add(host.lags.upto)
            measured += bool(host.lags.count)
        return reporting.Counted(
            submitted=len(self._runs),
            rounds=self._rounds,
            distributions=len(self._distributions),
            elapsed_s=trio.current_time() - started,
            killed="nobody" if self._victim is None else self._victim.label,
            in_flight=self._in_flight,
            accounts=self._accounts,
            terminals=terminals,
            lags=lags,
            measured_hosts=measured,
            stopped_in_order=stopped_in_order,
        )

    async def _audit(self, session: Session, nursery: trio.Nursery) -> None:
        """Submit rounds while there is time, kill a host on the way, and wait until every run has ended."""
        started = trio.current_time()
        while True:
            elapsed_s = trio.current_time() - started
            busy = elapsed_s < self._seconds or self._victim is None
            if elapsed_s > _LIMIT_S or not (busy or self._open):
                return
            # A round ahead, so that the hosts always have work.
            if busy and len(self._open) <= len(self._distributions):
                await self._submit_round(session)
            await self._look(session)
            due = self._victim is None and elapsed_s > self._seconds * _KILL_AT
            if due and await self._killed(session):
                nursery.start_soon(self._start_host)
            self._hosts.check()
            await trio.sleep(_TICK_S)

    async def _submit_round(self, session: Session) -> None:
        self._rounds += 1
        for name in self._distributions:
            options = {
                "idempotency_key": f"{self._name}:{self._rounds}:{name}",
                "labels": {"demo": self._name, "distribution": name},
                "notify": self._config.notify,
            }
            run_id, _ = await submit.submit(session, audit.name, f'{{"distribution": "{name}"}}', options)
            self._runs.append(run_id)
            self._open[run_id] = None

    async def _look(self, session: Session) -> None:
        """Read the open runs again and forget those that have ended."""
        for run_id, run in (await status.read_runs(session, list(self._open))).items():
            if run.terminal:
                del self._open[run_id]
            else:
                self._open[run_id] = run
        running = Counter(run.host for run in self._open.values() if run is not None and run.host)
        where = {host.name: running[host.label] for host in self._hosts.living if host.health}
        self._screen.progress(len(self._runs) - len(self._open), len(self._runs), where)

    def _held_by(self, host: HostProcess) -> frozenset[str]:
        return frozenset(
            run_id for run_id, run in self._open.items() if run is not None and run.host == host.label
        )

    async def _killed(self, session: Session) -> bool:
        """Kill the first host, but only while it certainly holds runs: it is frozen while we look."""
        victim = self._hosts.all[0]
        if not self._held_by(victim):
            return False
        victim.freeze()
        try:
            await trio.sleep(_SETTLE_S)
            await self._look(session)
            held = self._held_by(victim)
            if held:
                victim.kill()
                self._victim, self._in_flight = victim, held
                self._screen.event(f"killed {victim.label} (SIGKILL) with {len(held)} runs in flight")
        finally:
            victim.thaw()
        return victim.killed

    async def _start_host(self) -> None:
        host = await self._hosts.start()
        self._screen.event(f"started {host.label}, health at {host.health}")

    async def _scrape_on(self) -> None:
        while True:
            await self._hosts.scrape()
            await trio.sleep(_SCRAPE_EVERY_S)

    async def _delivered(self, session: Session) -> None:
        """Wait until the ledger has every fact, for a while; what is missing then is reported."""
        with trio.move_on_after(_DELIVERY_S):
            while True:
                self._accounts = await reconcile.accounts(session, self._runs)
                if all(one.facts == one.applied for one in self._accounts):
                    return
                await trio.sleep(_TICK_S)

    async def _terminals(self, session: Session) -> list[status.Terminal]:
        found: list[status.Terminal] = []
        for start in range(0, len(self._runs), 500):
            found += await status.read_terminals(session, self._runs[start : start + 500])
        return found
