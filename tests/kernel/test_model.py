"""The model test: every transition in any order by several hosts, each answer predicted by a plain model, each answer
asked for again as if it had been lost, and after every step all invariants and every row compared.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import attrs
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RULE_MARKER,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sql import claim, control, events, facts, journal, lanes, leases
from sql.errors import KernelRefused
from sql.types import Lane
from sql.waits import Wait, WaitState
from tests.kernel.model import (
    CRASH_CAP,
    ELSEWHERE,
    NEVER,
    EventModel,
    Final,
    LaneModel,
    Model,
    RunModel,
    WaitModel,
)
from tests.support.invariants import check_invariants
from tests.support.kernel import LEASE_S, PLAYS, Kernel, child_of, saying
from tests.support.portal import Portal, open_portal

pytestmark = pytest.mark.modes

T = TypeVar("T")
START = datetime(2030, 1, 1, tzinfo=UTC)
LANE_LEASE_S = 30.0

_CLEAR = """
TRUNCATE @schema@.runs, @schema@.facts, @schema@.attempts, @schema@.waits, @schema@.events, @schema@.wakes,
         @schema@.lanes, @schema@.cancellations, @schema@.journal, @schema@.ledger_runs, @schema@.ledger_logs,
         @schema@.receipts;
UPDATE @schema@.test_clock SET stands = '2030-01-01T00:00:00Z';
"""
_RUNS = """
SELECT run_id, status, attempt, lease_token, lease_owner, lease_expires_at, due_at, appended, failures, crashes,
       wait_key, lane_rank, lane_skips, last_seq, acked_seq, frozen_seq, lane_attempts, lane_token, lane_expires_at,
       lane_due_at, lane_error,
       (SELECT array_agg(type ORDER BY seq) FROM @schema@.facts f WHERE f.run_id = r.run_id AND lane = 0) AS types,
       (SELECT array_agg(request_id ORDER BY request_id)
          FROM @schema@.cancellations c WHERE c.run_id = r.run_id) AS marks,
       (SELECT array_agg(key ORDER BY key) FROM @schema@.waits c WHERE c.run_id = r.run_id
           AND done_at IS NOT NULL) AS passed,
       (SELECT jsonb_object_agg(key, CASE kind WHEN 'child' THEN coalesce(payload ->> 'status', 'gone')
                                               ELSE payload::text END) FROM @schema@.waits c WHERE c.run_id = r.run_id
           AND payload IS NOT NULL) AS got,
       (SELECT array_agg(wait_key ORDER BY seq) FROM @schema@.events e WHERE e.run_id = r.run_id) AS taken,
       EXISTS (SELECT 1 FROM @schema@.wakes w WHERE w.run_id = r.run_id) AS woken
  FROM @schema@.runs r
"""
_LANES = """
SELECT run_id, lane_skips, last_seq, acked_seq, frozen_seq, lane_attempts, lane_token, lane_expires_at, lane_due_at,
       lane_error
  FROM @schema@.lanes
"""
_STEPS = """
SELECT run_id, key, function, attempt, lease, state, tries, lease_expires_at, run_failures, final,
       coalesce(output, error)::text AS payload
  FROM @schema@.receipts
