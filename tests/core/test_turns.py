"""Turns: what is locked comes again with what arrives, also when nothing more can come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import attrs
import trio
import trio.testing

from actors.core import Backoff, Life, Mailbox, each_turn


@attrs.define
class Beats:
    """As much of a life as a turn needs."""

    count: int = 0

    def beat(self) -> None:
        self.count += 1


@attrs.define
class Desk:
    """Answers numbers, but each of ``held`` only when it comes for the second time."""

    mailbox: Mailbox[int]
    held: set[int] = attrs.field(factory=set)
    turns: list[list[int]] = attrs.field(factory=list)
    life: Beats = attrs.field(factory=Beats)

    async def turn(self, batch: Sequence[int]) -> list[int]:
        await trio.lowlevel.checkpoint()
        self.turns.append(list(batch))
        busy = [item for item in batch if item in self.held]
        self.held -= set(busy)
        self.mailbox.done([item for item in batch if item not in busy])
        return busy

    async def run(self, most: int = 10) -> None:
        life = cast(Life, cast(Any, self.life))
        await each_turn(
            life, self.mailbox, self.turn, most=lambda: most, locked=Backoff(first_s=1.0, max_s=4.0)
        )


def desk(*items: int, held: Sequence[int] = ()) -> Desk:
    made = Desk(Mailbox("desk"), set(held))
    for item in items:
        made.mailbox.send_nowait(item)
    return made


async def test_what_waits_is_one_turn_up_to_the_most(autojump_clock: Any) -> None:
    one = desk(1, 2, 3)
    one.mailbox.close()
    await one.run(most=2)
    assert one.turns == [[1, 2], [3]]
    assert one.life.count == 2
    assert not one.mailbox.in_flight


async def test_what_is_locked_comes_again_with_what_arrives(autojump_clock: Any) -> None:
    one = desk(1, held=[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await trio.testing.wait_all_tasks_blocked()
        assert one.turns == [[1]]
        one.mailbox.send_nowait(2)
        await trio.testing.wait_all_tasks_blocked()
        assert one.turns == [[1], [1, 2]]
        one.mailbox.close()


async def test_alone_it_comes_again_after_a_moment(autojump_clock: Any) -> None:
    one = desk(1, held=[1])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        await trio.sleep(5.0)
        assert one.turns == [[1], [1]]
        one.mailbox.close()


async def test_the_end_waits_for_what_is_locked(autojump_clock: Any) -> None:
    one = desk(1, held=[1])
    one.mailbox.close()
    await one.run()
    assert one.turns == [[1], [1]]
    assert not one.mailbox.in_flight


async def test_something_arrives_and_stays(autojump_clock: Any) -> None:
    mailbox: Mailbox[int] = Mailbox("m")
    heard: list[bool] = []

    async def wait() -> None:
        heard.append(await mailbox.arrives())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert heard == []
        mailbox.send_nowait(1)
    assert heard == [True]
    assert mailbox.wake.is_set
    assert mailbox.take_nowait(5) == [1]
    mailbox.close()
    assert not await mailbox.arrives()
