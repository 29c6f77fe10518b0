"""The doctor: what it finds in a database that is well, and in one that is not."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from runtime import doctor, play
from runtime.context import Context
from sql.doctor import Holder, Server, read_holder
from tests.support.callers import open_caller
from tests.support.hosts import Hosts, eventually


@play("echo")
async def echo(ctx: Context, data: Any) -> Any:
    return data


async def found(hosts: Hosts, **more: Any) -> dict[str, doctor.Finding]:
    """By check; of several the last one."""
    return {finding.check: finding for finding in await doctor.examine(hosts.config(**more))}


async def test_a_host_that_works_is_well(hosts: Hosts) -> None:
    async with hosts.open(echo, host_name="ada") as rt:
        await (await rt.submit(echo, 1)).result(timeout=10)
        well = await found(hosts)
    # The servers of tests have fsync off.
    bad = {check: finding for check, finding in well.items() if finding.state != doctor.OK}
    assert set(bad) <= {"durability", "snapshots"}
    assert "ada pid" in well["hosts"].says
    assert well["notifications"].says.startswith("heard" if hosts.notify else "not used")


async def test_work_that_nobody_does_is_named(hosts: Hosts) -> None:
    async with hosts.open(echo, release_id="r7"):
        pass
    async with hosts.open(echo, release_id="r8") as rt:
        await rt.submit(echo, 1, delay=3600)
    async with hosts.session() as session:
        submit = f"SELECT {hosts.schema}.submit_run('echo', '1', $1)"
        await session.fetch(submit, '{"run_id": "plain", "release_id": "r7"}')
        await session.fetch(submit, '{"run_id": "fair", "release_id": "r7", "org_id": "acme", "priority": 1}')
    now = await found(hosts)
    assert now["hosts"].state == doctor.OK
    assert "plays" not in now  # their host was here a moment ago
    await hosts.ask("UPDATE @.hosts SET seen_at = seen_at - interval '2 minutes'")
    findings = await doctor.examine(hosts.config())
    idle = [finding.says for finding in findings if finding.check == "plays"]
    assert len(idle) == 2
    assert all(says.startswith("runs of echo of release r7 have been due for") for says in idle)
    assert {finding.check: finding.state for finding in findings}["hosts"] == doctor.WARNING
    await hosts.ask("DELETE FROM @.runs WHERE run_id = 'plain'")
    assert len([f for f in await doctor.examine(hosts.config()) if f.check == "plays"]) == 1


async def test_a_receiver_that_nobody_delivers_to_is_named(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        await hosts.ask("""SELECT @.submit_run('echo', '1', '{"run_id": "r", "receiver": "billing"}')""")
        await rt.handle("r").result(timeout=10)
        now = await found(hosts)
        assert (now["receivers"].state, "billing" in now["receivers"].says) == (doctor.PROBLEM, True)
    await hosts.ask("UPDATE @.runs SET acked_seq = last_seq")
    assert "receivers" not in await found(hosts)


async def test_what_waits_for_an_operator_is_named(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        handle = await rt.submit(echo, 1)
        await handle.result(timeout=10)
        await hosts.delivered([handle.run_id])
    await hosts.ask(
        "UPDATE @.runs SET acked_seq = 1, lane_error = 'poison', lane_due_at = 'infinity'",
        "INSERT INTO @.sandboxes (sandbox, provider, run_id, attempt, created_at, due_at, certain_at, block_reason)"
        " VALUES ('box', 'local', 'r', 1, now(), 'infinity', now(), 'gave up')",
    )
    now = await found(hosts)
    assert (now["ledgers"].state, now["ledgers"].says[:15]) == (doctor.PROBLEM, "1 blocked lanes")
    assert (now["sandboxes"].state, now["sandboxes"].says[:22]) == (doctor.PROBLEM, "1 could not be deleted")


async def test_who_holds_a_snapshot_is_named(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    async with hosts.open(echo):
        pass
    async with open_caller(hosts.dsn, hosts.schema) as caller, hosts.session() as session:
        await caller.begin("repeatable read")
        pid = await caller.fetchval("SELECT pg_backend_pid()")

        async def held() -> bool:
            holder = await read_holder(session)
            return holder is not None and f"pid {pid} " in holder.what

        # Others of this server may hold one for a moment too: only the oldest is named.
        await eventually(held, within_s=60)
        monkeypatch.setattr(doctor, "_HELD_S", 0.0)
        assert (await found(hosts))["snapshots"].state == doctor.WARNING
        await caller.rollback()


async def test_a_role_that_may_see_little_is_told_what(hosts: Hosts) -> None:
    role = f'"Odd-{hosts.schema}"'
    as_role = hosts.dsn.replace("postgres@", f"Odd-{hosts.schema}@", 1)
    assert as_role != hosts.dsn
    await hosts.ask(f"CREATE ROLE {role} LOGIN")
    try:
        async with hosts.open(echo), open_caller(hosts.dsn, hosts.schema) as caller:
            await caller.begin("repeatable read")
            await caller.fetchval("SELECT pg_backend_pid()")
            all_ = await found(hosts)
            now = await found(hosts, dsn=as_role)
            await caller.rollback()
    finally:
        await hosts.ask(f"DROP ROLE {role}")
    assert now["server"].says.endswith(f"as {role}")
    assert f"permission denied for schema {hosts.schema}" in now["rights"].says
    assert now["snapshots"].advice == f"GRANT pg_read_all_stats TO {role}, and look again"
    # Connections come and go meanwhile, but those of the host are seen by both.
    assert min(int(one["connections"].says.split()[0]) for one in (all_, now)) > 8


async def test_a_pooler_without_a_direct_address_cannot_listen(hosts: Hosts) -> None:
    finding = (await found(hosts, pooled=True, notify=True))["notifications"]
    assert finding.state == doctor.PROBLEM
    assert "listen_dsn" in str(finding.advice)


async def test_a_missing_schema_is_named(hosts: Hosts) -> None:
    now = await found(hosts)
    assert now["schema"].state == doctor.PROBLEM
    assert "does not exist" in now["schema"].says
    assert "hosts" not in now


WELL = Server(
    version="18.0",
    version_number=180_000,
    role="app",
    standby=False,
    fsync=True,
    full_page_writes=True,
    synchronous_commit="on",
    autovacuum=True,
    clock=0.0,
    most_connections=100,
    connections=10,
    our_connections=1,
    hidden_snapshots=0,
)


@pytest.mark.parametrize(
    ("wrong", "off_s", "check", "state", "word"),
    [
        ({"version_number": 140_005}, 0, "server", doctor.PROBLEM, "PostgreSQL 15"),
        ({"standby": True}, 0, "server", doctor.PROBLEM, "primary"),
        ({"fsync": False}, 0, "durability", doctor.PROBLEM, "fsync"),
        ({"full_page_writes": False}, 0, "durability", doctor.PROBLEM, "full_page_writes"),
        ({"synchronous_commit": "off"}, 0, "durability", doctor.WARNING, "ALTER ROLE app"),
        ({"autovacuum": False}, 0, "autovacuum", doctor.PROBLEM, "turn it on"),
        ({}, -60, "clock", doctor.WARNING, "behind"),
        ({"connections": 81}, 0, "connections", doctor.WARNING, "max_connections"),
        ({"hidden_snapshots": 1}, 0, "snapshots", doctor.WARNING, "GRANT pg_read_all_stats TO app"),
    ],
)
def test_each_setting_is_judged(
    wrong: dict[str, Any], off_s: float, check: str, state: str, word: str
) -> None:
    def bad(server: Server, off_s: float) -> list[doctor.Finding]:
        findings = [
            *doctor._server(server, off_s),
            doctor._connections(server),
            doctor._held(Holder("session", "pid 1", 1.0), server),
        ]
        return [finding for finding in findings if finding.state != doctor.OK]

    assert bad(WELL, 0) == []
    (finding,) = bad(attrs.evolve(WELL, **wrong), off_s)
    assert (finding.check, finding.state) == (check, state)
    assert word in f"{finding.says} {finding.advice}"


@pytest.mark.parametrize(
    ("holder", "word"),
    [
        (Holder("prepared transaction", "gid-1", 900.0), "roll it back"),
        (Holder("inactive replication slot", "old", None), "pg_drop_replication_slot"),
    ],
)
def test_what_keeps_dead_rows_is_named(holder: Holder, word: str) -> None:
    finding = doctor._held(holder, WELL)
    assert finding.state == doctor.WARNING
    assert holder.what in finding.says
    assert word in str(finding.advice)
