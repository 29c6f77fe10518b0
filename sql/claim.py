"""Door of the concern claim: due runs become attempts of one host.

Owns the typed call of ``claim_runs`` and its read-back. It never decides how many or when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call
from sql.connection import Session


@attrs.define(slots=True)
class Claimed:
    """A live attempt of this host: the permission to execute.

    ``input`` and ``labels`` are JSON text. ``waits``: seconds until each registered wait passes, None for one
    that has. ``lag_s``: from due to claimed, on the database clock.
    """

    run_id: str
    attempt: int
    token: int
    play: str
    input: str
    failures: int = 0
    waits: Mapping[str, float | None] = attrs.field(factory=dict)
    org_id: str | None = None
    labels: str | None = None
    lag_s: float = 0.0
    was_due_at: datetime | None = None


@attrs.frozen
class Buckets:
    """The buckets that a host serves, with the priority of each, in the same positions."""

    ids: tuple[int, ...]
    priorities: tuple[int, ...]


async def claim(
    session: Session,
    buckets: Buckets,
    *,
    owner: int,
    token: int,
    limit: int,
    lease_s: float,
    oldest: bool,
    low_water: datetime | None,
) -> tuple[list[Claimed], float | None]:
    """Claim up to ``limit`` due runs.

    Returns them and the seconds until the next is due (None: nothing there; zero or less: more is due now).
    Fenced by ``token``: after a lost answer, ``read_back`` with the same token tells what was claimed.
    """
    rows = await session.fetch(
        call(session.options.schema, "claim_runs", 8),
        owner,
        token,
        buckets.ids,
        buckets.priorities,
        limit,
        lease_s,
        oldest,
        low_water,
    )
    next_due_s = rows.pop()["next_due_s"]
    return [_claimed(row, token) for row in rows], next_due_s


async def read_back(session: Session, *, owner: int, token: int) -> list[Claimed]:
    """What a claim with this token took. Only after the connection that made the claim is known to be gone."""
    rows = await session.fetch(call(session.options.schema, "read_claim", 2), owner, token)
    return [_claimed(row, token) for row in rows]


def _claimed(row: Any, token: int) -> Claimed:
    run_id, attempt, play, input_, failures, waits, org_id, labels, was_due_at, lag_s, _ = row
    return Claimed(
        run_id,
        attempt,
        token,
        play,
        input_,
        failures,
        {} if waits is None else json.loads(waits),
        org_id,
        labels,
        lag_s,
        was_due_at,
    )


async def held(session: Session, *, owner: int) -> list[tuple[str, int, int]]:
    """(run id, attempt, token) of each attempt that the database believes this owner to run."""
    rows = await session.fetch(call(session.options.schema, "held_leases", 1), owner)
    return [(row["run_id"], row["attempt"], row["token"]) for row in rows]


def fence_columns(items: Sequence[Any]) -> tuple[list[str], list[int], list[int]]:
    """The run ids, attempts and tokens of things that carry a live attempt's fence, as three columns."""
    return (
        [item.run_id for item in items],
        [item.attempt for item in items],
        [item.token for item in items],
    )
