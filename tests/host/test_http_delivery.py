"""Hosts that deliver over HTTP: budgets that end, operators that skip, terminals that go to another receiver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import trio

from runtime import Context, HttpLedger, InputRefused, Runtime, play
from sql import journal
from sql.connection import SessionOptions
from sql.types import Lane
from tests.support import servers
from tests.support.hosts import Hosts, eventually
from tests.support.proxies import actor_proxy
from tests.support.receivers import Answer, Asked, Said, results, scripted_receiver
from tests.support.receiving import SECRET, drop_ledger, open_receiver


@play("talks")
async def talks(ctx: Context, data: int) -> int:
    for number in range(data):
        ctx.progress(number, data)
    return data


@pytest.fixture(autouse=True)
def ledger_schemas(dsn: str, schema: str) -> Iterator[None]:
    yield
    drop_ledger(dsn, schema)
    drop_ledger(dsn, f"l{schema}")


async def rows(hosts: Hosts, query: str, *, ledger: str = "l") -> list[Any]:
    text = query.replace("@.", f"{ledger}{hosts.schema}.")
    return [tuple(row) for row in await trio.to_thread.run_sync(servers.ask, hosts.dsn, text)]


async def delivered(hosts: Hosts) -> None:
    async def whole() -> bool:
        return not await hosts.value("SELECT count(*) FROM @.runs WHERE acked_seq < last_seq")

    await eventually(whole, within_s=15.0, every_s=0.03)


# --- a terminal with a receiver of its own (M-5 to M-7, G-13, G-20) ------------------------------------------


async def test_a_terminal_reaches_a_receiver_that_has_nothing_of_its_run(hosts: Hosts) -> None:
    async with hosts.open(talks):
        pass
    prove = SessionOptions(hosts.dsn, hosts.schema)
    async with (
        open_receiver(hosts.dsn, hosts.schema, prove_in=prove) as first,
        open_receiver(hosts.dsn, hosts.schema, prove_in=prove, ledger=f"ll{hosts.schema}") as second,
        Runtime.open(
            hosts.config(),
            plays=[talks],
            ledger=HttpLedger(first.origin, secret=SECRET),
            receivers={"later": HttpLedger(second.origin, secret=SECRET)},
        ) as rt,
    ):
        handle = await rt.submit(talks, 2, terminal_receiver=second.origin)
        await handle.result(timeout=10)
        await delivered(hosts)
        types = [fact.type for fact in await rt.facts(handle.run_id)]
        query = "SELECT type FROM @.facts ORDER BY seq"
        assert [row[0] for row in await rows(hosts, query)] == types[:-1]
        assert [row[0] for row in await rows(hosts, query, ledger="ll")] == ["run.completed"]
        cursor = "SELECT applied_seq, skipped, conflicts FROM @.cursors"
        assert await rows(hosts, cursor) == [(len(types) - 1, 0, 0)]
        assert await rows(hosts, cursor, ledger="ll") == [(len(types), len(types) - 1, 0)]


async def test_hosts_deliver_where_the_settings_say(hosts: Hosts) -> None:
    async with hosts.open(talks):
        pass
    prove = SessionOptions(hosts.dsn, hosts.schema)
    async with (
        open_receiver(hosts.dsn, hosts.schema, prove_in=prove) as receiver,
        hosts.open(talks, ledger_url=receiver.origin, ledger_secret=SECRET) as rt,
    ):
        handle = await rt.submit(talks, 1)
        await handle.result(timeout=10)
        await delivered(hosts)
        assert await rows(hosts, "SELECT run_id, status FROM @.runs") == [(handle.run_id, "completed")]


# --- operators -----------------------------------------------------------------------------------------------


async def test_after_a_skip_the_receiver_accepts_the_gap(hosts: Hosts) -> None:
    async with hosts.open(talks):
        pass
    async with (
        open_receiver(hosts.dsn, hosts.schema, prove_in=SessionOptions(hosts.dsn, hosts.schema)) as receiver,
        hosts.open(talks, ledger=HttpLedger(receiver.origin, secret=SECRET), delivery_prefix=1) as rt,
        hosts.session() as session,
    ):
        handle = await rt.submit(talks, 1, run_id="r", delay=1.0)
        await delivered(hosts)
        # What a sender delivered that has since lost its memory: the same key, other facts.
        await session.execute(
            f"INSERT INTO l{hosts.schema}.receipts VALUES (now(), 'r:lifecycle:2-2', 'other')"
        )

        async def blocked() -> str | None:
            return (await handle.status()).lane_blocked

        assert "the same delivery key came with another digest" in await eventually(blocked)
        given_up = await journal.skip_lane(
            session, "r", 2, lane=Lane.LIFECYCLE, because="lost", by="me", notify=True
        )
        assert given_up == (2, 2)
        await delivered(hosts)
        assert [row[0] for row in await rows(hosts, "SELECT seq FROM @.facts ORDER BY seq")] == [1, 3, 4]
        cursor = "SELECT applied_seq, skipped, generation, conflicts FROM @.cursors"
        assert await rows(hosts, cursor) == [(4, 1, 1, 1)]


async def test_a_receiver_that_lost_facts_blocks_the_lane_until_they_are_delivered_again(
    hosts: Hosts,
) -> None:
    async with hosts.open(talks):
        pass
    async with (
        open_receiver(hosts.dsn, hosts.schema, prove_in=SessionOptions(hosts.dsn, hosts.schema)) as receiver,
        hosts.open(talks, ledger=HttpLedger(receiver.origin, secret=SECRET)) as rt,
        hosts.session() as session,
    ):
        handle = await rt.submit(talks, 1, run_id="r", delay=1.0)
        await delivered(hosts)
        for table in ("cursors", "facts", "receipts"):  # restored from a backup of before
            await session.execute(f"DELETE FROM l{hosts.schema}.{table}")

        async def blocked() -> str | None:
            return (await handle.status()).lane_blocked

        assert "expected seq 1, got 2" in await eventually(blocked)
        assert await rt.redeliver_lane("r", 1, because="restored") == range(1, 2)
        await delivered(hosts)
        assert [row[0] for row in await rows(hosts, "SELECT seq FROM @.facts ORDER BY seq")] == [1, 2, 3, 4]
        assert await rows(hosts, "SELECT applied_seq, skipped FROM @.cursors") == [(4, 0)]
        with pytest.raises(InputRefused, match="because"):
            await rt.redeliver_lane("r", 1, because="")


# --- a budget that ends --------------------------------------------------------------------------------------


async def test_a_budget_that_ends_during_a_request_gives_the_lane_back(hosts: Hosts) -> None:
    """F-87, F-88, F-91: the first fact of a run is handed to a receiver that does not answer for 30 s."""
    came: list[tuple[float, str]] = []

    async def script(asked: Asked) -> Said:
        came.append((trio.current_time(), asked.headers["x-host"]))
        if asked.headers["x-host"] == "a":
            await trio.sleep(30.0)
        return Answer(200, results(*["applied"] * len(asked.deliveries)))

    async with (
        actor_proxy(hosts.dsn) as proxy,
        scripted_receiver(script=script) as receiver,
        hosts.open(
            talks,
            ledger=HttpLedger(receiver.url, secret=SECRET, headers={"x-host": "a"}, timeout_s=40.0),
            dsn=proxy.dsn,
            inline_delivery_ms=250,
            lane_lease_s=60.0,
            delivery_timeout_s=45.0,
            release_budget_s=0.5,
        ) as a,
        hosts.open(talks, ledger=HttpLedger(receiver.url, secret=SECRET, headers={"x-host": "b"})),
    ):
        # Nobody of host a's own claims lanes: whoever delivers after it is the other host.
        proxy.blackhole("outbox")
        waits = []
        for _ in range(3):
            came.clear()
            await a.submit(talks, 0, delay=3600)

            with trio.fail_after(5.0):
                while len(came) < 2:  # noqa: ASYNC110 - another task records
                    await trio.sleep(0.001)
            (asked_at, first), (again_at, second) = came[:2]
            assert (first, second) == ("a", "b")
            waits.append(again_at - asked_at)
            await delivered(hosts)
            assert receiver.open == 0
        # The budget, and 100 ms for giving the lane back, claiming it elsewhere and the request; a busy machine may
        # take longer once.
        assert 0.1 <= min(waits) <= 0.25 + 0.1
        assert max(waits) < 1.5
