"""The command line: what it prints, its exit codes, and its one-line errors."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from urllib.parse import urlsplit, urlunsplit

import pytest

from runtime import RuntimeConfig, _client, logs
from runtime._cli_base import exit_code_of
from runtime.embedded import EmbeddedMissing
from sql import errors
from sql.connection import Session
from sql.errors import LinkLost
from tests.support import hosting
from tests.support.commands import Answer, Command, closed_port, until_running
from tests.support.servers import ask, temporary_folder

VERBS = (
    "demo",
    "serve",
    "migrate",
    "submit",
    "status",
    "steps",
    "cancel",
    "fail",
    "event",
    "runs",
    "schedules",
    "rates",
    "set-rate",
    "limits",
    "set-limit",
    "circuits",
    "lanes",
    "sandboxes",
    "compute",
    "doctor",
)
NO_RUN = "01234567-89ab-7cde-8f01-23456789abcd"


# --- help --------------------------------------------------------------------------------------------


def test_help_lists_verbs_in_the_order_of_use_and_the_exit_codes(bare: Command) -> None:
    said = bare("--help")
    assert said.code == 0
    places = [said.out.index(f"\n  {verb} ") for verb in VERBS]
    assert places == sorted(places)
    for code in (*range(7), 130):
        assert f"\n    {code}  " in said.out


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_has_two_examples(bare: Command, verb: str) -> None:
    said = bare(verb, "--help")
    assert said.code == 0
    examples = said.out.partition("Examples:")[2].partition("Options:")[0]
    assert sum(f"runlane {verb}" in line for line in examples.splitlines()) == 2


def test_unknown_verbs_and_options_are_usage_errors(bare: Command) -> None:
    assert bare("frobnicate").code == 2
    assert bare("runs", "--frobnicate").code == 2
    assert bare("serve").code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.HostFailed("x"), 1),
        (errors.OutcomeUnknown("x"), 1),
        (errors.IdempotencyConflict("x", "r"), 2),
        (errors.DuplicateRun("x", "r"), 2),
        (errors.ConfigError("x"), 2),
        (errors.InvalidPlay("x"), 2),
        (errors.UnknownPlay("play", "x"), 2),
        (errors.RunFailed("r", "ValueError", "x"), 3),
        (errors.RunCancelled("r"), 4),
        (errors.RunNotFound("r"), 5),
        (errors.ScheduleNotFound("s"), 5),
        (errors.FireNotFound("s", datetime(2026, 1, 1, tzinfo=UTC)), 5),
        (errors.DatabaseUnreachable("x"), 6),
        (errors.InvalidDsn("no such database", "3D000"), 6),
        (errors.InvalidDsn("cannot be parsed"), 2),
        (errors.HostTooOld("x"), 6),
        (EmbeddedMissing("x"), 6),
    ],
)
def test_every_family_of_errors_has_its_code(error: errors.RunlaneError, code: int) -> None:
    assert exit_code_of(error) == code


# --- settings and the database -----------------------------------------------------------------------


def test_an_unknown_variable_is_named(bare: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNLANE_DNS", "postgresql://nowhere/")
    bare("runs").refused(2, "RUNLANE_DNS", "RUNLANE_DSN")


def test_a_bad_schema_name_is_refused_before_anything_is_opened(bare: Command) -> None:
    bare("runs", "--dsn", "postgresql://nowhere/", "--schema", "pg_mine").refused(2, "schema", "pg_mine")


def test_the_version(bare: Command) -> None:
    assert bare("--version").out == f"runlane, version {metadata.version('runlane')}\n"


@pytest.mark.parametrize("dsn", ["mysql://localhost/db", "postgresql://[::1/db", "not a dsn"])
def test_a_bad_dsn_is_one_line(bare: Command, dsn: str) -> None:
    bare("runs", "--dsn", dsn).refused(2, "DSN")


@pytest.mark.parametrize(
    ("dsn", "words"),
    [
        ("postgresql://u@127.0.0.1:notaport/db", "the DSN's port must be a number, not 'notaport'"),
        ("postgresql://u@a:1,[::1]:x/db", "the DSN's port must be a number, not 'x'"),
        ("postgresql://u@127.0.0.1/db?port=x", "the DSN's port must be a number, not 'x'"),
        ("postgresql://u@127.0.0.1:70000/db", "the DSN's port must be a number from 1 to 65535, not 70000"),
    ],
)
def test_a_bad_port_is_named(bare: Command, dsn: str, words: str) -> None:
    bare("runs", "--dsn", dsn).refused(2, words)


def test_a_password_that_breaks_the_dsn_is_not_taken_for_a_port(bare: Command) -> None:
    said = bare("runs", "--dsn", "postgresql://me:hunter/2@127.0.0.1/db")
    said.refused(2, "password", "%2F")
    assert "hunter" not in said.err


def test_a_dsn_with_a_password_is_not_shown(bare: Command) -> None:
    said = bare("runs", "--dsn", f"postgresql://me:hunter2@127.0.0.1:{closed_port()}/db")
    said.refused(6, "127.0.0.1")
    assert "hunter2" not in said.err


def test_an_unreachable_server_is_one_line(bare: Command) -> None:
    port = closed_port()
    words = f"cannot connect to 127.0.0.1:{port}: connection refused"
    for arguments in (
        ["runs"],
        ["status", NO_RUN],
        ["submit", "echo"],
        ["cancel", NO_RUN],
        ["fail", NO_RUN, "--reason", "x"],
        ["migrate"],
    ):
        bare(*arguments, "--dsn", f"postgresql://postgres@127.0.0.1:{port}/postgres").refused(6, words)
    several = f"postgresql://postgres@localhost:{port}/postgres"
    bare("runs", "--dsn", several).refused(6, f"cannot connect to localhost:{port}: connection refused")


@pytest.mark.parametrize(
    "arguments",
    [["runs"], ["status", NO_RUN], ["submit", "echo"], ["cancel", NO_RUN], ["fail", NO_RUN, "--reason", "x"]],
)
def test_a_missing_schema_says_what_to_do(bare: Command, dsn: str, schema: str, arguments: list[str]) -> None:
    bare(*arguments, "--dsn", dsn, "--schema", schema).refused(6, schema, "migrate")


def test_missing_rights_say_what_to_grant(bare: Command, dsn: str, schema: str) -> None:
    role = f"{schema}_role"
    ask(dsn, f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    try:
        bare("migrate", "--dsn", _as_role(dsn, role), "--schema", schema).refused(6, schema, "grant")
        assert bare("migrate", "--dsn", dsn, "--schema", schema).code == 0
        refused = bare("runs", "--dsn", _as_role(dsn, role), "--schema", schema)
        refused.refused(6, "permission denied", "; see Deploying in the README")
    finally:
        ask(dsn, f"DROP ROLE {role}")


def test_options_before_the_verb_count_and_those_after_it_win(bare: Command, dsn: str, schema: str) -> None:
    nowhere = f"postgresql://127.0.0.1:{closed_port()}/db"
    said = bare("--dsn", nowhere, "--schema", schema, "--json", "migrate", "--dsn", dsn)
    assert said.code == 0
    assert said.json == {"schema": schema, "ready": True, "changed": True}


def test_without_a_dsn_the_embedded_server_is_used(bare: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with temporary_folder() as folder:
        monkeypatch.setenv("RUNLANE_EMBEDDED_DIR", str(folder))
        assert bare("migrate", "--json").json["changed"] is True
        # The server has stopped and is started again: the schema must still be there.
        assert bare("migrate", "--json").json["changed"] is False
        assert not (folder / "pgdata" / "postmaster.pid").exists()


def test_a_command_whose_connection_breaks_asks_again_once(dsn: str) -> None:
    pids: list[int] = []

    async def body(session: Session) -> int:
        pids.append(session.backend.pid)
        if len(pids) == 1:
            await session.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        return int(await session.fetchval("SELECT 7"))

    assert _client.ask(RuntimeConfig(dsn=dsn), body) == 7
    assert len(set(pids)) == 2


def test_a_connection_that_breaks_twice_is_an_error(dsn: str) -> None:
    async def body(session: Session) -> None:
        await session.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    with pytest.raises(LinkLost):
        _client.ask(RuntimeConfig(dsn=dsn), body)


def _as_role(dsn: str, role: str) -> str:
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{role}:x@{parts.netloc.rpartition('@')[2]}"))


# --- migrate -----------------------------------------------------------------------------------------


def test_migrate_builds_once(bare: Command, dsn: str, schema: str) -> None:
    where = ["--dsn", dsn, "--schema", schema]
    assert bare("migrate", "--check", *where).err == f"Error: schema {schema} does not exist\n"
    ask(dsn, f"CREATE SCHEMA {schema}")
    bare("migrate", "--check", *where).refused(1, f"schema {schema} lacks column")
    assert "brought up to date" in bare("migrate", *where).out
    assert "was up to date" in bare("migrate", *where).out
    assert bare("migrate", "--check", *where).code == 0
    assert bare("migrate", "--check", "--json", *where).json == {
        "schema": schema,
        "ready": True,
        "missing": [],
    }


# --- submit ------------------------------------------------------------------------------------------


def test_submit_prints_the_run_id_alone(runlane: Command) -> None:
    said = runlane(
        "submit", "echo", '{"a": [1, 2]}', "--label", "team=ops", "--priority", "-1", "--org", "acme",
        "--receiver", "https://one.example", "--terminal-receiver", "two", "--terminal-performance", "full",
    )  # fmt: skip
    assert said.code == 0
    assert said.err == ""
    shown = runlane("status", said.out.strip(), "--json").json
    assert shown["labels"] == {"team": "ops"}
    assert (shown["priority"], shown["org_id"], shown["status"]) == (-1, "acme", "queued")
    created = shown["facts"][0]["payload"]
    assert created["input"] == {"a": [1, 2]}
    assert created["terminal_performance"] == "full"
    assert (shown["details"]["receiver"], shown["details"]["terminal_receiver"]) == ("https://one.example", "two")


def test_submit_reads_stdin(runlane: Command) -> None:
    run_id = runlane("submit", "echo", "-", stdin='{"word": "grün"}\n'.encode()).out.strip()
    shown = runlane("status", run_id, "--json").json
    assert shown["facts"][0]["payload"]["input"] == {"word": "grün"}
    runlane("submit", "echo", "-", stdin=b"\xff").refused(2, "input", "UTF-8")


def test_submit_without_input_means_null(runlane: Command) -> None:
    run_id = runlane("submit", "echo").out.strip()
    assert runlane("status", run_id, "--json").json["facts"][0]["payload"]["input"] is None


def test_submit_again_gives_the_same_run(runlane: Command) -> None:
    first = runlane("submit", "echo", "1", "--idempotency-key", "k")
    again = runlane("submit", "echo", "1", "--idempotency-key", "k")
    assert (again.code, again.out) == (0, first.out)
    assert "was there already" in again.err
    assert runlane("submit", "echo", "1", "--idempotency-key", "k", "--json").json["created"] is False
    runlane("submit", "echo", "2", "--idempotency-key", "k").refused(2, first.out.strip())
    assert runlane("submit", "echo", "--run-id", "mine").out == "mine\n"
    runlane("submit", "echo", "2", "--run-id", "mine").refused(2, "mine")


def test_submit_with_a_unique_key(runlane: Command) -> None:
    unique = ("submit", "echo", "1", "--unique-key", "k", "--delay", "60")
    first = runlane(*unique, "--json").json
    assert first["created"] is True
    runlane(*unique).refused(2, "unique key is held by run", first["run_id"])
    same = runlane(*unique, "--on-conflict", "existing", "--json").json
    assert same == {"run_id": first["run_id"], "created": False}
    last = runlane(*unique, "--on-conflict", "replace", "--unique-for", "60", "--json").json
    assert last["created"] is True
    shown = runlane("status", last["run_id"], "--json").json
    assert (shown["details"]["unique_key"], shown["details"]["surface"]) == ("k", "cli")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submit", "unknown"], ["play", "unknown"]),
        (["submit", "echo", "{"], ["INPUT-JSON is not JSON: ", "line 1 column 2 (char 1)"]),
        (["submit", "echo", "NaN"], ["input", "NaN"]),
        (["submit", "echo", '"\\u0000"'], ["input"]),
        (["submit", "echo", "[" * 10_000 + "]" * 10_000], ["input"]),
        (["submit", "echo", json.dumps("x" * 1_100_000)], ["input", "1048576"]),
        (["submit", "echo", "--run-id", "no good"], ["run_id"]),
        (["submit", "echo", "--idempotency-key", ""], ["idempotency_key"]),
        (["submit", "echo", "--priority", "3"], ["priority"]),
        (["submit", "echo", "--unique-for", "3"], ["unique_key"]),
        (["submit", "echo", "--unique-key", "k", "--unique-for", "0"], ["unique_for_s"]),
        (["submit", "echo", "--label", "nothing"], ["label", "KEY=VALUE"]),
        (["submit", "echo", "--label", "a=\udcff"], ["not UTF-8", r"a=\udcff"]),
        (["submit", "echo", "--at", "tomorrow"], ["at"]),
        (["submit", "echo", "--at", "2026-01-31T18:00:00"], ["at", "add Z"]),
        (["submit", "echo", "--delay", "1", "--at", "2026-01-31T18:00:00Z"], ["delay"]),
        (["submit", "echo", "--delay", "-1"], ["delay"]),
        (["status", "no good"], ["run_id"]),
        (["cancel", "no good"], ["run_id"]),
        (["runs", "--after", "no good"], ["run_id"]),
    ],
)
def test_bad_input_is_named_and_changes_nothing(
    runlane: Command, arguments: list[str], words: list[str]
) -> None:
    runlane(*arguments).refused(2, *words)
    assert runlane("runs", "--json").json == {"runs": [], "next": None}


def test_a_refusal_of_the_kernel_names_its_field(runlane: Command) -> None:
    said = runlane("submit", "unknown")
    assert said.err == "Error: play: no host has ever registered a play named 'unknown'\n"


def test_submit_waits_for_the_output(served: Command) -> None:
    said = served("submit", "echo", '{"a": 1}', "--wait")
    assert said.code == 0
    assert said.json == {"a": 1}
    told = served("submit", "echo", "5", "--wait", "--json").json
    assert (told["status"], told["output"], told["created"]) == ("completed", 5, True)


def test_submit_waits_for_a_failure(served: Command) -> None:
    said = served("submit", "fails", '"x"', "--wait")
    assert said.code == 3
    assert said.out == ""
    assert "failed: ValueError: no good: x" in said.err.splitlines()[-1]
    told = served("submit", "fails", '"x"', "--wait", "--json")
    assert told.code == 3
    assert told.json["error"]["error_type"] == "ValueError"


def test_submit_waits_for_a_cancellation(served: Command, dsn: str, schema: str) -> None:
    waiting = hosting.spawn("submit", "waits", "--wait", "--run-id", "w", dsn=dsn, schema=schema)
    with waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "run w\n"
        assert served("cancel", "w", "--reason", "enough").code == 0
        assert waiting.wait(hosting.PATIENCE_S) == 4
        assert waiting.stderr.read() == "Error: run w was cancelled: enough\n"


def test_an_interrupted_wait_says_that_the_run_goes_on(served: Command, dsn: str, schema: str) -> None:
    waiting = hosting.spawn("submit", "waits", "--wait", "--run-id", "w", dsn=dsn, schema=schema)
    with waiting:
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == "run w\n"
        until_running(served, "w")
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(hosting.PATIENCE_S) == 130
        assert waiting.stderr.read() == "Error: interrupted; run w goes on\n"
    assert served("status", "w", "--json", "--facts", "0").json["status"] == "running"


# --- what becomes of runs -----------------------------------------------------------------------------


def test_status_of_a_missing_run(runlane: Command) -> None:
    runlane("status", NO_RUN).refused(5, NO_RUN)


def test_status_shows_the_run_its_attempts_and_its_newest_facts(served: Command) -> None:
    run_id = json.loads(served("submit", "fails", '"x"', "--wait", "--json").out)["run_id"]
    shown = served("status", run_id, "--json").json
    assert (shown["status"], shown["attempt"], shown["failures"]) == ("failed", 1, 1)
    assert [one["outcome"] for one in shown["attempts"]] == ["failed"]
    assert [one["type"] for one in shown["facts"]] == ["run.created", "run.started", "run.failed"]
    newest = served("status", run_id, "--facts", "1", "--json").json["facts"]
    assert [one["seq"] for one in newest] == [3]
    assert served("status", run_id, "--facts", "0", "--json").json["facts"] == []
    people = served("status", run_id).out
    for word in (run_id, "failed", "ValueError: no good: x", "run.created", "facts delivered"):
        assert word in people


def test_submit_with_a_concurrency_key(runlane: Command, served: Command) -> None:
    run_id = served("submit", "echo", "1", "--concurrency-key", "k", "--wait", "--json").json["run_id"]
    first = served("status", run_id, "--json").json["facts"][0]
    assert first["payload"]["concurrency_key"] == "k"


def test_steps(served: Command, dsn: str, schema: str) -> None:
    run_id = served("submit", "stepping", "[1, 0]", "--wait", "--json").json["run_id"]
    text = served("steps", run_id)
    assert text.code == 0
    shown = [line.split() for line in text.out.splitlines()]
    assert shown[0][:4] == ["step", "state", "attempt", "tries"]
    assert [line[:4] for line in shown[1:]] == [["0", "failed", "1", "1"], ["1", "completed", "1", "1"]]
    assert "ZeroDivisionError: " in text.out
    assert served("steps", run_id, "--outputs").out.splitlines()[2].rstrip().endswith("1.0")
    told = served("steps", run_id, "--json").json
    assert told["next"] is None
    assert [(step["key"], step["state"], step["final"]) for step in told["steps"]] == [
        ("0", "failed", False),
        ("1", "completed", True),
    ]
    assert "output" not in told["steps"][1]
    page = served("steps", run_id, "--limit", "1", "--outputs", "--json").json
    assert page["next"] == "0"
    (last,) = served("steps", run_id, "--after", "0", "--outputs", "--json").json["steps"]
    assert (last["key"], last["output"]) == ("1", 1.0)
    served("steps", NO_RUN).refused(5, NO_RUN)
    served("steps", "no good").refused(2, "run_id")
    served("steps", run_id, "--after", "a\n").refused(2, "key")
    none = served("submit", "echo", "--wait", "--json").json["run_id"]
    assert (served("steps", none).code, served("steps", none).err) == (0, "no steps\n")


def test_cancel(runlane: Command) -> None:
    runlane("submit", "echo", "--run-id", "c")
    assert runlane("cancel", "c", "--reason", "enough", "--json").json == {
        "run_id": "c",
        "won": True,
        "status": "cancelled",
    }
    again = runlane("cancel", "c", "--json")
    assert (again.code, again.json) == (0, {"run_id": "c", "won": False, "status": "cancelled"})
    shown = runlane("status", "c", "--json").json
    assert shown["status"] == "cancelled"
    assert shown["facts"][-1]["payload"]["reason"] == "enough"
    runlane("cancel", NO_RUN).refused(5, NO_RUN)


def test_fail(runlane: Command, dsn: str, schema: str) -> None:
    """D-27 to D-31 from the command line: what waits fails, once, and nothing else does."""
    runlane("submit", "echo", "--run-id", "f")
    runlane("fail", "f", "--reason", "why").refused(1, "does not wait", "queued")
    wait = "status = 'waiting', wait_kind = 'event', wait_key = 'go', wait_seq = 1, due_at = 'infinity'"
    ask(dsn, f"UPDATE {schema}.runs SET {wait} WHERE run_id = 'f'")
    runlane("fail", "f", "--reason", "").refused(2, "reason")
    runlane("fail", "f", "--reason", "x" * 2_001).refused(2, "reason")
    assert runlane("fail", "f").code == 2
    told = runlane("fail", "f", "--reason", "nobody answers", "--json")
    assert (told.code, told.json) == (
        0,
        {"run_id": "f", "won": True, "outcome": "failed", "status": "failed"},
    )
    end = runlane("status", "f", "--json").json["facts"][-1]["payload"]
    assert (end["error"]["message"], end["by"]) == ("nobody answers", "command line")
    again = runlane("fail", "f", "--reason", "again", "--json")
    assert (again.code, again.json["won"], again.json["outcome"]) == (1, False, "not_applicable")
    runlane("fail", NO_RUN, "--reason", "why").refused(5, NO_RUN)
    runlane("fail", "no good", "--reason", "why").refused(2, "run_id")

    runlane("submit", "echo", "--run-id", "m")
    ask(
        dsn,
        f"UPDATE {schema}.runs SET {wait} WHERE run_id = 'm'",
        f"INSERT INTO {schema}.cancellations VALUES (now(), 'm', 'r')",
    )
    runlane("fail", "m", "--reason", "why").refused(1, "about to be cancelled")
    assert runlane("status", "m", "--json").json["status"] == "waiting"


def test_event(runlane: Command) -> None:
    runlane("submit", "echo", "--run-id", "e")
    assert runlane("event", "e", "approval", '{"approved": true}').out == "kept\n"
    sent = runlane("event", "e", "go", "--event-id", "i", "--json").json
    assert sent == {"run_id": "e", "event_id": "i", "status": "kept"}
    assert [event["name"] for event in runlane("status", "e", "--json").json["kept_events"]] == [
        "approval",
        "go",
    ]
    assert "Events that no wait has taken" in runlane("status", "e").out
    assert runlane("event", "e", "go", "null", "--event-id", "i").out == "duplicate\n"
    runlane("event", "e", "go", "1", "--event-id", "i").refused(1, "used for another event")
    runlane("event", "e", "go", "{").refused(2, "JSON is not JSON")
    runlane("event", "e", "").refused(2, "name")
    runlane("event", NO_RUN, "go").refused(5, NO_RUN)
    runlane("cancel", "e")
    runlane("event", "e", "go").refused(1, "has ended")


def test_cancel_comes_too_late(served: Command) -> None:
    run_id = json.loads(served("submit", "echo", "--wait", "--json").out)["run_id"]
    served("cancel", run_id).refused(1, "already completed")
    told = served("cancel", run_id, "--json")
    assert (told.code, told.json["won"], told.json["status"]) == (1, False, "completed")


def test_lanes_are_shown_retried_and_skipped(runlane: Command, dsn: str, schema: str) -> None:
    for run_id in ("bad", "good"):
        runlane("submit", "echo", "--run-id", run_id)
    assert "no lane is blocked" in runlane("lanes", "--blocked").err
    block = (
        f"UPDATE {schema}.runs SET lane_error = 'poison', lane_due_at = 'infinity', frozen_seq = 1, lane_attempts = 1"
        " WHERE run_id = 'bad'"
    )
    ask(dsn, block)
    first = runlane("lanes", "--limit", "1", "--json").json
    assert [(lane["run_id"], lane["blocked"], lane["reason"]) for lane in first["lanes"]] == [
        ("bad", True, "poison")
    ]
    rest = runlane("lanes", "--after", first["next"], "--json").json
    assert [(lane["run_id"], lane["lane"], lane["first"]) for lane in rest["lanes"]] == [
        ("good", "lifecycle", 1)
    ]
    people = runlane("lanes", "--limit", "1")
    assert "poison" in people.out
    assert f"--after {first['next']}" in people.err
    runlane("lanes", "--after", "nonsense").refused(2, "--after", "nonsense")

    assert runlane("lanes", "retry", "bad", "--because", "fixed", "--json").json == {
        "run_id": "bad",
        "retried": True,
    }
    runlane("lanes", "retry", "bad").refused(1, "no lane of run bad is blocked")
    runlane("lanes", "skip", "bad", "1", "--because", "x").refused(1, "is not blocked")
    runlane("lanes", "skip", NO_RUN, "1", "--because", "x").refused(1, NO_RUN)
    ask(dsn, block)
    assert runlane("lanes", "skip", "bad", "1").code == 2
    runlane("lanes", "skip", "bad", "2", "--because", "x").refused(2, "seq", "1 to 1, not 2")
    skipped = runlane("lanes", "skip", "bad", "1", "--because", "no place for it", "--by", "ada")
    assert skipped.out == "skipped facts 1 to 1\n"
    assert [lane["run_id"] for lane in runlane("lanes", "--json").json["lanes"]] == ["good"]
    again = runlane("lanes", "redeliver", "bad", "1", "--because", "restored", "--json")
    assert again.json == {"run_id": "bad", "lane": "lifecycle", "first": 1, "through": 1}
    assert "is the next one anyway" in runlane("lanes", "redeliver", "bad", "1", "--because", "restored").out
    runlane("lanes", "redeliver", "bad", "3", "--because", "x").refused(2, "seq", "facts from 1 on")
    assert runlane("lanes", "redeliver", "bad", str(2**31), "--because", "x").code == 2
    told = runlane("lanes", "journal", "bad", "--json").json
    assert [(entry["verb"], entry["by"], entry["because"]) for entry in told["journal"]] == [
        ("redeliver", "command line", "restored"),
        ("skip", "ada", "no place for it"),
        ("retry", "command line", "fixed"),
    ]
    assert "no place for it" in runlane("lanes", "journal").out
    older = runlane("lanes", "journal", "--before", str(told["journal"][1]["id"]), "--json").json
    assert [entry["verb"] for entry in older["journal"]] == ["retry"]


def test_the_doctor_says_what_is_wrong_and_what_to_do(runlane: Command, dsn: str, schema: str) -> None:
    told = {finding["check"]: finding for finding in runlane("doctor", "--json").json["findings"]}
    assert told["schema"]["state"] == "ok"
    assert told["server"]["says"].startswith("PostgreSQL")
    ask(dsn, f"DROP FUNCTION {schema}.renew_leases")
    sick = runlane("doctor")
    assert sick.code == 1
    assert "renew_leases" in sick.out
    assert "→ run `runlane migrate`" in sick.out


def test_runs_filters_and_pages(runlane: Command) -> None:
    for number in range(5):
        parity = "even" if number % 2 == 0 else "odd"
        runlane("submit", "echo", "--run-id", f"r{number}", "--label", f"parity={parity}", "--org", parity)
    runlane("cancel", "r1")
    first = runlane("runs", "--limit", "2", "--json").json
    assert [run["run_id"] for run in first["runs"]] == ["r4", "r3"]
    rest = runlane("runs", "--limit", "3", "--after", first["next"], "--json").json
    assert [run["run_id"] for run in rest["runs"]] == ["r2", "r1", "r0"]
    assert runlane("runs", "--after", "r0", "--json").json == {"runs": [], "next": None}
    assert _ids(runlane("runs", "--label", "parity=even", "--json")) == ["r4", "r2", "r0"]
    assert _ids(runlane("runs", "--org", "odd", "--status", "queued", "--json")) == ["r3"]
    assert _ids(runlane("runs", "--play", "other", "--json")) == []
    people = runlane("runs", "--limit", "2")
    assert "r4" in people.out
    assert "--after r3" in people.err
    assert runlane("runs", "--status", "sleeping").code == 2


def _ids(answer: Answer) -> list[str]:
    return [run["run_id"] for run in answer.json["runs"]]


def test_schedules_are_listed_paused_shown_repaired_and_deleted(
    runlane: Command, dsn: str, schema: str, notify: bool
) -> None:
    assert "no schedules" in runlane("schedules").err
    with hosting.serving("--plays", "tests.support.scheduled", dsn=dsn, schema=schema, notify=str(notify)):
        _until(lambda: runlane("schedules", "--json").json["schedules"][1]["last_run_id"] is not None)
        yearly, secondly = runlane("schedules", "list", "--json").json["schedules"]
        assert (yearly["name"], yearly["timezone"], yearly["paused_at"]) == (
            "new-year",
            "Europe/Berlin",
            None,
        )
        assert "schedule secondly is paused" in runlane("schedules", "pause", "secondly").out
    assert secondly["every_s"] == 1
    people = runlane("schedules").out
    assert "0 0 1 1 * Europe/Berlin" in people
    assert "every 1 s" in people
    assert "paused" in people
    shown = runlane("schedules", "show", "secondly", "--json").json
    fire = shown["fires"][-1]
    assert fire["status"] is not None
    assert fire["run_id"] in runlane("schedules", "show", "secondly", "--fires", "1000").out

    there = runlane("schedules", "repair", "secondly", fire["fire_at"])
    assert (there.code, there.out.strip()) == (0, fire["run_id"])
    assert "nothing was submitted" in there.err
    ask(dsn, f"DELETE FROM {schema}.runs WHERE run_id = '{fire['run_id']}'")
    assert "lost" in runlane("schedules", "show", "secondly", "--fires", "1000").out
    again = runlane("schedules", "repair", "secondly", fire["fire_at"], "--json").json
    assert again["repaired"] is True
    assert runlane("status", again["run_id"]).code == 0

    assert runlane("schedules", "resume", "secondly", "--json").json == {"name": "secondly", "paused": False}
    assert "is deleted" in runlane("schedules", "delete", "secondly").out
    for verb in ("show", "pause", "resume", "delete"):
        runlane("schedules", verb, "secondly").refused(5, "'secondly'")
    runlane("schedules", "repair", "new-year", "2026-01-01T00:00:00Z").refused(5, "no record of a fire")
    runlane("schedules", "repair", "new-year", "yesterday").refused(2, "fire_time")
    runlane("schedules", "repair", "new-year", "2026-01-31T18:00").refused(2, "fire_time", "add Z")
    runlane("schedules", "repair", "new-year", "2026-01-01T00:00:00").refused(2, "time zone")
    runlane("schedules", "pause", "a b").refused(2, "name")


def _until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    limit = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.1)


# --- what holds runs back ----------------------------------------------------------------------------


def test_limits(runlane: Command) -> None:
    assert runlane("limits").err == "no limits\n"
    assert runlane("set-limit", "org", "acme", "3").out == "org acme: at most 3 at once\n"
    assert runlane("set-limit", "org", "acme", "3").out == "org acme: at most 3 at once, as before\n"
    assert runlane("set-limit", "org", "b", "0", "--json").json == {
        "kind": "org", "name": "b", "max_running": 0, "changed": True,
    }  # fmt: skip
    assert runlane("limits", "--json").json == {
        "limits": [
            {"kind": "org", "name": "acme", "max_running": 3, "running": 0},
            {"kind": "org", "name": "b", "max_running": 0, "running": 0},
        ]
    }
    lines = runlane("limits").out.splitlines()
    assert [line.split() for line in lines[1:]] == [["org", "acme", "3", "0"], ["org", "b", "0", "0"]]
    assert runlane("set-limit", "org", "acme", "none").out == "org acme: no limit\n"
    assert [one["name"] for one in runlane("limits", "--json").json["limits"]] == ["b"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["a", "many"], "max_running"),
        (["a", "1000001"], "max_running"),
        (["a", "-1"], "not '-1'"),
        (["a" * 256, "1"], "org_id"),
    ],
)
def test_limits_refused(runlane: Command, arguments: list[str], word: str) -> None:
    runlane("set-limit", "org", *arguments).refused(2, word)


def test_rates_are_set_and_listed(runlane: Command) -> None:
    assert "no rate scopes" in runlane("rates").err
    assert "rate scope api set" in runlane("set-rate", "api", "--per-s", "5", "--burst", "10").out
    assert runlane("set-rate", "api", "--per-s", "5", "--burst", "10", "--json").json["changed"] is False
    runlane("set-rate", "browser", "--max-in-flight", "3")
    api, browser = runlane("rates", "--json").json["rates"]
    assert (api["name"], api["per_s"], api["burst"], api["state"]) == ("api", 5.0, 10.0, "open")
    assert (browser["name"], browser["per_s"], browser["max_in_flight"]) == ("browser", None, 3)
    assert "0 of 3" in runlane("rates").out
    runlane("set-rate", "api", "--per-s", "-5").refused(2, "per_s", "from 0.00001")
    runlane("set-rate", "a b", "--per-s", "5").refused(2, "name")
    nothing = runlane("set-rate", "api")
    assert (nothing.code, "--per-s or --max-in-flight" in nothing.err) == (2, True)


def test_circuits_are_listed_and_closed(runlane: Command, dsn: str, schema: str) -> None:
    assert "no circuits" in runlane("circuits").err
    for number in range(5):
        ask(
            dsn,
            f"SELECT {schema}.report_circuits('{{crm}}', '{{{number}}}', '{{failed}}', '{{ConnectionError}}')",
        )
    (crm,) = runlane("circuits", "--json").json["circuits"]
    assert (crm["name"], crm["state"], crm["error"]) == ("crm", "open", "ConnectionError")
    shown = runlane("circuits").out
    assert "open" in shown
    assert "ConnectionError" in shown
    (crm,) = runlane("circuits", "--close", "crm", "--json").json["circuits"]
    assert crm["state"] == "closed"
    runlane("circuits", "--close", "a b").refused(2, "name")


# --- sandboxes ---------------------------------------------------------------------------------------


def test_sandboxes_are_listed_and_tried_again(runlane: Command, dsn: str, schema: str) -> None:
    assert "no sandboxes" in runlane("sandboxes").err
    assert "no sandbox is open" in runlane("sandboxes", "--open").err
    ask(
        dsn,
        f"INSERT INTO {schema}.sandboxes (sandbox, provider, run_id, attempt, created_at, due_at, certain_at,"
        " wanted_at, failures, block_reason) SELECT 'box-' || n, 'local@here', 'run-' || n, 1, now(), 'infinity',"
        " now(), now(), 20, 'gave up: no answer' FROM generate_series(1, 3) n",
    )
    page = runlane("sandboxes", "--open", "--limit", "2", "--json").json
    assert [(one["sandbox"], one["state"]) for one in page["sandboxes"]] == [
        ("box-3", "blocked"),
        ("box-2", "blocked"),
    ]
    (rest,) = runlane("sandboxes", "--after", page["next"], "--json").json["sandboxes"]
    assert (rest["sandbox"], rest["block_reason"]) == ("box-1", "gave up: no answer")
    (mine,) = runlane("sandboxes", "--run", "run-2", "--json").json["sandboxes"]
    assert mine["run_id"] == "run-2"
    assert "blocked" in runlane("sandboxes").out
    assert runlane("sandboxes", "retry", "box-1", "--json").json == {"sandbox": "box-1", "retried": True}
    runlane("sandboxes", "retry", "box-1").refused(1, "box-1", "not blocked")
    runlane("sandboxes", "retry", "nothing").refused(1, "not blocked")


def test_what_an_older_generation_left_is_adopted(runlane: Command, dsn: str, schema: str) -> None:
    adopt, table = ("sandboxes", "adopt"), f"{schema}.old_jobs"
    runlane(*adopt, "--check").refused(2, "--table")
    runlane(*adopt, "--table", table).refused(1, "no table")
    ask(dsn, f"CREATE TABLE {table} (sandbox_id text, run_id text, attempt integer, status text)")
    runlane(*adopt, "--table", table, "--check").refused(1, "column lease_owner")
    ask(
        dsn,
        f"ALTER TABLE {table} ADD environment text, ADD routing_domain text, ADD attempt_count integer,"
        " ADD failure_count integer, ADD available_at timestamptz, ADD last_error text, ADD created_at timestamptz,"
        " ADD updated_at timestamptz, ADD blocked_at timestamptz, ADD block_reason text, ADD lease_owner text,"
        " ADD lease_expires_at timestamptz, ADD deleted_at timestamptz",
        f"INSERT INTO {table} SELECT 'box-' || n, nullif(n, 3)::text, 1, 'pending' FROM generate_series(1, 3) n",
    )
    there = ("--table", table, "--provider", "modal")
    check = runlane(*adopt, *there, "--check", "--json").json
    assert (check["provider"], check["open"], check["to_copy"], check["malformed"]) == ("modal", 3, 2, 1)
    assert "'box-3'" in check["faults"][0]
    assert "no sandboxes" in runlane("sandboxes").err
    said = runlane(*adopt, *there).out
    assert "copied 2, marked 0 as deleted" in said
    assert "no run id" in said
    assert "reads the whole table" in said
    again = runlane(*adopt, *there, "--json").json
    assert (again["copied"], again["settled"], again["under_way"], again["to_copy"]) == (0, 0, 2, 0)
    found = runlane("sandboxes", "--open", "--json").json["sandboxes"]
    assert [(one["provider"], one["provider_id"]) for one in found] == [
        ("modal", "box-2"),
        ("modal", "box-1"),
    ]


def test_compute_is_listed_in_pages_of_lines(runlane: Command, dsn: str, schema: str) -> None:
    assert "no compute records" in runlane("compute").err
    ask(
        dsn,
        f"INSERT INTO {schema}.compute_records SELECT now(), now() + interval '20 s', now() + n * interval '1 s', 1,"
        " 'run-' || n || ':runner:1', 'run-' || n, 'runner', 'local@here', 'acme' FROM generate_series(1, 3) n",
    )
    lines = [json.loads(line) for line in runlane("compute", "--limit", "2", "--json").out.splitlines()]
    assert [(one["run_id"], one["seconds"]) for one in lines] == [("run-1", 20.0), ("run-2", 20.0)]
    rest = runlane("compute", "--after", lines[-1]["after"], "--json").json
    assert rest["record_id"] == "run-3:runner:1"
    assert "acme" in runlane("compute").out
    runlane("compute", "--after", "yesterday").refused(2, "--after")


# --- the log format ----------------------------------------------------------------------------------


def test_a_log_line_is_one_line_of_pairs() -> None:
    formatter = logs.KeyValueFormatter()
    line = formatter.format(
        logging.makeLogRecord({"name": "runlane.claim", "msg": "event=claimed runs=%d", "args": (3,)})
    )
    assert line.startswith("time=")
    assert line.endswith(" logger=runlane.claim event=claimed runs=3")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.makeLogRecord({"name": "other", "msg": 'say "hi"', "exc_info": sys.exc_info()})
    line = formatter.format(record)
    assert "\n" not in line
    assert ' message="say \\"hi\\"" traceback="' in line
