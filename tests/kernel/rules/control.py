"""Rules of control: cancelling runs, now or by request, and failing those that wait."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sql import control
from tests.kernel.rules.machine import Machine, index, seldom


class ControlRules(Machine):
    """Requests have few names, so that they meet."""

    @precondition(Machine.many_open)
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

    @precondition(Machine.many_open)
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

    @precondition(Machine.some_marked)
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
