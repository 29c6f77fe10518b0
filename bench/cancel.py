"""cancel: how long it takes until a play that runs sees that its run was cancelled.

Owns cancellations one at a time among plays that are held: by the host that runs them, by another host, and by a caller
of the SQL function. Both hosts are in one process, so that one clock times them; all that they share is the database.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import trio

from bench import children
from bench.figures import BenchFailed, Figure, Report, quantile
from bench.place import fresh_schema
from bench.plays import noop
from runtime import Context, Handle, Runtime, RuntimeConfig, play
from runtime.host import session_options
from sql import bundle
from sql.connection import Session, open_session

MOST_MS = 100.0
_WARMUP = 5
_WAIT_S = 30.0
_SQL = "SELECT @schema@.cancel_run($1)"
_WAYS = {"same": "by the same host", "other": "by another host", "sql": "by a caller's SQL"}


class _Held:
    """The runs that are held: when each began, and when it saw its cancellation."""

    def __init__(self) -> None:
        self.began: dict[str, trio.Event] = {}
        self.seen: dict[str, float] = {}
        self.over: dict[str, trio.Event] = {}


_held = _Held()


@play("held")
async def held(ctx: Context) -> None:
    """Run until it is cancelled, and note when that was."""
    _held.began.setdefault(ctx.run_id, trio.Event()).set()
    try:
        await trio.sleep_forever()
    finally:
        _held.seen[ctx.run_id] = time.perf_counter()
        _held.over.setdefault(ctx.run_id, trio.Event()).set()


def cancelled(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: ``samples`` cancellations in each way, among ``held`` other plays; milliseconds from each request."""
    answer: dict[str, Any] = trio.run(_cancelled, spec)
    return answer


async def _cancelled(spec: Mapping[str, Any]) -> dict[str, Any]:
    config = RuntimeConfig(dsn=spec["dsn"], schema=spec["schema"], slots=spec["held"] + 1)
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    async with (
        Runtime.open(config, plays=[held]) as same,
        Runtime.open(config, plays=[noop]) as other,
        open_session(session_options(config), "caller") as caller,
    ):
        cancel: Mapping[str, Callable[[str], Awaitable[Any]]] = {
            "same": same.cancel,
            "other": other.cancel,
            "sql": lambda run_id: _ask(caller, spec["schema"], run_id),
        }
        running = [await _begun(same) for _ in range(spec["held"])]
        for number, way in itertools.product(range(_WARMUP + spec["samples"]), _WAYS):
            await trio.sleep(spec["gap_s"] * random.uniform(0.5, 1.5))
            handle = running.pop(random.randrange(len(running)))
            asked = time.perf_counter()
            await cancel[way](handle.run_id)
            with trio.move_on_after(_WAIT_S):
                await _held.over.setdefault(handle.run_id, trio.Event()).wait()
            if number >= _WARMUP:
                seen = _held.seen.get(handle.run_id, asked + _WAIT_S)
                times[way].append((seen - asked) * 1000)
            running.append(await _begun(same))
        ended = [await same.status(run_id) for run_id in _held.seen]
        for handle in running:
            await handle.cancel()
    return {"times_ms": times, "cancelled": all(run.status == "cancelled" for run in ended)}


async def _ask(session: Session, schema: str, run_id: str) -> None:
    await session.execute(bundle.render(_SQL, schema), run_id)


async def _begun(rt: Runtime) -> Handle:
    handle = await rt.submit(held)
    with trio.move_on_after(_WAIT_S):
        await _held.began.setdefault(handle.run_id, trio.Event()).wait()
        return handle
    raise BenchFailed(f"run {handle.run_id} did not start within {_WAIT_S:g} s")


async def run(dsn: str, *, samples: int, held: int, gap_s: float) -> Report:
    """Samples of each way; median, 99th percentile and the longest."""
    async with fresh_schema(dsn) as place:
        spec = {**place.spec, "samples": samples, "held": held, "gap_s": gap_s}
        answer = await children.measured("cancel", spec)
    times: Mapping[str, list[float]] = answer["times_ms"]
    shares = {0.5: "p50", 0.99: "p99", 1.0: "longest"}
    return Report(
        scenario="cancel",
        figures=[
            Figure(
                f"{words}, {name}", quantile(times[way], share), "ms", most=MOST_MS if share == 0.99 else None
            )
            for way, words in _WAYS.items()
            for share, name in shares.items()
        ],
        rounds=[{way: quantile(values, share) for way, values in times.items()} for share in shares],
        checks={
            "every cancelled run is cancelled": answer["cancelled"],
            **{
                f"p99 {words} is within {MOST_MS:g} ms": quantile(times[way], 0.99) <= MOST_MS
                for way, words in _WAYS.items()
            },
        },
        settings={"samples": samples, "held": held, "gap_s": gap_s},
        notes=[
            "from the request until the play's own finally block, which a trio cancellation unwinds",
            f"{held} plays are held at any time; rounds are the 50th, 99th and 100th percentile",
        ],
    )
