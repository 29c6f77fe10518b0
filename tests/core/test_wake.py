"""WakeFlag: many sets, one wake, none lost."""

from __future__ import annotations

import trio
import trio.testing

from actors.core import WakeFlag


async def test_set_before_wait_is_not_lost() -> None:
    flag = WakeFlag()
    flag.set()
    flag.set()
    assert await flag.wait()
    assert not flag.is_set


async def test_two_sets_are_one_wake(autojump_clock: trio.testing.MockClock) -> None:
    flag = WakeFlag()
    flag.set()
    flag.set()
    assert await flag.wait(trio.current_time() + 1)
    assert not await flag.wait(trio.current_time() + 1)


async def test_deadline_passes_without_a_set(autojump_clock: trio.testing.MockClock) -> None:
    flag = WakeFlag()
    start = trio.current_time()
    assert not await flag.wait(start + 3)
    assert trio.current_time() - start == 3


async def test_set_wakes_the_waiter(autojump_clock: trio.testing.MockClock) -> None:
    flag, woken = WakeFlag(), []

    async def waiter() -> None:
        while await flag.wait(trio.current_time() + 10):
            woken.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(waiter)
        for _ in range(3):
            await trio.sleep(1)
            flag.set()
    assert len(woken) == 3


async def test_a_cancelled_wait_keeps_the_wake() -> None:
    flag = WakeFlag()
    flag.set()
    with trio.CancelScope() as scope:
        scope.cancel()
        await flag.wait()
    assert scope.cancelled_caught
    assert flag.is_set


async def test_wait_is_a_checkpoint_even_when_set() -> None:
    flag = WakeFlag()
    flag.set()
    with trio.testing.assert_checkpoints():
        await flag.wait()
