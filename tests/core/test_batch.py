"""Group commit: one bad item ends alone, the rest goes through."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio
import trio.testing

from actors.core import Portion, commit_in_groups
from sql.errors import (
    Deadlock,
    ItemFault,
    KernelRefused,
    LinkLost,
    LockTimedOut,
    SerializationLost,
    StatementTooSlow,
)


class Database:
    """Takes batches of numbers; the bad ones refuse every batch that they are in."""

    def __init__(self, bad: dict[int, ItemFault]) -> None:
        self.bad = bad
        self.calls: list[list[int]] = []
        self.stored: list[int] = []
        self.failed: dict[int, ItemFault] = {}

    async def call(self, items: Sequence[int]) -> None:
        self.calls.append(list(items))
        await trio.lowlevel.checkpoint()
        for item in items:
            if item in self.bad:
                raise self.bad[item]
        self.stored += items

    def fail(self, item: int, error: ItemFault) -> None:
        assert item not in self.failed
        self.failed[item] = error


async def commit(database: Database, items: Sequence[int]) -> None:
    await commit_in_groups(items, database.call, fail=database.fail)


async def test_a_good_batch_is_one_call() -> None:
    database = Database({})
    await commit(database, range(100))
    assert database.calls == [list(range(100))]


async def test_no_items_no_call() -> None:
    database = Database({})
    await commit(database, [])
    assert database.calls == []


@pytest.mark.parametrize("bad", [(0,), (99,), (50,), (3, 4), (0, 31, 64, 99), tuple(range(100))])
async def test_bad_items_end_alone(bad: tuple[int, ...]) -> None:
    error = KernelRefused("no", "23514")
    database = Database(dict.fromkeys(bad, error))
    await commit(database, list(range(100)))
    assert database.stored == [item for item in range(100) if item not in bad]
    assert database.failed == dict.fromkeys(bad, error)


async def test_one_bad_item_costs_a_logarithm_of_calls() -> None:
    database = Database({77: LockTimedOut("locked", "55P03")})
    await commit(database, list(range(128)))
    assert len(database.calls) == 1 + 2 * 7


async def test_a_lost_link_propagates_at_once() -> None:
    lost = LinkLost("gone")
    calls: list[int] = []

    async def call(items: Sequence[int]) -> None:
        calls.append(len(items))
        raise lost

    with pytest.raises(LinkLost) as caught:
        await commit_in_groups([1, 2, 3], call, fail=lambda item, error: pytest.fail("answered"))
    assert caught.value is lost
    assert calls == [3]


async def test_chance_meetings_are_tried_again(autojump_clock: trio.testing.MockClock) -> None:
    tries: list[int] = []

    async def call(items: Sequence[str]) -> None:
        tries.append(len(items))
        if len(tries) < 3:
            raise Deadlock("met", "40P01")

    await commit_in_groups(["a"], call, fail=lambda item, error: pytest.fail("gave up"))
    assert tries == [1, 1, 1]


async def test_a_chance_that_never_comes_ends(autojump_clock: trio.testing.MockClock) -> None:
    database = Database({1: SerializationLost("lost", "40001")})
    await commit(database, [1, 2])
    assert database.stored == [2]
    assert list(database.failed) == [1]
    assert database.calls.count([1]) == 3


def test_a_portion_halves_when_a_call_is_too_slow_and_doubles_back() -> None:
    portion = Portion(500)

    def too_slow() -> int:
        with pytest.raises(StatementTooSlow), portion.adapt():
            raise StatementTooSlow("no end within 5 s")
        return portion.most

    def in_time() -> int:
        with portion.adapt():
            pass
        return portion.most

    assert portion.most == 500
    assert in_time() == 500
    assert [too_slow() for _ in range(3)] == [250, 125, 62]
    assert [in_time() for _ in range(4)] == [124, 248, 496, 500]
    assert [too_slow() for _ in range(20)][-1] == 1
    assert [in_time() for _ in range(20)][-1] == 500


@pytest.mark.parametrize("error", [LinkLost("gone"), KernelRefused("no", "23514"), LockTimedOut("", "55P03")])
def test_other_errors_leave_a_portion_as_it_is(error: Exception) -> None:
    portion = Portion(8)
    with pytest.raises(StatementTooSlow), portion.adapt():
        raise StatementTooSlow("no end within 5 s")
    with pytest.raises(type(error)), portion.adapt():
        raise error
    assert portion.most == 4
