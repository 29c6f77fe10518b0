"""Door of the concern rates: slots of rate scopes.

Owns the typed calls of ``acquire_rates``, ``release_rates``, ``sweep_rates``, ``read_rates`` and ``set_rate``. It never
waits for a slot.
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
class Slot:
    """A slot that an attempt asks for. ``token`` is the natural key of everything that is asked about it."""

    scope: str
    token: int
    cost: float
    run_id: str
    attempt: int


@attrs.frozen(slots=True)
class Granted:
    """``answer``, with ``wait_s`` seconds:

    ``granted``  for ``started_at`` by the database's clock, which is in ``wait_s``
    ``wait``     its slot comes in ``wait_s``
    ``held``     its turn depends on others: on the end of a block in ``wait_s``, for None on who is in flight or probes
    ``busy``     the scope's row is locked: ask again
    ``unknown``  there is no such scope
    """

    answer: str
    wait_s: float | None
    started_at: datetime | None


@attrs.frozen(slots=True)
class Result:
    """What became of a slot: ``done``, ``failed``, ``unused``, or ``refused`` for ``retry_after_s`` seconds, with which
    the slot is still held."""

    scope: str
    token: int
    result: str
    retry_after_s: float = 0.0


@attrs.frozen(slots=True)
class Released:
    """``answer``: ``done`` or ``busy`` (ask again). ``waiting``: others wait for what this may have set free."""

    answer: str
    waiting: bool


@attrs.frozen
class RateScope:
    """A rate scope as it stands.

    ``per_s`` and ``max_in_flight`` are None where they do not limit. ``state``: ``open``, ``blocked`` (the provider has
    refused, for ``blocked_s`` seconds more) or ``probing``. ``in_flight`` and ``waiting`` count slots, ``used`` units
    ever granted. ``measured_per_s`` is the rate of the last minute at most, ``refused_per_s`` what it was when the
    provider last refused, at ``refused_at``.
    """

    name: str
    per_s: float | None
    burst: float
    max_in_flight: int | None
    state: str
    blocked_s: float | None
    in_flight: int
    waiting: int
    used: float
    measured_per_s: float
    refused_per_s: float | None
    refused_at: datetime | None


async def acquire(
    session: Session, items: Sequence[Slot], *, ahead_s: float, probe_s: float
) -> list[Granted]:
    """Ask for slots, or again for slots that had to wait; one answer each, in order. Safe to repeat: by token.

    ``ahead_s``: a slot that comes so soon is granted already. ``probe_s``: how long a probe may take before another one
    is sent.
    """
    rows = await session.fetch(
        call(session.options.schema, "acquire_rates", 7),
        [item.scope for item in items],
        [item.token for item in items],
        [item.cost for item in items],
        [item.run_id for item in items],
        [item.attempt for item in items],
        ahead_s,
        probe_s,
    )
    rows.sort(key=lambda row: row["ord"])
    return [Granted(row["answer"], row["wait_s"], row["started_at"]) for row in rows]


async def release(session: Session, items: Sequence[Result]) -> list[Released]:
    """Report what became of slots; one answer each, in order. Safe to repeat: a hold ends once."""
    rows = await session.fetch(
        call(session.options.schema, "release_rates", 4),
        [item.scope for item in items],
        [item.token for item in items],
        [item.result for item in items],
        [item.retry_after_s for item in items],
    )
    return [Released(row["answer"], row["waiting"]) for row in sorted(rows, key=lambda row: row["ord"])]


async def sweep(session: Session, *, limit: int) -> int:
    """Forget holds of attempts that are gone; how many."""
    gone: int = await session.fetchval(call(session.options.schema, "sweep_rates", 1), limit)
    return gone


async def read(session: Session) -> list[RateScope]:
    """Every scope, by name."""
    rows = await session.fetch(call(session.options.schema, "read_rates", 0))
    return [RateScope(**dict(row)) for row in rows]


async def set_rate(
    session: Session, name: str, *, per_s: float | None, burst: float, max_in_flight: int | None
) -> bool:
    """Declare or change a scope; whether anything changed. Raises InputRefused for what is out of range."""
    options = json.dumps({"per_s": per_s, "burst": burst, "max_in_flight": max_in_flight})
    try:
        changed: bool = await session.fetchval(call(session.options.schema, "set_rate", 2), name, options)
    except KernelRefused as exc:
        raise refusal(exc) from exc
    return changed
