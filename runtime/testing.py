"""For tests of programs that use runlane: a pytest plugin. Put ``pytest_plugins = ["runtime.testing"]`` in conftest.py.

Owns the fixtures ``runlane`` (a schema of the test's own, and runtimes on it), ``run_inline`` (one play to its end)
and ``runlane_server`` (where the schemas are), and the durable clock that tests move. Everything is the real thing on
a real Postgres: nothing is mocked but the time.

``RUNLANE_TEST_DSN`` names a server to use; without it the embedded one (extra ``embedded``) is started once per test
session, in a temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar

import pytest
import trio

from runtime._throwaway import throwaway_server
from runtime.api import Runtime
from runtime.codec import JsonCodec, preview
from runtime.config import RuntimeConfig
from runtime.host import session_options
from runtime.ledger import Ledger
from runtime.plays import Play
from runtime.sync import SyncVerbs
from runtime.thread import RuntimeThread
from sql import bundle, deployment, due
from sql.connection import Session, open_session
from sql.errors import InputRefused, OutcomeUnknown, ResultTimeout
from sql.plain import Line
from sql.types import RunStatus

T = TypeVar("T")

__all__ = ["Clock", "Lab", "RunInline", "run_inline", "runlane", "runlane_server"]

QUICK: dict[str, Any] = {
    "slots": 20,
    "flush_ms": 20,
    "park_after_s": 0.0,  # every sleep is on the durable clock, which tests move
    "grace_s": 0.5,
    "release_budget_s": 3.0,
    "shutdown_budget_s": 10.0,
    "backstop_s": 0.5,
}
"""Settings of a ``Lab``'s runtimes, so that a test does not wait for what production is patient with."""

_STATEMENT_S = 20.0
_LOOK_EVERY_S = 0.02

# How far the clock was moved is a sequence: its value is the same for every snapshot. Whoever has read the clock holds
# the lock shared until its transaction ends, so that moving the clock is seen by all that comes after and by nothing
# that is under way. The leases of what runs here and now are measured by the hosts' own clocks, and move along.
_CLOCK = """
CREATE SEQUENCE IF NOT EXISTS @schema@.test_clock_ms MINVALUE 0 START 0;
CREATE OR REPLACE FUNCTION @schema@.clock() RETURNS timestamptz
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock_shared(pg_catalog.hashtextextended('@schema@.clock', 4));
    RETURN pg_catalog.clock_timestamp()
         + (SELECT last_value FROM @schema@.test_clock_ms) * interval '1 millisecond';
END
$$;
CREATE OR REPLACE FUNCTION @schema@.advance_test_clock(p_ms bigint) RETURNS timestamptz
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '10s'
AS $$
DECLARE
    v_by    CONSTANT interval := p_ms * interval '1 millisecond';
    v_lease record;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('@schema@.clock', 4));
    PERFORM setval('test_clock_ms', p_ms + (SELECT last_value FROM test_clock_ms));
    FOR v_lease IN
        SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
         WHERE c.relnamespace = '@schema@'::regnamespace AND c.relkind = 'r'
           AND a.attname IN ('lease_expires_at', 'lane_expires_at')
    LOOP
        -- A row that somebody holds has no lease from before: its holder is still to read the clock.
        EXECUTE format('UPDATE %1$I SET %2$I = %2$I + $1 WHERE ctid = ANY (ARRAY(
                            SELECT ctid FROM %1$I WHERE %2$I IS NOT NULL FOR NO KEY UPDATE SKIP LOCKED))',
                       v_lease.relname, v_lease.attname) USING v_by;
    END LOOP;
    UPDATE runs SET due_at = due_at + v_by WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM runs WHERE status = 'running' FOR NO KEY UPDATE SKIP LOCKED));
    RETURN clock();
END
$$;
"""


