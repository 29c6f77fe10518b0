"""Door of the concern journal: what operators do to lanes, and the record of it.

Owns the typed calls of ``lane_list``, ``retry_lane``, ``skip_lane``, ``redeliver_lane`` and ``read_journal``, and the
names of their refusals. It never delivers anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sql.calls import call
from sql.connection import Session
from sql.errors import InputRefused, KernelRefused
from sql.types import JournalEntry, Lane, LaneStatus

_REFUSED = "RL001"


async def list_lanes(
    session: Session, *, blocked: bool, limit: int, after: tuple[bool, str, Lane] | None
) -> list[LaneStatus]:
    """One page of lanes with something to deliver, blocked ones first. ``after``: whether the last lane of the page
    before was blocked, its run and its lane."""
    was_blocked, run_id, lane = (None, None, None) if after is None else after
    rows = await session.fetch(
        call(session.options.schema, "lane_list", 5), blocked, limit, was_blocked, run_id, lane
    )
    return [LaneStatus(**{**row, "lane": Lane(row["lane"])}) for row in map(dict, rows)]


async def read_journal(
    session: Session, *, run_id: str | None, limit: int, before: int | None
) -> list[JournalEntry]:
    """Entries of the journal, newest first, with ids below ``before``."""
    rows = await session.fetch(call(session.options.schema, "read_journal", 3), run_id, limit, before)
    return [JournalEntry(**{**row, "lane": Lane(row["lane"])}) for row in map(dict, rows)]


async def retry_lane(
    session: Session, run_id: str, *, because: str | None, by: str | None, notify: bool
) -> bool:
    """Let a run's blocked lanes be delivered again; whether one was blocked."""
    options = {"because": because, "by": by, "notify": notify}
    answer = await _called(session, "retry_lane", run_id, json.dumps(options))
    return bool(answer[0]["retry_lane"])


async def skip_lane(
    session: Session, run_id: str, seq: int, *, lane: Lane, because: str | None, by: str | None, notify: bool
) -> tuple[int, int]:
    """Give up the facts of a run's blocked prefix up to ``seq``; the first and the last that were. Safe to repeat.

    Raises ``InputRefused`` for a lane that is not blocked, or a fact that is not in the blocked prefix.
    """
    options = {"because": because, "by": by, "lane": lane.label, "notify": notify}
    (row,) = await _called(session, "skip_lane", run_id, seq, json.dumps(options))
    return row["first"], row["through"]


async def redeliver_lane(
    session: Session, run_id: str, seq: int, *, lane: Lane, because: str | None, by: str | None, notify: bool
) -> tuple[int, int]:
    """Deliver what was delivered of a run's lane again, from ``seq`` on; the first and the last fact that are.

    Raises ``InputRefused`` for a run without such a lane and for a fact that has yet to be delivered.
    """
    options = {"because": because, "by": by, "lane": lane.label, "notify": notify}
    (row,) = await _called(session, "redeliver_lane", run_id, seq, json.dumps(options))
    return row["first"], row["through"]


async def _called(session: Session, name: str, *args: Any) -> Sequence[Any]:
    try:
        return await session.fetch(call(session.options.schema, name, len(args)), *args)
    except KernelRefused as exc:
        if exc.sqlstate != _REFUSED:
            raise
        # The driver's text repeats the detail on a line of its own; what was refused stands on the first.
        message = str(exc).removesuffix(f" ({exc.detail}) [{exc.sqlstate}]")
        raise InputRefused((exc.detail or "").removeprefix("options."), message.partition(": ")[2]) from exc
