"""Runs that start runs: trees, ends that wake parents, replays that start nothing twice, cancels that spread."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import trio

from runtime import (
    Child,
    Context,
    InputRefused,
    PayloadRefused,
    RunCancelled,
    RunFailed,
    Runtime,
    SyncContext,
    UnknownPlay,
    WaitTimedOut,
    play,
)
from tests.support.hosts import Hosts, eventually, until


@play("double")
async def double(ctx: Context, data: int) -> int:
    return 2 * data


@play("slow")
async def slow(ctx: Context, data: float) -> float:
    await ctx.sleep(data)
    return data


@play("endless")
async def endless(ctx: Context) -> None:
    await trio.sleep_forever()


@play("fails")
async def fails(ctx: Context) -> None:
    raise LookupError("no such thing")


async def family(hosts: Hosts, root: str) -> dict[str, str]:
    """The runs below a root, by id, with their status."""
    rows = await hosts.ask(f"SELECT run_id, status FROM @.runs WHERE root_id = '{root}' ORDER BY run_id")
    return {row[0]: row[1] for row in rows}


@pytest.mark.modes
async def test_a_quick_child_is_awaited_in_memory(hosts: Hosts) -> None:
    @play("parent")
    async def parent(ctx: Context) -> list[Any]:
        return [await ctx.call(double, 21), ctx.attempt]

    async with hosts.open(parent, double, park_after_s=10.0) as rt:
        handle = await rt.submit(parent, org_id="o")
        assert await handle.result(timeout=10) == [42, 1]
        ((child, status),) = (await family(hosts, handle.run_id)).items()
        assert status == "completed"
        found = await rt.status(child)
        assert (found.parent_id, found.root_id, found.org_id) == (handle.run_id, handle.run_id, "o")
        (created, *_) = await rt.facts(child)
        assert created.payload["parent_id"] == handle.run_id
        await hosts.check([handle.run_id, child])


@pytest.mark.modes
async def test_a_childs_end_wakes_its_parked_parent(hosts: Hosts) -> None:
    @play("parent")
    async def parent(ctx: Context) -> list[Any]:
        child = await ctx.start_run("slow", 0.5)
        return [await child.result(), child.run_id, ctx.attempt]

    async with hosts.open(parent, slow, park_after_s=0.05) as rt:
        handle = await rt.submit(parent)
        waiting = await until(rt, handle.run_id, "waiting")
        (wait,) = waiting.waits
        assert (wait.kind, wait.key, waiting.wait_until) == ("child", "#1", None)
        output, child, attempt = await handle.result(timeout=10)
        assert (output, child, attempt) == (0.5, wait.name, 2)
        assert len(await family(hosts, handle.run_id)) == 1
        await hosts.check([handle.run_id, child])


async def test_how_a_child_ended_is_how_its_call_ends(hosts: Hosts) -> None:
    @play("parent")
    async def parent(ctx: Context) -> list[Any]:
        said: list[Any] = []
        try:
            await ctx.call(fails, key="fails")
        except RunFailed as exc:
            said += [exc.error_type, exc.message]
        child = await ctx.start_run(endless, key="endless")
        ctx.log("started", child=child.run_id)
        try:
            await child.result()
        except RunCancelled as exc:
            said += [exc.reason, exc.run_id == child.run_id]
        return said

    async with hosts.open(parent, fails, endless) as rt:
        handle = await rt.submit(parent)

        async def its_endless_child() -> str | None:
            rows = await hosts.ask("SELECT run_id FROM @.runs WHERE play = 'endless' AND status = 'running'")
            return rows[0][0] if rows else None

        assert (await rt.cancel(await eventually(its_endless_child), reason="enough")).won
        assert await handle.result(timeout=10) == ["LookupError", "no such thing", "enough", True]


async def test_a_child_that_loses_its_lease_too_often_wakes_its_parent(hosts: Hosts) -> None:
    @play("crashes", crash_cap=1)
    async def crashes(ctx: Context) -> None:
        await trio.sleep_forever()

    @play("parent")
    async def parent(ctx: Context) -> str:
        try:
            await ctx.call(crashes)
        except RunFailed as exc:
            return exc.error_type
        return "?"

    async with hosts.open(parent, crashes) as rt:
        handle = await rt.submit(parent)
        await until(rt, handle.run_id, "waiting")

        async def gone() -> bool:
            # As if its host had died: the lease is over, and nobody renews it.
            await hosts.ask(
                "UPDATE @.runs SET lease_expires_at = now() - interval '1 s', due_at = now() - interval '1 s',"
                " lease_token = 1 WHERE play = 'crashes' AND status = 'running'",
                "SELECT 1",
            )
            return (await rt.status(handle.run_id)).terminal

        await eventually(gone, within_s=20.0, every_s=0.2)
        assert await handle.result(timeout=5) == "LeaseExpired"


async def test_a_replay_starts_nothing_twice(hosts: Hosts) -> None:
    @play("parent", retries=2, backoff_s=0.01)
    async def parent(ctx: Context) -> list[Any]:
        children = [await ctx.start_run(double, number, key=f"child {number}") for number in range(3)]
        if ctx.failures < 2:
            raise ValueError("again")
        await ctx.sleep(0.3)
        return [await child.result() for child in children]

    async with hosts.open(parent, double) as rt:
        handle = await rt.submit(parent)
        assert await handle.result(timeout=10) == [0, 2, 4]
        assert len(await family(hosts, handle.run_id)) == 3


async def test_a_tree_of_runs_over_two_hosts(hosts: Hosts) -> None:
    @play("node")
    async def node(ctx: Context, depth: int) -> int:
        if not depth:
            return 1
        sums: list[int] = []

        async def branch(number: int) -> None:
            sums.append(await ctx.call(node, depth - 1, key=f"branch {number}"))

        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(branch, number)
        return 1 + sum(sums)

    async with hosts.open(node, park_after_s=0.05) as rt, hosts.open(node, park_after_s=0.05):
        handle = await rt.submit(node, 3)
        assert await handle.result(timeout=30) == 40
        below = await family(hosts, handle.run_id)
        assert len(below) == 39
        assert set(below.values()) == {"completed"}
        await hosts.check([handle.run_id, *below])
        assert await hosts.value("SELECT count(*) FROM @.wakes") == 0


@pytest.mark.modes
async def test_cancelling_a_parent_cancels_the_whole_family_on_every_host(hosts: Hosts) -> None:
    seen: list[float] = []

    @play("leaf")
    async def leaf(ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        finally:
            seen.append(time.monotonic())

    @play("middle")
    async def middle(ctx: Context) -> None:
        await ctx.start_run(leaf, key="a")
        await ctx.call(leaf, key="b")

    @play("top")
    async def top(ctx: Context) -> None:
        await ctx.start_run(middle, key="a")
        await ctx.start_run(slow, 3600.0, key="sleeps", delay=3600)
        await ctx.call(middle, key="b")

    async with hosts.open(top, middle, slow) as rt, hosts.open(leaf) as other:
        handle = await rt.submit(top)

        async def settled() -> bool:
            below = await family(hosts, handle.run_id)
            return sorted(below.values()) == ["queued", *["running"] * 4, *["waiting"] * 2]

        await eventually(settled)
        assert other.readiness()["slots"]["used"] == 4
        started = time.monotonic()
        assert (await rt.cancel(handle.run_id, reason="enough")).won

        async def all_over() -> bool:
            return len(seen) == 4

        await eventually(all_over)
        if hosts.notify:
            assert max(seen) - started < 2.0
        below = await family(hosts, handle.run_id)
        assert set(below.values()) == {"cancelled"}
        leaves = await hosts.ask("SELECT run_id FROM @.runs WHERE play = 'leaf'")
        with pytest.raises(RunCancelled, match="was cancelled: its parent was cancelled: enough"):
            await rt.handle(leaves[0][0]).result(timeout=5)
        assert await hosts.value("SELECT count(*) FROM @.cancellations") == 0
        await hosts.check([handle.run_id, *below])


async def test_a_child_outlives_a_parent_that_only_ends(hosts: Hosts) -> None:
    @play("parent")
    async def parent(ctx: Context) -> str:
        return (await ctx.start_run(slow, 0.4)).run_id

    async with hosts.open(parent, slow) as rt:
        child = await (await rt.submit(parent)).result(timeout=10)
        assert await rt.handle(child).result(timeout=10) == 0.4


async def test_a_parent_waits_for_a_child_only_so_long(hosts: Hosts) -> None:
    """Giving up is durable and ends neither the child nor the next wait for it, in memory and parked."""

    @play("parent", retries=1, backoff_s=0.01)
    async def parent(ctx: Context, seconds: float) -> list[Any]:
        child = await ctx.start_run(until_told, key="a")
        said: list[Any] = []
        for _ in range(2):
            with pytest.raises(WaitTimedOut, match=child.run_id):
                await child.result(timeout=seconds)
            said.append("timed out")
        if ctx.failures == 0:
            raise ValueError("again")
        ctx.log("said", child=child.run_id)
        await ctx.wait_event("go on")
        return [*said, await child.result(timeout=3600), await child.result(), ctx.failures]

    @play("until-told")
    async def until_told(ctx: Context) -> Any:
        return await ctx.wait_event("told")

    async with hosts.open(parent, until_told, park_after_s=0.1) as rt:
        for seconds in (0.0, 0.05, 0.3):
            handle = await rt.submit(parent, seconds)
            (child,) = await eventually(partial(family, hosts, handle.run_id))
            await rt.send_event(handle.run_id, "go on")
            await eventually(partial(named, hosts, handle.run_id, "go on"))
            await rt.send_event(child, "told", "done")
            assert await handle.result(timeout=20) == ["timed out", "timed out", "done", "done", 1]
            await hosts.check([handle.run_id, child])


async def named(hosts: Hosts, run_id: str, event: str) -> bool:
    """Whether a run's wait has taken that event."""
    rows = await hosts.ask(
        f"SELECT wait_key FROM @.events WHERE run_id = '{run_id}' AND name = '{event}' AND wait_key IS NOT NULL"
    )
    return bool(rows)


