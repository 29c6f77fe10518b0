"""steps: what recording steps costs one host: many runs, one run that maps, and one step after the other.

Owns the three shapes and their ratio. A step is a function that does nothing: its receipt is claimed, and its output is
recorded before it counts. One after the other is what it costs when no step can share a round trip with another.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import trio

from bench import children
from bench.figures import Figure, Report, all_checks, median
from bench.place import Place, fresh_schema
from bench.plays import counts, maps
from runtime import Runtime, RuntimeConfig

_AUDIT = """
SELECT (SELECT count(*) FROM @schema@.receipts) AS receipts,
       (SELECT count(*) FROM @schema@.receipts WHERE state = 'completed' AND tries = 1 AND attempt = 1) AS once,
       (SELECT count(*) FROM @schema@.runs WHERE status <> 'completed' OR attempt <> 1) AS other_runs
"""


def stepped(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: the three shapes, one after the other, in one host."""
    answer: dict[str, Any] = trio.run(_stepped, spec)
    return answer


async def _stepped(spec: Mapping[str, Any]) -> dict[str, Any]:
    config = RuntimeConfig(dsn=spec["dsn"], schema=spec["schema"], slots=spec["runs"])
    steps, runs = spec["steps"], spec["runs"]
    async with Runtime.open(config, plays=[counts, maps]) as rt:
        await _many(rt, runs, 1)  # warm

        each = max(1, steps // runs)
        many = await _timed(each * runs, partial(_many, rt, runs, each))
        mapped = await _timed(steps, partial(_one, rt, {"steps": steps, "concurrency": spec["concurrency"]}))
        single = await _timed(spec["single"], partial(_many, rt, 1, spec["single"]))
        return {
            "many_per_s": many[0],
            "many_cpu_us": many[1],
            "map_per_s": mapped[0],
            "map_cpu_us": mapped[1],
            "single_per_s": single[0],
            "made": runs + each * runs + steps + spec["single"],
        }


async def _timed(steps: int, work: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Steps a second, and µs of this process's CPU a step."""
    cpu, start = time.process_time(), time.perf_counter()
    await work()
    return steps / (time.perf_counter() - start), (time.process_time() - cpu) / steps * 1e6


async def _many(rt: Runtime, runs: int, steps: int) -> None:
    for handle in await rt.submit_many([(counts, steps)] * runs):
        await handle.result()


async def _one(rt: Runtime, data: dict[str, int]) -> None:
    await (await rt.submit(maps, data)).result()


async def _audit(place: Place, made: int) -> dict[str, bool]:
    row = await place.fetchrow(_AUDIT)
    return {
        "every step has its receipt, completed by its first try": row["receipts"] == row["once"] == made,
        "every run completed in its first attempt": row["other_runs"] == 0,
    }


async def run(dsn: str, *, steps: int, rounds: int, runs: int, concurrency: int, single: int) -> Report:
    """Rounds of one fresh host each; medians, and the ratio to one step after the other."""
    found = []
    for _ in range(rounds):
        async with fresh_schema(dsn) as place:
            await place.settle_disk()
            spec = {**place.spec, "steps": steps, "runs": runs, "concurrency": concurrency, "single": single}
            answer = await children.measured("steps", spec)
            checks = await _audit(place, answer["made"])
        found.append({**answer, "ratio": answer["many_per_s"] / answer["single_per_s"], "checks": checks})
    of = partial(median, found)
    return Report(
        scenario="steps",
        figures=[
            Figure("ctx.step, many runs at once", of("many_per_s"), "steps/s", least=5_000),
            Figure("ctx.map, one run", of("map_per_s"), "steps/s", least=5_000),
            Figure("one by one", of("single_per_s"), "steps/s"),
            Figure("many runs / one by one", of("ratio"), ""),
            Figure("host CPU, many runs", of("many_cpu_us"), "µs/step"),
            Figure("host CPU, map", of("map_cpu_us"), "µs/step"),
        ],
        rounds=found,
        checks=all_checks(found),
        settings={
            "steps": steps,
            "rounds": rounds,
            "runs": runs,
            "concurrency": concurrency,
            "single": single,
        },
        notes=[
            "a step is claimed, run and durably recorded before it counts; many runs include their own lifecycles",
            "one by one is one run that makes one step after the other: two round trips each, shared with nobody",
        ],
    )
