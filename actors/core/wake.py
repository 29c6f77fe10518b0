"""A coalescing wake-up: many sets, one wake.

Owns the flag that notifications, freed slots and due times set. It carries no data: whoever wakes up reads
the truth from the database or from its mailbox.
"""

from __future__ import annotations

import math

import trio


class WakeFlag:
    """Set by anybody on the trio thread, waited for by one task.

    ``set`` before ``wait`` is not lost; two sets before a wait are one wake. ``forward`` is set too, for a task that
    waits on that one for several.
    """

    __slots__ = ("_event", "_flag", "_forward")

    def __init__(self, forward: WakeFlag | None = None) -> None:
        self._flag = False
        self._event: trio.Event | None = None
        self._forward = forward

    def set(self) -> None:
        """Wake the waiter, or let its next wait return at once. Never raises, never blocks."""
        self._flag = True
        if self._event is not None:
            self._event.set()
        if self._forward is not None:
            self._forward.set()

    def clear(self) -> bool:
        """Forget a wake-up that came; True if there was one."""
        was, self._flag = self._flag, False
        return was

    @property
    def is_set(self) -> bool:
        """Whether a wait would return at once."""
        return self._flag

    async def wait(self, deadline: float | None = None) -> bool:
        """Wait until set, and clear it: True. False when ``deadline`` (``trio.current_time()``) passed first.

        A checkpoint in every case. A cancelled wait leaves the flag as it was.
        """
        if self._flag:
            await trio.lowlevel.checkpoint()
            self._flag = False
            return True
        with trio.move_on_at(math.inf if deadline is None else deadline):
            while not self._flag:
                if self._event is None or self._event.is_set():
                    self._event = trio.Event()
                await self._event.wait()
        self._event = None
        return self.clear()


class WakeFan:
    """One cause that several tasks wait for, each with a flag of its own."""

    def __init__(self) -> None:
        self._flags: list[WakeFlag] = []

    def join(self) -> WakeFlag:
        """A flag for one more waiter."""
        flag = WakeFlag()
        self._flags.append(flag)
        return flag

    def set(self) -> None:
        """Set all of them."""
        for flag in self._flags:
            flag.set()
