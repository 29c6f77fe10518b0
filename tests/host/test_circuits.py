"""Circuits as plays use them: shared by hosts, free of charge while open, one probe."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel

from runtime import (
    Context,
    DependencyUnavailable,
    Fatal,
    InputRefused,
    Retry,
    RunFailed,
    Runtime,
    SyncContext,
    play,
)
from tests.support.hosts import Hosts, eventually


@attrs.define
class Crm:
    """A dependency that may be out, and what was asked of it."""

    out: bool = True
    calls: list[float] = attrs.field(factory=list)

    async def answer(self) -> str:
        self.calls.append(time.monotonic())
        await trio.lowlevel.checkpoint()
        if self.out:
            raise ConnectionError("no route to the CRM")
        return "hello"


async def state(rt: Runtime) -> str:
    found = await rt.circuits()
    return found[0].state if found else "none"


@pytest.mark.modes
async def test_an_outage_opens_the_circuit_for_all_and_its_end_is_found_by_one(hosts: Hosts) -> None:
    crm = Crm()

    @play("needs", retries=9, backoff_s=0.05)
    async def needs(ctx: Context) -> str:
        async with ctx.dependency("crm"):
            return await crm.answer()

    async with hosts.open(needs) as one, hosts.open(needs) as two:
        await one.set_circuit("crm", failures=3, open_s=0.5)
        handles = await one.submit_many([(needs, None)] * 12)

        async def opened() -> bool:
            return await state(two) == "open"

        await eventually(opened)
        await trio.sleep(1.2)
        # A few that were on their way, and a probe at a time since.
        assert len(crm.calls) <= 12 + 3 + 3
        crm.out = False
        with trio.fail_after(20):
            assert [await handle.result() for handle in handles] == ["hello"] * 12
        assert await state(one) == "closed"
        outcomes = [a.outcome for handle in handles for a in await one.attempts(handle.run_id)]
        assert outcomes.count("deferred") >= 6
        assert outcomes.count("completed") == 12
        await hosts.check([handle.run_id for handle in handles])


async def test_a_healthy_dependency_costs_no_round_trip(hosts: Hosts) -> None:
    crm = Crm(out=False)

    @play("chatty")
    async def chatty(ctx: Context) -> float:
        async with ctx.dependency("crm"):
            await crm.answer()
        started = time.monotonic()
        for _ in range(1_000):
            async with ctx.dependency("crm"):
                await crm.answer()
        return time.monotonic() - started

    async with hosts.open(chatty) as rt:
        # A thousand round trips would take a second, and trust lasts a second.
        assert await (await rt.submit(chatty)).result(timeout=15) < 1.0
        assert await rt.circuits() == []


async def test_while_the_circuit_is_open_the_run_is_deferred(hosts: Hosts) -> None:
    @play("needs", retries=50, backoff_s=0.05)
    async def needs(ctx: Context) -> None:
        async with ctx.dependency("crm"):
            raise ConnectionError("no")

    async with hosts.open(needs) as rt:
        await rt.set_circuit("crm", failures=1, open_s=30.0)
        handle = await rt.submit(needs)

        async def deferred() -> bool:
            return [a.outcome for a in await rt.attempts(handle.run_id)] == ["retried", "deferred"]

        await eventually(deferred)
        (_, second) = await rt.attempts(handle.run_id)
        assert second.error["kind"] == "dependency_unavailable"
        assert second.error["message"] == "crm: its circuit is open"


async def count_of(rt: Runtime, name: str) -> int:
    return next((one.failures for one in await rt.circuits() if one.name == name), 0)


@pytest.mark.parametrize(
    ("raised", "counts"),
    [
        (ConnectionError("x"), True),
        (ExceptionGroup("g", [ConnectionError("x")]), True),
        (DependencyUnavailable("crm", retry_after=60), True),
        (DependencyUnavailable("other", retry_after=60), False),
        (Fatal("no such account"), False),
        (Retry("later", after=60), False),
        (ValueError("ours"), False),
    ],
)
async def test_what_counts_as_a_failure(hosts: Hosts, raised: Exception, counts: bool) -> None:
    @play("needs", retries=1, backoff_s=60, backoff_max_s=60)
    async def needs(ctx: Context) -> None:
        async with ctx.dependency("crm", errors=(ConnectionError, DependencyUnavailable, ExceptionGroup)):
            raise raised

    async with hosts.open(needs) as rt:
        handle = await rt.submit(needs)

        async def ended() -> bool:
            return len(await rt.attempts(handle.run_id)) == 1

        await eventually(ended)

        async def counted() -> bool:
            return await count_of(rt, "crm") == 1

        if counts:
            await eventually(counted)
        else:
            await trio.sleep(0.1)
            assert await rt.circuits() == []


async def test_parks_and_cancellations_say_nothing_and_a_probe_that_parks_lets_others_try(
    hosts: Hosts,
) -> None:
    @play("naps")
    async def naps(ctx: Context, data: Any) -> str:
        async with ctx.dependency("crm"):
            if data == "nap":
                await ctx.sleep(3600)
            return "answered"

    async with hosts.open(naps) as rt:
        await rt.set_circuit("crm", failures=1, open_s=0.1)
        await hosts.ask("SELECT 1 FROM @.report_circuits('{crm}', '{1}', '{failed}', '{no}')")
        await trio.sleep(0.15)
        napping = await rt.submit(naps, "nap")

        async def parked() -> bool:
            return (await napping.status()).status == "waiting"

        await eventually(parked)
        assert await (await rt.submit(naps, "go")).result(timeout=10) == "answered"

        async def closed() -> bool:
            return await state(rt) == "closed"

        await eventually(closed)


async def test_threads_have_circuits_too(hosts: Hosts) -> None:
    @play("threaded", retries=3, backoff_s=0.01, backoff_max_s=0.01)
    def threaded(ctx: SyncContext) -> int:
        with ctx.dependency("crm"):
            if ctx.failures < 2:
                raise ConnectionError("no")
            return ctx.attempt

    async with hosts.open(threaded) as rt:
        await rt.set_circuit("crm", failures=2, open_s=0.2)
        assert await (await rt.submit(threaded)).result(timeout=10) >= 3
        (crm,) = await rt.circuits()
        assert (crm.state, crm.error) == ("closed", "ConnectionError: no")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "a b"}, "name: must be 1 to 128 of"),
        ({"name": 3}, "name: must be 1 to 128 of"),
        ({"name": "crm", "errors": "ValueError"}, "errors: must be a class of exceptions"),
        ({"name": "crm", "errors": (ValueError, int)}, "errors: must be a class of exceptions"),
    ],
)
async def test_bad_calls_are_refused_by_name(hosts: Hosts, arguments: dict[str, Any], message: str) -> None:
    @play("wrong")
    async def wrong(ctx: Context) -> None:
        async with ctx.dependency(**arguments):
            pass

    async with hosts.open(wrong) as rt:
        with pytest.raises(RunFailed, match=message):
            await (await rt.submit(wrong)).result(timeout=10)
        with pytest.raises(InputRefused, match="open_s: must be a finite number"):
            await rt.set_circuit("crm", open_s="5")  # type: ignore[arg-type]


async def test_the_actor_starts_anew_and_no_report_is_lost(hosts: Hosts) -> None:
    crm = Crm()

    @play("needs", retries=50, backoff_s=0.05, backoff_max_s=0.05)
    async def needs(ctx: Context) -> str:
        async with ctx.dependency("crm"):
            return await crm.answer()

    async with hosts.open(needs) as rt:
        await rt.set_circuit("crm", failures=100)
        handles = await rt.submit_many([(needs, None)] * 3)
        for _ in range(3):
            await trio.sleep(0.15)
            for pid in await hosts.backends("circuits"):
                await hosts.ask(f"SELECT pg_terminate_backend({pid})")
        crm.out = False
        with trio.fail_after(20):
            for handle in handles:
                await handle.result()
        assert await state(rt) == "closed"
