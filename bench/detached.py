"""detached: what the gateway takes from runners in sandboxes, and how fast a run ends by their word.

Owns the runners: clients of this process that speak for attempts which a host in another one has really handed over,
over HTTP and with the tokens that it gave them. Sandboxes are only names here, so that nothing but the way through the
gateway and the database is measured.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import attrs
import httpx
import trio

from bench import children
from bench.figures import BenchFailed, Figure, Report, all_checks, median, quantile
from bench.place import Place, fresh_schema
from bench.plays import noop
from runtime import Context, Runtime, RuntimeConfig, play
from runtime.detached import GATEWAY, TOKEN
from runtime.sandboxes import Created, Inspection, SandboxRef, SandboxSpec
from sql import bundle

_WARMUP = 20
_TICK_S = 0.1
_LIMIT_S = 120.0
_LEDGER = "SELECT EXISTS (SELECT FROM @schema@.ledger_runs WHERE run_id = $1 AND status = 'completed')"
_COUNTS = """
SELECT count(*) FILTER (WHERE play = 'noop' AND finished_at IS NOT NULL) AS others,
       count(*) FILTER (WHERE play = 'boxed' AND status = 'completed') AS ended,
       (SELECT count(*) FROM @schema@.runners) AS detached
  FROM @schema@.runs
