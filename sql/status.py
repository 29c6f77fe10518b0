"""Door of the concern status: reading runs.

Owns the typed reads of single runs, pages, terminals and the backlog. Nothing here writes or locks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call
from sql.connection import Session
from sql.performance import performance_of
from sql.runners import read_runner
from sql.types import SCOPES, SURFACES, TRIGGERS, RunDetails, RunStatus, WaitRecord


@attrs.define(slots=True)
class Terminal:
    """How a run ended. ``status`` is None for a run that does not exist; ``payload`` is the decoded terminal fact."""

    run_id: str
    status: str | None
    payload: Any


@attrs.frozen
class AttemptRecord:
    """One attempt that has ended."""

    attempt: int
    outcome: str
    host: str
    started_at: datetime
    ended_at: datetime
    error: Any


@attrs.frozen
class Backlog:
    """Open work, each number counted up to a limit; ``oldest_snapshot_s`` is the age of the oldest open one.

    ``kept`` are all runs by status, as maintenance counted them ``kept_age_s`` ago (None: not yet).
    """

    queued: int
    waiting: int
    running: int
    lifecycle: int
    observability: int
    blocked: int
    oldest_snapshot_s: float | None
    kept: Mapping[str, int]
    kept_age_s: float | None


async def read_runs(session: Session, run_ids: Sequence[str]) -> dict[str, RunStatus]:
    """What is now, for those of the runs that exist."""
    rows = await session.fetch(call(session.options.schema, "read_runs", 1), list(run_ids))
    return {row["run_id"]: _status(row, session.options.schema) for row in rows}


async def read_run(session: Session, run_id: str, *, full: bool) -> RunStatus | None:
    """What is now; with ``full`` with its details. None for a run that does not exist."""
    found = (await read_runs(session, [run_id])).get(run_id)
    if found is None or not full:
        return found
    row = await session.fetchrow(call(session.options.schema, "read_run_details", 1), run_id)
    if row is None:
        return None
    details = _details(row)
    if details.runtime_backend is not None and found.status == "running":
        details = attrs.evolve(details, runner=await read_runner(session, run_id, found.attempt))
    return attrs.evolve(found, details=details)


async def list_runs(
    session: Session,
    *,
    status: str | None,
    play: str | None,
    org_id: str | None,
    labels: str | None,
    limit: int,
    after: str | None,
) -> list[RunStatus]:
    """One page of runs, newest id first, with ids below ``after``. ``labels`` is JSON text."""
    rows = await session.fetch(
        call(session.options.schema, "list_runs", 6), status, play, org_id, labels, limit, after
    )
    run_ids = [row[0] for row in rows]
    found = await read_runs(session, run_ids)
    return [found[run_id] for run_id in run_ids if run_id in found]


async def read_terminals(session: Session, run_ids: Sequence[str]) -> list[Terminal]:
    """Terminals of those of the runs that have ended or do not exist; open runs are left out."""
    rows = await session.fetch(call(session.options.schema, "read_terminals", 1), list(run_ids))
    return [
        Terminal(row["run_id"], row["status"], None if row["payload"] is None else json.loads(row["payload"]))
        for row in rows
    ]


async def read_attempts(session: Session, run_id: str) -> list[AttemptRecord]:
    """The ended attempts of a run, oldest first."""
    rows = await session.fetch(call(session.options.schema, "read_attempts", 1), run_id)
    return [
        AttemptRecord(
            row["attempt"],
            row["outcome"],
            row["host"],
            row["started_at"],
            row["ended_at"],
            None if row["error"] is None else json.loads(row["error"]),
        )
        for row in rows
    ]


async def backlog(session: Session, *, limit: int = 10_000) -> Backlog:
    """Open work. Costs at most ``limit`` index entries per number, whatever has ended."""
    row = await session.fetchrow(call(session.options.schema, "backlog", 1), limit)
    assert row is not None
    return Backlog(**{**dict(row), "kept": json.loads(row["kept"] or "{}")})


def _status(row: Any, schema: str) -> RunStatus:
    values = dict(row, schema=schema)
    values["labels"] = None if row["labels"] is None else json.loads(row["labels"])
    values["facts_last"] = values.pop("last_seq")
    values["facts_delivered"] = values.pop("acked_seq")
    values["lane_blocked"] = values.pop("lane_error")
    values["waits"] = tuple(_wait(wait) for wait in json.loads(row["waits"] or "[]"))
    return RunStatus(**values)


def _wait(record: Mapping[str, Any]) -> WaitRecord:
    since, until = record["since"], record["until"]
    return WaitRecord(
        record["kind"],
        record["key"],
        record["name"],
        datetime.fromisoformat(since),
        None if until is None else datetime.fromisoformat(until),
    )


def _details(row: Any) -> RunDetails:
    launch = json.loads(row["launch"])
    terminal = None if row["terminal"] is None else json.loads(row["terminal"])
    performance, unavailable = performance_of(terminal)

    def known(name: str, words: Sequence[str]) -> str | None:
        return launch[name] if launch.get(name) in words else None

    return RunDetails(
        accepted_at=row["accepted_at"],
        surface=known("surface", SURFACES),
        trigger=known("trigger", TRIGGERS),
        scope=known("scope", SCOPES),
        unique_key=(launch.get("unique") or {}).get("key"),
        idempotency_key=row["idempotency_key"],
        concurrency_key=row["concurrency_key"],
        array_input=row["array_input"],
        receiver=row["receiver"],
        terminal_receiver=row["terminal_receiver"],
        lane_failure=row["lane_failure"],
        log_lane_blocked=row["log_lane_error"],
        served=row["served"],
        lane_served=row["lane_served"],
        terminal=terminal,
        runtime_backend=row["runtime_backend"],
        performance=performance,
        performance_unavailable=unavailable,
    )
