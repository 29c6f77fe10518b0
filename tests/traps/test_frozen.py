"""Servers that stop answering: frozen processes and half-open links. No deadline may become a lie.

These tests freeze processes, so they start a server of their own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import trio

from actors.core import Backoff, ChildSpec, Life, Supervisor
from sql import errors
from sql.connection import Session, SessionOptions, open_session
from tests.support.servers import temporary_server
from tests.traps.servers import frozen, proxied

# What a bounded call may take beyond its own budget on a busy machine.
SLACK_S = 1.5


@pytest.fixture(scope="module")
def own_server() -> Iterator[str]:
    with temporary_server() as dsn:
        yield dsn


def options(dsn: str, **more: Any) -> SessionOptions:
    return SessionOptions(dsn, **{"statement_timeout_s": 1.0, "close_grace_s": 0.5, **more})


async def slow_transaction(conn: Any) -> None:
    await conn.execute("SELECT pg_sleep(60)", timeout=60)


# --- T2, T8: a frozen backend -------------------------------------------------------------------------


async def test_a_statement_on_a_frozen_backend_ends_at_its_deadline(own_server: str) -> None:
    with ExitStack() as thaw:
        started = time.monotonic()
        async with open_session(options(own_server), "test") as session:
            thaw.enter_context(frozen(session.backend.pid))
            with pytest.raises(errors.StatementTooSlow):
                await session.fetch("SELECT 1")
        assert time.monotonic() - started < 1.0 + 0.5 + SLACK_S


async def test_a_cancel_on_a_frozen_backend_is_a_cancel_and_comes_soon(own_server: str) -> None:
    with ExitStack() as thaw:
        started = time.monotonic()
        with trio.move_on_after(0.3) as scope:
            async with open_session(options(own_server, statement_timeout_s=30.0), "test") as session:
                thaw.enter_context(frozen(session.backend.pid))
                await session.fetch("SELECT 1")
        assert scope.cancelled_caught
        assert time.monotonic() - started < 0.3 + 0.5 + SLACK_S


async def test_a_transaction_on_a_frozen_backend_ends_at_its_deadline_and_the_rollbacks_grace(
    own_server: str,
) -> None:
    """T2: the rollback waits for the server; only the watchdog ends that."""
    with ExitStack() as thaw:
        async with open_session(options(own_server, statement_timeout_s=60.0), "test") as session:
            started = time.monotonic()

            async def body(conn: Any) -> None:
                thaw.enter_context(frozen(session.backend.pid))
                await slow_transaction(conn)

            with pytest.raises(errors.StatementTooSlow):
                await session.transact(body, 0.5)
            assert time.monotonic() - started < 0.5 + 0.5 + SLACK_S
            assert not session.usable


async def test_a_cancelled_transaction_on_a_frozen_backend_raises_cancelled(own_server: str) -> None:
    """T2: without help the driver's own error arrives instead of Cancelled, after its long timeout."""
    with ExitStack() as thaw:
        async with open_session(options(own_server, statement_timeout_s=60.0), "test") as session:
            started = time.monotonic()

            async def body(conn: Any) -> None:
                thaw.enter_context(frozen(session.backend.pid))
                await slow_transaction(conn)

            with trio.move_on_after(0.3) as scope:
                await session.transact(body, 60)
            assert scope.cancelled_caught
            assert time.monotonic() - started < 0.3 + 0.5 + SLACK_S


async def test_closing_a_frozen_backend_is_bounded(own_server: str) -> None:
    """T8."""
    with ExitStack() as thaw:
        async with open_session(options(own_server), "test") as session:
            thaw.enter_context(frozen(session.backend.pid))
            started = time.monotonic()
        assert time.monotonic() - started < 0.5 + SLACK_S


async def test_a_suspect_session_on_a_frozen_backend_dies_at_its_probe(own_server: str) -> None:
    """T4."""
    with ExitStack() as thaw:
        async with open_session(options(own_server), "test") as session:
            with trio.move_on_after(0.05):
                await session.fetch("SELECT pg_sleep(60)")
            thaw.enter_context(frozen(session.backend.pid))
            started = time.monotonic()
            with pytest.raises(errors.LinkLost):
                await session.fetch("SELECT 1")
            assert time.monotonic() - started < 2.0 + SLACK_S
            assert not session.usable


