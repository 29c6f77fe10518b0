"""throughput: whole lifecycles in one host process, beside the bare kernel.

Owns the interleaving of the two and their ratio. A lifecycle is submit, claim, run, complete, and every fact
acknowledged by the ledger; both sides end when nothing is left to do, seen by the same query.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import trio

from bench import children, kernel
from bench.figures import Figure, Report, all_checks, median
from bench.place import fresh_schema, until_rest
from bench.plays import noop
from runtime import Runtime, RuntimeConfig
from runtime.host import session_options
from sql.connection import open_session

# Two callers: while one gets its handles, the other's runs are being admitted.
_CALLERS = 2


def lifecycle(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: ``runs`` whole lifecycles through the public API of one host, after ``warmup`` others."""
    answer: dict[str, Any] = trio.run(_lifecycle, spec)
    return answer


async def _lifecycle(spec: Mapping[str, Any]) -> dict[str, Any]:
    config = RuntimeConfig(
        dsn=spec["dsn"], schema=spec["schema"], slots=spec["slots"], operation_timeout_s=120.0
    )
    async with (
        Runtime.open(config, plays=[noop]) as rt,
        open_session(session_options(config), "monitor") as monitor,
    ):
        await _submit(rt, spec["warmup"], spec["submit"])
        await until_rest(monitor)
        cpu, start = time.process_time(), time.perf_counter()
        await _submit(rt, spec["runs"], spec["submit"])
        admitted = time.perf_counter()
        end = await until_rest(monitor)
        return {
            "runs_per_s": spec["runs"] / (end - start),
            "admitted_per_s": spec["runs"] / (admitted - start),
            "cpu_us_per_run": (time.process_time() - cpu) / spec["runs"] * 1e6,
        }


async def _submit(rt: Runtime, runs: int, size: int) -> None:
    starts = iter(range(0, runs, size))

    async def caller() -> None:
        for start in starts:
            await rt.submit_many([(noop, {"n": number}) for number in range(start, min(start + size, runs))])

    async with trio.open_nursery() as nursery:
        for _ in range(_CALLERS):
            nursery.start_soon(caller)


async def run(dsn: str, *, runs: int, rounds: int, slots: int, submit: int, warmup: int = 1_000) -> Report:
    """Rounds of one host and one kernel measurement each; medians and their ratio."""
    found = []
    for _ in range(rounds):
        async with fresh_schema(dsn) as place:
            await place.settle_disk()
            spec = {**place.spec, "runs": runs, "warmup": warmup, "slots": slots, "submit": submit}
            host = await children.measured("lifecycle", spec)
            left = await place.audit(runs + warmup)
        bare = await kernel.one_round(dsn, runs=runs, inline=left.inline, warmup=warmup)
        found.append(
            {
                "host_runs_per_s": host["runs_per_s"],
                "kernel_runs_per_s": bare["runs_per_s"],
                "ratio": host["runs_per_s"] / bare["runs_per_s"],
                "host_admitted_per_s": host["admitted_per_s"],
                "host_cpu_us_per_run": host["cpu_us_per_run"],
                "kernel_cpu_us_per_run": bare["cpu_us_per_run"],
                "inline": left.inline,
                "host_updates_per_run": left.updates_per_run,
                "kernel_updates_per_run": bare["updates_per_run"],
                "checks": {**_named("host", left.checks), **_named("kernel", bare["checks"])},
            }
        )
    of = partial(median, found)
    return Report(
        scenario="throughput",
        figures=[
            Figure("host, whole lifecycles", of("host_runs_per_s"), "runs/s"),
            Figure("kernel, whole lifecycles", of("kernel_runs_per_s"), "runs/s"),
            Figure("host / kernel", of("ratio"), "", least=0.6),
            Figure("host CPU", of("host_cpu_us_per_run"), "µs/run"),
            Figure("kernel client CPU", of("kernel_cpu_us_per_run"), "µs/run"),
            Figure("admitted as claimed, both", of("inline"), "of runs"),
            Figure("host, updates of a run's row", of("host_updates_per_run"), "per run"),
            Figure("kernel, updates of a run's row", of("kernel_updates_per_run"), "per run"),
        ],
        rounds=found,
        checks=all_checks(found),
        settings={"runs": runs, "rounds": rounds, "slots": slots, "submit": submit},
        notes=[
            "a round is a host, then the kernel, each in a fresh process on a fresh schema; the ratio is the median of "
            "the rounds' ratios",
            "both get the same advantage: the share of runs that the host admitted as already claimed is what the "
            "kernel of that round admits so too",
            "both end when no run is open and no lane is pending, seen by the same query every 5 ms",
        ],
    )


def _named(side: str, checks: Mapping[str, bool]) -> dict[str, bool]:
    return {f"{side}: {name}": held for name, held in checks.items()}
