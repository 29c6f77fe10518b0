"""A server of these tests' own whose processes may be frozen, and a TCP proxy that can go silent.

Owns the two rigs; it asserts nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from urllib.parse import parse_qs, urlsplit

import attrs
import trio


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """SIGSTOP a server process of our own for the length of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@attrs.define
class Proxy:
    """Forwards TCP to a server, until told otherwise."""

    target: str
    port: int = 0
    connections: int = 0
    silent: bool = False
    _scopes: list[trio.CancelScope] = attrs.field(factory=list)

    def blackhole(self) -> None:
        """From now on nothing goes through and nothing is closed, as on a half-open link."""
        self.silent = True

    def cut(self) -> None:
        """Close every connection that goes through."""
        for scope in self._scopes:
            scope.cancel()

    @property
    def dsn(self) -> str:
        """The way to the server through here, without TLS."""
        parts = urlsplit(self.target)
        user = parts.netloc.rpartition("@")[0]
        return f"postgresql://{user + '@' if user else ''}127.0.0.1:{self.port}{parts.path}"

    async def serve(self, client: trio.SocketStream) -> None:
        """One connection."""
        self.connections += 1
        with trio.CancelScope() as scope:
            self._scopes.append(scope)
            async with client, await connect(self.target) as server, trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, client, server, scope)
                nursery.start_soon(self._pump, server, client, scope)

    async def _pump(
        self, source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope
    ) -> None:
        try:
            async for data in source:
                if self.silent:
                    await trio.sleep_forever()
                await sink.send_all(data)
        except trio.BrokenResourceError:
            pass
        if self.silent:
            await trio.sleep_forever()
        scope.cancel()


async def connect(dsn: str) -> trio.SocketStream:
    """A plain stream to the server of a DSN, by TCP or by Unix socket."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    host = query.get("host", [parts.hostname or "localhost"])[0]
    port = int(query.get("port", [str(parts.port or 5432)])[0])
    if host.startswith("/"):
        return await trio.open_unix_socket(f"{host}/.s.PGSQL.{port}")
    return await trio.open_tcp_stream(host, port)


@asynccontextmanager
async def proxied(dsn: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the server."""
    proxy = Proxy(dsn)
    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            partial(trio.serve_tcp, proxy.serve, 0, host="127.0.0.1")
        )
        proxy.port = listeners[0].socket.getsockname()[1]
        yield proxy
        nursery.cancel_scope.cancel()
