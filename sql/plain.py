"""The border for programs without trio: one connection on a plain asyncio loop, in a thread of its own.

Owns that thread, the connection's life, and asking again until a deadline. Importing it, and using it, changes nothing
for the program's own asyncio. It never knows what is asked.

Everything that is asked takes turns on the one connection. Cancelled does not mean that it did not happen, and what
is asked may be asked twice: callers use calls that are safe to repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar, cast

import asyncpg

from sql import errors
from sql.connection import Backend, Session, SessionOptions, backend_of, connected
from sql.dsn import address
from sql.faults import translate, translate_connecting

log = logging.getLogger("runlane.connection")

T = TypeVar("T")

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_CLOSE_S = 5.0


class Line:
    """The thread and its connection, which is made when something is first asked, and again after it was lost.

    ``channels`` are listened to where the connection is direct. Plain methods are for any thread, coroutine functions
    for what runs on the loop: ``call`` brings one there.
    """

    def __init__(self, options: SessionOptions, name: str, *, channels: Sequence[str] = ()) -> None:
        self.options = options
        self.name = name
        self._channels = () if options.pooled else tuple(channels)
        self._pid = os.getpid()
        # Not the policy's: a process that hosts plays as well has a policy that makes loops on trio.
        self._loop = asyncio.SelectorEventLoop()
        self._turn = asyncio.Lock()
        self._heard = self._loop.create_future()
        self._conn: Any = None
        self._predecessor: Backend | None = None
        self._closed = False
        self._starting = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=f"runlane {name}", daemon=True)
        self._thread.start()

    # --- from any thread -----------------------------------------------------------------------------

    def call(self, body: Callable[[], Awaitable[T]]) -> T:
        """Run ``body`` on the loop and wait for its end. Raises what it raises; ``HostStopping`` once closed."""
        if os.getpid() != self._pid:
            raise errors.HostStopping(
                "the client was opened before this process was forked; open one after the fork"
            )
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError("a blocking call from inside of the client would wait for itself")

        async def run() -> T:
            return await body()

        future: Future[T] = self._start(run())
        try:
            return future.result()
        except CancelledError:
            raise errors.HostStopping("the client was closed") from None
        except BaseException:
            future.cancel()  # the caller was interrupted
            raise

    def close(self) -> None:
        """End what is going on, close the connection and the thread. Can be called twice."""
        if os.getpid() != self._pid:
            return
        with self._starting:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * _CLOSE_S)

    def _start(self, running: Coroutine[Any, Any, T]) -> Future[T]:
        with self._starting:  # what is started before the stop is seen by it
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(running, self._loop)
        running.close()
        raise errors.HostStopping("the client is closed")

    def _serve(self) -> None:
        loop = self._loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait_for(self._end(tasks), _CLOSE_S))
        except TimeoutError:
            log.warning("event=close_overran session=%s", self.name)
        finally:
            self._hang_up()
            loop.close()

    async def _end(self, tasks: set[asyncio.Task[Any]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._conn is not None:
            with contextlib.suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await self._conn.close(timeout=_CLOSE_S / 2)

    # --- on the loop ---------------------------------------------------------------------------------

    async def ask(
        self, body: Callable[[Session], Awaitable[T]], *, timeout_s: float, again: bool = True
    ) -> T:
        """The result of ``body(session)``, asked ``again`` on a new connection whenever the link was lost.

        The session has the methods of ``sql.connection.Session`` that doors use. Raises ``OutcomeUnknown`` after
        ``timeout_s``, with the last error as its cause.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    async with self._turn:
                        return await self._once(body)
            except TimeoutError as exc:
                raise errors.OutcomeUnknown(
                    f"no answer within {timeout_s:g} s; asking again is safe"
                ) from exc
            except errors.LinkError as exc:
                if not again:
                    raise
                if pause_s == _FIRST_PAUSE_S:
                    log.warning("event=outage session=%s error=%s", self.name, exc)
                if time.monotonic() + pause_s >= deadline:
                    raise errors.OutcomeUnknown(
                        f"no answer within {timeout_s:g} s; asking again is safe: {exc}"
                    ) from exc
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def ear(self) -> Awaitable[None]:
        """Done by the next notification from now on: for :meth:`heard`."""
        return self._heard

    async def heard(self, ear: Awaitable[None], timeout_s: float) -> None:
        """Wait for a notification, at most that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(ear)

    async def sleep(self, seconds: float) -> None:
        """As it says."""
        await asyncio.sleep(seconds)

    async def _once(self, body: Callable[[Session], Awaitable[T]]) -> T:
        if self._conn is None or self._conn.is_closed():
            await self._connect()
        try:
            return await body(cast(Session, _Plain(self.options, self._conn)))
        except (errors.LinkError, asyncio.CancelledError):  # what was asked may still be going on
            self._hang_up()
            raise

    async def _connect(self) -> None:
        options = self.options
        try:
            self._conn, identity = await connected(options, self.name, self._predecessor)
            self._predecessor = backend_of(identity)
            for channel in self._channels:
                await self._conn.add_listener(channel, self._notified)
        except Exception as exc:
            self._hang_up()
            translated = translate_connecting(exc, address(options.dsn), options.connect_timeout_s)
            if translated is None or translated is exc:
                raise
            raise translated from exc

    def _notified(self, *_: Any) -> None:
        if not self._heard.done():
            self._heard.set_result(None)
        self._heard = self._loop.create_future()

    def _hang_up(self) -> None:
        if self._conn is not None:
            self._conn.terminate()
            self._conn = None


class _Plain:
    """A session as its doors use it."""

    def __init__(self, options: SessionOptions, conn: Any) -> None:
        self.options = options
        self._conn = conn

    async def fetch(self, statement: str, *args: Any) -> list[Any]:
        rows: list[Any] = await self._call(self._conn.fetch(statement, *args))
        return rows

    async def fetchrow(self, statement: str, *args: Any) -> Any | None:
        return await self._call(self._conn.fetchrow(statement, *args))

    async def fetchval(self, statement: str, *args: Any) -> Any:
        return await self._call(self._conn.fetchval(statement, *args))

    async def execute(self, statement: str, *args: Any) -> str:
        tag: str = await self._call(self._conn.execute(statement, *args))
        return tag

    async def _call(self, calling: Awaitable[T]) -> T:
        try:
            return await calling
        except Exception as exc:  # what is not the driver's or the system's goes on as it is
            translated = translate(exc, closed=self._conn.is_closed())
            if translated is None:
                raise
            raise translated from exc
