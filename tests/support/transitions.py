"""Every writing function of the kernel as a named transition of one run, and the situations in which they meet.

Owns the preparation of a run, the calls with fixed tokens (so that two runs that went through the same are equal to
the letter) and what a run left in the tables. The lost-answer matrix and the pair test are built from these.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Any

import attrs

from sql import admission, array_input, claim, control, lanes, receipts, runners, sandboxes, settle
from sql.types import Lane
from sql.waits import Wait
from tests.support.kernel import Kernel, child_of

FENCE, LANE_TOKEN, NEW_FENCE, NEW_LANE_TOKEN, REQUEST = 11, 22, 33, 44, 55
HELD = "held"  # the step that the first attempt has claimed
ANSWER = Wait("answer", "event", "answer", 500.0)
CLEANER, PROVIDER = 66, "p"
_START = "2030-01-01T00:00:00Z"
_LANE_LEASE_S = 300.0  # outlives the lease of the attempt

_LEFT_BEHIND = """
SELECT jsonb_build_object(
    'runs', (SELECT jsonb_agg(to_jsonb(t)) FROM @schema@.runs t WHERE t.run_id = $1),
    'facts', (SELECT jsonb_agg(to_jsonb(t) ORDER BY t.lane, t.seq) FROM @schema@.facts t WHERE t.run_id = $1),
    'attempts', (SELECT jsonb_agg(to_jsonb(t) ORDER BY t.attempt) FROM @schema@.attempts t WHERE t.run_id = $1),
    'waits', (SELECT jsonb_agg(to_jsonb(t) ORDER BY t.key) FROM @schema@.waits t WHERE t.run_id = $1),
    'receipts', (SELECT jsonb_agg(to_jsonb(t) - 'heartbeat_at' ORDER BY t.key)
                   FROM @schema@.receipts t WHERE t.run_id = $1),
    'events', (SELECT jsonb_agg(to_jsonb(t) - 'seq' ORDER BY t.seq) FROM @schema@.events t WHERE t.run_id = $1),
    'wakes', EXISTS (SELECT 1 FROM @schema@.wakes t WHERE t.run_id = $1),
    'children', (SELECT jsonb_agg(to_jsonb(t)) FROM @schema@.runs t WHERE t.parent_id = $1),
    'lanes', (SELECT jsonb_agg(to_jsonb(t)) FROM @schema@.lanes t WHERE t.run_id = $1),
    'runners', (SELECT jsonb_agg(to_jsonb(t)) FROM @schema@.runners t WHERE t.run_id = $1),
    'results', (SELECT jsonb_agg(to_jsonb(t)) FROM @schema@.runner_results t WHERE t.run_id = $1),
    'sandboxes', (SELECT jsonb_agg(to_jsonb(t)) FROM @schema@.sandboxes t WHERE t.run_id = $1),
    'sandbox_events', (SELECT jsonb_agg(to_jsonb(t) ORDER BY t.event_id)
                         FROM @schema@.sandbox_events t WHERE t.sandbox = $1),
    'billing_jobs', (SELECT jsonb_agg(to_jsonb(t)) FROM @schema@.billing_jobs t WHERE t.run_id = $1),
    'cancellations', (SELECT jsonb_agg(to_jsonb(t) ORDER BY t.request_id)
                        FROM @schema@.cancellations t WHERE t.run_id = $1),
    'ledger_runs', (SELECT jsonb_agg(to_jsonb(t)) FROM @schema@.ledger_runs t WHERE t.run_id = $1),
    'ledger_logs', (SELECT jsonb_agg(to_jsonb(t) ORDER BY t.seq) FROM @schema@.ledger_logs t WHERE t.run_id = $1))
