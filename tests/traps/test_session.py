"""Calls, cancellations, transactions and errors of one session on a healthy server."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from sql import errors
from sql.connection import Backend, Session, SessionOptions, open_session
from tests.traps.servers import proxied

CALL_END_S = 2.0


@asynccontextmanager
async def opened(dsn: str, name: str = "test", **more: Any) -> AsyncIterator[Session]:
    async with open_session(SessionOptions(dsn, **more), name) as session:
        yield session


@asynccontextmanager
async def table(dsn: str, schema: str) -> AsyncIterator[str]:
    async with opened(dsn, "table") as session:
        await session.script(f"CREATE SCHEMA {schema}; CREATE TABLE {schema}.t (n int PRIMARY KEY)")
    yield f"{schema}.t"


async def backend_state(watcher: Session, backend: Backend) -> str | None:
    row = await watcher.fetchrow(
        "SELECT state FROM pg_stat_activity WHERE pid = $1 AND backend_start = $2",
        backend.pid,
        backend.started,
    )
    return None if row is None else str(row["state"])


async def until(watcher: Session, backend: Backend, *states: str | None) -> str | None:
    """The backend's state once it is one of these."""
    with trio.fail_after(10):
        # Only the server knows, so there is no event to wait for.
        while (state := await backend_state(watcher, backend)) not in states:  # noqa: ASYNC110
            await trio.sleep(0.005)
    return state


# --- what a session is --------------------------------------------------------------------------------


@pytest.mark.modes
async def test_session_settings_and_results(dsn: str) -> None:
    async with opened(dsn, "claim", statement_timeout_s=7) as session:
        assert await session.fetchval("SHOW application_name") == "runlane claim"
        assert await session.fetchval("SHOW transaction_isolation") == "read committed"
        assert await session.fetchval("SHOW statement_timeout") == "7s"
        assert await session.fetchval("SHOW idle_in_transaction_session_timeout") == "7s"
        assert await session.fetchval("SHOW jit") == "off"
        assert [row["n"] for row in await session.fetch("SELECT generate_series(1, $1) AS n", 3)] == [1, 2, 3]
        row = await session.fetchrow("SELECT 1 AS a, '{\"b\": 2}'::jsonb AS c")
        assert row is not None
        assert dict(row) == {"a": 1, "c": '{"b": 2}'}
        assert await session.fetchrow("SELECT 1 WHERE false") is None
        assert await session.execute("SELECT 1") == "SELECT 1"
        assert session.backend.pid == await session.fetchval("SELECT pg_backend_pid()")
        assert session.usable


async def test_arrays_of_composite_and_enum_types_come_back(dsn: str, schema: str) -> None:
    """The driver asks the catalogue for types that it meets first, inside the same call."""
    async with opened(dsn) as session:
        await session.script(
            f"CREATE SCHEMA {schema};"
            f"CREATE TYPE {schema}.mood AS ENUM ('good', 'bad');"
            f"CREATE TYPE {schema}.pair AS (a int, b {schema}.mood)"
        )
        rows = await session.fetch(
            f"SELECT array_agg(ROW(n, m)::{schema}.pair) AS pairs"
            f" FROM unnest($1::int[], $2::{schema}.mood[]) AS t (n, m)",
            [1, 2],
            ["good", "bad"],
        )
        assert [tuple(pair) for pair in rows[0]["pairs"]] == [(1, "good"), (2, "bad")]


async def test_closing_ends_the_backend(dsn: str) -> None:
    async with opened(dsn, "watcher") as watcher:
        async with opened(dsn) as session:
            backend = session.backend
            assert await backend_state(watcher, backend) is not None
        await until(watcher, backend, None)
        assert not session.usable
        with pytest.raises(errors.LinkLost):
            await session.fetch("SELECT 1")


async def test_two_tasks_on_one_session_are_refused(dsn: str) -> None:
    """T4: a session belongs to one task."""
    async with opened(dsn) as session, trio.open_nursery() as nursery:
        nursery.start_soon(session.fetch, "SELECT pg_sleep(0.2)")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(RuntimeError, match="two tasks"):
            await session.fetch("SELECT 1")