"""


@attrs.define
class Turn:
    """A delivery turn as its owner knows it."""

    prefix: lanes.Prefix

    @property
    def key(self) -> tuple[str, Lane]:
        return self.prefix.run_id, self.prefix.lane


index = st.integers(0, 999)
seldom = st.sampled_from([False, False, False, True])
delays = st.sampled_from([0.0, 0.0, 3.0, 20.0, 90.0])
lane_kinds = st.sampled_from(list(Lane))
receivers = st.sampled_from([[""], [""], [""], [ELSEWHERE], ["", ELSEWHERE]])
step_keys = st.sampled_from(["s", "s", "t"])
step_leases = st.sampled_from([None, None, None, 7])  # the attempt's token, or a holder of its own
# By key: two waits may be for the same event, and another approval of its name.
WAITS = {
    "a": ("sleep", None), "b": ("sleep", None), "e1": ("event", "e"), "e2": ("event", "e"), "f": ("event", "f"),
    "yes": ("approval", "e"), "kid": ("child", None),
}  # fmt: skip
stood_at = st.dictionaries(
    st.sampled_from(list(WAITS)), st.sampled_from([None, 0.0, 4.0, 25.0]), min_size=1, max_size=4
).map(
    lambda drawn: [
        Wait(
            key,
            *WAITS[key],
            delay_s=7.0 if delay is None and WAITS[key][0] == "sleep" else None if key == "kid" else delay,
        )
        for key, delay in drawn.items()
    ]
)


class KernelMachine(RuleBasedStateMachine):
    """The rules. Hosts 1 and 2 act; a fence may be any attempt that there ever was."""

    portal: Portal

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.turns: list[Turn] = []
        self.tokens = 100
        self.do(self.kernel.session.script, self.kernel.render(_CLEAR))

    @property
    def kernel(self) -> Kernel:
        return self.portal.kernel

    def do(self, function: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T:
        return self.portal.call(function, *args, **kwargs)

    def twice(self, function: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T:
        """Call, lose the answer, and ask again: both answers must be the same."""
        first, second = (self.do(function, *args, **kwargs) for _ in range(2))
        assert first == second
        return first

    def token(self) -> int:
        self.tokens += 1
        return self.tokens

    def run(self, pick: int) -> RunModel:
        return list(self.model.runs.values())[pick % len(self.model.runs)]

    def fence(self, pick: int, stale: bool) -> tuple[RunModel, claim.Claimed]:
        """A run that was started, with its latest fence or any earlier one."""
        begun = [run for run in self.model.runs.values() if run.fences]
        running = [run for run in begun if run.status == "running"]
        among = begun if stale or not running else running
        run = among[pick % len(among)]
        attempt, token = run.fences[pick % len(run.fences) if stale else -1]
        return run, claim.Claimed(run.run_id, attempt, token, run.play, "null")

    # What would do nothing is tried less often, so that runs live longer.

    def begun(self) -> bool:
        return any(run.fences for run in self.model.runs.values())

    def some_due(self) -> bool:
        return any(run.status == "running" and run.due <= self.model.now for run in self.model.runs.values())

    def some_marked(self) -> bool:
        return any(run.marks for run in self.model.runs.values())

    def some_claimable(self) -> bool:
        return bool(self.model.claimable(PLAYS))

    def some_pending(self) -> bool:
        return any(self.model.lanes_claimable(lane, ["", ELSEWHERE]) for lane in Lane)

    def few_open(self) -> bool:
        return sum(not run.over for run in self.model.runs.values()) < 5

    def many_open(self) -> bool:
        return sum(not run.over for run in self.model.runs.values()) > 2

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        for number in range(count):
            self.submit("alpha", 0, None, None, 1, 0.0, False, number > 0)

    # --- admission -----------------------------------------------------------------------------------

    @precondition(few_open)
    @rule(
        play=st.sampled_from(PLAYS),
        priority=st.sampled_from([0, 0, 0, 2, -1]),
        org=st.sampled_from([None, None, "o"]),
        key=st.sampled_from([None, None, None, "k", "l"]),
        value=st.sampled_from([1, 1, 1, 2]),
        delay=delays,
        named=st.booleans(),
        claimed=st.booleans(),
    )
    def submit_another(self, **fields: Any) -> None:
        self.submit(**fields)

    def submit(
        self, play: str, priority: int, org: str | None, key: str | None, value: int, delay: float, named: bool,
        claimed: bool,
    ) -> None:  # fmt: skip
        run = RunModel(
            f"run-{len(self.model.runs)}-{self.token()}", play, priority, org, key, value, self.token(),
            self.model.now + delay, LaneModel(self.model.now, ["run.created"]), kin=self.model.runs,
        )  # fmt: skip
        self.admit(run, named=named, claimed=claimed and delay == 0, delay_s=delay)

    @precondition(lambda self: self.model.runs)
    @rule(pick=index, value=st.sampled_from([None, 1, 2]), key=st.sampled_from(["same", "same", None, "k"]))
    def submit_the_same_id(self, pick: int, value: int | None, key: str | None) -> None:
        known = self.run(pick)
        run = attrs.evolve(
            known,
            key=known.key if key == "same" else key,
            input=known.input if value is None else value,
            request=self.token(),
        )
        self.admit(run, named=True, claimed=False, delay_s=0.0)

    def admit(self, run: RunModel, *, named: bool, claimed: bool, delay_s: float) -> None:
        item = self.kernel.submission(
            run.play, input=run.input, priority=run.priority, org_id=run.org, idempotency_key=run.key,
            delay_s=delay_s, claim=claimed, request=run.request, run_id=run.run_id,
        )  # fmt: skip
        item.named = named
        for _ in range(2):
            expected = self.model.admit(run, named=named, claim=claimed, owner=1, lease=LEASE_S)
            (answer,) = self.do(self.kernel.admit, [item])
            assert attrs.astuple(answer) == expected

    # --- runs ----------------------------------------------------------------------------------------

    @precondition(some_claimable)
    @rule(
        host=st.sampled_from([1, 2]),
        plays=st.sampled_from([PLAYS, PLAYS, PLAYS[:1], PLAYS[1:]]),
        limit=st.integers(1, 4),
        oldest=st.booleans(),
        lease=st.sampled_from([LEASE_S, 10.0]),
    )
    def claim(self, host: int, plays: tuple[str, ...], limit: int, oldest: bool, lease: float) -> None:
        now, token = self.model.now, self.token()
        candidates = self.model.claimable(plays)
        kernel = attrs.evolve(self.kernel, owner=host)
        taken = self.do(kernel.claim, limit, plays=plays, token=token, oldest=oldest, lease_s=lease)
        runs = [self.model.runs[item.run_id] for item in taken]
        left = [run for run in candidates if run not in runs]
        assert len(taken) == min(limit, len(candidates))
        for run in runs:
            assert run in candidates
            for other in left:
                if (run.play, run.priority, run.org) == (other.play, other.priority, other.org):
                    assert run.due <= other.due
                if not oldest:
                    assert run.priority >= other.priority
        if oldest and runs:
            assert min(run.due for run in runs) == min(run.due for run in candidates)
        for run, item in zip(runs, taken, strict=True):
            assert item.lag_s == now - run.due
            run.start(now, host, token, lease)
            assert (item.attempt, item.failures) == (run.attempt, run.failures)
            assert plain(item.waits) == ({} if item.attempt == 1 else states(now, run.waits.values()))
            assert item.input == str(run.input)
        back = self.do(claim.read_back, kernel.session, owner=host, token=token)
        assert {(item.run_id, item.attempt) for item in back} == {
            (item.run_id, item.attempt) for item in taken
        }
        held = self.do(claim.held, kernel.session, owner=host)
        assert set(held) == {
            (run.run_id, run.attempt, run.token)
            for run in self.model.runs.values()
            if run.status == "running" and run.owner == host
        }

    @precondition(begun)
    @rule(pick=index, stale=seldom, lease=st.sampled_from([LEASE_S, 5.0]))
    def renew(self, pick: int, stale: bool, lease: float) -> None:
        run, item = self.fence(pick, stale)
        expected = run.renew(self.model.now, item.attempt, item.token, lease)
        assert self.twice(self.kernel.renew, item, lease) == leases.Renewal(
            expected, bool(run.marks) or run.status == "cancelled"
        )

    @precondition(begun)
    @rule(
        pick=index,
        stale=seldom,
        outcome=st.sampled_from(["completed", "failed", "retried", "retried", "released", "deferred"]),
        delay=delays,
    )
    def settle(self, pick: int, stale: bool, outcome: str, delay: float) -> None:
        run, item = self.fence(pick, stale)
        expected = run.settle(self.model.now, item.attempt, item.token, outcome, delay)
        for _ in range(2):
            answer = self.do(self.kernel.settle, item, outcome, delay_s=delay)
            assert answer.answer == expected
            assert answer.status in (None, run.status)

    @precondition(begun)
    @rule(
        pick=index,
        stale=seldom,
        kind=st.sampled_from(["out", "out", "away"]),
        delay=st.sampled_from([0.0, 0.0, 20.0]),
        most=st.sampled_from([900.0, 25.0]),
    )
    def defer(self, pick: int, stale: bool, kind: str, delay: float, most: float) -> None:
        run, item = self.fence(pick, stale)
        expected = run.defer(self.model.now, item.attempt, item.token, kind, delay, most)
        answer = self.twice(self.kernel.defer, item, kind, delay_s=delay, max_s=most)
        assert (answer.answer, answer.status) == (expected, run.status)
        if expected == "done" and item.attempt in run.outages:
            since = START + timedelta(seconds=run.outages[item.attempt][1])
            assert answer.outage_at == since

    @precondition(begun)
    @rule(
        pick=index,
        stale=seldom,
        waits=stood_at,
    )
    def park(self, pick: int, stale: bool, waits: list[Wait]) -> None:
        run, item = self.fence(pick, stale)
        waits = of_run(run, waits)
        expected = run.park(self.model.now, item.attempt, item.token, waits)
        answer = self.twice(self.kernel.park_on, item, *waits)
        assert (answer.answer, answer.status) == (expected, run.status)

    @precondition(begun)
    @rule(pick=index, stale=seldom, waits=stood_at)
    def try_waits(self, pick: int, stale: bool, waits: list[Wait]) -> None:
        run, item = self.fence(pick, stale)
        waits = of_run(run, waits)
        expected = run.try_waits(self.model.now, item.attempt, item.token, waits)
        answer = self.twice(self.kernel.try_waits, item, *waits)
        assert answer.answer == ("lost" if expected is None else "done")
        assert plain(answer.states) == states(self.model.now, expected or [])

    @precondition(lambda self: self.begun() and self.few_open())
    @rule(pick=index, stale=seldom, value=st.sampled_from([1, 1, 1, 2]))
    def start_child(self, pick: int, stale: bool, value: int) -> None:
        run, item = self.fence(pick, stale)
        child = RunModel(
            child_of(run.run_id), "alpha", 0, run.org, None, value, self.token(), self.model.now,
            LaneModel(self.model.now, ["run.created"]), parent=run.run_id, kin=self.model.runs,
        )  # fmt: skip
        expected = run.start_child(self.model.now, item.attempt, item.token, child)
        answer = self.twice(self.kernel.start_child, item, input=value, org_id=run.org, request=child.request)
        known = self.model.runs.get(child.run_id)
        created = expected == "started" and known is not None and known.request == child.request
        assert (answer.answer, answer.created) == (expected, created)

    @precondition(many_open)
    @rule(
        pick=index,
        name=st.sampled_from(["e", "e", "f"]),
        payload=st.sampled_from([{"approved": True}, {"approved": False}, "text", None]),
        event_id=st.sampled_from(["1", "2", None, None, None]),
    )
    def send_event(self, pick: int, name: str, payload: Any, event_id: str | None) -> None:
        run = self.run(pick)
        event = EventModel(event_id or f"event-{self.token()}", name, payload, self.token())
        named = event_id is not None
        for _ in range(2):
            expected = run.send(event)
            (answer,) = self.do(
                events.send,
                self.kernel.session,
                [events.Sending(run.run_id, name, json.dumps(payload), event.event_id, named, event.request)],
            )
            assert answer == expected

    @precondition(many_open)
    @rule(pick=index, name=st.sampled_from(["e", "e", "f"]), event_id=st.sampled_from(["1", "2", "3"]))
    def send_event_by_sql(self, pick: int, name: str, event_id: str) -> None:
        """The public door: whoever asks again there is another sender, and the event a duplicate."""
        run = self.run(pick)
        options = "jsonb_build_object('name', $2::text, 'event_id', $3::text)"
        statement = f"SELECT @schema@.send_event($1, '\"text\"', {options})"
        for _ in range(2):
            expected = run.send(EventModel(event_id, name, "text", self.token()))
            if expected in ("conflict", "undecided"):
                said = "was used for another event" if expected == "conflict" else "waits for an approval 'e'"
                with pytest.raises(KernelRefused, match=said):
                    self.do(self.kernel.fetchval, statement, run.run_id, name, event_id)
            else:
                answer = self.do(self.kernel.fetchval, statement, run.run_id, name, event_id)
                assert answer == expected

    @precondition(lambda self: any(run.woken for run in self.model.runs.values()))
    @rule()
    def sweep_wakes(self) -> None:
        woken = sum(run.wake(self.model.now) for run in self.model.runs.values() if run.woken)
        assert self.do(self.kernel.sweep_wakes) == (woken, False)

    @precondition(begun)
    @rule(
        pick=index,
        stale=seldom,
        back=st.integers(0, 3),
        said=st.lists(lane_kinds, min_size=1, max_size=4),
    )
    def say(self, pick: int, stale: bool, back: int, said: list[Lane]) -> None:
        run, item = self.fence(pick, stale)
        first = max(1, run.appended + 1 - back)
        numbered = list(enumerate(said, first))
        expected = run.say(self.model.now, item.attempt, item.token, numbered)
        sayings = [saying(item, ordinal, lane) for ordinal, lane in numbered]
        assert self.twice(facts.append, self.kernel.session, sayings) == [expected] * len(said)

    @precondition(begun)
    @rule(
        pick=index,
        stale=seldom,
        key=step_keys,
        function=st.sampled_from(["f", "f", "f", "g"]),
        lease=step_leases,
        lease_s=st.sampled_from([None, None, 5.0]),
    )
    def claim_step(
        self, pick: int, stale: bool, key: str, function: str, lease: int | None, lease_s: float | None
    ) -> None:
        run, item = self.fence(pick, stale)
        expected = run.claim_step(
            self.model.now, item.attempt, item.token, key, function, lease or item.token, lease_s
        )
        answer = self.twice(self.kernel.claim_step, item, key, function, lease=lease, lease_s=lease_s)
        assert answer.answer == expected
        if expected != "lost":
            step = run.steps[key]
            assert (answer.function, answer.tries) == (step.function, step.tries)
            assert (answer.output or answer.error) == step.payload

    @precondition(begun)
    @rule(
        pick=index,
        stale=seldom,
        key=step_keys,
        lease=step_leases,
        outcome=st.sampled_from(
            ["completed", "completed", "skipped", "failed", "failed", "fatal", "released"]
        ),
        insert=seldom,
    )
    def end_step(
        self, pick: int, stale: bool, key: str, lease: int | None, outcome: str, insert: bool
    ) -> None:
        run, item = self.fence(pick, stale)
        payload = None if outcome == "released" else str(self.token())
        function = "f" if insert else None
        try:
            expected = run.end_step(
                item.attempt, item.token, key, lease or item.token, outcome, payload, function
            )
        except Final:
            with pytest.raises(KernelRefused, match="for good"):
                self.do(
                    self.kernel.end_step, item, outcome, key, payload=payload, lease=lease, function=function
                )
            return
        answer = self.twice(
            self.kernel.end_step, item, outcome, key, payload=payload, lease=lease, function=function
        )
        assert answer == expected

    @precondition(begun)
    @rule(
        pick=index,
        stale=seldom,
        key=step_keys,
        lease=step_leases,
        state=st.sampled_from(["queued", "running", None]),
        lease_s=st.sampled_from([None, 8.0]),
    )
    def mark_step(
        self, pick: int, stale: bool, key: str, lease: int | None, state: str | None, lease_s: float | None
    ) -> None:
        run, item = self.fence(pick, stale)
        try:
            expected = run.mark_step(
                self.model.now, item.attempt, item.token, key, lease or item.token, state, lease_s
            )
        except Final:
            with pytest.raises(KernelRefused, match="for good"):
                self.do(self.kernel.mark_step, item, state, key, lease=lease, lease_s=lease_s)
            return
        assert self.twice(self.kernel.mark_step, item, state, key, lease=lease, lease_s=lease_s) == expected

    @precondition(many_open)
    @rule(pick=index, mark=st.booleans(), request=st.sampled_from(["q", "r"]))
    def cancel(self, pick: int, mark: bool, request: str) -> None:
        run = self.run(pick)
        expected = run.cancel(self.model.now, request)
        assert self.twice(self.kernel.cancel, run.run_id, request, mark=mark) == expected

    @precondition(
        lambda self: self.many_open() and any(r.status == "waiting" for r in self.model.runs.values())
    )
    @rule(pick=index, any_run=seldom, wrong=seldom, request=st.sampled_from(["f", "g"]))
    def fail_waiting(self, pick: int, any_run: bool, wrong: bool, request: str) -> None:
        waiting = [run for run in self.model.runs.values() if run.status == "waiting"]
        run = self.run(pick) if any_run else waiting[pick % len(waiting)]
        key = run.wait or "a"
        kind = run.waits[key].kind if key in run.waits else "sleep"
        attempt = run.attempt - 1 if wrong else run.attempt
        expected = run.fail_waiting(self.model.now, attempt, kind, key, request)
        answer = self.twice(self.kernel.fail_waiting, run.run_id, attempt, kind, key, request)
        assert (answer.answer, answer.status) == (expected, run.status)

    @precondition(many_open)
    @rule(pick=index, request=st.sampled_from(["q", "s"]))
    def request_cancel(self, pick: int, request: str) -> None:
        run = self.run(pick)
        statement = "SELECT @schema@.cancel_run($1, jsonb_build_object('request_id', $2::text))"
        answer = self.twice(self.kernel.fetchval, statement, run.run_id, request)
        if run.over:
            assert answer == run.status
        else:
            assert answer == "pending"
            if request not in {mark for _, mark in run.marks}:
                run.marks.append((self.model.now, request))

    @precondition(some_marked)
    @rule(limit=st.integers(1, 3))
    def sweep(self, limit: int) -> None:
        for run in self.model.runs.values():
            if run.over:
                run.marks = []
        marked = sorted((run for run in self.model.runs.values() if run.marks), key=lambda run: run.run_id)
        requests = {run.run_id: min(run.marks)[1] for run in marked}
        done, left = self.do(control.sweep, self.kernel.session, limit=limit)
        assert done == min(limit, len(marked))
        for run in marked:  # any of them: find out which
            if self.do(self.kernel.status, run.run_id) == "cancelled":
                run.cancel(self.model.now, requests[run.run_id])
                done -= 1
        assert done == 0
        assert left == min(limit, sum(len(run.marks) for run in self.model.runs.values()))

    @precondition(some_due)
    @rule(limit=st.integers(1, 3))
    def expire_leases(self, limit: int) -> None:
        self.expire(limit)

    def expire(self, limit: int) -> None:
        now = self.model.now
        due = [run for run in self.model.runs.values() if run.status == "running" and run.due <= now]
        answer = self.do(self.kernel.expire, limit)
        counts = {"expired": 0, "failed": 0, "pushed": 0}
        for run in due:
            row = self.do(
                self.kernel.fetchval,
                "SELECT (status <> 'running' OR due_at > @schema@.clock()) FROM @schema@.runs WHERE run_id = $1",
                run.run_id,
            )
            if row:
                counts[run.expire(now)] += 1
        assert sum(counts.values()) == min(limit, len(due))
        assert (answer.expired, answer.failed, answer.pushed) == (
            counts["expired"] + counts["failed"], counts["failed"], counts["pushed"],
        )  # fmt: skip

    @precondition(lambda self: any(run.status == "running" for run in self.model.runs.values()))
    @rule(limit=st.integers(1, 3))
    def let_leases_lapse(self, limit: int) -> None:
        self.advance(61.0)
        self.expire(limit)

    @rule(seconds=st.sampled_from([1.0, 5.0, 31.0, 61.0]))
    def advance_clock(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.model.now += seconds
        self.do(self.kernel.advance, seconds)

    # --- lanes ---------------------------------------------------------------------------------------

    def cursors(self, lane: Lane) -> dict[str, int]:
        table = "runs" if lane is Lane.LIFECYCLE else "lanes"
        rows = self.do(self.kernel.fetch, f"SELECT run_id, acked_seq FROM @schema@.{table}")
        return {row["run_id"]: row["acked_seq"] for row in rows}

    def moved(self, lane: Lane) -> set[str]:
        """Runs whose cursor is not where the model has it."""
        acked = self.cursors(lane)
        states = {run.run_id: run.lane(lane) for run in self.model.runs.values()}
        return {
            run_id for run_id, state in states.items() if state is not None and acked[run_id] != state.acked
        }

    def chosen(
        self, lane: Lane, run_ids: set[str], limit: int, oldest: bool, receivers: Sequence[str]
    ) -> list[LaneModel]:
        """The lanes that a turn took; they must be the right ones."""
        candidates = self.model.lanes_claimable(lane, receivers)
        taken = [entry for entry in candidates if entry[0].run_id in run_ids]
        left = [entry for entry in candidates if entry[0].run_id not in run_ids]
        assert len(taken) == len(run_ids) == min(limit, len(candidates))
        for _, state, rank in taken:
            for _, other, other_rank in left:
                assert rank != other_rank or state.due <= other.due
                assert oldest or rank <= other_rank
        if oldest and taken:
            assert min(state.due for _, state, _ in taken) == min(state.due for _, state, _ in candidates)
        return [state for _, state, _ in taken]

    def check_prefix(self, prefix: lanes.Prefix) -> None:
        state = self.model.runs[prefix.run_id].lane(prefix.lane)
        assert state is not None
        assert state.frozen is not None
        assert list(prefix.seqs) == list(range(state.acked + 1, state.frozen + 1))
        assert list(prefix.types) == state.types[state.acked : state.frozen]
        assert prefix.attempt == state.attempts
        assert (prefix.generation, prefix.passed) == (state.generation, state.passed)

    @precondition(some_pending)
    @rule(
        lane=lane_kinds,
        limit=st.integers(1, 3),
        prefix=st.integers(1, 3),
        oldest=st.booleans(),
        receivers=receivers,
    )
    def claim_lanes(self, lane: Lane, limit: int, prefix: int, oldest: bool, receivers: list[str]) -> None:
        token = self.token()
        found = self.do(
            self.kernel.claim_lanes, lane, token=token, limit=limit, prefix=prefix, oldest=oldest, receivers=receivers
        )  # fmt: skip
        # A lane of which nothing was left but facts without effect was taken, too.
        taken = {item.run_id for item in found} | self.moved(lane)
        for state in self.chosen(lane, taken, limit, oldest, receivers):
            state.pass_quiet()
            if state.pending and (ELSEWHERE if state.elsewhere else "") in receivers:
                state.claim(self.model.now, token, prefix, LANE_LEASE_S)
        for item in found:
            self.check_prefix(item)
            self.turns.append(Turn(item))

    @precondition(lambda self: self.turns)
    @rule(pick=index, prefix=st.integers(0, 3), keep=st.booleans())
    def acknowledge(self, pick: int, prefix: int, keep: bool) -> None:
        turn = self.turns[pick % len(self.turns)]
        item, (run_id, lane) = turn.prefix, turn.key
        state = self.model.runs[run_id].lane(lane)
        assert state is not None
        assert self.do(self.kernel.apply, item)  # whoever sends it, the ledger has it now, once
        expected = state.acknowledge(self.model.now, item.token, item.through, prefix, LANE_LEASE_S)
        answer = self.do(self.kernel.acknowledge, item, prefix=prefix)
        again = self.do(self.kernel.acknowledge, item, prefix=prefix)
        assert attrs.evolve(again, lags=answer.lags) == answer
        assert answer.answer == expected
        goes_on = expected == "acked" and state.held_by(item.token)
        assert (answer.successor is not None) == goes_on
        if answer.successor is not None:
            self.check_prefix(answer.successor)
            self.turns.append(Turn(answer.successor))
        if not keep:
            self.turns.remove(turn)

    @precondition(lambda self: self.turns)
    @rule(pick=index)
    def send_and_crash(self, pick: int) -> None:
        assert self.do(self.kernel.apply, self.turns[pick % len(self.turns)].prefix)

    @precondition(lambda self: self.turns)
    @rule(pick=index, ending=st.sampled_from(["given_up", "failed", "unsent", "unsent", "blocked"]))
    def hand_back(self, pick: int, ending: str) -> None:
        item = self.turns[pick % len(self.turns)].prefix
        state = self.model.runs[item.run_id].lane(item.lane)
        assert state is not None
        applied = self.do(
            self.kernel.fetchval,
            "SELECT coalesce(max(applied_seq), 0) FROM @schema@.ledger_runs WHERE run_id = $1"
            if item.lane is Lane.LIFECYCLE
            else "SELECT coalesce(max(seq), 0) FROM @schema@.ledger_logs WHERE run_id = $1",
            item.run_id,
        )
        if ending == "unsent" and applied > state.acked:
            ending = "given_up"  # only who has sent nothing may say so
        delay_s = 7.0 if ending == "failed" else 0.0
        expected = state.hand_back(self.model.now, item.token, ending, delay_s)
        reason = "rejected" if ending == "blocked" else None
        fields = {"ending": ending, "delay_s": delay_s, "reason": reason}
        assert self.twice(self.kernel.hand_back, item, **fields) == expected
        if ending == "unsent":  # and who has said so must not send any more
            self.turns = [turn for turn in self.turns if turn.prefix is not item]

    @precondition(lambda self: self.turns)
    @rule(pick=index, lease=st.sampled_from([5.0, 50.0]))
    def renew_lane(self, pick: int, lease: float) -> None:
        item = self.turns[pick % len(self.turns)].prefix
        state = self.model.runs[item.run_id].lane(item.lane)
        assert state is not None
        expected = state.renew(self.model.now, item.token, lease)
        assert self.twice(lanes.renew, self.kernel.session, item.lane, [item], lease_s=lease) == [expected]

    @precondition(some_pending)
    @rule(
        lane=lane_kinds,
        limit=st.integers(1, 3),
        prefix=st.integers(1, 4),
        oldest=st.booleans(),
        receivers=receivers,
    )
    def deliver(self, lane: Lane, limit: int, prefix: int, oldest: bool, receivers: list[str]) -> None:
        turn = self.do(
            self.kernel.deliver, lane, limit=limit, prefix=prefix, oldest=oldest, receivers=receivers
        )
        delivered = 0
        for state in self.chosen(lane, self.moved(lane), limit, oldest, receivers):
            state.pass_quiet()
            if state.pending and (ELSEWHERE if state.elsewhere else "") in receivers:
                state.deliver(self.model.now, prefix)
                delivered += 1
        assert (turn.lanes, turn.blocked) == (delivered, 0)

    @precondition(lambda self: any(run.status == "running" for run in self.model.runs.values()))
    @rule(pick=index, type_=st.sampled_from(["run.waiting", "run.resumed"]))
    def append_what_has_no_effect(self, pick: int, type_: str) -> None:
        running = [run for run in self.model.runs.values() if run.status == "running"]
        run = running[pick % len(running)]
        self.do(self.kernel.append_quiet, run.run_id, type_)
        run.lifecycle.append(self.model.now, type_)
        run.lifecycle.quiet.add(run.lifecycle.last)

    @precondition(many_open)
    @rule(pick=index)
    def send_the_terminal_elsewhere(self, pick: int) -> None:
        run = self.run(pick)
        if not run.over:
            self.do(
                self.kernel.execute,
                "UPDATE @schema@.runs SET terminal_receiver = $2 WHERE run_id = $1",
                run.run_id,
                ELSEWHERE,
            )
            run.terminal_receiver = ELSEWHERE

    def blocked_lanes(self) -> list[tuple[RunModel, Lane, LaneModel]]:
        return [
            (run, lane, state)
            for run in self.model.runs.values()
            for lane in Lane
            if (state := run.lane(lane)) is not None and state.error is not None
        ]

    @precondition(lambda self: bool(self.blocked_lanes()))
    @rule(pick=index)
    def retry_blocked(self, pick: int) -> None:
        run, _, _ = self.blocked_lanes()[pick % len(self.blocked_lanes())]
        assert self.do(
            journal.retry_lane, self.kernel.session, run.run_id, because=None, by=None, notify=False
        )
        for lane in Lane:
            state = run.lane(lane)
            if state is not None and state.error is not None:
                state.retry(self.model.now)

    @precondition(lambda self: bool(self.blocked_lanes()))
    @rule(pick=index, part=st.integers(0, 3))
    def skip_blocked(self, pick: int, part: int) -> None:
        run, lane, state = self.blocked_lanes()[pick % len(self.blocked_lanes())]
        assert state.frozen is not None
        first, seq = state.acked + 1, max(state.acked + 1, state.frozen - part)
        answer = self.twice(
            journal.skip_lane, self.kernel.session, run.run_id, seq, lane=lane, because="b", by=None, notify=False
        )  # fmt: skip
        assert answer == (first, seq)
        state.skip(self.model.now, seq)

    # --- after every step ----------------------------------------------------------------------------

    @invariant()
    def nothing_is_broken(self) -> None:
        self.do(check_invariants, self.kernel.session)

    @invariant()
    def the_rows_are_as_predicted(self) -> None:
        rows = {row["run_id"]: row for row in self.do(self.kernel.fetch, _RUNS)}
        assert rows.keys() == self.model.runs.keys()
        for run in self.model.runs.values():
            row = rows[run.run_id]
            found = (
                row["status"], row["attempt"], row["lease_token"], row["lease_owner"], at(row["lease_expires_at"]),
                at(row["due_at"]), row["appended"], row["failures"], row["crashes"], row["wait_key"], row["lane_rank"],
                row["types"], row["marks"] or [], row["passed"] or [], json.loads(row["got"] or "{}"),
                row["taken"] or [], row["woken"],
            )  # fmt: skip
            assert found == (
                run.status, run.attempt, run.token, run.owner, run.expires, run.due, run.appended, run.failures,
                run.crashes, run.wait, run.rank, run.lifecycle.types, sorted(mark for _, mark in run.marks),
                sorted(key for key, wait in run.waits.items() if wait.done),
                {wait.key: wait.got for wait in run.waits.values() if wait.got is not None},
                [event.taken_by for event in run.events], run.woken,
            )  # fmt: skip
            assert lane_row(row) == lane_tuple(run.lifecycle)
        logs = {row["run_id"]: lane_row(row) for row in self.do(self.kernel.fetch, _LANES)}
        assert logs == {
            run.run_id: lane_tuple(run.logs) for run in self.model.runs.values() if run.logs is not None
        }
        steps = {
            (row["run_id"], row["key"]): (
                row["function"], row["attempt"], row["lease"], row["state"], row["tries"], at(row["lease_expires_at"]),
                row["run_failures"], row["final"], row["payload"],
            )
            for row in self.do(self.kernel.fetch, _STEPS)
        }  # fmt: skip
        assert steps == {
            (run.run_id, key): attrs.astuple(step)
            for run in self.model.runs.values()
            for key, step in run.steps.items()
        }


def of_run(run: RunModel, waits: Iterable[Wait]) -> list[Wait]:
    """The waits, with the name of the run's child."""
    return [attrs.evolve(wait, name=child_of(run.run_id)) if wait.key == "kid" else wait for wait in waits]


