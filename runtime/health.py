"""The health server: whether this host lives, whether it is ready, and its metrics, over HTTP.

Owns the routes, the socket and hypercorn's settings. It knows a host only through ``HostView``, asks the
database nothing itself, and never decides what "ready" means.
"""

from __future__ import annotations

import json
import logging
import math
import socket
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any, Protocol

import hypercorn
import hypercorn.trio
import trio
from hypercorn.config import Sockets
from hypercorn.logging import Logger
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.metrics import CONTENT_TYPE
from sql.errors import ConfigError

METRICS_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 5.0
BACKLOG = 100

_log = logging.getLogger("runlane.health")


class HostView(Protocol):
    """What the health server may ask of a host."""

    def alive(self) -> bool:
        """Whether the process should go on; False asks for a restart."""
        ...

    def readiness(self) -> Mapping[str, Any]:
        """JSON with at least ``ready`` and ``draining`` (bool).

        Beside them ``database`` (``reachable``, ``since``, ``last_error``), ``schema`` (``ready``,
        ``missing``), ``actors`` (by name: ``state``, ``restarts``, ``last_error``, ``last_error_at``,
        ``last_beat_age_s``) and ``host``. Times may be datetimes.
        """
        ...

    async def metrics(self) -> bytes:
        """Prometheus' text format; given up after ``METRICS_TIMEOUT_S``."""
        ...


# --- the application ---------------------------------------------------------------------------------


def health_app(view: HostView) -> Starlette:
    """The ASGI application: ``/livez``, ``/readyz`` and ``/metrics``, for GET and HEAD.

    200 or 503 with JSON, except for the metrics; 404 and 405 are JSON too.
    """

    async def livez(_: Request) -> Response:
        alive = view.alive()
        return _json({"alive": alive}, 200 if alive else 503)

    async def readyz(_: Request) -> Response:
        state = view.readiness()
        return _json(state, 200 if state["ready"] and not state["draining"] else 503)

    async def metrics(_: Request) -> Response:
        with trio.move_on_after(METRICS_TIMEOUT_S):
            return _response(await view.metrics(), 200, CONTENT_TYPE)
        return _json({"error": f"no metrics within {METRICS_TIMEOUT_S:g} s"}, 503)

    routes = [
        Route("/livez", livez, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={HTTPException: _refused, Exception: _broken},  # type: ignore[dict-item]
    )
    app.router.redirect_slashes = False
    return app


async def _refused(_: Request, error: HTTPException) -> Response:
    response = _json({"error": error.detail}, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _broken(_: Request, error: Exception) -> Response:
    # Hypercorn logs the error itself; a probe gets its name only.
    return _json({"error": f"internal error: {type(error).__name__}"}, 500)


def _json(content: Mapping[str, Any], status: int) -> Response:
    body = json.dumps(_plain(content), ensure_ascii=True, separators=(",", ":")) + "\n"
    return _response(body.encode(), status, "application/json")


def _response(body: bytes, status: int, content_type: str) -> Response:
    headers = {"content-type": content_type, "cache-control": "no-store"}
    return Response(body, status, headers=headers)


def _plain(value: Any) -> Any:
    """``value`` with nothing in it that JSON refuses: a health page must not fail over a detail."""
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


class _HealthLog(Logger):
    """Hypercorn's log on ours. Its start-up lines speak to people at a terminal: debug here."""

    async def info(self, message: str, *args: Any, **kwargs: Any) -> None:
        await self.debug(message, *args, **kwargs)


class _BoundConfig(hypercorn.Config):
    """Hypercorn's settings around a socket that is bound already."""

    logger_class = _HealthLog
    accesslog = None
    errorlog = _log
    include_server_header = False
    keep_alive_timeout = IDLE_TIMEOUT_S  # also what a half-sent request gets
    backlog = BACKLOG

    def __init__(self, bound: socket.socket, grace_s: float) -> None:
        self._bound = bound
        self.graceful_timeout = grace_s
        self.startup_timeout = self.shutdown_timeout = max(1.0, grace_s)

    def create_sockets(self) -> Sockets:
        return Sockets([], [self._bound], [])


async def serve_health(
    view: HostView,
    host: str,
    port: int,
    *,
    on_bound: Callable[[int], None],
    shutdown: trio.Event,
    grace_s: float,
) -> None:
    """Serve ``view`` on ``host`` and ``port`` (0: any free one) until ``shutdown`` is set; then return.

    ``on_bound`` gets the real port as soon as connections queue there. After ``shutdown`` new connections
    are refused at once, idle ones are closed, and requests in flight have ``grace_s`` seconds in all.
    Raises ConfigError naming host and port when the address cannot be had.
    """
    # Half for requests, half for a client that does not read its answer: hypercorn shields its writes, so
    # that only the kernel can end them.
    share_s = grace_s / 2
    with await _bind(host, port, share_s) as bound:
        actual = bound.getsockname()[1]
        _log.info("event=listening host=%s port=%d", host, actual)
        on_bound(actual)
        await hypercorn.trio.serve(
            health_app(view),  # type: ignore[arg-type]
            _BoundConfig(bound, share_s),
            shutdown_trigger=shutdown.wait,
            mode="asgi",
        )
    _log.info("event=stopped host=%s port=%d", host, actual)


async def _bind(host: str, port: int, unread_s: float) -> socket.socket:
    name = host.removeprefix("[").removesuffix("]")
    where = f"health server cannot listen on host {host!r}, port {port}"
    try:
        found = await trio.socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
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