async def test_refused_under_a_mock_clock(dsn: str, autojump_clock: trio.testing.MockClock) -> None:
    """T13: driver deadlines in mock time and sockets in real time do not mix."""
    with pytest.raises(RuntimeError, match="MockClock"):
        async with opened(dsn):
            pytest.fail("opened")


# --- T1: transactions ---------------------------------------------------------------------------------


@pytest.mark.modes
async def test_a_transaction_is_one_crossing(dsn: str, schema: str) -> None:
    async with table(dsn, schema) as t, opened(dsn) as session:

        async def body(conn: Any) -> int:
            assert await conn.fetchval("SHOW transaction_isolation") == "read committed"
            await conn.execute(f"INSERT INTO {t} VALUES (1)")
            return await conn.fetchval(f"SELECT count(*) FROM {t}")  # type: ignore[no-any-return]

        assert await session.transact(body, 5) == 1

        async def broken(conn: Any) -> None:
            await conn.execute(f"INSERT INTO {t} VALUES (2)")
            raise LookupError("the body's own")

        with pytest.raises(LookupError, match="the body's own"):
            await session.transact(broken, 5)
        assert [row["n"] for row in await session.fetch(f"SELECT n FROM {t}")] == [1]


async def test_a_cancelled_transaction_leaves_nothing_open(dsn: str, schema: str) -> None:
    """T1: the next write is neither lost in a forgotten transaction nor a savepoint of one."""
    async with table(dsn, schema) as t, opened(dsn) as session, opened(dsn, "watcher") as watcher:

        async def body(conn: Any) -> None:
            await conn.execute(f"INSERT INTO {t} VALUES (1)")
            await conn.execute("SELECT pg_sleep(30)")

        with trio.move_on_after(0.2) as scope:
            await session.transact(body, 20)
        assert scope.cancelled_caught
        assert await backend_state(watcher, session.backend) == "idle"
        assert await watcher.fetchval(f"SELECT count(*) FROM {t}") == 0

        async def second(conn: Any) -> None:
            await conn.execute(f"INSERT INTO {t} VALUES (2)")

        await session.transact(second, 5)
        assert await watcher.fetchval(f"SELECT array_agg(n) FROM {t}") == [2]


async def test_a_transaction_left_open_by_a_statement_kills_the_session(dsn: str) -> None:
    """T1: checked before each reuse."""
    async with opened(dsn) as session, opened(dsn, "watcher") as watcher:
        await session.execute("BEGIN")
        with pytest.raises(errors.LinkLost, match="inside a transaction"):
            await session.fetch("SELECT 1")
        assert not session.usable
        await until(watcher, session.backend, None)


async def test_a_transaction_past_its_deadline_is_too_slow_and_rolled_back(dsn: str, schema: str) -> None:
    async with table(dsn, schema) as t, opened(dsn) as session, opened(dsn, "watcher") as watcher:

        async def body(conn: Any) -> None:
            await conn.execute(f"INSERT INTO {t} VALUES (1)")
            await conn.execute("SELECT pg_sleep(30)")

        with pytest.raises(errors.StatementTooSlow):
            await session.transact(body, 0.2)
        assert await backend_state(watcher, session.backend) in ("idle", None)
        assert await watcher.fetchval(f"SELECT count(*) FROM {t}") == 0


async def test_a_script_may_take_longer_than_a_statement(dsn: str, schema: str) -> None:
    async with opened(dsn, statement_timeout_s=0.3) as session:
        await session.script("SELECT pg_sleep(0.5)", timeout_s=5)
        assert await session.fetchval("SHOW statement_timeout") == "300ms"
        with pytest.raises(errors.StatementTooSlow):
            await session.script("SELECT pg_sleep(0.5)")


async def test_a_script_of_one_statement_runs_outside_a_transaction(dsn: str, schema: str) -> None:
    async with table(dsn, schema) as t, opened(dsn) as session:
        await session.script(f"CREATE INDEX CONCURRENTLY t_n ON {t} (n)", timeout_s=20)