def plain(found: Mapping[str, WaitState]) -> dict[str, WaitState]:
    """States with how a child ended in place of all that is known of it."""
    return {
        key: attrs.evolve(state, payload=json.loads(state.payload)["status"] or "gone")
        if state.kind == "child" and state.payload is not None
        else state
        for key, state in found.items()
    }


def states(now: float, waits: Iterable[WaitModel]) -> dict[str, WaitState]:
    """Waits as the kernel tells of them."""
    return {
        wait.key: WaitState(
            wait.kind,
            wait.name,
            wait.done,
            None if wait.done or wait.due == NEVER else wait.due - now,
            wait.got,
        )
        for wait in waits
    }


def at(moment: Any) -> float | None:
    """A moment of the database as seconds since the start. The driver gives infinity as the last of all moments."""
    if moment is None:
        return None
    return NEVER if moment.year == 9999 else (moment.replace(tzinfo=UTC) - START) / timedelta(seconds=1)


def lane_row(row: Any) -> tuple[Any, ...]:
    return (
        row["lane_skips"], row["last_seq"], row["acked_seq"], row["frozen_seq"], row["lane_attempts"],
        row["lane_token"], at(row["lane_expires_at"]), at(row["lane_due_at"]), row["lane_error"],
    )  # fmt: skip


