"""Plans: what a hot call reads does not grow with the tables, whatever the planner knows about them.

Each call is made on a few rows among 50,000: with no statistics at all, with statistics from when the tables were
tiny, and on a session that planned everything while they were (its plans are generic by then). Counted are the rows
and index entries that the call made the server read, in its own transaction.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import attrs
import pytest

from actors.schedules import firing
from sql import (
    admission,
    array_input,
    billing,
    children,
    circuits,
    claim,
    control,
    due,
    events,
    facts,
    lanes,
    leases,
    limits,
    maintenance,
    proof,
    rates,
    receipts,
    runners,
    sandboxes,
    schedules,
    settle,
    status,
    waits,
)
from sql.calls import new_token
from sql.types import Lane
from tests.support.callers import Caller, open_caller
from tests.support.kernel import LEASE_S, PLAYS, Kernel, child_of, open_kernel, saying

pytestmark = pytest.mark.modes

ITEMS = 5
KEYS = ("a", "b", "c")
_PLAYS = (*PLAYS, "gamma")
MOST_ROWS = 1_000  # of what a call of five items reads; a full scan of any table reads 20,000 or more
CALLS_BEFORE = 7  # past the point where a session stops planning anew

_TABLES = [
    "runs", "facts", "attempts", "waits", "events", "wakes", "lanes", "cancellations", "ledger_runs", "ledger_logs",
    "hosts", "plays",
    "unique_keys",
    "receipts",
    "schedules", "fires",
    "rate_scopes", "rate_holds", "circuits",
    "runners", "runner_results", "sandboxes", "sandbox_events", "billing_jobs", "compute_records",
]  # fmt: skip

# Beside what is under test: 25,000 runs that have ended, and 5,000 each that are due for another play, due later for
# this one, running elsewhere, asleep, and waiting for their lane's next try.
_GROW = """
INSERT INTO @schema@.sandboxes (created_at, due_at, certain_at, attempt, custody_at, wanted_at, accepted_at,
        confirmed_at, sandbox, provider, run_id)
SELECT t, 'infinity', t, 1, t, t, t, t, 'box-' || n, 'local', 'old-' || lpad(n::text, 6, '0')
  FROM generate_series(1, 50000) AS n, clock_timestamp() AS t;
INSERT INTO @schema@.sandbox_events (happened_at, event_id, sandbox, type, details)
SELECT t, 'box-' || n || ':delete_accepted', 'box-' || n, 'delete_accepted', '{"outcome": "deleted"}'
  FROM generate_series(1, 50000) AS n, clock_timestamp() AS t;
INSERT INTO @schema@.billing_jobs (created_at, due_at, finalised_at, run_id)
SELECT t, t, t, 'old-' || lpad(n::text, 6, '0') FROM generate_series(1, 50000) AS n, clock_timestamp() AS t;
INSERT INTO @schema@.runner_results (received_at, token, delay_s, attempt, settled_at, run_id, outcome, payload, waits,
        overdue)
SELECT t, 9, 0, 1, t, 'old-' || lpad(n::text, 6, '0'), 'completed', '{}', '[]', '{}'
  FROM generate_series(1, 50000) AS n, clock_timestamp() AS t;
INSERT INTO @schema@.compute_records (started_at, ended_at, recorded_at, attempt, record_id, run_id, kind, provider)
SELECT t, t, t, 1, 'record-' || n, 'old-' || lpad(n::text, 6, '0'), 'sandbox', 'local'
  FROM generate_series(1, 50000) AS n, clock_timestamp() AS t;
INSERT INTO @schema@.runners (due_at, started_at, ceiling_at, token, heartbeat_timeout_s, attempt, run_id, provider,
        sandbox)
SELECT 'infinity', t, 'infinity', 9, 60, 1, 'old-' || lpad(n::text, 6, '0'), 'local', 'box-' || n
  FROM generate_series(1, 20000) AS n, clock_timestamp() AS t;
INSERT INTO @schema@.runs (run_id, play, bucket, created_at, lane_due_at, status, due_at, last_seq, acked_seq, attempt,
        attempt_at, started_at, finished_at, terminal_seq, lease_owner, lease_token, lease_expires_at, wait_kind,
        wait_key, wait_until, idempotency_key)
