"""Door of the concern submit: the public SQL function, for programs that are not hosts.

Owns the typed call of ``submit_run`` and the names of its refusals. It never checks anything itself: the
function does, as for every caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sql.calls import call
from sql.connection import Session
from sql.errors import (
    DuplicateRun,
    IdempotencyConflict,
    InputRefused,
    KernelRefused,
    RunlaneError,
    UnknownPlay,
)

_REFUSED = "RL001"
_CONFLICT = "RL003"
_DUPLICATE = "RL004"


async def submit(session: Session, play: str, input: str, options: Mapping[str, Any]) -> tuple[str, bool]:
    """Submit one run and return its id and whether it is new. ``input`` is JSON text.

    ``options`` are those of ``submit_run``, None meaning absent. Safe to repeat with a run id or an idempotency
    key. Raises ``InputRefused``, ``UnknownPlay``, ``IdempotencyConflict`` or ``DuplicateRun``.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        row = await session.fetchrow(
            call(session.options.schema, "submit_run", 3), play, input, json.dumps(given)
        )
    except KernelRefused as exc:
        raise refusal(exc) from exc
    assert row is not None
    return row["run_id"], row["created"]


def refusal(exc: KernelRefused) -> RunlaneError:
    """What a refusal of a public SQL function is as an error of ours; what is none comes back as it is."""
    detail = exc.detail or ""
    # The driver's text repeats the detail on a line of its own; what was refused stands on the first.
    message = str(exc).removesuffix(f" ({detail}) [{exc.sqlstate}]")
    if exc.sqlstate == _CONFLICT:
        return IdempotencyConflict(message, detail)
    if exc.sqlstate == _DUPLICATE:
        return DuplicateRun(message, detail)
    if exc.sqlstate == _REFUSED:
        field = detail.removeprefix("options.")
        reason = message.partition(": ")[2]
        return UnknownPlay(field, reason) if field == "play" else InputRefused(field, reason)
    return exc
