"""Group commit that one bad item cannot spoil.

Owns splitting: a batch that failed because of one item is halved until that item stands alone. It never
retries a lost link, which is the next life's work.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import trio

from sql.errors import Deadlock, ItemFault, LockTimedOut, SerializationLost, StatementTooSlow

T = TypeVar("T")

# Faults that say nothing of the item: it goes through a little later.
PASSING_FAULTS = (LockTimedOut, Deadlock, SerializationLost)

# Two transactions met by chance: the same item may well go through at the next try.
_CHANCE = (Deadlock, SerializationLost)
_CHANCE_TRIES = 3


class Portion:
    """How much goes into one call: halved when a call was too slow for its deadline, doubled up to ``full`` when
    calls go through. Kept across an actor's lives, so that a batch that is too heavy is not repeated for ever."""

    def __init__(self, full: int) -> None:
        self.full = full
        self.most = full

    @contextlib.contextmanager
    def adapt(self) -> Iterator[None]:
        """Surrounds one call."""
        try:
            yield
        except StatementTooSlow:
            self.most = max(1, self.most // 2)
            raise
        self.most = min(self.full, 2 * self.most)


async def commit_in_groups(
    items: Sequence[T],
    call: Callable[[Sequence[T]], Awaitable[None]],
    *,
    fail: Callable[[T, ItemFault], None],
) -> None:
    """Make one set-based ``call(items)``, which answers each item; on an ``ItemFault`` halve and go on.

    The item that fails alone is answered with ``fail(item, error)``; deadlocks and serialization failures
    get a few quick tries first. Every other error propagates at once, with the rest unanswered.
    """
    tries = 0
    stack = [items] if items else []
    while stack:
        group = stack.pop()
        try:
            await call(group)
        except ItemFault as error:
            if len(group) > 1:
                middle = len(group) // 2
                stack += [group[middle:], group[:middle]]
                continue
            tries += 1
            if isinstance(error, _CHANCE) and tries < _CHANCE_TRIES:
                await trio.sleep(random.uniform(0.001, 0.010) * tries)
                stack.append(group)
                continue
            fail(group[0], error)
        tries = 0
