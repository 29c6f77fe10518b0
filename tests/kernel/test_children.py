"""Children in the kernel: fences of their start, ends that wake parents, cancellations that reach everybody."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

import attrs
import pytest

from sql import children, claim, control
from sql.claim import Claimed
from sql.waits import Wait
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, child_of, open_kernel


def kid(item: Claimed, key: str = "kid") -> Wait:
    return Wait(key, "child", child_of(item.run_id, key))


async def begun(kernel: Kernel, run_id: str) -> Claimed:
    """The next attempt of this run."""
    (item,) = [found for found in await kernel.claim() if found.run_id == run_id]
    return item


async def test_a_start_is_fenced_and_happens_once(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started(org_id="o")
        for stale in (attrs.evolve(item, token=1), attrs.evolve(item, attempt=2)):
            assert await kernel.start_child(stale) == children.Launched("lost", False)
        assert await kernel.start_child(item, input=1, request=5) == children.Launched("started", True)
        assert await kernel.start_child(item, input=1, request=5) == children.Launched("started", True)
        assert await kernel.start_child(item, input=1) == children.Launched("started", False)
        assert (await kernel.start_child(item, input=2)).answer == "conflict"
        assert (await kernel.start_child(item, input=1, play="beta")).answer == "conflict"
        (row,) = await kernel.fetch(
            "SELECT parent_id, root_id FROM @schema@.runs WHERE parent_id IS NOT NULL"
        )
        assert tuple(row) == (item.run_id, item.run_id)
        child = await begun(kernel, child_of(item.run_id))
        await kernel.start_child(child, "grandkid")
        roots = await kernel.fetch("SELECT DISTINCT root_id FROM @schema@.runs WHERE root_id IS NOT NULL")
        assert [row["root_id"] for row in roots] == [item.run_id]
        await kernel.settle(item, "released")
        assert (await kernel.start_child(item, "late")).answer == "lost"
        again = await begun(kernel, item.run_id)
        assert not again.waits["kid"].done
        assert (again.waits["kid"].kind, again.waits["kid"].name) == ("child", child.run_id)
        await check_invariants(kernel.session)


async def test_a_locked_parent_is_busy_and_holds_up_nobody(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        held, free = await kernel.started(), await kernel.started()
        await caller.begin()
        await caller.doors(kernel).renew(held)
        launches = [
            children.Launch(
                item.run_id,
                item.attempt,
                item.token,
                "kid",
                kernel.submission(run_id=child_of(item.run_id)),
            )
            for item in (held, free)
        ]
        answers = await children.start(kernel.session, launches, release_id=None, environment=None)
        assert [answer.answer for answer in answers] == ["busy", "started"]
        await caller.commit()
        answers = await children.start(kernel.session, launches, release_id=None, environment=None)
        assert [attrs.astuple(answer) for answer in answers] == [("started", True), ("started", True)]


async def test_a_parent_that_is_cancelled_while_a_child_is_being_started_still_reaches_it(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        # The start comes first: the cancellation waits for nobody, and finds the child when it is asked again.
        await caller.begin()
        assert (await caller.doors(kernel).start_child(item)).answer == "started"
        assert await kernel.cancel(item.run_id) == "busy"
        assert (await kernel.renew(item)).answer == "busy"
        await caller.commit()
        assert await kernel.cancel(item.run_id) == "cancelled"
        assert await control.sweep(kernel.session, limit=10) == (1, 0)
        assert await kernel.status(child_of(item.run_id)) == "cancelled"
        # The cancellation comes first: nothing is started any more.
        item = await kernel.started()
        await caller.begin()
        assert await caller.doors(kernel).cancel(item.run_id) == "cancelled"
        assert (await kernel.start_child(item)).answer == "busy"
        await caller.commit()
        assert (await kernel.start_child(item)).answer == "lost"
        assert await kernel.status(child_of(item.run_id)) is None
        await check_invariants(kernel.session)


async def _completed(kernel: Kernel, child: Claimed) -> None:
    await kernel.complete(child, "out")


async def _failed(kernel: Kernel, child: Claimed) -> None:
    await kernel.settle(child, "failed", payload='{"error": {"message": "no"}}')


async def _cancelled(kernel: Kernel, child: Claimed) -> None:
    await kernel.cancel(child.run_id)


async def _crashed(kernel: Kernel, _: Claimed) -> None:
    await kernel.advance(61.0)
    await kernel.expire(crash_cap=0)


@pytest.mark.parametrize("end", [_completed, _failed, _cancelled, _crashed])
async def test_every_end_of_a_child_wakes_its_parent(
    dsn: str, schema: str, end: Callable[[Kernel, Claimed], Awaitable[None]]
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        await kernel.execute("UPDATE @schema@.plays SET crash_cap = 0")
        item = await kernel.started()
        await kernel.start_child(item)
        await kernel.park_on(item, kid(item))
        child = await begun(kernel, child_of(item.run_id))
        assert await kernel.claim() == []
        await end(kernel, child)
        assert await kernel.sweep_wakes() == (1, False)
        state = (await begun(kernel, item.run_id)).waits["kid"]
        ended = json.loads(state.payload or "")
        assert ended["status"] == await kernel.status(child.run_id)
        fact = await kernel.fetchval(
            "SELECT payload FROM @schema@.facts WHERE run_id = $1 AND lane = 0 ORDER BY seq DESC LIMIT 1",
            child.run_id,
        )
        assert ended["payload"] == json.loads(fact)
        await check_invariants(kernel.session)


async def test_a_childs_end_in_an_open_transaction_is_not_lost_by_a_park(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        await kernel.start_child(item)
        child = await begun(kernel, child_of(item.run_id))
        await caller.begin()
        await caller.doors(kernel).complete(child)
        await kernel.park_on(item, kid(item))
        assert await kernel.sweep_wakes() == (0, False)
        assert await kernel.claim() == []
        await caller.commit()
        assert await kernel.sweep_wakes() == (1, False)
        assert (await begun(kernel, item.run_id)).waits["kid"].done


async def test_a_child_that_has_ended_before_the_park_wakes_at_once(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.start_child(item)
        await kernel.complete(await begun(kernel, child_of(item.run_id)))
        assert await kernel.sweep_wakes() == (0, False)
        assert (await kernel.try_waits(item, kid(item))).states["kid"].done
        await kernel.park_on(item, kid(item))
        assert (await begun(kernel, item.run_id)).waits["kid"].done


async def test_a_child_that_is_gone_is_told_as_missing(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        tried = await kernel.try_waits(item, Wait("kid", "child", "never-was"))
        assert json.loads(tried.states["kid"].payload or "") == {"status": None, "payload": None}


async def test_a_cancellation_reaches_every_generation_and_only_its_own_family(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        top, other = await kernel.started(), await kernel.started()
        await kernel.start_child(other)
        families = [top]
        for _ in range(3):  # a chain; each also has a child that has ended, one queued and one parked
            parent = families[-1]
            for key in ("next", "over", "queued", "parked"):
                await kernel.start_child(parent, key, delay_s=500.0 if key == "queued" else None)
            items = {item.run_id: item for item in await kernel.claim()}
            await kernel.complete(items[child_of(parent.run_id, "over")])
            await kernel.park(items[child_of(parent.run_id, "parked")], nap=900.0)
            families.append(items[child_of(parent.run_id, "next")])
        assert await kernel.cancel(top.run_id) == "cancelled"
        sweeps = 0
        while (await control.sweep(kernel.session, limit=100))[1] or not sweeps:
            sweeps += 1
        assert sweeps <= 3
        rows = await kernel.fetch("SELECT status, count(*) AS n FROM @schema@.runs GROUP BY status")
        assert {row["status"]: row["n"] for row in rows} == {
            "cancelled": 10, "completed": 3, "running": 2,
        }  # fmt: skip
        assert await claim.held(kernel.session, owner=kernel.owner) != []
        assert await kernel.sweep_wakes() == (0, False)
        await check_invariants(kernel.session)
