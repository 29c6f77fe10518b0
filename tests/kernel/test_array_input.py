"""Array-input intent: registered before the first page is staged, by the live attempt only, and seen by the end."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from sql import array_input
from sql.claim import Claimed
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

RECEIVER = json.dumps({"array_input_receiver": "keeper"})


def intent(item: Claimed) -> array_input.Intent:
    return array_input.Intent(item.run_id, item.org_id, item.attempt, item.token)


async def register(kernel: Kernel, *intents: array_input.Intent) -> list[str]:
    return await array_input.register(kernel.session, intents)


async def stands(kernel: Kernel, run_id: str) -> tuple[bool, str | None]:
    (row,) = await kernel.fetch(
        "SELECT array_input, terminal_receiver FROM @schema@.runs WHERE run_id = $1", run_id
    )
    return row["array_input"], row["terminal_receiver"]


async def claimed(kernel: Kernel, extras: str | None = RECEIVER, org_id: str | None = "o") -> Claimed:
    await kernel.submit(extras=extras, org_id=org_id)
    (item,) = await kernel.claim()
    return item


async def test_the_live_attempt_registers_as_often_as_it_likes(dsn: str, schema: str) -> None:  # M-1, M-4
    async with open_kernel(dsn, schema) as kernel:
        item = await claimed(kernel)
        assert await stands(kernel, item.run_id) == (False, None)
        for _ in range(3):
            assert await register(kernel, intent(item), intent(item)) == ["done", "done"]
        assert await stands(kernel, item.run_id) == (True, "keeper")
        await check_invariants(kernel.session)


@pytest.mark.parametrize(
    "change", [{"attempt": 2}, {"token": 1}, {"org_id": "other"}, {"org_id": None}, {"run_id": "missing"}]
)
async def test_nobody_else_does(dsn: str, schema: str, change: dict[str, Any]) -> None:  # M-2
    async with open_kernel(dsn, schema) as kernel:
        item = await claimed(kernel)
        assert await register(kernel, attrs.evolve(intent(item), **change)) == ["lost"]
        assert await stands(kernel, item.run_id) == (False, None)


@pytest.mark.parametrize("end", ["completed", "retried", "cancelled", "expired", "taken over"])
async def test_an_attempt_that_is_over_does_not(dsn: str, schema: str, end: str) -> None:  # M-2, M-3
    async with open_kernel(dsn, schema) as kernel:
        item = await claimed(kernel)
        if end == "cancelled":
            await kernel.cancel(item.run_id, "r", mark=False)
        elif end in ("expired", "taken over"):
            await kernel.execute(
                "UPDATE @schema@.runs SET lease_expires_at = created_at, due_at = created_at"
            )
            assert (await kernel.expire()).expired == 1
        else:
            await kernel.settle(item, end)
        if end == "taken over":
            assert len(await kernel.claim()) == 1
        assert await register(kernel, intent(item)) == ["lost"]
        assert (await stands(kernel, item.run_id))[0] is False


@pytest.mark.parametrize("commit", [True, False])
async def test_either_the_terminal_wins_or_it_sees_the_intent(
    dsn: str, schema: str, commit: bool
) -> None:  # M-3
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await claimed(kernel)
        await caller.begin()
        assert await register(caller.doors(kernel), intent(item)) == ["done"]
        # While the registration is open the end asks again; it never passes it unseen.
        assert (await kernel.settle(item, "completed")).answer == "busy"
        await (caller.commit() if commit else caller.rollback())
        assert (await kernel.settle(item, "completed")).answer == "done"
        assert await stands(kernel, item.run_id) == ((True, "keeper") if commit else (False, None))

        other = await claimed(kernel)
        await caller.begin()
        assert (await caller.doors(kernel).settle(other, "completed")).answer == "done"
        assert await register(kernel, intent(other)) == ["busy"]
        await (caller.commit() if commit else caller.rollback())
        assert await register(kernel, intent(other)) == (["lost"] if commit else ["done"])
        await check_invariants(kernel.session)


async def test_without_a_receiver_nothing_may_be_staged(dsn: str, schema: str) -> None:  # M-7, M-12
    async with open_kernel(dsn, schema) as kernel:
        plain = await claimed(kernel, None)
        assert await register(kernel, intent(plain)) == ["no_receiver"]
        assert await stands(kernel, plain.run_id) == (False, None)
        fixed = await claimed(kernel, json.dumps({"terminal_receiver": "always"}), None)
        assert await register(kernel, intent(fixed)) == ["done"]
        assert await stands(kernel, fixed.run_id) == (True, "always")


async def test_the_intent_outlives_attempts(dsn: str, schema: str) -> None:  # M-1
    async with open_kernel(dsn, schema) as kernel:
        item = await claimed(kernel)
        assert await register(kernel, intent(item)) == ["done"]
        await kernel.settle(item, "retried")
        (again,) = await kernel.claim()
        assert (again.attempt, await stands(kernel, item.run_id)) == (2, (True, "keeper"))
        assert await register(kernel, intent(again)) == ["done"]


async def test_the_column_is_as_readers_of_any_age_expect(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        (row,) = await kernel.fetch(
            """SELECT data_type, is_nullable, column_default FROM information_schema.columns
                WHERE table_schema = $1 AND table_name = 'runs' AND column_name = 'array_input'""",
            schema,
        )
        assert tuple(row) == ("boolean", "NO", "false")
