"""Door of the concern adoption: sandbox obligations in the table of an older generation of workers.

Owns the typed calls of the adoption functions. It never creates or deletes anything in that table, and caches nothing
about it.
"""

from __future__ import annotations

import attrs

from sql.calls import call
from sql.connection import Session
from sql.sandboxes import Obligation


@attrs.frozen(slots=True)
class OldTable:
    """Where the older generation keeps its obligations, and the key of the provider to which all of them belong.

    ``table`` may name its schema (``public.sandbox_cleanup_jobs``); without one it is looked for in ours.
    """

    table: str
    provider: str


@attrs.frozen(slots=True)
class Adopted:
    """What a pass has done. ``found``: there is such a table. ``settled``: rows that were proven to be gone.
    ``malformed``: open rows of which nothing can be made."""

    found: bool
    settled: int
    copied: int
    malformed: int


@attrs.frozen(slots=True)
class Preview:
    """What a pass would find. Without the table, or with something ``missing``, nothing is counted.

    ``proven``: gone, only to be marked so. ``under_way``: there is an open obligation of ours. ``leased``: an older
    worker is at it. ``faults`` names the first of the ``malformed`` rows. ``indexed``: the table has an index by which
    asking whether anything is open is a seek.
    """

    found: bool
    missing: list[str] | None
    indexed: bool | None
    open: int | None
    proven: int | None
    to_copy: int | None
    under_way: int | None
    leased: int | None
    malformed: int | None
    faults: list[str] | None


def is_copy(sandbox: str) -> bool:
    """Whether our name of a sandbox is that of a copy: whoever made it has called it otherwise."""
    return sandbox.startswith("adopted:")


async def adopt(session: Session, old: OldTable, *, limit: int) -> Adopted:
    """One pass over the older table, up to ``limit`` rows. Safe to repeat, also beside others and older workers."""
    row = await session.fetchrow(
        call(session.options.schema, "adopt_obligations", 3), old.table, old.provider, limit
    )
    assert row is not None
    return Adopted(*row.values())


async def confirm(
    session: Session, old: OldTable, item: Obligation, *, outcome: str, routing_domain: str | None
) -> str:
    """``sandboxes.confirm``, which also ends the older row that was filed alike. The same answers."""
    answer: str = await session.fetchval(
        call(session.options.schema, "confirm_adopted", 5),
        old.table,
        item.sandbox,
        item.token,
        outcome,
        routing_domain,
    )
    return answer


async def preview(session: Session, old: OldTable, *, most_faults: int = 20) -> Preview:
    """What a pass would find. Changes nothing."""
    row = await session.fetchrow(
        call(session.options.schema, "preview_adoption", 3), old.table, old.provider, most_faults
    )
    assert row is not None
    return Preview(*row.values())
