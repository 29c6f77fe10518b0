"""The verbs as blocking calls, for threads of programs that are not on trio.

Owns the blocking face of each verb. Where the work is done, and how the thread waits for it, is the caller's: see
``runtime.client`` and ``runtime.thread``.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from runtime import ids
from runtime.api import Verbs
from runtime.handle import Handle
from runtime.plays import Play
from sql.types import CancelOutcome, RunStatus

P = ParamSpec("P")
T = TypeVar("T")


class Call(Protocol):
    """Runs ``body`` where the verbs live, and blocks until it has ended."""

    def __call__(self, body: Callable[[], Awaitable[T]]) -> T:
        """The result of ``body``, or what it raises."""
        ...


def _blocking(
    verb: Callable[Concatenate[Verbs, P], Awaitable[T]],
) -> Callable[Concatenate[SyncVerbs, P], T]:
    @functools.wraps(verb)
    def call(self: SyncVerbs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(lambda: verb(self._verbs, *args, **kwargs))

    return call


def _one(
    verb: Callable[Concatenate[Verbs, P], Awaitable[Handle]],
) -> Callable[Concatenate[SyncVerbs, P], SyncHandle]:
    @functools.wraps(verb)
    def call(self: SyncVerbs, /, *args: P.args, **kwargs: P.kwargs) -> SyncHandle:
        made = self._call(lambda: verb(self._verbs, *args, **kwargs))
        return SyncHandle(made.run_id, self, created=made.created, play=made.play)

    return call


def _many(
    verb: Callable[Concatenate[Verbs, P], Awaitable[list[Handle]]],
) -> Callable[Concatenate[SyncVerbs, P], list[SyncHandle]]:
    @functools.wraps(verb)
    def call(self: SyncVerbs, /, *args: P.args, **kwargs: P.kwargs) -> list[SyncHandle]:
        made = self._call(lambda: verb(self._verbs, *args, **kwargs))
        return [SyncHandle(one.run_id, self, created=one.created, play=one.play) for one in made]

    return call


class SyncVerbs:
    """The verbs of ``Runtime``, blocking, and safe to use from any number of threads."""

    def __init__(self, verbs: Verbs, call: Call) -> None:
        self._verbs = verbs
        self._call = call

    submit = _one(Verbs.submit)
    submit_many = _many(Verbs.submit_many)
    result = _blocking(Verbs.result)
    status = _blocking(Verbs.status)
    facts = _blocking(Verbs.facts)
    attempts = _blocking(Verbs.attempts)
    runs = _blocking(Verbs.runs)
    steps = _blocking(Verbs.steps)
    cancel = _blocking(Verbs.cancel)
    send_event = _blocking(Verbs.send_event)
    events = _blocking(Verbs.events)
    lanes = _blocking(Verbs.lanes)
    retry_lane = _blocking(Verbs.retry_lane)
    skip_lane = _blocking(Verbs.skip_lane)
    redeliver_lane = _blocking(Verbs.redeliver_lane)
    journal = _blocking(Verbs.journal)
    fail = _blocking(Verbs.fail)
    schedule = _blocking(Verbs.schedule)
    schedules = _blocking(Verbs.schedules)
    pause_schedule = _blocking(Verbs.pause_schedule)
    resume_schedule = _blocking(Verbs.resume_schedule)
    delete_schedule = _blocking(Verbs.delete_schedule)
    set_rate = _blocking(Verbs.set_rate)
    rates = _blocking(Verbs.rates)
    set_circuit = _blocking(Verbs.set_circuit)
    circuits = _blocking(Verbs.circuits)
    set_limit = _blocking(Verbs.set_limit)
    sandboxes = _blocking(Verbs.sandboxes)
    retry_sandbox = _blocking(Verbs.retry_sandbox)
    compute_records = _blocking(Verbs.compute_records)
    limits = _blocking(Verbs.limits)
    fires = _blocking(Verbs.fires)
    repair_fire = _one(Verbs.repair_fire)

    def handle(self, run_id: str, play: Play | None = None) -> SyncHandle:
        """As ``Runtime.handle``."""
        return SyncHandle(ids.check_run_id(run_id), self, play=play)


class SyncHandle:
    """As ``Handle``, with blocking calls."""

    def __init__(
        self, run_id: str, verbs: SyncVerbs, *, created: bool | None = None, play: Play | None = None
    ) -> None:
        self.run_id = run_id
        self.created = created
        self.play = play
        self._verbs = verbs

    def __repr__(self) -> str:
        return f"<SyncHandle run={self.run_id}>"

    def result(self, timeout: float | None = None) -> Any:
        """As ``Handle.result``."""
        return self._verbs.result(self.run_id, timeout=timeout, play=self.play)

    def status(self) -> RunStatus:
        """As ``Handle.status``."""
        return self._verbs.status(self.run_id)

    def cancel(self, *, reason: str | None = None) -> CancelOutcome:
        """As ``Handle.cancel``."""
        return self._verbs.cancel(self.run_id, reason=reason)
