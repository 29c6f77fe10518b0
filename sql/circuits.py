"""Door of the concern circuits: whether a dependency is worth calling.

Owns the typed calls of ``enter_circuits``, ``report_circuits``, ``read_circuits``, ``count_shared`` and
``set_circuit``. It never calls a dependency.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

import attrs

from sql.calls import call
from sql.connection import Session
from sql.errors import KernelRefused
from sql.submit import refusal


@attrs.frozen(slots=True)
class Call:
    """A call that an attempt wants to make. ``token`` is the natural key of the call and of its report."""

    name: str
    token: int
    run_id: str
    attempt: int


@attrs.frozen(slots=True)
class Entered:
    """``answer``: ``closed`` (go ahead; there have been ``failures`` in a row), ``probe`` (go ahead and report),
    ``open`` (not for ``retry_after_s`` seconds) or ``busy`` (the circuit's row is locked: ask again)."""

    answer: str
    failures: int
    retry_after_s: float | None


@attrs.frozen(slots=True)
class Report:
    """How a call went: ``ok``, ``failed`` with ``error``, or ``none``, of a probe that says nothing."""

    name: str
    token: int
    result: str
    error: str | None = None


@attrs.frozen(slots=True)
class Reported:
    """``answer``: ``done`` or ``busy`` (ask again). ``state`` and ``failures``: the circuit as it stands now."""

    answer: str
    state: str
    failures: int


@attrs.frozen
class Circuit:
    """A circuit as it stands.

    ``state``: ``closed``, ``open`` (for ``retry_after_s`` seconds more) or ``half_open`` (a probe is on its way).
    ``failures`` in a row of the ``threshold`` that open it; ``openings`` in a row, each twice as long as the one
    before, from ``open_s`` to ``open_max_s`` seconds. ``error`` is the latest failure's.
    """

    name: str
    state: str
    failures: int
    threshold: int
    openings: int
    open_s: float
    open_max_s: float
    retry_after_s: float | None
    error: str | None
    updated_at: datetime


@attrs.frozen
class Shared:
    """How many circuits are open and half open, and how many rate scopes are paused."""

    circuits_open: int
    circuits_half_open: int
    rates_paused: int


async def enter(session: Session, items: Sequence[Call], *, probe_s: float) -> list[Entered]:
    """Ask for permission to call; one answer each, in order. Safe to repeat: by token.

    ``probe_s``: how long a probe may take before another one is sent.
    """
    rows = await session.fetch(
        call(session.options.schema, "enter_circuits", 5),
        [item.name for item in items],
        [item.token for item in items],
        [item.run_id for item in items],
        [item.attempt for item in items],
        probe_s,
    )
    rows.sort(key=lambda row: row["ord"])
    return [Entered(row["answer"], row["failures"], row["retry_after_s"]) for row in rows]


async def report(session: Session, items: Sequence[Report]) -> list[Reported]:
    """Report how calls went, in the order in which they ended. Safe to repeat: a token counts once."""
    rows = await session.fetch(
        call(session.options.schema, "report_circuits", 4),
        [item.name for item in items],
        [item.token for item in items],
        [item.result for item in items],
        [item.error for item in items],
    )
    rows.sort(key=lambda row: row["ord"])
    return [Reported(row["answer"], row["state"], row["failures"]) for row in rows]


async def read(session: Session) -> list[Circuit]:
    """Every circuit: those that are not closed first, the latest change first."""
    rows = await session.fetch(call(session.options.schema, "read_circuits", 0))
    return [Circuit(**dict(row)) for row in rows]


async def count(session: Session) -> Shared:
    """The figures for metrics."""
    row = await session.fetchrow(call(session.options.schema, "count_shared", 0))
    assert row is not None
    return Shared(**dict(row))


async def set_circuit(
    session: Session,
    name: str,
    *,
    failures: int | None = None,
    open_s: float | None = None,
    open_max_s: float | None = None,
    close: bool = False,
) -> bool:
    """Declare, change or close a circuit; None leaves what stands. Whether anything changed. Raises InputRefused."""
    options = {"failures": failures, "open_s": open_s, "open_max_s": open_max_s, "close": close}
    try:
        changed: bool = await session.fetchval(
            call(session.options.schema, "set_circuit", 2), name, json.dumps(options)
        )
    except KernelRefused as exc:
        raise refusal(exc) from exc
    return changed
