"""A handle: one run, as its submitter sees it.

Owns how a terminal fact becomes an output or an error. It keeps no state of the run.
"""

from __future__ import annotations

import math
import sys
from typing import Any, Protocol

from runtime.codec import JsonCodec, preview
from runtime.plays import Play
from sql.errors import InputRefused, RunCancelled, RunFailed, RunNotFound
from sql.status import Terminal
from sql.types import CancelOutcome, RunStatus


class RunVerbs(Protocol):
    """What a handle asks of the runtime or client that gave it."""

    async def result(
        self,
        run_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - part of the API
        play: Play | None = None,
    ) -> Any:
        """The run's output, once it has ended."""
        ...

    async def status(self, run_id: str) -> RunStatus:
        """What is now."""
        ...

    async def cancel(self, run_id: str, *, reason: str | None = None) -> CancelOutcome:
        """End the run as cancelled."""
        ...


class Handle:
    """Refers to a run by its id. ``created`` says whether the submit that gave it made the run (None: unknown).

    ``play`` is the run's, where it is known here; it says of which class the output is.
    """

    def __init__(
        self, run_id: str, verbs: RunVerbs, *, created: bool | None = None, play: Play | None = None
    ) -> None:
        self.run_id = run_id
        self.created = created
        self.play = play
        self._verbs = verbs

    def __repr__(self) -> str:
        return f"<Handle run={self.run_id}>"

    async def result(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 - part of the pinned API
        """The run's output, once it has ended: an instance of the play's own output class, where it has one.

        Raises RunFailed or RunCancelled when it ended so, RunNotFound, or ResultTimeout when ``timeout`` seconds
        passed first; the run then goes on. Raises HostStopping when the runtime stops first.
        """
        return await self._verbs.result(self.run_id, timeout=timeout, play=self.play)

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


def output_of(terminal: Terminal, codec: JsonCodec, play: Play | None = None) -> Any:
    """The output that a terminal fact carries, or the error that it means.

    Of the output class of ``play``, if given and it has one, unless the output was replaced. Raises PayloadRefused for
    an output that is not what the play's annotation says, or that ``codec`` cannot read.
    """
    run_id, payload = terminal.run_id, terminal.payload or {}
    if terminal.status is None:
        raise RunNotFound(run_id)
    if terminal.status == "completed":
        output = codec.read(payload.get("output"), what="output")
        if play is None or play.output_type is None or output is None or "replaced" in payload:
            return output
        return codec.structure(output, play.output_type, what="output")
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
