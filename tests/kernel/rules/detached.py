"""Rules of detached attempts: handed to runners, heard of, ended by their word or a verdict; sandboxes reserved and
deleted; the bill."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from sql import billing, limits, runners, sandboxes, settle
from sql.claim import Claimed
from sql.waits import Wait, waits_text
from tests.kernel.model.detached import ResultModel, SandboxModel
from tests.kernel.model.lanes import NEVER
from tests.kernel.model.runs import CRASH_CAP, RunModel
from tests.kernel.rules.machine import Machine, at, index, seldom
from tests.kernel.rules.waits import of_run, stood_at

PROVIDERS = ("p", "q")
RESERVED_S = 60.0  # until then a reserved sandbox has to have its runner
CLEANUP_S = 30.0
LOOK_S = 10.0
GRACE_S, AGAIN_S = 50.0, 20.0

ends = st.sampled_from(["accept", "confirm", "confirm", "postpone", "fail", "block"])
domains = st.sampled_from([None, None, "here", "there"])
providers = st.sampled_from([list(PROVIDERS), list(PROVIDERS), ["p"], ["q"]])

_RUNNERS = """
SELECT run_id, attempt, token, sandbox, due_at, ceiling_at, heartbeat_at FROM @schema@.runners
"""
_RESULTS = """
SELECT run_id, attempt, outcome, received_at, settled_at IS NOT NULL AS settled FROM @schema@.runner_results
"""
_SANDBOXES = """
SELECT s.*, b.due_at AS bill_due_at, b.finalised_at,
       (SELECT array_agg(e.type) FROM @schema@.sandbox_events e WHERE e.sandbox = s.sandbox) AS told
  FROM @schema@.sandboxes s LEFT JOIN @schema@.billing_jobs b ON b.run_id = s.run_id
