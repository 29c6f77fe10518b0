"""takeover: a host with work in flight is told to stop, or is killed; another one takes the work over.

Owns both faults and their figures, all on the database's clock and read afterwards from what the kernel wrote, so that
nothing that watches disturbs them.
"""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from bench import children
from bench.figures import BenchFailed, Figure, Report, all_checks, median
from bench.place import Place, fresh_schema
from bench.plays import hold
from runtime import Runtime, RuntimeConfig
from sql import bundle

_GRACE_S = 1.0
_BUDGET_S = 5.0
_WAIT_S = 60.0
_CLOCK = "SELECT extract(epoch FROM clock_timestamp())::float8 AS now"
_RUNNING = """
SELECT count(*) AS runs, extract(epoch FROM max(lease_expires_at))::float8 AS lease_ends
FROM @schema@.runs WHERE status = 'running' AND attempt = $1
"""
_HANDED_OVER = """
SELECT count(*) FILTER (WHERE a.outcome = $1) AS given,
       extract(epoch FROM max(a.ended_at))::float8 AS last_given,
       extract(epoch FROM max(b.started_at))::float8 AS last_taken,
       extract(epoch FROM max(b.started_at - a.ended_at))::float8 AS longest_gap
FROM @schema@.attempts a JOIN @schema@.attempts b ON b.run_id = a.run_id AND b.attempt = 2
WHERE a.attempt = 1
"""
_CHECKS = """
SELECT (SELECT count(*) FROM @schema@.runs WHERE status = 'completed') AS completed,
       (SELECT count(*) FROM (SELECT run_id FROM @schema@.facts
          WHERE type IN ('run.completed', 'run.failed', 'run.cancelled')
          GROUP BY run_id HAVING count(*) = 1) t) AS ended_once,
       (SELECT count(*) FROM (SELECT run_id FROM @schema@.attempts
          GROUP BY run_id HAVING array_agg(attempt ORDER BY attempt) = ARRAY[1, 2]) t) AS two_attempts,
       (SELECT count(*) FROM @schema@.runs r JOIN @schema@.ledger_runs l USING (run_id)
         WHERE l.applied_seq = r.last_seq AND l.applied_facts = r.last_seq AND l.status = r.status
           AND r.last_seq = (SELECT count(*) FROM @schema@.facts f WHERE f.run_id = r.run_id AND f.lane = 0)) AS told
"""


def host(spec: Mapping[str, Any]) -> None:
    """Child: a host of the play ``hold`` until a signal, or until nobody is there any more."""
    trio.run(_host, spec)


async def _host(spec: Mapping[str, Any]) -> None:
    config = RuntimeConfig(
        dsn=spec["dsn"],
        schema=spec["schema"],
        slots=spec["slots"],
        lease_s=spec["lease_s"],
        renew_every_s=spec["lease_s"] / 3,
        grace_s=_GRACE_S,
        release_budget_s=_BUDGET_S,
    )
    async with Runtime.open(config, plays=[hold]) as rt, trio.open_nursery() as nursery:
        nursery.start_soon(children.until_parent_is_gone, nursery.cancel_scope)
        children.say({"host": rt.host_id})
        await rt.wait_for_signal()
        nursery.cancel_scope.cancel()


async def run(dsn: str, *, runs: int, rounds: int, lease_s: float) -> Report:
    """Rounds of a SIGTERM and a SIGKILL each; medians."""
    found = []
    for _ in range(rounds):
        stopped = await _stopped(dsn, runs)
        killed = await _killed(dsn, runs, lease_s)
        checks = {**_named("SIGTERM", stopped.pop("checks")), **_named("SIGKILL", killed.pop("checks"))}
        found.append({**stopped, **killed, "checks": checks})
    of = partial(median, found)
    return Report(
        scenario="takeover",
        figures=[
            Figure("SIGTERM → every lease is back", of("released_s"), "s", most=_GRACE_S + _BUDGET_S),
            Figure("  of it after the grace period", of("released_after_grace_s"), "s", most=_BUDGET_S),
            Figure("last release → all claimed by the other", of("claimed_after_ms"), "ms", most=100),
            Figure("longest gap of a run", of("longest_gap_ms"), "ms"),
            Figure("SIGTERM → process ended", of("exited_s"), "s"),
            Figure("SIGKILL → all claimed by the other", of("taken_over_s"), "s"),
            Figure("  after the last lease ended", of("taken_over_after_lease_ms"), "ms"),
        ],
        rounds=found,
        checks=all_checks(found),
        settings={"runs": runs, "rounds": rounds, "lease_s": lease_s, "grace_s": _GRACE_S},
        notes=[
            "the plays never end at their first attempt: the grace period passes in full",
            f"leases are 60 s long for SIGTERM and {lease_s:g} s for SIGKILL",
        ],
    )


