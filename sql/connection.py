"""The border to the database: one connection, one asyncio loop, one task.

Owns everything that knows asyncio, trio-asyncio and asyncpg: opening, calling, listening, closing, deadlines,
and the translation of every foreign error into ``sql.errors``. It never knows a table or a function of the
kernel, and it never retries: a caller whose session broke opens another one.

Rules that hold for each session:

* One crossing per call. A transaction is one asyncio-flavoured function, so that a cancellation rolls it back
  instead of leaving it open.
* Cancelled does not mean that it did not happen. Callers use statements that are safe to repeat, are fenced,
  or are read back by a natural key.
* State: ``READY`` → ``BUSY`` during a call → ``READY`` after a clean end or an error that the server
  answered; ``SUSPECT`` after a cancellation or a stray loop error (probed before its next use); ``DEAD``
  after anything else, for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from datetime import datetime
from functools import partial
from typing import Any, NoReturn, TypeVar

import asyncpg
import attrs
import trio
from asyncpg.exceptions import _base as asyncpg_base

from sql import errors
from sql.dsn import address, known_to_driver, tls_mode
from sql.faults import translate, translate_connecting

log = logging.getLogger("runlane.connection")

T = TypeVar("T")

_PROBE_TIMEOUT_S = 2.0
_PREDECESSOR_WAIT_S = 5.0

_IDENTITY = """
SELECT pg_backend_pid() AS pid, pg_is_in_recovery() AS standby,
       (SELECT backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()) AS started,
       current_setting('transaction_read_only')::boolean AS read_only,
       current_setting('transaction_isolation') AS isolation
