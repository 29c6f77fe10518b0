"""Door of the concern facts: what a live attempt says, and reading a run's log.

Owns the typed calls of ``append_facts`` and ``read_facts``. It never numbers facts: the kernel does.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs

from sql.calls import call
from sql.claim import fence_columns
from sql.connection import Session
from sql.types import Fact, Lane

_PAGE = 1000


@attrs.define(slots=True)
class Saying:
    """One fact of a live attempt. ``ordinal`` counts the attempt's facts from 1; ``payload`` is JSON text."""

    run_id: str
    attempt: int
    token: int
    ordinal: int
    lane: int
    type: str
    payload: str


async def append(session: Session, items: Sequence[Saying]) -> list[str]:
    """Append facts; ``done``, ``busy`` (ask again) or ``lost`` each, in order. Safe to repeat: by ordinal."""
    rows = await session.fetch(
        call(session.options.schema, "append_facts", 7),
        *fence_columns(items),
        [item.ordinal for item in items],
        [item.lane for item in items],
        [item.type for item in items],
        [item.payload for item in items],
    )
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]


async def read(session: Session, run_id: str) -> list[Fact]:
    """Every fact of a run: the lifecycle lane in order, then observability. Reads in pages."""
    found: list[Fact] = []
    lane, seq = -1, 0
    while True:
        rows = await session.fetch(call(session.options.schema, "read_facts", 4), run_id, lane, seq, _PAGE)
        found += [
            Fact(
                run_id,
                Lane(row["lane"]),
                row["seq"],
                row["type"],
                json.loads(row["payload"]),
                row["created_at"],
            )
            for row in rows
        ]
        if len(rows) < _PAGE:
            return found
        lane, seq = rows[-1]["lane"], rows[-1]["seq"]
