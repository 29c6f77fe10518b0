"""Maintenance on hosts: what is due is done, once, beside the work, and nothing is lost by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import trio

from runtime import Context, Delivery, Lane, LedgerRetry, MemoryLedger, RunNotFound, Runtime, play
from tests.support.hosts import Hosts, eventually


@play("chatty")
async def chatty(ctx: Context, data: Any) -> Any:
    for number in range(3):
        ctx.log("line", number=number)
    return data


async def gone(rt: Runtime, run_id: str) -> bool:
    try:
        await rt.status(run_id)
    except RunNotFound:
        return True
    return False


async def rounds(hosts: Hosts) -> None:
    """Wait until every chore has been done."""

    async def done() -> bool:
        return bool(await hosts.value("SELECT min(due_at) > clock_timestamp() FROM @.chores"))

    await eventually(done)


@pytest.mark.modes
async def test_an_ended_run_goes_when_its_time_has_come(hosts: Hosts) -> None:
    async with hosts.open(chatty, retention_s=1.5, health_port=0) as rt:
        handle = await rt.submit(chatty, 1, idempotency_key="k")
        assert await handle.result(timeout=10) == 1
        await eventually(lambda: gone(rt, handle.run_id), within_s=20)
        for table in ("facts", "attempts", "lanes", "ledger_runs", "ledger_logs"):
            assert await hosts.value(f"SELECT count(*) FROM @.{table}") == 0
        again = await rt.submit(chatty, 2, idempotency_key="k")  # its key is free
        assert again.created
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{rt.health_port}/metrics")).text
        assert 'runlane_maintained_total{what="runs_deleted"} 1.0' in text


class Closed(MemoryLedger):
    """A ledger that is away until it is opened."""

    open = False

    async def append_many(self, deliveries: Sequence[Delivery]) -> Sequence[Any]:
        if not self.open:
            raise LedgerRetry(0.1)
        return await super().append_many(deliveries)


async def test_what_is_not_delivered_stays_until_it_is(hosts: Hosts) -> None:  # F-111
    ledger = Closed()
    async with hosts.open(chatty, retention_s=0.5, log_retention_s=0.5, ledger=ledger) as rt:
        handle = await rt.submit(chatty, 1)
        await handle.result(timeout=10)
        await trio.sleep(1.0)
        await hosts.ask("UPDATE @.chores SET due_at = 'epoch'")
        await rounds(hosts)
        lines = [fact.payload for fact in await rt.facts(handle.run_id) if fact.lane is Lane.OBSERVABILITY]
        assert [line["message"] for line in lines] == ["line"] * 3
        ledger.open = True
        await eventually(lambda: gone(rt, handle.run_id), within_s=20)
    told = [fact.type for fact in ledger.facts(handle.run_id, Lane.LIFECYCLE)]
    assert told == ["run.created", "run.started", "run.completed"]
    logged = [fact.payload["message"] for fact in ledger.facts(handle.run_id, Lane.OBSERVABILITY)]
    assert logged == ["line"] * 3


async def test_log_bodies_go_first(hosts: Hosts) -> None:
    async with hosts.open(chatty, log_retention_s=1) as rt:
        handle = await rt.submit(chatty, 1)
        await handle.result(timeout=10)

        async def scrubbed() -> bool:
            lines = [
                fact.payload for fact in await rt.facts(handle.run_id) if fact.lane is Lane.OBSERVABILITY
            ]
            return len(lines) == 3 and all(line == {"attempt": 1, "$scrubbed": True} for line in lines)

        await eventually(scrubbed, within_s=20)
        await eventually(
            lambda: hosts.value("SELECT count(*) = 3 FROM @.ledger_logs WHERE payload ? '$scrubbed'"),
            within_s=20,
        )
        assert (await rt.status(handle.run_id)).status == "completed"


async def test_a_host_keeps_for_ever_what_it_is_told_to_and_holds_no_connection_for_it(hosts: Hosts) -> None:
    async with hosts.open(chatty, retention_s=None, log_retention_s=None) as rt:
        handle = await rt.submit(chatty, 1)
        await handle.result(timeout=10)
        await rounds(hosts)
        await hosts.ask(
            "UPDATE @.chores SET due_at = 'epoch'", "UPDATE @.hosts SET seen_at = 'epoch' WHERE host < 0"
        )
        await rounds(hosts)
        assert len(await rt.facts(handle.run_id)) == 6
        await eventually(lambda: _none(hosts))


async def _none(hosts: Hosts) -> bool:
    return await hosts.backends("maintenance") == []


async def test_all_runs_are_counted_by_status(hosts: Hosts) -> None:
    async with hosts.open(chatty, health_port=0) as rt:
        for _ in range(3):
            await (await rt.submit(chatty, 1)).result(timeout=10)
        await rt.submit(chatty, 1, delay=600)
        await hosts.ask("UPDATE @.chores SET due_at = 'epoch' WHERE name = 'counts'")
        async with httpx.AsyncClient() as client:
            await eventually(
                lambda: hosts.value("SELECT runs = 3 FROM @.status_counts WHERE status = 'completed'")
            )
            text = (await client.get(f"http://127.0.0.1:{rt.health_port}/metrics")).text
        assert 'runlane_runs_kept{status="completed"} 3.0' in text
        assert 'runlane_runs_kept{status="queued"} 1.0' in text
        (age,) = [
            line.split()[1] for line in text.splitlines() if line.startswith("runlane_runs_kept_age_seconds ")
        ]
        assert 0 <= float(age) < 30


async def test_a_chore_that_fails_stops_neither_the_host_nor_the_others(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosts.open(chatty, retention_s=1.5) as rt:
        await rounds(hosts)
        await hosts.ask(
            "ALTER TABLE @.status_counts ADD CHECK (runs < 0) NOT VALID",
            "UPDATE @.chores SET due_at = 'epoch'",
        )
        handle = await rt.submit(chatty, 1)
        await handle.result(timeout=10)
        await eventually(lambda: gone(rt, handle.run_id), within_s=20)
        said = [
            record.message for record in caplog.records if "event=chore_failed chore=counts" in record.message
        ]
        assert len(said) == 1
        assert rt.readiness()["actors"]["maintenance"]["restarts"] == 0


@pytest.mark.timeout(90)
async def test_hosts_share_it_while_their_connections_break(hosts: Hosts) -> None:
    async with hosts.open(chatty, retention_s=None) as rt:
        handles = await rt.submit_many([(chatty, n) for n in range(300)])
        await hosts.delivered([handle.run_id for handle in handles])
        await hosts.ask("UPDATE @.chores SET due_at = 'epoch'")
    # Many small runs of a long past; each pass is short, so that breaks come between and inside of passes.
    await hosts.ask("UPDATE @.runs SET finished_at = finished_at - interval '1 day'")
    async with hosts.open(chatty, retention_s=20) as rt, hosts.open(chatty, retention_s=20):
        for _ in range(20):
            await hosts.ask(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'runlane maintenance'"
            )
            await trio.sleep(0.05)
        # A claim whose host lost its connection is due again after its lease; the test does not wait for that.
        await hosts.ask("UPDATE @.chores SET due_at = 'epoch'")

        async def all_gone() -> bool:
            return bool(await hosts.value("SELECT count(*) = 0 FROM @.runs"))

        await eventually(all_gone, within_s=20)
        assert await hosts.value("SELECT count(*) FROM @.facts") == 0
        await hosts.check()
        handle = await rt.submit(chatty, 7)
        assert await handle.result(timeout=10) == 7
