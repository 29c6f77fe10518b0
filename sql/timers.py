"""Door of the concern timers: leases that have run out.

Owns the typed call of ``expire_leases``. It never asks whether a host is alive: the lease says.
"""

from __future__ import annotations

import attrs

from sql.calls import call
from sql.connection import Session


@attrs.frozen
class Expiry:
    """One pass: attempts expired, runs that failed over their crash cap, due times pushed, and the seconds until the
    next look is due (None: nothing runs; zero or less: look again)."""

    expired: int
    failed: int
    pushed: int
    next_due_s: float | None


async def expire(session: Session, *, limit: int, crash_cap: int) -> Expiry:
    """Take expired leases away. ``crash_cap`` is for plays that no host has registered. Safe to repeat."""
    row = await session.fetchrow(call(session.options.schema, "expire_leases", 2), limit, crash_cap)
    assert row is not None
    return Expiry(row["expired"], row["failed"], row["pushed"], row["next_due_s"])
