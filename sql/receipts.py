"""Door of the concern receipts: what became of a run's steps.

Owns the typed calls of ``claim_receipts``, ``settle_receipts``, ``mark_receipts`` and ``read_receipts``. Each answers
per item and in order, and asks nothing of the database for an empty batch. It never runs a step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call
from sql.claim import fence_columns
from sql.connection import Session

IMMUTABLE = "RL006"
"""SQLSTATE of a call that would have changed a final receipt; its ``detail`` is the key."""


@attrs.define(slots=True)
class ReceiptClaim:
    """A live attempt asks for a step's receipt.

    ``function`` is what it is recorded for. ``lease`` says who claims where several share an attempt (None: its
    token); another one of the same attempt may take it ``lease_s`` seconds later (None: not while the attempt lives).
    """

    run_id: str
    attempt: int
    token: int
    key: str
    function: str
    lease: int | None = None
    lease_s: float | None = None


@attrs.define(slots=True)
class Receipt:
    """What a claim found.

    ``answer``: ``claimed`` (run the function); ``completed``, ``skipped`` or ``failed`` (recorded: ``output`` or
    ``error``, JSON text); ``conflict`` (recorded for another ``function``); ``held`` (by somebody else of the same
    attempt); ``busy`` (ask again); ``lost`` (the fence is gone); ``rest`` (the answer is full: ask again).
    """

    answer: str
    function: str | None
    tries: int | None
    output: str | None
    error: str | None


@attrs.define(slots=True)
class ReceiptEnd:
    """The end of a step. ``payload`` is JSON text.

    ``outcome``: ``completed`` or ``skipped`` with the output; ``failed`` (stands until the run is retried) or
    ``fatal`` (for good) with the error; ``released`` (claimable at once). ``tries``: calls of the function beyond the
    first since the claim. With ``function`` the receipt need not have been claimed: it is inserted as ended.
    """

    run_id: str
    attempt: int
    token: int
    key: str
    outcome: str
    payload: str | None = None
    tries: int = 0
    function: str | None = None
    lease: int | None = None


@attrs.define(slots=True)
class Ended:
    """``answer``: ``done``, ``busy`` (ask again) or ``lost``. ``output``, where asked for: JSON text as stored."""

    answer: str
    output: str | None = None


@attrs.define(slots=True)
class ReceiptMark:
    """A sign of life. ``state``: ``queued``, ``running``, or None for as it was; ``lease_s`` extends its own lease."""

    run_id: str
    attempt: int
    token: int
    key: str
    state: str | None = None
    lease: int | None = None
    lease_s: float | None = None


@attrs.frozen
class StepRecord:
    """One step of a run, as its receipt has it.

    ``state``: ``claimed``, ``queued`` or ``running`` while an attempt is at it, ``completed``, ``failed``,
    ``skipped``, or ``released``. ``attempt`` is the run's attempt that holds it or ended it; ``tries`` counts calls of
    the function over all attempts. ``final``: it never changes again. ``output`` is None unless asked for.
    """

    key: str
    function: str
    state: str
    final: bool
    attempt: int
    tries: int
    created_at: datetime
    claimed_at: datetime
    heartbeat_at: datetime | None
    lease_expires_at: datetime | None
    finished_at: datetime | None
    output: Any
    error: Any


async def claim(session: Session, items: Sequence[ReceiptClaim]) -> list[Receipt]:
    """Claim receipts, of many runs at once. Safe to repeat: by attempt and lease."""
    if not items:
        return []
    rows = await session.fetch(
        call(session.options.schema, "claim_receipts", 7),
        *fence_columns(items),
        [item.key for item in items],
        [item.function for item in items],
        _leases(items),
        [item.lease_s for item in items],
    )
    return [
        Receipt(row["answer"], row["function"], row["tries"], row["output"], row["error"])
        for row in sorted(rows, key=lambda row: row["ord"])
    ]


async def settle(session: Session, items: Sequence[ReceiptEnd], *, outputs: bool = False) -> list[Ended]:
    """End receipts, of many runs at once; with ``outputs`` answer what is stored. Safe to repeat: by outcome.

    Raises KernelRefused with the SQLSTATE ``IMMUTABLE``, and changes nothing, when one item would change a final
    receipt; the caller splits the batch.
    """
    if not items:
        return []
    rows = await session.fetch(
        call(session.options.schema, "settle_receipts", 10),
        *fence_columns(items),
        [item.key for item in items],
        _leases(items),
        [item.outcome for item in items],
        [item.payload for item in items],
        [item.tries for item in items],
        [item.function for item in items],
        outputs,
    )
    return [Ended(row["answer"], row["output"]) for row in sorted(rows, key=lambda row: row["ord"])]


async def mark(session: Session, items: Sequence[ReceiptMark]) -> list[str]:
    """Heartbeats; ``done``, ``busy`` (ask again) or ``lost`` each. Safe to repeat. Refuses as ``settle``."""
    if not items:
        return []
    rows = await session.fetch(
        call(session.options.schema, "mark_receipts", 7),
        *fence_columns(items),
        [item.key for item in items],
        _leases(items),
        [item.state for item in items],
        [item.lease_s for item in items],
    )
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]


async def read(
    session: Session, run_id: str, *, after: str | None, limit: int, outputs: bool
) -> list[StepRecord]:
    """One page of a run's steps, by key, behind ``after``."""
    rows = await session.fetch(
        call(session.options.schema, "read_receipts", 4), run_id, after or "", limit, outputs
    )
    return [
        StepRecord(**{**dict(row), "output": _decoded(row["output"]), "error": _decoded(row["error"])})
        for row in rows
    ]


def _leases(items: Sequence[Any]) -> list[int]:
    return [item.token if item.lease is None else item.lease for item in items]


def _decoded(text: str | None) -> Any:
    return None if text is None else json.loads(text)
