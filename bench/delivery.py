"""delivery: pending facts to a ledger, in the database, as deliveries, and over HTTP to a receiver of its own process.

Owns the cases, a backlog that is written straight into the tables, so that nothing but delivery is measured, and the
lag of a steady stream. Both ends of HTTP are real processes on loopback.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import trio

from bench import children
from bench.figures import BenchFailed, Figure, Report, all_checks, median, quantile
from bench.place import Place, fresh_schema
from runtime import HttpLedger, Ledger, PostgresLedger, Runtime, RuntimeConfig
from runtime.asgi import serve_app
from runtime.host import session_options
from runtime.receiver import Receiver
from sql import bundle, due
from sql.connection import Session, SessionOptions, open_session

FACTS = 5
"""Facts of a run: created, started, two of progress, completed."""

_WARM = 200
_BURST = 5
_BURST_S = 0.05
_LIMIT_S = 300.0

_ADD = """
WITH added AS (
    INSERT INTO @schema@.runs (
        run_id, play, bucket, status, created_at, due_at, lane_due_at, last_seq, terminal_seq, attempt, attempt_at,
        started_at, finished_at, lease_owner, lease_token, receiver)
    SELECT $1 || n, 'bench', 0, 'completed', t, 'infinity', t, 5, 5, 1, t, t, t, 1, 1, $3
      FROM generate_series(1, $2::integer) AS n, (SELECT clock_timestamp() AS t) AS now
    RETURNING run_id, created_at
)
INSERT INTO @schema@.facts (run_id, lane, seq, type, created_at, payload)
SELECT a.run_id, 0, s.seq, s.type, a.created_at, s.payload::jsonb
  FROM added a,
       (VALUES (1, 'run.created', '{"play": "bench", "input": {"path": "/srv/data", "depth": 3}}'),
               (2, 'run.started', '{"attempt": 1}'), (3, 'run.progress', '{"done": 1, "total": 2}'),
               (4, 'run.progress', '{"done": 2, "total": 2}'),
               (5, 'run.completed', '{"attempt": 1, "output": {"files": 12, "bytes": 34567}}')
       ) AS s (seq, type, payload)
"""
_PENDING = "SELECT EXISTS (SELECT FROM @schema@.runs WHERE lane_pending)"
_HTTP_AUDIT = """
SELECT (SELECT count(*) FROM @schema@.runs WHERE status = 'completed') AS runs,
       (SELECT count(*) FROM @schema@.facts) AS facts,
       (SELECT count(*) FROM @schema@.cursors WHERE applied_seq = 5 AND conflicts = 0 AND skipped = 0) AS lanes
"""
_OWN_AUDIT = """
SELECT count(*) AS runs, sum(applied_facts) AS facts, count(*) FILTER (WHERE applied_seq = 5) AS lanes
  FROM @schema@.ledger_runs WHERE status = 'completed'
"""


@attrs.frozen
class Case:
    """One way to deliver. ``facts`` and ``deliveries``: what the receiver takes in a request; None: no HTTP."""

    name: str
    lanes: int
    in_database: bool = False
    facts: int | None = None
    deliveries: int = 1


CASES = (
    Case("in the database", 1, in_database=True),
    *(Case(f"deliveries, {lanes} lane actors", lanes) for lanes in (1, 4)),
    *(
        Case(f"HTTP {facts}x{runs}, {lanes} lane actors", lanes, facts=facts, deliveries=runs)
        for facts, runs in ((1, 1), (8, 1), (1, 200), (8, 200))
        for lanes in (1, 4)
    ),
)


# --- the sender, in a process of its own -------------------------------------------------------------------


def delivered(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: a host that only delivers: a backlog as fast as it can, then a steady stream."""
    answer: dict[str, Any] = trio.run(_delivered, spec)
    return answer


async def _delivered(spec: Mapping[str, Any]) -> dict[str, Any]:
    config = RuntimeConfig(dsn=spec["dsn"], schema=spec["schema"], lane_actors=spec["lanes"])
    lags: list[float] = []
    async with (
        Runtime.open(
            config, plays=[], ledger=_ledger(spec), on_delivery=lambda _, lags_s: lags.extend(lags_s)
        ),
        open_session(session_options(config), "monitor") as monitor,
    ):
        await _add(monitor, "warm-", _WARM)
        await _until_delivered(monitor)
        cpu = time.process_time()
        await _add(monitor, "run-", spec["runs"])
        start = time.perf_counter()
        end = await _until_delivered(monitor)
        cpu_s = time.process_time() - cpu
        lags.clear()
        bursts = max(1, round(spec["seconds"] / _BURST_S))
        begun = trio.current_time()
        for number in range(bursts):
            await _add(monitor, f"stream-{number}-", _BURST)
            await trio.sleep_until(begun + (number + 1) * _BURST_S)
        await _until_delivered(monitor)
        facts = FACTS * spec["runs"]
        return {
            "facts_per_s": facts / (end - start),
            "sender_us_per_fact": cpu_s / facts * 1e6,
            "p50_ms": quantile(lags, 0.5) * 1000,
            "p99_ms": quantile(lags, 0.99) * 1000,
            "runs": _WARM + spec["runs"] + bursts * _BURST,
        }