async def test_bad_limits_of_a_wait_for_a_child_are_refused_by_name(hosts: Hosts) -> None:
    @play("parent")
    async def parent(ctx: Context) -> list[str]:
        child = await ctx.start_run(double, 1)
        said = []
        for timeout, key in (
            (-1, None),
            (float("nan"), None),
            ("1", None),
            (None, "k"),
            (1, "#1"),
            (1e12, None),
        ):
            with pytest.raises(InputRefused) as caught:
                await child.result(timeout, key=key)  # type: ignore[arg-type]
            said.append(caught.value.field)
        assert await child.result(5, key="k") == 2
        return said

    async with hosts.open(parent, double) as rt:
        said = await (await rt.submit(parent)).result(timeout=10)
        assert said == ["timeout", "timeout", "timeout", "key", "key", "timeout"]


async def test_a_thread_starts_children(hosts: Hosts) -> None:
    @play("parent")
    def parent(ctx: SyncContext) -> list[Any]:
        child = ctx.start_run(slow, 0.4)
        with pytest.raises(WaitTimedOut):
            child.result(timeout=0)
        return [ctx.call(double, 4), child.result(timeout=30), ctx.attempt]

    async with hosts.open(parent, slow, double) as rt:
        output = await (await rt.submit(parent)).result(timeout=10)
        assert output[:2] == [8, 0.4]


