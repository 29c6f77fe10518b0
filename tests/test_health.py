"""The health server over real sockets, and that nobody can hold up its end."""

from __future__ import annotations

import logging
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import attrs
import httpx
import pytest
import trio

from runtime import health
from runtime.health import serve_health
from runtime.metrics import CONTENT_TYPE, Metrics
from sql.errors import ConfigError

GRACE_S = 2.0
MARGIN_S = 1.5  # for a busy machine
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class View:
    """A host as the test wants it."""

    def __init__(self) -> None:
        self.is_alive = True
        self.state: dict[str, Any] = {"ready": True, "draining": False}
        self.body = Metrics().render()
        self.asked = trio.Event()
        self.answer = trio.Event()
        self.answer.set()

    def alive(self) -> bool:
        return self.is_alive

    def readiness(self) -> dict[str, Any]:
        return self.state

    async def metrics(self) -> bytes:
        self.asked.set()
        await self.answer.wait()
        return self.body


@attrs.frozen
class Server:
    host: str
    port: int
    shutdown: trio.Event
    ended: trio.Event

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def connect(self) -> trio.SocketStream:
        return await trio.open_tcp_stream(self.host, self.port)

    async def stop_within_grace(self) -> None:
        self.shutdown.set()
        with trio.fail_after(GRACE_S + MARGIN_S):
            await self.ended.wait()


@asynccontextmanager
async def serving(view: View, host: str = "127.0.0.1") -> AsyncIterator[Server]:
    shutdown, ended = trio.Event(), trio.Event()
    bound, port = trio.Event(), 0

    def on_bound(actual: int) -> None:
        nonlocal port
        port = actual
        bound.set()

    async def run() -> None:
        await serve_health(view, host, 0, on_bound=on_bound, shutdown=shutdown, grace_s=GRACE_S)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        with trio.fail_after(5):
            await bound.wait()
        server = Server(host, port, shutdown, ended)
        yield server
        await server.stop_within_grace()


async def get(server: Server, path: str, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(base_url=server.url, timeout=10) as client:
        return await client.request(method, path)


def never(port: int) -> None:
    pytest.fail(f"bound to {port}")


# --- routes ------------------------------------------------------------------------------------------


async def test_livez_says_whether_the_host_lives() -> None:
    view = View()
    async with serving(view) as server:
        response = await get(server, "/livez")
        assert (response.status_code, response.json()) == (200, {"alive": True})
        assert response.headers["cache-control"] == "no-store"
        view.is_alive = False
        response = await get(server, "/livez")
        assert (response.status_code, response.json()) == (503, {"alive": False})


@pytest.mark.parametrize(
    ("ready", "draining", "status"),
    [(True, False, 200), (False, False, 503), (True, True, 503), (False, True, 503)],
)
async def test_readyz_says_whether_the_host_takes_work_and_why_not(
    ready: bool, draining: bool, status: int
) -> None:
    view = View()
    view.state = {
        "ready": ready,
        "draining": draining,
        "database": {"reachable": True, "since": datetime(2026, 1, 1, tzinfo=UTC), "last_error": None},
        "schema": {"ready": True, "missing": ("runs",)},
        "actors": {"claim": {"state": "ready", "restarts": 1, "last_beat_age_s": math.inf}},
        "host": {"error": ValueError("odd\ud800")},
    }
    async with serving(view) as server:
        response = await get(server, "/readyz")
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json() == {
        "ready": ready,
        "draining": draining,
        "database": {"reachable": True, "since": "2026-01-01T00:00:00+00:00", "last_error": None},
        "schema": {"ready": True, "missing": ["runs"]},
        "actors": {"claim": {"state": "ready", "restarts": 1, "last_beat_age_s": None}},
        "host": {"error": "odd\ud800"},
    }


async def test_metrics_are_prometheus_text() -> None:
    view, metrics = View(), Metrics()
    metrics.claimed("audit", 3)
    view.body = metrics.render()
    async with serving(view) as server:
        response = await get(server, "/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    assert 'runlane_runs_claimed_total{play="audit"} 3.0\n' in response.text


async def test_metrics_that_never_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "METRICS_TIMEOUT_S", 0.05)
    view = View()
    view.answer = trio.Event()
    async with serving(view) as server:
        response = await get(server, "/metrics")
    assert (response.status_code, response.json()) == (503, {"error": "no metrics within 0.05 s"})


@pytest.mark.parametrize("path", ["/", "/live", "/livez/", "/readyz/x", "/%ff%00", "//livez"])
async def test_an_unknown_path_is_404_in_json(path: str) -> None:
    async with serving(View()) as server:
        response = await get(server, path)
    assert (response.status_code, response.json()) == (404, {"error": "Not Found"})


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
@pytest.mark.parametrize("path", ["/livez", "/readyz", "/metrics"])
async def test_another_method_is_405_in_json(path: str, method: str) -> None:
    async with serving(View()) as server:
        response = await get(server, path, method)
    assert (response.status_code, response.json()) == (405, {"error": "Method Not Allowed"})
    assert set(response.headers["allow"].split(", ")) == {"GET", "HEAD"}


async def test_head_has_the_status_and_no_body() -> None:
    view = View()
    view.is_alive = False
    async with serving(view) as server:
        response = await get(server, "/livez", "HEAD")
    assert (response.status_code, response.content) == (503, b"")


async def test_an_error_of_the_host_is_500_and_logged_but_not_on_stderr(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    view = View()
    view.state = {"ready": True}
    with caplog.at_level(logging.DEBUG):
        async with serving(view) as server:
            response = await get(server, "/readyz")
            assert (response.status_code, response.json()) == (500, {"error": "internal error: KeyError"})
            assert (await get(server, "/livez")).status_code == 200
    logged = [record for record in caplog.records if record.name.startswith(("runlane", "hypercorn"))]
    assert {record.name for record in logged} == {"runlane.health"}
    (error,) = [record for record in logged if record.levelno >= logging.ERROR]
    assert error.exc_info is not None
    assert error.exc_info[0] is KeyError
    assert [record.getMessage() for record in logged if record.levelno == logging.INFO] == [
        f"event=listening host=127.0.0.1 port={server.port}",
        f"event=stopped host=127.0.0.1 port={server.port}",
    ]
    assert capfd.readouterr() == ("", "")


# --- the socket --------------------------------------------------------------------------------------


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_ipv6_hosts_work(host: str) -> None:
    view = View()
    async with serving(view, host) as server, httpx.AsyncClient() as client:
        assert (await client.get(f"http://[::1]:{server.port}/livez")).status_code == 200


async def test_connections_queue_from_the_moment_the_port_is_reported() -> None:
    answers: list[int] = []
    shutdown = trio.Event()

    def on_bound(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            answers.append(port)
        shutdown.set()

    with trio.fail_after(5):
        await serve_health(View(), "127.0.0.1", 0, on_bound=on_bound, shutdown=shutdown, grace_s=GRACE_S)
    assert len(answers) == 1
    assert answers[0] > 0


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"host '127.0.0.1', port {port}: .*in use"):
            await serve_health(
                View(), "127.0.0.1", port, on_bound=never, shutdown=trio.Event(), grace_s=GRACE_S
            )


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "203.0.113.1"])
async def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="cannot listen on host"):
        await serve_health(View(), host, 0, on_bound=never, shutdown=trio.Event(), grace_s=GRACE_S)