"""


@attrs.frozen
class Situation:
    """What a transition asks of the run before it. None: whatever.

    ``run``: absent, queued (for the second time), running, waiting (and due), asked (waiting for an event that has
    come), or over (running, but its lease has ended); of one that asked for a sandbox: reserved, unwanted (nobody needs
    it), cleaning (a cleaner has it), detached (its runner was heard of), silent (for too long) or told (its result is
    kept and not settled). ``lifecycle`` and ``observability``: the lane is free or leased.
    ``marked``: somebody has asked to cancel.
    """

    run: str | None = None
    lifecycle: str | None = None
    observability: str | None = None
    marked: bool | None = None

    def over(self, other: Situation) -> Situation:
        """This one; where it does not care, the other."""
        mine = {name: value for name, value in attrs.asdict(self).items() if value is not None}
        return attrs.evolve(other, **mine)


@attrs.define
class Subject:
    """A prepared run: the fence of its first attempt (live or not) and the lanes' leased prefixes, if any."""

    run_id: str
    fence: claim.Claimed
    prefixes: dict[Lane, lanes.Prefix] = attrs.field(factory=dict)

    def submission(self, kernel: Kernel, *, claimed: bool) -> admission.Submission:
        extras = json.dumps({"array_input_receiver": "keeper"})
        return kernel.submission(run_id=self.run_id, request=REQUEST, claim=claimed, extras=extras)

    def plain(self, value: Any) -> Any:
        """An answer without what differs from run to run."""
        text = json.dumps(value, default=_plain)
        return json.loads(text.replace(self.run_id, "RUN"))


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return attrs.asdict(value, recurse=False)
    return sorted(value) if isinstance(value, frozenset) else str(value)


@attrs.frozen
class Transition:
    """A writing call. ``unsettled`` are the answers after which a caller asks again; ``hint``: the answer tells what
    was seen, not what was decided."""

    name: str
    needs: Situation
    call: Callable[[Kernel, Subject], Awaitable[Any]]
    unsettled: tuple[Any, ...] = ()
    hint: bool = False

    def settled(self, answer: Any) -> bool:
        plain = answer.get("answer") if isinstance(answer, dict) and "answer" in answer else answer
        return plain not in self.unsettled


async def prepare_run(kernel: Kernel, situation: Situation, run_id: str) -> Subject:
    """Bring a new run into a situation. The clock is set back to its start: every run lives at the same time."""
    await kernel.execute("UPDATE @schema@.test_clock SET stands = $1::text::timestamptz", _START)
    subject = Subject(run_id, claim.Claimed(run_id, 1, FENCE, "alpha", "null"))
    if situation.run == "absent":
        return subject
    await kernel.admit([subject.submission(kernel, claimed=False)])
    (taken,) = await kernel.claim(token=FENCE)
    assert taken.run_id == run_id
    await kernel.say(taken, 1)
    await kernel.say(taken, 2, Lane.OBSERVABILITY)
    await kernel.say(taken, 3, Lane.OBSERVABILITY)
    await kernel.claim_step(taken, HELD)
    if situation.run == "queued":
        await kernel.settle(taken, "retried")
    elif situation.run == "waiting":
        await kernel.park(taken, nap=5.0, long=500.0)
    elif situation.run == "asked":
        await kernel.park_on(taken, ANSWER, Wait("long", "sleep", delay_s=900.0))
        await kernel.send(run_id, "answer", 42, event_id="first", request=REQUEST)
    for lane, wanted in (
        (Lane.LIFECYCLE, situation.lifecycle),
        (Lane.OBSERVABILITY, situation.observability),
    ):
        if wanted == "leased":
            (prefix,) = await kernel.claim_lanes(lane, token=LANE_TOKEN, prefix=1, lease_s=_LANE_LEASE_S)
            assert await kernel.apply(prefix)
            subject.prefixes[lane] = prefix
    if situation.run in SANDBOXED:
        await _prepare_sandbox(kernel, situation.run, taken)
    if situation.marked:
        await kernel.fetchval("""SELECT @schema@.cancel_run($1, '{"request_id": "marker"}')""", run_id)
    if situation.run in ("waiting", "over", "silent"):
        await kernel.advance(5.0 if situation.run == "waiting" else 61.0)
    return subject