SELECT 'old-' || lpad(n::text, 6, '0'), CASE kind WHEN 5 THEN 'beta' ELSE 'alpha' END,
       CASE kind WHEN 5 THEN $2::bigint ELSE $1::bigint END, t, t + '1 day', s,
       CASE WHEN s = 'completed' THEN 'infinity' WHEN kind = 5 THEN t ELSE t + '1 day' END,
       3, CASE WHEN kind = 9 THEN 1 ELSE 3 END, 1, t, t, CASE WHEN s = 'completed' THEN t END,
       CASE WHEN s = 'completed' THEN 3 END, 9, 9, CASE WHEN s = 'running' THEN t + '1 day' END,
       CASE WHEN s = 'waiting' THEN 'sleep' END, CASE WHEN s = 'waiting' THEN 'nap' END,
       CASE WHEN s = 'waiting' THEN t + '1 day' END, 'key-' || n
  FROM (SELECT n, n % 10 AS kind, clock_timestamp() AS t,
               CASE n % 10 WHEN 5 THEN 'queued' WHEN 6 THEN 'queued' WHEN 7 THEN 'running' WHEN 8 THEN 'waiting'
                           ELSE 'completed' END AS s
          FROM generate_series(1, 50000) AS n) AS g;
INSERT INTO @schema@.facts (run_id, lane, seq, type, created_at, payload)
SELECT run_id, lane, seq, CASE seq WHEN 1 THEN 'run.created' ELSE 'run.progress' END, created_at, '{"play": "alpha"}'
  FROM @schema@.runs, generate_series(1, 3) AS seq, generate_series(0, 1) AS lane WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.attempts (run_id, attempt, token, owner, started_at, ended_at, outcome)
SELECT run_id, 1, 9, 9, created_at, created_at, 'completed' FROM @schema@.runs WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.waits (run_id, key, kind, created_at, due_at)
SELECT run_id, 'nap', 'sleep', created_at, created_at + '1 day' FROM @schema@.runs WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.receipts (run_id, key, function, state, final, attempt, lease, tries, run_failures, created_at,
        claimed_at, finished_at, output)
SELECT run_id, 'step', 'work', 'completed', true, 1, 9, 1, 0, created_at, created_at, created_at, '1'
  FROM @schema@.runs WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.events (run_id, event_id, name, payload, created_at, wait_key)
SELECT run_id, 'e' || n, 'answer', '1', created_at, CASE n WHEN 1 THEN 'nap' END
  FROM @schema@.runs, generate_series(1, 2) AS n WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.lanes (run_id, lane_receiver, last_seq, acked_seq, lane_due_at)
SELECT run_id, '', 3, CASE WHEN run_id LIKE '%9' THEN 1 ELSE 3 END, lane_due_at
  FROM @schema@.runs WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.ledger_runs (run_id, play, status, accepted_at, updated_at, applied_seq, applied_facts)
SELECT run_id, 'alpha', 'completed', created_at, created_at, 3, 3 FROM @schema@.runs WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.ledger_logs (run_id, seq, created_at, payload)
SELECT run_id, seq, created_at, '{}' FROM @schema@.runs, generate_series(1, 3) AS seq WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.unique_keys (org_id, play, key, run_id, checked_at)
SELECT '', 'alpha', 'key-' || substr(run_id, 5), run_id, created_at - '1 hour'::interval
  FROM @schema@.runs WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.schedules (name, play, input, every_s, timezone, missed, priority, created_at, updated_at,
        next_fire_at, paused_at)
SELECT 'old-' || n, 'alpha', '1', 60, 'UTC', 'last', 0, t, t, CASE WHEN n % 2 = 0 THEN t ELSE t + '1 day' END,
       CASE WHEN n % 2 = 0 THEN t END
  FROM (SELECT n, clock_timestamp() AS t FROM generate_series(1, 20000) AS n) AS g;
INSERT INTO @schema@.fires (schedule, fire_at, fired_at, run_id)
SELECT 'old-1', created_at + row_number() OVER () * interval '1 second', created_at, run_id
  FROM @schema@.runs WHERE run_id LIKE 'old-%';
INSERT INTO @schema@.rate_holds (scope, token, cost, run_id, attempt, slot, spent_to, started_at)
SELECT CASE n % 2 WHEN 0 THEN 'api' ELSE 'other' END, -n, 1, 'old-' || lpad(n::text, 6, '0'), 1, t, t,
       CASE n % 2 WHEN 1 THEN t END
  FROM (SELECT n, clock_timestamp() + interval '1 day' AS t FROM generate_series(1, 40000) AS n) AS g;
INSERT INTO @schema@.circuits (name, updated_at, state, open_until)
SELECT 'old-' || n, t, CASE n % 2 WHEN 0 THEN 'open' ELSE 'closed' END, CASE n % 2 WHEN 0 THEN t END
  FROM (SELECT n, clock_timestamp() AS t FROM generate_series(1, 20000) AS n) AS g;
