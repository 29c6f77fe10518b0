"""Deletions: one that hangs holds up no other, one that fails is shown, and what nobody answers for is counted."""

from __future__ import annotations

from typing import Any

import attrs
import httpx
import pytest
import trio

from actors import cleanup
from runtime import Runtime, detached
from runtime.sandboxes import SandboxRef
from tests.support import sandboxed
from tests.support.hosts import Hosts, eventually
from tests.support.sandboxed import Pretended

SETTINGS: dict[str, Any] = {"health_port": 0, "heartbeat_timeout_s": 60.0, "cleanup_lease_s": 30.0}


@attrs.define
class Hanging(Pretended):
    """One whose deletion of some sandboxes never comes back."""

    hangs: set[str] = attrs.field(factory=set)

    async def delete(self, ref: SandboxRef) -> str:
        if ref.sandbox in self.hangs:
            await trio.sleep_forever()
        return await super().delete(ref)


async def detached_run(rt: Runtime, org_id: str | None = None) -> str:
    """A new run whose attempt has been handed over."""
    handle = await rt.submit(sandboxed.pretended, {}, org_id=org_id)

    async def waits() -> bool:
        return "run.waiting" in [fact.type for fact in await rt.facts(handle.run_id)]

    await eventually(waits, within_s=20.0)
    return handle.run_id


async def state(rt: Runtime, run_id: str) -> str:
    return (await rt.sandboxes(run_id=run_id))[0].state


async def test_one_deletion_that_hangs_holds_up_no_other(hosts: Hosts) -> None:
    provider = Hanging()
    async with hosts.open(sandboxed.pretended, sandboxes={"pretended": provider}, **SETTINGS) as rt:
        stuck, other = await detached_run(rt), await detached_run(rt)
        provider.hangs = {one.sandbox for one in await rt.sandboxes(run_id=stuck)}
        await rt.cancel(stuck)

        async def taken() -> bool:
            return bool(
                await hosts.value("SELECT count(*) FROM @.sandboxes WHERE lease_expires_at IS NOT NULL")
            )

        await eventually(taken)
        await rt.cancel(other)
        await eventually(lambda: _is(rt, other, "gone"), within_s=5.0)
        assert await state(rt, stuck) == "deleting"


async def _is(rt: Runtime, run_id: str, wanted: str) -> bool:
    return await state(rt, run_id) == wanted


async def test_what_cannot_be_deleted_is_blocked_and_shown_until_an_operator_decides(hosts: Hosts) -> None:
    provider = Pretended()
    async with hosts.open(
        sandboxed.pretended, sandboxes={"pretended": provider}, cleanup_failures=2, **SETTINGS
    ) as rt:
        run_id = await detached_run(rt)
        provider.fails = True
        await rt.cancel(run_id)
        await eventually(lambda: _is(rt, run_id, "blocked"), within_s=15.0)
        (record,) = await rt.sandboxes(run_id=run_id, only_open=True)
        assert (record.failures, record.accepted_at) == (2, None)
        assert record.block_reason is not None
        assert "the provider is away" in record.block_reason
        provider.fails = False
        assert await rt.retry_sandbox(record.sandbox)
        await eventually(lambda: _is(rt, run_id, "gone"), within_s=15.0)


async def test_sandboxes_that_nobody_answers_for_are_counted_and_left_alone(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "_CENSUS_EVERY_S", 0.3)
    provider = Pretended()
    async with hosts.open(sandboxed.pretended, sandboxes={"pretended": provider}, **SETTINGS) as rt:
        await detached_run(rt)
        (ours,) = provider.specs.values()
        tag = ours.sandbox.partition("-")[0]
        provider.specs |= {f"{tag}-forgotten": ours, "somebody-elses": ours}

        async def counted() -> bool:
            async with httpx.AsyncClient(trust_env=False) as client:
                told = (await client.get(f"http://127.0.0.1:{rt.health_port}/metrics")).text
            return 'runlane_orphan_sandboxes{provider="pretended"} 1.0' in told

        await eventually(counted, within_s=10.0)
        assert set(provider.specs) == {ours.sandbox, f"{tag}-forgotten", "somebody-elses"}


async def test_without_room_a_run_waits_free_of_charge(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detached, "_RETRY_S", 0.2)
    provider = Pretended()
    async with hosts.open(sandboxed.pretended, sandboxes={"pretended": provider}, **SETTINGS) as rt:
        await rt.set_limit("sandbox_org", "acme", 1)
        first = await detached_run(rt, org_id="acme")
        second = await rt.submit(sandboxed.pretended, {}, org_id="acme")

        async def deferred() -> bool:
            return "deferred" in [each.outcome for each in await rt.attempts(second.run_id)]

        await eventually(deferred, within_s=10.0)
        assert [spec.run_id for spec in provider.specs.values()] == [first]
        await detached_run(rt, org_id="zeta")  # others have room
        await rt.cancel(first)

        async def at_last() -> bool:
            return second.run_id in [spec.run_id for spec in provider.specs.values()]

        await eventually(at_last, within_s=10.0)
        status = await rt.status(second.run_id)
        assert (status.failures, status.crashes) == (0, 0)
