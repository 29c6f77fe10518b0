"""Schedules as callers see them: what is declared becomes a row, or is refused by name.

Owns every check of a schedule before the database sees anything, and what the answers mean. It never fires.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import attrs

from actors.cron import Timing, zone
from runtime.codec import preview
from runtime.link import Link
from runtime.plays import NAME_PATTERN, Play
from runtime.submit import Submit
from sql import schedules as door
from sql.connection import Session
from sql.errors import FireNotFound, InputRefused, ScheduleNotFound, UnknownPlay
from sql.schedules import Definition, Fire, ScheduleStatus

MISSED = ("skip", "last", "all")
MAX_EVERY_S = 366 * 86_400
MAX_CRON_CHARS = 255
OWN_LABELS = ("schedule", "fire_at")
"""Labels that every run of a schedule gets from it."""
MAX_LABELS = 30
MAX_LISTED = 1_000

_NAME = re.compile(NAME_PATTERN)


@attrs.frozen
class Schedule:
    """What fires when: for ``Runtime.open(schedules=[…])``, with the arguments of ``Runtime.schedule``."""

    name: str
    play: Play | str
    input: Any = None
    cron: str | None = attrs.field(default=None, kw_only=True)
    every_s: int | None = attrs.field(default=None, kw_only=True)
    timezone: str = attrs.field(default="UTC", kw_only=True)
    missed: str = attrs.field(default="last", kw_only=True)
    org_id: str | None = attrs.field(default=None, kw_only=True)
    priority: int = attrs.field(default=0, kw_only=True)
    labels: Mapping[str, str] | None = attrs.field(default=None, kw_only=True)
    concurrency_key: str | None = attrs.field(default=None, kw_only=True)


class Schedules:
    """The verbs of schedules, over whatever carries the calls."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def put(self, item: Schedule) -> ScheduleStatus:
        """Create or change; what stands then."""
        definition, timing = await self._prepare(item)

        async def make(session: Session) -> ScheduleStatus | None:
            answer = await door.put(session, definition, timing.after)
            if answer == "unknown_play":
                raise UnknownPlay("play", f"no host has ever registered a play named {definition.play!r}")
            if answer == "environment":
                raise InputRefused("name", f"{definition.name!r} is a schedule of another environment")
            found = None if answer == "busy" else await door.read(session, [definition.name])
            return found[0] if found else None  # None also when somebody deleted it in between: once more

        status: ScheduleStatus = await self._link.change(make)
        return status

    async def all(self) -> list[ScheduleStatus]:
        """Every schedule, by name."""
        found: list[ScheduleStatus] = await self._link.ask(door.read)
        return found

    async def pause(self, name: str, *, paused: bool) -> None:
        """Pause or resume. Raises ScheduleNotFound."""
        check_name(name)
        answer = await self._link.change(
            lambda session: _unless_busy(door.pause(session, name, paused=paused))
        )
        if answer == "missing":
            raise ScheduleNotFound(name)

    async def delete(self, name: str) -> bool:
        """Whether it was there."""
        check_name(name)
        answer = await self._link.change(lambda session: _unless_busy(door.delete(session, name)))
        return bool(answer == "done")

    async def fires(self, name: str, limit: int, before: datetime | None) -> list[Fire]:
        """Its fires, latest first. Raises ScheduleNotFound for a name that has none and never had."""
        check_name(name)
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LISTED:
            raise InputRefused(
                "limit", f"must be a whole number from 1 to {MAX_LISTED}, not {preview(limit)}"
            )
        until = None if before is None else check_moment("before", before)

        async def read(session: Session) -> list[Fire]:
            found = await door.fires(session, name, limit=limit, before=until)
            if not found and not await door.read(session, [name]):
                raise ScheduleNotFound(name)
            return found

        answer: list[Fire] = await self._link.ask(read)
        return answer

    async def repair(self, name: str, fire_time: datetime) -> tuple[str, bool]:
        """The run of a fire, and whether it had to be submitted again. Raises ScheduleNotFound or FireNotFound."""
        check_name(name)
        moment = check_moment("fire_time", fire_time)

        async def make(session: Session) -> tuple[str, str | None] | None:
            answer = await door.repair(session, name, moment)
            return None if answer[0] == "busy" else answer

        outcome, run_id = await self._link.change(make)
        if outcome == "no_schedule":
            raise ScheduleNotFound(name)
        if outcome == "no_fire":
            raise FireNotFound(name, moment)
        assert run_id is not None
        return run_id, outcome == "repaired"

    async def _prepare(self, item: Schedule) -> tuple[Definition, Timing]:
        """Every check there is. Raises InputRefused (PayloadRefused, UnknownPlay) naming the field."""
        name = check_name(item.name)
        timing = check_timing(item.cron, item.every_s, item.timezone)
        if item.missed not in MISSED:
            raise InputRefused("missed", f"must be one of {', '.join(MISSED)}, not {preview(item.missed)}")
        checked = await self._link.submissions.prepare(
            Submit(
                item.play,
                item.input,
                org_id=item.org_id,
                priority=item.priority,
                labels=item.labels,
                concurrency_key=item.concurrency_key,
                trigger="schedule",
            )
        )
        for label in item.labels or ():
            if label in OWN_LABELS:
                raise InputRefused("labels", f"{label!r} is the schedule's own: every run of it gets it")
        if len(item.labels or ()) > MAX_LABELS:
            raise InputRefused("labels", f"at most {MAX_LABELS} labels beside the schedule's own two")
        definition = Definition(
            name=name,
            play=checked.play,
            input=checked.input,
            cron=timing.cron,
            every_s=timing.every_s,
            timezone=timing.timezone,
            missed=item.missed,
            priority=checked.priority,
            org_id=checked.org_id,
            labels=checked.labels,
            extras=checked.extras,
            release_id=self._link.config.release_id,
            environment=self._link.config.environment,
        )
        return definition, timing