async def test_a_frozen_predecessor_does_not_hold_the_next_life_for_ever(
    own_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sql.connection._PREDECESSOR_WAIT_S", 0.3)
    async with open_session(options(own_server), "first") as first:
        with frozen(first.backend.pid):
            started = time.monotonic()
            async with open_session(options(own_server), "second", predecessor=first.backend) as second:
                assert time.monotonic() - started < 0.3 + SLACK_S
                assert await second.fetchval("SELECT 1") == 1
    assert "event=predecessor_stuck" in caplog.text


# --- faults 4.1 and 4.2: a half-open link -------------------------------------------------------------


async def test_a_half_open_link_ends_at_the_statements_deadline(own_server: str) -> None:
    """Fault 4.1: no FIN, no answer, not even to the driver's cancel."""
    async with proxied(own_server) as proxy:
        async with open_session(options(proxy.dsn), "test") as session:
            await session.fetch("SELECT 1")
            proxy.blackhole()
            started = time.monotonic()
            with pytest.raises(errors.StatementTooSlow):
                await session.fetch("SELECT 1")
        assert time.monotonic() - started < 1.0 + 0.5 + SLACK_S


async def test_a_transaction_over_a_half_open_link_is_bounded(own_server: str) -> None:
    async with proxied(own_server) as proxy:
        async with open_session(options(proxy.dsn, statement_timeout_s=60.0), "test") as session:

            async def body(conn: Any) -> None:
                proxy.blackhole()
                await slow_transaction(conn)

            started = time.monotonic()
            with trio.move_on_after(0.3) as scope:
                await session.transact(body, 60)
            assert scope.cancelled_caught
            assert time.monotonic() - started < 0.3 + 0.5 + SLACK_S
            started = time.monotonic()
        assert time.monotonic() - started < 0.5 + SLACK_S


async def test_connecting_into_a_silent_server_is_bounded(own_server: str) -> None:
    async with proxied(own_server) as proxy:
        proxy.blackhole()
        started = time.monotonic()
        with pytest.raises(errors.DatabaseUnreachable, match=f"127.0.0.1:{proxy.port}: no connection within"):
            async with open_session(options(proxy.dsn, connect_timeout_s=0.4), "test"):
                pytest.fail("opened")
        assert time.monotonic() - started < 0.4 + SLACK_S


async def test_a_cut_link_is_lost_at_once(own_server: str) -> None:
    lost = trio.Event()
    async with (
        proxied(own_server) as proxy,
        open_session(options(proxy.dsn), "test", on_lost=lost.set) as session,
    ):
        proxy.cut()
        with trio.fail_after(2):
            await lost.wait()
        with pytest.raises(errors.LinkLost):
            await session.fetch("SELECT 1")


# --- the machinery on top -----------------------------------------------------------------------------


class Asker:
    """Asks the server the time, again and again."""

    def __init__(self, options: SessionOptions) -> None:
        self.options = options
        self.sessions: list[Session] = []
        self.answered = trio.Event()

    async def run(self, life: Life) -> None:
        async with life.session(self.options) as session:
            self.sessions.append(session)
            life.ready()
            while not life.stopping.is_set():
                await session.fetchval("SELECT 1")
                self.answered.set()
                await trio.sleep(0.01)


async def test_a_supervised_actor_outlives_a_frozen_backend_and_ends_it(own_server: str) -> None:
    """T2, fault 4.1, design section 3: the next life works, and the old backend is gone once it thaws."""
    asker = Asker(options(own_server))
    supervisor = Supervisor([ChildSpec(name="asker", actor=asker)], backoff=lambda: Backoff(first_s=0.05))
    async with open_session(options(own_server), "watcher") as watcher, trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        await asker.answered.wait()
        old = asker.sessions[0].backend
        with frozen(old.pid), trio.fail_after(10):
            while supervisor.health["asker"].state != "outage":  # noqa: ASYNC110
                await trio.sleep(0.01)
        with trio.fail_after(10):
            asker.answered = trio.Event()
            while len(asker.sessions) < 2:  # noqa: ASYNC110
                await trio.sleep(0.01)
            await asker.answered.wait()
        assert supervisor.ready
        gone = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2"
        assert await watcher.fetchval(gone, old.pid, old.started) == 0
        await supervisor.stop()


async def test_stopping_with_a_frozen_backend_keeps_its_budget(own_server: str) -> None:
    """T2, T8: whatever the server does, a stop ends."""
    asker = Asker(options(own_server, statement_timeout_s=60.0))
    child = ChildSpec(name="asker", actor=asker, stop_budget_s=0.3, cancel_budget_s=2.0)
    supervisor = Supervisor([child])
    with ExitStack() as thaw:
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            await asker.answered.wait()
            thaw.enter_context(frozen(asker.sessions[0].backend.pid))
            await trio.sleep(0.05)
            started = time.monotonic()
            await supervisor.stop()
            assert time.monotonic() - started < 0.3 + 0.5 + SLACK_S
        assert supervisor.health["asker"].state == "stopped"
