"""Door of the concern lanes: the outbox's claims, acknowledgements and hand-backs, for either lane.

Owns the typed calls of the lane functions. It never calls a ledger; what operators do to lanes is ``sql.journal``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call
from sql.connection import Session
from sql.types import Lane

OWN_LEDGER = ""
"""The receiver of runs that name none: whatever each host has as its own ledger."""

LEAST_URGENT = 3
"""The highest rank: progress and logs. 0 is an admission, 1 an end, 2 a wait that people can see."""


@attrs.define(slots=True)
class Prefix:
    """A lane's frozen prefix under a lease: facts in order, as columns. ``payloads`` are JSON text.

    ``generation`` counts the skips of its lane, ``passed`` the facts without effect right before it. ``leased_at`` is
    set by whoever holds the lease: a moment on its own clock, before the lease was asked for.
    """

    run_id: str
    lane: Lane
    token: int
    attempt: int
    seqs: Sequence[int]
    types: Sequence[str]
    payloads: Sequence[str]
    created_ats: Sequence[datetime]
    generation: int = 0
    passed: int = 0
    leased_at: float = 0.0

    @property
    def through(self) -> int:
        """The prefix's last fact."""
        return self.seqs[-1]


@attrs.define(slots=True)
class Acknowledged:
    """``answer``: ``acked``, ``busy`` (ask again) or ``lost``.

    ``successor``: the lane's next prefix, under the same token. ``lags``: type and seconds from creation to
    acknowledgement of each fact acknowledged by this very call.
    """

    answer: str
    successor: Prefix | None
    lags: Sequence[tuple[str, float]]


@attrs.define(slots=True)
class HandBack:
    """The end of a delivery turn without an acknowledgement.

    ``ending``: ``failed`` (counts), ``blocked`` (until an operator decides), ``given_up`` (by its sender: does not
    count, but it may have arrived) or ``unsent`` (does not count, and thaws if this turn froze it). ``delay_s``: the
    earliest next delivery. ``reason`` says why, for people.
    """

    run_id: str
    token: int
    ending: str
    delay_s: float = 0.0
    reason: str | None = None


@attrs.frozen
class Turn:
    """A whole delivery turn inside the database: lanes delivered, lanes blocked, lags of the facts, and the seconds
    until the next lane is due (as ``claim`` answers)."""

    lanes: int
    blocked: int
    lag_types: Sequence[str]
    lags_s: Sequence[float]
    next_due_s: float | None


def _name(lane: Lane, verb: str) -> str:
    return f"{lane.label}_{verb}"


def _prefix(run_id: str, lane: Lane, token: int, row: Any) -> Prefix:
    return Prefix(
        run_id,
        lane,
        token,
        row["attempt"],
        row["seqs"],
        row["types"],
        row["payloads"],
        row["created_ats"],
        row["generation"],
        row["passed"],
    )


async def claim(
    session: Session,
    lane: Lane,
    *,
    receivers: Sequence[str],
    token: int,
    limit: int,
    prefix: int,
    lease_s: float,
    most_rank: int = LEAST_URGENT,
    oldest: bool,
    without: Sequence[str] = (),
) -> tuple[list[Prefix], float | None]:
    """Claim due lanes up to ``most_rank``, most urgent first, and the seconds until the next of any rank is due.

    ``without`` leaves these runs' lanes to others.

    Fenced by ``token``; what a lost answer claimed comes back when its lease ends.
    """
    rows = await session.fetch(
        call(session.options.schema, _name(lane, "claim"), 8),
        list(receivers),
        token,
        limit,
        prefix,
        lease_s,
        most_rank,
        oldest,
        list(without),
    )
    next_due_s = rows.pop()["next_due_s"]
    return [_prefix(row["run_id"], lane, token, row) for row in rows], next_due_s


async def held(session: Session, lane: Lane, leases: Sequence[tuple[str, int]]) -> list[Prefix]:
    """The prefixes of those of the lanes (run id, token) that are leased so."""
    tokens = dict(leases)
    rows = await session.fetch(
        call(session.options.schema, _name(lane, "held"), 2), list(tokens), list(tokens.values())
    )
    return [_prefix(row["run_id"], lane, tokens[row["run_id"]], row) for row in rows]


async def acknowledge(
    session: Session, lane: Lane, items: Sequence[Prefix], *, prefix: int, lease_s: float
) -> list[Acknowledged]:
    """Acknowledge prefixes and, with ``prefix`` above 0, claim each lane's next. In order. Safe to repeat."""
    rows = await session.fetch(
        call(session.options.schema, _name(lane, "acknowledge"), 5),
        [item.run_id for item in items],
        [item.token for item in items],
        [item.through for item in items],
        prefix,
        lease_s,
    )
    answers = []
    for item, row in zip(items, sorted(rows, key=lambda row: row["ord"]), strict=True):
        successor = None
        if row["seqs"] is not None:
            successor = _prefix(item.run_id, lane, item.token, row)
        lags = list(zip(row["lag_types"] or (), row["lags_s"] or (), strict=True))
        answers.append(Acknowledged(row["answer"], successor, lags))
    return answers


async def hand_back(session: Session, lane: Lane, items: Sequence[HandBack]) -> list[str]:
    """End turns without an acknowledgement; ``done``, ``busy`` or ``lost`` each, in order. Safe to repeat."""
    rows = await session.fetch(
        call(session.options.schema, _name(lane, "hand_back"), 5),
        [item.run_id for item in items],
        [item.token for item in items],
        [item.ending for item in items],
        [item.delay_s for item in items],
        [item.reason for item in items],
    )
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]


async def renew(session: Session, lane: Lane, items: Sequence[Prefix], *, lease_s: float) -> list[str]:
    """Extend lane leases; ``renewed``, ``busy`` or ``lost`` each, in order. Safe to repeat."""
    rows = await session.fetch(
        call(session.options.schema, _name(lane, "renew"), 3),
        [item.run_id for item in items],
        [item.token for item in items],
        lease_s,
    )
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]


async def deliver(
    session: Session, lane: Lane, *, receivers: Sequence[str], limit: int, prefix: int, oldest: bool
) -> Turn:
    """Deliver due lanes to the ledger in this database, in one transaction. Safe to repeat."""
    row = await session.fetchrow(
        call(session.options.schema, _name(lane, "deliver"), 4), list(receivers), limit, prefix, oldest
    )
    assert row is not None
    return Turn(row["lanes"], row["blocked"], row["lag_types"] or (), row["lags_s"] or (), row["next_due_s"])


async def apply(
    session: Session, lane: Lane, items: Sequence[tuple[str, int, int]]
) -> tuple[frozenset[str], list[tuple[str, float]]]:
    """Apply prefixes (run id, first seq, last seq) to the ledger in this database, without acknowledging them.

    Returns the run ids whose prefix the ledger now has. Safe to repeat.
    """
    row = await session.fetchrow(
        call(session.options.schema, f"ledger_apply_{lane.label}", 3),
        [run_id for run_id, _, _ in items],
        [first for _, first, _ in items],
        [last for _, _, last in items],
    )
    assert row is not None
    lags = list(zip(row["lag_types"] or (), row["lags_s"] or (), strict=True))
    return frozenset(row["run_ids"] or ()), lags
