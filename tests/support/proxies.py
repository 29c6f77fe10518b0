"""A TCP proxy that knows which actor a connection belongs to, and can lose answers, go silent or break.

Owns the rig for faults of the network; it asserts nothing. An actor is known by the application name that its session
gives, which also marks when its connection is made and at work.
"""

from __future__ import annotations

import random
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import parse_qs, urlsplit

import attrs
import trio

_NAMED = re.compile(rb"runlane ([a-z0-9-]+)")
_RESET = struct.pack("ii", 1, 0)


@attrs.define(eq=False)
class Link:
    """One connection through the proxy."""

    client: trio.SocketStream
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    actor: str = ""
    silent: bool = False
    loses_answer: bool = False
    asked: bool = False
    answer_lost: trio.Event = attrs.field(factory=trio.Event)

    def reset(self) -> None:
        """Break it with an RST, at once and for both sides."""
        if self.client.socket.fileno() >= 0:
            self.client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.scope.cancel()


@attrs.define
class ActorProxy:
    """Forwards TCP to a server, until told otherwise."""

    target: str
    port: int = 0
    refuses: bool = False
    links: list[Link] = attrs.field(factory=list)

    @property
    def dsn(self) -> str:
        """The way to the server through here, without TLS."""
        parts = urlsplit(self.target)
        user = parts.netloc.rpartition("@")[0]
        return f"postgresql://{user + '@' if user else ''}127.0.0.1:{self.port}{parts.path}?sslmode=disable"

    def of(self, actor: str) -> Link:
        """The latest connection of an actor."""
        return [link for link in self.links if link.actor == actor][-1]

    def lose_next_answer(self, actor: str) -> Link:
        """The actor's next call reaches the server; its answer does not come back, and the connection breaks."""
        link = self.of(actor)
        link.asked = False
        link.loses_answer = True
        return link

    def blackhole(self, actor: str) -> Link:
        """From now on nothing goes through the actor's connection and nothing closes it."""
        link = self.of(actor)
        link.silent = True
        return link

    def reset(self, actor: str) -> Link:
        """Break the actor's connection."""
        link = self.of(actor)
        link.reset()
        return link

    # --- the pumps -------------------------------------------------------------------------------------

    async def serve(self, client: trio.SocketStream) -> None:
        """One connection."""
        if self.refuses:
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.socket.close()
            return
        link = Link(client)
        self.links.append(link)
        with link.scope:
            server = await _connect(self.target)
            async with client, server, trio.open_nursery() as nursery:
                nursery.start_soon(self._requests, link, server)
                nursery.start_soon(self._answers, link, server)

    async def _requests(self, link: Link, server: trio.SocketStream) -> None:
        try:
            async for data in link.client:
                if link.silent:
                    await trio.sleep_forever()
                if found := _NAMED.search(data):
                    link.actor = found[1].decode()
                link.asked = True
                await server.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        if link.silent:
            await trio.sleep_forever()
        link.scope.cancel()

    async def _answers(self, link: Link, server: trio.SocketStream) -> None:
        try:
            async for data in server:
                if link.silent:
                    await trio.sleep_forever()
                if link.loses_answer and link.asked:
                    link.answer_lost.set()
                    link.reset()
                    return
                await link.client.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        if link.silent:
            await trio.sleep_forever()
        link.scope.cancel()


async def _connect(dsn: str) -> trio.SocketStream:
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    host = query.get("host", [parts.hostname or "localhost"])[0]
    port = int(query.get("port", [str(parts.port or 5432)])[0])
    if host.startswith("/"):
        return await trio.open_unix_socket(f"{host}/.s.PGSQL.{port}")
    return await trio.open_tcp_stream(host, port)


@asynccontextmanager
async def actor_proxy(dsn: str) -> AsyncIterator[ActorProxy]:
    """A proxy in front of the server."""
    proxy = ActorProxy(dsn)
    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            partial(trio.serve_tcp, proxy.serve, 0, host="127.0.0.1")
        )
        proxy.port = listeners[0].socket.getsockname()[1]
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()


# --- any protocol ------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class FaultyProxy:
    """Forwards TCP to ``port`` of this machine, and harms each exchange with the given chances.

    ``lost_answers``: the request arrives, the answer does not; ``lost_requests``: not even the request; ``slow``: the
    answer comes ``slow_s`` later. What goes on is cut when ``refuses`` is set.
    """

    port: int
    chance: random.Random
    lost_answers: float = 0.0
    lost_requests: float = 0.0
    slow: float = 0.0
    slow_s: float = 1.0
    refuses: bool = False
    own_port: int = 0
    harmed: int = 0

    async def serve(self, client: trio.SocketStream) -> None:
        """One connection."""
        try:
            if self.refuses:
                raise _Cut
            server = await trio.open_tcp_stream("127.0.0.1", self.port)
            async with server, trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, client, server, True)
                await self._pump(server, client, False)
                nursery.cancel_scope.cancel()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError, _Cut):
            if client.socket.fileno() >= 0:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        finally:
            client.socket.close()

    async def _pump(self, source: trio.SocketStream, target: trio.SocketStream, asks: bool) -> None:
        async for data in source:
            if self.refuses or self._happens(self.lost_requests if asks else self.lost_answers):
                raise _Cut
            if not asks and self._happens(self.slow):
                await trio.sleep(self.slow_s)
            await target.send_all(data)

    def _happens(self, chance: float) -> bool:
        happens = self.chance.random() < chance
        self.harmed += happens
        return happens


class _Cut(Exception):
    """The proxy ends a connection."""


@asynccontextmanager
async def faulty_proxy(chance: random.Random) -> AsyncIterator[FaultyProxy]:
    """A proxy on a port of its own; set ``port`` before anything connects."""
    proxy = FaultyProxy(0, chance)
    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            partial(trio.serve_tcp, proxy.serve, 0, host="127.0.0.1")
        )
        proxy.own_port = listeners[0].socket.getsockname()[1]
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