"""
_END_PREDECESSOR = """
SELECT pg_terminate_backend(pid, $3) FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2
"""


@attrs.frozen
class SessionOptions:
    """How to reach the server. Durations are seconds.

    ``statement_timeout_s`` bounds every call on both sides (``command_timeout`` here, ``statement_timeout``
    on the server). ``close_grace_s`` bounds a polite close, after which the connection is terminated.
    ``pooled`` says that a transaction pooler is between: no statement cache, no startup parameters, no
    LISTEN.
    """

    dsn: str
    schema: str = "runlane"
    connect_timeout_s: float = 10.0
    statement_timeout_s: float = 15.0
    lock_timeout_s: float = 5.0
    close_grace_s: float = 1.0
    pooled: bool = False
    application: str = "runlane"


@attrs.frozen
class Backend:
    """A server process, named so that it cannot be confused with a later one of the same pid."""

    pid: int
    started: datetime


class _State(enum.Enum):
    READY = "ready"
    BUSY = "busy"
    SUSPECT = "suspect"
    DEAD = "dead"


class Session:
    """One connection, used by one task. Made by :func:`open_session`, never directly.

    Every method is one crossing and raises ``sql.errors`` only (or ``trio.Cancelled``). ``timeout_s`` is that
    call's deadline; the default is the option ``statement_timeout_s``. A call that outlives its deadline
    raises ``StatementTooSlow``: its effect is unknown and the session is dead.
    """

    def __init__(
        self, name: str, options: SessionOptions, loop: Any, on_lost: Callable[[], None] | None
    ) -> None:
        self.name = name
        self.options = options
        self.backend = Backend(0, datetime.min)
        self.strays = 0
        self._loop = loop
        self._conn: Any = None
        self._state = _State.READY
        self._on_lost = on_lost
        self._closing = False

    @property
    def usable(self) -> bool:
        """False once the connection broke or was given up; such a session never comes back."""
        return self._state is not _State.DEAD and not self._conn.is_closed()

    async def fetch(self, statement: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Run one statement and return its rows (``asyncpg.Record``)."""
        return await self._call(self._conn.fetch(statement, *args, timeout=timeout_s))

    async def fetchrow(self, statement: str, *args: Any, timeout_s: float | None = None) -> Any | None:
        """Run one statement and return its first row, or None."""
        return await self._call(self._conn.fetchrow(statement, *args, timeout=timeout_s))

    async def fetchval(self, statement: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Run one statement and return the first column of its first row, or None."""
        return await self._call(self._conn.fetchval(statement, *args, timeout=timeout_s))

    async def execute(self, statement: str, *args: Any, timeout_s: float | None = None) -> str:
        """Run one statement and return its command tag."""
        return await self._call(self._conn.execute(statement, *args, timeout=timeout_s))

    async def script(self, text: str, *, timeout_s: float | None = None) -> None:
        """Run several statements in one round trip, as one implicit transaction (no parameters).

        A single statement runs outside a transaction, as ``CREATE INDEX CONCURRENTLY`` needs. A ``timeout_s``
        above the session's raises the server's limit for this call too.
        """
        conn, limit = self._conn, timeout_s or self.options.statement_timeout_s
        longer = limit > self.options.statement_timeout_s and not self.options.pooled

        async def flavoured() -> None:
            if longer:
                await conn.execute(f"SET statement_timeout = {math.ceil(limit * 1000)}")
            await conn.execute(text, timeout=limit)
            if longer:
                await conn.execute(
                    f"SET statement_timeout = {math.ceil(self.options.statement_timeout_s * 1000)}"
                )

        await self._call_task(flavoured(), limit)

    async def transact(self, body: Callable[[Any], Awaitable[T]], timeout_s: float | None = None) -> T:
        """Run ``body(connection)`` inside one READ COMMITTED transaction and return its result.

        ``body`` is asyncio-flavoured: it awaits the given ``asyncpg`` connection and nothing else. Its own
        errors that are not the database's pass through unchanged, after the rollback. Ends by ``timeout_s``
        plus a margin even when the server is frozen.
        """
        conn, limit = self._conn, timeout_s or self.options.statement_timeout_s

        async def flavoured() -> T:
            async with conn.transaction(isolation="read_committed"):
                if limit > self.options.statement_timeout_s:
                    await conn.execute(f"SET LOCAL statement_timeout = {math.ceil(limit * 1000)}")
                return await body(conn)

        return await self._call_task(flavoured(), limit)

    async def listen(self, channels: Iterable[str], on_notify: Callable[[str], None]) -> None:
        """LISTEN on ``channels`` in one crossing; ``on_notify(channel)`` is called for each notification.

        The callback runs outside any task: it may only set flags. What it raises is counted as a stray and
        goes no further. Not possible through a pooler (``ConfigError``).
        """
        if self.options.pooled:
            raise errors.ConfigError(
                "LISTEN needs a direct connection: give listen_dsn, or set notify to false"
            )
        conn, names = self._conn, list(channels)

        def heard(_conn: Any, _pid: int, channel: str, _payload: str) -> None:
            if not self._closing:
                on_notify(channel)

        async def flavoured() -> None:
            for name in names:
                await conn.add_listener(name, heard)

        await self._call(flavoured())

    # --- the crossing --------------------------------------------------------------------------------

    async def _call(self, calling: Coroutine[Any, Any, T]) -> T:
        """One statement: ends at the driver's own deadline, and at once when cancelled."""
        await self._begin(calling)
        try:
            result = await _drive(calling)
        except BaseException as exc:
            await self._failed(exc)
        self._clean()
        return result

    async def _call_task(self, calling: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Several statements: cancelled at ``limit_s``, and then ``close_grace_s`` to roll back."""
        await self._begin(calling)
        with trio.move_on_after(limit_s):
            try:
                result = await self._run_task(calling)
            except BaseException as exc:
                await self._failed(exc)
            self._clean()
            return result
        raise errors.StatementTooSlow(f"no end within {limit_s:g} s")

    async def _begin(self, calling: Coroutine[Any, Any, Any]) -> None:
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            if self._state is not _State.READY or self._conn.is_in_transaction():
                await self._recover()
        except BaseException:
            calling.close()  # it was never started
            raise
        self._state = _State.BUSY

    async def _run_task(self, calling: Coroutine[Any, Any, T]) -> T:
        """Run an asyncio task to its end; once cancelled it has the close grace, then the connection goes.

        The border forwards one cancellation only, and a rollback waits for the server: without the watchdog a
        frozen server would hold the caller past every deadline.
        """
        loop, conn = self._loop, self._conn
        task = loop.create_task(calling)
        return await _until_done(task, lambda: loop.call_later(self.options.close_grace_s, conn.terminate))

    async def _failed(self, exc: BaseException) -> NoReturn:
        if isinstance(exc, trio.Cancelled):
            self._suspect()
            raise exc
        translated = translate(exc, closed=self._conn.is_closed())
        if translated is None:  # an error of the caller's own transaction body, rolled back
            self._suspect()
            raise exc
        if isinstance(translated, errors.LinkError):
            self._give_up()
        elif translated.sqlstate is None:
            self._suspect()
        else:
            self._clean()
        # A frozen or killed server turns a cancellation into its own error: the caller is owed its Cancelled.
        await trio.lowlevel.checkpoint_if_cancelled()
        raise translated from exc

    def _clean(self) -> None:
        if self._state is _State.BUSY:
            self._state = _State.READY

    def _suspect(self) -> None:
        if self._state is not _State.DEAD:
            self._state = _State.SUSPECT

    def _give_up(self) -> None:
        self._state = _State.DEAD
        self._conn.terminate()

    async def _recover(self) -> None:
        """Make the session ready again with one bounded probe, or declare it dead."""
        if self._state is _State.BUSY:
            raise RuntimeError(f"session {self.name}: used by two tasks at once")
        if self._state is _State.DEAD or self._conn.is_closed():
            self._give_up()
            raise errors.LinkLost(f"session {self.name}: the connection is gone")
        self._state = _State.BUSY
        try:
            await self._run_task(self._conn.fetchval("SELECT 1", timeout=_PROBE_TIMEOUT_S))
        except trio.Cancelled:
            self._suspect()
            raise
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncio.CancelledError) as exc:
            self._give_up()
            raise errors.LinkLost(f"session {self.name}: no answer to the probe: {exc!r}") from exc
        if self._conn.is_in_transaction():
            self._give_up()
            raise errors.LinkLost(f"session {self.name}: left inside a transaction, given up")
        self._clean()

    # --- what the loop tells -------------------------------------------------------------------------

    def _stray(self, _loop: Any, context: dict[str, Any]) -> None:
        # The default handler would end the loop. A stray report fails only this session, at its next use.
        self.strays += 1
        log.debug(
            "event=stray session=%s message=%r error=%r",
            self.name,
            context.get("message"),
            context.get("exception"),
        )
        self._suspect()

    def _terminated(self, _conn: Any) -> None:
        if self._closing:
            return
        self._state = _State.DEAD
        if self._on_lost is not None:
            self._on_lost()


@contextlib.asynccontextmanager
async def open_session(
    options: SessionOptions,
    name: str,
    *,
    predecessor: Backend | None = None,
    on_lost: Callable[[], None] | None = None,
) -> AsyncIterator[Session]:
    """Open a connection with a loop of its own, and close it within ``close_grace_s`` whatever happened.

    ``predecessor`` is the backend of the caller's last connection: it is ended first, so that a statement
    that was in flight when the link broke cannot commit behind the new session's back. ``on_lost`` is called
    (from the loop: set flags only) when the connection goes away while it is open.

    Raises ``DatabaseUnreachable``, ``InvalidDsn``, ``ServerReadOnly``, ``WrongIsolation`` or another
    ``DatabaseError``; errors of the body leave unwrapped.
    """
    _refuse_mock_clock()
    failure: BaseException | None = None
    try:
        async with _open_loop() as loop:
            session = Session(name, options, loop, on_lost)
            loop.set_exception_handler(session._stray)
            # The standard one runs in a thread that cannot be abandoned: a hanging name server would outlive
            # the deadline.
            loop.getaddrinfo = partial(_getaddrinfo, loop)
            await _connect(session, predecessor)
            try:
                yield session
            finally:
                await _close(session)
    except BaseExceptionGroup as group:
        # The loop is two nurseries, so even a single error of the body arrives in a group in a group.
        failure = _sole(group)
    if failure is not None:
        raise failure


async def _connect(session: Session, predecessor: Backend | None) -> None:
    options = session.options
    try:
        session._conn, row = await session._loop.run_aio_coroutine(
            connected(options, session.name, predecessor)
        )
    except BaseException as exc:
        if isinstance(exc, (trio.Cancelled, errors.DatabaseError)):
            raise
        translated = translate_connecting(exc, address(options.dsn), options.connect_timeout_s)
        if translated is None:
            raise
        await trio.lowlevel.checkpoint_if_cancelled()
        raise translated from exc
    session.backend = backend_of(row)
    session._conn.add_termination_listener(session._terminated)


async def connected(options: SessionOptions, name: str, predecessor: Backend | None) -> tuple[Any, Any]:
    """A connection and what the server says of itself. asyncio-flavoured; raises the driver's errors and ours."""
    conn = await asyncpg.connect(**_arguments(options, name))
    try:
        if predecessor is not None and not options.pooled:
            # The server ends a statement that waits longer than the session allows.
            wait_s = min(_PREDECESSOR_WAIT_S, 0.8 * options.statement_timeout_s)
            await _end_predecessor(conn, predecessor, name, wait_s)
        row = await conn.fetchrow(_IDENTITY, timeout=options.connect_timeout_s)
        if row["standby"] or row["read_only"]:
            raise errors.ServerReadOnly(
                f"{address(options.dsn)}: the server accepts no writes (standby or read-only)"
            )
        if row["isolation"] != "read committed":
            raise errors.WrongIsolation(
                f"{address(options.dsn)}: sessions start at {row['isolation']!r}; through a pooler, set the "
                "role's default_transaction_isolation to 'read committed'"
            )
    except BaseException:
        conn.terminate()
        raise
    return conn, row


def backend_of(identity: Any) -> Backend:
    """The server process behind what :func:`connected` was told."""
    # Through a pooler it changes from call to call, and its start may be hidden from the role.
    return Backend(identity["pid"], identity["started"] or datetime.min)


async def _end_predecessor(conn: Any, predecessor: Backend, name: str, wait_s: float) -> None:
    wait_ms = int(wait_s * 1000)
    try:
        gone = await conn.fetchval(
            _END_PREDECESSOR, predecessor.pid, predecessor.started, wait_ms, timeout=wait_s + 1.0
        )
    except asyncpg.InsufficientPrivilegeError as exc:
        log.warning("event=predecessor_kept session=%s pid=%d reason=%r", name, predecessor.pid, str(exc))
        return
    if gone is False:
        # It is frozen, not merely slow. Waiting for ever would help nobody: fences hold what it may still do.
        log.warning(
            "event=predecessor_stuck session=%s pid=%d waited_s=%g",
            name,
            predecessor.pid,
            wait_s,
        )


async def _close(session: Session) -> None:
    """Close politely within the grace, then terminate; never raises, never outlives the grace."""
    session._closing = True
    conn, grace_s = session._conn, session.options.close_grace_s
    if session._state is not _State.DEAD and not conn.is_closed():
        # The only shield of this layer: bounded, because a shield without a deadline cannot be stopped.
        with trio.move_on_after(grace_s, shield=True):
            with contextlib.suppress(
                OSError,
                asyncpg.PostgresError,
                asyncpg.InterfaceError,
                asyncpg_base.InternalClientError,
                asyncio.CancelledError,
            ):
                await session._loop.run_aio_coroutine(conn.close(timeout=grace_s / 2))
    session._state = _State.DEAD
    conn.terminate()


def _arguments(options: SessionOptions, name: str) -> dict[str, Any]:
    dsn, many_hosts = known_to_driver(options.dsn)
    arguments: dict[str, Any] = {
        "dsn": dsn,
        "timeout": options.connect_timeout_s,
        "command_timeout": options.statement_timeout_s,
        "ssl": tls_mode(dsn),
        # A finite lifetime would set a timer per statement and prepare each again every few minutes.
        "max_cached_statement_lifetime": 0,
    }
    if many_hosts and "target_session_attrs" not in dsn:
        arguments["target_session_attrs"] = "read-write"
    if options.pooled:
        arguments["statement_cache_size"] = 0
        return arguments
    statement_ms = str(math.ceil(options.statement_timeout_s * 1000))
    # Startup parameters rather than a SET: they cost no round trip, and a pooler refuses them loudly instead
    # of leaking them to other clients.
    arguments["server_settings"] = {
        "application_name": f"{options.application} {name}"[:63],
        "client_min_messages": "warning",
        "default_transaction_isolation": "read committed",
        "idle_in_transaction_session_timeout": statement_ms,
        "jit": "off",
        "lock_timeout": str(math.ceil(options.lock_timeout_s * 1000)),
        "statement_timeout": statement_ms,
    }
    return arguments


def _open_loop() -> Any:
    # Imported late: importing it patches asyncio for the whole process, which only a host should pay for. On
    # Python 3.12 and 3.13 it also warns about a base class of its own that we never use.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import trio_asyncio
    return trio_asyncio.open_loop()


async def _getaddrinfo(
    loop: Any, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
) -> Any:
    return await loop.trio_as_future(partial(trio.socket.getaddrinfo, host, port, family, type, proto, flags))


def _refuse_mock_clock() -> None:
    testing = sys.modules.get("trio.testing")
    if testing is not None and isinstance(trio.lowlevel.current_clock(), testing.MockClock):
        raise RuntimeError(
            "no session under MockClock: the driver's deadlines would run in mock time, sockets in real"
        )


async def _drive(calling: Coroutine[Any, Any, T]) -> T:
    """Step a driver coroutine from the trio task itself.

    An asyncio task around it would cost two more passes through the loop's queue, a third of a round trip. It
    is enough where the coroutine awaits futures only and never asks for its task, as the driver's single
    statements do on a connection that is not being cancelled.
    """
    cancelled: Callable[[], NoReturn] | None = None
    try:
        while True:
            future = calling.send(None)
            if future is None:  # a bare yield
                await trio.lowlevel.cancel_shielded_checkpoint()
                continue
            future._asyncio_future_blocking = False
            cancelled = await _settled(future, None) or cancelled
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except asyncio.CancelledError as exc:
        if cancelled is None:
            raise
        _raise_cancelled(cancelled, exc)


async def _until_done(task: asyncio.Task[T], on_cancel: Callable[[], asyncio.TimerHandle]) -> T:
    """Wait for an asyncio task; a cancellation is forwarded once, and ``on_cancel`` bounds what follows."""
    cancelled = await _settled(task, on_cancel)
    try:
        return task.result()
    except asyncio.CancelledError as exc:
        if cancelled is None:
            raise
        _raise_cancelled(cancelled, exc)


async def _settled(
    future: asyncio.Future[Any], on_cancel: Callable[[], asyncio.TimerHandle] | None
) -> Callable[[], NoReturn] | None:
    """Wait until a future is done, however; the cancellation to raise, if one came meanwhile."""
    this, reschedule = trio.lowlevel.current_task(), trio.lowlevel.reschedule
    cancelled: Callable[[], NoReturn] | None = None
    watchdog: asyncio.TimerHandle | None = None

    def abort(raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
        nonlocal cancelled, watchdog
        cancelled = raise_cancel
        future.cancel()
        if on_cancel is not None:
            watchdog = on_cancel()
        return trio.lowlevel.Abort.FAILED  # keep waiting: the asyncio side must end first

    future.add_done_callback(lambda _: reschedule(this))
    await trio.lowlevel.wait_task_rescheduled(abort)
    if watchdog is not None:
        watchdog.cancel()
    return cancelled


def _raise_cancelled(cancelled: Callable[[], NoReturn], cause: BaseException) -> NoReturn:
    try:
        cancelled()
    except BaseException as exc:
        exc.__cause__ = cause
        raise


def _sole(exc: BaseException) -> BaseException:
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc
