"""Door of the concern leases: live attempts are renewed.

Owns the typed call of ``renew_leases``. It never renews what it was not given.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sql.calls import call
from sql.claim import Claimed, fence_columns
from sql.connection import Session


@attrs.define(slots=True)
class Renewal:
    """``answer``: ``renewed``, ``busy`` (the row is locked; the lease stands as it was) or ``lost``.

    ``cancel``: a request to cancel the run is recorded, or it is why the lease is gone.
    """

    answer: str
    cancel: bool


async def renew(session: Session, items: Sequence[Claimed], *, lease_s: float) -> list[Renewal]:
    """Extend each lease to ``lease_s`` from now; one answer each, in order. Safe to repeat."""
    rows = await session.fetch(
        call(session.options.schema, "renew_leases", 4), *fence_columns(items), lease_s
    )
    return [Renewal(row["answer"], row["cancel"]) for row in sorted(rows, key=lambda row: row["ord"])]
