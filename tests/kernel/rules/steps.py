"""Rules of steps: receipts claimed, marked and ended; and every receipt's row after each step."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sql.errors import KernelRefused
from tests.kernel.model.runs import Final
from tests.kernel.rules.machine import Machine, at, index, seldom

_STEPS = """
SELECT run_id, key, function, attempt, lease, state, tries, lease_expires_at, run_failures, final,
       coalesce(output, error)::text AS payload
  FROM @schema@.receipts
"""

step_keys = st.sampled_from(["s", "s", "t"])
step_leases = st.sampled_from([None, None, None, 7])  # the attempt's token, or a holder of its own


class StepRules(Machine):
    """Two keys, so that they meet."""

    @precondition(Machine.begun)
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

    @precondition(Machine.begun)
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

    @precondition(Machine.begun)
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

    @invariant()
    def the_receipts_are_as_predicted(self) -> None:
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