def lane_tuple(lane: LaneModel) -> tuple[Any, ...]:
    return (
        lane.generation, lane.last, lane.acked, lane.frozen, lane.attempts, lane.token, lane.expires, lane.due,
        lane.error,
    )  # fmt: skip


LANE_RULES = frozenset({
    "submit_another", "claim", "settle", "say", "advance_clock", "claim_lanes", "acknowledge", "send_and_crash",
    "hand_back", "renew_lane", "deliver", "append_what_has_no_effect", "send_the_terminal_elsewhere", "retry_blocked",
    "skip_blocked",
})  # fmt: skip


def only(names: frozenset[str]) -> dict[str, None]:
    """What takes all other rules out of a machine."""
    marked = [name for name in dir(KernelMachine) if hasattr(getattr(KernelMachine, name), RULE_MARKER)]
    assert names <= set(marked)
    return {name: None for name in marked if name not in names}


def play_out(dsn: str, schema: str, rules: frozenset[str] | None = None, **profile: Any) -> None:
    with open_portal(dsn, schema, CRASH_CAP) as portal:
        machine = type(
            "Machine", (KernelMachine,), {"portal": portal, **({} if rules is None else only(rules))}
        )
        run_state_machine_as_test(
            machine,
            settings=settings(
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
                **profile,
            ),
        )


@pytest.mark.timeout(900)  # a failure is made small before it is shown
def test_every_answer_and_row_is_as_the_model_predicts(dsn: str, schema: str) -> None:
    play_out(dsn, schema, max_examples=100, stateful_step_count=50, derandomize=True)


@pytest.mark.timeout(900)
def test_lanes_alone_are_as_the_model_predicts(dsn: str, schema: str) -> None:
    """Among all rules those of lanes come too seldom to meet one another."""
    play_out(dsn, schema, LANE_RULES, max_examples=30, stateful_step_count=60, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_answer_and_row_is_as_the_model_predicts_for_long(dsn: str, schema: str) -> None:
    play_out(dsn, schema, max_examples=3000, stateful_step_count=60)