async def test_the_port_can_be_taken_again_at_once() -> None:
    async with serving(View()) as first:
        await get(first, "/livez")
    shutdown = trio.Event()
    with trio.fail_after(5):
        await serve_health(
            View(),
            "127.0.0.1",
            first.port,
            on_bound=lambda _: shutdown.set(),
            shutdown=shutdown,
            grace_s=GRACE_S,
        )


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00",  # a TLS greeting
        b"GET /livez\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: AAMAAABk\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        b"HTTP2-Settings: !!\r\n\r\n",
        HTTP2_PREFACE + b"\xff" * 50,
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
async def test_nonsense_on_the_wire_ends_its_own_connection_only(sent: bytes) -> None:
    async with serving(View()) as server:
        async with await server.connect() as stream:
            await stream.send_all(sent)
            with trio.move_on_after(0.2):
                await stream.receive_some()
        assert (await get(server, "/livez")).status_code == 200


# --- shutdown ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n",
        b"GET /li",
        b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf",
        HTTP2_PREFACE,
    ],
    ids=["silent", "keep-alive", "half a header", "half a line", "half a body", "http/2"],
)
async def test_an_open_connection_does_not_delay_the_end(sent: bytes) -> None:  # fault 18.1
    async with serving(View()) as server, await server.connect() as stream:
        await stream.send_all(sent)
        if b"\r\n\r\n" in sent:
            with trio.fail_after(5):
                assert await stream.receive_some()
        started = trio.current_time()
        await server.stop_within_grace()
        # Hypercorn cuts an idle HTTP/2 connection at the deadline, every other one at once.
        allowed = GRACE_S if sent == HTTP2_PREFACE else GRACE_S / 2
        assert trio.current_time() - started < allowed
        with trio.fail_after(5):  # and the server's side is closed
            while await stream.receive_some():
                pass


async def test_a_request_in_flight_is_answered_during_the_grace() -> None:
    view = View()
    view.answer = trio.Event()
    async with serving(view) as server:
        answers: list[int] = []

        async def ask() -> None:
            answers.append((await get(server, "/metrics")).status_code)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await view.asked.wait()
            server.shutdown.set()
            await trio.testing.wait_all_tasks_blocked()
            view.answer.set()
        assert answers == [200]


async def test_a_request_that_never_ends_is_cut_off() -> None:
    view = View()
    view.answer = trio.Event()
    async with serving(view) as server, await server.connect() as stream:
        await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await view.asked.wait()
        await server.stop_within_grace()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot end an unread write")
async def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:  # fault 18.1, T8
    view = View()
    view.body = b"x" * 20_000_000
    async with serving(view) as server:
        with trio.socket.socket() as slow:
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            await slow.connect((server.host, server.port))
            await slow.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await slow.recv(10)
            await server.stop_within_grace()


async def test_new_connections_are_refused_at_once_after_the_shutdown() -> None:  # fault 10.10
    view = View()
    view.answer = trio.Event()
    async with serving(view) as server, await server.connect() as stream:
        await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        await view.asked.wait()
        server.shutdown.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not server.ended.is_set()  # the request in flight keeps the server, not its socket
        with pytest.raises(OSError, match="all attempts to connect"), trio.fail_after(1):
            await server.connect()
        view.answer.set()


async def test_a_cancelled_server_ends_within_the_grace_and_frees_the_port() -> None:
    view = View()
    view.answer = trio.Event()
    ports: list[int] = []
    with trio.fail_after(GRACE_S + MARGIN_S):
        async with trio.open_nursery() as nursery:
            bound = trio.Event()

            def on_bound(port: int) -> None:
                ports.append(port)
                bound.set()

            async def run() -> None:
                await serve_health(
                    view, "127.0.0.1", 0, on_bound=on_bound, shutdown=trio.Event(), grace_s=GRACE_S
                )

            nursery.start_soon(run)
            await bound.wait()
            async with await trio.open_tcp_stream("127.0.0.1", ports[0]) as stream:
                await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                await view.asked.wait()
                nursery.cancel_scope.cancel()
    with socket.create_server(("127.0.0.1", ports[0])):
        pass