SANDBOXED = ("reserved", "unwanted", "cleaning", "detached", "silent", "told")


async def _prepare_sandbox(kernel: Kernel, wanted: str, item: claim.Claimed) -> None:
    """The sandbox has the run's name."""
    session, run_id = kernel.session, item.run_id
    reservation = sandboxes.Reservation(run_id, item.attempt, item.token, run_id, PROVIDER)
    assert await sandboxes.reserve(session, [reservation], due_s=900.0) == ["reserved"]
    await sandboxes.record_custody(session, [sandboxes.Custody(run_id, "provider's")])
    if wanted in ("unwanted", "cleaning"):
        await sandboxes.give_up(session, [run_id])
    if wanted == "cleaning":
        await sandboxes.claim_cleanup(session, [PROVIDER], token=CLEANER, limit=1, lease_s=60.0)
    if wanted in ("detached", "silent", "told"):
        detachment = runners.Detachment(run_id, item.attempt, item.token, run_id, 30.0, None)
        assert await runners.detach(session, [detachment]) == ["done"]
        assert await runners.beat(session, [runners.Beat(run_id, item.attempt, item.token)]) == ["ok"]
    if wanted == "told":  # as a push leaves it that finds the run's row locked
        await kernel.execute(
            """INSERT INTO @schema@.runner_results (run_id, attempt, token, received_at, outcome, payload, delay_s,
                                                    waits, overdue)
               VALUES ($1, $2, $3, @schema@.clock(), 'completed', '{"output": 1}', 0, '[]', '{}')""",
            run_id,
            item.attempt,
            item.token,
        )


async def left_behind(kernel: Kernel, subject: Subject) -> Any:
    """Every row of a run, without what differs from run to run, and without requests to cancel what has ended: a host
    forgets those when it next looks."""
    await kernel.execute(
        """DELETE FROM @schema@.cancellations c USING @schema@.runs r
            WHERE r.run_id = c.run_id AND r.finished_at IS NOT NULL"""
    )
    text = await kernel.fetchval(_LEFT_BEHIND, subject.run_id)
    return json.loads(text.replace(subject.run_id, "RUN"))


async def clear_away(kernel: Kernel, subject: Subject) -> None:
    """Delete a run, so that set-wise transitions find only the next one."""
    for table in (
        "runs",
        "facts",
        "attempts",
        "waits",
        "events",
        "wakes",
        "lanes",
        "receipts",
        "cancellations",
        "ledger_runs",
        "ledger_logs",
        "runners",
        "runner_results",
        "sandboxes",
        "billing_jobs",
    ):
        await kernel.execute(
            f"DELETE FROM @schema@.{table} WHERE run_id IN ($1, $2)", subject.run_id, child_of(subject.run_id)
        )


# --- the transitions -------------------------------------------------------------------------------------


def _settling(outcome: str) -> Transition:
    async def call(kernel: Kernel, subject: Subject) -> Any:
        payload = {"error": {"message": "no"}} if outcome in ("failed", "retried") else {}
        return (await kernel.settle(subject.fence, outcome, payload=json.dumps(payload), delay_s=3.0)).answer

    return Transition(outcome, Situation(run="running"), call, ("busy",))


def _admitting(claimed: bool) -> Transition:
    async def call(kernel: Kernel, subject: Subject) -> Any:
        (answer,) = await kernel.admit([subject.submission(kernel, claimed=claimed)])
        # Both say that this request made the run.
        return attrs.evolve(answer, outcome="created") if answer.created else answer

    busy = {"outcome": "busy", "run_id": "RUN", "created": False, "claimed": False}
    return Transition("admit claimed" if claimed else "admit", Situation(run="absent"), call, (busy,))


