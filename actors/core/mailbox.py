"""Mailboxes and replies: how anybody talks to an actor inside the host.

Owns the queue, what is in flight, and the promise that nothing handed over is silently lost: a mailbox
outlives its actor's lives, and what one life took without answering is given to the next. It never knows a
message type, and durable work is never only here: the database has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import trio

from actors.core.wake import WakeFlag
from sql.errors import HostStopping, MailboxFull, OutcomeUnknown, RunlaneError

T = TypeVar("T")


class EndOfMailbox(RunlaneError):
    """The mailbox is closed and empty: the actor is done."""


class Reply(Generic[T]):
    """The answer to one message, set by an actor, waited for by a caller. Setting it twice is ignored."""

    __slots__ = ("_done", "_error", "_event", "_value")

    def __init__(self) -> None:
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._event: trio.Event | None = None

    @property
    def done(self) -> bool:
        """Whether it was answered."""
        return self._done

    def set_result(self, value: T) -> None:
        """Answer with a value."""
        if not self._done:
            self._value = value
            self._finish()

    def set_error(self, error: BaseException) -> None:
        """Answer with an error, which ``wait`` raises."""
        if not self._done:
            self._error = error
            self._finish()

    def _finish(self) -> None:
        self._done = True
        if self._event is not None:
            self._event.set()

    async def wait(self, timeout_s: float | None = None) -> T:
        """The answer. ``OutcomeUnknown`` when ``timeout_s`` passed without one: it may still happen."""
        if self._done:
            await trio.lowlevel.checkpoint_if_cancelled()
        else:
            if self._event is None:
                self._event = trio.Event()
            if timeout_s is None:
                await self._event.wait()
            else:
                with trio.move_on_after(max(0.0, timeout_s)):
                    await self._event.wait()
        if self._error is not None:
            raise self._error
        if not self._done:
            raise OutcomeUnknown(f"no answer within {timeout_s:g} s; asking again is safe")
        return self._value  # type: ignore[return-value]


class Mailbox(Generic[T]):
    """A bounded queue with one taker.

    ``capacity`` bounds what waits; what is in flight is bounded by the taker. ``wake`` is set at each arrival
    and at the close: give one flag to several mailboxes for an actor that waits on more than mail.
    ``abandon(item, error)`` is called for each item that nobody will answer any more.
    """

    __slots__ = ("_abandon", "_closed", "_in_flight", "_queue", "_senders", "capacity", "name", "wake")

    def __init__(
        self,
        name: str,
        capacity: int = 10_000,
        *,
        wake: WakeFlag | None = None,
        abandon: Callable[[T, RunlaneError], None] | None = None,
    ) -> None:
        self.name = name
        self.capacity = capacity
        self.wake = WakeFlag() if wake is None else wake
        self._abandon = abandon
        self._queue: deque[T] = deque()
        # Keyed by identity: messages need no equality, and an answered item leaves in constant time.
        self._in_flight: dict[int, T] = {}
        self._senders: deque[trio.Event] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def in_flight(self) -> int:
        """How many items were taken and not answered."""
        return len(self._in_flight)

    @property
    def closed(self) -> bool:
        """Whether sending is over."""
        return self._closed

    # --- senders -------------------------------------------------------------------------------------

    def send_nowait(self, item: T) -> None:
        """Hand over. ``MailboxFull`` at capacity, ``HostStopping`` once closed."""
        if self._closed:
            raise HostStopping(f"{self.name}: the runtime is stopping")
        if len(self._queue) >= self.capacity:
            raise MailboxFull(f"{self.name}: {self.capacity} items wait already")
        self._queue.append(item)
        self.wake.set()

    async def send(self, item: T) -> None:
        """Hand over, waiting while the mailbox is full. ``HostStopping`` once closed.

        When cancelled, the item was not handed over.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while len(self._queue) >= self.capacity and not self._closed:
            room = trio.Event()
            self._senders.append(room)
            try:
                await room.wait()
            except trio.Cancelled:
                if room.is_set():  # pass the room on, or another sender would wait for ever
                    self._wake_senders()
                else:
                    self._senders.remove(room)
                raise
        self.send_nowait(item)

    def close(self) -> None:
        """No more sends; the taker gets what waits, then ``EndOfMailbox``. Idempotent."""
        self._closed = True
        self.wake.set()
        while self._senders:
            self._senders.popleft().set()

    # --- the taker -----------------------------------------------------------------------------------

    async def arrives(self) -> bool:
        """Wait until something waits here, and take nothing. False once it is closed and empty."""
        while not self._queue and not self._closed:
            await self.wake.wait()
        if self._queue:
            self.wake.set()  # the taker may wait for more than mail
        return bool(self._queue)

    async def take(self, most: int, deadline: float | None = None) -> list[T]:
        """Wait for at least one item, then return up to ``most`` without waiting; they are in flight now.

        Returns an empty list when ``deadline`` (``trio.current_time()``) passes first. ``EndOfMailbox`` when
        closed and empty.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._queue:
            if self._closed:
                raise EndOfMailbox(self.name)
            if not await self.wake.wait(deadline) and not self._queue:
                return []
        return self.take_nowait(most)

    def take_nowait(self, most: int) -> list[T]:
        """Up to ``most`` items, possibly none; they are in flight from now on."""
        queue = self._queue
        if len(queue) <= most:
            items = list(queue)
            queue.clear()
        else:
            items = [queue.popleft() for _ in range(most)]
        in_flight = self._in_flight
        for item in items:
            in_flight[id(item)] = item
        if self._senders:
            self._wake_senders()
        return items

    def done(self, items: Iterable[T]) -> None:
        """These are answered: the next life need not see them."""
        in_flight = self._in_flight
        for item in items:
            in_flight.pop(id(item), None)

    def requeue(self) -> int:
        """Put what is in flight back in front, oldest first; how many there were.

        The supervisor does it before each life.
        """
        count = len(self._in_flight)
        if count:
            self._queue.extendleft(reversed(self._in_flight.values()))
            self._in_flight.clear()
            self.wake.set()
        return count

    def abandon(self) -> int:
        """Nobody will answer any more: close, and tell each item so. How many there were."""
        self.close()
        taken, waiting = list(self._in_flight.values()), list(self._queue)
        self._in_flight.clear()
        self._queue.clear()
        if self._abandon is not None:
            for item in taken:
                self._abandon(item, OutcomeUnknown(f"{self.name}: the runtime stopped before the answer"))
            for item in waiting:
                self._abandon(item, HostStopping(f"{self.name}: the runtime stopped first"))
        return len(taken) + len(waiting)

    def _wake_senders(self) -> None:
        for _ in range(min(len(self._senders), self.capacity - len(self._queue))):
            self._senders.popleft().set()
