"""The health server: whether this host lives, whether it is ready, and its metrics, over HTTP.

Owns the routes. It knows a host only through ``HostView``, asks the database nothing itself, and never decides what
"ready" means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import trio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from runtime.asgi import json_app, json_response, response, serve_app
from runtime.metrics import CONTENT_TYPE

METRICS_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 5.0


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


def health_app(view: HostView, more: Sequence[BaseRoute] = ()) -> Starlette:
    """The ASGI application: ``/livez``, ``/readyz`` and ``/metrics``, for GET and HEAD, and ``more`` routes.

    200 or 503 with JSON, except for the metrics; 404 and 405 are JSON too.
    """

    async def livez(_: Request) -> Response:
        alive = view.alive()
        return json_response({"alive": alive}, 200 if alive else 503)

    async def readyz(_: Request) -> Response:
        state = view.readiness()
        return json_response(state, 200 if state["ready"] and not state["draining"] else 503)

    async def metrics(_: Request) -> Response:
        with trio.move_on_after(METRICS_TIMEOUT_S):
            return response(await view.metrics(), 200, CONTENT_TYPE)
        return json_response({"error": f"no metrics within {METRICS_TIMEOUT_S:g} s"}, 503)

    routes = [
        Route("/livez", livez, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    return json_app([*routes, *more])


async def serve_health(
    view: HostView,
    host: str,
    port: int,
    *,
    on_bound: Callable[[int], None],
    shutdown: trio.Event,
    grace_s: float,
    more: Sequence[BaseRoute] = (),
) -> None:
    """Serve ``view`` and ``more`` routes as ``serve_app`` does."""
    app = health_app(view, more)
    await serve_app(
        app,
        "health",
        host,
        port,
        on_bound=on_bound,
        shutdown=shutdown,
        grace_s=grace_s,
        idle_s=IDLE_TIMEOUT_S,
    )