async def test_bad_children_are_refused_by_name(hosts: Hosts) -> None:
    @play("parent")
    async def parent(ctx: Context) -> list[str]:
        said = []

        async def refused(kind: type[InputRefused], *arguments: Any, **keywords: Any) -> None:
            with pytest.raises(kind) as caught:
                await ctx.start_run(*arguments, **keywords)
            said.append(caught.value.field)

        await refused(UnknownPlay, "nobody's", key="a")
        await refused(PayloadRefused, double, float("nan"), key="b")
        await refused(InputRefused, double, 1, key="")
        await refused(InputRefused, double, 1, key="c", priority=7)
        await refused(InputRefused, double, 1, key="d", delay=-1)
        await refused(InputRefused, double, 1, key="e", labels={"a": 5})
        child = await ctx.start_run(double, 1, key="f")
        assert isinstance(child, Child)
        await refused(InputRefused, double, 1, key="f")
        return said

    async with hosts.open(parent, double) as rt:
        said = await (await rt.submit(parent)).result(timeout=10)
        assert said == ["play", "input", "key", "priority", "delay", "labels['a']", "key"]


async def test_a_play_that_changes_what_a_key_starts_hears_of_it(hosts: Hosts) -> None:
    @play("parent")
    async def parent(ctx: Context) -> None:
        await ctx.start_run(double, 1, key="a")

    async with hosts.open(parent, double) as rt:
        # Somebody has taken the child's id already, for something else.
        from runtime import ids

        await rt.submit(double, 2, run_id=ids.child_run_id("the-parent", "a"))
        with pytest.raises(RunFailed, match="one key starts one child"):
            await (await rt.submit(parent, run_id="the-parent")).result(timeout=10)


async def test_children_go_on_while_their_parents_host_restarts(hosts: Hosts) -> None:
    @play("parent")
    async def parent(ctx: Context) -> list[Any]:
        return [await ctx.call(slow, 0.8), ctx.attempt]

    async with hosts.open(parent, slow) as rt:
        handle = await rt.submit(parent)
        await until(rt, handle.run_id, "waiting")
    async with hosts.open(parent, slow) as rt:
        output = await rt.handle(handle.run_id).result(timeout=10)
        assert output[0] == 0.8
        assert len(await family(hosts, handle.run_id)) == 1
        await check_quiet(hosts, rt)


async def check_quiet(hosts: Hosts, rt: Runtime) -> None:
    async def quiet() -> bool:
        return not await hosts.value("SELECT count(*) FROM @.wakes")

    await eventually(quiet)
    assert rt.readiness()["ready"]
