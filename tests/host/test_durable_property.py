"""Whichever hosts are killed, and whenever: what a step did is recorded, and what it reported is never done again.

Hosts are processes of their own that are killed at random and started again, while journeys of fifty steps with sleeps,
events and children pass through. Their steps leave marks in a table of the test's own, of which runlane knows nothing;
at the end receipts, marks, outputs and facts must tell the same story.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any

import attrs
import pytest
import trio

from runtime import RunCancelled
from runtime.client import Client
from tests.support import servers
from tests.support.hosting import environment
from tests.support.hosts import QUICK, Hosts, MortalHost
from tests.support.journeys import LEG_STEPS, STEPS, marks_schema

BUDGETS: dict[str, Any] = {
    "lease_s": 2.4,
    "renew_every_s": 0.6,
    "lane_lease_s": 1.5,
    "delivery_timeout_s": 1.0,
    "crash_cap": 50,
    "log_level": "ERROR",
}

_TABLE = """
CREATE TABLE % (
    id       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempt  integer     NOT NULL,
    output   bigint      NOT NULL,
    run_id   text COLLATE "C" NOT NULL,
    key      text COLLATE "C" NOT NULL,
    what     text        NOT NULL CHECK (what IN ('begun', 'done'))
)"""

# What must not be found when all is over: `@.` is the schema under test, `%` the table of marks.
_VIOLATIONS = {
    "a step is recorded as completed and has not done its work, or another one": """
        SELECT c.run_id, c.key FROM @.receipts c
         WHERE c.state = 'completed'
           AND NOT EXISTS (SELECT 1 FROM % b JOIN % d USING (run_id, key, attempt, output)
                            WHERE (b.run_id, b.key, b.attempt) = (c.run_id, c.key, c.attempt)
                              AND b.what = 'begun' AND d.what = 'done' AND b.id < d.id
                              AND to_jsonb(output) = c.output AND d.at <= c.finished_at)""",
    "a step that reported completion ran again": """
        SELECT c.run_id, c.key, c.attempt, c.finished_at, b.attempt, b.at FROM @.receipts c JOIN % b USING (run_id, key)
         WHERE c.state = 'completed' AND b.what = 'begun' AND (b.attempt > c.attempt OR b.at > c.finished_at)""",
    "a step ran twice in one attempt": """
        SELECT run_id, key, attempt FROM % GROUP BY run_id, key, attempt, what HAVING count(*) > 1""",
    "a step ran without a receipt, or before it had one, or in an attempt that there never was": """
        SELECT m.run_id, m.key FROM % m LEFT JOIN @.receipts c USING (run_id, key) LEFT JOIN @.runs r USING (run_id)
         WHERE r.run_id IS NULL OR m.attempt NOT BETWEEN 1 AND r.attempt OR c.key IS NULL OR m.at < c.created_at""",
    "a run has not ended, or not once, or has failed": """
        SELECT r.run_id, r.status, count(f.seq)
          FROM @.runs r LEFT JOIN @.facts f ON f.run_id = r.run_id AND f.lane = 0
                                           AND f.type IN ('run.completed', 'run.failed', 'run.cancelled')
         GROUP BY r.run_id
        HAVING r.status NOT IN ('completed', 'cancelled') OR count(f.seq) <> 1""",
    "a completed run has not all of its steps": f"""
        SELECT r.run_id, count(*) FROM @.runs r LEFT JOIN @.receipts c USING (run_id)
         WHERE r.status = 'completed'
         GROUP BY r.run_id
        HAVING count(c.key) <> CASE r.play WHEN 'journey' THEN {STEPS} ELSE {LEG_STEPS} END
            OR NOT bool_and(c.state = 'completed')""",
    "a completed run was given something else than its steps have recorded": """
        SELECT r.run_id FROM @.runs r JOIN @.facts f ON f.run_id = r.run_id AND f.lane = 0 AND f.type = 'run.completed'
         WHERE (SELECT jsonb_object_agg(c.key, c.output) FROM @.receipts c WHERE c.run_id = r.run_id)
               IS DISTINCT FROM CASE r.play WHEN 'journey' THEN f.payload -> 'output' -> 'given'
                                            ELSE f.payload -> 'output' END""",
    "a completed parent has not its two children, both completed, and what they gave": """
        SELECT p.run_id FROM @.runs p JOIN @.facts f ON f.run_id = p.run_id AND f.lane = 0 AND f.type = 'run.completed'
          LEFT JOIN @.runs k ON k.parent_id = p.run_id
          LEFT JOIN @.facts g ON g.run_id = k.run_id AND g.lane = 0 AND g.type = 'run.completed'
         WHERE p.play = 'journey'
         GROUP BY p.run_id, f.payload
        HAVING count(k.run_id) <> 2 OR count(g.run_id) <> 2
            OR NOT f.payload -> 'output' -> 'legs' @> jsonb_agg(g.payload -> 'output')""",
    "a child of a cancelled parent was left running, or somebody's child never was": """
        SELECT k.run_id FROM @.runs k LEFT JOIN @.runs p ON p.run_id = k.parent_id
         WHERE (k.play = 'leg') <> (p.run_id IS NOT NULL) OR k.finished_at IS NULL""",
    "a completed run did not take an event that it was sent": """
        SELECT r.run_id FROM @.runs r LEFT JOIN @.events e USING (run_id)
         WHERE r.status = 'completed' AND r.play = 'journey'
         GROUP BY r.run_id HAVING count(e.wait_key) <> 2 OR count(*) <> 2""",
}

_FIGURES = """
SELECT (SELECT count(*) FROM @.runs) AS runs,
       (SELECT count(*) FROM @.runs WHERE status = 'completed') AS completed,
       (SELECT count(*) FROM @.runs WHERE status = 'cancelled') AS cancelled,
       (SELECT count(*) FROM @.attempts) AS attempts,
       (SELECT count(*) FROM @.attempts WHERE outcome = 'expired') AS expired,
       (SELECT count(*) FROM @.attempts WHERE outcome = 'parked') AS parked,
       (SELECT count(*) FROM @.attempts WHERE outcome = 'retried') AS retried,
       (SELECT count(*) FROM @.receipts WHERE state = 'completed') AS steps,
       (SELECT count(*) - count(DISTINCT (run_id, key)) FROM % WHERE what = 'begun') AS repeats
