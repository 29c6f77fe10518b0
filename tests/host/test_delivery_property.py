"""Whatever happens on the way, the ledger gets every fact once and in order.

Producers, hosts, a receiver and the network between them are real: processes, loopback HTTP, SIGKILL. A schedule of
harms is drawn from a seed, which every failure names.
"""

from __future__ import annotations

import json
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

import attrs
import pytest
import trio

from runtime import Runtime
from tests.support.hosts import QUICK, Hosts, MortalHost, eventually
from tests.support.proxies import FaultyProxy, faulty_proxy
from tests.support.receiving import SECRET, ReceiverProcess, drop_ledger

# Short leases, so that what a dead or frozen host held comes back within the test.
BUDGETS: dict[str, Any] = {
    "lease_s": 2.4,
    "renew_every_s": 0.6,
    "lane_lease_s": 1.5,
    "delivery_timeout_s": 1.0,
    "lane_actors": 2,
    "crash_cap": 50,
    "log_level": "ERROR",
}


@attrs.define
class World:
    """Everything that a schedule may harm."""

    chance: random.Random
    client: Runtime
    receiver: ReceiverProcess
    proxy: FaultyProxy
    hosts: list[MortalHost]
    run_ids: list[str] = attrs.field(factory=list)

    async def produce(self, until: float) -> None:
        """Runs, in bursts and one by one; now and then one is cancelled."""
        while trio.current_time() < until:
            burst = self.chance.choice((1, 1, 5, 20))
            numbers = [self.chance.randrange(100) for _ in range(burst)]
            handles = await self.client.submit_many([("chatty", number) for number in numbers])
            self.run_ids += [handle.run_id for handle in handles]
            if self.chance.random() < 0.3:
                await self.client.cancel(self.chance.choice(self.run_ids))
            await trio.sleep(self.chance.uniform(0.0, 0.3))

    async def harm(self, until: float) -> None:
        """One harm after the other, several at once where they last; each kind once before any comes again."""
        kinds = [
            self._kill_host,
            self._kill_receiver,
            self._freeze_host,
            self._freeze_receiver,
            self._lossy,
            self._slow,
            self._refuse,
        ]
        deck: list[Callable[[], Awaitable[None]]] = []
        async with trio.open_nursery() as nursery:
            while trio.current_time() < until:
                deck = deck or self.chance.sample(kinds, len(kinds))
                nursery.start_soon(deck.pop())
                await trio.sleep(self.chance.uniform(0.1, 1.0))

    def heal(self) -> None:
        """Nothing is in the way any more; each harm has started again what it has killed."""
        self.proxy.lost_answers = self.proxy.lost_requests = self.proxy.slow = 0.0
        self.proxy.refuses = False

    async def _kill_host(self) -> None:
        host = self.chance.choice(self.hosts)
        async with host.busy:
            host.kill()
            await trio.sleep(self.chance.uniform(0.0, 0.5))
            await host.start()

    async def _kill_receiver(self) -> None:
        async with self.receiver.busy:
            self.receiver.kill()
            await trio.sleep(self.chance.uniform(0.0, 0.5))
            await self.receiver.start()

    async def _freeze_host(self) -> None:
        """Longer than its leases: what it then still sends is not its own any more."""
        host = self.chance.choice(self.hosts)
        async with host.busy:
            host.signal(signal.SIGSTOP)
            await trio.sleep(self.chance.uniform(0.5, 3.0))
            host.signal(signal.SIGCONT)

    async def _freeze_receiver(self) -> None:
        async with self.receiver.busy:
            self.receiver.signal(signal.SIGSTOP)
            await trio.sleep(self.chance.uniform(0.3, 2.0))
            self.receiver.signal(signal.SIGCONT)

    async def _lossy(self) -> None:
        self.proxy.lost_answers, self.proxy.lost_requests = 0.4, 0.1
        await trio.sleep(self.chance.uniform(0.5, 2.0))
        self.proxy.lost_answers = self.proxy.lost_requests = 0.0

    async def _slow(self) -> None:
        self.proxy.slow, self.proxy.slow_s = 0.5, self.chance.uniform(0.1, 2.0)
        await trio.sleep(self.chance.uniform(0.5, 2.0))
        self.proxy.slow = 0.0

    async def _refuse(self) -> None:
        self.proxy.refuses = True
        await trio.sleep(self.chance.uniform(0.1, 1.0))
        self.proxy.refuses = False


@pytest.fixture(autouse=True)
def ledger_schema(dsn: str, schema: str) -> Iterator[None]:
    yield
    drop_ledger(dsn, schema)


