"""Door of the concern control: cancelling runs.

Owns the typed calls of ``cancel_runs`` and ``sweep_cancellations``. It never tells an executor.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sql.calls import call
from sql.connection import Session


@attrs.define(slots=True)
class Cancellation:
    """A request to cancel one run. The same ``request_id`` asked again hears the same answer."""

    run_id: str
    request_id: str
    reason: str | None = None
    by: str | None = None


@attrs.define(slots=True)
class Cancelled:
    """``answer``: ``cancelled`` (this request won), ``cancelled_before``, ``completed``, ``failed``, ``pending``
    (recorded), ``busy`` (the row is locked) or ``missing``. ``owner``: the host whose attempt lost its fence. ``kin``:
    its parent has a wake, or its children have requests to cancel."""

    answer: str
    owner: int | None
    kin: bool = False


async def cancel(session: Session, items: Sequence[Cancellation], *, mark: bool) -> list[Cancelled]:
    """End runs as cancelled; with ``mark`` a run whose row is locked gets a recorded request instead of ``busy``.

    One answer each, in order. Safe to repeat with the same request ids.
    """
    rows = await session.fetch(
        call(session.options.schema, "cancel_runs", 5),
        [item.run_id for item in items],
        [item.request_id for item in items],
        [item.reason for item in items],
        [item.by for item in items],
        mark,
    )
    return [
        Cancelled(row["answer"], row["owner"], row["kin"]) for row in sorted(rows, key=lambda row: row["ord"])
    ]


async def sweep(session: Session, *, limit: int) -> tuple[int, int]:
    """Carry out recorded requests: how many were, and how many are left (up to ``limit``)."""
    row = await session.fetchrow(call(session.options.schema, "sweep_cancellations", 1), limit)
    assert row is not None
    return row["cancelled"], row["remaining"]