"""
# For a third play: 20,000 runs of one organisation that are due and as many that run, 5,000 of another with 2,500 keys,
# and 300 organisations with one that is due later.
_GROW_TURNS = """
INSERT INTO @schema@.runs (run_id, play, bucket, created_at, lane_due_at, status, due_at, last_seq, acked_seq, attempt,
        attempt_at, started_at, lease_owner, lease_token, lease_expires_at, org_id, concurrency_key, limited, turn,
        subturn)
SELECT 'turn-' || lpad(n::text, 6, '0'), 'gamma', $1::bigint, t, t + '1 day', s,
       CASE WHEN o LIKE 'later%' OR s = 'running' THEN t + '1 day' ELSE t END, 1, 1, (s = 'running')::integer,
       CASE WHEN s = 'running' THEN t END, CASE WHEN s = 'running' THEN t END, 9, 9,
       CASE WHEN s = 'running' THEN t + '1 day' END, o, k, s = 'running', @schema@.turn_of(o, k),
       @schema@.subturn_of(o, k)
  FROM (SELECT n, clock_timestamp() AS t, CASE WHEN n BETWEEN 20001 AND 40000 THEN 'running' ELSE 'queued' END AS s,
               CASE WHEN n BETWEEN 40001 AND 45000 THEN 'key-' || n % 2500 END AS k,
               CASE WHEN n <= 40000 THEN 'flood' WHEN n <= 45000 THEN 'keys' ELSE 'later-' || n END AS o
          FROM generate_series(1, 45300) AS n) AS g;
INSERT INTO @schema@.facts (run_id, lane, seq, type, created_at, payload)
SELECT run_id, 0, 1, 'run.created', created_at, '{"play": "gamma"}' FROM @schema@.runs WHERE run_id LIKE 'turn-%';
"""
_READ = """
SELECT c.relname, pg_stat_get_xact_tuples_returned(c.oid) AS n
  FROM pg_class c
 WHERE c.relnamespace = '@schema@'::regnamespace AND c.relkind IN ('r', 'i')
   AND pg_stat_get_xact_tuples_returned(c.oid) > 0
