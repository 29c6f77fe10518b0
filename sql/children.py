"""Door of the concern children: runs that a run starts.

Owns the typed call of ``start_children``. It never waits for a child: that is a wait like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sql.admission import Submission
from sql.calls import call
from sql.connection import Session


@attrs.define(slots=True)
class Launch:
    """A child of a live attempt: ``submission`` under the parent's ``key``, of which its run id is made."""

    run_id: str
    attempt: int
    token: int
    key: str
    submission: Submission


@attrs.define(slots=True)
class Launched:
    """``answer``: ``started``, ``conflict`` (the key has started another play or input), ``busy`` (ask again) or
    ``lost`` (the parent's fence is). ``created``: this launch made the run."""

    answer: str
    created: bool


async def start(
    session: Session, items: Sequence[Launch], *, release_id: str | None, environment: str | None
) -> list[Launched]:
    """Start children; one answer each, in order. Safe to repeat with the same items.

    Raises ``KernelRefused`` when one item cannot be stored; the caller splits the batch.
    """
    runs = [item.submission for item in items]
    rows = await session.fetch(
        call(session.options.schema, "start_children", 16),
        [item.run_id for item in items],
        [item.attempt for item in items],
        [item.token for item in items],
        [item.key for item in items],
        [run.run_id for run in runs],
        [run.play for run in runs],
        [run.bucket for run in runs],
        [run.priority for run in runs],
        [run.org_id for run in runs],
        [run.delay_s for run in runs],
        [run.labels for run in runs],
        [run.input for run in runs],
        [run.extras for run in runs],
        [run.request for run in runs],
        release_id,
        environment,
    )
    return [Launched(row["answer"], row["created"]) for row in sorted(rows, key=lambda row: row["ord"])]
