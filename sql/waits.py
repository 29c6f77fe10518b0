"""Door of the concern waits: what runs wait for, and what wakes them.

Owns the typed calls of ``try_waits`` and ``sweep_wakes``, and how a wait is written. It never parks: ``sql.settle``
does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call
from sql.connection import Session


@attrs.frozen(slots=True)
class WaitState:
    """What the database knows of a wait.

    ``left_s``: seconds until it passes or is given up, None without such a moment. ``payload`` is JSON text: what came,
    or None where only time passed. ``stored``: there is a payload, to be read with ``read_payload``. ``name`` is the
    event's, or the child's run id.
    """

    kind: str
    name: str | None
    done: bool
    left_s: float | None = None
    payload: str | None = None
    stored: bool = False


@attrs.define(slots=True)
class Wait:
    """A durable wait that an attempt stands at: a ``kind`` of sleep, event, approval or child under its ``key``.

    It passes by itself, or is given up, after ``delay_s`` seconds or at ``until``; with neither never.
    """

    key: str
    kind: str
    name: str | None = None
    delay_s: float | None = None
    until: datetime | None = None

    def as_json(self) -> dict[str, Any]:
        """As the kernel takes it."""
        record: dict[str, Any] = {"key": self.key, "kind": self.kind}
        if self.name is not None:
            record["name"] = self.name
        if self.delay_s is not None:
            record["delay_s"] = self.delay_s
        if self.until is not None:
            record["until"] = self.until.isoformat()
        return record


@attrs.define(slots=True)
class Trial:
    """Waits that one live attempt stands at."""

    run_id: str
    attempt: int
    token: int
    waits: Sequence[Wait]


@attrs.define(slots=True)
class Tried:
    """``answer``: ``done`` with the states of the waits by key, ``busy`` (the row is locked: ask again) or ``lost``."""

    answer: str
    states: Mapping[str, WaitState]


def waits_text(waits: Sequence[Wait]) -> str:
    """The JSON text of waits."""
    return json.dumps([wait.as_json() for wait in waits])


def wait_states(text: str) -> dict[str, WaitState]:
    """The states by key, from what the kernel's ``run_waits`` gives. A sleep is a bare number of seconds, or null."""
    return {
        key: WaitState(**state)
        if isinstance(state, dict)
        else WaitState("sleep", None, state is None, None if state is None else float(state))
        for key, state in json.loads(text).items()
    }


async def try_waits(session: Session, items: Sequence[Trial]) -> list[Tried]:
    """Register waits of live attempts and pass those that can pass; one answer each, in order. Safe to repeat."""
    rows = await session.fetch(
        call(session.options.schema, "try_waits", 4),
        [item.run_id for item in items],
        [item.attempt for item in items],
        [item.token for item in items],
        [waits_text(item.waits) for item in items],
    )
    return [
        Tried(row["answer"], {} if row["states"] is None else wait_states(row["states"]))
        for row in sorted(rows, key=lambda row: row["ord"])
    ]


async def sweep(session: Session, *, limit: int) -> tuple[int, bool]:
    """Look at the runs that somebody has something for: how many are due now, and whether wakes are left."""
    row = await session.fetchrow(call(session.options.schema, "sweep_wakes", 1), limit)
    assert row is not None
    return row["woken"], row["remaining"]


async def read_payload(session: Session, run_id: str, key: str) -> str | None:
    """What a wait was given, as JSON text."""
    found: str | None = await session.fetchval(
        call(session.options.schema, "read_wait_payload", 2), run_id, key
    )
    return found
