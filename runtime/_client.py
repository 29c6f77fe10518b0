"""What the one-shot verbs of the command line do to the database: one session, a few calls.

Owns the session's life, the one repetition after a lost answer, and waiting for a run's end. It never starts a
runtime and prints nothing.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import attrs
import trio

from runtime.client import LineLink
from runtime.codec import JsonCodec
from runtime.config import RuntimeConfig
from runtime.embedded import EmbeddedServer
from runtime.host import session_options
from sql import status
from sql.connection import Backend, Session, SessionOptions, open_session
from sql.errors import LinkLost

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What asks a command to end."""


@contextmanager
def reachable(config: RuntimeConfig) -> Iterator[RuntimeConfig]:
    """The config with a DSN: its own, or that of the embedded server, which is used for the block.

    Blocks; main thread only. With the embedded server SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, so
    that it is left in order.
    """
    if config.dsn is not None:
        yield config
        return
    with _handled_by(signal.default_int_handler):
        server: EmbeddedServer | None = None
        try:
            with _deferred():
                server = EmbeddedServer.of(None if config.embedded_dir is None else Path(config.embedded_dir))
                server.join()
            yield attrs.evolve(config, dsn=server.dsn)
        finally:
            if server is not None:
                with _deferred():
                    server.leave()


@contextmanager
def _deferred() -> Iterator[None]:
    """A signal waits for the end of the block: a server whose start was cut short would be left behind."""
    arrived: list[int] = []
    with _handled_by(lambda number, _: arrived.append(number)):
        yield
    if arrived:
        raise KeyboardInterrupt


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def ask(config: RuntimeConfig, body: Callable[[Session], Awaitable[T]]) -> T:
    """Run ``body`` in one session and return its result.

    A connection that breaks on the way is replaced once and ``body`` runs again, so it must be safe to repeat.
    """
    with reachable(config) as found:
        return trio.run(partial(_asked, session_options(found), body))


async def _asked(options: SessionOptions, body: Callable[[Session], Awaitable[T]]) -> T:
    predecessor: Backend | None = None
    try:
        async with open_session(options, "cli") as session:
            predecessor = session.backend
            return await body(session)
    except LinkLost:
        if predecessor is None:
            raise
    async with open_session(options, "cli", predecessor=predecessor) as session:
        return await body(session)


def wait_for_end(config: RuntimeConfig, run_id: str) -> status.Terminal:
    """Wait until a run has ended, however long that takes; an outage of the database is waited out. Blocks."""
    if config.listen_dsn is not None:
        config = attrs.evolve(config, dsn=config.listen_dsn, pooled=False)
    link = LineLink(config, JsonCodec())
    try:
        terminal = link.line.call(lambda: link.ended(run_id, math.inf))
    finally:
        link.line.close()
    assert terminal is not None
    return terminal
