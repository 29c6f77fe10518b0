"""Door of the concern sandboxes: capacity, custody, and the obligation to delete.

Owns the typed calls of the sandbox functions. It never talks to a provider.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import attrs

from sql.calls import call
from sql.claim import fence_columns
from sql.connection import Session


@attrs.define(slots=True)
class Reservation:
    """A sandbox that a live attempt is about to ask a provider for. ``sandbox`` is our own name for it."""

    run_id: str
    attempt: int
    token: int
    sandbox: str
    provider: str


@attrs.frozen(slots=True)
class Custody:
    """What a provider said of a sandbox that it has made."""

    sandbox: str
    provider_id: str
    routing_domain: str | None = None


@attrs.define(slots=True)
class Obligation:
    """A sandbox that has to be deleted, under this cleaner's lease.

    ``accepted_at``: the provider took the deletion before. ``certain``: that it is absent proves that it will stay so;
    without that it may still be in the making.
    """

    sandbox: str
    provider: str
    provider_id: str | None
    routing_domain: str | None
    run_id: str
    attempt: int
    tries: int
    failures: int
    accepted_at: datetime | None
    certain: bool
    token: int = attrs.field(kw_only=True)


@attrs.frozen(slots=True)
class SandboxRecord:
    """A sandbox as it stands. Times are the database's; ``state`` is derived from them."""

    sandbox: str
    provider: str
    run_id: str
    attempt: int
    org_id: str | None
    environment: str | None
    provider_id: str | None
    routing_domain: str | None
    created_at: datetime
    custody_at: datetime | None
    wanted_at: datetime | None
    accepted_at: datetime | None
    confirmed_at: datetime | None
    tries: int
    failures: int
    last_error: str | None
    block_reason: str | None
    diagnostics: Mapping[str, Any] | None

    @property
    def state(self) -> str:
        """``creating``, ``live``, ``deleting``, ``deleted`` (taken by the provider), ``gone`` or ``blocked``."""
        if self.confirmed_at is not None:
            return "gone"
        if self.block_reason is not None:
            return "blocked"
        if self.accepted_at is not None:
            return "deleted"
        if self.wanted_at is not None:
            return "deleting"
        return "creating" if self.custody_at is None else "live"


async def reserve(session: Session, items: Sequence[Reservation], *, due_s: float) -> list[str]:
    """Reserve capacity, with the obligation to delete, due in ``due_s`` unless the attempt is detached by then.

    One of ``reserved``, ``full``, ``busy`` (ask again), ``lost`` each, in order. Safe to repeat.
    """
    rows = await session.fetch(
        call(session.options.schema, "reserve_sandboxes", 6),
        *fence_columns(items),
        [item.sandbox for item in items],
        [item.provider for item in items],
        due_s,
    )
    return [row["answer"] for row in sorted(rows, key=lambda row: row["ord"])]


async def record_custody(session: Session, items: Sequence[Custody]) -> None:
    """Remember what providers said. Values that are known already are kept."""
    await session.execute(
        call(session.options.schema, "record_custody", 3),
        [item.sandbox for item in items],
        [item.provider_id for item in items],
        [item.routing_domain for item in items],
    )


async def give_up(session: Session, sandboxes: Sequence[str]) -> None:
    """Nobody needs these any more: they are due for deletion now. One with a live runner is left alone."""
    await session.execute(call(session.options.schema, "give_up_sandboxes", 1), list(sandboxes))


async def record_diagnostics(session: Session, sandbox: str, diagnostics: Mapping[str, Any]) -> None:
    """Keep what is known of a sandbox's end with its obligation."""
    await session.execute(
        call(session.options.schema, "record_diagnostics", 2), sandbox, json.dumps(diagnostics)
    )


async def claim_cleanup(
    session: Session, providers: Sequence[str], *, token: int, limit: int, lease_s: float
) -> tuple[list[Obligation], float | None]:
    """Obligations that are due, up to ``limit`` per provider, and the seconds until the next."""
    rows = await session.fetch(
        call(session.options.schema, "claim_cleanup", 4), list(providers), token, limit, lease_s
    )
    next_due_s = rows.pop()["next_due_s"]
    found = [Obligation(*tuple(row.values())[:-1], token=token) for row in rows]
    return found, next_due_s


async def accept(session: Session, item: Obligation, *, outcome: str, routing_domain: str | None) -> str:
    """The provider took the deletion: ``accepted``, ``lease_lost``, ``missing_obligation`` or ``busy``."""
    answer: str = await session.fetchval(
        call(session.options.schema, "accept_deletion", 4), item.sandbox, item.token, outcome, routing_domain
    )
    return answer


async def confirm(session: Session, item: Obligation, *, outcome: str, routing_domain: str | None) -> str:
    """It is gone: ``completed``, ``already_completed``, ``lease_lost``, ``wrong_routing_domain``,
    ``missing_obligation`` or ``busy``."""
    answer: str = await session.fetchval(
        call(session.options.schema, "confirm_deletion", 4), item.sandbox, item.token, outcome, routing_domain
    )
    return answer


async def postpone(
    session: Session, item: Obligation, *, delay_s: float, error: str | None = None, block: str | None = None
) -> None:
    """Hand an obligation back, due again in ``delay_s``, or blocked. ``error`` counts a failure."""
    await session.execute(
        call(session.options.schema, "postpone_cleanup", 5), item.sandbox, item.token, delay_s, error, block
    )


async def retry(session: Session, sandbox: str) -> bool:
    """Let a blocked obligation be tried again; False when it was not blocked."""
    done: bool = await session.fetchval(call(session.options.schema, "retry_cleanup", 1), sandbox)
    return done


async def unknown(session: Session, names: Sequence[str]) -> list[str]:
    """Which of these names, seen at a provider, nobody here answers for."""
    rows = await session.fetch(call(session.options.schema, "unknown_sandboxes", 1), list(names))
    return [row[0] for row in rows]


async def read(
    session: Session,
    *,
    run_id: str | None = None,
    only_open: bool = False,
    limit: int = 100,
    after: str | None = None,
) -> list[SandboxRecord]:
    """One page of sandboxes, newest name first. ``after``: the last name of the page before."""
    rows = await session.fetch(
        call(session.options.schema, "list_sandboxes", 4), run_id, only_open, limit, after
    )
    names = [field.name for field in attrs.fields(SandboxRecord)]
    records = []
    for row in rows:
        values = {name: row[name] for name in names}
        values["diagnostics"] = None if row["diagnostics"] is None else json.loads(row["diagnostics"])
        records.append(SandboxRecord(**values))
    return records
