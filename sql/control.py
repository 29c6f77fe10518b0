"""Door of the concern control: cancelling runs, and failing those that wait.

Owns the typed calls of ``cancel_runs``, ``fail_waiting`` and ``sweep_cancellations``. It never tells an executor.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sql.calls import call
from sql.connection import Session


@attrs.define(slots=True)
class Cancellation:
    """A request to cancel one run. The same ``request_id`` asked again hears the same answer."""

    run_id: str
    request_id: str
    reason: str | None = None
    by: str | None = None


@attrs.define(slots=True)
class Cancelled:
    """``answer``: ``cancelled`` (this request won), ``cancelled_before``, ``completed``, ``failed``, ``pending``
    (recorded), ``busy`` (the row is locked) or ``missing``. ``owner``: the host whose attempt lost its fence. ``kin``:
    its parent has a wake, or its children have requests to cancel."""

    answer: str
    owner: int | None
    kin: bool = False


@attrs.define(slots=True)
class Failure:
    """A request to fail one parked run, fenced by the wait that was judged: its kind, its key and the attempt
    that parked on it.

    ``error`` is JSON text, as in a terminal. The same ``request_id`` asked again hears the same answer.
    """

    run_id: str
    attempt: int
    kind: str
    key: str
    request_id: str
    error: str
    by: str | None = None


@attrs.define(slots=True)
class Failed:
    """``answer``: ``failed`` (this request won), ``fence_lost`` (it waits, but not as judged), ``not_applicable`` (it
    does not wait), ``busy`` (the row is locked) or ``missing``; ``status``: the run's. ``woke``: its parent has a wake.
    """

    answer: str
    status: str | None
    woke: bool


async def fail(session: Session, items: Sequence[Failure]) -> list[Failed]:
    """End parked runs as failed without waking them; one answer each, in order. Safe to repeat: fenced."""
    rows = await session.fetch(
        call(session.options.schema, "fail_waiting", 7),
        [item.run_id for item in items],
        [item.attempt for item in items],
        [item.kind for item in items],
        [item.key for item in items],
        [item.request_id for item in items],
        [item.error for item in items],
        [item.by for item in items],
    )
    return [
        Failed(row["answer"], row["status"], row["woke"]) for row in sorted(rows, key=lambda row: row["ord"])
    ]


async def cancel(session: Session, items: Sequence[Cancellation], *, mark: bool) -> list[Cancelled]:
    """End runs as cancelled; with ``mark`` a run whose row is locked gets a recorded request instead of ``busy``.

    One answer each, in order. Safe to repeat with the same request ids.
    """
    rows = await session.fetch(
        call(session.options.schema, "cancel_runs", 5),
        [item.run_id for item in items],
        [item.request_id for item in items],
        [item.reason for item in items],
        [item.by for item in items],
        mark,
    )
    return [
        Cancelled(row["answer"], row["owner"], row["kin"]) for row in sorted(rows, key=lambda row: row["ord"])
    ]


async def sweep(session: Session, *, limit: int) -> tuple[int, int]:
    """Carry out recorded requests: how many were, and how many are left (up to ``limit``)."""
    row = await session.fetchrow(call(session.options.schema, "sweep_cancellations", 1), limit)
    assert row is not None
    return row["cancelled"], row["remaining"]
