"""What a play can say about its own failure: final, not now, no room, something is out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import trio

from runtime import (
    CapacityUnavailable,
    Context,
    DependencyUnavailable,
    Fatal,
    Retry,
    RunFailed,
    Runtime,
    SyncContext,
    play,
)
from tests.support.hosts import Hosts


async def outcomes(rt: Runtime, run_id: str) -> list[str]:
    return [attempt.outcome for attempt in await rt.attempts(run_id)]


@pytest.mark.parametrize("how", ["fatal", "final", "nursery"])
async def test_a_final_error_ends_the_run_at_once(hosts: Hosts, how: str) -> None:
    @play("hopeless", retries=5, final=LookupError)
    async def hopeless(_: Context) -> None:
        if how == "final":
            raise KeyError("gone")
        if how == "fatal":
            raise Fatal("gone")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise Fatal("gone")

    async with hosts.open(hopeless) as rt:
        handle = await rt.submit(hopeless)
        with pytest.raises(RunFailed, match="gone") as caught:
            await handle.result(timeout=10)
        assert caught.value.failures == 1
        assert await outcomes(rt, handle.run_id) == ["failed"]
        await hosts.check([handle.run_id])


async def test_a_retry_comes_when_it_was_asked_for(hosts: Hosts) -> None:
    @play("later", retries=1, backoff_s=60)
    async def later(ctx: Context) -> int:
        if ctx.attempt == 1:
            raise Retry("not yet", after=0.3)
        return ctx.failures

    async with hosts.open(later) as rt:
        handle = await rt.submit(later)
        assert await handle.result(timeout=10) == 1
        first, second = await rt.attempts(handle.run_id)
        assert 0.3 <= (second.started_at - first.ended_at).total_seconds() < 3.0
        assert first.error["message"] == "not yet"


@pytest.mark.modes
@pytest.mark.parametrize("sync", [False, True])
async def test_no_capacity_is_free(hosts: Hosts, sync: bool) -> None:
    def body(attempt: int) -> int:
        if attempt < 4:
            raise CapacityUnavailable("no sandbox", retry_after=0.1)
        return attempt

    if sync:

        @play("crowded")
        def crowded(ctx: SyncContext) -> int:
            return body(ctx.attempt)

    else:

        @play("crowded")
        async def crowded(ctx: Context) -> int:
            return body(ctx.attempt)

    async with hosts.open(crowded) as rt:
        handle = await rt.submit(crowded)
        assert await handle.result(timeout=10) == 4
        status = await handle.status()
        assert (status.failures, status.crashes) == (0, 0)
        assert await outcomes(rt, handle.run_id) == ["deferred"] * 3 + ["completed"]
        attempts = await rt.attempts(handle.run_id)
        gaps = [(b.started_at - a.ended_at).total_seconds() for a, b in itertools.pairwise(attempts)]
        assert all(gap >= 0.1 for gap in gaps)
        assert attempts[0].error["kind"] == "capacity_unavailable"
        await hosts.check([handle.run_id])


@pytest.mark.modes
async def test_an_outage_is_free_until_it_has_lasted_too_long(hosts: Hosts) -> None:
    @play("needs", outage_max_s=0.6, retries=9)
    async def needs(_: Context, data: Any) -> None:
        raise DependencyUnavailable("crm", "no answer", retry_after=0.1)

    async with hosts.open(needs) as rt:
        handle = await rt.submit(needs, 1)
        with pytest.raises(
            RunFailed, match=r"crm: no answer; the outage has lasted longer than outage_max_s=0\.6"
        ):
            await handle.result(timeout=15)
        status = await handle.status()
        assert (status.status, status.failures) == ("failed", 1)
        attempts = await rt.attempts(handle.run_id)
        assert [one.outcome for one in attempts[:-1]] == ["deferred"] * (len(attempts) - 1)
        assert len(attempts) >= 3
        assert attempts[-1].outcome == "failed"
        assert attempts[-1].error["kind"] == "dependency_unavailable"
        assert (attempts[-1].ended_at - attempts[0].started_at).total_seconds() >= 0.6
        await hosts.check([handle.run_id])


async def test_an_outage_that_ends_in_time_leaves_no_trace_in_the_charges(hosts: Hosts) -> None:
    @play("recovers")
    async def recovers(ctx: Context) -> int:
        if ctx.attempt < 3:
            async with trio.open_nursery():
                raise DependencyUnavailable("crm", retry_after=0.1)
        return ctx.failures

    async with hosts.open(recovers, outage_max_s=20.0) as rt:
        handle = await rt.submit(recovers)
        assert await handle.result(timeout=10) == 0
        assert await outcomes(rt, handle.run_id) == ["deferred", "deferred", "completed"]
        await hosts.check([handle.run_id])