"""


class DetachedRules(Machine):
    """Two providers. ``silent``: what sweeps have found, judged as late as it may be. ``obligations``: the same of
    cleaners. ``confirmed``: sandboxes that were read back as gone, which is final."""

    def __init__(self) -> None:
        super().__init__()
        self.silent: list[runners.Silent] = []
        self.obligations: list[sandboxes.Obligation] = []
        self.reserved: set[str] = set()
        self.confirmed: dict[str, float] = {}

    # --- sandboxes -----------------------------------------------------------------------------------

    @rule(
        pick=index,
        stale=seldom,
        provider=st.sampled_from(PROVIDERS),
        then=st.sampled_from(["", "keep", "detach", "keep and detach", "keep and detach"]),
        timeout=st.sampled_from([20.0, 50.0]),
        ceiling=st.sampled_from([NEVER, 100.0, 15.0]),
    )
    def start_in_a_sandbox(
        self, pick: int, stale: bool, provider: str, then: str, timeout: float, ceiling: float
    ) -> None:
        """As far as a host gets with an attempt that it has, or with a new one."""
        if not stale and not self.of_hosts():
            self.submit(claimed=True, org="o" if pick % 2 else None)  # which a limit may hold back
        live = self.of_hosts()
        if not stale and live:
            run = live[pick % len(live)]
            item = Claimed(run.run_id, run.attempt, run.token or 0, run.play, "null")
        elif self.begun():
            run, item = self.fence(pick, stale=True)
        else:
            return
        name = name_of(run, item.attempt)
        self.reserve(run, item, name, provider)
        if name in run.detached.sandboxes and "keep" in then:
            self.keep_custody(name, run.detached.sandboxes[name], "here")
        if name in run.detached.sandboxes and "detach" in then:
            self.detach(run, item.attempt, item.token, timeout, ceiling)

    def of_hosts(self) -> list[RunModel]:
        """Runs with a live attempt that is not detached."""
        return [run for run in self.model.runs.values() if run.status == "running" and run.owner != 0]

    def reserve(self, run: RunModel, item: Claimed, name: str, provider: str) -> None:
        reservation = sandboxes.Reservation(run.run_id, item.attempt, item.token, name, provider)
        expected = run.detached.reserve(
            run, self.model.now, item.attempt, item.token, name, provider, RESERVED_S, self.model.limits,
            self.model.sandboxes,
        )  # fmt: skip
        answer = self.twice(sandboxes.reserve, self.kernel.session, [reservation], due_s=RESERVED_S)
        assert answer == [expected]
        if expected == "reserved":
            self.reserved.add(name)

    @rule(
        limit=st.sampled_from([("sandbox", ""), ("sandbox", "p"), ("sandbox_org", "o")]),
        most=st.sampled_from([None, 0, 1, 2]),
    )
    def limit_sandboxes(self, limit: tuple[str, str], most: int | None) -> None:
        kind, name = limit
        known = self.model.limits.sandbox if kind == "sandbox" else self.model.limits.sandbox_org
        changed = known.pop(name, None) != most
        assert self.do(limits.set_limit, self.kernel.session, kind, name, most) == changed
        if most is not None:
            known[name] = most

    def boxes(
        self, fits: Callable[[SandboxModel], bool] = lambda _: True
    ) -> list[tuple[str, SandboxModel, RunModel]]:
        return [
            (name, box, run)
            for run in self.model.runs.values()
            for name, box in run.detached.sandboxes.items()
            if fits(box)
        ]

    @precondition(lambda self: self.boxes())
    @rule(pick=index, domain=st.sampled_from([None, "here", "here", "there"]))
    def hear_of_a_sandbox(self, pick: int, domain: str | None) -> None:
        name, box, _ = self.boxes()[pick % len(self.boxes())]
        self.keep_custody(name, box, domain)

    def keep_custody(self, name: str, box: SandboxModel, domain: str | None) -> None:
        said = sandboxes.Custody(name, f"p-{self.token()}", domain)
        box.keep(self.model.now, said.provider_id, domain)
        self.twice(sandboxes.record_custody, self.kernel.session, [said])

    @precondition(lambda self: self.boxes())
    @rule(pick=index)
    def give_up_sandbox(self, pick: int) -> None:
        name, box, run = self.boxes()[pick % len(self.boxes())]
        runner = run.detached.runner
        if runner is None or runner.sandbox != name:
            box.want(self.model.now)
        self.twice(sandboxes.give_up, self.kernel.session, [name])

    @precondition(lambda self: self.boxes())
    @rule(
        asked=providers,
        limit=st.integers(1, 3),
        picks=st.lists(st.tuples(index, ends, domains), max_size=4),
        seconds=st.sampled_from([0.0, 0.0, 31.0]),
    )
    def clean_up(
        self, asked: list[str], limit: int, picks: list[tuple[int, str, str | None]], seconds: float
    ) -> None:
        """``picks``: what becomes of anything that was ever claimed, mostly of the latest."""
        self.advance(seconds)
        self.claim_cleanup(asked, limit)
        for pick, end, domain in picks:
            if self.obligations:
                self.end_cleanup(-1 if pick % 3 else pick % len(self.obligations), end, domain)

    def claim_cleanup(self, asked: list[str], limit: int) -> None:
        now, token = self.model.now, self.token()
        due = {
            provider: {
                name: box
                for name, box, _ in self.boxes(lambda box: box.claimable(now))
                if box.provider == provider
            }
            for provider in asked
        }
        found, _ = self.do(
            sandboxes.claim_cleanup, self.kernel.session, asked, token=token, limit=limit, lease_s=CLEANUP_S
        )
        for provider, boxes in due.items():
            taken = {one.sandbox for one in found if one.provider == provider}
            assert len(taken) == min(limit, len(boxes))
            assert taken <= boxes.keys()
            left = [box.due for name, box in boxes.items() if name not in taken]
            assert all(boxes[name].due <= other for name in taken for other in left)
        known, order = {name: box for name, box, _ in self.boxes()}, self.order()
        for one in found:
            box = known[one.sandbox]
            box.claim(now, token, CLEANUP_S)
            assert (one.provider_id, one.routing_domain, one.attempt, one.tries, one.failures, at(one.accepted_at)) == (
                box.provider_id, box.domain, box.attempt, box.tries, box.failures, box.accepted,
            )  # fmt: skip
            assert one.certain == (box.custody is not None or box.certain <= now)
        self.obligations += sorted(found, key=lambda one: (order[one.run_id], one.attempt))

    def end_cleanup(self, pick: int, end: str, domain: str | None) -> None:
        item = self.obligations[pick]
        box = self.model.runs[item.run_id].detached.sandboxes[item.sandbox]
        now, session = self.model.now, self.kernel.session
        if end == "accept":
            for _ in range(2):
                expected = box.accept(now, item.token)
                answer = self.do(sandboxes.accept, session, item, outcome="deleted", routing_domain=domain)
                assert answer == expected
        elif end == "confirm":
            for _ in range(2):
                expected = box.confirm(now, item.token, domain)
                answer = self.do(sandboxes.confirm, session, item, outcome="deleted", routing_domain=domain)
                assert answer == expected
                if answer == "completed":
                    self.confirmed[item.sandbox] = now
                    bill = self.model.runs[item.run_id].detached.bill
                    assert bill is not None
                    bill.due = now
        else:
            error, block = "no" if end == "fail" else None, "give up" if end == "block" else None
            box.postpone(now, item.token, 7.0, error, block)
            self.do(sandboxes.postpone, session, item, delay_s=7.0, error=error, block=block)

    @precondition(lambda self: self.boxes(lambda box: box.block is not None))
    @rule(pick=index)
    def retry_cleanup(self, pick: int) -> None:
        blocked = self.boxes(lambda box: box.block is not None)
        name, box, _ = blocked[pick % len(blocked)]
        assert self.do(sandboxes.retry, self.kernel.session, name) == box.retry(self.model.now)

    # --- runners -------------------------------------------------------------------------------------

    def detachable(self) -> list[tuple[RunModel, int, int]]:
        """Attempts that ever had a sandbox, with their token."""
        return [
            (run, attempt, token)
            for run in self.model.runs.values()
            for attempt, token in run.fences
            if name_of(run, attempt) in run.detached.sandboxes
        ]

    @precondition(lambda self: self.detachable())
    @rule(pick=index, timeout=st.sampled_from([20.0, 50.0]), ceiling=st.sampled_from([NEVER, 100.0, 15.0]))
    def detach_another(self, pick: int, timeout: float, ceiling: float) -> None:
        live = [found for found in self.detachable() if found[0].holds(*found[1:]) and found[0].owner != 0]
        among = live if live and pick % 4 else self.detachable()
        run, attempt, token = among[pick % len(among)]
        self.detach(run, attempt, token, timeout, ceiling)

    def detach(self, run: RunModel, attempt: int, token: int, timeout: float, ceiling: float) -> None:
        name = name_of(run, attempt)
        expected = run.detached.detach(run, self.model.now, attempt, token, name, timeout, ceiling)
        item = runners.Detachment(
            run.run_id, attempt, token, name, timeout, None if ceiling == NEVER else ceiling
        )
        assert self.twice(runners.detach, self.kernel.session, [item]) == [expected]

    def a_runner(self, pick: int, stale: bool) -> tuple[RunModel, int, int]:
        """A runner's fence: mostly of one that works, else of one that did or of a host's attempt."""
        live = [run for run in self.model.runs.values() if run.detached.runner is not None]
        over = [(run, attempt) for run in self.model.runs.values() for attempt in run.detached.were]
        if live and not stale:
            run = live[pick % len(live)]
            return run, run.attempt, run.token or 0
        if over and pick % 4:
            run, attempt = over[pick % len(over)]
            return run, attempt, dict(run.fences)[attempt]
        run, item = self.fence(pick, stale)
        return run, item.attempt, item.token

    @precondition(Machine.begun)
    @rule(pick=index, stale=seldom, wrong=seldom)
    def beat(self, pick: int, stale: bool, wrong: bool) -> None:
        run, attempt, token = self.a_runner(pick, stale)
        token += wrong and pick % 2
        for _ in range(2):
            self.hear(run, attempt, token)

    @precondition(Machine.begun)
    @rule(
        pick=index,
        stale=seldom,
        wrong=seldom,
        outcome=st.sampled_from(
            ["completed", "failed", "retried", "released", "deferred", "outage", "parked"]
        ),
        delay=st.sampled_from([0.0, 3.0]),
        most=st.sampled_from([900.0, 25.0]),
        waits=stood_at,
        locked=seldom,
    )
    def push_result(
        self,
        pick: int,
        stale: bool,
        wrong: bool,
        outcome: str,
        delay: float,
        most: float,
        waits: list[Wait],
        locked: bool,
    ) -> None:
        """``locked``: somebody holds the run's row at that moment; the result is kept all the same."""
        run, attempt, token = self.a_runner(pick, stale)
        token += wrong and pick % 2
        for held in (locked, False):
            self.push(run, attempt, token, outcome, delay, most, waits, locked=held)
            if held and pick % 3:  # nobody asks again: the sweep has to find it
                return

    def push(
        self,
        run: RunModel,
        attempt: int,
        token: int,
        outcome: str,
        delay: float,
        most: float,
        waits: list[Wait],
        *,
        locked: bool,
    ) -> None:
        outage, stood = outcome == "outage", of_run(run, waits) if outcome == "parked" else []
        outcome = "deferred" if outage else outcome
        payload = {"error": {"kind": "out", "message": "no"}}
        result = ResultModel(outcome, payload, self.model.now, delay, stood, most if outage else None)
        item = settle.Settlement(
            run.run_id, attempt, token, outcome, json.dumps(payload), delay, waits_text(stood), result.most_s,
            json.dumps({"error": {"message": "out for too long"}}),
        )  # fmt: skip
        if locked:
            self.do(self.portal.hold, "SELECT 1 FROM @schema@.runs WHERE run_id = $1 FOR UPDATE", run.run_id)
        expected = run.detached.push(run, self.model.now, attempt, token, result, locked=locked)
        (answer,) = self.do(runners.push, self.kernel.session, [item])
        if locked:
            self.do(self.portal.let_go)
        assert (answer.answer, answer.first) == expected

    def unsettled(self) -> list[tuple[RunModel, int]]:
        return [
            (run, attempt)
            for run in self.model.runs.values()
            for attempt, result in run.detached.results.items()
            if not result.settled
        ]

    @precondition(lambda self: self.unsettled())
    @rule()
    def settle_results(self) -> None:
        waiting = self.unsettled()
        for run, attempt in waiting:
            run.detached.settle(run, self.model.now, attempt)
        assert self.do(runners.settle_results, self.kernel.session, limit=100) == (len(waiting), 0)

    @precondition(lambda self: any(run.detached.runner is not None for run in self.model.runs.values()))
    @rule(
        asked=providers,
        seconds=st.sampled_from([0.0, 21.0, 51.0, 51.0]),
        meanwhile=st.sampled_from(["", "beat", "result", "request"]),
        verdicts=st.lists(st.tuples(index, st.booleans()), min_size=1, max_size=2),
    )
    def look_and_judge(
        self, asked: list[str], seconds: float, meanwhile: str, verdicts: list[tuple[int, bool]]
    ) -> None:
        """``meanwhile``, while the provider is asked: the runner is heard of, says its last word to a host that cannot
        have the run, or somebody asks to cancel. ``verdicts``: on all that was ever found, mostly the latest."""
        self.look(asked, seconds)
        if self.silent:
            run = self.model.runs[self.silent[-1].run_id]
            attempt, token = run.attempt, run.token or 0
            if meanwhile == "beat":
                self.hear(run, attempt, token)
            elif meanwhile == "result":
                self.push(run, attempt, token, "completed", 0.0, 0.0, [], locked=True)
            elif meanwhile == "request" and not run.over:
                statement = "SELECT @schema@.cancel_run($1, jsonb_build_object('request_id', 'now'))"
                assert self.do(self.kernel.fetchval, statement, run.run_id) == "pending"
                if "now" not in {mark for _, mark in run.marks}:
                    run.marks.append((self.model.now, "now"))
        for pick, lost in verdicts:
            if self.silent:
                self.judge(-1 if pick % 3 else pick % len(self.silent), lost)

    def hear(self, run: RunModel, attempt: int, token: int) -> None:
        expected = run.detached.beat(run, self.model.now, attempt, token)
        beats = [runners.Beat(run.run_id, attempt, token)]
        assert self.do(runners.beat, self.kernel.session, beats) == [expected]

    def look(self, asked: list[str], seconds: float) -> None:
        self.advance(seconds)
        now = self.model.now
        found, _ = self.do(runners.sweep, self.kernel.session, asked, limit=10, look_s=LOOK_S)
        expected = {}
        for run in self.model.runs.values():
            runner = run.detached.runner
            if runner is not None and runner.provider in asked and runner.due <= now:
                finding = run.detached.look(run, now, LOOK_S)
                if finding is not None:
                    expected[run.run_id] = (
                        runner.attempt,
                        runner.token,
                        runner.sandbox,
                        runner.heartbeat,
                        finding,
                    )
        assert {
            one.run_id: (one.attempt, one.token, one.sandbox, at(one.heartbeat_at), one.finding)
            for one in found
        } == expected
        order = self.order()
        self.silent += sorted(found, key=lambda one: order[one.run_id])

    def judge(self, pick: int, lost: bool) -> None:
        """Whoever is past the ceiling may be found to be gone as well."""
        silent = self.silent[pick]
        verdict = "lost" if lost or silent.finding == "stale" else "ceiling"
        run = self.model.runs[silent.run_id]
        expected = run.detached.judge(
            run, self.model.now, silent.attempt, silent.token, at(silent.heartbeat_at), verdict
        )
        verdicts = [runners.Verdict(silent, verdict, json.dumps({"error_type": "Lost", "message": "gone"}))]
        assert self.twice(runners.judge, self.kernel.session, verdicts, crash_cap=CRASH_CAP) == [expected]

    # --- bills ---------------------------------------------------------------------------------------

    @precondition(lambda self: self.boxes())
    @rule(seconds=st.sampled_from([0.0, 0.0, 61.0]))
    def finalise_bills(self, seconds: float) -> None:
        self.advance(seconds)
        now, done, postponed = self.model.now, 0, 0
        for run in self.model.runs.values():
            bill = run.detached.bill
            if bill is not None and bill.finalised is None and bill.due <= now:
                records = run.detached.finalise(run, now, GRACE_S, AGAIN_S)
                done, postponed = done + (records is not None), postponed + (records is None)
                self.model.compute += [(run.run_id, *record) for record in records or []]
        answer = self.do(billing.finalise, self.kernel.session, limit=100, grace_s=GRACE_S, again_s=AGAIN_S)
        assert (answer.finalised, answer.postponed) == (done, postponed)

    # --- after every step ----------------------------------------------------------------------------

    @invariant()
    def what_is_detached_is_as_predicted(self) -> None:
        if not self.reserved:
            return
        found = {row["run_id"]: row for row in self.do(self.kernel.fetch, _RUNNERS)}
        assert {
            run_id: (
                row["attempt"], row["token"], row["sandbox"], at(row["due_at"]), at(row["ceiling_at"]),
                at(row["heartbeat_at"]),
            )
            for run_id, row in found.items()
        } == {
            run.run_id: (
                runner.attempt, runner.token, runner.sandbox, runner.due, runner.ceiling, runner.heartbeat,
            )
            for run in self.model.runs.values()
            if (runner := run.detached.runner) is not None
        }  # fmt: skip
        assert {
            (row["run_id"], row["attempt"]): (row["outcome"], at(row["received_at"]), row["settled"])
            for row in self.do(self.kernel.fetch, _RESULTS)
        } == {
            (run.run_id, attempt): (result.outcome, result.received, result.settled)
            for run in self.model.runs.values()
            for attempt, result in run.detached.results.items()
        }

    @invariant()
    def every_sandbox_has_its_obligation(self) -> None:
        if not self.reserved:
            return
        rows = {row["sandbox"]: row for row in self.do(self.kernel.fetch, _SANDBOXES)}
        known = {name: (box, run) for name, box, run in self.boxes()}
        assert rows.keys() == known.keys() == self.reserved
        for name, row in rows.items():
            box, run = known[name]
            bill = run.detached.bill
            assert bill is not None
            assert row_of(row) == (
                box.tries, box.failures, box.due, box.custody, box.ceiling, box.wanted, box.accepted, box.confirmed,
                box.token, box.expires, box.provider_id, box.domain, box.error, box.block, sorted(box.told), bill.due,
                bill.finalised,
            )  # fmt: skip
        for name, confirmed_at in self.confirmed.items():
            assert at(rows[name]["confirmed_at"]) == confirmed_at

    @invariant()
    def nothing_is_billed_twice(self) -> None:
        if not self.reserved:
            return
        records = self.do(billing.read, self.kernel.session)
        assert sorted(
            (one.run_id, one.attempt, one.kind, at(one.started_at), at(one.ended_at)) for one in records
        ) == sorted(self.model.compute)
        of_box = [(one.run_id, one.attempt) for one in records if one.kind != "runner"]
        of_runner = [(one.run_id, one.attempt) for one in records if one.kind == "runner"]
        assert len(of_box) == len(set(of_box))
        assert len(of_runner) == len(set(of_runner))


def name_of(run: RunModel, attempt: int) -> str:
    """Our own name of an attempt's sandbox."""
    return f"{run.run_id}/{attempt}"


def row_of(row: Any) -> tuple[Any, ...]:
    return (
        row["tries"], row["failures"], at(row["due_at"]), at(row["custody_at"]), at(row["ceiling_at"]),
        at(row["wanted_at"]), at(row["accepted_at"]), at(row["confirmed_at"]), row["lease_token"],
        at(row["lease_expires_at"]), row["provider_id"], row["routing_domain"], row["last_error"], row["block_reason"],
        sorted(row["told"] or []), at(row["bill_due_at"]), at(row["finalised_at"]),
    )  # fmt: skip
