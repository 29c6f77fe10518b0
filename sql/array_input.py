"""Door of the concern array_input: intents to stage input pages outside of the database.

Owns the typed call of ``register_array_input``. It never stages or retires a page.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sql.calls import call
from sql.claim import fence_columns
from sql.connection import Session


@attrs.define(slots=True)
class Intent:
    """A live attempt's intent; its organisation is part of the fence."""

    run_id: str
    org_id: str | None
    attempt: int
    token: int


async def register(session: Session, items: Sequence[Intent]) -> list[str]:
    """Register intents; ``done``, ``busy`` (ask again), ``lost`` or ``no_receiver`` each, in order. Safe to repeat."""
    run_ids, attempts, tokens = fence_columns(items)
    rows = await session.fetch(
        call(session.options.schema, "register_array_input", 4),
        run_ids,
        [item.org_id for item in items],
        attempts,
        tokens,
    )
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]