async def test_a_transaction_may_take_longer_than_a_statement(dsn: str) -> None:
    async with opened(dsn, statement_timeout_s=0.3) as session:

        async def body(conn: Any) -> int:
            return await conn.fetchval("SELECT 1 FROM pg_sleep(0.5)", timeout=5)  # type: ignore[no-any-return]

        assert await session.transact(body, 5) == 1


# --- T3 and T4: cancelled calls -----------------------------------------------------------------------


async def test_a_cancelled_query_ends_at_once_and_the_session_stays_usable(dsn: str) -> None:
    async with opened(dsn) as session:
        started = time.monotonic()
        with trio.move_on_after(0.1) as scope:
            await session.fetch("SELECT pg_sleep(30)")
        assert scope.cancelled_caught
        assert time.monotonic() - started < CALL_END_S
        assert await session.fetchval("SELECT 42") == 42
        assert session.usable


async def test_a_late_cancel_never_hits_the_next_statement(dsn: str, schema: str) -> None:
    """T3, T4, fault 16.4: 150 inserts under random deadlines, each followed by an innocent statement.

    Cancelled does not mean that it did not happen: the rows that are there are those that were answered, and
    any of those that were cancelled.
    """
    chance = random.Random(7)
    async with table(dsn, schema) as t, opened(dsn) as session:
        answered: set[int] = set()
        cancelled: set[int] = set()
        for n in range(150):
            with trio.move_on_after(chance.uniform(0, 0.002)) as scope:
                await session.execute(f"INSERT INTO {t} VALUES ($1)", n)
            (cancelled if scope.cancelled_caught else answered).add(n)
            assert await session.fetchval("SELECT $1::int", n) == n
        stored = {row["n"] for row in await session.fetch(f"SELECT n FROM {t}")}
        assert answered <= stored <= answered | cancelled
        assert answered
        assert cancelled


async def test_a_call_in_a_cancelled_scope_sends_nothing(dsn: str, schema: str) -> None:
    async with table(dsn, schema) as t, opened(dsn) as session:
        with trio.CancelScope() as scope:
            scope.cancel()
            await session.execute(f"INSERT INTO {t} VALUES (1)")
        assert scope.cancelled_caught
        assert await session.fetchval(f"SELECT count(*) FROM {t}") == 0


async def test_terminate_after_cancel_never_kills_the_loop(dsn: str) -> None:
    """T5: the driver's background cancel, torn down while it negotiates TLS, leaves a stray error behind."""
    chance = random.Random(5)
    ends = 0
    async with proxied(dsn) as proxy:
        for _ in range(30):
            with trio.fail_after(10):
                async with opened(proxy.dsn + "?sslmode=prefer", close_grace_s=0.2) as session:
                    with trio.move_on_after(0.005):
                        await session.fetch("SELECT pg_sleep(30)")
                    await trio.sleep(chance.uniform(0, 0.0012))
                    session._conn.terminate()
                    gc.collect()
                    ends += 1
    assert ends == 30


async def test_sessions_cancelled_at_random_moments_neither_hang_nor_leak(dsn: str) -> None:
    """T6, fault 16.1: cancelled while connecting, while asking, while closing."""
    chance = random.Random(6)
    async with opened(dsn, "watcher") as watcher:

        async def one() -> None:
            with trio.move_on_after(chance.uniform(0, 0.03)):
                async with opened(dsn, "cancelled", close_grace_s=0.5) as session:
                    while True:
                        await session.fetch("SELECT pg_sleep(0.01)")

        for _ in range(25):
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(one)
        with trio.fail_after(10):
            while await watcher.fetchval(  # noqa: ASYNC110
                "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'runlane cancelled'"
            ):
                await trio.sleep(0.02)


async def test_a_cancelled_session_holds_no_lock(dsn: str, schema: str) -> None:
    """Fault 16.6."""
    async with table(dsn, schema) as t, opened(dsn, "watcher", lock_timeout_s=2) as watcher:
        await watcher.execute(f"INSERT INTO {t} VALUES (1)")

        async def body(conn: Any) -> None:
            await conn.execute(f"SELECT * FROM {t} FOR UPDATE")
            await conn.execute("SELECT pg_sleep(30)")

        with trio.move_on_after(0.3):
            async with opened(dsn) as session:
                await session.transact(body, 20)
        assert await watcher.execute(f"UPDATE {t} SET n = 2") == "UPDATE 1"


