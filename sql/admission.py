"""Door of the concern admission: runs come in, in sets.

Owns the typed call of ``admit_runs`` and of what a host asks before it admits. It never checks a payload: that
happened at the host's own door.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call, new_token
from sql.connection import Session


@attrs.define(slots=True)
class Submission:
    """One run to admit. ``input``, ``labels`` and ``extras`` (what few runs have) are JSON text.

    ``named``: the caller chose ``run_id``. ``replaces``: it may leave a request to cancel another run behind.
    ``request`` recognises the run when the call is made again after a lost answer, and is the lease token if
    ``claim`` (admit as already claimed by this host). ``receiver`` gets its facts; the first of them is admitted as
    out for delivery under the token ``request`` if ``lane_lease_s``.
    """

    run_id: str
    named: bool
    play: str
    bucket: int
    priority: int
    input: str
    org_id: str | None = None
    idempotency_key: str | None = None
    delay_s: float | None = None
    at: datetime | None = None
    labels: str | None = None
    extras: str | None = None
    replaces: bool = False
    receiver: str = ""
    claim: bool = False
    lane_lease_s: float | None = None
    request: int = attrs.field(factory=new_token)


@attrs.define(slots=True)
class Admitted:
    """What became of one submission.

    ``outcome``: ``created``, ``existing`` (same play and input, or it holds the unique key), ``conflict`` (taken by
    another play or input), ``two_runs`` (run id and idempotency key name different runs), ``duplicate`` (another run
    holds the unique key), ``busy`` (the key is in an open transaction).
    """

    outcome: str
    run_id: str
    created: bool
    claimed: bool


async def admit(
    session: Session,
    items: Sequence[Submission],
    *,
    owner: int,
    lease_s: float,
    release_id: str | None,
    environment: str | None,
) -> list[Admitted]:
    """Admit ``items``; one answer each, in order. Safe to repeat with the same items.

    Raises ``KernelRefused`` when one item cannot be stored; the caller splits the batch.
    """
    rows = await session.fetch(
        call(session.options.schema, "admit_runs", 19),
        [item.run_id for item in items],
        [item.named for item in items],
        [item.play for item in items],
        [item.bucket for item in items],
        [item.priority for item in items],
        [item.org_id for item in items],
        [item.idempotency_key for item in items],
        [item.delay_s for item in items],
        [item.at for item in items],
        [item.labels for item in items],
        [item.input for item in items],
        [_extras(item) for item in items],
        [item.request for item in items],
        [item.claim for item in items],
        owner,
        lease_s,
        release_id,
        environment,
        False,
    )
    answers = sorted(rows, key=lambda row: row["ord"])
    return [Admitted(row["outcome"], row["run_id"], row["created"], row["claimed"]) for row in answers]


def _extras(item: Submission) -> str | None:
    if not item.receiver and item.lane_lease_s is None:
        return item.extras
    extras = {} if item.extras is None else json.loads(item.extras)
    if item.receiver:
        extras["receiver"] = item.receiver
    if item.lane_lease_s is not None:
        extras["lane_lease_s"] = item.lane_lease_s
    return json.dumps(extras)


@attrs.frozen
class Registered:
    """A play that some host has registered: its buckets by priority, and whether it has a limit per concurrency key."""

    buckets: Mapping[int, int]
    keyed: bool


async def find_play(
    session: Session, play: str, *, release_id: str | None, environment: str | None
) -> Registered | None:
    """A play as its hosts have registered it; None where no host has. Reads only."""
    rows = await _play_buckets(session, [play], release_id, environment)
    if not rows[0]["registered"]:
        return None
    return Registered({row["priority"]: row["bucket"] for row in rows}, rows[0]["keyed"])


async def play_buckets(
    session: Session, plays: Sequence[str], *, release_id: str | None, environment: str | None
) -> dict[tuple[str, int], int]:
    """Buckets by (play, priority), registered or not. Reads only."""
    rows = await _play_buckets(session, plays, release_id, environment)
    return {(row["play"], row["priority"]): row["bucket"] for row in rows}


async def _play_buckets(
    session: Session, plays: Sequence[str], release_id: str | None, environment: str | None
) -> Sequence[Any]:
    rows: Sequence[Any] = await session.fetch(
        call(session.options.schema, "play_buckets", 3), list(plays), release_id, environment
    )
    return rows


@attrs.frozen
class PlayRules:
    """What the kernel has to know of a play.

    ``max_running``: attempts at once on all hosts, ``max_per_key`` the same of one concurrency key; None is no limit,
    and one at a time per key.
    """

    crash_cap: int
    max_running: int | None = None
    max_per_key: int | None = None


async def register_host(
    session: Session, *, host: int, name: str, pid: int, version: str, plays: Mapping[str, PlayRules]
) -> None:
    """Make a host and its plays known. Safe to repeat. Of two hosts' rules for one play the latest stand."""
    await session.execute(
        call(session.options.schema, "register_host", 8),
        host,
        name,
        pid,
        version,
        list(plays),
        [rules.crash_cap for rules in plays.values()],
        [rules.max_running for rules in plays.values()],
        [rules.max_per_key for rules in plays.values()],
    )
