"""Door of the concern billing: what runs' compute was, told once.

Owns the typed calls of the billing functions. It knows no prices.
"""

from __future__ import annotations

from datetime import datetime

import attrs

from sql.calls import call
from sql.connection import Session


@attrs.frozen(slots=True)
class ComputeRecord:
    """One item of compute. ``kind``: ``runner`` (the attempt), ``sandbox``, or ``late_sandbox`` (billed up to its
    ceiling because its provider never took the deletion). ``record_id`` never changes: count each id once."""

    started_at: datetime
    ended_at: datetime
    recorded_at: datetime
    attempt: int
    record_id: str
    run_id: str
    kind: str
    provider: str
    org_id: str | None

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return max(0.0, (self.ended_at - self.started_at).total_seconds())


@attrs.frozen(slots=True)
class Finalised:
    """One pass: jobs finalised and postponed, and the seconds until the next is due (None: there is none)."""

    finalised: int
    postponed: int
    next_due_s: float | None


async def finalise(session: Session, *, limit: int, grace_s: float, again_s: float) -> Finalised:
    """Finalise jobs that are due. A sandbox counts up to its ceiling and ``grace_s`` at most. Safe to repeat."""
    row = await session.fetchrow(call(session.options.schema, "finalise_billing", 3), limit, grace_s, again_s)
    assert row is not None
    return Finalised(row["finalised"], row["postponed"], row["next_due_s"])


async def read(
    session: Session, *, after: tuple[datetime, str] | None = None, limit: int = 1_000
) -> list[ComputeRecord]:
    """One page of records, in the order in which they were made. ``after``: (recorded_at, record_id) of the last."""
    at, record_id = after or (None, None)
    rows = await session.fetch(call(session.options.schema, "read_compute_records", 3), at, record_id, limit)
    return [ComputeRecord(*row.values()) for row in rows]