def _claiming(name: str, run: str) -> Transition:
    async def call(kernel: Kernel, _: Subject) -> Any:
        found = await kernel.claim(token=NEW_FENCE)
        # A claim whose answer was lost is not made again: what it took is read back.
        return found or [
            attrs.evolve(item, lag_s=0.0, was_due_at=None)
            for item in await claim.read_back(kernel.session, owner=kernel.owner, token=NEW_FENCE)
        ]

    async def without_lag(kernel: Kernel, subject: Subject) -> Any:
        return [attrs.evolve(item, lag_s=0.0, was_due_at=None) for item in await call(kernel, subject)]

    return Transition(name, Situation(run=run), without_lag, ([],))


async def _renew(kernel: Kernel, subject: Subject) -> Any:
    return await kernel.renew(subject.fence, 100.0)


async def _defer(kernel: Kernel, subject: Subject) -> Any:
    return (await kernel.defer(subject.fence, delay_s=3.0)).answer


async def _park(kernel: Kernel, subject: Subject) -> Any:
    return (await kernel.park(subject.fence, nap=7.0, tea=9.0)).answer


async def _park_on_event(kernel: Kernel, subject: Subject) -> Any:
    return (await kernel.park_on(subject.fence, ANSWER, Wait("tea", "sleep", delay_s=9.0))).answer


async def _try_waits(kernel: Kernel, subject: Subject) -> Any:
    return await kernel.try_waits(subject.fence, ANSWER, Wait("nap", "sleep", delay_s=0.0))


async def _send_event(kernel: Kernel, subject: Subject) -> Any:
    answer = await kernel.send(subject.run_id, "answer", 43, event_id="second", request=REQUEST)
    # What the run does at the same time may make these change places.
    return "sent" if answer in ("delivered", "kept") else answer


async def _start_child(kernel: Kernel, subject: Subject) -> Any:
    return await kernel.start_child(subject.fence, delay_s=3_600.0, request=REQUEST)


async def _sweep_wakes(kernel: Kernel, _: Subject) -> Any:
    await kernel.sweep_wakes()


def _saying(lane: Lane) -> Transition:
    async def call(kernel: Kernel, subject: Subject) -> Any:
        return await kernel.say(subject.fence, 4, lane)

    return Transition(f"say {lane.label}", Situation(run="running"), call, ("busy",))


async def _register(kernel: Kernel, subject: Subject) -> Any:
    fence = subject.fence
    intent = array_input.Intent(fence.run_id, fence.org_id, fence.attempt, fence.token)
    return (await array_input.register(kernel.session, [intent]))[0]


async def _claim_step(kernel: Kernel, subject: Subject) -> Any:
    return (await kernel.claim_step(subject.fence, "new")).answer


def _ending_step(name: str, outcome: str, key: str = HELD, function: str | None = None) -> Transition:
    async def call(kernel: Kernel, subject: Subject) -> Any:
        return await _unless_final(kernel.end_step(subject.fence, outcome, key, function=function))

    return Transition(name, Situation(run="running"), call, ("busy",))


async def _mark_step(kernel: Kernel, subject: Subject) -> Any:
    return await _unless_final(kernel.mark_step(subject.fence, "running", HELD))


async def _unless_final(calling: Awaitable[str]) -> str:
    try:
        return await calling
    except Exception as error:  # the driver's own, through a caller's connection
        if getattr(error, "sqlstate", None) != receipts.IMMUTABLE:
            raise
        return "final"


def _cancelling(name: str, *, mark: bool) -> Transition:
    async def call(kernel: Kernel, subject: Subject) -> Any:
        return await kernel.cancel(subject.run_id, "request", mark=mark)

    return Transition(name, Situation(), call, ("busy", "pending", "missing"))


async def _fail_waiting(kernel: Kernel, subject: Subject) -> Any:
    return await kernel.fail_waiting(subject.run_id, 1, "sleep", "nap")


