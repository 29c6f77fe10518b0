"""The public API: ``Runtime`` and its verbs.

Owns the verbs, the life of a runtime inside a host program, and what both mean to their callers. It never talks to the
database itself: a link carries what a verb asks for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import sniffio
import trio

from actors.core import EscalatedActor, bounded_cleanup, leaves
from runtime import host as composition
from runtime import ids
from runtime.codec import JsonCodec, preview
from runtime.config import RuntimeConfig
from runtime.embedded import embedded_server
from runtime.handle import Handle, check_timeout, output_of
from runtime.ledger import Ledger
from runtime.link import ActorLink, Link
from runtime.plays import Play, index_plays
from runtime.sandboxes import SandboxProvider
from runtime.schedules import Schedule, Schedules, check_declared
from runtime.submit import Submit, check_admitted, check_play_name
from sql import billing, circuits, events, facts, journal, limits, rates, receipts, sandboxes, status
from sql.billing import ComputeRecord
from sql.circuits import Circuit
from sql.control import Cancellation, Failure
from sql.errors import (
    HostFailed,
    HostStopping,
    IdempotencyConflict,
    InputRefused,
    OutcomeUnknown,
    ResultTimeout,
    RunlaneError,
    RunNotFound,
)
from sql.events import Sending
from sql.limits import Limit
from sql.rates import RateScope
from sql.receipts import StepRecord
from sql.sandboxes import SandboxRecord
from sql.schedules import Fire, ScheduleStatus
from sql.status import AttemptRecord
from sql.types import (
    OPEN_STATUSES,
    TERMINAL_STATUSES,
    CancelOutcome,
    Event,
    EventOutcome,
    Fact,
    FailOutcome,
    JournalEntry,
    Lane,
    LaneStatus,
    RunStatus,
)

if TYPE_CHECKING:
    from runtime.thread import RuntimeThread

log = logging.getLogger("runlane.host")

_MOST_LISTED = 1_000
_HEALTH_GRACE_S = 1.0


@attrs.define(eq=False)
class _Course:
    """How the block of ``Runtime.open`` ends."""

    body: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    failure: RunlaneError | None = None
    error: BaseException | None = None

    def fail(self, failure: RunlaneError) -> None:
        """The host cannot go on: end the block."""
        self.failure = self.failure or failure
        self.body.cancel()

    def conclude(self) -> None:
        """Raise what the block raised, or why it was ended: that its verbs were then refused is no news."""
        if self.error is not None and not (self.failure is not None and _consequence(self.error)):
            raise self.error
        if self.failure is not None:
            raise self.failure


def _consequence(error: BaseException) -> bool:
    """Whether an error says no more than that the runtime has stopped."""
    return all(isinstance(leaf, (HostStopping, OutcomeUnknown, trio.Cancelled)) for leaf in leaves(error))


class Verbs:
    """What a client can ask of a schema, whoever carries the calls: the verbs of ``Runtime`` and of ``Client``.

    All verbs raise ``OutcomeUnknown`` when the database gave no answer within ``operation_timeout_s``: what was asked
    may have happened, and asking again is safe. They raise ``HostStopping`` once the runtime stops.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._schedules = Schedules(link)
        self._config = link.config

    @property
    def config(self) -> RuntimeConfig:
        """The settings in force, the embedded server's DSN included."""
        return self._config

    # --- verbs ---------------------------------------------------------------------------------------

    async def submit(
        self,
        play: Play | str,
        input: Any = None,
        *,
        run_id: str | None = None,
        idempotency_key: str | None = None,
        org_id: str | None = None,
        priority: int = 0,
        delay: float | None = None,
        at: datetime | None = None,
        labels: Mapping[str, str] | None = None,
        unique_key: str | None = None,
        unique_for_s: float | None = None,
        on_conflict: str | None = None,
        surface: str | None = None,
        trigger: str | None = None,
        scope: str | None = None,
        terminal_receiver: str | None = None,
        array_input_receiver: str | None = None,
        terminal_performance: str | None = None,
        concurrency_key: str | None = None,
        receiver: str | None = None,
    ) -> Handle:
        """Admit a run, durably, and return its handle.

        ``play`` may be another host's, by name. ``run_id`` (default: a new one) and ``idempotency_key`` (per
        organisation and play) make the call safe to repeat: the same play and input give the existing run.
        ``priority`` is from -2 to 2, higher first. ``delay`` (seconds) or ``at`` (a moment with a time zone) say when
        it is due. ``labels`` are for finding runs. ``receiver`` names the ledger that gets the run's facts, of those
        that ``Runtime.open`` was given; default is the host's own.

        ``unique_key`` (per organisation and play) lets one run at a time have it: until that run has ended, or for
        ``unique_for_s`` seconds from its submit. While another run holds it, ``on_conflict`` decides: "reject" (the
        default) raises DuplicateRun, "existing" gives the holder's handle, "replace" cancels the holder, whatever it
        is doing, and admits this one.

        ``surface``, ``trigger`` and ``scope`` say where the launch came from: kept in the run's first fact, shown by
        the full status. ``terminal_receiver`` is who gets the run's end in place of the usual ledger;
        ``array_input_receiver`` who gets it once the run has registered array input. ``terminal_performance`` says that
        whoever gets it takes what it says of how the run went (see ``Performance``): ``basic``, or ``full``, which is
        with what a runner has used; without it the end says nothing of that.

        Of runs with one ``concurrency_key`` (default: what the play makes of the input) only so many run at once as
        the play says.

        Raises InputRefused (PayloadRefused, UnknownPlay) naming the field, IdempotencyConflict or DuplicateRun.
        """
        item = Submit(
            play=play,
            input=input,
            run_id=run_id,
            idempotency_key=idempotency_key,
            org_id=org_id,
            priority=priority,
            delay=delay,
            at=at,
            labels=labels,
            unique_key=unique_key,
            unique_for_s=unique_for_s,
            on_conflict=on_conflict,
            surface=surface,
            trigger=trigger,
            scope=scope,
            terminal_receiver=terminal_receiver,
            array_input_receiver=array_input_receiver,
            terminal_performance=terminal_performance,
            concurrency_key=concurrency_key,
            receiver=receiver,
        )
        (handle,) = await self.submit_many([item])
        return handle

    async def submit_many(self, items: Iterable[Submit | tuple[Play | str, Any]]) -> list[Handle]:
        """Admit many runs in few round trips; handles in the same order.

        Each item is a ``Submit`` or a pair of play and input. All are checked before the first is admitted. Chunks are
        admitted on their own: when one item is refused by the database, the error is raised after the others are in.
        """
        asked = [item if isinstance(item, Submit) else Submit(*_pair(item)) for item in items]
        prepared = [await self._link.submissions.prepare(item) for item in asked]
        answers = await self._link.admit(prepared)
        for item, answer in zip(prepared, answers, strict=True):
            check_admitted(item, answer)
        plays = [self._link.submissions.known(item.play) for item in asked]
        return [
            Handle(answer.run_id, self, created=answer.created, play=play)
            for answer, play in zip(answers, plays, strict=True)
        ]

    def handle(self, run_id: str, play: Play | None = None) -> Handle:
        """A handle of any run of this schema, from any process. Asks nothing yet.

        ``play``, the run's own, makes its output an instance of the play's output class.
        """
        return Handle(ids.check_run_id(run_id), self, play=play)

    async def result(
        self,
        run_id: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - part of the API
        play: Play | None = None,
    ) -> Any:
        """The run's output, once it has ended: an instance of the output class of ``play``, if given and it has one.

        Raises RunFailed or RunCancelled when it ended so, RunNotFound, or ResultTimeout when ``timeout`` seconds
        passed first; the run then goes on. Raises HostStopping when the runtime stops first.
        """
        limit_s = check_timeout(timeout)
        terminal = await self._link.ended(ids.check_run_id(run_id), limit_s)
        if terminal is None:
            raise ResultTimeout(f"run {run_id} has not ended within {limit_s:g} s; it goes on")
        return output_of(terminal, self._link.submissions.codec, play)

    async def status(self, run_id: str, *, full: bool = False) -> RunStatus:
        """What is now; with ``full`` also where its launch came from, and how it ended. Raises RunNotFound."""
        ids.check_run_id(run_id)
        found: RunStatus | None = await self._ask(lambda session: status.read_run(session, run_id, full=full))
        if found is None:
            raise RunNotFound(run_id)
        return found

    async def facts(self, run_id: str) -> list[Fact]:
        """The run's log in order: the lifecycle lane, then what it has logged. Raises RunNotFound."""
        ids.check_run_id(run_id)
        found: list[Fact] = await self._ask(lambda session: facts.read(session, run_id))
        if not found:
            raise RunNotFound(run_id)
        return found

    async def attempts(self, run_id: str) -> Sequence[AttemptRecord]:
        """The attempts of a run that have ended, oldest first. Raises RunNotFound."""
        ids.check_run_id(run_id)
        found: Sequence[AttemptRecord] = await self._ask(
            lambda session: status.read_attempts(session, run_id)
        )
        if not found:
            await self.status(run_id)
        return found

    async def steps(
        self, run_id: str, *, limit: int = 100, after: str | None = None, outputs: bool = False
    ) -> list[StepRecord]:
        """One page of the run's steps by key, ``key[2]`` of a map behind ``key[10]``. Raises RunNotFound.

        ``after``: the last key of the page before. ``outputs``: with what each has given.
        """
        ids.check_run_id(run_id)
        _check_limit(limit)
        if after is not None:
            ids.check_step_key(after)
        found: list[StepRecord] = await self._ask(
            lambda session: receipts.read(session, run_id, after=after, limit=limit, outputs=bool(outputs))
        )
        if not found:
            await self.status(run_id)
        codec = self._link.submissions.codec
        return [
            attrs.evolve(step, output=codec.read(step.output, what=f"step {step.key!r} output"))
            for step in found
        ]

    async def runs(
        self,
        *,
        status: str | None = None,
        play: str | None = None,
        org_id: str | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[RunStatus]:
        """One page of runs that match, newest run id first. ``after``: the last run id of the page before."""
        return await self._list(status, play, org_id, labels, limit, after)

    async def cancel(self, run_id: str, *, reason: str | None = None, by: str | None = None) -> CancelOutcome:
        """End a run as cancelled, whatever it is doing, and say who won. Raises RunNotFound.

        The run's attempt loses its fence at once; its play sees a cancellation. Where somebody else holds the run's
        row, the request is recorded and the outcome is ``pending``.
        """
        ids.check_run_id(run_id)
        item = Cancellation(run_id, uuid.uuid4().hex, _text("reason", reason), _text("by", by))
        answer = (await self._link.cancel(item)).answer
        if answer == "missing":
            raise RunNotFound(run_id)
        return CancelOutcome(answer == "cancelled", answer.removesuffix("_before"))

    async def send_event(
        self, run_id: str, name: str, payload: Any = None, *, event_id: str | None = None
    ) -> EventOutcome:
        """Send an event to a run, durably, for its ``wait_event`` or ``wait_approval`` of that name.

        It is kept if it comes before the wait, and refused if it says neither yes nor no where an approval of its name
        is waited for. ``event_id`` makes the call safe to repeat: an event with the same id, name and payload counts
        once per run. Raises InputRefused (PayloadRefused) naming the field, RunNotFound, or IdempotencyConflict when
        the id was used for another event.
        """
        ids.check_run_id(run_id)
        name = ids.check_event_name(name)
        own_id = ids.check_event_id(event_id)
        text = self._link.submissions.payload(payload)
        item = Sending(run_id, name, text, own_id or uuid.uuid4().hex, own_id is not None)
        answer = await self._link.send(item)
        if answer == "missing":
            raise RunNotFound(run_id)
        if answer == "conflict":
            raise IdempotencyConflict(
                f"event id {event_id!r} was used for another event of run {run_id!r}", run_id
            )
        if answer == "undecided":
            raise events.undecided(item)
        return EventOutcome(answer != "ended", answer, item.event_id)

    async def fail(self, run_id: str, reason: str, *, by: str | None = None) -> FailOutcome:
        """End a run that waits as failed, without waking it, and say what became of it. Raises RunNotFound.

        For a run that is parked on a sleep, an event, an approval or a child. It fails with the error type
        ``FailedWhileWaiting`` and ``reason`` as its message, but only while it waits as it does at this moment: a run
        that goes on meanwhile, or that somebody has asked to cancel, is left alone.
        """
        message = _text("reason", reason)
        if not message:
            raise InputRefused("reason", "must say why, in 1 to 2000 characters")
        by = _text("by", by)
        now = await self.status(run_id)
        if now.wait_kind is None or now.wait_key is None:
            return FailOutcome(False, "not_applicable", now.status)
        error = {"error_type": "FailedWhileWaiting", "message": message, "traceback": None}
        item = Failure(
            run_id, now.attempt, now.wait_kind, now.wait_key, uuid.uuid4().hex, json.dumps(error), by
        )
        answer = await self._link.fail(item)
        if answer.answer == "missing" or answer.status is None:
            raise RunNotFound(run_id)
        return FailOutcome(answer.answer == "failed", answer.answer, answer.status)

    async def events(self, run_id: str) -> list[Event]:
        """Everything that was sent to a run, in the order of arrival. Raises RunNotFound."""
        ids.check_run_id(run_id)
        found: list[Event] = await self._ask(lambda session: events.read(session, run_id))
        if not found:
            await self.status(run_id)
        return found

    # --- lanes -----------------------------------------------------------------------------------------

    async def lanes(
        self, *, blocked: bool = False, limit: int = 100, after: LaneStatus | None = None
    ) -> list[LaneStatus]:
        """One page of the lanes that have facts to deliver, those that wait for an operator first, then by run id.

        ``blocked``: only those. ``after``: the last of the page before.
        """
        _check_limit(limit)
        place = None if after is None else (after.blocked, after.run_id, after.lane)
        found: list[LaneStatus] = await self._ask(
            lambda session: journal.list_lanes(session, blocked=blocked, limit=limit, after=place)
        )
        return found

    async def retry_lane(self, run_id: str, *, because: str | None = None, by: str | None = None) -> bool:
        """Deliver the blocked prefixes of a run's lanes again, under the same keys. Whether a lane was blocked."""
        ids.check_run_id(run_id)
        words = {"because": _words("because", because), "by": _words("by", by)}
        done: bool = await self._ask(
            lambda session: journal.retry_lane(session, run_id, **words, notify=self._config.notify)
        )
        return done

    async def skip_lane(
        self,
        run_id: str,
        seq: int,
        *,
        because: str,
        lane: Lane = Lane.LIFECYCLE,
        by: str | None = None,
    ) -> range:
        """Give up the facts of a run's blocked prefix up to ``seq``, and return which: the ledger never gets them.

        What follows is delivered under keys of a new generation. ``because`` is kept in the journal, as is ``by``.
        Raises InputRefused for a lane that is not blocked and for a fact that is not in its blocked prefix.
        """
        return await self._on_facts(journal.skip_lane, run_id, seq, lane, because, by)

    async def redeliver_lane(
        self,
        run_id: str,
        seq: int,
        *,
        because: str,
        lane: Lane = Lane.LIFECYCLE,
        by: str | None = None,
    ) -> range:
        """Deliver a run's facts again from ``seq`` on, and return which: for a ledger that has lost what it had
        acknowledged. Prefixes and keys may be others than before: the ledger tells by their number what it has.

        ``because`` is kept in the journal, as is ``by``. Raises InputRefused for a run without such a lane and for a
        fact that has yet to be delivered.
        """
        return await self._on_facts(journal.redeliver_lane, run_id, seq, lane, because, by)

    async def _on_facts(
        self, verb: Callable[..., Any], run_id: str, seq: int, lane: Lane, because: str, by: str | None
    ) -> range:
        ids.check_run_id(run_id)
        if isinstance(seq, bool) or not isinstance(seq, int) or not 1 <= seq < 2**31:
            raise InputRefused("seq", f"must be the number of a fact, from 1, not {preview(seq)}")
        words = {"lane": Lane(lane), "because": _words("because", because), "by": _words("by", by)}
        first, through = await self._ask(
            lambda session: verb(session, run_id, seq, **words, notify=self._config.notify)
        )
        return range(first, through + 1)

    async def journal(
        self, run_id: str | None = None, *, limit: int = 100, before: int | None = None
    ) -> list[JournalEntry]:
        """What operators did to lanes, newest first; of one run, or of all. ``before``: the last id of the page
        before."""
        _check_limit(limit)
        if run_id is not None:
            ids.check_run_id(run_id)
        found: list[JournalEntry] = await self._ask(
            lambda session: journal.read_journal(session, run_id=run_id, limit=limit, before=before)
        )
        return found

    # --- schedules -----------------------------------------------------------------------------------

    async def schedule(
        self,
        name: str,
        play: Play | str,
        input: Any = None,
        *,
        cron: str | None = None,
        every_s: int | None = None,
        timezone: str = "UTC",
        missed: str = "last",
        org_id: str | None = None,
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
        concurrency_key: str | None = None,
    ) -> ScheduleStatus:
        """Create a schedule, or change the one of that name, and return what stands. Safe to repeat.

        It submits a run of ``play`` at each time of the ``cron`` line (five fields, or six with seconds in front) in
        the IANA ``timezone``, or every ``every_s`` seconds from now; exactly one run per fire, whichever hosts live.
        A schedule keeps its next fire unless it fires at other times than before, and its pause in any case.

        ``missed`` says what becomes of fires for which no host was there, or that came during a pause: ``last`` makes
        up for the latest of them, ``all`` for each (of more than 1,000 for the latest), ``skip`` drops those that are
        late by more than 60 s. The runs have two more labels, ``schedule`` and ``fire_at``.

        Raises InputRefused (PayloadRefused, UnknownPlay) naming the field.
        """
        return await self._schedules.put(
            Schedule(
                name,
                play,
                input,
                cron=cron,
                every_s=every_s,
                timezone=timezone,
                missed=missed,
                org_id=org_id,
                priority=priority,
                labels=labels,
                concurrency_key=concurrency_key,
            )
        )

    async def schedules(self) -> list[ScheduleStatus]:
        """All schedules of this schema, by name."""
        return await self._schedules.all()

    async def pause_schedule(self, name: str) -> None:
        """Let it fire nothing until it is resumed. Raises ScheduleNotFound."""
        await self._schedules.pause(name, paused=True)

    async def resume_schedule(self, name: str) -> None:
        """Let it fire again; fires that came during the pause count as missed. Raises ScheduleNotFound."""
        await self._schedules.pause(name, paused=False)

    async def delete_schedule(self, name: str) -> bool:
        """Delete it; whether it was there. Its runs go on, and what it has fired is kept as long as they are."""
        return await self._schedules.delete(name)

    async def fires(self, name: str, *, limit: int = 100, before: datetime | None = None) -> list[Fire]:
        """What a schedule has fired, latest first. ``before``: the last ``fire_at`` of the page before.

        Raises ScheduleNotFound.
        """
        return await self._schedules.fires(name, limit, before)

    async def repair_fire(self, name: str, fire_time: datetime) -> Handle:
        """Submit a recorded fire again, as its schedule says now, if its run is lost; the handle of its run.

        ``handle.created`` says whether it had to be. Raises ScheduleNotFound or FireNotFound.
        """
        run_id, created = await self._schedules.repair(name, fire_time)
        return Handle(run_id, self, created=created)

    # --- what hosts share ------------------------------------------------------------------------------

    async def set_rate(
        self, name: str, *, per_s: float | None = None, burst: float = 1.0, max_in_flight: int | None = None
    ) -> bool:
        """Declare a rate scope, or change one: for every host at once. Whether anything changed.

        ``per_s`` units per second, of which ``burst`` may go at once; at most ``max_in_flight`` permits held. Raises
        InputRefused.
        """
        ids.check_shared_name(name)
        _numbers(per_s=per_s, burst=burst, max_in_flight=max_in_flight)
        changed: bool = await self._ask(
            lambda session: rates.set_rate(
                session, name, per_s=per_s, burst=burst, max_in_flight=max_in_flight
            )
        )
        return changed

    async def rates(self) -> list[RateScope]:
        """Every rate scope as it stands, by name."""
        found: list[RateScope] = await self._ask(rates.read)
        return found

    # --- sandboxes -----------------------------------------------------------------------------------

    async def sandboxes(
        self,
        *,
        run_id: str | None = None,
        only_open: bool = False,
        limit: int = 100,
        after: str | None = None,
    ) -> list[SandboxRecord]:
        """One page of sandboxes that were ever asked for, highest name first: of a run, or of all runs.

        ``only_open``: those that are not confirmed to be gone. ``after``: the last name of the page before.
        """
        if run_id is not None:
            ids.check_run_id(run_id)
        _check_limit(limit)
        _check_name(after, "after")
        found: list[SandboxRecord] = await self._ask(
            lambda session: sandboxes.read(
                session, run_id=run_id, only_open=bool(only_open), limit=limit, after=after
            )
        )
        return found

    async def retry_sandbox(self, name: str) -> bool:
        """Let cleanup try a sandbox again that is blocked because it could not be deleted; False when it is not."""
        _check_name(name, "name")
        retried: bool = await self._ask(lambda session: sandboxes.retry(session, name))
        return retried

    async def compute_records(
        self, *, limit: int = 1_000, after: ComputeRecord | None = None
    ) -> list[ComputeRecord]:
        """One page of what detached runs have used, in the order in which it was recorded.

        A record is told once its run has ended and its sandboxes are deleted, and never changes: count each
        ``record_id`` once. ``after``: the last record of the page before.
        """
        _check_limit(limit)
        place = None if after is None else (after.recorded_at, after.record_id)
        found: list[ComputeRecord] = await self._ask(
            lambda session: billing.read(session, limit=limit, after=place)
        )
        return found

    # --- limits --------------------------------------------------------------------------------------

    async def set_limit(self, kind: str, name: str, max_running: int | None) -> None:
        """Limit how many attempts of an organisation run at once, on all hosts: ``set_limit("org", "acme", 10)``.

        ``"sandbox_org"`` limits the sandboxes of an organisation, ``"sandbox"`` those of a provider by its ``key``, or
        of all together under the name ``""``. None lifts the limit, 0 holds everything back. A lower limit ends nothing
        that runs. (The limits of plays and keys are options of ``@play``.) Raises InputRefused naming the argument.
        """
        ids.check_limit_of(kind, name)
        most = ids.check_limit(max_running)
        await self._ask(lambda session: limits.set_limit(session, kind, name, most))

    async def limits(self) -> list[Limit]:
        """Every limit, of organisations, plays and keys, with what runs under it now."""
        found: list[Limit] = await self._ask(limits.read_all)
        return found

    # --- circuits ------------------------------------------------------------------------------------

    async def set_circuit(
        self,
        name: str,
        *,
        failures: int | None = None,
        open_s: float | None = None,
        open_max_s: float | None = None,
        close: bool = False,
    ) -> bool:
        """Declare the circuit of a dependency, change it, or ``close`` it now. Whether anything changed.

        ``failures`` in a row open it (default 5), for ``open_s`` seconds (10), twice as long each time that its probe
        fails, up to ``open_max_s`` (300). None leaves what stands. Raises InputRefused.
        """
        ids.check_shared_name(name)
        _numbers(failures=failures, open_s=open_s, open_max_s=open_max_s)
        changed: bool = await self._ask(
            lambda session: circuits.set_circuit(
                session, name, failures=failures, open_s=open_s, open_max_s=open_max_s, close=bool(close)
            )
        )
        return changed

    async def circuits(self) -> list[Circuit]:
        """Every circuit that has ever failed or been declared: those that are not closed first."""
        found: list[Circuit] = await self._ask(circuits.read)
        return found

    # --- inside --------------------------------------------------------------------------------------

    async def _list(
        self,
        wanted: str | None,
        play: str | None,
        org_id: str | None,
        labels: Mapping[str, str] | None,
        limit: int,
        after: str | None,
    ) -> list[RunStatus]:
        known = OPEN_STATUSES | TERMINAL_STATUSES
        if wanted is not None and not (isinstance(wanted, str) and wanted in known):
            raise InputRefused("status", f"must be one of {', '.join(sorted(known))}, not {preview(wanted)}")
        _check_limit(limit)
        if after is not None:
            ids.check_run_id(after)
        if play is not None:
            check_play_name(play)
        ids.check_org_id(org_id)
        checked = ids.check_labels(labels)
        text = None
        if checked:
            text = JsonCodec().encode(checked, what="labels", limit_bytes=65_536, max_depth=2)
        found: list[RunStatus] = await self._ask(
            lambda session: status.list_runs(
                session, status=wanted, play=play, org_id=org_id, labels=text, limit=limit, after=after
            )
        )
        return found

    async def _ask(self, read: Any) -> Any:
        return await self._link.ask(read)


class Runtime(Verbs):
    """A host of plays and a client of its schema. Made by ``Runtime.open``."""

    def __init__(self, host: composition.Host) -> None:
        super().__init__(ActorLink(host))
        self._host = host
        self._course = _Course()
        self._stopped = trio.Event()
        self._signals = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._health_port: int | None = None

    # --- opening and closing -------------------------------------------------------------------------

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        config: RuntimeConfig | None = None,
        *,
        plays: Iterable[Play] = (),
        schedules: Iterable[Schedule] = (),
        ledger: Ledger | None = None,
        receivers: Mapping[str, Ledger] | None = None,
        codec: JsonCodec | None = None,
        on_delivery: Callable[[Sequence[str], Sequence[float]], None] | None = None,
        sandboxes: Mapping[str, SandboxProvider] | None = None,
    ) -> AsyncIterator[Runtime]:
        """Bring the schema up to date, start the actors, and stop them in order at the end of the block.

        ``schedules`` are created or changed, as by ``schedule``, before the block begins; one that is no longer among
        them stays until it is deleted.

        ``config`` None reads ``RUNLANE_*`` variables. ``ledger`` None keeps a read model in the same database;
        ``receivers`` are further ledgers by the name that ``submit`` is given. ``on_delivery(types, lags_s)`` is told
        the type of each fact that a ledger has acknowledged and the seconds from its commit until then, on the
        database clock; it must not block, and what it raises is logged. An error
        of the block leaves it unwrapped. A host that gives up cancels the block and raises HostFailed.

        ``sandboxes`` are the providers by the names that plays give; "local" is there without being given.

        At the end, running plays get ``grace_s``; then every lease is handed back within ``release_budget_s``.
        """
        check_on_trio("Runtime.open")
        declared = check_declared(schedules)
        async with cls._opened(
            config,
            plays,
            ledger,
            codec,
            sandboxes,
            receivers=receivers,
            on_delivery=on_delivery,
            deploy=True,
        ) as runtime:
            for item in declared:
                await runtime._schedules.put(item)
            yield runtime

    @classmethod
    @contextlib.asynccontextmanager
    async def _opened(
        cls,
        config: RuntimeConfig | None,
        plays: Iterable[Play],
        ledger: Ledger | None,
        codec: JsonCodec | None,
        sandboxes: Mapping[str, SandboxProvider] | None = None,
        *,
        receivers: Mapping[str, Ledger] | None = None,
        on_delivery: Callable[[Sequence[str], Sequence[float]], None] | None = None,
        deploy: bool,
    ) -> AsyncIterator[Runtime]:
        config = RuntimeConfig.given(config)
        registered = index_plays(plays)
        async with contextlib.AsyncExitStack() as stack:
            if config.dsn is None:
                config = attrs.evolve(config, dsn=await _embedded(stack, config))
            host = await composition.compose(
                config,
                registered,
                ledger,
                codec or JsonCodec(),
                sandboxes,
                receivers=receivers,
                on_delivery=on_delivery,
                deploy=deploy,
            )
            runtime = cls(host)
            async with trio.open_nursery() as nursery:
                await runtime._start(nursery)
                try:
                    if runtime._course.failure is None:
                        with runtime._course.body:
                            yield runtime
                except BaseException as exc:
                    # Kept, and raised again outside of the nursery, which would wrap it in a group.
                    runtime._course.error = exc
                await runtime._close(nursery)
            runtime._course.conclude()

    @staticmethod
    def start_in_thread(
        config: RuntimeConfig | None = None,
        *,
        plays: Iterable[Play] = (),
        schedules: Iterable[Schedule] = (),
        ledger: Ledger | None = None,
        receivers: Mapping[str, Ledger] | None = None,
        codec: JsonCodec | None = None,
        on_delivery: Callable[[Sequence[str], Sequence[float]], None] | None = None,
        sandboxes: Mapping[str, SandboxProvider] | None = None,
    ) -> RuntimeThread:
        """Start a runtime in a thread of its own, for a program that is not on trio. Arguments are those of ``open``.

        Its verbs are blocking calls, safe from any thread, and coroutines for asyncio under ``aio``:

            async with Runtime.start_in_thread(config, plays=[audit]) as rt:  # or a plain with
                handle = await rt.aio.submit(audit, {"path": "/srv"})         # or rt.submit(…)
        """
        from runtime.thread import RuntimeThread  # late: only such programs need it

        return RuntimeThread(
            partial(
                Runtime.open,
                config,
                plays=list(index_plays(plays).values()),
                schedules=check_declared(schedules),
                ledger=ledger,
                receivers=receivers,
                codec=codec,
                on_delivery=on_delivery,
                sandboxes=sandboxes,
            )
        )

    async def _start(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        await nursery.start(self._supervise)
        if self._config.health_port is not None and self._course.failure is None:
            await nursery.start(self._serve_health)
        if self._course.failure is None:
            log.info(
                "event=ready host=%s schema=%s plays=%s slots=%d",
                self._host.identity["host"],
                self._config.schema,
                ",".join(self._host.plays) or "none",
                self._config.slots,
            )

    async def _supervise(self, task_status: trio.TaskStatus[None]) -> None:
        started = _Once(task_status)
        try:
            await self._host.supervisor.run(task_status=started)
        except EscalatedActor as exc:
            failure = HostFailed(str(exc))
            failure.__cause__ = exc.error
            self._course.fail(failure)
        started.started()

    async def _serve_health(self, task_status: trio.TaskStatus[None]) -> None:
        # Late: a host without a health server need not load one.
        from runtime.health import serve_health
        from runtime.proof import proof_route

        started = _Once(task_status)
        detached = self._host.detached

        def on_bound(port: int) -> None:
            self._health_port = port
            if detached is not None:
                detached.serve_on(port)
            started.started()

        gatekeepers = self._host.gatekeepers
        more = [proof_route(gatekeepers, self._host.prove)] if gatekeepers else []
        if detached is not None:
            from runtime.gateway import gateway_routes

            more += gateway_routes(detached.desk())
        try:
            await serve_health(
                self._host.view,
                self._config.health_host,
                self._config.health_port or 0,
                on_bound=on_bound,
                shutdown=self._stopped,
                grace_s=_HEALTH_GRACE_S,
                more=more,
            )
        except RunlaneError as exc:
            self._course.fail(exc)
        started.started()

    async def _close(self, nursery: trio.Nursery) -> None:
        # The supervisor bounds its own stop; the cleanup's bound only catches a supervisor that fails to.
        with bounded_cleanup(self._config.shutdown_budget_s + self._config.release_budget_s):
            await self._host.supervisor.stop()
        self._host.waiters.close(HostStopping("the runtime has stopped; the run goes on without it"))
        self._stopped.set()
        self._signals.cancel()
        nursery.cancel_scope.deadline = trio.current_time() + 2 * _HEALTH_GRACE_S
        unreleased = len(self._host.attempts)
        if unreleased:
            log.warning(
                'event=stopped host=%s unreleased=%d hint="their leases have to run out"',
                self._host.identity["host"],
                unreleased,
            )
        else:
            log.info("event=stopped host=%s", self._host.identity["host"])

    def hurry(self) -> None:
        """Stop, and skip what is left of the grace period; leases are still handed back."""
        self._host.supervisor.hurry()

    async def wait_for_signal(self) -> signal.Signals:
        """Wait for SIGTERM or SIGINT and return it. A second one skips the grace period of the stop that follows."""
        arrived: list[signal.Signals] = []
        first = trio.Event()

        async def receive(task_status: trio.TaskStatus[None]) -> None:
            with self._signals, trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                task_status.started()
                async for number in signals:
                    if first.is_set():
                        log.warning("event=hurry signal=%s", signal.Signals(number).name)
                        self.hurry()
                    arrived.append(signal.Signals(number))
                    first.set()

        assert self._nursery is not None
        await self._nursery.start(receive)
        await first.wait()
        log.info("event=stopping signal=%s grace_s=%g", arrived[0].name, self._config.grace_s)
        return arrived[0]

    # --- what this host is ---------------------------------------------------------------------------

    @property
    def host_id(self) -> str:
        """This host's identity, fresh at each start."""
        return str(self._host.identity["host"])

    @property
    def health_port(self) -> int | None:
        """The port on which health is served; None without a health server."""
        return self._health_port

    @property
    def plays(self) -> Mapping[str, Play]:
        """The plays of this host by name."""
        return self._host.plays

    def readiness(self) -> Mapping[str, Any]:
        """What ``/readyz`` answers."""
        return self._host.view.readiness()


class _Once:
    """A task status that may be told twice: at the start, or at an end that came before it."""

    def __init__(self, task_status: trio.TaskStatus[None]) -> None:
        self._task_status: trio.TaskStatus[None] | None = task_status

    def started(self, _value: object = None) -> None:
        """Tell the starter, once."""
        if self._task_status is not None:
            task_status, self._task_status = self._task_status, None
            task_status.started()


def check_on_trio(what: str) -> None:
    """Raise a RunlaneError that says what to use instead, where no trio runs."""
    try:
        # It is trio too where asyncio runs on a loop of trio-asyncio.
        on_trio = sniffio.current_async_library() == "trio"
    except sniffio.AsyncLibraryNotFoundError:
        on_trio = False
    if not on_trio:
        raise RunlaneError(
            f"{what} runs on trio: start the program with trio.run(main), "
            "or use Runtime.start_in_thread or SyncClient, from asyncio too"
        )


def _check_name(value: Any, field: str) -> None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= 512 and "\x00" not in value):
        raise InputRefused(field, f"must be the name of a sandbox, not {preview(value)}")


