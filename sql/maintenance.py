"""Door of the concern maintenance: retention, log bodies, counts, and whose turn it is.

Owns the typed calls. It decides nothing about ages and intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import attrs

from sql.calls import call
from sql.connection import Session


@attrs.frozen
class Claim:
    """A chore that is ours for a while. ``state`` is what the last turn left, as JSON text; None: a round begins."""

    name: str
    state: str | None
    claim: datetime


@attrs.frozen
class Pass:
    """One bounded pass: ``items`` done, ``rows`` touched, and where the next begins (None: the round is over)."""

    items: int
    rows: int
    next_from: datetime | None


async def claim(session: Session, names: Sequence[str], *, lease_s: float) -> Claim | None:
    """The one of these chores that has been due longest, or None. A claim whose answer is lost ends by itself."""
    row = await session.fetchrow(call(session.options.schema, "claim_chore", 2), list(names), lease_s)
    assert row is not None
    return None if row["name"] is None else Claim(row["name"], row["state"], row["claim"])


async def finish(session: Session, item: Claim, *, next_s: float, state: str | None) -> bool:
    """Hand it back until ``next_s`` from now. False: somebody else has claimed it since (or we did, before)."""
    done: bool = await session.fetchval(
        call(session.options.schema, "finish_chore", 4), item.name, item.claim, next_s, state
    )
    return done


async def purge_runs(
    session: Session, *, age_s: float, limit: int, ledger: bool, start: datetime | None
) -> Pass:
    """Delete delivered runs that ended longer ago than ``age_s``, their ledger rows if ``ledger``. Safe to repeat."""
    row = await session.fetchrow(call(session.options.schema, "purge_runs", 4), age_s, limit, ledger, start)
    assert row is not None
    return Pass(row["runs"], row["rows"], row["next_from"])


async def scrub_logs(session: Session, *, age_s: float, limit: int, start: datetime | None) -> Pass:
    """Take the bodies of delivered log facts older than ``age_s``. Safe to repeat."""
    return await _scrub(session, "scrub_logs", age_s, limit, start)


async def scrub_ledger_logs(session: Session, *, age_s: float, limit: int, start: datetime | None) -> Pass:
    """Take the bodies of the read model's log lines older than ``age_s``. Safe to repeat."""
    return await _scrub(session, "scrub_ledger_logs", age_s, limit, start)


async def _scrub(session: Session, function: str, age_s: float, limit: int, start: datetime | None) -> Pass:
    row = await session.fetchrow(call(session.options.schema, function, 3), age_s, limit, start)
    assert row is not None
    return Pass(row["scrubbed"], row["scrubbed"], row["next_from"])


async def forget_hosts(session: Session, *, age_s: float, limit: int) -> int:
    """Forget hosts that were not seen for ``age_s``; how many. Safe to repeat."""
    gone: int = await session.fetchval(call(session.options.schema, "forget_hosts", 2), age_s, limit)
    return gone


async def count_runs(session: Session, *, state: str | None, limit: int) -> str | None:
    """Count one more page of runs; the new state, None when all are counted and stored."""
    counted: str | None = await session.fetchval(call(session.options.schema, "count_runs", 2), state, limit)
    return counted
