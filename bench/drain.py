"""drain: a backlog of queued no-op runs to durable terminals by one host, delivery running beside it.

Owns the figure of one host at full load that starts on a queue. Times are those of the database's clock: from the first
claim to the last terminal, and from there to the last acknowledgement.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import trio

from bench import children
from bench.figures import Figure, Report, all_checks, median
from bench.place import Place, fresh_schema, until_rest
from bench.plays import noop
from runtime import Play, Runtime, RuntimeConfig, Submit
from runtime.host import session_options
from sql import lanes
from sql.connection import open_session
from sql.types import Lane

_SPAN = """
SELECT extract(epoch FROM max(finished_at) - min(started_at))::float8 AS drain_s,
       extract(epoch FROM max(finished_at))::float8 AS ended_at
FROM @schema@.runs
"""


def drained(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: one host with the play; returns when nothing is left."""
    answer: dict[str, Any] = trio.run(_drained, spec)
    return answer


async def _drained(spec: Mapping[str, Any]) -> dict[str, Any]:
    config = RuntimeConfig(dsn=spec["dsn"], schema=spec["schema"], slots=spec["slots"])
    async with open_session(session_options(config), "monitor") as monitor:
        cpu, start = time.process_time(), time.perf_counter()
        async with Runtime.open(config, plays=[noop]):
            ready = time.perf_counter()
            await until_rest(monitor, every_s=0.020)
            # The server's own clock, so that it compares with what the kernel wrote.
            rested_at = await monitor.fetchval("SELECT extract(epoch FROM clock_timestamp())::float8")
            cpu_s = time.process_time() - cpu
    return {"rested_at": rested_at, "ready_s": ready - start, "cpu_us_per_run": cpu_s / spec["runs"] * 1e6}


async def queue(
    place: Place, runs: int, play: Play = noop, *, org_id: str | None = None, input: Any = None
) -> None:
    """Submit from a runtime without plays, and deliver the admissions, as in a system that lives."""
    config = RuntimeConfig(dsn=place.dsn, schema=place.schema, operation_timeout_s=120.0)
    async with Runtime.open(config, plays=[play]):
        pass  # a play must have been hosted once before others can submit it by name
    async with Runtime.open(config) as client:
        await client.submit_many(
            [
                Submit(play.name, {"n": number} if input is None else input, org_id=org_id)
                for number in range(runs)
            ]
        )
    while True:
        turn = await lanes.deliver(
            place.session, Lane.LIFECYCLE, receivers=[lanes.OWN_LEDGER], limit=400, prefix=100, oldest=False
        )
        if not turn.lanes:
            return


async def run(dsn: str, *, runs: int, rounds: int, slots: int) -> Report:
    """Rounds of a fresh queue and a fresh host; medians."""
    found = []
    for _ in range(rounds):
        async with fresh_schema(dsn) as place:
            await queue(place, runs)
            await place.settle_disk()
            answer = await children.measured("drain", {**place.spec, "runs": runs, "slots": slots})
            left = await place.audit(runs)
            span = await place.fetchrow(_SPAN)
        found.append(
            {
                "runs_per_s": runs / span["drain_s"],
                "drain_s": span["drain_s"],
                "delivered_after_s": max(0.0, answer["rested_at"] - span["ended_at"]),
                "ready_s": answer["ready_s"],
                "cpu_us_per_run": answer["cpu_us_per_run"],
                "checks": left.checks,
            }
        )
    of = partial(median, found)
    return Report(
        scenario="drain",
        figures=[
            Figure("drained", of("runs_per_s"), "runs/s", least=7_000),
            Figure("delivered after the last terminal", of("delivered_after_s"), "s", most=2.0),
            Figure("host start", of("ready_s"), "s"),
            Figure("host CPU, start included", of("cpu_us_per_run"), "µs/run"),
        ],
        rounds=found,
        checks=all_checks(found),
        settings={"runs": runs, "rounds": rounds, "slots": slots},
        notes=[
            "from the first claim to the last terminal, on the database's clock; the host is a fresh process",
            "the admissions were delivered before; what the host delivers is the start and the end of each run",
        ],
    )
