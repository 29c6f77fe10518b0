"""Programs beside the hosts: a connection that may hold a transaction open, in a thread of its own.

Owns what a test needs to be somebody else: an application that calls the SQL functions inside its own transaction,
or a backend whose answer is lost while it works. It has enough of ``sql.connection.Session`` for the doors to take it
for one, but it never translates errors and sets nothing in its session.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import asyncpg
import attrs
import trio

from sql.connection import Session, SessionOptions
from tests.support.kernel import Kernel

_CALL_S = 20.0


@attrs.define
class Caller:
    """A connection for one trio task at a time. Errors are asyncpg's own."""

    options: SessionOptions
    pid: int = 0
    notices: list[str] = attrs.field(factory=list)
    """What the server said beside its answers."""
    _loop: Any = None
    _stop: Any = None
    _conn: Any = None

    async def fetch(self, statement: str, *args: Any) -> list[Any]:
        rows: list[Any] = await self._run(self._conn.fetch(statement, *args))
        return rows

    async def fetchrow(self, statement: str, *args: Any) -> Any:
        return await self._run(self._conn.fetchrow(statement, *args))

    async def fetchval(self, statement: str, *args: Any) -> Any:
        return await self._run(self._conn.fetchval(statement, *args))

    async def execute(self, statement: str, *args: Any) -> Any:
        return await self._run(self._conn.execute(statement, *args))

    async def begin(self, isolation: str = "read committed") -> None:
        await self.execute(f"BEGIN ISOLATION LEVEL {isolation}")

    async def commit(self) -> None:
        await self.execute("COMMIT")

    async def rollback(self) -> None:
        await self.execute("ROLLBACK")

    async def _run(self, calling: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(calling, self._loop)
        return await trio.to_thread.run_sync(future.result, _CALL_S, abandon_on_cancel=True)

    def doors(self, kernel: Kernel) -> Kernel:
        """The doors of ``kernel``, but through this connection and inside its transaction."""
        return attrs.evolve(kernel, session=cast(Session, self))


@asynccontextmanager
async def open_caller(dsn: str, schema: str) -> AsyncIterator[Caller]:
    """Connect; what the caller left open is rolled back at the end."""
    caller, running = Caller(SessionOptions(dsn, schema)), threading.Event()

    async def serve() -> None:
        caller._loop, caller._stop = asyncio.get_running_loop(), asyncio.Event()
        running.set()
        await caller._stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    await trio.to_thread.run_sync(running.wait)
    try:
        caller._conn = await caller._run(asyncpg.connect(dsn, timeout=10))
        caller.pid = caller._conn.get_server_pid()
        caller._conn.add_log_listener(lambda _, notice: caller.notices.append(notice.message))
        yield caller
    finally:
        with trio.CancelScope(shield=True):
            if caller._conn is not None:
                await caller._run(caller._conn.close(timeout=5))
            caller._loop.call_soon_threadsafe(caller._stop.set)
            await trio.to_thread.run_sync(thread.join, 5)
