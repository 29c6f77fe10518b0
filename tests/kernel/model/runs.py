"""The reference of runs: admission, attempts, waits, events, steps and ends; and all that there is, with the time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from sql.types import TERMINAL_STATUSES, Lane
from sql.waits import Wait
from tests.kernel.model.circuits import CircuitModel
from tests.kernel.model.detached import DetachedModel, SandboxModel
from tests.kernel.model.lanes import NEVER, LaneModel
from tests.kernel.model.limits import LimitsModel
from tests.kernel.model.rates import RateModel
from tests.kernel.model.schedules import FireModel, ScheduleModel
from tests.kernel.model.unique import UniqueAsk, UniqueModel

CRASH_CAP = 2
ELSEWHERE = "https://elsewhere.example"


@attrs.define
class WaitModel:
    """One wait. ``seq``: the park that stands at it. ``got``: what it was given, as JSON text; None: time passed."""

    key: str
    kind: str
    name: str | None
    created: float
    due: float
    seq: int | None = None
    done: bool = False
    got: str | None = None


@attrs.define
class EventModel:
    """One event of a run."""

    event_id: str
    name: str
    payload: Any
    request: int
    taken_by: str | None = None

    @property
    def decides(self) -> bool:
        """Whether an approval takes it: of the payloads that are sent, those that are objects."""
        return isinstance(self.payload, dict)


@attrs.define
class ReceiptModel:
    """One step's receipt."""

    function: str
    attempt: int
    lease: int
    state: str = "claimed"
    tries: int = 1
    expires: float | None = None
    failures: int = 0
    final: bool = False
    payload: str | None = None

    @property
    def open(self) -> bool:
        return self.state in ("claimed", "queued", "running")

    def held_by(self, attempt: int, lease: int) -> bool:
        return self.open and (self.attempt, self.lease) == (attempt, lease)

    def claimable(self, now: float, attempt: int, lease: int, failures: int) -> bool:
        if self.state == "failed":
            return not self.final and self.failures < failures
        if self.state == "released" or (self.open and self.attempt < attempt):
            return True
        return self.open and self.lease != lease and self.expires is not None and self.expires <= now

    def ended_by(self, attempt: int, lease: int, outcome: str) -> bool:
        ended = ("failed", True) if outcome == "fatal" else (outcome, outcome in ("completed", "skipped"))
        return (self.attempt, self.lease, self.state, self.final) == (attempt, lease, *ended)


class Final(Exception):
    """A call would change a final receipt."""


