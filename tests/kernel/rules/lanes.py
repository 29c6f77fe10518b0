"""Rules of lanes: claims, acknowledgements, hand-backs, operators' decisions; and every lane's row after each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sql import journal, lanes
from sql.types import Lane
from tests.kernel.model.lanes import LaneModel
from tests.kernel.model.runs import ELSEWHERE, RunModel
from tests.kernel.rules.machine import Machine, at, index

LANE_LEASE_S = 30.0

_LANES = """
SELECT run_id, lane_skips, last_seq, acked_seq, frozen_seq, lane_attempts, lane_token, lane_expires_at, lane_due_at,
       lane_error
  FROM @schema@.lanes
"""

lane_kinds = st.sampled_from(list(Lane))
receivers = st.sampled_from([[""], [""], [""], [ELSEWHERE], ["", ELSEWHERE]])


@attrs.define
class Turn:
    """A delivery turn as its owner knows it."""

    prefix: lanes.Prefix

    @property
    def key(self) -> tuple[str, Lane]:
        return self.prefix.run_id, self.prefix.lane


class LaneRules(Machine):
    """Of both lanes. Whoever has a turn keeps it as long as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []

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

    @precondition(Machine.some_pending)
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

    @precondition(Machine.some_pending)
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

    @precondition(Machine.many_open)
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

    @invariant()
    def the_lanes_are_as_predicted(self) -> None:
        logs = {row["run_id"]: lane_row(row) for row in self.do(self.kernel.fetch, _LANES)}
        assert logs == {
            run.run_id: lane_tuple(run.logs) for run in self.model.runs.values() if run.logs is not None
        }


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
