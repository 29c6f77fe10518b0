"""Door of the concern schedules: what fires when, and one run per fire.

Owns the typed calls and the records of schedules and fires. It never computes when something fires: whoever calls
does, from the times that it reads here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call
from sql.connection import Session


@attrs.frozen(kw_only=True)
class Definition:
    """A schedule as it was declared. ``input``, ``labels`` and ``extras`` are JSON text.

    ``extras`` are those of ``Submission``. One of ``cron`` and ``every_s`` is None.
    """

    name: str
    play: str
    input: str
    cron: str | None
    every_s: int | None
    timezone: str
    missed: str
    priority: int = 0
    org_id: str | None = None
    labels: str | None = None
    extras: str | None = None
    release_id: str | None = None
    environment: str | None = None


@attrs.frozen
class ScheduleStatus:
    """What is now: one schedule. Times are of the database clock.

    ``input`` is as it is stored, which a codec may make unreadable. ``paused_at`` is None unless it is paused.
    ``last_fire_at`` and ``last_run_id`` are of its latest fire, as long as that is kept.
    """

    name: str
    play: str
    cron: str | None
    every_s: int | None
    timezone: str
    missed: str
    priority: int
    org_id: str | None
    labels: Mapping[str, str] | None
    input: Any
    release_id: str | None
    environment: str | None
    paused_at: datetime | None
    next_fire_at: datetime
    last_fire_at: datetime | None
    last_run_id: str | None
    created_at: datetime
    updated_at: datetime


@attrs.frozen
class Fire:
    """One fire: when it was due, when its run was made, and the run's status (None: the run is not there any more)."""

    fire_at: datetime
    fired_at: datetime
    run_id: str
    status: str | None


@attrs.frozen
class DueSchedule:
    """A schedule whose next fire has come; ``now`` is the database's time."""

    name: str
    next_fire_at: datetime
    revision: int
    cron: str | None
    every_s: int | None
    timezone: str
    missed: str
    now: datetime


@attrs.frozen
class Firing:
    """What to fire of one schedule as it was read, and when it fires next."""

    due: DueSchedule
    fire_ats: Sequence[datetime]
    next_fire_at: datetime


@attrs.frozen
class Fired:
    """``answer``: ``done`` or ``lost`` (somebody else fired, changed or paused it, or holds it). ``lags_s``: seconds
    from due to created, of each run made."""

    answer: str
    lags_s: Sequence[float]


async def put(session: Session, item: Definition, next_after: Callable[[datetime], datetime]) -> str:
    """Create or change a schedule. ``next_after`` gives the first fire after the database's time. Safe to repeat.

    ``created``, ``changed``, ``unchanged``, ``busy`` (somebody holds it: ask again), ``environment`` (the name is taken
    in another one) or ``unknown_play``.
    """
    schema = session.options.schema
    now: datetime = await session.fetchval(call(schema, "clock", 0))
    answer: str = await session.fetchval(
        call(schema, "put_schedule", 14),
        item.name,
        item.play,
        item.input,
        item.cron,
        item.every_s,
        item.timezone,
        item.missed,
        item.priority,
        item.org_id,
        item.labels,
        item.extras,
        item.release_id,
        item.environment,
        next_after(now),
    )
    return answer


async def adopt(
    session: Session, plays: Sequence[str], *, release_id: str | None, environment: str | None
) -> int:
    """Let the schedules of these plays submit to this release; how many are held and left. Safe to repeat."""
    left: int = await session.fetchval(
        call(session.options.schema, "adopt_schedules", 3), list(plays), release_id, environment
    )
    return left


async def pause(session: Session, name: str, *, paused: bool) -> str:
    """``done``, ``busy`` or ``missing``. Safe to repeat."""
    answer: str = await session.fetchval(call(session.options.schema, "pause_schedule", 2), name, paused)
    return answer


async def delete(session: Session, name: str) -> str:
    """``done``, ``busy`` or ``missing`` (which a repeated call hears, too)."""
    answer: str = await session.fetchval(call(session.options.schema, "delete_schedule", 1), name)
    return answer


async def due(session: Session, *, limit: int) -> tuple[list[DueSchedule], float | None]:
    """Schedules to fire now, and the seconds until the first that is not due yet (None: there is none)."""
    rows = await session.fetch(call(session.options.schema, "due_schedules", 1), limit)
    values = [dict(row) for row in rows]
    next_due_s = values[-1]["next_due_s"]
    for value in values:
        del value["next_due_s"]
    return [DueSchedule(**value) for value in values[:-1]], next_due_s


async def fire(session: Session, items: Sequence[Firing]) -> list[Fired]:
    """Fire, each schedule if it still stands as it was read; one answer each, in order. Safe to repeat."""
    rows = await session.fetch(
        call(session.options.schema, "fire_schedules", 6),
        [item.due.name for item in items],
        [item.due.next_fire_at for item in items],
        [item.due.revision for item in items],
        [item.next_fire_at for item in items],
        [item.due.name for item in items for _ in item.fire_ats],
        [moment for item in items for moment in item.fire_ats],
    )
    return [Fired(row["answer"], row["lags_s"] or ()) for row in sorted(rows, key=lambda row: row["ord"])]


async def repair(session: Session, name: str, fire_at: datetime) -> tuple[str, str | None]:
    """Submit a recorded fire again if its run is gone. Safe to repeat.

    ``repaired`` or ``existing`` with the run's id, ``busy``, ``no_schedule`` or ``no_fire``.
    """
    row = await session.fetchrow(call(session.options.schema, "repair_fire", 2), name, fire_at)
    assert row is not None
    return row["answer"], row["run_id"]


async def read(session: Session, names: Sequence[str] | None = None) -> list[ScheduleStatus]:
    """These schedules, or all, by name. Missing ones are left out."""
    rows = await session.fetch(
        call(session.options.schema, "read_schedules", 1), None if names is None else list(names)
    )
    return [_status(row) for row in rows]


async def fires(session: Session, name: str, *, limit: int, before: datetime | None = None) -> list[Fire]:
    """Fires of a schedule, latest first, due before ``before``."""
    rows = await session.fetch(call(session.options.schema, "read_fires", 3), name, before, limit)
    return [Fire(**dict(row)) for row in rows]


def _status(row: Any) -> ScheduleStatus:
    values = dict(row)
    values["labels"] = None if row["labels"] is None else json.loads(row["labels"])
    values["input"] = json.loads(row["input"])
    return ScheduleStatus(**values)
