"""Rules of schedules: declared, changed, paused; fired by hosts that may have looked long ago; lost runs repaired."""

from __future__ import annotations

import json
from datetime import datetime

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from actors.schedules import firing
from sql import schedules
from tests.kernel.model.lanes import LaneModel
from tests.kernel.model.runs import RunModel
from tests.kernel.model.schedules import FireModel, ScheduleModel
from tests.kernel.rules.lanes import Turn
from tests.kernel.rules.machine import Machine, at, index, moment, seldom

names = st.sampled_from(["s", "s", "t"])
_OF_A_RUN = (
    "runs", "facts", "attempts", "waits", "events", "wakes", "lanes", "cancellations", "journal", "ledger_runs",
    "ledger_logs", "receipts",
)  # fmt: skip


class ScheduleRules(Machine):
    """Two schedules. ``seen`` is what hosts have read as due and may still fire."""

    turns: list[Turn]

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[schedules.DueSchedule] = []

    @rule(
        name=names,
        play=st.sampled_from(["alpha", "alpha", "beta"]),
        value=st.sampled_from([1, 1, 2]),
        every_s=st.sampled_from([10, 10, 40]),
        missed=st.sampled_from(["skip", "last", "all"]),
        org=st.sampled_from([None, "o"]),
        back=seldom,
    )
    def put_schedule(
        self, name: str, play: str, value: int, every_s: int, missed: str, org: str | None, back: bool
    ) -> None:
        """``back``: as a host does whose clock has been set back to before the latest fire."""
        now, known = self.model.now, self.model.schedules.get(name)
        fired = [at for of, at in self.model.fires if of == name]
        following = max(fired) if back and fired else (now // 10 + 1) * 10
        item = schedules.Definition(
            name=name, play=play, input=str(value), cron=None, every_s=every_s, timezone="UTC", missed=missed,
            org_id=org,
        )  # fmt: skip
        new = ScheduleModel(play, value, every_s, missed, org, following)
        expected = "created"
        if known is not None:
            expected = "unchanged" if known.definition == new.definition else "changed"
            if expected == "changed":
                new.revision, new.paused = known.revision + 1, known.paused
                if every_s == known.every_s:
                    new.next = known.next
            else:
                new = known
        self.model.schedules[name] = new

        def after(_: datetime) -> datetime:
            return moment(following)

        assert self.do(schedules.put, self.kernel.session, item, after) == expected

    @rule(name=names, paused=st.booleans())
    def pause_schedule(self, name: str, paused: bool) -> None:
        known = self.model.schedules.get(name)
        if known is not None and known.paused != paused:
            known.paused, known.revision = paused, known.revision + 1
        expected = "missing" if known is None else "done"
        assert self.twice(schedules.pause, self.kernel.session, name, paused=paused) == expected

    @precondition(lambda self: len(self.model.schedules) > 1)
    @rule(name=names)
    def delete_schedule(self, name: str) -> None:
        known = self.model.schedules.pop(name, None)
        expected = "missing" if known is None else "done"
        assert self.do(schedules.delete, self.kernel.session, name) == expected

    @precondition(lambda self: self.model.schedules)
    @rule(
        seconds=st.sampled_from([0.0, 10.0, 100.0]),
        fires=st.lists(st.tuples(index, st.booleans()), max_size=3),
    )
    def look_and_fire(self, seconds: float, fires: list[tuple[int, bool]]) -> None:
        """``fires``: of all that was ever seen, and whether it stays to be fired again."""
        self.advance(seconds)
        self.look_for_due()
        for pick, keep in fires:
            if self.seen:
                self.fire(pick, keep)

    def look_for_due(self) -> None:
        now = self.model.now
        found, next_due_s = self.do(schedules.due, self.kernel.session, limit=10)
        going = {name: known for name, known in self.model.schedules.items() if not known.paused}
        assert {(one.name, at(one.next_fire_at), one.revision) for one in found} == {
            (name, known.next, known.revision) for name, known in going.items() if known.next <= now
        }
        later = [known.next - now for known in going.values() if known.next > now]
        assert next_due_s == min(later, default=None)
        self.seen += sorted(found, key=lambda one: one.name)

    def fire(self, pick: int, keep: bool) -> None:
        due = self.seen[pick % len(self.seen)]
        known = self.model.schedules.get(due.name)
        stands = known is not None and (known.next, known.revision) == (at(due.next_fire_at), due.revision)
        item = firing(due)  # at its own time, which may be long ago
        if stands:
            assert known is not None
            fires, known.next = known.fires(at(due.now) or 0.0)
            assert ([at(one) for one in item.fire_ats], at(item.next_fire_at)) == (fires, known.next)
            fresh = [one for one in fires if (due.name, one) not in self.model.fires]
        (answer,) = self.do(schedules.fire, self.kernel.session, [item])
        assert answer.answer == ("done" if stands else "lost")
        lags = [self.model.now - one for one in fresh] if stands else []
        assert sorted(answer.lags_s) == sorted(lags)
        if stands:
            assert known is not None
            for one in fresh:
                run_id = self.run_of(due.name, one)
                self.model.fires[due.name, one] = FireModel(run_id)
                self.made(run_id, known, due.name, one)
        if not keep:
            self.seen.remove(due)

    def run_of(self, name: str, fire_at: float) -> str:
        statement = "SELECT run_id FROM @schema@.fires WHERE schedule = $1 AND fire_at = $2"
        found: str = self.do(self.kernel.fetchval, statement, name, moment(fire_at))
        return found

    def made(self, run_id: str, known: ScheduleModel, name: str, fire_at: float) -> None:
        """A fire has made this run."""
        now = self.model.now
        self.model.runs[run_id] = RunModel(
            run_id, known.play, 0, known.org, None, known.input, 0, now, LaneModel(now, ["run.created"]),
            kin=self.model.runs, labels={"schedule": name, "fire_at": f"{moment(fire_at):%Y-%m-%dT%H:%M:%SZ}"},
        )  # fmt: skip

    def may_be_lost(self) -> list[FireModel]:
        """Fires whose run nobody else has to do with."""
        turns = {turn.prefix.run_id for turn in self.turns}
        parents = {run.parent for run in self.model.runs.values()}
        return [
            fire
            for fire in self.model.fires.values()
            if fire.run_id in self.model.runs
            and fire.run_id not in turns | parents
            and not self.model.runs[fire.run_id].detached.sandboxes
        ]

    @precondition(lambda self: self.may_be_lost())
    @rule(pick=index, repair=st.booleans())
    def lose_a_run(self, pick: int, repair: bool) -> None:
        """As a server does that fails over to a standby which was behind."""
        found = self.may_be_lost()
        fire = found[pick % len(found)]
        for table in _OF_A_RUN:
            self.do(self.kernel.execute, f"DELETE FROM @schema@.{table} WHERE run_id = $1", fire.run_id)
        del self.model.runs[fire.run_id]
        if repair:
            (key,) = (key for key, one in self.model.fires.items() if one is fire)
            self.repair(*key)

    @precondition(lambda self: self.model.fires)
    @rule(pick=index, name=names)
    def repair_a_fire(self, pick: int, name: str) -> None:
        _, fire_at = list(self.model.fires)[pick % len(self.model.fires)]
        self.repair(name, fire_at)

    def repair(self, name: str, fire_at: float) -> None:
        fire, known = self.model.fires.get((name, fire_at)), self.model.schedules.get(name)
        answer, run_id = self.do(schedules.repair, self.kernel.session, name, moment(fire_at))
        if known is None:
            assert (answer, run_id) == ("no_schedule", None)
        elif fire is None:
            assert (answer, run_id) == ("no_fire", None)
        elif fire.run_id in self.model.runs:
            assert (answer, run_id) == ("existing", fire.run_id)
        else:
            assert answer == "repaired"
            assert run_id not in {None, fire.run_id, *fire.lost}
            fire.lost.append(fire.run_id)
            fire.run_id = run_id or ""
            self.made(fire.run_id, known, name, fire_at)
            again = self.do(schedules.repair, self.kernel.session, name, moment(fire_at))
            assert again == ("existing", run_id)

    @invariant()
    def the_schedules_are_as_predicted(self) -> None:
        if not self.model.schedules and not self.model.fires:
            return
        rows = self.do(
            self.kernel.fetch, "SELECT name, next_fire_at, revision, paused_at FROM @schema@.schedules"
        )
        assert {
            row["name"]: (at(row["next_fire_at"]), row["revision"], row["paused_at"] is not None)
            for row in rows
        } == {name: (one.next, one.revision, one.paused) for name, one in self.model.schedules.items()}
        fires = self.do(self.kernel.fetch, "SELECT schedule, fire_at, run_id FROM @schema@.fires")
        assert {(row["schedule"], at(row["fire_at"])): row["run_id"] for row in fires} == {
            key: fire.run_id for key, fire in self.model.fires.items()
        }
        labels = self.do(
            self.kernel.fetch, "SELECT run_id, labels FROM @schema@.runs WHERE labels IS NOT NULL"
        )
        assert {row["run_id"]: json.loads(row["labels"]) for row in labels} == {
            run.run_id: run.labels for run in self.model.runs.values() if run.labels is not None
        }
