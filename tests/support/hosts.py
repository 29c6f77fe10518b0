"""Hosts under test, in this process and in others, and what must hold when their work is done.

Owns short budgets for tests, the wait for a condition, and the checks of a whole schema. It never reaches into a host
that it opened beyond what the public API shows.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from runtime import JsonCodec, Ledger, Play, RunStatus, Runtime, RuntimeConfig
from runtime.sandboxes import SandboxProvider
from sql import reconcile
from sql.connection import Session, SessionOptions, open_session
from tests.support import servers
from tests.support.invariants import check_invariants

ROOT = Path(__file__).parents[2]

QUICK: dict[str, Any] = {
    "slots": 20,
    "lease_s": 6.0,
    "renew_every_s": 1.0,
    "flush_ms": 50,
    "park_after_s": 0.2,
    "grace_s": 0.3,
    "release_budget_s": 2.0,
    "shutdown_budget_s": 8.0,
    "operation_timeout_s": 15.0,
    "statement_timeout_s": 5.0,
    "connect_timeout_s": 5.0,
    "backstop_s": 1.0,
    "lane_lease_s": 4.0,
    "delivery_timeout_s": 2.0,
    "log_level": "INFO",
}


async def eventually(
    condition: Callable[[], Awaitable[Any]], *, within_s: float = 10.0, every_s: float = 0.01
) -> Any:
    """The first true answer of ``condition``. ``trio.TooSlowError`` when there is none in time."""
    with trio.fail_after(within_s):
        while not (answer := await condition()):  # noqa: ASYNC110 - it happens elsewhere
            await trio.sleep(every_s)
        return answer


@attrs.frozen
class Hosts:
    """Opens hosts on one schema of one server."""

    dsn: str
    schema: str
    notify: bool

    def config(self, **more: Any) -> RuntimeConfig:
        """Short budgets; ``more`` wins."""
        settings = {"dsn": self.dsn, "schema": self.schema, "notify": self.notify, **QUICK, **more}
        return RuntimeConfig(**settings)

    @asynccontextmanager
    async def open(
        self,
        *plays: Play,
        ledger: Ledger | None = None,
        sandboxes: Mapping[str, SandboxProvider] | None = None,
        **more: Any,
    ) -> AsyncIterator[Runtime]:
        """A host of these plays in this process. ``more`` are settings, and the codec."""
        codec: JsonCodec | None = more.pop("codec", None)
        async with Runtime.open(
            self.config(**more), plays=plays, ledger=ledger, codec=codec, sandboxes=sandboxes
        ) as runtime:
            yield runtime

    async def ask(self, *statements: str) -> list[Any]:
        """Statements on a connection of their own; ``@.`` stands for the schema. The last one's rows."""
        texts = [text.replace("@.", f"{self.schema}.") for text in statements]
        return await trio.to_thread.run_sync(partial(servers.ask, self.dsn, *texts))

    async def value(self, statement: str) -> Any:
        """The first column of the first row."""
        return (await self.ask(statement))[0][0]

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """A session as the actors have them."""
        async with open_session(SessionOptions(self.dsn, self.schema), "test") as session:
            yield session

    async def backends(self, actor: str = "%") -> list[int]:
        """The server processes of the hosts' actors of that name on this schema's database, newest first."""
        rows = await self.ask(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            f" AND application_name LIKE 'runlane {actor}' ORDER BY backend_start DESC"
        )
        return [row[0] for row in rows]

    async def delivered(self, run_ids: Iterable[str], *, within_s: float = 20.0) -> list[reconcile.Account]:
        """Wait until these runs have ended and the default ledger has everything; their accounts."""
        wanted = list(run_ids)
        if not wanted:
            return []
        async with self.session() as session:

            async def whole() -> list[reconcile.Account] | None:
                found = await reconcile.accounts(session, wanted)
                open_ = [a for a in found if not a.terminals or a.lost]
                return found if len(found) == len(wanted) and not open_ else None

            found: list[reconcile.Account] = await eventually(whole, within_s=within_s, every_s=0.05)
        return found

    async def check(
        self, run_ids: Iterable[str] = (), *, ledger: bool = True, within_s: float = 20.0
    ) -> None:
        """Each of these runs has ended once and reached the ledger once, and every invariant holds."""
        if ledger:
            for account in await self.delivered(run_ids, within_s=within_s):
                assert account.terminals == 1, account
                assert account.unbroken, account
                assert (account.lost, account.duplicated) == (0, 0), account
        async with self.session() as session:
            await check_invariants(session, ledger=ledger)

    async def leases(self, host: str | None = None) -> int:
        """Runs that are leased, by ``host`` if given."""
        mine = "" if host is None else f" AND lease_owner = {int(host)}"
        return int(await self.value(f"SELECT count(*) FROM @.runs WHERE lease_expires_at IS NOT NULL{mine}"))


