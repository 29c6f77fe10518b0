"""Rules of runs: admission, claims, what live attempts do, ends and expiry; and every run's row after each step."""

from __future__ import annotations

import json
from typing import Any

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from sql import array_input, facts, leases
from sql.types import Lane
from tests.kernel.model.runs import ELSEWHERE
from tests.kernel.rules.lanes import lane_kinds, lane_row, lane_tuple
from tests.kernel.rules.limits import Claims
from tests.kernel.rules.machine import Machine, at, delays, index, moment, seldom
from tests.support.kernel import LEASE_S, PLAYS, saying

_RUNS = """
SELECT run_id, status, attempt, lease_token, lease_owner, lease_expires_at, due_at, appended, failures, crashes,
       wait_key, wait_until, array_input, lane_rank, lane_skips, last_seq, acked_seq, frozen_seq, lane_attempts,
       lane_token, lane_expires_at, lane_due_at, lane_error,
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


class RunRules(Claims):
    """Hosts 1 and 2 act."""

    @initialize(count=st.integers(1, 3))
    def begin(self, count: int) -> None:
        for number in range(count):
            self.submit(named=False, claimed=number > 0)

    @precondition(Machine.few_open)
    @rule(
        play=st.sampled_from(PLAYS),
        priority=st.sampled_from([0, 0, 0, 2, -1]),
        org=st.sampled_from([None, None, "o"]),
        key=st.sampled_from([None, None, None, "k", "l"]),
        value=st.sampled_from([1, 1, 1, 2]),
        delay=delays,
        named=st.booleans(),
        claimed=st.booleans(),
        pages_to=st.sampled_from([None, None, ELSEWHERE]),
    )
    def submit_another(self, **fields: Any) -> None:
        self.submit(**fields)

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

    @precondition(Machine.some_claimable)
    @rule(
        host=st.sampled_from([1, 2]),
        plays=st.sampled_from([PLAYS, PLAYS, PLAYS[:1], PLAYS[1:]]),
        limit=st.integers(1, 4),
        oldest=st.booleans(),
        lease=st.sampled_from([LEASE_S, 10.0]),
    )
    def claim(self, **fields: Any) -> None:
        self.take(**fields)

    @precondition(Machine.begun)
    @rule(pick=index, stale=seldom, lease=st.sampled_from([LEASE_S, 5.0]))
    def renew(self, pick: int, stale: bool, lease: float) -> None:
        run, item = self.fence(pick, stale)
        expected = run.renew(self.model.now, item.attempt, item.token, lease)
        assert self.twice(self.kernel.renew, item, lease) == leases.Renewal(
            expected, bool(run.marks) or run.status == "cancelled"
        )

    @precondition(Machine.begun)
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

    @precondition(Machine.begun)
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
            assert answer.outage_at == moment(run.outages[item.attempt][1])

    @precondition(Machine.begun)
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

    @precondition(Machine.some_due)
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

    @precondition(Machine.begun)
    @rule(pick=index, stale=seldom, wrong=seldom)
    def register_array_input(self, pick: int, stale: bool, wrong: bool) -> None:
        run, item = self.fence(pick, stale)
        org = "another" if wrong else run.org
        expected = run.register_array_input(item.attempt, item.token, org)
        intent = array_input.Intent(run.run_id, org, item.attempt, item.token)
        assert self.twice(array_input.register, self.kernel.session, [intent]) == [expected]

    @invariant()
    def the_runs_are_as_predicted(self) -> None:
        rows = {row["run_id"]: row for row in self.do(self.kernel.fetch, _RUNS)}
        assert rows.keys() == self.model.runs.keys()
        for run in self.model.runs.values():
            row = rows[run.run_id]
            found = (
                row["status"], row["attempt"], row["lease_token"], row["lease_owner"], at(row["lease_expires_at"]),
                at(row["due_at"]), row["appended"], row["failures"], row["crashes"], row["wait_key"],
                at(row["wait_until"]), row["array_input"], row["lane_rank"], row["types"], row["marks"] or [],
                row["passed"] or [], json.loads(row["got"] or "{}"), row["taken"] or [], row["woken"],
            )  # fmt: skip
            assert found == (
                run.status, run.attempt, run.token, run.owner, run.expires, run.due, run.appended, run.failures,
                run.crashes, run.wait, run.wait_until, run.array_input, run.rank, run.lifecycle.types,
                sorted(mark for _, mark in run.marks), sorted(key for key, wait in run.waits.items() if wait.done),
                {wait.key: wait.got for wait in run.waits.values() if wait.got is not None},
                [event.taken_by for event in run.events], run.woken,
            )  # fmt: skip
            assert lane_row(row) == lane_tuple(run.lifecycle)