def _ledger(spec: Mapping[str, Any]) -> Ledger:
    if spec["url"] is None:
        return PostgresLedger(in_database=spec["in_database"])
    return HttpLedger(spec["url"], secret=spec["secret"])


async def _add(monitor: Session, prefix: str, runs: int) -> None:
    """Runs that have ended and of which nothing is delivered yet."""
    text = bundle.render(_ADD, monitor.options.schema)
    await monitor.execute(text, prefix, runs, "", timeout_s=_LIMIT_S)
    await due.notify(monitor, ["lanes"])


async def _until_delivered(monitor: Session) -> float:
    query = bundle.render(_PENDING, monitor.options.schema)
    with trio.move_on_after(_LIMIT_S):
        while await monitor.fetchval(query):  # noqa: ASYNC110 - the database is asked
            await trio.sleep(0.005)
        return time.perf_counter()
    raise BenchFailed(f"not everything was delivered within {_LIMIT_S:g} s")


# --- the receiver, in a process of its own -----------------------------------------------------------------


def received(spec: Mapping[str, Any]) -> None:
    """Child: a receiver until its parent ends it."""
    trio.run(_received, spec)


async def _received(spec: Mapping[str, Any]) -> None:
    receiver = Receiver(
        SessionOptions(spec["dsn"], spec["ledger"]),
        origin=None,
        secrets=[spec["secret"]],
        source=spec["schema"],
        prove_in=SessionOptions(spec["dsn"], spec["schema"]),
        max_facts=spec["facts"],
        max_deliveries=spec["deliveries"],
    )

    def on_bound(port: int) -> None:
        receiver.be(f"http://127.0.0.1:{port}")
        children.say({"url": receiver.origin})

    async with receiver.running(), trio.open_nursery() as nursery:
        nursery.start_soon(children.until_parent_is_gone, nursery.cancel_scope)
        await serve_app(
            receiver.app,
            "receiver",
            "127.0.0.1",
            0,
            on_bound=on_bound,
            shutdown=trio.Event(),
            grace_s=1.0,
            idle_s=60.0,
        )


@contextlib.asynccontextmanager
async def _receiver(place: Place, case: Case) -> AsyncIterator[dict[str, Any]]:
    """A receiver for the case, if it needs one: what the sender needs of it, and the schema of its ledger."""
    if case.facts is None:
        yield {"url": None, "secret": None, "ledger": None}
        return
    ledger, secret = f"{place.schema}_ledger", secrets.token_urlsafe(32)
    takes = {"facts": case.facts, "deliveries": case.deliveries}
    try:
        spec = {**place.spec, **takes, "ledger": ledger, "secret": secret}
        async with children.running("receiver", spec) as child:
            yield {"url": child.started["url"], "secret": secret, "ledger": ledger}
    finally:
        await place.session.execute(f"DROP SCHEMA IF EXISTS {bundle.quote(ledger)} CASCADE", timeout_s=60.0)


# --- the scenario ------------------------------------------------------------------------------------------


async def run(dsn: str, *, runs: int, rounds: int, seconds: float, cases: Sequence[Case] = CASES) -> Report:
    """Interleaved rounds of all cases; medians."""
    found: list[dict[str, Any]] = []
    for _ in range(rounds):
        for case in cases:
            found.append({"case": case.name, **await _measured(dsn, case, runs, seconds)})
    figures = []
    for case in cases:
        of = partial(median, [one for one in found if one["case"] == case.name])
        figures += [
            Figure(f"{case.name}: drained", of("facts_per_s"), "facts/s"),
            Figure(f"{case.name}: lag p50", of("p50_ms"), "ms"),
            Figure(f"{case.name}: lag p99", of("p99_ms"), "ms"),
        ]
    return Report(
        scenario="delivery",
        figures=figures,
        rounds=found,
        checks=all_checks(found),
        settings={"runs": runs, "rounds": rounds, "seconds": seconds},
        notes=[
            f"drained: a backlog of runs with {FACTS} facts each, written straight into the tables, from its commit to "
            "the last acknowledgement; the sender is a process that hosts no plays",
            "lag: from a fact's creation to its acknowledgement on the database's clock, at 100 runs/s",
            "HTTP 8x200: up to 8 facts of a run in a delivery, up to 200 runs in a request. Sender and receiver are "
            "processes of their own on loopback and share the machine with the server; every delivery has a dispatch "
            "token, a digest and a proof of its lease, all checked",
        ],
    )


async def _measured(dsn: str, case: Case, runs: int, seconds: float) -> dict[str, Any]:
    async with fresh_schema(dsn) as place:
        await place.settle_disk()
        async with _receiver(place, case) as receiver:
            spec = {
                **place.spec,
                **receiver,
                "lanes": case.lanes,
                "in_database": case.in_database,
                "runs": runs,
                "seconds": seconds,
            }
            answer = await children.measured("delivery", spec)
            if receiver["ledger"] is None:
                row = await place.fetchrow(_OWN_AUDIT)
            else:
                row = await place.session.fetchrow(bundle.render(_HTTP_AUDIT, receiver["ledger"]))
    wanted = answer["runs"]
    whole = row["runs"] == row["lanes"] == wanted and row["facts"] == FACTS * wanted
    return {**answer, "checks": {"the ledger has each fact once and in order": whole}}