# --- T9 and T10: what comes out -----------------------------------------------------------------------


async def test_errors_of_the_body_leave_unwrapped(dsn: str) -> None:
    """T9: the loop's nurseries do not show."""
    with pytest.raises(LookupError, match="mine") as caught:
        async with opened(dsn):
            raise LookupError("mine")
    assert caught.value.__cause__ is None
    with pytest.raises(errors.KernelRefused):
        async with opened(dsn) as session:
            await session.fetch("SELECT 1/0")
    with pytest.RaisesGroup(LookupError, KeyError):
        async with opened(dsn):
            raise ExceptionGroup("two", [LookupError(), KeyError()])


@pytest.mark.parametrize(
    ("statement", "expected", "sqlstate"),
    [
        ("SELECT 1/0", errors.KernelRefused, "22012"),
        ("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = 'RL001'; END $$", errors.KernelRefused, "RL001"),
        (
            "DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40001'; END $$",
            errors.SerializationLost,
            "40001",
        ),
        ("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '40P01'; END $$", errors.Deadlock, "40P01"),
        ("DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '55P03'; END $$", errors.LockTimedOut, "55P03"),
        ("SELECT * FROM not_there", errors.SchemaNotReady, "42P01"),
        ("SELECT not_there()", errors.SchemaNotReady, "42883"),
        ("SELEC", errors.DatabaseError, "42601"),
    ],
)
async def test_an_answered_error_is_translated_and_leaves_the_session_ready(
    dsn: str, statement: str, expected: type[errors.DatabaseError], sqlstate: str
) -> None:
    async with opened(dsn) as session:
        with pytest.raises(errors.DatabaseError) as caught:
            await session.fetch(statement)
        assert type(caught.value) is expected
        assert caught.value.sqlstate == sqlstate
        assert await session.fetchval("SELECT 1") == 1


@pytest.mark.parametrize(
    ("statement", "argument"),
    [
        ("SELECT $1::int", "not a number"),
        ("SELECT $1::int", 2**40),
        ("SELECT $1::text", "\ud800"),
        ("SELECT $1::text", "nul \0"),
        ("SELECT $1::text[]", ["fine", "\ud800"]),
        ("SELECT $1::jsonb", '{"a": "\\u0000"}'),
        ("SELECT $1::jsonb", "not json"),
    ],
)
async def test_an_argument_that_cannot_be_stored_is_one_items_fault(
    dsn: str, statement: str, argument: object
) -> None:
    async with opened(dsn) as session:
        with pytest.raises(errors.KernelRefused) as caught:
            await session.fetch(statement, argument)
        assert caught.value.sqlstate is not None
        assert await session.fetchval("SELECT 1") == 1


async def test_a_misuse_of_the_driver_is_no_outage(dsn: str) -> None:
    """A lost link would be tried again for ever."""
    async with opened(dsn) as session:
        with pytest.raises(errors.DatabaseError, match="expects 2 arguments") as caught:
            await session.fetch("SELECT $1::int + $2::int", 1)
        assert not isinstance(caught.value, errors.LinkError | errors.ItemFault)
        assert await session.fetchval("SELECT 1") == 1


async def test_timeouts_of_both_sides_are_one_error_and_end_the_session(dsn: str) -> None:
    """T10: a TimeoutError is an OSError, and is still not a lost link."""
    async with opened(dsn) as session:
        with pytest.raises(errors.StatementTooSlow):
            await session.fetch("SELECT pg_sleep(30)", timeout_s=0.1)
        assert not session.usable
    async with opened(dsn, statement_timeout_s=5) as session:
        await session.execute("SET statement_timeout = '50ms'")
        with pytest.raises(errors.StatementTooSlow) as caught:
            await session.fetch("SELECT pg_sleep(30)")
        assert caught.value.sqlstate == "57014"
        assert not session.usable


