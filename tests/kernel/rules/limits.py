"""Rules of limits: they are set and lifted, runs count against them; what a claim may take under them, and in turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from sql import admission, claim, limits
from tests.kernel.model.limits import Place, TurnsModel, group_of, turn_of
from tests.kernel.model.runs import CRASH_CAP, RunModel
from tests.kernel.rules.machine import Machine, seldom
from tests.kernel.rules.waits import plain, states
from tests.support.kernel import LEASE_S, PLAYS


class Claims(Machine):
    """Claims, and what they may take, whichever rules are in the machine."""

    def __init__(self) -> None:
        super().__init__()
        self.stands: dict[tuple[int, tuple[str, ...]], claim.Stand] = {}  # by host and plays
        self.walks: dict[
            tuple[int, tuple[str, ...], str, int], TurnsModel
        ] = {}  # the same, by play and priority

    def take(self, host: int, plays: tuple[str, ...], limit: int, oldest: bool, lease: float) -> None:
        now, token, rules = self.model.now, self.token(), self.model.limits
        candidates = self.model.claimable(plays)
        before = rules.running(self.model.runs.values())
        able = [run for run in candidates if rules.has_room(run, before)]
        kernel = attrs.evolve(self.kernel, owner=host)
        stand = claim.Stand() if oldest else self.stands.get((host, plays), claim.Stand())
        answer = self.do(
            kernel.claim_answer, limit, plays=plays, token=token, oldest=oldest, lease_s=lease, stand=stand
        )
        taken = answer.items
        runs = [self.model.runs[item.run_id] for item in taken]
        assert all(run in able for run in runs)
        for run, item in zip(runs, taken, strict=True):
            assert item.lag_s == now - run.due
            assert item.limited == bool(rules.places(run))
        if oldest and able:
            assert min(run.due for run in runs) == min(run.due for run in able)
        dues = {run.run_id: run.due for run in runs}
        for run, item in zip(runs, taken, strict=True):
            run.start(now, host, token, lease)
            assert (item.attempt, item.failures) == (run.attempt, run.failures)
            assert plain(item.waits) == ({} if item.attempt == 1 else states(now, run.waits.values()))
            assert item.input == str(run.input)
        after = self.check_limits(before)
        left = [run for run in candidates if run not in runs]
        more = answer.next_due_s is not None and answer.next_due_s <= 0
        assert more or len(taken) == limit or not any(rules.has_room(run, after) for run in left)
        assert taken or not able
        for run in runs:
            for other in left:
                if (group_of(run), run.priority) == (group_of(other), other.priority):
                    assert dues[run.run_id] <= other.due
                if not oldest and rules.has_room(other, after):
                    assert run.priority >= other.priority
        if not oldest:
            self.stands[host, plays] = claim.Stand(None, answer.stand.cursors)
            waiting = [
                run for run in left if all(rules.has_room(run, at, but="play") for at in (before, after))
            ]
            self.check_turns(host, plays, waiting, runs)
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

    def check_limits(self, before: Counter[Place]) -> Counter[Place]:
        """After a claim no limit has more than it allows, or than it had before; what runs now."""
        after = self.model.limits.running(self.model.runs.values())
        for run in self.model.runs.values():
            for place, allowed in self.model.limits.places(run).items():
                assert after[place] <= max(allowed, before[place]), place
        return after

    def check_turns(
        self, host: int, plays: tuple[str, ...], waiting: Sequence[RunModel], taken: Sequence[RunModel]
    ) -> None:
        """``waiting``: who could have been claimed instead."""
        buckets = {(run.play, run.priority) for run in self.model.runs.values() if run.play in plays}
        for play, priority in buckets:
            walk = self.walks.setdefault((host, plays, play, priority), TurnsModel())
            here = [
                Counter(turn_of(run) for run in runs if (run.play, run.priority) == (play, priority))
                for runs in (waiting, taken)
            ]
            walk.claimed(*here)


orgs = st.sampled_from([None, "o", "o", "p", "q"])
of_a_run = st.tuples(st.sampled_from([*PLAYS, PLAYS[0]]), orgs, st.sampled_from([None, None, "x", "y"]))
of_a_limit = st.tuples(
    st.sampled_from(
        [("play", "alpha"), ("play", "alpha"), ("play", "beta"), ("key", "alpha"), ("org", "o"), ("org", "p")]
    ),
    st.sampled_from([1, 1, 2, 2, 3, 0, None]),
)
of_a_turn = st.tuples(st.sampled_from([1, 2]), st.integers(1, 3), seldom)


class LimitRules(Claims):
    """Of plays and their keys as a host sets them that starts, of organisations as operators do."""

    @rule(
        limit=st.none() | of_a_limit,
        submits=st.lists(of_a_run, max_size=5),
        ends=st.integers(0, 2),
        turns=st.lists(of_a_turn, min_size=1, max_size=4),
    )
    def live_under_limits(
        self,
        limit: tuple[tuple[str, str], int | None] | None,
        submits: list[tuple[str, str | None, str | None]],
        ends: int,
        turns: list[tuple[int, int, bool]],
    ) -> None:
        """``turns``: of which host, for how many, by who is oldest."""
        if limit is not None:
            self.set_limit(*limit[0], limit[1])
        if sum(not run.over for run in self.model.runs.values()) < 12:
            for play, org, concurrency in submits:
                self.submit(play, org=org, concurrency=concurrency)
        for run in [run for run in self.model.runs.values() if run.status == "running"][:ends]:
            item = claim.Claimed(run.run_id, run.attempt, run.token or 0, run.play, "null")
            outcome = "released" if run.attempt < 2 else "completed"
            assert run.settle(self.model.now, item.attempt, item.token, outcome, 0.0) == "done"
            assert self.do(self.kernel.settle, item, outcome).answer == "done"
        for host, most, oldest in turns:
            self.take(host, PLAYS, most, oldest, LEASE_S)

    @precondition(Machine.few_open)
    @rule(play=st.sampled_from(PLAYS), org=orgs, concurrency=st.sampled_from([None, "x"]))
    def submit_claimed(self, play: str, org: str | None, concurrency: str | None) -> None:
        """Admission may claim what counts against no limit."""
        self.submit(play, org=org, concurrency=concurrency, claimed=True)

    def set_limit(self, kind: str, name: str, most: int | None) -> None:
        known = {"play": self.model.limits.play, "key": self.model.limits.key, "org": self.model.limits.org}[
            kind
        ]
        changed = known.pop(name, None) != most
        if most is not None:
            known[name] = most
        if kind == "org":
            assert self.do(limits.set_limit, self.kernel.session, "org", name, most) == changed
            return
        self.do(
            admission.register_host,
            self.kernel.session,
            host=2,
            name="host-2",
            pid=2,
            version="test",
            plays={
                name: admission.PlayRules(
                    CRASH_CAP, self.model.limits.play.get(name), self.model.limits.key.get(name)
                )
            },
        )

    @precondition(lambda self: self.model.limits.play or self.model.limits.org)
    @rule()
    def read_limits(self) -> None:
        running = self.model.limits.running(self.model.runs.values())
        found = {
            (limit.kind, limit.name): (limit.max_running, limit.running)
            for limit in self.do(limits.read_all, self.kernel.session)
            if limit.kind in ("play", "org")
        }
        assert found == {
            (kind, name): (allowed, running[kind, name])
            for kind, named in (("play", self.model.limits.play), ("org", self.model.limits.org))
            for name, allowed in named.items()
        }