class Clock:
    """The durable clock of one schema: sleeps, deadlines, delays, retries and schedules go by it. Its calls block."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._advance = bundle.render("SELECT @schema@.advance_test_clock($1)", config.schema)
        self._now = bundle.render("SELECT @schema@.clock()", config.schema)

    def now(self) -> datetime:
        """What the database takes for the time."""
        found: datetime = self._ask(lambda session: session.fetchval(self._now))
        return found

    def advance(self, seconds: float) -> datetime:
        """Move the clock forward and wake every host: what is due by then happens at once. The new time.

        Attempts that run keep their leases. Waits for transactions that have read the clock, and raises LockTimedOut
        when one of them stays open.
        """
        number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
        if not number or not 0 <= seconds <= 1e9:
            raise InputRefused("seconds", f"must be a number from 0 to 1e9, not {preview(seconds)}")

        async def advance(session: Session) -> datetime:
            now: datetime = await session.fetchval(self._advance, round(seconds * 1000))
            await due.notify(session, due.CHANNELS)
            return now

        return self._ask(advance)

    def advance_to(self, when: datetime) -> datetime:
        """Move the clock to a moment, if that is still to come. The new time."""
        left = (when - self.now()) / timedelta(seconds=1)
        return self.advance(left + 0.001) if left >= 0 else self.now()

    def _ask(self, body: Callable[[Session], Awaitable[T]]) -> T:
        line = Line(session_options(self._config), "test clock")
        try:
            return line.call(lambda: line.ask(body, timeout_s=_STATEMENT_S, again=False))
        finally:
            line.close()


class Lab:
    """A schema of one test's own: runtimes on it, and its clock. Given by the fixture ``runlane``."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self.clock = Clock(config)

    def config(self, **settings: Any) -> RuntimeConfig:
        """The settings of this test's runtimes and clients; ``settings`` are on top."""
        given = {"dsn": self._config.dsn, "schema": self._config.schema, **QUICK, **settings}
        return RuntimeConfig(**given)

    @contextlib.asynccontextmanager
    async def open(
        self, *plays: Play, ledger: Ledger | None = None, codec: JsonCodec | None = None, **settings: Any
    ) -> AsyncIterator[Runtime]:
        """A running runtime, in a test on trio."""
        config = self._config_for(plays, settings)
        async with Runtime.open(config, plays=plays, ledger=ledger, codec=codec) as runtime:
            yield runtime

    def start(
        self, *plays: Play, ledger: Ledger | None = None, codec: JsonCodec | None = None, **settings: Any
    ) -> RuntimeThread:
        """A runtime in a thread, in a test that is a plain function (``with``) or on asyncio (``async with``)."""
        config = self._config_for(plays, settings)
        return Runtime.start_in_thread(config, plays=plays, ledger=ledger, codec=codec)

    def _config_for(self, plays: Iterable[Play], settings: dict[str, Any]) -> RuntimeConfig:
        """Plays in sandboxes need a health server, on any port."""
        detached = any(isinstance(play, Play) and play.sandbox is not None for play in plays)
        return self.config(**{**({"health_port": 0} if detached else {}), **settings})

    def until(self, verbs: SyncVerbs, run_id: str, status: str, *, timeout: float = 10.0) -> RunStatus:
        """Wait until a run has this status. Raises ResultTimeout after ``timeout`` seconds of the wall clock."""
        deadline = time.monotonic() + timeout
        while (now := verbs.status(run_id)).status != status:
            if time.monotonic() >= deadline:
                raise ResultTimeout(f"run {run_id} is not {status} within {timeout:g} s: {_stands(now)}")
            time.sleep(_LOOK_EVERY_S)
        return now

    def finish(self, verbs: SyncVerbs, run_id: str, *, timeout: float = 30.0) -> Any:
        """The output of a run, or what ``result`` raises, with the clock moved past all that it waits for.

        Sleeps, delays, pauses before retries and deadlines of waits are over at once. ``timeout`` is in seconds of
        the wall clock.
        """
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(ResultTimeout):
                return verbs.result(run_id, timeout=_LOOK_EVERY_S)
            now = verbs.status(run_id)
            if now.status in ("queued", "waiting") and now.due_at is not None:
                self.clock.advance_to(now.due_at)
            if time.monotonic() >= deadline:
                raise ResultTimeout(f"run {run_id} has not ended within {timeout:g} s: {_stands(now)}")


class RunInline(Protocol):
    """What the fixture ``run_inline`` gives."""

    def __call__(
        self,
        play: Play,
        input: Any = None,
        *,
        others: Iterable[Play] = (),
        timeout: float = 30.0,
        **options: Any,
    ) -> Any:
        """Run ``play`` to its end on a runtime of its own; its output, or RunFailed or RunCancelled.

        It is a run like any other (submitted, claimed, parked, retried), but time passes as fast as it allows: see
        ``Lab.finish``. ``others`` are plays that it needs beside itself; ``options`` are those of ``submit``.
        """
        ...


@pytest.fixture(scope="session")
def runlane_server() -> Iterator[str]:
    """The DSN of the server that tests use: ``RUNLANE_TEST_DSN``, or an embedded one for this session."""
    given = os.environ.get("RUNLANE_TEST_DSN")
    if given:
        yield given
        return
    with throwaway_server() as server:
        yield server.dsn


@pytest.fixture
def runlane(runlane_server: str) -> Iterator[Lab]:
    """A schema of the test's own, built and empty; dropped afterwards."""
    schema = f"t_{secrets.token_hex(6)}"
    config = RuntimeConfig(dsn=runlane_server, schema=schema)
    _in_thread(config, deployment.ensure)
    try:
        _in_thread(config, lambda session: session.script(bundle.render(_CLOCK, schema)))
        yield Lab(config)
    finally:
        _in_thread(
            config, lambda session: session.script(bundle.render("DROP SCHEMA @schema@ CASCADE", schema))
        )


@pytest.fixture
def run_inline(runlane: Lab) -> RunInline:
    """Runs one play to its end: see ``RunInline``."""

    def run(
        play: Play,
        input: Any = None,
        *,
        others: Iterable[Play] = (),
        timeout: float = 30.0,
        **options: Any,
    ) -> Any:
        with runlane.start(play, *others) as runtime:
            return runlane.finish(runtime, runtime.submit(play, input, **options).run_id, timeout=timeout)

    return run


def _stands(now: RunStatus) -> str:
    waits = f" for {now.wait_kind} {now.wait_key}" if now.wait_kind is not None else ""
    return f"it is {now.status}{waits}, after {now.attempt} attempts"


def _in_thread(config: RuntimeConfig, body: Callable[[Session], Awaitable[object]]) -> None:
    """Run ``body`` in a session, from a fixture, which may be set up inside of somebody's event loop."""
    outcome: list[BaseException | None] = []

    async def main() -> None:
        async with open_session(session_options(config), "testing") as session:
            await body(session)

    def target() -> None:
        try:
            trio.run(main)
        except BaseException as exc:  # handed to the caller, whatever it is
            outcome.append(exc)
        else:
            outcome.append(None)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(6 * _STATEMENT_S)
    if not outcome:
        raise OutcomeUnknown("the test's schema: no answer from the database")
    if outcome[0] is not None:
        raise outcome[0]
