"""Rules of reading: what people are told of a run, and what those hear who ask for one that is not there."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sql import status
from sql.types import WaitRecord
from tests.kernel.model.lanes import NEVER
from tests.kernel.model.runs import RunModel
from tests.kernel.rules.machine import Machine, at, index, moment


class StatusRules(Machine):
    """Nothing here changes anything."""

    @precondition(lambda self: self.model.runs)
    @rule(pick=index)
    def read_status(self, pick: int) -> None:
        run = self.run(pick)
        found = self.do(status.read_run, self.kernel.session, run.run_id, full=True)
        assert found is not None
        assert found.details is not None
        last = run.terminal_seq if run.over else run.lifecycle.last
        assert (
            found.status, found.terminal, found.attempt, found.failures, found.crashes, found.org_id, found.parent_id,
            found.wait_kind, found.wait_key, at(found.wait_until), found.waits, found.facts_last,
            found.facts_delivered, found.lane_blocked,
        ) == (
            run.status, run.over, run.attempt, run.failures, run.crashes, run.org, run.parent,
            None if run.wait is None else run.waits[run.wait].kind, run.wait, run.wait_until, standing(run), last,
            run.lifecycle.acked, run.lifecycle.error,
        )  # fmt: skip
        assert (found.due_at, found.lease_expires_at) == tuple(
            None if at in (None, NEVER) else moment(at) for at in (run.due, run.expires)
        )
        runner = run.detached.runner
        if run.status == "running" and run.owner == 0:
            assert runner is not None
            assert found.host == f"sandbox {runner.sandbox} ({runner.provider})"
        details = found.details
        assert (
            details.idempotency_key, details.concurrency_key, details.unique_key, details.array_input,
            details.terminal_receiver, details.log_lane_blocked,
        ) == (
            run.key, run.concurrency, None if run.unique is None else run.unique.key, run.array_input,
            run.terminal_receiver, None if run.logs is None else run.logs.error,
        )  # fmt: skip
        assert (details.terminal is not None) == run.over
        ends = self.do(status.read_terminals, self.kernel.session, [run.run_id])
        assert [end.status for end in ends] == ([run.status] if run.over else [])
        tried = self.do(status.read_attempts, self.kernel.session, run.run_id)
        assert [(one.attempt, one.outcome, at(one.ended_at)) for one in tried] == [
            (attempt, outcome, run.ended_at[attempt]) for attempt, (_, outcome) in run.ended.items()
        ]

    @rule(name=st.sampled_from(["e", "f"]))
    def ask_for_nobody(self, name: str) -> None:
        """What was never there, or is lost, hears nothing."""
        gone = [run_id for fire in self.model.fires.values() for run_id in fire.lost]
        for run_id in ["nobody", *gone[:1]]:
            assert self.twice(self.kernel.send, run_id, name, event_id="1") == "missing"
            by_sql = "SELECT @schema@.send_event($1, '1', jsonb_build_object('name', $2::text))"
            assert self.do(self.kernel.fetchval, by_sql, run_id, name) == "missing"
            assert self.twice(self.kernel.cancel, run_id, mark=True) == "missing"
            assert self.do(self.kernel.fetchval, "SELECT @schema@.cancel_run($1)", run_id) == "missing"
            assert self.twice(self.kernel.fail_waiting, run_id, 1, "event", name).answer == "missing"
            assert self.do(status.read_run, self.kernel.session, run_id, full=True) is None
        left = self.do(
            self.kernel.fetchval,
            "SELECT (SELECT count(*) FROM @schema@.events) + (SELECT count(*) FROM @schema@.waits)",
        )
        assert left == sum(len(run.events) + len(run.waits) for run in self.model.runs.values())


def standing(run: RunModel) -> tuple[WaitRecord, ...]:
    """What a parked run stands at, the first to pass in front."""
    if run.status != "waiting":
        return ()
    return tuple(
        WaitRecord(
            wait.kind,
            wait.key,
            wait.name,
            moment(wait.created),
            None if wait.due == NEVER else moment(wait.due),
        )
        for wait in sorted(run.standing, key=lambda wait: (wait.due, wait.key))
    )
