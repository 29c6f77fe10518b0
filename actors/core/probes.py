"""Places where a test can watch or hold the code.

Owns named points that cost one attribute read in production. It never changes what the code does unless a
test armed it, and needs nothing from any test library.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import trio


class Probe:
    """The code calls ``hit()`` and ``gate()``; a test calls ``arm``, ``wait``, ``hold`` and ``release``."""

    __slots__ = ("_armed", "_arrived", "_held", "name")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self._armed: deque[Any] | None = None
        self._arrived = trio.Event()
        self._held: trio.Event | None = None

    def hit(self, value: Any = None) -> None:
        """Say that this point was passed. Nothing happens unless armed."""
        if self._armed is not None:
            self._armed.append(value)
            self._arrived.set()

    async def gate(self, value: Any = None) -> None:
        """Like ``hit``, and stay here while a test holds the probe. No checkpoint unless held."""
        self.hit(value)
        if self._held is not None:
            await self._held.wait()

    def arm(self) -> Probe:
        """Start to remember hits."""
        if self._armed is None:
            self._armed = deque()
        return self

    def hold(self) -> Probe:
        """Arm, and stop the code at its next ``gate``."""
        self._held = trio.Event()
        return self.arm()

    def release(self) -> None:
        """Let the code go on, and hold no more."""
        if self._held is not None:
            self._held.set()
            self._held = None

    async def wait(self, timeout_s: float = 10.0) -> Any:
        """The next hit's value since ``arm``, oldest first. ``trio.TooSlowError`` after ``timeout_s``."""
        armed = self.arm()._armed
        assert armed is not None
        with trio.fail_after(timeout_s):
            while not armed:
                self._arrived = trio.Event()
                await self._arrived.wait()
        return armed.popleft()
