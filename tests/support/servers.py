"""Servers to test against, and plain SQL without runlane's own session.

Owns what a test run starts and throws away: the server, its database, the held snapshot. Everything here
blocks, and runs asyncio in a thread of its own: call it from a fixture, or in a thread from a trio test.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import asyncpg

from runtime._throwaway import new_folder, throwaway_server

T = TypeVar("T")


def ask(dsn: str, *statements: str) -> list[Any]:
    """Run statements, each in its own transaction, on one new connection; the rows of the last one."""

    async def body() -> list[Any]:
        connection = await asyncpg.connect(dsn, timeout=10, command_timeout=30)
        try:
            rows: list[Any] = []
            for statement in statements:
                rows = await connection.fetch(statement)
            return rows
        finally:
            await connection.close(timeout=5)

    return in_thread(body)


def in_thread(body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function on an asyncio loop in a new thread: trio may be running in this one."""
    outcome: Future[T] = Future()

    def target() -> None:
        try:
            outcome.set_result(asyncio.run(body()))
        except BaseException as error:  # handed to the caller, whatever it is
            outcome.set_exception(error)

    threading.Thread(target=target, daemon=True).start()
    return outcome.result()


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that the embedded server's account can enter, removed at the end."""
    folder = new_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def temporary_server(binaries: Path | None = None) -> Iterator[str]:
    """A server of its own, stopped and removed at the end; the DSN of its ``postgres`` database."""
    with throwaway_server(binaries) as server:
        yield server.dsn


@contextmanager
def database_with_isolation(dsn: str, isolation: str) -> Iterator[str]:
    """A new database in which that is the default isolation level, dropped at the end; its DSN."""
    name = f"runlane_test_{secrets.token_hex(4)}"
    levels = ("read committed", "repeatable read", "serializable")
    if isolation not in levels:
        raise ValueError(f"RUNLANE_TEST_ISOLATION is {isolation!r}; it is one of {', '.join(levels)}")
    ask(
        dsn,
        f"CREATE DATABASE {name}",
        f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'",
    )
    try:
        yield with_database(dsn, name)
    finally:
        ask(dsn, f"DROP DATABASE {name} WITH (FORCE)")


def with_database(dsn: str, name: str) -> str:
    """The DSN with another database name."""
    address, _, options = dsn.partition("?")
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}/{name}" + (f"?{options}" if options else "")


@contextmanager
def held_snapshot(dsn: str) -> Iterator[None]:
    """A session that holds one snapshot for the length of the block, like a long report or a forgotten psql.

    Raises RuntimeError at the end if the session was lost on the way: the tests then ran without it.
    """
    release = threading.Event()
    held: Future[None] = Future()
    ended: Future[bool] = Future()

    async def hold() -> None:
        connection = await asyncpg.connect(
            dsn, timeout=10, server_settings={"application_name": "held snapshot"}
        )
        try:
            await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_snapshot()")
            held.set_result(None)
            await asyncio.to_thread(release.wait)
            ended.set_result(connection.is_closed())
        finally:
            await connection.close(timeout=5)

    thread = threading.Thread(target=lambda: asyncio.run(hold()), daemon=True)
    thread.start()
    held.result(timeout=20)
    try:
        yield
    finally:
        release.set()
        lost = ended.result(timeout=20)
        thread.join(timeout=20)
    if lost:
        raise RuntimeError("the session that held the snapshot was lost while the tests ran")
