"""Turns: the loop of an actor that commits what has come, and asks again for what was locked.

Owns when the next turn is. It never knows what a turn does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import trio

from actors.core.backoff import Backoff
from actors.core.mailbox import EndOfMailbox, Mailbox
from actors.core.supervisor import Life

T = TypeVar("T")


async def each_turn(
    life: Life,
    mailbox: Mailbox[T],
    turn: Callable[[Sequence[T]], Awaitable[list[T]]],
    *,
    most: Callable[[], int],
    locked: Backoff,
) -> None:
    """Take what waits, up to ``most()`` and as soon as there is something, and give it to ``turn``, until the end.

    ``turn`` returns the items whose row is locked: they come again with what arrives next, or alone after ``locked``,
    also when nothing more can come.
    """
    busy: list[T] = []
    while True:
        try:
            if not busy:
                locked.reset()
            fresh = await mailbox.take(most(), trio.current_time() + locked.next() if busy else None)
        except EndOfMailbox:
            if not busy:
                return
            await trio.sleep(locked.next())
            fresh = []
        life.beat()
        busy = await turn(busy + fresh)
