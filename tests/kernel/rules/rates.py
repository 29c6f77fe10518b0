"""Rules of rate scopes: attempts ask for slots, are refused, probe, and report what became of them."""

from __future__ import annotations

import json

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sql import rates
from tests.kernel.model.rates import Fence, HoldModel, RateModel
from tests.kernel.rules.machine import Machine, at, index, seldom

PROBE_S = 15.0
# Rates whose units take whole seconds.
SCOPES = st.sampled_from([
    (1.0, 1.0, None), (1.0, 3.0, None), (0.5, 1.0, None), (0.5, 2.0, 2), (1.0, 1.0, 1), (None, 1.0, 1), (None, 1.0, 2),
])  # fmt: skip
ACTS = st.tuples(
    st.sampled_from([
        "new", "new", "new", "again", "again", "ahead", "advance", "advance", "done", "done", "failed", "unused",
        "refused", "give up",
    ]),
    index,
    st.sampled_from([0.0, 1.0, 4.0, 10.0]),
)  # fmt: skip


class RateRules(Machine):
    """Two scopes."""

    @rule(name=st.sampled_from(["api", "api", "web"]), scope=SCOPES)
    def change_rate(self, name: str, scope: tuple[float | None, float, int | None]) -> None:
        self.set_rate(name, scope)

    def set_rate(self, name: str, scope: tuple[float | None, float, int | None]) -> None:
        per_s, burst, most = scope
        known = self.model.rates.get(name)
        changed = known is None or (known.per_s, known.burst, known.most) != scope
        if known is None:
            self.model.rates[name] = RateModel(per_s, burst, most, self.model.now, self.model.now)
        else:
            known.per_s, known.burst, known.most = scope
            known.grants = known.grants if not changed else []
        answer = self.do(
            rates.set_rate, self.kernel.session, name, per_s=per_s, burst=burst, max_in_flight=most
        )
        assert answer == changed

    def slots(self, name: str) -> list[HoldModel]:
        return list(self.model.rates[name].holds.values())

    @precondition(Machine.begun)
    @rule(
        pick=index,
        stale=seldom,
        name=st.sampled_from(["api", "api", "web"]),
        scope=SCOPES,
        acts=st.lists(ACTS, min_size=1, max_size=7),
    )
    def use_a_scope(
        self,
        pick: int,
        stale: bool,
        name: str,
        scope: tuple[float | None, float, int | None],
        acts: list[tuple[str, int, float]],
    ) -> None:
        """``acts``, one after the other; with what is drawn for all: a place, and a number of seconds or units."""
        run, item = self.fence(pick, stale)
        fence = run.run_id, item.attempt
        if name not in self.model.rates:
            self.set_rate(name, scope)
        for act, place, number in acts:
            if act == "advance":
                self.advance(number)
            elif act == "new":
                self.ask(place, fence, False, name, min(1.0 + number, 3.0), 0.0)
            elif act in ("again", "ahead"):
                self.ask(place, fence, True, name, 1.0, 2.0 if act == "ahead" else 0.0)
            elif act == "give up":
                self.report_slot(place, "unused", 0.0, waiting=True)
            else:
                self.report_slot(place, act, 5.0 * number, waiting=False)

    @precondition(Machine.begun)
    @rule(pick=index)
    def use_no_scope(self, pick: int) -> None:
        run, item = self.fence(pick, False)
        slot = rates.Slot("nobody", self.token(), 1.0, run.run_id, item.attempt)
        (answer,) = self.do(rates.acquire, self.kernel.session, [slot], ahead_s=0.0, probe_s=PROBE_S)
        assert answer.answer == "unknown"

    def ask(self, pick: int, fence: Fence, again: bool, name: str, cost: float, ahead: float) -> None:
        scope = self.model.rates[name]
        waiting = [hold for hold in self.slots(name) if hold.started is None] or self.slots(name)
        token = self.token()
        if again and waiting:
            hold = waiting[pick % len(waiting)]
            token, fence, cost = hold.token, hold.fence, hold.cost
        asked = [rates.Slot(name, token, cost, *fence)]
        for _ in range(2):
            started = scope.holds[token].started if token in scope.holds else None
            expected = scope.ask(self.model.now, token, fence, cost, ahead, PROBE_S, self.model.lives)
            in_flight = scope.in_flight(self.model.lives)
            (answer,) = self.do(rates.acquire, self.kernel.session, asked, ahead_s=ahead, probe_s=PROBE_S)
            assert (answer.answer, answer.wait_s) == expected
            assert at(answer.started_at) == scope.holds[token].started
            if started != scope.holds[token].started and scope.most is not None:
                assert in_flight <= scope.most

    def report_slot(self, pick: int, result: str, after: float, *, waiting: bool) -> None:
        """What waits is only ever given up."""
        found = [
            (name, hold)
            for name in self.model.rates
            for hold in self.slots(name)
            if waiting or hold.started is not None
        ]
        if not found:
            return
        name, hold = found[pick % len(found)]
        if hold.started is None:
            result = "unused"
        scope = self.model.rates[name]
        report = [rates.Result(name, hold.token, result, after)]
        for _ in range(2):
            expected = scope.tell(self.model.now, hold.token, result, after)
            (answer,) = self.do(rates.release, self.kernel.session, report)
            assert (answer.answer, answer.waiting) == ("done", expected)

    @precondition(lambda self: self.model.rates)
    @rule()
    def sweep_rates(self) -> None:
        gone = 0
        for scope in self.model.rates.values():
            dead = [token for token, hold in scope.holds.items() if not self.model.lives(hold.fence)]
            gone += len(dead)
            for token in dead:
                del scope.holds[token]
        assert self.do(rates.sweep, self.kernel.session, limit=100) == gone

    @invariant()
    def the_rates_are_as_predicted(self) -> None:
        if not self.model.rates:
            return
        rows = self.do(
            self.kernel.fetch,
            """SELECT s.name, s.spent_to, s.started_to, extract(epoch FROM s.lag)::float8 AS lag, s.used, s.paused_at,
                      s.blocked_until, s.probe_token,
                      (SELECT jsonb_object_agg(h.token, extract(epoch FROM h.slot - '2030-01-01T00:00:00Z')::float8)
                         FROM @schema@.rate_holds h WHERE h.scope = s.name) AS holds
                 FROM @schema@.rate_scopes s""",
        )
        assert {
            row["name"]: (
                at(row["spent_to"]), at(row["started_to"]), row["lag"], row["used"], at(row["paused_at"]),
                at(row["blocked_until"]), row["probe_token"], json.loads(row["holds"] or "{}"),
            )
            for row in rows
        } == {
            name: (
                scope.spent, scope.started, scope.lag, scope.used, scope.paused, scope.blocked, scope.probe,
                {str(token): hold.slot for token, hold in scope.holds.items()},
            )
            for name, scope in self.model.rates.items()
        }  # fmt: skip

    @invariant()
    def no_scope_grants_more_than_its_budget(self) -> None:
        for scope in self.model.rates.values():
            scope.check_budget()