"""


@attrs.define
class Road:
    """The hosts, who kills them, and who travels."""

    client: Client
    hosts: list[MortalHost]
    seed: int
    kills: int = 0
    journeys: int = 0

    async def kill(self, number: int, until: float) -> None:
        """Kill a host, start it again, and so on; the last one stays."""
        host, chance = self.hosts[number], random.Random(f"{self.seed} host {number}")
        while trio.current_time() + (delay_s := chance.uniform(0.5, 4.0)) < until:
            await trio.sleep(delay_s)
            host.kill()
            self.kills += 1
            await trio.sleep(chance.uniform(0.0, 0.5))
            await host.start()

    async def travel(self, until: float) -> None:
        """One journey after the other."""
        while trio.current_time() < until:
            self.journeys += 1
            await self.journey(random.Random(f"{self.seed} journey {self.journeys}"))

    async def journey(self, chance: random.Random) -> None:
        """One run to its end: the first event is there before its wait, the other comes whenever it does."""
        handle = await self.client.submit("journey", {"stumbles": chance.random() < 0.2})
        sent = {name: chance.randrange(1000) for name in ("early", "late")}
        output: dict[str, int] | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.send, handle.run_id, "early", sent["early"], 0.0)
            nursery.start_soon(self.send, handle.run_id, "late", sent["late"], chance.uniform(0.0, 6.0))
            if chance.random() < 0.1:
                nursery.start_soon(self.cancel, handle.run_id, chance.uniform(0.0, 6.0))
            with suppress(RunCancelled):
                output = await handle.result()
            nursery.cancel_scope.cancel()
        assert output is None or {name: output[name] for name in sent} == sent

    async def send(self, run_id: str, name: str, payload: int, delay_s: float) -> None:
        """Twice, as somebody whose first answer was lost: it counts once."""
        await trio.sleep(delay_s)
        for _ in range(2):
            await self.client.send_event(run_id, name, payload, event_id=name)

    async def cancel(self, run_id: str, delay_s: float) -> None:
        await trio.sleep(delay_s)
        await self.client.cancel(run_id, reason="changed plans")


@pytest.fixture
def marks(dsn: str, schema: str) -> Iterator[str]:
    """The table of marks."""
    name = marks_schema(schema)
    table = f"{name}.marks"
    servers.ask(
        dsn, f"CREATE SCHEMA {name}", _TABLE.replace("%", table), f"CREATE INDEX ON {table} (run_id, key)"
    )
    yield table
    servers.ask(dsn, f"DROP SCHEMA {name} CASCADE")


async def survive(
    hosts: Hosts, marks: str, *, seed: int, seconds: float, host_count: int, travellers: int
) -> dict[str, int]:
    """Let hosts die and runs pass for that long, wait for the last, and check everything. What there was."""
    settings = {**QUICK, **BUDGETS, "dsn": hosts.dsn, "schema": hosts.schema, "notify": hosts.notify}
    command = [sys.executable, "-m", "runtime", "serve", "--json", "--stop-with-stdin"]
    command += ["--plays", "tests.support.journeys"]
    variables = environment(**{name: str(value) for name, value in settings.items()})
    async with AsyncExitStack() as stack:
        killed = stack.enter_context(ExitStack())
        async with hosts.open():
            pass  # the schema
        processes = [MortalHost(command, variables) for _ in range(host_count)]
        async with trio.open_nursery() as nursery:
            for process in processes:
                killed.callback(process.kill)
                nursery.start_soon(process.start)
        client = await stack.enter_async_context(Client.open(hosts.config()))
        road = Road(client, processes, seed)
        until = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            for number in range(host_count):
                nursery.start_soon(road.kill, number, until)
            for _ in range(travellers):
                nursery.start_soon(road.travel, until)
        run_ids = [row[0] for row in await hosts.ask("SELECT run_id FROM @.runs")]
        await hosts.check(run_ids, within_s=60.0)
    for what, query in _VIOLATIONS.items():
        found = await hosts.ask(query.replace("%", marks))
        assert not found, (what, len(found), found[:5])
    (figures,) = await hosts.ask(_FIGURES.replace("%", marks))
    return {"journeys": road.journeys, "kills": road.kills, **figures}


async def told(hosts: Hosts, marks: str, *, seed: int, **how: Any) -> dict[str, int]:
    print(f"seed {seed}")
    try:
        figures = await survive(hosts, marks, seed=seed, **how)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    print(json.dumps(figures))
    assert all(figures[name] for name in ("completed", "kills", "expired")), figures
    return figures


async def test_no_step_that_reported_completion_runs_again(hosts: Hosts, marks: str) -> None:
    await told(hosts, marks, seed=4, seconds=8.0, host_count=2, travellers=6)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_no_step_that_reported_completion_runs_again_for_two_minutes(hosts: Hosts, marks: str) -> None:
    seed = random.SystemRandom().randrange(2**32)
    figures = await told(hosts, marks, seed=seed, seconds=120.0, host_count=3, travellers=20)
    assert all(figures[name] for name in ("repeats", "cancelled", "parked", "retried")), figures
