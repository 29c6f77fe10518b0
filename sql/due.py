"""Door of the concern due: when each queue has something next.

Owns the typed call of ``next_due`` and the notifications. It never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from sql.calls import call, channel
from sql.connection import Session

CHANNELS = ("runs", "lanes", "terminals", "control", "schedules", "rates", "wakes")


@attrs.frozen
class Due:
    """Seconds until each queue's next due time; None for nothing there, zero or less for now."""

    runs_s: float | None
    lifecycle_s: float | None
    observability_s: float | None
    leases_s: float | None
    schedules_s: float | None
    chores_s: float | None
    cancellations: bool
    wakes: bool


async def next_due(session: Session, *, host: int, buckets: Sequence[int], receivers: Sequence[str]) -> Due:
    """One read for all queues; it also notes that the host was seen."""
    row = await session.fetchrow(
        call(session.options.schema, "next_due", 3), host, list(buckets), list(receivers)
    )
    assert row is not None
    return Due(**dict(row))


async def notify(session: Session, kinds: Iterable[str]) -> None:
    """Send one notification per kind, in one round trip. A hint: whoever hears it reads the truth."""
    await session.execute(
        "SELECT pg_notify(name, '') FROM unnest($1::text[]) AS name",
        [channel(session.options.schema, kind) for kind in kinds],
    )
