"""The reference of detached attempts: runners and their results, sandboxes and their deletion, and the bill."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from sql.waits import Wait
from tests.kernel.model.lanes import NEVER

if TYPE_CHECKING:
    from tests.kernel.model.limits import LimitsModel
    from tests.kernel.model.runs import RunModel


@attrs.define
class RunnerModel:
    """Whoever works on a live detached attempt."""

    attempt: int
    token: int
    sandbox: str
    provider: str
    started: float
    timeout: float
    ceiling: float
    due: float
    heartbeat: float | None = None

    @property
    def overdue(self) -> float:
        return min((self.started if self.heartbeat is None else self.heartbeat) + self.timeout, self.ceiling)


@attrs.define
class ResultModel:
    """What a runner said at its end. ``most_s``: how long an outage may last that it says there is."""

    outcome: str
    payload: Any
    received: float
    delay: float = 0.0
    waits: Sequence[Wait] = ()
    most_s: float | None = None
    settled: bool = False


@attrs.define
class SandboxModel:
    """One sandbox that was ever asked for: the obligation to delete it."""

    provider: str
    org: str | None
    attempt: int
    created: float
    due: float
    certain: float
    tries: int = 0
    failures: int = 0
    custody: float | None = None
    ceiling: float | None = None
    wanted: float | None = None
    accepted: float | None = None
    confirmed: float | None = None
    token: int | None = None
    expires: float | None = None
    provider_id: str | None = None
    domain: str | None = None
    error: str | None = None
    block: str | None = None
    told: set[str] = attrs.field(factory=set)

    def keep(self, now: float, provider_id: str, domain: str | None) -> None:
        self.custody = now if self.custody is None else self.custody
        self.provider_id, self.domain = self.provider_id or provider_id, self.domain or domain

    def want(self, now: float) -> None:
        if self.wanted is None:
            self.wanted = self.due = now

    def claimable(self, now: float) -> bool:
        free = self.expires is None or self.expires <= now
        return self.confirmed is None and self.block is None and self.due <= now and free

    def claim(self, now: float, token: int, lease: float) -> None:
        self.token, self.expires, self.due, self.tries = token, now + lease, now + lease, self.tries + 1
        self.wanted = now if self.wanted is None else self.wanted

    def accept(self, now: float, token: int) -> str:
        if self.accepted is None:
            if self.token != token:
                return "lease_lost"
            self.accepted = now
            self.told.add("delete_accepted")
        return "accepted"

    def confirm(self, now: float, token: int, domain: str | None) -> str:
        if self.confirmed is not None:
            return "already_completed"
        if self.token != token:
            return "lease_lost"
        if domain is not None and self.domain not in (None, domain):
            return "wrong_routing_domain"
        self.confirmed, self.expires, self.due, self.error = now, None, NEVER, None
        self.accepted = now if self.accepted is None else self.accepted
        self.domain = self.domain or domain
        self.told.add("delete_confirmed")
        return "completed"

    def postpone(self, now: float, token: int, delay: float, error: str | None, block: str | None) -> None:
        if self.token == token and self.confirmed is None:
            self.expires, self.due = None, now + delay if block is None else NEVER
            self.failures += error is not None
            self.error, self.block = error or self.error, block

    def retry(self, now: float) -> bool:
        if self.block is None or self.confirmed is not None:
            return False
        self.block, self.due, self.tries, self.failures = None, now, 0, 0
        return True

    def billed_until(self, grace: float) -> float:
        end = self.ceiling if self.ceiling not in (None, NEVER) else self.wanted
        return (self.created if end is None else end) + grace


@attrs.define
class BillModel:
    """What has to be told of a run's compute, once."""

    due: float
    finalised: float | None = None


