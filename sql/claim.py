"""Door of the concern claim: due runs become attempts of one host.

Owns the typed call of ``claim_runs`` and its read-back. It never decides how many or when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call
from sql.connection import Session
from sql.waits import WaitState, wait_states


@attrs.define(slots=True)
class Claimed:
    """A live attempt of this host: the permission to execute.

    ``input`` and ``labels`` are JSON text. ``waits``: what the run has waited for so far, by key. ``limited``: it
    counts against a limit, and somebody may wait for its end. ``lag_s``: from due to claimed, on the database clock.
    """

    run_id: str
    attempt: int
    token: int
    play: str
    input: str
    failures: int = 0
    waits: Mapping[str, WaitState] = attrs.field(factory=dict)
    org_id: str | None = None
    labels: str | None = None
    limited: bool = False
    lag_s: float = 0.0
    was_due_at: datetime | None = None


@attrs.frozen
class Buckets:
    """The buckets that a host serves, with the priority and the play of each, in the same positions."""

    ids: tuple[int, ...]
    priorities: tuple[int, ...]
    plays: tuple[str, ...]

    @classmethod
    def of(cls, by_play: Mapping[tuple[str, int], int]) -> Buckets:
        """From the buckets by (play, priority)."""
        plays, priorities = zip(*by_play, strict=True) if by_play else ((), ())
        return cls(tuple(by_play.values()), priorities, plays)


@attrs.frozen
class Stand:
    """Where a claim left off, for the next one of the same host and buckets.

    ``low_water``: nothing that may be claimed was due before it; None: begin at the front. ``cursors``: two for each
    bucket, where the walk of its turns stands; None where nobody was left out.
    """

    low_water: datetime | None = None
    cursors: tuple[int | None, ...] = ()

    @property
    def walking(self) -> bool:
        """Whether somebody's turn is still to come in this round."""
        return any(cursor is not None for cursor in self.cursors)


@attrs.frozen
class Claims:
    """What a claim took; the seconds until the next is due (None: nothing there; zero or less: more is due now); where
    it left off."""

    items: list[Claimed]
    next_due_s: float | None
    stand: Stand


async def claim(
    session: Session,
    buckets: Buckets,
    *,
    owner: int,
    token: int,
    limit: int,
    lease_s: float,
    oldest: bool,
    stand: Stand,
) -> Claims:
    """Claim up to ``limit`` due runs.

    Fenced by ``token``: after a lost answer, ``read_back`` with the same token tells what was claimed.
    """
    rows = await session.fetch(
        call(session.options.schema, "claim_runs", 10),
        owner,
        token,
        buckets.ids,
        buckets.priorities,
        buckets.plays,
        limit,
        lease_s,
        oldest,
        stand.low_water,
        stand.cursors,
    )
    last = rows.pop()
    return Claims(
        [claimed_of(row, token) for row in rows],
        last["next_due_s"],
        Stand(last["was_due_at"], tuple(last["cursors"])),
    )


async def read_back(session: Session, *, owner: int, token: int) -> list[Claimed]:
    """What a claim with this token took. Only after the connection that made the claim is known to be gone."""
    rows = await session.fetch(call(session.options.schema, "read_claim", 2), owner, token)
    return [claimed_of([*row, None, 0.0], token) for row in rows]


def claimed_of(row: Any, token: int) -> Claimed:
    """A row of ``claim_runs``, or of a function that answers like it, under this token."""
    run_id, attempt, play, input_, failures, waits, org_id, labels, limited, was_due_at, lag_s = row[:11]
    return Claimed(
        run_id,
        attempt,
        token,
        play,
        input_,
        failures,
        {} if waits is None else wait_states(waits),
        org_id,
        labels,
        limited,
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
