"""Door of the concern receive: deliveries into a receiver's ledger, and what it has of a run.

Owns the typed calls. Its session is on the receiver's own schema, never on the runtime's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call
from sql.connection import Session
from sql.types import Lane


@attrs.define(slots=True, eq=False)
class Parcel:
    """A delivery as it has arrived, checked: ``seqs`` count without gaps, ``payloads`` are JSON text.

    ``passed``: facts without effect in front of the first, which the sender has left out.
    """

    run_id: str
    lane: Lane
    delivery_key: str
    digest: str
    generation: int
    passed: int
    seqs: Sequence[int]
    types: Sequence[str]
    created_ats: Sequence[datetime]
    payloads: Sequence[str]


@attrs.frozen
class Received:
    """``outcome``: ``applied``, ``duplicate``, ``rejected``, ``gap``, ``not_current`` or ``retry``."""

    outcome: str
    reason: str | None = None


async def receive(session: Session, parcels: Sequence[Parcel]) -> list[Received]:
    """Apply parcels of different lanes, one per run and lane; one answer each, in order. Safe to repeat."""
    rows = await session.fetch(
        call(session.options.schema, "receive", 13),
        [parcel.run_id for parcel in parcels],
        [parcel.lane for parcel in parcels],
        [parcel.delivery_key for parcel in parcels],
        [parcel.digest for parcel in parcels],
        [parcel.generation for parcel in parcels],
        [parcel.passed for parcel in parcels],
        [parcel.seqs[0] for parcel in parcels],
        [parcel.seqs[-1] for parcel in parcels],
        [number for number, parcel in enumerate(parcels, 1) for _ in parcel.seqs],
        [seq for parcel in parcels for seq in parcel.seqs],
        [type_ for parcel in parcels for type_ in parcel.types],
        [moment for parcel in parcels for moment in parcel.created_ats],
        [payload for parcel in parcels for payload in parcel.payloads],
    )
    return [Received(row["outcome"], row["reason"]) for row in sorted(rows, key=lambda row: row["ord"])]


async def read(session: Session, run_id: str) -> Mapping[str, Any] | None:
    """What the ledger has of a run: the read model (None before its first lifecycle fact) and its lanes."""
    row = await session.fetchrow(call(session.options.schema, "read_received", 1), run_id)
    if row is None:
        return None
    run = {} if row["run"] is None else json.loads(row["run"])
    return {"run_id": run_id, **run, "lanes": json.loads(row["lanes"])}
