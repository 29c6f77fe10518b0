"""Door of the concern proof: does the sender of a delivery hold its lane now?

Owns the typed call. It locks and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sql.calls import call
from sql.connection import Session
from sql.types import Lane


@attrs.frozen
class Claimed:
    """What a sender says that it holds: this lane under this lease token, with exactly this prefix out."""

    run_id: str
    lane: Lane
    token: int
    first: int
    through: int


async def prove(session: Session, claims: Sequence[Claimed]) -> list[bool]:
    """Whether each claim is true now, in order."""
    rows = await session.fetch(
        call(session.options.schema, "prove_lanes", 5),
        [claim.run_id for claim in claims],
        [claim.lane for claim in claims],
        [claim.token for claim in claims],
        [claim.first for claim in claims],
        [claim.through for claim in claims],
    )
    return [row["proven"] for row in sorted(rows, key=lambda row: row["ord"])]
