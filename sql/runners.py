"""Door of the concern runners: attempts that go on in a sandbox, and how their end is judged.

Owns the typed calls of the runner functions. It never asks a provider and never decides what a silence means.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import attrs

from sql.calls import call
from sql.claim import Claimed, claimed_of, fence_columns
from sql.connection import Session
from sql.settle import Settlement
from sql.types import RunnerStatus


@attrs.define(slots=True)
class Detachment:
    """A live attempt that its host hands to the runner in ``sandbox``.

    ``heartbeat_timeout_s``: silence after which the provider is asked; ``ceiling_s``: from now, None for no end.
    """

    run_id: str
    attempt: int
    token: int
    sandbox: str
    heartbeat_timeout_s: float
    ceiling_s: float | None


@attrs.frozen(slots=True)
class Beat:
    """A runner says that it lives."""

    run_id: str
    attempt: int
    token: int


@attrs.frozen(slots=True)
class Pushed:
    """What became of a runner's result.

    ``answer``: ``settled``, ``recorded`` (kept; the sweep goes on with it), ``late`` (kept, but the run had moved on
    without it) or ``unknown`` (no such attempt, or another token). ``first``: what is kept is what this call said.
    """

    answer: str
    first: bool


@attrs.define(slots=True)
class Silent:
    """A runner that has not been heard of in time (``finding`` ``stale``) or that is past its ceiling (``ceiling``).

    ``heartbeat_at`` is exact: a verdict counts only while it is still the same. ``silent_s``: since then, or since the
    attempt was detached. ``over_s``: how long it is past its ceiling.
    """

    run_id: str
    attempt: int
    token: int
    provider: str
    sandbox: str
    provider_id: str | None
    routing_domain: str | None
    heartbeat_at: datetime | None
    silent_s: float
    heartbeat_timeout_s: float
    finding: str
    over_s: float = 0.0


@attrs.define(slots=True)
class Verdict:
    """How a silent runner's attempt ends: ``lost`` or ``ceiling``. ``error`` is JSON text for the facts."""

    silent: Silent
    verdict: str
    error: str


@attrs.frozen(slots=True)
class DetachedDue:
    """Seconds until runners, sandboxes and bills have to be looked at next; None: there is nothing."""

    runners_s: float | None
    sandboxes_s: float | None
    billing_s: float | None


async def next_due(session: Session, providers: Sequence[str]) -> DetachedDue:
    """What is due next for hosts with sandboxes of these providers. Reads only."""
    row = await session.fetchrow(call(session.options.schema, "detached_next_due", 1), list(providers))
    assert row is not None
    return DetachedDue(*row.values())


async def set_gateway(session: Session, host: int, url: str) -> None:
    """Where runners reach this host."""
    await session.execute(call(session.options.schema, "set_gateway", 2), host, url)


async def gateways(session: Session, *, within_s: float, limit: int = 8) -> list[str]:
    """The gateways of hosts seen within that time, the latest first. Reads only."""
    rows = await session.fetch(call(session.options.schema, "read_gateways", 2), within_s, limit)
    return [row[0] for row in rows]


async def read_runner(session: Session, run_id: str, attempt: int) -> RunnerStatus | None:
    """The runner of one attempt, also of one that has ended; None if it was never in a sandbox. Reads only."""
    row = await session.fetchrow(call(session.options.schema, "read_runner", 2), run_id, attempt)
    return None if row is None else RunnerStatus(**row)


async def detach(session: Session, items: Sequence[Detachment]) -> list[str]:
    """Hand attempts over; one of ``done``, ``busy`` (ask again), ``lost`` each, in order. Safe to repeat."""
    rows = await session.fetch(
        call(session.options.schema, "detach_attempts", 6),
        *fence_columns(items),
        [item.sandbox for item in items],
        [item.heartbeat_timeout_s for item in items],
        [item.ceiling_s for item in items],
    )
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]


async def beat(session: Session, items: Sequence[Beat]) -> list[str]:
    """Runners live. One of ``ok``, ``cancelled``, ``ended``, ``superseded``, ``early``, ``unknown``, ``busy`` each."""
    rows = await session.fetch(call(session.options.schema, "beat_runners", 3), *fence_columns(items))
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]


async def read_attempt(session: Session, run_id: str, attempt: int, token: int) -> Claimed | None:
    """What a runner needs to begin; None when its attempt is not live."""
    row = await session.fetchrow(call(session.options.schema, "read_attempt", 3), run_id, attempt, token)
    return None if row is None else claimed_of([*row, None, 0.0], token)


async def push(session: Session, items: Sequence[Settlement]) -> list[Pushed]:
    """Keep results and move their runs on. Safe to repeat: the first word of an attempt stands."""
    rows = await session.fetch(
        call(session.options.schema, "push_results", 9),
        *fence_columns(items),
        [item.outcome for item in items],
        [item.payload for item in items],
        [item.delay_s for item in items],
        [item.waits for item in items],
        [item.outage_max_s for item in items],
        [item.overdue for item in items],
    )
    return [Pushed(row["answer"], row["first"]) for row in sorted(rows, key=lambda row: row["ord"])]


async def settle_results(session: Session, *, limit: int) -> tuple[int, int]:
    """Move runs on by results that are kept and not settled: how many were, and how many of those seen are left."""
    row = await session.fetchrow(call(session.options.schema, "settle_results", 3), None, None, limit)
    assert row is not None
    return row["settled"], row["remaining"]


async def sweep(
    session: Session, providers: Sequence[str], *, limit: int, look_s: float
) -> tuple[list[Silent], float | None]:
    """Runners to ask about, of up to ``limit`` (1 to 100) due ones per provider, which are ours for ``look_s``; seconds
    until the next: 0 if there may be more now, less than 0 if others hold what is due."""
    rows = await session.fetch(
        call(session.options.schema, "sweep_runners", 3), list(providers), limit, look_s
    )
    next_due_s = rows.pop()["next_due_s"]
    return [Silent(*list(row.values())[:-1]) for row in rows], next_due_s


async def judge(session: Session, items: Sequence[Verdict], *, crash_cap: int) -> list[str]:
    """End attempts from outside; one of ``done``, ``busy`` (ask again), ``moved`` each. Safe to repeat: fenced."""
    silent = [item.silent for item in items]
    rows = await session.fetch(
        call(session.options.schema, "judge_runners", 7),
        *fence_columns(silent),
        [one.heartbeat_at for one in silent],
        [item.verdict for item in items],
        [item.error for item in items],
        crash_cap,
    )
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]
