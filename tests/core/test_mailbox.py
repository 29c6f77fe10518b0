"""Mailboxes: order, bounds, closing, and that nothing handed over is silently lost."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from actors.core import EndOfMailbox, Mailbox, Reply, WakeFlag
from sql.errors import HostStopping, MailboxFull, OutcomeUnknown, RunlaneError


async def test_take_drains_what_is_there_in_order_and_never_waits_for_more() -> None:
    box: Mailbox[int] = Mailbox("box")
    for item in range(5):
        box.send_nowait(item)
    assert await box.take(3) == [0, 1, 2]
    assert await box.take(100) == [3, 4]
    assert len(box) == 0
    assert box.in_flight == 5


async def test_take_waits_for_the_first(autojump_clock: trio.testing.MockClock) -> None:
    box: Mailbox[str] = Mailbox("box")
    taken: list[str] = []

    async def taker() -> None:
        taken.extend(await box.take(10))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(taker)
        await trio.testing.wait_all_tasks_blocked()
        assert taken == []
        await box.send("a")
    assert taken == ["a"]


async def test_take_ends_at_its_deadline_with_nothing(autojump_clock: trio.testing.MockClock) -> None:
    box: Mailbox[str] = Mailbox("box")
    assert await box.take(10, trio.current_time() + 2) == []
    box.send_nowait("a")
    assert await box.take(10, trio.current_time() - 1) == ["a"]


async def test_what_a_life_did_not_answer_is_the_next_ones_first(
    autojump_clock: trio.testing.MockClock,
) -> None:
    box: Mailbox[str] = Mailbox("box")
    for item in "abcd":
        box.send_nowait(item)
    first = await box.take(3)
    box.done(first[1:2])
    assert box.requeue() == 2
    again = await box.take(10)
    assert again == ["a", "c", "d"]
    box.done(again)
    assert box.requeue() == 0


async def test_equal_items_are_told_apart() -> None:
    box: Mailbox[list[int]] = Mailbox("box")
    first, second = [1], [1]
    box.send_nowait(first)
    box.send_nowait(second)
    await box.take(2)
    box.done([second])
    assert box.requeue() == 1
    assert (await box.take(1))[0] is first


async def test_full_refuses_or_waits(autojump_clock: trio.testing.MockClock) -> None:
    box: Mailbox[int] = Mailbox("box", capacity=2)
    box.send_nowait(1)
    box.send_nowait(2)
    with pytest.raises(MailboxFull):
        box.send_nowait(3)
    sent: list[int] = []

    async def sender(item: int) -> None:
        await box.send(item)
        sent.append(item)

    async with trio.open_nursery() as nursery:
        for item in (3, 4, 5):
            nursery.start_soon(sender, item)
            await trio.testing.wait_all_tasks_blocked()
        assert sent == []
        assert await box.take(1) == [1]
        await trio.testing.wait_all_tasks_blocked()
        assert sent == [3]
        assert await box.take(10) == [2, 3]
    assert sorted(sent) == [3, 4, 5]
    assert sorted(box.take_nowait(10)) == [4, 5]


async def test_a_cancelled_sender_hands_over_nothing_and_passes_the_room_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    box: Mailbox[int] = Mailbox("box", capacity=1)
    box.send_nowait(1)
    scope = trio.CancelScope()

    async def doomed() -> None:
        with scope:
            await box.send(2)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(doomed)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(box.send, 3)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        box.take_nowait(1)  # gives the room to the doomed one, before it can say that it is cancelled
    assert box.take_nowait(10) == [3]


async def test_close_refuses_senders_and_lets_the_taker_drain(autojump_clock: trio.testing.MockClock) -> None:
    """T12: the end of sending is not the end of what was sent."""
    box: Mailbox[int] = Mailbox("box", capacity=1)
    box.send_nowait(1)
    refused: list[int] = []

    async def late() -> None:
        try:
            await box.send(2)
        except HostStopping:
            refused.append(2)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(late)
        await trio.testing.wait_all_tasks_blocked()
        box.close()
        box.close()
    assert refused == [2]
    with pytest.raises(HostStopping):
        box.send_nowait(3)
    with pytest.raises(HostStopping):
        await box.send(3)
    assert await box.take(10) == [1]
    with pytest.raises(EndOfMailbox):
        await box.take(10)


async def test_close_wakes_a_waiting_taker(autojump_clock: trio.testing.MockClock) -> None:
    box: Mailbox[int] = Mailbox("box")
    ended: list[bool] = []

    async def taker() -> None:
        try:
            await box.take(1)
        except EndOfMailbox:
            ended.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(taker)
        await trio.testing.wait_all_tasks_blocked()
        box.close()
    assert ended == [True]


async def test_a_cancelled_take_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox("box")
    box.send_nowait(1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await box.take(1)
    assert scope.cancelled_caught
    assert await box.take(1) == [1]


async def test_abandon_tells_every_item_which_fate_it_met() -> None:
    fates: dict[str, type[RunlaneError]] = {}
    box: Mailbox[str] = Mailbox("box", abandon=lambda item, error: fates.update({item: type(error)}))
    for item in ("taken", "answered", "waiting"):
        box.send_nowait(item)
    await box.take(2)
    box.done(["answered"])
    assert box.abandon() == 2
    assert fates == {"taken": OutcomeUnknown, "waiting": HostStopping}
    assert box.abandon() == 0


async def test_mailboxes_can_share_a_wake_flag(autojump_clock: trio.testing.MockClock) -> None:
    flag = WakeFlag()
    first: Mailbox[int] = Mailbox("first", wake=flag)
    second: Mailbox[int] = Mailbox("second", wake=flag)
    second.send_nowait(7)
    assert await flag.wait(trio.current_time() + 1)
    assert first.take_nowait(10) == []
    assert second.take_nowait(10) == [7]


# --- replies ------------------------------------------------------------------------------------------


async def test_reply_before_and_after_the_wait(autojump_clock: trio.testing.MockClock) -> None:
    early: Reply[int] = Reply()
    early.set_result(1)
    assert await early.wait(5) == 1
    late: Reply[int] = Reply()
    async with trio.open_nursery() as nursery:

        async def answer() -> None:
            await trio.sleep(2)
            late.set_result(2)

        nursery.start_soon(answer)
        assert await late.wait(5) == 2


async def test_reply_error_and_second_setting() -> None:
    reply: Reply[int] = Reply()
    reply.set_error(MailboxFull("first"))
    reply.set_result(3)
    reply.set_error(ValueError("late"))
    with pytest.raises(MailboxFull, match="first"):
        await reply.wait()


async def test_reply_deadline_is_outcome_unknown(autojump_clock: trio.testing.MockClock) -> None:
    reply: Reply[int] = Reply()
    with pytest.raises(OutcomeUnknown, match="30 s"):
        await reply.wait(30)
    reply.set_result(4)  # what comes late is still there for who asks again
    assert await reply.wait(1) == 4
