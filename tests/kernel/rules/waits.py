"""Rules of waits: parks, waits in memory, children, events, and the wakes that they leave behind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sql import events
from sql.errors import KernelRefused
from sql.waits import Wait, WaitState
from tests.kernel.model.lanes import NEVER, LaneModel
from tests.kernel.model.runs import EventModel, RunModel, WaitModel
from tests.kernel.rules.machine import Machine, index, seldom
from tests.support.kernel import child_of

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


class WaitRules(Machine):
    """Of a running attempt, of a parked one, and of those who have something for them."""

    @precondition(Machine.begun)
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

    @precondition(Machine.begun)
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

    @precondition(Machine.many_open)
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

    @precondition(Machine.many_open)
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