@attrs.define
class RunModel:
    """One run."""

    run_id: str
    play: str
    priority: int
    org: str | None
    key: str | None
    input: int
    request: int
    due: float
    lifecycle: LaneModel
    logs: LaneModel | None = None
    status: str = "queued"
    attempt: int = 0
    token: int | None = None
    owner: int | None = None
    expires: float | None = None
    appended: int = 0
    failures: int = 0
    crashes: int = 0
    wait: str | None = None
    waits: dict[str, WaitModel] = attrs.field(factory=dict)
    events: list[EventModel] = attrs.field(factory=list)
    woken: bool = False  # somebody has something for it
    parent: str | None = None
    kin: dict[str, RunModel] = attrs.field(factory=dict, eq=False, repr=False)  # all runs
    steps: dict[str, ReceiptModel] = attrs.field(factory=dict)
    ended: dict[int, tuple[int | None, str]] = attrs.field(factory=dict)  # attempt: token, outcome
    begun: dict[int, float] = attrs.field(factory=dict)  # attempt: its start
    # attempt: kind and start of what deferred it
    outages: dict[int, tuple[str, float]] = attrs.field(factory=dict)
    fences: list[tuple[int, int]] = attrs.field(factory=list)  # every attempt and token there was
    marks: list[tuple[float, str]] = attrs.field(factory=list)
    cancelled_by: str | None = None
    failed_by: str | None = None
    terminal_seq: int | None = None
    terminal_receiver: str | None = None
    wait_seq: int | None = None
    ended_at: dict[int, float] = attrs.field(factory=dict)  # attempt: its end
    concurrency: str | None = None  # its concurrency key
    unique: UniqueAsk | None = None
    pages_to: str | None = None  # who could retire array input
    array_input: bool = False
    labels: dict[str, str] | None = None
    detached: DetachedModel = attrs.field(factory=DetachedModel)

    @property
    def over(self) -> bool:
        return self.status in TERMINAL_STATUSES

    @property
    def rank(self) -> int:
        acked = self.lifecycle.acked
        if acked == 0:
            return 0
        if (self.terminal_seq or 0) > acked:
            return 1
        return 2 if (self.wait_seq or 0) > acked else 3

    def lane(self, lane: Lane) -> LaneModel | None:
        return self.lifecycle if lane is Lane.LIFECYCLE else self.logs

    def holds(self, attempt: int, token: int) -> bool:
        return self.status == "running" and (self.attempt, self.token) == (attempt, token)

    def lives(self, attempt: int, now: float) -> bool:
        """Whether that attempt has a lease; what it holds of others counts as long."""
        return (
            self.status == "running"
            and self.attempt == attempt
            and self.expires is not None
            and self.expires > now
        )

    def claimable(self, now: float) -> bool:
        return self.status in ("queued", "waiting") and self.due <= now and not self.marks

    @property
    def extras(self) -> str | None:
        """As admission takes them."""
        asked = None if self.unique is None else attrs.asdict(self.unique)
        extras = {
            "concurrency_key": self.concurrency, "array_input_receiver": self.pages_to, "unique": asked,
        }  # fmt: skip
        return json.dumps({key: value for key, value in extras.items() if value is not None})

    @property
    def wait_until(self) -> float | None:
        """What people are told: when a parked run goes on by itself."""
        wait = None if self.wait is None else self.waits[self.wait]
        return wait.due if wait is not None and wait.kind == "sleep" else None

    # --- transitions ---------------------------------------------------------------------------------

    def start(self, now: float, owner: int, token: int, lease: float) -> None:
        if self.status == "waiting":
            self.lifecycle.append(now, "run.resumed")
            self.pass_waits(now, [wait for wait in self.standing if wait.kind != "sleep"])
            for wait in self.waits.values():
                if wait.kind == "sleep" and wait.due <= now:
                    wait.done = True
        self.status, self.attempt, self.appended, self.wait = "running", self.attempt + 1, 0, None
        self.owner, self.token, self.expires, self.due = owner, token, now + lease, now + lease
        self.fences.append((self.attempt, token))
        self.begun[self.attempt] = now
        self.lifecycle.append(now, "run.started")

    def stop(self, now: float, outcome: str) -> None:
        self.ended[self.attempt], self.ended_at[self.attempt] = (self.token, outcome), now
        self.expires = None
        if self.owner == 0:
            self.detached.end(now)

    def finish(self, now: float, status: str) -> None:
        self.status, self.due, self.wait = status, NEVER, None
        self.lifecycle.append(now, f"run.{status}")
        self.terminal_seq = self.lifecycle.last
        if self.terminal_receiver is not None:
            self.lifecycle.alone = self.terminal_seq
        if self.parent is not None:
            self.kin[self.parent].woken = True

    def settle(self, now: float, attempt: int, token: int, outcome: str, delay: float) -> str:
        if not self.holds(attempt, token):
            return "done" if self.ended.get(attempt) == (token, outcome) else "lost"
        self.stop(now, outcome)
        self.failures += outcome in ("failed", "retried")
        if outcome in ("completed", "failed"):
            self.finish(now, outcome)
        else:
            self.status, self.due = "queued", now + delay
            self.lifecycle.append(now, "run.requeued")
        return "done"

    def defer(self, now: float, attempt: int, token: int, kind: str, delay: float, most: float) -> str:
        """Look back over every attempt of the unbroken tail, which the kernel must not have to."""
        if not self.holds(attempt, token):
            return "done" if self.ended.get(attempt) == (token, "deferred") else "lost"
        first = attempt
        while first - 1 in self.outages and self.outages[first - 1][0] == kind:
            first -= 1
        since = self.begun[first]
        if since <= now - most:
            return "over"
        self.stop(now, "deferred")
        self.outages[attempt] = kind, since
        self.status, self.due = "queued", now + delay
        self.lifecycle.append(now, "run.requeued")
        return "done"

    def park(self, now: float, attempt: int, token: int, waits: Sequence[Wait]) -> str:
        if not self.holds(attempt, token):
            return "done" if self.ended.get(attempt) == (token, "parked") else "lost"
        self.stop(now, "parked")
        self.lifecycle.append(now, "run.waiting")
        self.wait_seq = self.lifecycle.last
        standing = self.register(now, waits)
        for wait in standing:
            wait.seq = self.wait_seq
        self.pass_waits(now, [wait for wait in standing if wait.kind != "sleep"])
        self.due, self.wait = min((now if wait.done else wait.due, wait.key) for wait in standing)
        self.status = "waiting"
        return "done"

    # --- waits ---------------------------------------------------------------------------------------

    @property
    def standing(self) -> list[WaitModel]:
        return [wait for wait in self.waits.values() if wait.seq == self.wait_seq is not None]

    def register(self, now: float, waits: Sequence[Wait]) -> list[WaitModel]:
        for wait in waits:
            due = NEVER if wait.delay_s is None else now + wait.delay_s
            self.waits.setdefault(wait.key, WaitModel(wait.key, wait.kind, wait.name, now, due))
        return [self.waits[wait.key] for wait in waits]

    def pass_waits(self, now: float, waits: Sequence[WaitModel]) -> None:
        for wait in sorted(waits, key=lambda wait: (wait.created, wait.key)):
            if wait.kind == "child":
                child = self.kin.get(wait.name or "")
                if not wait.done and (child is None or child.over):
                    wait.done, wait.got = True, "gone" if child is None else child.status
                continue
            fits = [event for event in self.events if event.taken_by is None and event.name == wait.name]
            if wait.kind == "approval":
                fits = [event for event in fits if event.decides]
            if not wait.done and fits and wait.kind != "sleep":
                wait.done, wait.got, fits[0].taken_by = True, json.dumps(fits[0].payload), wait.key
        for wait in waits:
            wait.done = wait.done or wait.due <= now

    def start_child(self, now: float, attempt: int, token: int, child: RunModel) -> str:
        if not self.holds(attempt, token):
            return "lost"
        if self.kin.setdefault(child.run_id, child).input != child.input:
            return "conflict"
        wait = WaitModel("kid", "child", child.run_id, now, NEVER)
        self.waits.setdefault(wait.key, wait)
        return "started"

    def try_waits(
        self, now: float, attempt: int, token: int, waits: Sequence[Wait]
    ) -> list[WaitModel] | None:
        """The waits asked for; None if the fence is lost."""
        if not self.holds(attempt, token):
            return None
        standing = self.register(now, waits)
        self.pass_waits(now, standing)
        return standing

    def send(self, event: EventModel) -> str:
        known = next((e for e in self.events if e.event_id == event.event_id), None)
        if known is None:
            if self.over:
                return "ended"
            if {wait.kind for wait in self.waits_for(event.name)} == {"approval"} and not event.decides:
                return "undecided"
            self.events.append(event)
            self.woken, known = True, event
        if known.request != event.request:
            return "duplicate" if (known.name, known.payload) == (event.name, event.payload) else "conflict"
        stands = any(wait.kind == "event" or known.decides for wait in self.waits_for(known.name))
        return "delivered" if stands or known.taken_by is not None else "kept"

    def waits_for(self, name: str) -> list[WaitModel]:
        """The open waits that an event of this name may be for."""
        return [
            wait
            for wait in self.waits.values()
            if wait.kind in ("event", "approval") and wait.name == name and not wait.done
            and (wait.seq == self.wait_seq is not None or self.status == "running")
        ]  # fmt: skip

    def wake(self, now: float) -> bool:
        """What a sweep does with its wakes: whether it is due now because of it."""
        self.woken = False
        if self.status != "waiting":
            return False
        standing = [wait for wait in self.standing if wait.kind != "sleep"]
        self.pass_waits(now, standing)
        if self.due <= now or not any(wait.done for wait in standing):
            return False
        self.due = now
        return True

    def say(self, now: float, attempt: int, token: int, facts: Sequence[tuple[int, Lane]]) -> str:
        if not self.holds(attempt, token):
            return "lost"
        fresh = [lane for ordinal, lane in facts if ordinal > self.appended]
        self.appended = max(self.appended, *(ordinal for ordinal, _ in facts))
        self.lifecycle.append(now, *("run.progress" for lane in fresh if lane is Lane.LIFECYCLE))
        logs = ["run.log" for lane in fresh if lane is Lane.OBSERVABILITY]
        if logs and self.logs is None:
            self.logs = LaneModel(now)
        if self.logs is not None:
            self.logs.append(now, *logs)
        return "done"

    def renew(self, now: float, attempt: int, token: int, lease: float) -> str:
        if not self.holds(attempt, token):
            return "lost"
        self.expires = max(self.expires or now, now + lease)
        return "renewed"

    # --- steps ---------------------------------------------------------------------------------------

    def claim_step(
        self, now: float, attempt: int, token: int, key: str, function: str, lease: int, lease_s: float | None
    ) -> str:
        if not self.holds(attempt, token):
            return "lost"
        step = self.steps.get(key)
        if step is None or step.claimable(now, attempt, lease, self.failures):
            tries = 1 if step is None else step.tries + 1
            expires = None if lease_s is None else now + lease_s
            self.steps[key] = ReceiptModel(function, attempt, lease, tries=tries, expires=expires)
            return "claimed"
        if step.open:
            return "claimed" if step.lease == lease else "held"
        return step.state if step.function == function else "conflict"

    def end_step(
        self,
        attempt: int,
        token: int,
        key: str,
        lease: int,
        outcome: str,
        payload: str | None,
        function: str | None,
    ) -> str:
        step = self.steps.get(key)
        if step is not None and step.ended_by(attempt, lease, outcome):
            return "done"
        if not self.holds(attempt, token):
            return "lost"
        if step is None and function is not None:
            step = self.steps[key] = ReceiptModel(function, attempt, lease, tries=0)
        elif step is not None and step.open and function is not None and step.attempt < attempt:
            step.attempt, step.lease = attempt, lease
        if step is None or not step.held_by(attempt, lease):
            if step is not None and step.final:
                raise Final
            return "lost"
        step.state = "failed" if outcome == "fatal" else outcome
        step.final = outcome in ("completed", "skipped", "fatal")
        step.function = function or step.function
        step.failures, step.payload, step.expires = self.failures, payload, None
        return "done"

    def mark_step(
        self,
        now: float,
        attempt: int,
        token: int,
        key: str,
        lease: int,
        state: str | None,
        lease_s: float | None,
    ) -> str:
        step = self.steps.get(key)
        if not self.holds(attempt, token) or step is None:
            return "lost"
        if not step.held_by(attempt, lease):
            if step.final:
                raise Final
            return "lost"
        step.state = state or step.state
        if lease_s is not None:
            step.expires = max(step.expires or 0.0, now + lease_s)
        return "done"

    def cancel(self, now: float, request: str) -> str:
        if self.over:
            if self.status != "cancelled":
                return self.status
            return "cancelled" if self.cancelled_by == request else "cancelled_before"
        if self.status == "running":
            self.stop(now, "cancelled")
        self.finish(now, "cancelled")
        self.cancelled_by, self.marks = request, []
        for child in self.kin.values():
            if child.parent == self.run_id and not child.over:
                child.marks.append((now, f"parent:{self.run_id}"))
        return "cancelled"

    def fail_waiting(self, now: float, attempt: int, kind: str, key: str, request: str) -> str:
        if self.status == "failed" and self.failed_by == request:
            return "failed"
        if self.status != "waiting" or self.wait is None:
            return "not_applicable"
        wait = self.waits[self.wait]
        if (self.attempt, wait.kind, wait.key) != (attempt, kind, key) or wait.done or self.marks:
            return "fence_lost"
        self.finish(now, "failed")
        self.failed_by = request
        return "failed"

    def expire(self, now: float) -> str:
        """What a pass does to a running run whose due time has come."""
        if self.expires is not None and self.expires > now:
            self.due = self.expires
            return "pushed"
        return self.crash(now, "expired")

    def crash(self, now: float, outcome: str) -> str:
        """An attempt that ends without a word of its own: expired or lost, or at its ceiling."""
        self.stop(now, outcome)
        self.crashes += outcome != "ceiling"
        if self.crashes > CRASH_CAP or outcome == "ceiling":
            self.finish(now, "failed")
            return "failed"
        self.status, self.due = "queued", now
        self.lifecycle.append(now, "run.requeued")
        return outcome

    # --- array input ---------------------------------------------------------------------------------

    def register_array_input(self, attempt: int, token: int, org: str | None) -> str:
        if not self.holds(attempt, token) or self.org != org:
            return "lost"
        receiver = self.terminal_receiver or self.pages_to
        if receiver is None:
            return "no_receiver"
        self.array_input, self.terminal_receiver = True, receiver
        return "done"