async def _cancel_run(kernel: Kernel, subject: Subject) -> Any:
    return await kernel.fetchval(
        """SELECT @schema@.cancel_run($1, '{"request_id": "door"}')""", subject.run_id
    )


async def _sweep(kernel: Kernel, _: Subject) -> Any:
    await control.sweep(kernel.session, limit=10)


async def _expire(kernel: Kernel, _: Subject) -> Any:
    await kernel.expire()


async def _reserve(kernel: Kernel, subject: Subject) -> Any:
    fence = subject.fence
    reservation = sandboxes.Reservation(subject.run_id, fence.attempt, fence.token, subject.run_id, PROVIDER)
    return (await sandboxes.reserve(kernel.session, [reservation], due_s=900.0))[0]


async def _detach(kernel: Kernel, subject: Subject) -> Any:
    fence = subject.fence
    item = runners.Detachment(subject.run_id, fence.attempt, fence.token, subject.run_id, 30.0, None)
    return (await runners.detach(kernel.session, [item]))[0]


async def _push(kernel: Kernel, subject: Subject) -> Any:
    fence = subject.fence
    item = settle.Settlement(subject.run_id, fence.attempt, fence.token, "completed", '{"output": 1}')
    return (await runners.push(kernel.session, [item]))[0].answer


async def _settle_results(kernel: Kernel, _: Subject) -> Any:
    await runners.settle_results(kernel.session, limit=10)


async def _judge(kernel: Kernel, subject: Subject) -> Any:
    fence, heard = subject.fence, datetime.fromisoformat(_START)
    silent = runners.Silent(
        subject.run_id, fence.attempt, fence.token, PROVIDER, subject.run_id, None, None, heard, 61.0, 30.0, "stale"
    )  # fmt: skip
    return (await runners.judge(kernel.session, [runners.Verdict(silent, "lost", "{}")], crash_cap=5))[0]


async def _claim_cleanup(kernel: Kernel, _: Subject) -> Any:
    await sandboxes.claim_cleanup(kernel.session, [PROVIDER], token=CLEANER, limit=10, lease_s=60.0)


def _cleaning(name: str, call: Callable[..., Awaitable[str]]) -> Transition:
    async def end(kernel: Kernel, subject: Subject) -> Any:
        item = sandboxes.Obligation(
            subject.run_id, PROVIDER, None, None, subject.run_id, 1, 1, 0, None, True, token=CLEANER
        )  # fmt: skip
        answer = await call(kernel.session, item, outcome="deleted", routing_domain=None)
        return answer.removeprefix("already_")  # both say that it is gone

    return Transition(name, Situation(run="cleaning"), end, ("busy", "missing_obligation"))


