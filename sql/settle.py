"""Door of the concern settle: attempts end.

Owns the typed calls of ``settle_attempts`` and ``park_attempts``. It never chooses an outcome.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sql.calls import call
from sql.claim import fence_columns
from sql.connection import Session


@attrs.define(slots=True)
class Settlement:
    """The end of one attempt. ``payload`` and ``waits`` are JSON text, ``delay_s`` seconds.

    ``outcome``: ``completed`` and ``failed`` end the run; ``retried`` charges a failure and queues it again after
    ``delay_s``; ``deferred`` and ``released`` charge nothing; ``parked`` waits for ``waits``, a list of
    ``{"key", "kind", "delay_s"}``.
    """

    run_id: str
    attempt: int
    token: int
    outcome: str
    payload: str = "{}"
    delay_s: float = 0.0
    waits: str = "[]"
    play: str = ""
    """For the host's own metrics; the database has it."""
    replaced: bool = False
    """It stands for an ending that the database refused."""


@attrs.define(slots=True)
class Settled:
    """``answer``: ``done``, ``busy`` (the row is locked: ask again) or ``lost``; ``status``: the run's, if lost."""

    answer: str
    status: str | None


async def settle(session: Session, items: Sequence[Settlement]) -> list[Settled]:
    """End attempts (any outcome but ``parked``); one answer each, in order. Safe to repeat: fenced."""
    rows = await session.fetch(
        call(session.options.schema, "settle_attempts", 6),
        *fence_columns(items),
        [item.outcome for item in items],
        [item.payload for item in items],
        [item.delay_s for item in items],
    )
    return [Settled(row["answer"], row["status"]) for row in sorted(rows, key=lambda row: row["ord"])]


async def park(session: Session, items: Sequence[Settlement]) -> list[Settled]:
    """Park attempts on their waits; one answer each, in order. Safe to repeat: fenced."""
    rows = await session.fetch(
        call(session.options.schema, "park_attempts", 4),
        *fence_columns(items),
        [item.waits for item in items],
    )
    return [Settled(row["answer"], row["status"]) for row in sorted(rows, key=lambda row: row["ord"])]