@attrs.define
class Model:
    """All runs, and the time."""

    now: float = 0.0
    runs: dict[str, RunModel] = attrs.field(factory=dict)
    limits: LimitsModel = attrs.field(factory=LimitsModel)
    unique: dict[tuple[str, str, str], UniqueModel] = attrs.field(factory=dict)  # organisation, play, key
    rates: dict[str, RateModel] = attrs.field(factory=dict)
    circuits: dict[str, CircuitModel] = attrs.field(factory=dict)
    schedules: dict[str, ScheduleModel] = attrs.field(factory=dict)
    fires: dict[tuple[str, float], FireModel] = attrs.field(factory=dict)  # schedule, moment
    # run, attempt, kind, begin, end
    compute: list[tuple[str, int, str, float, float]] = attrs.field(factory=list)

    def lives(self, fence: tuple[str, int]) -> bool:
        """Whether this run's attempt has a lease."""
        run = self.runs.get(fence[0])
        return run is not None and run.lives(fence[1], self.now)

    @property
    def sandboxes(self) -> list[SandboxModel]:
        return [sandbox for run in self.runs.values() for sandbox in run.detached.sandboxes.values()]

    def take_unique(self, run: RunModel) -> str | None:
        """Give a new run its unique key; the run that keeps it instead, if one does."""
        if run.unique is None:
            return None
        key = (run.org or "", run.play, run.unique.key)
        known = self.unique.get(key)
        if known is not None and known.run_id != run.run_id:
            holder = self.runs.get(known.run_id)
            if known.held(self.now, holder is not None and not holder.over):
                if run.unique.on_conflict != "replace":
                    return known.run_id
                if holder is not None:
                    holder.marks.append((self.now, f"replaced-by:{run.run_id}"))
        until = None if run.unique.for_s is None else self.now + run.unique.for_s
        self.unique[key] = UniqueModel(run.run_id, until)
        return None

    def by_key(self, play: str, org: str | None, key: str | None) -> RunModel | None:
        if key is None:
            return None
        return next(
            (run for run in self.runs.values() if (run.play, run.org, run.key) == (play, org, key)), None
        )

    def admit(
        self, run: RunModel, *, named: bool, claim: bool, owner: int, lease: float
    ) -> tuple[str, str, bool, bool]:
        """Outcome, run id, created, claimed."""
        by_id, by_key = self.runs.get(run.run_id), self.by_key(run.play, run.org, run.key)
        known = by_key or by_id
        if known is None:
            holder = self.take_unique(run)
            if holder is not None:
                existing = run.unique is not None and run.unique.on_conflict == "existing"
                return "existing" if existing else "duplicate", holder, False, False
            self.runs[run.run_id] = run
            claim = claim and not self.limits.places(run)  # only a claim holds a limit's lock
            if claim:
                run.start(self.now, owner, run.request, lease)
            return "created", run.run_id, True, claim
        created = known.request == run.request
        claimed = claim and known.holds(1, run.request) and known.owner == owner
        if (named and by_key is not None and by_key.run_id != run.run_id) or (
            by_id is not None and run.key is not None and by_id.key != run.key
        ):
            return "two_runs", known.run_id, created, claimed
        same = (known.play, known.org, known.input) == (run.play, run.org, run.input)
        return "existing" if same else "conflict", known.run_id, created, claimed

    def claimable(self, plays: Iterable[str]) -> list[RunModel]:
        return [run for run in self.runs.values() if run.play in plays and run.claimable(self.now)]

    def lanes_claimable(
        self, lane: Lane, receivers: Sequence[str] = ("",)
    ) -> list[tuple[RunModel, LaneModel, int]]:
        found = []
        for run in self.runs.values():
            state = run.lane(lane)
            if state is None or (ELSEWHERE if state.elsewhere else "") not in receivers:
                continue
            if state.claimable(self.now):
                found.append((run, state, run.rank if lane is Lane.LIFECYCLE else 3))
        return found