async def test_a_killed_backend_is_a_lost_link(dsn: str) -> None:
    async with opened(dsn) as session, opened(dsn, "killer") as killer:
        async with trio.open_nursery() as nursery:

            async def kill() -> None:
                await until(killer, session.backend, "active")
                await killer.execute("SELECT pg_terminate_backend($1)", session.backend.pid)

            nursery.start_soon(kill)
            with pytest.raises(errors.LinkLost):
                await session.fetch("SELECT pg_sleep(30)")
        assert not session.usable
        with pytest.raises(errors.LinkLost):
            await session.fetch("SELECT 1")


async def test_a_server_that_turns_read_only_is_given_up(dsn: str) -> None:
    """Fault 4.5."""
    async with opened(dsn) as session:
        await session.execute("SET default_transaction_read_only = on")
        with pytest.raises(errors.ServerReadOnly):
            await session.execute("CREATE TABLE never_made (n int)")
        assert not session.usable


async def test_a_read_only_server_is_refused(dsn: str) -> None:
    options = "options=-c%20default_transaction_read_only%3Don"
    with pytest.raises(errors.ServerReadOnly):
        async with opened(dsn + ("&" if "?" in dsn else "?") + options):
            pytest.fail("opened")


# --- T7: LISTEN ---------------------------------------------------------------------------------------


async def test_a_dying_listen_connection_is_noticed(dsn: str) -> None:
    """T7: such a connection delivers nothing and raises nothing; only the callback tells."""
    lost, heard = trio.Event(), trio.Event()
    async with (
        opened(dsn, "killer") as killer,
        open_session(SessionOptions(dsn), "listener", on_lost=lost.set) as session,
    ):
        await session.listen(["runlane_a", "Odd Name"], lambda channel: heard.set())
        await killer.execute('NOTIFY "Odd Name"')
        with trio.fail_after(5):
            await heard.wait()
        assert not lost.is_set()
        await killer.execute("SELECT pg_terminate_backend($1)", session.backend.pid)
        with trio.fail_after(5):
            await lost.wait()
        assert not session.usable


async def test_closing_a_session_is_not_losing_it(dsn: str) -> None:
    lost = trio.Event()
    async with open_session(SessionOptions(dsn), "listener", on_lost=lost.set) as session:
        await session.listen(["runlane_a"], lambda channel: None)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert not lost.is_set()


async def test_a_raising_callback_ends_nothing(dsn: str) -> None:
    """T6, T7: it is counted, and the session is probed before its next use."""
    heard = trio.Event()

    def bad(channel: str) -> None:
        heard.set()
        raise ValueError("a callback must not raise")

    async with opened(dsn, "sender") as sender, opened(dsn, "listener") as session:
        await session.listen(["runlane_a"], bad)
        await sender.execute("NOTIFY runlane_a")
        with trio.fail_after(5):
            await heard.wait()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert session.strays == 1
        assert await session.fetchval("SELECT 1") == 1


# --- the predecessor ----------------------------------------------------------------------------------


@pytest.mark.modes
async def test_the_predecessor_is_gone_before_the_next_life_works(dsn: str, schema: str) -> None:
    """Design section 3: a statement in flight when the link was lost cannot commit behind the next life."""
    async with table(dsn, schema) as t, opened(dsn, "watcher") as watcher, trio.open_nursery() as nursery:
        first = await opened_by_hand(nursery, dsn)

        async def late() -> None:
            with contextlib.suppress(errors.LinkError):
                await first.execute(f"INSERT INTO {t} VALUES (1)")

        async with opened(dsn, "holder") as holder:
            await holder.script(f"BEGIN; LOCK TABLE {t} IN ACCESS EXCLUSIVE MODE")
            nursery.start_soon(late)
            await until(watcher, first.backend, "active")
            async with open_session(SessionOptions(dsn), "test", predecessor=first.backend):
                assert await backend_state(watcher, first.backend) is None
        # The lock is free now: an insert that had survived would go through.
        assert await watcher.fetchval(f"SELECT count(*) FROM {t}") == 0
        nursery.cancel_scope.cancel()


