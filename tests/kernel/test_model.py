"""The model test: every transition in any order by several hosts, each answer predicted by a plain model, each answer
asked for again as if it had been lost, and after every step all invariants and every row compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RULE_MARKER, rule, run_state_machine_as_test

from tests.kernel.model.runs import CRASH_CAP
from tests.kernel.rules.circuits import CircuitRules
from tests.kernel.rules.control import ControlRules
from tests.kernel.rules.detached import DetachedRules
from tests.kernel.rules.lanes import LaneRules
from tests.kernel.rules.limits import LimitRules
from tests.kernel.rules.machine import Machine
from tests.kernel.rules.rates import RateRules
from tests.kernel.rules.runs import RunRules
from tests.kernel.rules.schedules import ScheduleRules
from tests.kernel.rules.status import StatusRules
from tests.kernel.rules.steps import StepRules
from tests.kernel.rules.unique import UniqueRules
from tests.kernel.rules.waits import WaitRules
from tests.support.portal import open_portal


class Everything(
    RunRules,
    WaitRules,
    StepRules,
    ControlRules,
    LaneRules,
    LimitRules,
    UniqueRules,
    RateRules,
    CircuitRules,
    ScheduleRules,
    DetachedRules,
    StatusRules,
):
    """All rules."""


def rules_of(*parts: type[Machine]) -> list[str]:
    return [name for part in parts for name, value in vars(part).items() if hasattr(value, RULE_MARKER)]


EVERY = rules_of(*Everything.__mro__[1:-1])
# What brings runs to life and to an end, beside the rules of one concern.
BASICS = ["submit_another", "claim", "settle", "advance_clock"]
# Concerns whose rules come too seldom to meet one another among all. A rule counts as often as it is named.
CONCERNS = {
    "limits": [*rules_of(LimitRules), *3 * ["live_under_limits"]],
    "unique": [*BASICS, *rules_of(UniqueRules), "submit_unique", "sweep"],
    "rates": [*BASICS, *rules_of(RateRules), *5 * ["use_a_scope"]],
    "circuits": [*BASICS, *rules_of(CircuitRules), *5 * ["call"]],
    "schedules": [*rules_of(ScheduleRules), *3 * ["look_and_fire"], "settle"],
    "detached": [
        "claim",
        "settle",
        "request_cancel",
        *rules_of(DetachedRules),
        *3 * ["start_in_a_sandbox", "look_and_judge"],
        *2 * ["push_result", "clean_up"],
    ],
}


class OneConcern(Everything):
    """Some rules in a row in each step. Hypothesis turns rules off at random, which leaves too little of a few."""

    among: Sequence[str] = ()

    @rule(data=st.data(), count=st.integers(1, 12))
    def some_in_a_row(self, data: st.DataObject, count: int) -> None:
        rules = {name: getattr(getattr(Everything, name), RULE_MARKER) for name in self.among}
        for _ in range(count):
            now = [name for name in self.among if all(holds(self) for holds in rules[name].preconditions)]
            name = data.draw(st.sampled_from(now))
            drawn = data.draw(st.fixed_dictionaries(dict(rules[name].arguments)), label=name)
            rules[name].function(self, **drawn)


def play_out(
    dsn: str,
    schema: str,
    machine: type[Machine],
    rules: Collection[str],
    fields: Mapping[str, Any],
    **profile: Any,
) -> None:
    """Play with these rules of a machine, which gets some more attributes."""
    assert set(rules) <= {*EVERY, "some_in_a_row"}
    with open_portal(dsn, schema, CRASH_CAP) as portal:
        out = {name: None for name in EVERY if name not in rules}
        run_state_machine_as_test(
            type("Machine", (machine,), {"portal": portal, **fields, **out}),
            settings=settings(
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
                **profile,
            ),
        )


def play_everything(dsn: str, schema: str, rules: Collection[str] = EVERY, **profile: Any) -> None:
    play_out(dsn, schema, Everything, rules, {}, **profile)


def play_concern(dsn: str, schema: str, concern: str, **profile: Any) -> None:
    play_out(dsn, schema, OneConcern, ["some_in_a_row"], {"among": CONCERNS[concern]}, **profile)


# Where a failure is made small before it is shown.
slow_to_fail = pytest.mark.timeout(900)


@pytest.mark.modes
@slow_to_fail
def test_every_answer_and_row_is_as_the_model_predicts(dsn: str, schema: str) -> None:
    play_everything(dsn, schema, max_examples=35, stateful_step_count=50, derandomize=True)


@pytest.mark.modes
@slow_to_fail
def test_runs_alone_are_as_the_model_predicts(dsn: str, schema: str) -> None:
    rules = rules_of(RunRules, WaitRules, StepRules, ControlRules, LaneRules)
    play_everything(dsn, schema, rules, max_examples=35, stateful_step_count=50, derandomize=True)


@pytest.mark.modes
@slow_to_fail
def test_lanes_alone_are_as_the_model_predicts(dsn: str, schema: str) -> None:
    rules = [*BASICS, "say", *rules_of(LaneRules)]
    play_everything(dsn, schema, rules, max_examples=30, stateful_step_count=60, derandomize=True)


@slow_to_fail
@pytest.mark.parametrize("concern", CONCERNS)
def test_a_concern_is_as_the_model_predicts(dsn: str, schema: str, concern: str) -> None:
    play_concern(dsn, schema, concern, max_examples=24, stateful_step_count=7, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_answer_and_row_is_as_the_model_predicts_for_long(dsn: str, schema: str) -> None:
    play_everything(dsn, schema, max_examples=2000, stateful_step_count=60)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("concern", CONCERNS)
def test_a_concern_is_as_the_model_predicts_for_long(dsn: str, schema: str, concern: str) -> None:
    play_concern(dsn, schema, concern, max_examples=1000, stateful_step_count=15)