def _check_limit(limit: Any) -> None:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= _MOST_LISTED:
        raise InputRefused("limit", f"must be a whole number from 1 to {_MOST_LISTED}, not {limit!r}")


def _pair(item: Any) -> tuple[Play | str, Any]:
    if isinstance(item, tuple) and len(item) == 2:
        return item
    raise InputRefused("items", f"must be Submit(…) or (play, input), not {type(item).__name__}")


def _numbers(**values: Any) -> None:
    for field, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not number:
            raise InputRefused(field, f"must be a finite number, not {preview(value)}")


def _words(field: str, value: str | None) -> str | None:
    """Text for the journal; nothing but space is none."""
    text = _text(field, value)
    return text if text is not None and text.strip() else None


def _text(field: str, value: str | None) -> str | None:
    fits = value is None or (isinstance(value, str) and len(value) <= 2_000 and "\x00" not in value)
    if not fits or (
        value is not None and not value.isascii() and value != value.encode("utf-8", "ignore").decode()
    ):
        raise InputRefused(field, "must be text of at most 2000 characters without NUL or lone surrogates")
    return value


async def _embedded(stack: contextlib.AsyncExitStack, config: RuntimeConfig) -> str:
    """Start (or join) the embedded server for as long as the stack lives; its DSN."""
    folder = None if config.embedded_dir is None else Path(config.embedded_dir)
    server = embedded_server(folder)
    dsn = await trio.to_thread.run_sync(server.__enter__)

    async def leave() -> None:
        with bounded_cleanup(config.shutdown_budget_s):
            await trio.to_thread.run_sync(partial(server.__exit__, None, None, None))

    stack.push_async_callback(leave)
    return dsn
