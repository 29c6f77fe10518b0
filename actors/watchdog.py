"""Watchdog: a thread that sees what the event loop cannot say itself, and the clock of last resort.

Owns the report of a blocked loop, and the wake-ups of a host whose listener is down. It never touches the database and
never stops anything.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

import trio

from actors.core import Life
from actors.hints import Hints

log = logging.getLogger("runlane.watchdog")

_BEAT_S = 1.0


class Watchdog:
    """Reports a loop that has not turned for ``blocked_after_s``, with the stack of what blocks it.

    ``reachable_at`` is the monotonic time of the listener's last look at the database; when that is older than
    ``backstop_s`` allows, every actor is woken to look for itself. ``guard(now)`` is called at every beat.
    """

    def __init__(
        self,
        hints: Hints,
        *,
        blocked_after_s: float,
        lease_s: float,
        backstop_s: float,
        reachable_at: Callable[[], float | None],
        guard: Callable[[float], None],
    ) -> None:
        self.longest_stall_s = 0.0
        self._hints = hints
        self._blocked_after_s = blocked_after_s
        self._lease_s = lease_s
        self._backstop_s = backstop_s
        self._reachable_at = reachable_at
        self._guard = guard
        # A lease is guarded from its first third on.
        self._beat_s = min(_BEAT_S, lease_s / 6)
        self._beat = time.monotonic()
        self._done = threading.Event()

    async def run(self, life: Life) -> None:
        """Beat until asked to stop."""
        self._done.clear()
        self._beat = time.monotonic()
        thread = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="runlane watchdog", daemon=True
        )
        thread.start()
        life.ready()
        woken_at = time.monotonic()
        try:
            while not life.stopping.is_set():
                with trio.move_on_after(self._beat_s):
                    await life.stopping.wait()
                self._guard(trio.current_time())
                now = time.monotonic()
                stall_s = now - self._beat - self._beat_s
                self._beat = now
                life.beat()
                self.longest_stall_s = max(self.longest_stall_s, stall_s)
                if stall_s > self._lease_s:
                    log.error('event=stalled seconds=%.1f hint="leases are checked first"', stall_s)
                    self._hints.renew.set()
                if now - max(self._reachable_at() or 0.0, woken_at) > 1.5 * self._backstop_s:
                    woken_at = now
                    for kind in ("runs", "lanes", "timers", "terminals", "control"):
                        self._hints.here(kind)
        finally:
            self._done.set()

    def _watch(self, watched: int) -> None:
        """In the thread: name what holds the loop, once per stall."""
        reported = 0.0
        while not self._done.wait(_BEAT_S / 2):
            beat = self._beat
            blocked_s = time.monotonic() - beat - _BEAT_S
            if blocked_s > self._blocked_after_s and beat != reported:
                reported = beat
                frame = sys._current_frames().get(watched)
                stack = traceback.extract_stack(frame)[-6:] if frame is not None else []
                asleep = any(place.name == "get_events" for place in stack)
                hint = (
                    "the process was stopped or starved of CPU"
                    if asleep
                    else "a play blocks the loop: use a thread"
                )
                where = " < ".join(
                    f"{place.filename}:{place.lineno} {place.name}" for place in reversed(stack)
                )
                log.error('event=loop_blocked seconds=%.1f hint="%s" stack="%s"', blocked_s, hint, where)
