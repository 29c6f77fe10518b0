"""Door of the concern limits: how many attempts may run at once, over all hosts.

Owns the typed calls that set and list limits. That they hold is the claim's business.
"""

from __future__ import annotations

import attrs

from sql.calls import call
from sql.connection import Session
from sql.errors import KernelRefused
from sql.submit import refusal


@attrs.frozen
class Limit:
    """``kind`` is ``play``, ``org``, ``key``, ``sandbox`` or ``sandbox_org``; ``name`` is the organisation, the play
    (``key``: a limit for each of its keys), or the provider (empty: all). ``running``: attempts, or sandboxes, that
    count against it now; None for a limit per key.
    """

    kind: str
    name: str
    max_running: int
    running: int | None


async def set_limit(session: Session, kind: str, name: str, max_running: int | None) -> bool:
    """Set or (None) lift a limit of kind ``org``, ``sandbox`` or ``sandbox_org``; whether that changed
    anything. Safe to repeat.

    Raises ``InputRefused`` naming the argument.
    """
    try:
        changed: bool = await session.fetchval(
            call(session.options.schema, "set_limit", 3), kind, name, max_running
        )
    except KernelRefused as exc:
        raise refusal(exc) from exc
    return changed


async def read(session: Session, *, limit: int = 1_000, after: Limit | None = None) -> list[Limit]:
    """One page of limits by kind and name, those after ``after``."""
    rows = await session.fetch(
        call(session.options.schema, "read_limits", 3),
        limit,
        "" if after is None else after.kind,
        "" if after is None else after.name,
    )
    return [Limit(**dict(row)) for row in rows]


async def read_all(session: Session) -> list[Limit]:
    """Every limit."""
    found = page = await read(session)
    while page:
        page = await read(session, after=page[-1])
        found += page
    return found
