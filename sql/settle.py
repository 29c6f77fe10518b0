"""Door of the concern settle: attempts end.

Owns the typed calls of ``settle_attempts``, ``defer_attempts`` and ``park_attempts``. It never chooses an outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import attrs

from sql.calls import call
from sql.claim import fence_columns
from sql.connection import Session


@attrs.define(slots=True)
class Settlement:
    """The end of one attempt. ``payload`` and ``waits`` are JSON text, ``delay_s`` seconds.

    ``outcome``: ``completed`` and ``failed`` end the run; ``retried`` charges a failure and queues it again after
    ``delay_s``; ``deferred`` and ``released`` charge nothing; ``parked`` waits for ``waits``, as
    ``sql.waits.waits_text`` writes them.

    A deferral with ``outage_max_s`` is bounded: once the outage that its payload's error kind names has lasted that
    many seconds, the run ends as failed with the payload ``overdue`` instead.
    """

    run_id: str
    attempt: int
    token: int
    outcome: str
    payload: str = "{}"
    delay_s: float = 0.0
    waits: str = "[]"
    outage_max_s: float | None = None
    overdue: str = "{}"
    play: str = ""
    """For the host's own metrics; the database has it."""
    replaced: bool = False
    """It stands for an ending that the database refused."""


@attrs.define(slots=True)
class Settled:
    """``answer``: ``done``, ``busy`` (the row is locked: ask again) or ``lost``; ``status``: the run's, if lost.

    Of a bounded deferral also ``over`` (the outage has lasted too long: nothing was written) and ``outage_at``, when it
    began, unless lost.
    """

    answer: str
    status: str | None
    outage_at: datetime | None = None
    woke: bool = False
    """A run that waits for this one's end has a wake."""


async def settle(session: Session, items: Sequence[Settlement]) -> list[Settled]:
    """End attempts (any outcome but ``parked``); one answer each, in order. Safe to repeat: fenced."""
    rows = await session.fetch(
        call(session.options.schema, "settle_attempts", 6),
        *fence_columns(items),
        [item.outcome for item in items],
        [item.payload for item in items],
        [item.delay_s for item in items],
    )
    return [
        Settled(row["answer"], row["status"], woke=row["woke"])
        for row in sorted(rows, key=lambda row: row["ord"])
    ]


async def defer(session: Session, items: Sequence[Settlement]) -> list[Settled]:
    """Defer attempts by an outage, within their ``outage_max_s``; one answer each, in order. Safe to repeat: fenced."""
    rows = await session.fetch(
        call(session.options.schema, "defer_attempts", 6),
        *fence_columns(items),
        [item.payload for item in items],
        [item.delay_s for item in items],
        [item.outage_max_s for item in items],
    )
    return [
        Settled(row["answer"], row["status"], row["outage_at"])
        for row in sorted(rows, key=lambda row: row["ord"])
    ]


async def park(session: Session, items: Sequence[Settlement]) -> list[Settled]:
    """Park attempts on their waits; one answer each, in order. Safe to repeat: fenced."""
    rows = await session.fetch(
        call(session.options.schema, "park_attempts", 4),
        *fence_columns(items),
        [item.waits for item in items],
    )
    return [Settled(row["answer"], row["status"]) for row in sorted(rows, key=lambda row: row["ord"])]
