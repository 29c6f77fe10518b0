"""A handle: one run, as its submitter sees it.

Owns how a terminal fact becomes an output or an error. It keeps no state of the run.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Protocol

from runtime.codec import preview
from sql.errors import InputRefused, RunCancelled, RunFailed, RunNotFound
from sql.status import Terminal
from sql.types import CancelOutcome, RunStatus


class RunVerbs(Protocol):
    """What a handle asks of the runtime or client that gave it."""

    async def result(self, run_id: str, *, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - part of the API
        """The run's output, once it has ended."""
        ...

    async def status(self, run_id: str) -> RunStatus:
        """What is now."""
        ...

    async def cancel(self, run_id: str, *, reason: str | None = None) -> CancelOutcome:
        """End the run as cancelled."""
        ...


class Handle:
    """Refers to a run by its id. ``created`` says whether the submit that gave it made the run (None: unknown)."""

    def __init__(self, run_id: str, verbs: RunVerbs, *, created: bool | None = None) -> None:
        self.run_id = run_id
        self.created = created
        self._verbs = verbs

    def __repr__(self) -> str:
        return f"<Handle run={self.run_id}>"

    async def result(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - part of the pinned API
        """The run's output, once it has ended.

        Raises RunFailed or RunCancelled when it ended so, RunNotFound, or ResultTimeout when ``timeout`` seconds
        passed first; the run then goes on. Raises HostStopping when the runtime stops first.
        """
        return await self._verbs.result(self.run_id, timeout=timeout)

    async def status(self) -> RunStatus:
        """What is now. Raises RunNotFound."""
        return await self._verbs.status(self.run_id)

    async def cancel(self, *, reason: str | None = None) -> CancelOutcome:
        """End the run as cancelled, and say who won."""
        return await self._verbs.cancel(self.run_id, reason=reason)


def check_timeout(timeout: Any) -> float:
    """Seconds to wait for an end; infinite for None. Raises InputRefused."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise InputRefused("timeout", f"must be a number of seconds from 0, or None, not {preview(timeout)}")
    return float(min(timeout, sys.float_info.max))


def output_of(terminal: Terminal) -> Any:
    """The output that a terminal fact carries, or the error that it means."""
    run_id, payload = terminal.run_id, terminal.payload or {}
    if terminal.status is None:
        raise RunNotFound(run_id)
    if terminal.status == "completed":
        return payload.get("output")
    if terminal.status == "cancelled":
        raise RunCancelled(run_id, payload.get("reason"), payload.get("by"))
    error = payload.get("error") or {}
    raise RunFailed(
        run_id,
        error.get("error_type", "Unknown"),
        error.get("message", ""),
        error.get("traceback"),
        payload.get("failures", 0),
    )