async def whole(hosts: Hosts, run_ids: list[str]) -> bool:
    """Whether every run has ended and every fact is acknowledged. A blocked lane fails at once."""
    blocked = await hosts.ask(
        """SELECT run_id, lane_error FROM @.runs WHERE lane_error IS NOT NULL
           UNION ALL SELECT run_id, lane_error FROM @.lanes WHERE lane_error IS NOT NULL"""
    )
    assert not blocked, blocked
    left = await hosts.value(
        """SELECT (SELECT count(*) FROM @.runs WHERE acked_seq < last_seq OR finished_at IS NULL)
                + (SELECT count(*) FROM @.lanes WHERE acked_seq < last_seq)"""
    )
    return bool(left == 0)


async def check_ledger(hosts: Hosts, run_ids: list[str]) -> None:
    """The ledger is the log: each fact once, in order, as it was; and its read model is what is now."""
    ledger = f"l{hosts.schema}"
    assert sorted(row[0] for row in await hosts.ask("SELECT run_id FROM @.runs")) == sorted(run_ids)
    for what, query in {
        "a fact is lost, doubled or changed": f"""
            SELECT coalesce(a.run_id, b.run_id), coalesce(a.lane, b.lane), coalesce(a.seq, b.seq)
              FROM @.facts a FULL JOIN {ledger}.facts b
                ON (a.run_id, a.lane, a.seq, a.type, a.created_at, a.payload)
                 = (b.run_id, b.lane, b.seq, b.type, b.created_at, b.payload)
             WHERE a.run_id IS NULL OR b.run_id IS NULL""",
        "facts were applied out of order": f"""
            SELECT * FROM (SELECT run_id, lane, seq, received_at,
                                  lag(received_at) OVER (PARTITION BY run_id, lane ORDER BY seq) AS before
                             FROM {ledger}.facts) f WHERE before > received_at""",
        "a cursor is not at the end of its lane": f"""
            SELECT c.run_id, c.lane, c.applied_seq FROM {ledger}.cursors c
             WHERE c.applied_seq <> (SELECT max(seq) FROM @.facts f WHERE f.run_id = c.run_id AND f.lane = c.lane)
                OR c.skipped <> 0 OR c.conflicts <> 0""",
        "the read model is not what is now": f"""
            SELECT r.run_id, r.status, l.status FROM @.runs r LEFT JOIN {ledger}.runs l USING (run_id)
             WHERE (r.status, r.play, r.attempt) IS DISTINCT FROM (l.status, l.play, l.attempts)
                OR l.finished_at IS NULL""",
    }.items():
        found = await hosts.ask(query)
        assert not found, (what, found[:5])


async def survive(hosts: Hosts, seed: int, seconds: float, *, drain_s: float) -> World:
    """Run a schedule of harms for that long, heal everything, and wait until the ledger has it all."""
    chance = random.Random(seed)
    async with AsyncExitStack() as stack:
        killed = stack.enter_context(ExitStack())
        proxy = await stack.enter_async_context(faulty_proxy(chance))
        origin = f"http://127.0.0.1:{proxy.own_port}"
        async with hosts.open():
            pass  # the schema, in which the receiver proves leases
        receiver = ReceiverProcess(hosts.dsn, hosts.schema, origin=origin)
        settings = {**QUICK, **BUDGETS, "dsn": hosts.dsn, "schema": hosts.schema, "notify": hosts.notify}
        command = [sys.executable, "-m", "tests.support.delivering", json.dumps(settings), origin, SECRET]
        world_hosts = [MortalHost(command), MortalHost(command)]
        processes: list[MortalHost | ReceiverProcess] = [receiver, *world_hosts]
        async with trio.open_nursery() as nursery:
            for one in processes:
                killed.callback(one.kill)
                nursery.start_soon(one.start)
        proxy.port = receiver.port
        client = await stack.enter_async_context(hosts.open())
        world = World(chance, client, receiver, proxy, world_hosts)
        until = trio.current_time() + seconds
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.produce, until)
            nursery.start_soon(world.harm, until)
        world.heal()
        await eventually(partial(whole, hosts, world.run_ids), within_s=drain_s, every_s=0.1)
        await check_ledger(hosts, world.run_ids)
        return world


async def told(hosts: Hosts, seconds: float, drain_s: float) -> None:
    seed = random.SystemRandom().randrange(2**32)
    try:
        world = await survive(hosts, seed, seconds, drain_s=drain_s)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    assert world.run_ids
    await hosts.check(ledger=False)


async def test_every_fact_reaches_the_ledger_once_and_in_order(hosts: Hosts) -> None:
    await told(hosts, 6.0, 40.0)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("turn", range(6))
async def test_every_fact_reaches_the_ledger_for_a_long_time(hosts: Hosts, turn: int) -> None:
    await told(hosts, 45.0, 120.0)