async def opened_by_hand(nursery: trio.Nursery, dsn: str) -> Session:
    """A session that stays open in a task of its own."""

    async def hold(task_status: trio.TaskStatus[Session]) -> None:
        async with opened(dsn, "predecessor") as session:
            task_status.started(session)
            await trio.sleep_forever()

    session: Session = await nursery.start(hold)
    return session


async def test_a_later_backend_with_the_same_pid_is_spared(dsn: str) -> None:
    async with opened(dsn, "innocent") as innocent:
        impostor = Backend(innocent.backend.pid, innocent.backend.started.replace(year=2001))
        async with open_session(SessionOptions(dsn), "test", predecessor=impostor):
            assert await innocent.fetchval("SELECT 1") == 1


# --- what cannot be opened ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "expected", "message"),
    [
        ("http://host/db", errors.InvalidDsn, "postgresql://"),
        ("postgresql://u@127.0.0.1:port/db", errors.InvalidDsn, "port"),
        ("postgresql://u@127.0.0.1:1/db", errors.DatabaseUnreachable, "127.0.0.1:1"),
        ("postgresql://u:secret@/db?host=/nowhere", errors.DatabaseUnreachable, "/nowhere"),
        ("postgresql://u@127.0.0.1:1/db?sslmode=often", errors.InvalidDsn, "sslmode"),
    ],
)
async def test_a_bad_dsn_has_a_name(bad: str, expected: type[Exception], message: str) -> None:
    with pytest.raises(expected, match=message) as caught:
        async with opened(bad):
            pytest.fail("opened")
    assert "secret" not in str(caught.value)


async def test_a_database_that_does_not_exist_has_a_name(dsn: str) -> None:
    head, _, query = dsn.partition("?")
    bad = head.rpartition("/")[0] + "/no_such_database" + (f"?{query}" if query else "")
    with pytest.raises(errors.InvalidDsn, match="no_such_database"):
        async with opened(bad):
            pytest.fail("opened")


async def test_settings_that_only_libpq_knows_are_left_out(dsn: str) -> None:
    extra = "connect_timeout=3&channel_binding=prefer&keepalives=1"
    async with opened(dsn + ("&" if "?" in dsn else "?") + extra) as session:
        assert await session.fetchval("SELECT 1") == 1


class HangingResolver(trio.abc.HostnameResolver):
    """A name server that never answers."""

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        await trio.sleep_forever()

    async def getnameinfo(self, *args: Any, **kwargs: Any) -> Any:
        await trio.sleep_forever()


async def test_a_hanging_name_server_does_not_outlive_the_deadline() -> None:
    trio.socket.set_custom_hostname_resolver(HangingResolver())
    started = time.monotonic()
    with pytest.raises(errors.DatabaseUnreachable, match=r"within 0\.3 s"):
        async with opened("postgresql://u@db.invalid/db", connect_timeout_s=0.3):
            pytest.fail("opened")
    assert time.monotonic() - started < CALL_END_S


# --- poolers ------------------------------------------------------------------------------------------


async def test_pooled_sends_no_settings_and_cannot_listen(dsn: str) -> None:
    options = "options=-c%20default_transaction_isolation%3Dread%5C%20committed"
    async with opened(dsn + ("&" if "?" in dsn else "?") + options, pooled=True) as session:
        assert await session.fetchval("SHOW statement_timeout") == "0"
        assert await session.fetchval("SELECT $1::int", 3) == 3
        assert await session.fetchval("SELECT count(*) FROM pg_prepared_statements WHERE name <> ''") == 0
        with pytest.raises(errors.ConfigError, match="LISTEN"):
            await session.listen(["runlane_a"], lambda channel: None)


async def test_pooled_refuses_another_isolation_level(dsn: str) -> None:
    """The session cannot set it there, so it must be right."""
    options = "options=-c%20default_transaction_isolation%3Drepeatable%5C%20read"
    with pytest.raises(errors.WrongIsolation, match="repeatable read"):
        async with opened(dsn + ("&" if "?" in dsn else "?") + options, pooled=True):
            pytest.fail("opened")