"""


# --- the host, in a process of its own ---------------------------------------------------------------------


@play("boxed", sandbox="named")
async def boxed(ctx: Context, data: Any) -> None:
    """Never runs here: its runner is a client of the scenario."""


@attrs.define
class _Named:
    """A provider whose sandboxes are names. What a runner is told goes to the scenario."""

    key: str = "bench"
    boxes: set[str] = attrs.field(factory=set)

    async def create(self, spec: SandboxSpec) -> Created:
        self.boxes.add(spec.sandbox)
        children.say({"run_id": spec.run_id, "url": spec.env[GATEWAY].split()[0], "token": spec.env[TOKEN]})
        return Created(spec.sandbox)

    async def inspect(self, ref: SandboxRef) -> Inspection:
        return Inspection("running" if ref.sandbox in self.boxes else "absent")

    async def delete(self, ref: SandboxRef) -> str:
        if ref.sandbox not in self.boxes:
            return "already_absent"
        self.boxes.remove(ref.sandbox)
        return "deleted"

    async def names(self) -> Sequence[str]:
        return sorted(self.boxes)


def hosted(spec: Mapping[str, Any]) -> None:
    """Child: a host that hands over ``runners`` attempts and lets ``load_per_s`` runs of its own pass."""
    trio.run(_hosted, spec)


async def _hosted(spec: Mapping[str, Any]) -> None:
    config = RuntimeConfig(dsn=spec["dsn"], schema=spec["schema"], health_port=0, heartbeat_timeout_s=600.0)
    async with (
        Runtime.open(config, plays=[boxed, noop], sandboxes={"named": _Named()}) as rt,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(children.until_parent_is_gone, nursery.cancel_scope)
        children.say({"host": rt.host_id})
        for number in range(spec["runners"]):
            await rt.submit(boxed, {"n": number})
        begun, submitted = trio.current_time(), 0
        while spec["load_per_s"]:
            await trio.sleep(_TICK_S)
            due = round((trio.current_time() - begun) * spec["load_per_s"]) - submitted
            submitted += due
            await rt.submit_many([(noop, {"n": number}) for number in range(due)])
        await trio.sleep_forever()


# --- runners -----------------------------------------------------------------------------------------------


@attrs.frozen
class _Runner:
    """Speaks for one attempt, on a connection of its own."""

    run_id: str
    client: httpx.AsyncClient

    async def say(self, verb: str, **body: Any) -> Mapping[str, Any]:
        """The answer; asked again while the host has not let go."""
        with trio.move_on_after(_LIMIT_S):
            while True:
                response = await self.client.post(f"/v1/runner/{verb}", content=json.dumps(body))
                if response.status_code == 200:
                    answer: Mapping[str, Any] = response.json()
                    return answer
                if response.status_code != 425:
                    raise BenchFailed(f"{verb}: HTTP {response.status_code}: {response.text[:200]}")
                await trio.sleep(0.02)
        raise BenchFailed(f"{verb}: no answer within {_LIMIT_S:g} s")


@asynccontextmanager
async def _runners(place: Place, count: int, load_per_s: float) -> AsyncIterator[list[_Runner]]:
    """A host with that many detached attempts, and their runners, each of which has begun."""
    spec = {**place.spec, "runners": count, "load_per_s": load_per_s}
    async with children.running("detached", spec) as child, AsyncExitStack() as stack:
        found = []
        # All that it says first: while nobody reads it, it stands still.
        for told in [await child.line() for _ in range(count)]:
            client = httpx.AsyncClient(
                base_url=told["url"],
                headers={"authorization": f"Bearer {told['token']}", "content-type": "application/json"},
                # One that is idle is dropped well before the server drops it.
                transport=httpx.AsyncHTTPTransport(verify=False, limits=httpx.Limits(keepalive_expiry=2.0)),
                timeout=30.0,
            )
            runner = _Runner(told["run_id"], await stack.enter_async_context(client))
            await runner.say("start")
            found.append(runner)
        yield found


async def _ended(place: Place, runners: Sequence[_Runner], gap_s: float) -> list[float]:
    """One runner after the other says that it is done: milliseconds until the ledger has it."""
    ledger = bundle.render(_LEDGER, place.schema)
    took_ms: list[float] = []
    for runner in runners:
        await trio.sleep(gap_s * random.uniform(0.5, 1.5))
        start = time.perf_counter()
        answer = await runner.say("result", outcome="completed", payload='{"output": null}')
        if answer["answer"] != "settled":
            raise BenchFailed(f"a result was {answer['answer']} instead of settled")
        while not await place.session.fetchval(ledger, runner.run_id):
            pass
        took_ms.append((time.perf_counter() - start) * 1000)
    return took_ms


async def _beaten(runners: Sequence[_Runner], seconds: float) -> list[float]:
    """Every runner is heard of once a second, all at moments of their own: milliseconds of each."""
    took_ms: list[float] = []

    async def beat(runner: _Runner) -> None:
        at = trio.current_time() + random.random()
        while at < ends_at:
            await trio.sleep_until(at)
            start = time.perf_counter()
            answer = await runner.say("heartbeat")
            if answer["standing"] != "ok":
                raise BenchFailed(f"a runner is {answer['standing']}")
            took_ms.append((time.perf_counter() - start) * 1000)
            at += 1.0

    ends_at = trio.current_time() + seconds
    async with trio.open_nursery() as nursery:
        for runner in runners:
            nursery.start_soon(beat, runner)
    return took_ms


# --- the scenario ------------------------------------------------------------------------------------------


async def run(
    dsn: str, *, samples: int, gap_s: float, runners: int, seconds: float, load_per_s: float, rounds: int
) -> Report:
    """Rounds of results on an idle host and of heartbeats without and with load; medians of their quantiles."""
    found = []
    for _ in range(rounds):
        ends = await _results(dsn, samples, gap_s)
        alone = await _heartbeats(dsn, runners, seconds, 0.0)
        beside = await _heartbeats(dsn, runners, seconds, load_per_s)
        found.append(
            {
                **_quantiles("ended", ends),
                **_quantiles("alone", alone["took_ms"]),
                **_quantiles("beside", beside["took_ms"]),
                "load_per_s": beside["load_per_s"],
                "checks": {
                    "every sample was taken": len(ends) == samples,
                    "every runner was heard of all the time": alone["whole"] and beside["whole"],
                },
            }
        )
    of = partial(median, found)
    words = f"heartbeat of {runners} runners, 1/s each"
    return Report(
        scenario="detached",
        figures=[
            Figure("result pushed → completed and in the ledger, p50", of("ended_p50_ms"), "ms"),
            Figure("result pushed → completed and in the ledger, p99", of("ended_p99_ms"), "ms", most=60),
            Figure(f"{words}, p50", of("alone_p50_ms"), "ms"),
            Figure(f"{words}, p99", of("alone_p99_ms"), "ms", most=50),
            Figure(f"{words}, beside load, p50", of("beside_p50_ms"), "ms"),
            Figure(f"{words}, beside load, p99", of("beside_p99_ms"), "ms", most=50),
            Figure("the load", of("load_per_s"), "runs/s"),
        ],
        rounds=found,
        checks=all_checks(found),
        settings={
            "samples": samples,
            "gap_s": gap_s,
            "runners": runners,
            "seconds": seconds,
            "load_per_s": load_per_s,
            "rounds": rounds,
        },
        notes=[
            "runners are HTTP clients of one process with a connection each, the host is another process: client, host "
            "and server share the machine",
            "pushed: from the request; in the ledger: a query on another connection sees it",
            "the load: no-op runs, submitted to and run by the same host, each delivered to the ledger",
        ],
    )


async def _results(dsn: str, samples: int, gap_s: float) -> list[float]:
    async with fresh_schema(dsn) as place, _runners(place, _WARMUP + samples, 0.0) as runners:
        took_ms = await _ended(place, runners, gap_s)
        row = await place.fetchrow(_COUNTS)
        if (row["ended"], row["detached"]) != (len(runners), 0):
            raise BenchFailed("a run did not end")
    return took_ms[_WARMUP:]


async def _heartbeats(dsn: str, count: int, seconds: float, load_per_s: float) -> dict[str, Any]:
    async with fresh_schema(dsn) as place, _runners(place, count, load_per_s) as runners:
        await _beaten(runners, min(2.0, seconds))
        before, start = await place.fetchrow(_COUNTS), time.perf_counter()
        took_ms = await _beaten(runners, seconds)
        after = await place.fetchrow(_COUNTS)
        load = (after["others"] - before["others"]) / (time.perf_counter() - start)
    # The first beat of each comes within a second, and then one in every second.
    whole = len(took_ms) >= count * (int(seconds) - 1) and after["detached"] == count
    return {"took_ms": took_ms, "load_per_s": load, "whole": whole}


def _quantiles(name: str, took_ms: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{share * 100:.0f}_ms": quantile(took_ms, share) for share in (0.5, 0.99)}
