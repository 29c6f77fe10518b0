"""latency: how long one run takes on an idle host.

Owns single submits with idle gaps between them. Submit, play and waiter are in one process, so that one clock times
them; the ledger is asked from a connection of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from typing import Any

import trio

from bench import children
from bench.figures import Figure, Report, quantile
from bench.place import fresh_schema
from runtime import Context, Runtime, RuntimeConfig, play
from runtime.host import session_options
from sql import bundle
from sql.connection import open_session

_WARMUP = 20
_LEDGER = "SELECT EXISTS (SELECT FROM @schema@.ledger_runs WHERE run_id = $1 AND status = 'completed')"

_started: dict[str, float] = {}


@play("probe")
async def probe(ctx: Context, data: Any) -> Any:
    """Note when it started."""
    _started[ctx.run_id] = time.perf_counter()
    return data


def sampled(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: ``samples`` single runs; milliseconds from each submit."""
    answer: dict[str, Any] = trio.run(_sampled, spec)
    return answer


async def _sampled(spec: Mapping[str, Any]) -> dict[str, Any]:
    config = RuntimeConfig(dsn=spec["dsn"], schema=spec["schema"])
    ledger = bundle.render(_LEDGER, spec["schema"])
    times: dict[str, list[float]] = {"admitted": [], "started": [], "ended": [], "delivered": []}
    async with (
        Runtime.open(config, plays=[probe]) as rt,
        open_session(session_options(config), "monitor") as monitor,
    ):
        for number in range(_WARMUP + spec["samples"]):
            await trio.sleep(spec["gap_s"] * random.uniform(0.5, 1.5))
            start = time.perf_counter()
            handle = await rt.submit(probe, {"n": number})
            admitted = time.perf_counter()
            await handle.result(timeout=30)
            ended = time.perf_counter()
            while not await monitor.fetchval(ledger, handle.run_id):
                pass
            delivered = time.perf_counter()
            if number >= _WARMUP:
                moments = (admitted, _started[handle.run_id], ended, delivered)
                for name, moment in zip(times, moments, strict=True):
                    times[name].append((moment - start) * 1000)
    return {"times_ms": times}


async def run(dsn: str, *, samples: int, gap_s: float) -> Report:
    """Samples from one idle host; median and 99th percentile of each step."""
    async with fresh_schema(dsn) as place:
        answer = await children.measured("latency", {**place.spec, "samples": samples, "gap_s": gap_s})
    times: Mapping[str, list[float]] = answer["times_ms"]
    goals = {("started", 0.5): 3.5, ("started", 0.99): 8.0, ("ended", 0.5): 5.0}
    names = {
        "admitted": "submit → admitted",
        "started": "submit → handler started",
        "ended": "submit → durable terminal",
        "delivered": "submit → in the ledger",
    }
    figures = [
        Figure(
            f"{words}, p{share * 100:.0f}", quantile(times[name], share), "ms", most=goals.get((name, share))
        )
        for name, words in names.items()
        for share in (0.5, 0.99)
    ]
    return Report(
        scenario="latency",
        figures=figures,
        rounds=[
            {name: quantile(values, share) for name, values in times.items()}
            for share in (0.5, 0.9, 0.99, 1.0)
        ],
        checks={"every sample was taken": all(len(values) == samples for values in times.values())},
        settings={"samples": samples, "gap_s": gap_s},
        notes=[
            "durable terminal: handle.result() has returned, on this host",
            "in the ledger: a query on another connection sees it; asked again and again from the terminal on",
            "rounds are the 50th, 90th, 99th and 100th percentile",
        ],
    )
