"""A receiver that answers what a test tells it, over a real socket.

Owns enough of HTTP/1.1 to be talked to by a real client, and the record of what it was asked. It knows nothing of
ledgers: every answer is the test's.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import h11
import trio

from runtime import wire
from runtime.wire import Capabilities

_RESET = struct.pack("ii", 1, 0)


@attrs.frozen
class Asked:
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def deliveries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.json["deliveries"]
        return found


@attrs.frozen
class Answer:
    """One answer. ``body`` that is no bytes is sent as JSON."""

    status: int = 200
    body: Any = b""
    headers: Mapping[str, str] = attrs.field(factory=dict)


RESET = "reset"
"""Instead of an answer: break the connection."""
HANG = "hang"
"""Instead of an answer: none."""

Said = Answer | str
Script = Callable[[Asked], Awaitable[Said]]


def results(*outcomes: str | Mapping[str, Any]) -> dict[str, Any]:
    """The body of an answer to as many deliveries."""
    return {"results": [{"outcome": one} if isinstance(one, str) else dict(one) for one in outcomes]}


@attrs.define(eq=False)
class ScriptedReceiver:
    """Answers POSTs of deliveries with ``script`` (or ``answers``, one each, then "applied"), the rest by itself."""

    capabilities: Capabilities | Answer | str | None = attrs.field(
        factory=lambda: Capabilities(max_facts=8, max_deliveries=50)
    )
    answers: list[Said] = attrs.field(factory=list)
    script: Script | None = None
    token_script: Script | None = None
    asked: list[Asked] = attrs.field(factory=list)
    open: int = 0
    most_at_once: int = 0
    url: str = ""
    _connections: int = 0

    @property
    def posts(self) -> list[Asked]:
        """The requests with deliveries."""
        return [one for one in self.asked if one.path == wire.DELIVERIES]

    def of(self, path: str) -> list[Asked]:
        return [one for one in self.asked if one.path == path]

    async def say(self, asked: Asked) -> Said:
        """The answer to a request."""
        if asked.path == wire.CAPABILITIES:
            if isinstance(self.capabilities, Capabilities):
                return Answer(200, self.capabilities.to_json())
            return Answer(404) if self.capabilities is None else self.capabilities
        if asked.path == wire.DISPATCH_TOKEN and self.token_script is not None:
            return await self.token_script(asked)
        if asked.path != wire.DELIVERIES:
            return Answer(404, {"error": "no such path"})
        if self.answers:
            return self.answers.pop(0)
        if self.script is not None:
            return await self.script(asked)
        return Answer(200, results(*["applied"] * len(asked.deliveries)))

    # --- HTTP ------------------------------------------------------------------------------------------

    async def serve(self, stream: trio.SocketStream) -> None:
        """One connection, until either side ends it."""
        self._connections += 1
        number = self._connections
        connection = h11.Connection(h11.SERVER)
        async with stream:
            while True:
                try:
                    asked = await self._request(stream, connection, number)
                except (h11.RemoteProtocolError, trio.BrokenResourceError, trio.ClosedResourceError):
                    return
                if asked is None:
                    return
                self.asked.append(asked)
                self.open += 1
                self.most_at_once = max(self.most_at_once, self.open)
                try:
                    said = await self._said(stream, asked)
                finally:
                    self.open -= 1
                if said is None or not await self._answer(stream, connection, said):
                    return

    async def _said(self, stream: trio.SocketStream, asked: Asked) -> Answer | None:
        """The answer; None when the client went away, or was sent away, before there was one."""
        said: Said = HANG
        gone = True
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await stream.receive_some(1)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            said = await self.say(asked)
            if said == HANG:
                await trio.sleep_forever()
            gone = False
            nursery.cancel_scope.cancel()
        if said == RESET:
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            return None
        return said if isinstance(said, Answer) and not gone else None

    async def _request(
        self, stream: trio.SocketStream, connection: h11.Connection, number: int
    ) -> Asked | None:
        head: h11.Request | None = None
        body = b""
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(65_536))
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
                return Asked(head.method.decode(), head.target.decode(), headers, body, number)
            else:
                return None

    async def _answer(self, stream: trio.SocketStream, connection: h11.Connection, answer: Answer) -> bool:
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        headers = {"content-length": str(len(body)), **answer.headers}
        response = h11.Response(status_code=answer.status, headers=list(headers.items()))
        data = b"".join(
            piece or b""
            for piece in (
                connection.send(response),
                connection.send(h11.Data(data=body)),
                connection.send(h11.EndOfMessage()),
            )
        )
        try:
            await stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        if connection.our_state is h11.MUST_CLOSE:
            return False
        connection.start_next_cycle()
        return True


@asynccontextmanager
async def scripted_receiver(**fields: Any) -> AsyncIterator[ScriptedReceiver]:
    """A receiver on a loopback port of its own; ``url`` leads to it."""
    receiver = ScriptedReceiver(**fields)
    async with trio.open_nursery() as nursery:
        listeners: list[trio.SocketListener] = await nursery.start(
            partial(trio.serve_tcp, receiver.serve, 0, host="127.0.0.1")
        )
        receiver.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        try:
            yield receiver
        finally:
            nursery.cancel_scope.cancel()
