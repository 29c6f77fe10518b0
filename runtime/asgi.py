"""Serving an ASGI application over HTTP, and JSON answers.

Owns the socket, hypercorn's settings and what an error looks like to a client. It knows no route.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

import hypercorn
import hypercorn.trio
import trio
from hypercorn.config import Sockets
from hypercorn.logging import Logger
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Lifespan

from sql.errors import ConfigError

BACKLOG = 100


# --- applications ------------------------------------------------------------------------------------


def json_app(routes: Sequence[BaseRoute], lifespan: Lifespan[Any] | None = None) -> Starlette:
    """An application whose errors are JSON: ``{"error": …}``, also for an unknown path and a wrong method."""
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _refused, Exception: _broken},  # type: ignore[dict-item]
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


async def _refused(_: Request, error: HTTPException) -> Response:
    answer = json_response({"error": error.detail}, error.status_code)
    answer.headers.update(error.headers or {})
    return answer


async def _broken(_: Request, error: Exception) -> Response:
    # Hypercorn logs the error itself; a client gets its name only.
    return json_response({"error": f"internal error: {type(error).__name__}"}, 500)


async def read_body(request: Request, most: int) -> bytes:
    """The whole body. Raises HTTPException 413 as soon as it is larger than ``most`` bytes."""
    content = bytearray()
    try:
        async with contextlib.aclosing(request.stream()) as stream:
            async for chunk in stream:
                content += chunk
                if len(content) > most:
                    raise HTTPException(413, f"the body is larger than {most} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the client went away") from None
    return bytes(content)


def json_response(content: Mapping[str, Any], status: int = 200) -> Response:
    """An answer as JSON, one line."""
    body = json.dumps(_plain(content), ensure_ascii=True, separators=(",", ":")) + "\n"
    return response(body.encode(), status, "application/json")


def response(body: bytes, status: int, content_type: str) -> Response:
    """An answer that nobody may keep."""
    headers = {"content-type": content_type, "cache-control": "no-store"}
    return Response(body, status, headers=headers)


def _plain(value: Any) -> Any:
    """``value`` with nothing in it that JSON refuses: an answer must not fail over a detail."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


# --- the server --------------------------------------------------------------------------------------


class _BoundConfig(hypercorn.Config):
    """Hypercorn's settings around a socket that is bound already."""

    accesslog = None
    include_server_header = False
    backlog = BACKLOG

    def __init__(self, bound: socket.socket, log: logging.Logger, grace_s: float, idle_s: float) -> None:
        self._bound = bound
        self.errorlog = log
        self.logger_class = _Log
        self.keep_alive_timeout = idle_s  # also what a half-sent request gets
        self.graceful_timeout = grace_s
        self.startup_timeout = self.shutdown_timeout = max(1.0, grace_s)

    def create_sockets(self) -> Sockets:
        return Sockets([], [self._bound], [])


class _Log(Logger):
    """Hypercorn's log on ours. Its start-up lines speak to people at a terminal: debug here."""

    async def info(self, message: str, *args: Any, **kwargs: Any) -> None:
        await self.debug(message, *args, **kwargs)


async def serve_app(
    app: Starlette,
    name: str,
    host: str,
    port: int,
    *,
    on_bound: Callable[[int], None],
    shutdown: trio.Event,
    grace_s: float,
    idle_s: float,
) -> None:
    """Serve ``app`` on ``host`` and ``port`` (0: any free one) until ``shutdown`` is set; then return.

    ``name`` is what logs and errors call it. ``on_bound`` gets the real port as soon as connections queue there. An
    idle connection is closed after ``idle_s``. After ``shutdown`` new connections are refused at once, idle ones are
    closed, and requests in flight have ``grace_s`` seconds in all. Raises ConfigError naming host and port when the
    address cannot be had.
    """
    # Half for requests, half for a client that does not read its answer: hypercorn shields its writes, so
    # that only the kernel can end them.
    share_s = grace_s / 2
    log = logging.getLogger(f"runlane.{name}")
    with await _bind(name, host, port, share_s) as bound:
        actual = bound.getsockname()[1]
        log.info("event=listening host=%s port=%d", host, actual)
        on_bound(actual)
        await hypercorn.trio.serve(
            app,  # type: ignore[arg-type]
            _BoundConfig(bound, log, share_s, idle_s),
            shutdown_trigger=shutdown.wait,
            mode="asgi",
        )
    log.info("event=stopped host=%s port=%d", host, actual)


async def _bind(name: str, host: str, port: int, unread_s: float) -> socket.socket:
    where = f"the {name} server cannot listen on host {host!r}, port {port}"
    bare = host.removeprefix("[").removesuffix("]")
    try:
        found = await trio.socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{where}: the host is unknown ({error})") from error
    family, kind, protocol, _, address = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(unread_s * 1_000)))
        bound.bind(address)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"{where}: {error.strerror or error}") from error
    return bound