def check_declared(items: Iterable[Any]) -> list[Schedule]:
    """The schedules that a host declares, or InputRefused: no schedule at all, two of one name, a bad time."""
    if not isinstance(items, Iterable):
        raise InputRefused("schedules", f"must be a list of Schedule(…), not {preview(items)}")
    names: set[str] = set()
    declared = list(items)
    for item in declared:
        if not isinstance(item, Schedule):
            raise InputRefused("schedules", f"must be Schedule(…), not {preview(item)}")
        if check_name(item.name) in names:
            raise InputRefused("schedules", f"schedule {item.name!r} is declared twice")
        check_timing(item.cron, item.every_s, item.timezone)
        names.add(item.name)
    return declared


async def _unless_busy(answer: Awaitable[str]) -> str | None:
    said = await answer
    return None if said == "busy" else said


def check_name(value: Any) -> str:
    """``value``, or InputRefused naming the rule."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InputRefused(
            "name", f"must be 1 to 128 characters of A-Z a-z 0-9 . _ : -, not {preview(value)}"
        )
    return value


def check_timing(cron: Any, every_s: Any, timezone: Any) -> Timing:
    """The timing of a schedule, or InputRefused naming ``cron``, ``every_s`` or ``timezone``."""
    if (cron is None) == (every_s is None):
        raise InputRefused("cron", "give a cron line or every_s, and not both")
    if not isinstance(timezone, str) or not 1 <= len(timezone) <= MAX_CRON_CHARS:
        raise InputRefused("timezone", f"must be a name as in 'Europe/Berlin', not {preview(timezone)}")
    if every_s is not None:
        if isinstance(every_s, bool) or not isinstance(every_s, int) or not 1 <= every_s <= MAX_EVERY_S:
            allowed = f"a whole number of seconds from 1 to {MAX_EVERY_S} (366 days)"
            raise InputRefused("every_s", f"must be {allowed}, not {preview(every_s)}")
        if timezone != "UTC":
            raise InputRefused(
                "timezone", "goes with a cron line: an interval is the same in every time zone"
            )
        return Timing(None, every_s, timezone)
    if not isinstance(cron, str) or not 1 <= len(cron) <= MAX_CRON_CHARS:
        raise InputRefused("cron", f"must be text of 1 to {MAX_CRON_CHARS} characters, not {preview(cron)}")
    zone(timezone)
    timing = Timing(" ".join(cron.split()), None, timezone)
    timing.after(datetime.now(UTC))  # refuses what cannot be read or never fires
    return timing


def check_moment(field: str, value: Any) -> datetime:
    """``value`` in UTC, or InputRefused: a datetime with a time zone."""
    if not isinstance(value, datetime) or value.tzinfo is None or value.utcoffset() is None:
        raise InputRefused(field, f"must be a datetime with a time zone, not {preview(value)}")
    try:
        return value.astimezone(UTC)
    except OverflowError:
        raise InputRefused(field, "is outside the years 1 to 9999 in UTC") from None