async def _stopped(dsn: str, runs: int) -> dict[str, Any]:
    """SIGTERM with all runs running on the first host."""
    async with _two_hosts(dsn, runs, lease_s=60.0) as (place, first):
        asked = (await place.fetchrow(_CLOCK))["now"]
        start = trio.current_time()
        first.signal(signal.SIGTERM)
        code = await first.ended()
        exited_s = trio.current_time() - start
        checks = await _finished(place, runs)
        row = await place.fetchrow(_HANDED_OVER, "released")
        checks["the first host ended with exit code 0"] = code == 0
        checks["every lease was handed back"] = row["given"] == runs
    return {
        "released_s": row["last_given"] - asked,
        "released_after_grace_s": max(0.0, row["last_given"] - asked - _GRACE_S),
        "claimed_after_ms": max(0.0, row["last_taken"] - row["last_given"]) * 1000,
        "longest_gap_ms": row["longest_gap"] * 1000,
        "exited_s": exited_s,
        "checks": checks,
    }


async def _killed(dsn: str, runs: int, lease_s: float) -> dict[str, Any]:
    """SIGKILL with all runs running on the first host."""
    async with _two_hosts(dsn, runs, lease_s=lease_s) as (place, first):
        asked = (await place.fetchrow(_CLOCK))["now"]
        first.signal(signal.SIGKILL)
        await first.ended()
        lease_ends = (await place.fetchrow(_RUNNING, 1))["lease_ends"]
        checks = await _finished(place, runs)
        row = await place.fetchrow(_HANDED_OVER, "expired")
        checks["every lease expired"] = row["given"] == runs
    return {
        "taken_over_s": row["last_taken"] - asked,
        "taken_over_after_lease_ms": (row["last_taken"] - lease_ends) * 1000,
        "checks": checks,
    }


@asynccontextmanager
async def _two_hosts(dsn: str, runs: int, *, lease_s: float) -> AsyncIterator[tuple[Place, children.Child]]:
    """Two hosts, the first of which runs everything there is."""
    async with fresh_schema(dsn) as place:
        spec = {**place.spec, "slots": runs, "lease_s": lease_s}
        async with children.running("host", spec) as first:
            async with Runtime.open(RuntimeConfig(dsn=place.dsn, schema=place.schema)) as client:
                await client.submit_many([("hold", {"n": number}) for number in range(runs)])
            await _until(place, _RUNNING, runs, 1)
            async with children.running("host", spec):
                yield place, first


async def _finished(place: Place, runs: int) -> dict[str, bool]:
    """Wait until every run has ended and the ledger knows; what then holds."""
    await _until(place, "SELECT count(*) AS runs FROM @schema@.runs WHERE status = 'completed'", runs)
    await _until(place, "SELECT count(*) AS runs FROM @schema@.ledger_runs WHERE status = 'completed'", runs)
    row = await place.fetchrow(bundle.render(_CHECKS, place.schema))
    return {
        "each run ended once": row["completed"] == row["ended_once"] == runs,
        "each was taken over once": row["two_attempts"] == runs,
        "each fact reached the ledger once and in order": row["told"] == runs,
    }


async def _until(place: Place, query: str, runs: int, *args: Any) -> None:
    with trio.move_on_after(_WAIT_S):
        while (await place.fetchrow(query, *args))["runs"] < runs:  # noqa: ASYNC110 - others work
            await trio.sleep(0.05)
        return
    raise BenchFailed(f"fewer than {runs} runs after {_WAIT_S:g} s: {query.strip()}")


def _named(fault: str, checks: Mapping[str, bool]) -> dict[str, bool]:
    return {f"{fault}: {name}": held for name, held in checks.items()}
