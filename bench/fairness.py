"""fairness: what one tenant's long queue does to the others' waits.

Owns two rounds that differ in nothing but that queue: many organisations submit their runs to one host, once with one
organisation's backlog in front of them and once without. A wait is from the call that submits a run to the first line
of its play, on one process's clock.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import trio

from bench import children
from bench.drain import queue
from bench.figures import Figure, Report, all_checks, median, quantile
from bench.place import Place, fresh_schema
from runtime import Context, Runtime, RuntimeConfig, Submit, play
from runtime.host import session_options
from sql import bundle
from sql.connection import Session, open_session

_FLOOD = "flood"
_WARMUP_RUNS = 200
_LOOK_S = 0.020
_LIMIT_S = 300.0

_ENDED = "SELECT count(*) FROM (SELECT FROM @schema@.runs WHERE finished_at IS NOT NULL LIMIT $1) t"
_OTHERS_LEFT = "SELECT count(*) FROM @schema@.runs WHERE finished_at IS NULL AND org_id <> $1"
_LEFT_BEHIND = """
SELECT count(*) FILTER (WHERE org_id <> $1) AS runs,
       count(*) FILTER (WHERE org_id <> $1 AND status = 'completed' AND attempt = 1) AS whole,
       count(*) FILTER (WHERE org_id = $1 AND status = 'queued') AS flood_left
  FROM @schema@.runs
"""

_started: dict[int, float] = {}


@play("work")
async def work(ctx: Context, data: Any) -> None:
    """Note when it started, and take a while."""
    _started[data["n"]] = time.perf_counter()
    await trio.sleep(data["work_s"])


def shared(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: one host; the runs of all other organisations, at once or one by one; returns when they have ended."""
    answer: dict[str, Any] = trio.run(_shared, spec)
    return answer


async def _shared(spec: Mapping[str, Any]) -> dict[str, Any]:
    config = RuntimeConfig(dsn=spec["dsn"], schema=spec["schema"], slots=spec["slots"], grace_s=1.0)
    others = spec["orgs"] - 1
    items = [
        Submit(work, {"n": number, "work_s": spec["work_s"]}, org_id=f"org-{number % others}")
        for number in range(spec["each"] * others)
    ]
    submitted: list[float] = []
    async with (
        open_session(session_options(config), "monitor") as monitor,
        Runtime.open(config, plays=[work]) as rt,
    ):
        if spec["flood"]:
            await _until(monitor, _ENDED, _WARMUP_RUNS, at_least=min(_WARMUP_RUNS, spec["flood"] // 4))
        if spec["per_s"] is None:
            submitted = [time.perf_counter()] * len(items)
            await rt.submit_many(items)
        else:
            start = trio.current_time()
            async with trio.open_nursery() as nursery:
                for number, item in enumerate(items):
                    await trio.sleep_until(start + number / spec["per_s"])
                    submitted.append(time.perf_counter())
                    nursery.start_soon(rt.submit_many, [item])
        await _until(monitor, _OTHERS_LEFT, _FLOOD, at_least=0)
        row = await monitor.fetchrow(bundle.render(_LEFT_BEHIND, spec["schema"]), _FLOOD)
    assert row is not None
    waits = [(_started[number] - at) * 1000 for number, at in enumerate(submitted)]
    return {"p50_ms": quantile(waits, 0.5), "p99_ms": quantile(waits, 0.99), **dict(row)}


async def _until(monitor: Session, query: str, argument: Any, *, at_least: int) -> None:
    """Wait until so many have ended, or (none) until none is left."""
    text = bundle.render(query, monitor.options.schema)
    with trio.fail_after(_LIMIT_S):
        while True:
            count = await monitor.fetchval(text, argument)
            if count >= at_least if at_least else count == 0:
                return
            await trio.sleep(_LOOK_S)


async def _round(place: Place, spec: Mapping[str, Any], flood: int, per_s: float | None) -> dict[str, Any]:
    await queue(place, flood, work, org_id=_FLOOD, input={"n": -1, "work_s": spec["work_s"]})
    await place.settle_disk()
    return await children.measured("fairness", {**place.spec, **spec, "flood": flood, "per_s": per_s})


async def run(
    dsn: str, *, flood: int, orgs: int, each: int, rounds: int, slots: int, work_ms: float, load: float
) -> Report:
    """Rounds with and without the long queue in turn, for a burst and for a steady stream; medians of both."""
    spec = {"orgs": orgs, "each": each, "slots": slots, "work_s": work_ms / 1000}
    stream = load * slots / spec["work_s"]
    found: list[dict[str, Any]] = []
    for number in range(rounds):
        one: dict[str, Any] = {}
        for name, per_s in (("burst", None), ("stream", stream)):
            # Who goes first changes, so that neither side always meets the fresher machine.
            for queued in (0, flood) if number % 2 else (flood, 0):
                async with fresh_schema(dsn) as place:
                    one[f"{name} {'with' if queued else 'without'}"] = await _round(
                        place, spec, queued, per_s
                    )
            beside, alone = one[f"{name} with"], one[f"{name} without"]
            one[f"{name}_ratio"] = beside["p99_ms"] / alone["p99_ms"]
            for side, waits in (("with", beside), ("without", alone)):
                one[f"{name}_{side}_ms"] = waits["p99_ms"]
        sides = [waits for waits in one.values() if isinstance(waits, dict)]
        one["checks"] = {
            "every run of the others completed, once": all(
                side["whole"] == side["runs"] == each * (orgs - 1) for side in sides
            ),
            "the long queue was there to the end": all(
                one[f"{name} with"]["flood_left"] > 0 for name in ("burst", "stream")
            ),
        }
        found.append(one)
    figures = []
    for name, goal in (("burst", 2.0), ("stream", None)):
        figures += [
            Figure(f"{name}: others' p99 wait without it", median(found, f"{name}_without_ms"), "ms"),
            Figure(f"{name}: others' p99 wait with it", median(found, f"{name}_with_ms"), "ms"),
            Figure(f"{name}: with / without", median(found, f"{name}_ratio"), "", most=goal),
        ]
    return Report(
        scenario="fairness",
        figures=figures,
        rounds=found,
        checks=all_checks(found),
        settings={
            "flood": flood,
            "orgs": orgs,
            "each": each,
            "rounds": rounds,
            "slots": slots,
            "work_ms": work_ms,
            "load": load,
        },
        notes=[
            "it: the queue of one organisation, of which the host has begun to work off some",
            "burst: all other organisations submit their runs at once",
            f"stream: they submit {stream:,.0f} runs/s, which alone would fill the share `load` of the slots; without "
            "the queue a slot is free at once, with it one must become free first",
        ],
    )
