"""Rules of circuits: attempts ask whether a dependency is worth calling, and report how it went."""

from __future__ import annotations

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sql import circuits
from tests.kernel.model.circuits import CircuitModel, Fence
from tests.kernel.rules.machine import Machine, at, index, seldom

PROBE_S = 15.0
ACTS = st.sampled_from([
    "failed", "failed", "failed", "ok", "none", "goes on", "goes on", "late ok", "late failed", "again", "wait", "wait",
])  # fmt: skip


class CircuitRules(Machine):
    """Two dependencies. A report may come at any time, again, and of a call that nobody was allowed to make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, Fence]] = []

    @precondition(Machine.begun)
    @rule(
        pick=index,
        stale=seldom,
        name=st.sampled_from(["crm", "crm", "erp"]),
        acts=st.lists(st.tuples(ACTS, index), min_size=1, max_size=8),
    )
    def call(self, pick: int, stale: bool, name: str, acts: list[tuple[str, int]]) -> None:
        """``acts``: calls that end at once so, or go on; how an earlier one went; the same permission again; time."""
        for act, place in acts:
            if act == "wait":
                self.advance(10.0)
            elif act == "again":
                self.enter(place, stale, True, name)
            elif act.startswith("late "):
                if self.calls:
                    self.report(place % len(self.calls), act.removeprefix("late "))
            else:
                self.enter(pick, stale, False, name)
                if act != "goes on":
                    self.report(-1, act)

    def enter(self, pick: int, stale: bool, again: bool, name: str) -> None:
        run, item = self.fence(pick, stale)
        call = (name, self.token(), (run.run_id, item.attempt))
        if again and self.calls:
            call = self.calls[pick % len(self.calls)]
        else:
            self.calls.append(call)
        name, token, fence = call
        circuit = self.model.circuits.get(name, CircuitModel())
        expected = circuit.enter(self.model.now, token, fence, PROBE_S, self.model.lives)
        asked = [circuits.Call(name, token, *fence)]
        (answer,) = self.twice(circuits.enter, self.kernel.session, asked, probe_s=PROBE_S)
        assert attrs.astuple(answer) == expected

    def report(self, pick: int, result: str) -> None:
        name, token, _ = self.calls[pick]
        if result == "failed":
            self.model.circuits.setdefault(name, CircuitModel())
        circuit = self.model.circuits.get(name, CircuitModel())
        for _ in range(2):  # a success says the same again, and so does a failure that was counted
            circuit.report(self.model.now, token, result)
            (answer,) = self.do(
                circuits.report, self.kernel.session, [circuits.Report(name, token, result, "no answer")]
            )
            assert attrs.astuple(answer) == ("done", circuit.state, len(circuit.failures))

    @rule(name=st.sampled_from(["crm", "erp"]), failures=st.sampled_from([1, 1, 2]), close=seldom)
    def set_circuit(self, name: str, failures: int, close: bool) -> None:
        known = self.model.circuits.get(name)
        circuit = self.model.circuits.setdefault(name, CircuitModel())
        changed = known is None or circuit.threshold != failures
        circuit.threshold = failures
        if close and (circuit.state != "closed" or circuit.failures):
            circuit.close()
            changed = True
        assert (
            self.do(circuits.set_circuit, self.kernel.session, name, failures=failures, close=close)
            == changed
        )

    @invariant()
    def the_circuits_are_as_predicted(self) -> None:
        if not self.model.circuits:
            return
        rows = self.do(
            self.kernel.fetch,
            """SELECT name, state, openings, open_until, failures, threshold, probe_token, probe_run_id,
                      probe_attempt, probe_until FROM @schema@.circuits""",
        )
        assert {
            row["name"]: (
                row["state"], row["openings"], at(row["open_until"]), row["failures"], row["threshold"],
                row["probe_token"], row["probe_run_id"], row["probe_attempt"], at(row["probe_until"]),
            )
            for row in rows
        } == {
            name: (
                circuit.state, circuit.openings, circuit.open_until, circuit.failures, circuit.threshold,
                *((None,) * 4 if probe is None else (probe.token, *probe.fence, probe.until)),
            )
            for name, circuit in self.model.circuits.items()
            for probe in [circuit.probe]
        }  # fmt: skip

    @invariant()
    def a_half_open_circuit_has_one_probe(self) -> None:
        for circuit in self.model.circuits.values():
            out = [
                probe
                for probe in circuit.sent
                if probe.until > self.model.now and self.model.lives(probe.fence)
            ]
            assert len(out) <= 1