"""


@attrs.define
class Batch:
    """Five runs with live attempts, and what the calls need of them."""

    items: list[claim.Claimed]
    prefixes: dict[Lane, list[lanes.Prefix]] = attrs.field(factory=dict)

    @property
    def ids(self) -> list[str]:
        return [item.run_id for item in self.items]

    def settlements(self, outcome: str, *, token: int = 0, **fields: Any) -> list[settle.Settlement]:
        return [
            settle.Settlement(item.run_id, item.attempt, token or item.token, outcome, **fields)
            for item in self.items
        ]


Call = Callable[[Kernel, Batch], Awaitable[Any]]


async def prepare_batch(kernel: Kernel) -> Batch:
    """Five running runs with logs, both lanes pending, and three with keys."""
    for _ in range(ITEMS):
        await kernel.submit(priority=2)
    batch = Batch(await kernel.claim(ITEMS, plays=["alpha"]))
    for key in KEYS:
        await kernel.submit(idempotency_key=key, delay_s=86_400.0)
    for item in batch.items:
        await kernel.say(item, 1, Lane.OBSERVABILITY)
    for name in ("s-1", "s-2"):
        hourly = schedules.Definition(
            name=name, play="alpha", input="1", cron=None, every_s=3600, timezone="UTC", missed="last"
        )
        await schedules.put(kernel.session, hourly, lambda now: now - timedelta(seconds=1))
    return batch


async def _admit(kernel: Kernel, _: Batch) -> None:
    answers = await kernel.admit([kernel.submission() for _ in range(ITEMS)])
    assert all(answer.created for answer in answers)


async def _admit_again(kernel: Kernel, batch: Batch) -> None:
    by_id = [kernel.submission(run_id=run_id) for run_id in batch.ids]
    by_key = [kernel.submission(idempotency_key=key) for key in KEYS]
    answers = await kernel.admit([*by_id, *by_key])
    assert {answer.outcome for answer in answers} == {"existing"}


async def _submit_run(kernel: Kernel, _: Batch) -> None:
    options = json.dumps({"idempotency_key": str(new_token())})
    await kernel.fetch("SELECT * FROM @schema@.submit_run('alpha', '1', $1)", options)


def _unique(kernel: Kernel, key: str, on_conflict: str) -> admission.Submission:
    unique = {"unique": {"key": key, "on_conflict": on_conflict}}
    return kernel.submission(extras=json.dumps(unique), delay_s=86_400.0)


async def _admit_unique(kernel: Kernel, _: Batch) -> None:
    for on_conflict in ("replace", "existing"):
        answers = await kernel.admit([_unique(kernel, f"key-{n:06}", on_conflict) for n in range(ITEMS)])
        assert all(answer.created is (on_conflict == "replace") for answer in answers)


async def _register_array_input(kernel: Kernel, batch: Batch) -> None:
    intents = [array_input.Intent(item.run_id, item.org_id, item.attempt, item.token) for item in batch.items]
    assert set(await array_input.register(kernel.session, intents)) == {"no_receiver"}


async def _claim(kernel: Kernel, _: Batch) -> None:
    await kernel.admit([kernel.submission() for _ in range(ITEMS)])
    assert len(await kernel.claim(ITEMS, plays=["alpha"])) == ITEMS


async def _claim_gamma(kernel: Kernel, limit: int, *, oldest: bool = False) -> Counter[str | None]:
    """Who is claimed beside one run each of two small organisations."""
    await kernel.admit([kernel.submission("gamma", org_id=org) for org in ("a", "b")])
    stand = claim.Stand()
    taken: Counter[str | None] = Counter()
    for _ in range(2):
        answer = await kernel.claim_answer(limit, plays=["gamma"], oldest=oldest, stand=stand)
        taken += Counter(item.org_id for item in answer.items)
        stand = claim.Stand(None, answer.stand.cursors)
    return taken


async def _claim_in_turns(kernel: Kernel, _: Batch) -> None:
    taken = await _claim_gamma(kernel, ITEMS)
    assert taken["a"] == taken["b"] == 1


async def _claim_oldest_in_turns(kernel: Kernel, _: Batch) -> None:
    await _claim_gamma(kernel, ITEMS, oldest=True)


def _claim_under_limits(oldest: bool) -> Call:
    async def call(kernel: Kernel, _: Batch) -> None:
        await limits.set_limit(kernel.session, "org", "flood", 3)
        taken = await _claim_gamma(kernel, ITEMS, oldest=oldest)
        assert taken["flood"] <= 3

    return call


async def _claim_of_a_full_play(kernel: Kernel, _: Batch) -> None:
    await kernel.execute("INSERT INTO @schema@.limits (kind, name, max_running) VALUES ('play', 'gamma', 1)")
    await kernel.admit([kernel.submission("gamma") for _ in range(ITEMS)])
    assert len(await kernel.claim(ITEMS, plays=["gamma"])) <= 1


async def _renew(kernel: Kernel, batch: Batch) -> None:
    answers = await leases.renew(kernel.session, batch.items, lease_s=LEASE_S)
    assert all(answer.answer == "renewed" for answer in answers)


async def _renew_lost(kernel: Kernel, batch: Batch) -> None:
    stale = [attrs.evolve(item, token=1) for item in batch.items]
    answers = await leases.renew(kernel.session, stale, lease_s=LEASE_S)
    assert all(answer.answer == "lost" for answer in answers)


async def _settle(kernel: Kernel, batch: Batch) -> None:
    for outcome, expected in (("retried", "done"), ("retried", "done"), ("completed", "lost")):
        answers = await settle.settle(kernel.session, batch.settlements(outcome))
        assert all(answer.answer == expected for answer in answers)


async def _settle_and_measure(kernel: Kernel, _: Batch) -> None:
    extras = '{"terminal_performance": "full"}'
    items = [kernel.submission(extras=extras, claim=True) for _ in range(ITEMS)]
    assert all(answer.claimed for answer in await kernel.admit(items))
    endings = [settle.Settlement(item.run_id, 1, item.request, "completed") for item in items]
    answers = await settle.settle(kernel.session, endings)
    assert all(answer.answer == "done" for answer in answers)


async def _defer(kernel: Kernel, batch: Batch) -> None:
    payload = json.dumps({"error": {"kind": "out"}})
    for _ in range(2):
        items = batch.settlements("deferred", payload=payload, outage_max_s=900.0)
        answers = await settle.defer(kernel.session, items)
        assert all(answer.answer == "done" for answer in answers)


async def _park(kernel: Kernel, batch: Batch) -> None:
    waits = json.dumps([{"key": key, "kind": "sleep", "delay_s": 0} for key in "ab"])
    for _ in range(2):
        answers = await settle.park(kernel.session, batch.settlements("parked", waits=waits))
        assert all(answer.answer == "done" for answer in answers)
    assert len(await kernel.claim(ITEMS, plays=["alpha"])) == ITEMS


async def _wait_for_events(kernel: Kernel, batch: Batch) -> None:
    answer = waits.Wait("answer", "event", "answer")
    trials = [waits.Trial(item.run_id, item.attempt, item.token, [answer]) for item in batch.items]
    assert not any(tried.states["answer"].done for tried in await waits.try_waits(kernel.session, trials))
    await settle.park(kernel.session, batch.settlements("parked", waits=waits.waits_text([answer])))
    sendings = [events.Sending(run_id, "answer", "1", "id", named=True) for run_id in batch.ids]
    for _ in range(2):
        assert set(await events.send(kernel.session, sendings)) == {"delivered"}
    await kernel.fetchval("SELECT @schema@.send_event($1, '1', '{\"name\": \"answer\"}')", batch.ids[0])
    assert await kernel.sweep_wakes() == (ITEMS, False)
    claimed = await kernel.claim(ITEMS, plays=["alpha"])
    assert [item.waits["answer"].payload for item in claimed] == ["1"] * ITEMS
    for item in claimed:
        assert await waits.read_payload(kernel.session, item.run_id, "answer") == "1"
        assert (await events.read(kernel.session, item.run_id))[0].wait_key == "answer"


async def _start_children(kernel: Kernel, batch: Batch) -> None:
    launches = [
        children.Launch(
            item.run_id,
            item.attempt,
            item.token,
            "kid",
            kernel.submission(run_id=child_of(item.run_id), priority=2),
        )
        for item in batch.items
    ]
    for _ in range(2):
        answers = await children.start(kernel.session, launches, release_id=None, environment=None)
        assert {answer.answer for answer in answers} == {"started"}
    for item in batch.items:
        await kernel.park_on(item, waits.Wait("kid", "child", child_of(item.run_id)))
    for child in await kernel.claim(ITEMS, plays=["alpha"]):
        await kernel.complete(child)
    assert await kernel.sweep_wakes() == (ITEMS, False)


async def _cancel_family(kernel: Kernel, batch: Batch) -> None:
    for item in batch.items:
        await kernel.start_child(item)
    requests = [control.Cancellation(run_id, "r") for run_id in batch.ids]
    assert all(answer.kin for answer in await control.cancel(kernel.session, requests, mark=True))
    assert await control.sweep(kernel.session, limit=100) == (ITEMS, 0)


async def _fail_waiting(kernel: Kernel, batch: Batch) -> None:
    for item in batch.items:
        await kernel.park(item, nap=600.0)
    for _ in range(2):
        answers = [
            await kernel.fail_waiting(item.run_id, item.attempt, "sleep", "nap") for item in batch.items
        ]
        assert {answer.answer for answer in answers} == {"failed"}


async def _append(kernel: Kernel, batch: Batch) -> None:
    said = [saying(item, n, Lane(n % 2)) for item in batch.items for n in (2, 3)]
    for _ in range(2):
        assert set(await facts.append(kernel.session, said)) == {"done"}


async def _cancel(kernel: Kernel, batch: Batch) -> None:
    requests = [control.Cancellation(run_id, "r") for run_id in batch.ids]
    for _ in range(2):
        answers = await control.cancel(kernel.session, requests, mark=True)
        assert all(answer.answer == "cancelled" for answer in answers)


async def _cancel_run_and_sweep(kernel: Kernel, batch: Batch) -> None:
    for run_id in batch.ids:
        await kernel.fetchval("SELECT @schema@.cancel_run($1)", run_id)
    assert await control.sweep(kernel.session, limit=100) == (ITEMS, 0)


async def _expire(kernel: Kernel, _: Batch) -> None:
    await kernel.admit([kernel.submission() for _ in range(ITEMS)])
    assert len(await kernel.claim(ITEMS, plays=["alpha"], lease_s=-1.0)) == ITEMS
    assert (await kernel.expire()).expired == ITEMS


async def _steps(kernel: Kernel, batch: Batch) -> None:
    fences = [(item.run_id, item.attempt, item.token) for item in batch.items]
    for key in "ab":
        for _again in range(2):
            asked = [receipts.ReceiptClaim(*fence, key, "work") for fence in fences]
            answers = await receipts.claim(kernel.session, asked)
            assert all(answer.answer == "claimed" for answer in answers)
    marks = [receipts.ReceiptMark(*fence, "a", "running") for fence in fences]
    assert set(await receipts.mark(kernel.session, marks)) == {"done"}
    for _again in range(2):
        ends = [receipts.ReceiptEnd(*fence, "a", "completed", "1") for fence in fences]
        inserts = [receipts.ReceiptEnd(*fence, "c", "completed", "1", function="work") for fence in fences]
        ended = await receipts.settle(kernel.session, [*ends, *inserts])
        assert all(answer.answer == "done" for answer in ended)
    # A later attempt finds one that is done, one to take over, and one that is new.
    await settle.settle(kernel.session, batch.settlements("released"))
    again = await kernel.claim(ITEMS, plays=["alpha"])
    asked = [
        receipts.ReceiptClaim(item.run_id, item.attempt, item.token, key, "work")
        for item in again
        for key in "abd"
    ]
    answers = await receipts.claim(kernel.session, asked)
    assert [answer.answer for answer in answers] == ["completed", "claimed", "claimed"] * ITEMS
    for item in again:
        assert len(await receipts.read(kernel.session, item.run_id, after=None, limit=10, outputs=True)) == 4


async def _fire(kernel: Kernel, _: Batch) -> None:
    due_now, _next = await schedules.due(kernel.session, limit=10)
    items = [firing(item) for item in due_now]
    assert [answer.answer for answer in await schedules.fire(kernel.session, items)] == ["done"] * 2
    assert [answer.answer for answer in await schedules.fire(kernel.session, items)] == ["lost"] * 2


async def _retain(kernel: Kernel, _: Batch) -> None:
    for _again in range(2):
        gone = await maintenance.purge_runs(kernel.session, age_s=0.0, limit=ITEMS, ledger=True, start=None)
        assert gone.items in (0, ITEMS)  # none while the tables are tiny
    kept = await maintenance.purge_runs(kernel.session, age_s=3600.0, limit=ITEMS, ledger=True, start=None)
    assert kept.items == 0


async def _scrub(kernel: Kernel, _: Batch) -> None:
    for scrub in (maintenance.scrub_logs, maintenance.scrub_ledger_logs):
        for _again in range(2):
            await scrub(kernel.session, age_s=0.0, limit=ITEMS, start=None)
        assert (await scrub(kernel.session, age_s=3600.0, limit=ITEMS, start=None)).items == 0


async def _chore(kernel: Kernel, _: Batch) -> None:
    claimed = await maintenance.claim(kernel.session, ["counts"], lease_s=60.0)
    assert claimed is not None
    state = await maintenance.count_runs(kernel.session, state=None, limit=ITEMS)
    state = await maintenance.count_runs(kernel.session, state=state, limit=ITEMS)
    assert await maintenance.finish(kernel.session, claimed, next_s=0.0, state=state)


async def _read_fires(kernel: Kernel, _: Batch) -> None:
    await schedules.fires(kernel.session, "old-1", limit=20)
    await schedules.read(kernel.session, ["s-1", "s-2"])


async def _next_due(kernel: Kernel, _: Batch) -> None:
    buckets = kernel.buckets(["alpha"]).ids
    await due.next_due(kernel.session, host=1, buckets=buckets, receivers=[""])


async def _rates(kernel: Kernel, batch: Batch) -> None:
    await rates.set_rate(kernel.session, "api", per_s=1e5, burst=50.0, max_in_flight=50)
    slots = [rates.Slot("api", new_token(), 1.0, item.run_id, item.attempt) for item in batch.items]
    for _ in range(2):
        answers = await rates.acquire(kernel.session, slots, ahead_s=0.1, probe_s=30.0)
        assert {answer.answer for answer in answers} == {"granted"}
    for result in ("refused", "unused"):
        results = [rates.Result("api", slot.token, result, 1.0) for slot in slots]
        assert {answer.answer for answer in await rates.release(kernel.session, results)} == {"done"}


async def _circuits(kernel: Kernel, batch: Batch) -> None:
    names = ["crm", "erp", "crm", "dms", "old-7"]
    calls = [
        circuits.Call(name, new_token(), item.run_id, item.attempt)
        for name, item in zip(names, batch.items, strict=True)
    ]
    for result in ("failed", "ok"):
        for _ in range(2):
            await circuits.enter(kernel.session, calls, probe_s=30.0)
            reports = [circuits.Report(call.name, call.token, result, "no answer") for call in calls]
            assert {answer.answer for answer in await circuits.report(kernel.session, reports)} == {"done"}


def _lane_turn(lane: Lane) -> Call:
    async def call(kernel: Kernel, _: Batch) -> None:
        prefixes = await kernel.claim_lanes(lane, limit=ITEMS, prefix=1)
        assert len(prefixes) == ITEMS
        await lanes.renew(kernel.session, lane, prefixes, lease_s=40.0)
        for prefix in prefixes:
            assert await kernel.apply(prefix)
        for _again in range(2):
            answers = await lanes.acknowledge(kernel.session, lane, prefixes, prefix=1, lease_s=30.0)
            assert all(answer.answer == "acked" for answer in answers)
        backs = [lanes.HandBack(prefix.run_id, prefix.token, "given_up") for prefix in prefixes]
        for _again in range(2):
            assert set(await lanes.hand_back(kernel.session, lane, backs)) <= {"done"}

    return call


def _prove(lane: Lane) -> Call:
    async def call(kernel: Kernel, _: Batch) -> None:
        prefixes = await kernel.claim_lanes(lane, limit=ITEMS, prefix=1)
        claims = [
            proof.Claimed(one.run_id, one.lane, one.token, one.seqs[0], one.through) for one in prefixes
        ]
        assert await proof.prove(kernel.session, claims) == [True] * ITEMS

    return call


def _deliver(lane: Lane) -> Call:
    async def call(kernel: Kernel, _: Batch) -> None:
        assert (await kernel.deliver(lane, limit=ITEMS)).lanes == ITEMS

    return call


async def _read(kernel: Kernel, batch: Batch) -> None:
    assert len(await status.read_runs(kernel.session, batch.ids)) == ITEMS
    assert await status.read_terminals(kernel.session, batch.ids) == []
    for run_id in batch.ids:
        await facts.read(kernel.session, run_id)
        await status.read_attempts(kernel.session, run_id)
        assert (await status.read_run(kernel.session, run_id, full=True)) is not None


async def _page(kernel: Kernel, _: Batch) -> None:
    page = await status.list_runs(
        kernel.session, status=None, play=None, org_id=None, labels=None, limit=20, after="old-025000"
    )
    assert len(page) == 20


async def _backlog(kernel: Kernel, _: Batch) -> None:
    assert (await status.backlog(kernel.session, limit=50)).queued > 0


# What is judged here by its rows, and by its plans in test_explains.
async def _detached(kernel: Kernel, batch: Batch) -> None:
    """Of sandboxes: reserved, handed over, heard of, looked after, ended, deleted and billed."""
    session = kernel.session
    items = [
        sandboxes.Reservation(item.run_id, item.attempt, item.token, f"sb-{item.run_id}", "local")
        for item in batch.items
    ]
    for _ in range(2):
        assert set(await sandboxes.reserve(session, items, due_s=0.0)) == {"reserved"}
    await sandboxes.record_custody(session, [sandboxes.Custody(item.sandbox, "p") for item in items])
    detachments = [
        runners.Detachment(item.run_id, item.attempt, item.token, item.sandbox, 0.0, None) for item in items
    ]
    for _ in range(2):
        assert set(await runners.detach(session, detachments)) == {"done"}
    beats = [runners.Beat(item.run_id, item.attempt, item.token) for item in items]
    assert set(await runners.beat(session, beats)) == {"ok"}
    silent, _ = await runners.sweep(session, ["local"], limit=ITEMS, look_s=0.0)
    assert len(silent) == ITEMS
    assert await runners.read_runner(session, items[0].run_id, items[0].attempt) is not None
    assert await runners.read_attempt(session, items[0].run_id, items[0].attempt, items[0].token) is not None
    verdicts = [runners.Verdict(one, "lost", "{}") for one in silent[:2]]
    for _ in range(2):
        assert set(await runners.judge(session, verdicts, crash_cap=0)) == {"done"}
    gone = {one.run_id for one in silent[:2]}
    results = [each for each in batch.settlements("completed", payload="{}") if each.run_id not in gone]
    for _ in range(2):
        assert {pushed.answer for pushed in await runners.push(session, results)} == {"settled"}
    await runners.settle_results(session, limit=ITEMS)
    await runners.next_due(session, ["local"])
    due, _ = await sandboxes.claim_cleanup(session, ["local"], token=new_token(), limit=ITEMS, lease_s=30.0)
    assert len(due) == ITEMS
    for one in due:
        await sandboxes.accept(session, one, outcome="deleted", routing_domain=None)
        assert await sandboxes.confirm(session, one, outcome="deleted", routing_domain=None) == "completed"
    billed = await billing.finalise(session, limit=ITEMS, grace_s=0.0, again_s=1.0)
    assert (billed.finalised, billed.postponed) == (ITEMS - 2, 2)  # those that were lost go on


# By itself: what it leaves dead in the indexes of runs would be read by the others.
DETACHED: dict[str, Call] = {"detached": _detached}
CALLS: dict[str, Call] = {
    "admit": _admit,
    "admit what exists": _admit_again,
    "admit with unique keys": _admit_unique,
    "register array input": _register_array_input,
    "submit_run": _submit_run,
    "claim": _claim,
    "claim in turns": _claim_in_turns,
    "claim in turns, oldest first": _claim_oldest_in_turns,
    "claim under limits": _claim_under_limits(False),
    "claim under limits, oldest first": _claim_under_limits(True),
    "claim of a full play": _claim_of_a_full_play,
    "renew": _renew,
    "renew lost leases": _renew_lost,
    "settle": _settle,
    "settle and measure": _settle_and_measure,
    "defer": _defer,
    "park": _park,
    "wait for events": _wait_for_events,
    "start children": _start_children,
    "cancel a family": _cancel_family,
    "fail waiting": _fail_waiting,
    "append": _append,
    "cancel": _cancel,
    "cancel_run and sweep": _cancel_run_and_sweep,
    "expire": _expire,
    "steps": _steps,
    "fire": _fire,
    "read fires": _read_fires,
    "retain": _retain,
    "scrub": _scrub,
    "chore": _chore,
    "next_due": _next_due,
    "rates": _rates,
    "circuits": _circuits,
    "lifecycle turn": _lane_turn(Lane.LIFECYCLE),
    "observability turn": _lane_turn(Lane.OBSERVABILITY),
    "lifecycle deliver": _deliver(Lane.LIFECYCLE),
    "observability deliver": _deliver(Lane.OBSERVABILITY),
    "prove lifecycle": _prove(Lane.LIFECYCLE),
    "prove observability": _prove(Lane.OBSERVABILITY),
    "read": _read,
    "page": _page,
    "backlog": _backlog,
}


async def rows_read(caller: Caller, kernel: Kernel, call: Call, batch: Batch) -> dict[str, int]:
    """What a call makes the server read, per table and index. Undone at once."""
    await caller.begin()
    try:
        before = {row["relname"]: row["n"] for row in await caller.fetch(kernel.render(_READ))}
        await call(caller.doors(kernel), batch)
        after = {row["relname"]: row["n"] for row in await caller.fetch(kernel.render(_READ))}
    finally:
        await caller.rollback()
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


@asynccontextmanager
async def tiny_tables(dsn: str, schema: str) -> AsyncIterator[tuple[Kernel, Caller, Batch]]:
    """A kernel with a batch in tables that nobody analyses by himself, and a connection to make calls through."""
    async with open_kernel(dsn, schema, plays=_PLAYS) as kernel, open_caller(dsn, schema) as caller:
        for table in _TABLES:
            await kernel.execute(f"ALTER TABLE @schema@.{table} SET (autovacuum_enabled = off)")
        yield kernel, caller, await prepare_batch(kernel)


async def analyse(kernel: Kernel) -> None:
    for table in _TABLES:
        await kernel.execute(f"ANALYZE @schema@.{table}")


async def grow(kernel: Kernel) -> None:
    for statements, plays in ((_GROW, ("alpha", "beta")), (_GROW_TURNS, ("gamma",))):
        for statement in statements.split(";")[:-1]:
            arguments = [kernel.bucket(play) for play in plays] if "$1" in statement else []
            await kernel.execute(statement, *arguments)


@pytest.mark.parametrize("statistics", ["none", "stale", "stale, planned when tiny"])
async def test_calls_read_what_they_need(dsn: str, schema: str, statistics: str) -> None:
    await read_what_they_need(dsn, schema, statistics, CALLS)


async def test_calls_of_sandboxes_read_what_they_need(dsn: str, schema: str) -> None:
    await read_what_they_need(dsn, schema, "stale, planned when tiny", DETACHED)


async def read_what_they_need(dsn: str, schema: str, statistics: str, calls: dict[str, Call]) -> None:
    async with tiny_tables(dsn, schema) as (kernel, caller, batch):
        if statistics != "none":
            await analyse(kernel)
        tiny_calls = {name: call for name, call in calls.items() if name not in ("page", "backlog")}
        if "planned" in statistics:
            for call in tiny_calls.values():
                for _ in range(CALLS_BEFORE):
                    await rows_read(caller, kernel, call, batch)
        await grow(kernel)
        greedy = []
        for name, call in calls.items():
            if "planned" in statistics and name not in tiny_calls:
                # No plan of it is kept. It walks the front of indexes, where all the calls that were undone left
                # their entries.
                await kernel.execute("VACUUM (INDEX_CLEANUP on) @schema@.runs, @schema@.lanes")
            for _ in range(1 if "planned" in statistics else CALLS_BEFORE):
                read = await rows_read(caller, kernel, call, batch)
            if sum(read.values()) > MOST_ROWS:
                greedy.append(f"{name}: {read}")
        assert not greedy, "\n".join(greedy)


async def test_a_full_scan_would_be_seen(dsn: str, schema: str) -> None:
    async with tiny_tables(dsn, schema) as (kernel, caller, batch):
        await grow(kernel)

        async def scan(doors: Kernel, _: Batch) -> None:
            await doors.fetch("SELECT count(*) FROM @schema@.runs WHERE play = 'gamma'")

        assert (await rows_read(caller, kernel, scan, batch))["runs"] > 50_000