@attrs.define
class DetachedModel:
    """All of this that one run has."""

    runner: RunnerModel | None = None
    results: dict[int, ResultModel] = attrs.field(factory=dict)
    sandboxes: dict[str, SandboxModel] = attrs.field(factory=dict)
    bill: BillModel | None = None
    were: set[int] = attrs.field(factory=set)  # attempts that were ever detached

    def end(self, now: float) -> None:
        """What comes with the end of a detached attempt, whoever ended it."""
        self.runner = None
        for sandbox in self.sandboxes.values():
            sandbox.want(now)
        if self.bill is not None:
            self.bill.due = now

    def reserve(
        self,
        run: RunModel,
        now: float,
        attempt: int,
        token: int,
        name: str,
        provider: str,
        due_s: float,
        limits: LimitsModel,
        everybody: Iterable[SandboxModel],
    ) -> str:
        if not run.holds(attempt, token) or run.owner == 0:
            return "lost"
        known = self.sandboxes.get(name)
        if known is not None:
            return "reserved" if known.wanted is None else "lost"
        room = [sandbox for sandbox in everybody if sandbox.accepted is None]
        ours = sum(sandbox.org == run.org for sandbox in room)
        theirs = sum(sandbox.provider == provider for sandbox in room)
        counts = [(limits.sandbox.get(""), len(room)), (limits.sandbox.get(provider), theirs)]
        if run.org is not None:
            counts.append((limits.sandbox_org.get(run.org), ours))
        if any(most is not None and count >= most for most, count in counts):
            return "full"
        if self.bill is None:
            self.bill = BillModel(now + 60.0)
        self.sandboxes[name] = SandboxModel(provider, run.org, attempt, now, now + due_s, now + due_s)
        return "reserved"

    def detach(
        self, run: RunModel, now: float, attempt: int, token: int, name: str, timeout: float, ceiling: float
    ) -> str:
        sandbox = self.sandboxes[name]
        live = run.holds(attempt, token)
        if live and run.owner != 0 and sandbox.wanted is None and sandbox.attempt == attempt:
            self.runner = RunnerModel(
                attempt,
                token,
                name,
                sandbox.provider,
                now,
                timeout,
                now + ceiling,
                now + min(timeout, ceiling),
            )
            self.were.add(attempt)
            run.owner, run.expires, run.due = 0, NEVER, NEVER
            run.lifecycle.append(now, "run.waiting")
            run.lifecycle.quiet.add(run.lifecycle.last)
            sandbox.due, sandbox.ceiling = NEVER, now + ceiling
        return "done" if attempt in self.were and (attempt, token) in run.fences else "lost"

    def beat(self, run: RunModel, now: float, attempt: int, token: int) -> str:
        if (attempt, token) not in run.fences:
            return "unknown"
        if run.attempt > attempt:
            return "superseded"
        if run.status == "cancelled":
            return "cancelled"
        if run.expires is None:
            return "ended"
        if self.runner is not None:
            last = self.runner.heartbeat
            self.runner.heartbeat = now if last is None else max(now, round(last + 1e-6, 6))
        if run.marks:
            return "cancelled"
        return "early" if run.owner != 0 else "ok"

    def push(
        self,
        run: RunModel,
        now: float,
        attempt: int,
        token: int,
        result: ResultModel,
        *,
        locked: bool = False,
    ) -> tuple[str, bool]:
        """``locked``: somebody holds the run at that moment."""
        known = attempt in self.were and (attempt, token) in run.fences
        if known:
            self.results.setdefault(attempt, result)
        kept = self.results.get(attempt)
        if kept is not None and (not locked or attempt in run.ended):
            self.settle(run, now, attempt)  # whoever asks
        if kept is None or not known:
            return "unknown", False
        first = (kept.outcome, kept.payload, kept.waits) == (result.outcome, result.payload, result.waits)
        if not kept.settled:
            return "recorded", first
        ended = run.ended[attempt][1]
        over = kept.most_s is not None and ended == "failed"
        return "settled" if ended == kept.outcome or over else "late", first

    def settle(self, run: RunModel, now: float, attempt: int) -> bool:
        """Move the run on by what is kept; whether there was anything to settle."""
        kept = self.results[attempt]
        if kept.settled:
            return False
        token = dict(run.fences)[attempt]
        if kept.outcome == "parked":
            run.park(now, attempt, token, kept.waits)
        elif kept.most_s is None:
            run.settle(now, attempt, token, kept.outcome, kept.delay)
        elif run.defer(now, attempt, token, "out", kept.delay, kept.most_s) == "over":
            run.settle(now, attempt, token, "failed", 0.0)
        kept.settled = True
        return True

    def judge(
        self, run: RunModel, now: float, attempt: int, token: int, heartbeat: float | None, verdict: str
    ) -> str:
        runner = self.runner
        if (
            runner is not None
            and (runner.attempt, runner.token) == (attempt, token)
            and (runner.ceiling <= now if verdict == "ceiling" else runner.heartbeat == heartbeat)
            and attempt not in self.results
            and not run.marks
        ):
            run.crash(now, verdict)
        return "done" if run.ended.get(attempt) == (token, verdict) else "moved"

    def look(self, run: RunModel, now: float, look_s: float) -> str | None:
        """What the sweep finds of a runner that is due: stale, ceiling, or nothing to ask about."""
        runner = self.runner
        assert runner is not None
        overdue = runner.overdue
        runner.due = now + look_s if overdue <= now else overdue
        if overdue > now or runner.attempt in self.results or run.marks:
            return None
        return "ceiling" if runner.ceiling <= now else "stale"

    def finalise(
        self, run: RunModel, now: float, grace: float, again: float
    ) -> list[tuple[int, str, float, float]] | None:
        """Attempt, kind, begin and end of what is billed; None: it is too early."""
        assert self.bill is not None
        boxes = self.sandboxes.values()
        if not run.over or any(box.accepted is None and box.billed_until(grace) > now for box in boxes):
            self.bill.due = now + again
            return None
        self.bill.finalised = now
        records = [
            (
                box.attempt,
                "late_sandbox" if box.accepted is None else "sandbox",
                box.created if box.custody is None else box.custody,
                box.billed_until(grace) if box.accepted is None else box.accepted,
            )
            for box in boxes
            if box.custody is not None or "delete_accepted" in box.told
        ]
        for box in boxes:
            if box.attempt in self.were:
                begin = box.created if box.custody is None else box.custody
                end = run.ended_at[box.attempt]
                result = self.results.get(box.attempt)
                records.append(
                    (box.attempt, "runner", begin, end if result is None else min(result.received, end))
                )
        return records
