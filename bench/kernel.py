"""kernel: the same functions in the same batches, straight from asyncpg on plain asyncio.

Owns the driver that the host is held against: one connection each for admission, claim, settle and delivery, all
concurrent, and nothing of a host between them: no actors, no plays, no checks of a payload. Run ids and payloads are
made before the clock starts, so that what is left is the database and its driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import asyncpg
import attrs

from bench import children
from bench.figures import Figure, Report, all_checks, median
from bench.place import at_rest_query, fresh_schema
from runtime.ids import new_run_id
from sql.calls import call, new_token
from sql.dsn import known_to_driver, tls_mode

# As the host's actors have them.
ADMIT = CLAIM = SETTLE = 500
TURN = 400
PREFIX = 100
LEASE_S = 60.0
_OLDEST_EVERY = 4
_FRONT_EVERY = 8
_TURN_PACE_S = 0.003
_CLAIM_PACE_S = 0.010
_BUSY_S = 0.002
_STARTED_S = 0.005
_LIMIT_S = 300.0


@attrs.define(slots=True)
class _Batch:
    """One call of ``admit_runs``, made beforehand."""

    run_ids: list[str]
    inputs: list[str]
    tokens: list[int]
    claim: list[bool]


@attrs.define(slots=True)
class _Ending:
    """Attempts that were claimed together and end together."""

    run_ids: list[str]
    attempts: list[int]
    tokens: list[int]


def batches(runs: int, inline: float) -> list[_Batch]:
    """``runs`` no-op runs; the share ``inline`` of them, evenly spread, is to be admitted as already claimed."""
    claim = [int((number + 1) * inline) > int(number * inline) for number in range(runs)]
    return [
        _Batch(
            [new_run_id() for _ in range(start, min(start + ADMIT, runs))],
            [f'{{"n":{number}}}' for number in range(start, min(start + ADMIT, runs))],
            [new_token() for _ in range(start, min(start + ADMIT, runs))],
            claim[start : start + ADMIT],
        )
        for start in range(0, runs, ADMIT)
    ]


class Kernel:
    """The four loops. They meet through events and a queue, as the actors do through hints and mailboxes."""

    def __init__(self, schema: str, bucket: int) -> None:
        self.schema = schema
        self.bucket = bucket
        self.owner = secrets.randbits(62) + 1
        self.settled = 0
        self.due = asyncio.Event()
        self.ended = asyncio.Event()
        self.lanes = asyncio.Event()
        self._endings: deque[_Ending] = deque()

    async def admit(self, conn: Any, prepared: Sequence[_Batch]) -> None:
        """Admit all batches, one call at a time."""
        statement = call(self.schema, "admit_runs", 19)
        for batch in prepared:
            size = len(batch.run_ids)
            nothing = [None] * size
            rows = await conn.fetch(
                statement, batch.run_ids, [False] * size, ["noop"] * size, [self.bucket] * size, [0] * size,
                nothing, nothing, nothing, nothing, nothing, batch.inputs, nothing, batch.tokens, batch.claim,
                self.owner, LEASE_S, None, None, False,
            )  # fmt: skip
            inline = [row["ord"] - 1 for row in rows if row["claimed"]]
            if inline:
                self._end(
                    [batch.run_ids[i] for i in inline], [1] * len(inline), [batch.tokens[i] for i in inline]
                )
            if len(inline) < size:
                self.due.set()
                self.lanes.set()

    async def claim(self, conn: Any) -> None:
        """Claim what is due, for ever; at once again while claims come back full."""
        statement = call(self.schema, "claim_runs", 10)
        low_water, turn = None, 0
        while True:
            await self.due.wait()
            self.due.clear()
            full = True
            while full:
                turn += 1
                token = new_token()
                rows = await conn.fetch(
                    statement, self.owner, token, [self.bucket], [0], ["noop"], CLAIM, LEASE_S,
                    turn % _OLDEST_EVERY == 0, None if turn % _FRONT_EVERY == 0 else low_water, [],
                )  # fmt: skip
                last = rows.pop()
                next_due_s, low_water = last["next_due_s"], last["was_due_at"]
                if rows:
                    self._end(
                        [row["run_id"] for row in rows], [row["attempt"] for row in rows], [token] * len(rows)
                    )
                full = len(rows) == CLAIM
                if not full and next_due_s is not None and next_due_s <= 0:
                    await asyncio.sleep(_CLAIM_PACE_S)
                    full = True

    def _end(self, run_ids: list[str], attempts: list[int], tokens: list[int]) -> None:
        self._endings.append(_Ending(run_ids, attempts, tokens))
        self.ended.set()
        # First facts wait a moment for their successors, as in the host's outbox.
        asyncio.get_running_loop().call_later(_STARTED_S, self.lanes.set)

    async def settle(self, conn: Any) -> None:
        """Complete what was claimed, for ever."""
        statement = call(self.schema, "settle_attempts", 6)
        while True:
            while not self._endings:
                self.ended.clear()
                await self.ended.wait()
            batch = self._endings.popleft()
            while self._endings and len(batch.run_ids) + len(self._endings[0].run_ids) <= SETTLE:
                more = self._endings.popleft()
                batch.run_ids += more.run_ids
                batch.attempts += more.attempts
                batch.tokens += more.tokens
            size = len(batch.run_ids)
            rows = await conn.fetch(
                statement, batch.run_ids, batch.attempts, batch.tokens, ["completed"] * size,
                ['{"output":null}'] * size, [0.0] * size,
            )  # fmt: skip
            busy = [row["ord"] - 1 for row in rows if row["answer"] != "done"]
            self.settled += size - len(busy)
            self.lanes.set()
            if busy:
                # Its row is being delivered at this moment: once more, with what comes.
                await asyncio.sleep(_BUSY_S)
                self._end(
                    *([column[i] for i in busy] for column in (batch.run_ids, batch.attempts, batch.tokens))
                )

    async def deliver(self, conn: Any) -> None:
        """Deliver lifecycle lanes to the ledger in the database, for ever."""
        statement = call(self.schema, "lifecycle_deliver", 4)
        turn = 0
        while True:
            await self.lanes.wait()
            self.lanes.clear()
            more = True
            while more:
                turn += 1
                paced = time.perf_counter() + _TURN_PACE_S
                row = await conn.fetchrow(statement, [""], TURN, PREFIX, turn % _OLDEST_EVERY == 0)
                if row["blocked"]:
                    raise RuntimeError(f"{row['blocked']} lanes were blocked")
                more = row["next_due_s"] is not None and row["next_due_s"] <= 0
                if row["lanes"] < TURN:
                    await asyncio.sleep(max(0.0, paced - time.perf_counter()))

    async def until_rest(self, conn: Any, every_s: float = 0.005) -> float:
        """Wait until nothing is left to do; ``time.perf_counter()`` of the answer that said so."""
        query = at_rest_query(self.schema)
        await conn.execute("SET enable_seqscan = off")
        while not await conn.fetchval(query):  # noqa: ASYNC110 - the database is asked
            await asyncio.sleep(every_s)
        return time.perf_counter()


@contextlib.asynccontextmanager
async def _connections(spec: Mapping[str, Any], count: int) -> AsyncIterator[list[Any]]:
    dsn, _ = known_to_driver(spec["dsn"])
    settings = {
        "application_name": "bench kernel",
        "jit": "off",
        "default_transaction_isolation": "read committed",
    }
    opened: list[Any] = []
    try:
        for _ in range(count):
            opened.append(await asyncpg.connect(dsn, ssl=tls_mode(dsn), server_settings=settings, timeout=10))
        yield opened
    finally:
        for conn in opened:
            await conn.close(timeout=5)


async def _alongside(work: Coroutine[Any, Any, Any], loops: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` to its end beside loops that never end by themselves; an error of a loop ends it."""
    tasks = [asyncio.ensure_future(one) for one in (work, *loops)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _bucket(conn: Any, schema: str) -> int:
    return int(await conn.fetchval(f'SELECT "{schema}".bucket_of($1, NULL, NULL, 0)', "noop"))


def _plain_asyncio() -> None:
    if "trio_asyncio" in sys.modules:
        raise RuntimeError("trio_asyncio is imported: this would not be plain asyncio")


# --- the children ------------------------------------------------------------------------------------


def lifecycle(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: ``runs`` whole lifecycles, all loops concurrent, after ``warmup`` others."""
    _plain_asyncio()
    return asyncio.run(asyncio.wait_for(_lifecycle(spec), _LIMIT_S))


async def _lifecycle(spec: Mapping[str, Any]) -> dict[str, Any]:
    async with _connections(spec, 5) as (admit, claim, settle, deliver, monitor):
        kernel = Kernel(spec["schema"], await _bucket(monitor, spec["schema"]))
        measured: dict[str, float] = {}

        async def work() -> None:
            for size in (spec["warmup"], spec["runs"]):
                prepared = batches(size, spec["inline"])
                cpu, start = time.process_time(), time.perf_counter()
                await kernel.admit(admit, prepared)
                end = await kernel.until_rest(monitor)
                measured["seconds"] = end - start
                measured["cpu_s"] = time.process_time() - cpu

        await _alongside(work(), [kernel.claim(claim), kernel.settle(settle), kernel.deliver(deliver)])
    return {
        "runs_per_s": spec["runs"] / measured["seconds"],
        "cpu_us_per_run": measured["cpu_s"] / spec["runs"] * 1e6,
    }


def stages(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: each stage alone, one after the other, on the same ``runs``."""
    _plain_asyncio()
    return asyncio.run(asyncio.wait_for(_stages(spec), _LIMIT_S))


async def _stages(spec: Mapping[str, Any]) -> dict[str, Any]:
    async with _connections(spec, 4) as (admit, claim, settle, deliver):
        kernel = Kernel(spec["schema"], await _bucket(admit, spec["schema"]))
        runs = spec["runs"]
        rates: dict[str, float] = {}

        async def until_settled() -> None:
            while kernel.settled < runs:  # noqa: ASYNC110
                await asyncio.sleep(0.002)

        for name, stage in _stage(kernel, runs, until_settled, admit, claim, settle, deliver):
            start = time.perf_counter()
            await stage
            rates[name] = runs / (time.perf_counter() - start)
    return rates


def _stage(
    kernel: Kernel, runs: int, until_settled: Any, admit: Any, claim: Any, settle: Any, deliver: Any
) -> Iterator[tuple[str, Coroutine[Any, Any, Any]]]:
    prepared = batches(runs, 0.0)
    yield "admitted_per_s", kernel.admit(admit, prepared)
    yield "settled_per_s", _alongside(until_settled(), [kernel.claim(claim), kernel.settle(settle)])
    yield "delivered_per_s", _alongside(kernel.until_rest(admit), [kernel.deliver(deliver)])


# --- the scenario ------------------------------------------------------------------------------------


async def run(dsn: str, *, runs: int, rounds: int, inline: float, warmup: int = 1_000) -> Report:
    """Each stage alone, then whole lifecycles with all stages concurrent; the median of the rounds."""
    found = []
    for _ in range(rounds):
        async with fresh_schema(dsn) as place:
            alone = await children.measured("stages", {**place.spec, "runs": runs})
            stages_left = await place.audit(runs)
        whole = await one_round(dsn, runs=runs, inline=inline, warmup=warmup)
        checks = {name: held and stages_left.checks[name] for name, held in whole["checks"].items()}
        found.append({**alone, **whole, "checks": checks})
    return Report(
        scenario="kernel",
        figures=[
            Figure("admission alone", median(found, "admitted_per_s"), "runs/s"),
            Figure("claim + settle alone", median(found, "settled_per_s"), "runs/s"),
            Figure("delivery alone", median(found, "delivered_per_s"), "runs/s"),
            Figure("whole lifecycles", median(found, "runs_per_s"), "runs/s"),
            Figure("client CPU", median(found, "cpu_us_per_run"), "µs/run"),
        ],
        rounds=found,
        checks=all_checks(found),
        settings={"runs": runs, "rounds": rounds, "inline": inline},
        notes=[
            f"batches: admission {ADMIT}, claim {CLAIM}, settle {SETTLE}, delivery {TURN} lanes per turn",
            "in whole lifecycles the share `inline` is admitted as already claimed, the rest goes through claim",
        ],
    )


async def one_round(dsn: str, *, runs: int, inline: float, warmup: int) -> dict[str, Any]:
    """One measurement of whole lifecycles on a fresh schema."""
    async with fresh_schema(dsn) as place:
        await place.settle_disk()
        answer = await children.measured(
            "kernel", {**place.spec, "runs": runs, "warmup": warmup, "inline": inline}
        )
        left = await place.audit(runs + warmup)
    return {**answer, "checks": left.checks, "inline": left.inline, "updates_per_run": left.updates_per_run}
