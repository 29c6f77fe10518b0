"""Where a scenario runs: a server, and a schema of its own that is dropped afterwards.

Owns what is made for a measurement and thrown away: the embedded server in a temporary folder, databases, schemas. It
never touches anything that it did not make.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import attrs
import trio

from actors.core import bounded_cleanup
from bench.figures import BenchFailed
from runtime.embedded import EmbeddedServer
from sql import bundle, deployment
from sql.connection import Session, SessionOptions, open_session
from sql.errors import KernelRefused

_DROP_S = 60.0

# Nothing to claim, nothing that runs, nothing to deliver: probes of partial indexes, no count.
_AT_REST = """
SELECT NOT EXISTS (SELECT FROM @schema@.runs WHERE status IN ('queued', 'waiting') AND turn IS NULL)
   AND NOT EXISTS (SELECT FROM @schema@.runs WHERE status IN ('queued', 'waiting') AND turn >= 0)
   AND NOT EXISTS (SELECT FROM @schema@.runs WHERE status = 'running')
   AND NOT EXISTS (SELECT FROM @schema@.runs WHERE lane_pending)
   AND NOT EXISTS (SELECT FROM @schema@.lanes WHERE lane_pending)
"""
# What a run of a no-op play leaves behind, whichever way it was claimed: three facts, all of them in the ledger.
_AUDIT = """
SELECT (SELECT count(*) FROM @schema@.runs) AS runs,
       (SELECT count(*) FROM @schema@.runs WHERE status = 'completed') AS completed,
       (SELECT count(*) FROM @schema@.runs WHERE started_at = created_at) AS inline,
       (SELECT count(*) FROM @schema@.facts) AS facts,
       (SELECT count(*) FROM @schema@.attempts) AS attempts,
       (SELECT count(*) FROM @schema@.ledger_runs l JOIN @schema@.runs r USING (run_id)
         WHERE l.applied_seq = r.last_seq AND l.applied_facts = r.last_seq AND r.acked_seq = r.last_seq
           AND l.status = r.status) AS delivered,
       (SELECT n_tup_upd FROM pg_stat_user_tables WHERE schemaname = $1 AND relname = 'runs') AS updates
"""


@attrs.frozen
class Audit:
    """What a measurement left behind: what held of it, the share of runs admitted as already claimed, and the updates
    of run rows per run, which say how much the database really had to do."""

    checks: Mapping[str, bool]
    inline: float
    updates_per_run: float


@attrs.frozen
class Place:
    """A schema with the kernel in it. ``session`` is for the scenario's own questions."""

    dsn: str
    schema: str
    session: Session

    @property
    def spec(self) -> dict[str, Any]:
        """What a child process needs to find it."""
        return {"dsn": self.dsn, "schema": self.schema}

    async def fetchrow(self, text: str, *args: Any) -> Any:
        """One row of a query with ``@schema@`` in it."""
        return await self.session.fetchrow(bundle.render(text, self.schema), *args, timeout_s=_DROP_S)

    async def settle_disk(self) -> None:
        """Start the next round with nothing left to write, where the role may ask for that."""
        with contextlib.suppress(KernelRefused):
            await self.session.execute("CHECKPOINT", timeout_s=_DROP_S)

    async def audit(self, runs: int) -> Audit:
        """Whether ``runs`` no-op runs went through whole. Once the processes that ran them have ended."""
        row = await self.fetchrow(_AUDIT, self.schema)
        checks = {
            "every run completed, once": row["runs"] == row["completed"] == row["attempts"] == runs,
            "three facts per run": row["facts"] == 3 * runs,
            "the ledger has each fact once and in order": row["delivered"] == runs,
        }
        return Audit(checks, row["inline"] / runs, row["updates"] / runs)


def at_rest_query(schema: str) -> str:
    """A statement that says whether nothing is left to do. Its session should have ``enable_seqscan`` off."""
    return bundle.render(_AT_REST, schema)


async def until_rest(session: Session, *, every_s: float = 0.005, limit_s: float = 300.0) -> float:
    """Wait until nothing is left to do; ``time.perf_counter()`` of the answer that said so. Raises BenchFailed."""
    query = at_rest_query(session.options.schema)
    await session.execute("SET enable_seqscan = off")
    with trio.move_on_after(limit_s):
        while not await session.fetchval(query):  # noqa: ASYNC110 - the database is asked
            await trio.sleep(every_s)
        return time.perf_counter()
    raise BenchFailed(f"not everything was done and delivered within {limit_s:g} s")


# --- servers -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def server(dsn: str | None, settings: Mapping[str, str] | None = None) -> Iterator[str]:
    """That server, or without a DSN an embedded one in a temporary folder, as durable as by default."""
    if dsn is not None:
        yield dsn
        return
    folder = Path(tempfile.mkdtemp(prefix="runlane-bench-"))
    if os.geteuid() == 0:
        folder.chmod(0o755)  # the server's account must be able to enter
    made = {folder}
    try:
        embedded = EmbeddedServer.of(folder, settings=settings)
        made.add(embedded.folder)
        try:
            yield embedded.join()
        finally:
            # From here on an impatient second Ctrl-C would only leave things behind.
            heeded = signal.signal(signal.SIGINT, signal.SIG_IGN)
            embedded.leave()
            signal.signal(signal.SIGINT, heeded)
    finally:
        for path in made:
            shutil.rmtree(path)


@contextlib.asynccontextmanager
async def fresh_schema(dsn: str) -> AsyncIterator[Place]:
    """A new schema with the kernel in it, dropped at the end."""
    options = SessionOptions(
        dsn, f"bench_{secrets.token_hex(4)}", statement_timeout_s=_DROP_S, application="bench"
    )
    try:
        async with open_session(options, "scenario") as session:
            await deployment.ensure(session)
            yield Place(dsn, options.schema, session)
    finally:
        with bounded_cleanup(_DROP_S):
            async with open_session(options, "drop") as session:
                await session.execute(f"DROP SCHEMA IF EXISTS {bundle.quote(options.schema)} CASCADE")


@contextlib.asynccontextmanager
async def fresh_database(dsn: str) -> AsyncIterator[tuple[str, str, Session]]:
    """A new database, dropped at the end: its DSN, its name, and a session on another one to watch it from."""
    name = f"runlane_bench_{secrets.token_hex(4)}"
    options = SessionOptions(dsn, statement_timeout_s=_DROP_S, application="bench")
    try:
        async with open_session(options, "scenario") as session:
            await session.execute(f"CREATE DATABASE {name}")
            yield urlunsplit(urlsplit(dsn)._replace(path=f"/{name}")), name, session
    finally:
        with bounded_cleanup(_DROP_S):
            async with open_session(options, "drop") as session:
                await session.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