async def until(runtime: Runtime, run_id: str, status: str, *, within_s: float = 10.0) -> RunStatus:
    """Wait until a run has that status."""

    async def stands() -> RunStatus | None:
        now = await runtime.status(run_id)
        return now if now.status == status else None

    found: RunStatus = await eventually(stands, within_s=within_s)
    return found


# --- hosts in other processes --------------------------------------------------------------------------


@attrs.define
class HostProcess:
    """A host of ``tests.support.hosted`` in a process of its own."""

    popen: subprocess.Popen[str]
    host_id: str = ""
    health: str = ""

    async def line(self, within_s: float = 20.0) -> dict[str, Any]:
        """The next thing that it says."""
        assert self.popen.stdout is not None
        with trio.fail_after(within_s):
            text = await trio.to_thread.run_sync(self.popen.stdout.readline, abandon_on_cancel=True)
        assert text, f"the host ended with {self.popen.wait(5)}"
        answer: dict[str, Any] = json.loads(text)
        return answer

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    async def ended(self, within_s: float = 20.0) -> int:
        """Its exit code."""
        with trio.fail_after(within_s):
            return await trio.to_thread.run_sync(self.popen.wait, abandon_on_cancel=True)


@contextmanager
def _killed_at_the_end(popen: subprocess.Popen[str]) -> Any:
    try:
        yield popen
    finally:
        if popen.poll() is None:
            popen.kill()
        popen.wait(10)
        for pipe in (popen.stdout, popen.stdin):
            if pipe is not None:
                pipe.close()


@asynccontextmanager
async def host_process(hosts: Hosts, *arguments: str, **more: Any) -> AsyncIterator[HostProcess]:
    """A host in a process of its own, ready; killed at the end if it still lives."""
    settings = {"dsn": hosts.dsn, "schema": hosts.schema, "notify": hosts.notify, **QUICK, **more}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUNLANE_")}
    popen = subprocess.Popen(  # noqa: ASYNC220 - tests may block for a moment
        [sys.executable, "-m", "tests.support.hosted", json.dumps(settings), *arguments],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    with _killed_at_the_end(popen):
        process = HostProcess(popen)
        hello = await process.line()
        process.host_id = hello["host"]
        yield process


@attrs.define
class MortalHost:
    """One host after the other in a process of its own: killed, frozen and started again.

    ``command`` starts it, and says on stdout, as a line of JSON, that it is ready. ``environment`` None is ours.
    """

    command: list[str]
    environment: Mapping[str, str] | None = None
    process: subprocess.Popen[str] | None = None
    busy: trio.Lock = attrs.field(factory=trio.Lock)

    async def start(self) -> None:
        self.process = await trio.to_thread.run_sync(
            partial(
                subprocess.Popen,
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=self.environment,
            )
        )
        assert self.process.stdout is not None
        line = await trio.to_thread.run_sync(self.process.stdout.readline)
        assert json.loads(line)["host"]

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(10)
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe is not None
                pipe.close()
        self.process = None