def _of_lane(lane: Lane) -> list[Transition]:
    free, leased = (
        Situation(run=None, **{lane.label: wanted})  # type: ignore[arg-type]
        for wanted in ("free", "leased")
    )

    def held(subject: Subject) -> lanes.Prefix:
        none = lanes.Prefix(subject.run_id, lane, LANE_TOKEN, 1, [1], [], [], [])
        return subject.prefixes.get(lane, none)

    async def take(kernel: Kernel, _: Subject) -> Any:
        return await kernel.claim_lanes(lane, token=NEW_LANE_TOKEN, prefix=1)

    async def acknowledge(kernel: Kernel, subject: Subject) -> Any:
        return attrs.evolve(await kernel.acknowledge(held(subject), prefix=1), lags=[])

    async def end(kernel: Kernel, subject: Subject) -> Any:
        return attrs.evolve(await kernel.acknowledge(held(subject)), lags=[])

    async def hand_back(kernel: Kernel, subject: Subject) -> Any:
        return await kernel.hand_back(held(subject), ending="failed", delay_s=4.0)

    async def unsend(kernel: Kernel, subject: Subject) -> Any:
        return await kernel.hand_back(held(subject), ending="unsent")

    async def block(kernel: Kernel, subject: Subject) -> Any:
        return await kernel.hand_back(held(subject), ending="blocked", reason="rejected")

    async def give_up(kernel: Kernel, subject: Subject) -> Any:
        return await kernel.hand_back(held(subject))

    async def renew(kernel: Kernel, subject: Subject) -> Any:
        (answer,) = await lanes.renew(kernel.session, lane, [held(subject)], lease_s=400.0)
        return answer

    async def deliver(kernel: Kernel, _: Subject) -> Any:
        await kernel.deliver(lane)

    busy = ("busy",)
    return [
        Transition(f"{lane.label} claim", free, take, ([],)),
        Transition(f"{lane.label} acknowledge and continue", leased, acknowledge, busy),
        Transition(f"{lane.label} acknowledge", leased, end, busy),
        Transition(f"{lane.label} hand back", leased, hand_back, busy),
        Transition(f"{lane.label} hand back unsent", leased, unsend, busy),
        Transition(f"{lane.label} block", leased, block, busy),
        Transition(f"{lane.label} give up", leased, give_up, busy),
        Transition(f"{lane.label} renew", leased, renew, busy),
        Transition(f"{lane.label} deliver", free, deliver, (None,)),
    ]


TRANSITIONS = {
    transition.name: transition
    for transition in [
        _admitting(False),
        _admitting(True),
        _claiming("claim", "queued"),
        _claiming("claim due", "waiting"),
        Transition("renew", Situation(run="running"), _renew, ("busy",)),
        *map(_settling, ("completed", "failed", "retried", "released", "deferred")),
        Transition("defer by outage", Situation(run="running"), _defer, ("busy",)),
        Transition("park", Situation(run="running"), _park, ("busy",)),
        Transition("park on an event", Situation(run="running"), _park_on_event, ("busy",)),
        Transition("try waits", Situation(run="running"), _try_waits, ("busy",)),
        Transition("start child", Situation(run="running"), _start_child, ("busy",)),
        Transition("send event", Situation(), _send_event, ("busy", "missing")),
        Transition("sweep wakes", Situation(run="asked"), _sweep_wakes, (None,)),
        _saying(Lane.LIFECYCLE),
        _saying(Lane.OBSERVABILITY),
        Transition("register array input", Situation(run="running"), _register, ("busy",)),
        Transition("claim step", Situation(run="running"), _claim_step, ("busy",)),
        _ending_step("complete step", "completed"),
        _ending_step("fail step", "failed"),
        _ending_step("release step", "released"),
        _ending_step("insert step", "completed", "new", "work"),
        Transition("mark step", Situation(run="running"), _mark_step, ("busy",)),
        _cancelling("cancel", mark=False),
        _cancelling("cancel or mark", mark=True),
        Transition("fail waiting", Situation(run="waiting"), _fail_waiting, ("busy",)),
        Transition("cancel_run", Situation(), _cancel_run, hint=True),
        Transition("sweep", Situation(marked=True), _sweep, (None,)),
        Transition("expire", Situation(run="over"), _expire, (None,)),
        *_of_lane(Lane.LIFECYCLE),
        *_of_lane(Lane.OBSERVABILITY),
        Transition("reserve sandbox", Situation(run="running"), _reserve, ("busy",)),
        Transition("detach", Situation(run="reserved"), _detach, ("busy",)),
        Transition("push result", Situation(run="detached"), _push, ("recorded",)),
        Transition("settle results", Situation(run="told"), _settle_results, (None,)),
        Transition("judge runner", Situation(run="silent"), _judge, ("busy",)),
        Transition("claim cleanup", Situation(run="unwanted"), _claim_cleanup, (None,)),
        _cleaning("accept deletion", sandboxes.accept),
        _cleaning("confirm deletion", sandboxes.confirm),
    ]
}
