"""The attempts that this host runs: what the actors share about them.

Owns the in-memory picture of this host's live attempts and free slots, changed only by the synchronous methods
here, so that no cancellation can leave it half changed. It is never the truth: the database's fences are. What a
cancelled attempt goes on doing is refused there.
"""

from __future__ import annotations

import enum
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence

import attrs
import trio

from actors.core import WakeFlag
from sql.claim import Claimed
from sql.facts import Saying
from sql.types import Lane

log = logging.getLogger("runlane.attempts")

# A play that was told to stop and runs on for so long is reported.
_LINGERS_S = 10.0
# Log lines and progress that may wait for the database per attempt; what comes on top is counted and dropped.
_MOST_WAITING = 10_000


class Why(enum.Enum):
    """Why an attempt was told to stop before its play had ended."""

    PARKED = "parked"
    CANCELLED = "cancelled"
    LOST = "lost"
    SHUTDOWN = "shutdown"


@attrs.define(slots=True, eq=False)
class Attempt:
    """One live attempt on this host.

    ``lease_until`` is on the trio clock and counts from when the claim or renewal was *sent*: past it somebody else
    may have the run. ``renewed`` is when that was. ``scope`` surrounds the play.
    """

    claimed: Claimed
    lease_until: float
    renewed: float
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    why: Why | None = None
    told: int = 0
    """Facts numbered so far."""
    waiting: list[tuple[int, str, str]] = attrs.field(factory=list)
    """Facts said and not numbered yet: (lane, type, JSON text)."""
    unstored: list[Saying] = attrs.field(factory=list)
    """Facts numbered and not known to be stored."""
    dropped: int = 0
    stored: trio.Event | None = None
    queued: bool = False
    """Whether the facts actor has it already."""
    holds_slot: bool = True
    thread_calls: set[trio.CancelScope] = attrs.field(factory=set)
    """What the play's thread waits for at this moment: in tasks of their own, outside of ``scope``."""

    @property
    def run_id(self) -> str:
        return self.claimed.run_id

    @property
    def attempt(self) -> int:
        return self.claimed.attempt

    @property
    def token(self) -> int:
        return self.claimed.token

    @property
    def has_unstored(self) -> bool:
        """Whether something said is not known to be in the database yet."""
        return bool(self.waiting or self.unstored)

    def stop(self, why: Why) -> None:
        """Cancel the play. The first reason stands."""
        if self.why is None:
            self.why = why
        self.scope.cancel()
        for scope in self.thread_calls:
            scope.cancel()

    def say(self, lane: int, type_: str, payload: str, *, replaces: bool = False) -> bool:
        """Remember a fact to store; with ``replaces`` the latest waiting one of that type is overwritten.

        False when too much waits already: it was dropped and counted.
        """
        if replaces:
            for index in range(len(self.waiting) - 1, -1, -1):
                if self.waiting[index][1] == type_:
                    self.waiting[index] = (lane, type_, payload)
                    return True
        if len(self.waiting) >= _MOST_WAITING:
            self.dropped += 1
            return False
        self.waiting.append((lane, type_, payload))
        return True

    def number(self) -> list[Saying]:
        """Give what waits its ordinals and return everything that is not stored, in order."""
        if self.dropped:
            lost = {
                "message": f"{self.dropped} log lines were dropped: the play says more than can be stored"
            }
            self.waiting.append((Lane.OBSERVABILITY, "run.log", json.dumps(lost)))
            self.dropped = 0
        for lane, type_, payload in self.waiting:
            self.told += 1
            self.unstored.append(
                Saying(self.run_id, self.attempt, self.token, self.told, lane, type_, payload)
            )
        self.waiting.clear()
        return self.unstored

    def mark_stored(self, count: int | None = None) -> None:
        """The first ``count`` numbered ones (None: all) are in the database, or their fence is gone."""
        self.unstored = [] if count is None else self.unstored[count:]
        if self.unstored:
            return
        if not self.waiting and self.stored is not None:
            self.stored.set()
            self.stored = None


class Attempts:
    """Live attempts by run id, and the slots they take.

    ``freed`` is set when a slot becomes free, ``added`` when an attempt arrives.
    """

    def __init__(self, slots: int, lease_s: float, *, freed: WakeFlag, added: WakeFlag) -> None:
        self.slots = slots
        self.lease_s = lease_s
        # Work must have stopped before the lease can lapse for others.
        self.margin_s = min(2.0, lease_s / 10)
        self.freed = freed
        self.added = added
        # Ended plays whose ending is not settled yet keep their entry: when many wait, nothing more is claimed.
        self.most_held = 4 * slots + 1_000
        self.reserved = 0
        self._accepting = False
        self._used = 0
        self._by_run: dict[str, Attempt] = {}
        self._stopped: dict[Attempt, float] = {}
        """Lost ones whose plays have not ended yet, and since when: nobody else knows of them any more."""

    def __len__(self) -> int:
        return len(self._by_run)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(list(self._by_run.values()))

    @property
    def free(self) -> int:
        """Slots that nobody holds or has reserved; none while there is nobody to run what is claimed."""
        if not self._accepting:
            return 0
        return min(self.slots - self._used, self.most_held - len(self._by_run)) - self.reserved

    def accept(self, accepting: bool) -> None:
        """Whether somebody runs what is claimed."""
        self._accepting = accepting
        if accepting:
            self.freed.set()

    @property
    def used(self) -> int:
        """Slots held by attempts."""
        return self._used

    def add(self, claimed: Claimed, sent_at: float) -> Attempt:
        """A claim arrived. ``sent_at``: trio time when it was asked for."""
        older = self._by_run.get(claimed.run_id)
        if older is not None:
            # Its lease ended in the database, or the run could not have been claimed again.
            self.lose(older, Why.LOST)
        attempt = Attempt(claimed, sent_at + self.lease_s, sent_at)
        self._by_run[claimed.run_id] = attempt
        self._used += 1
        self.added.set()
        return attempt

    def get(self, run_id: str) -> Attempt | None:
        """The live attempt of a run on this host."""
        return self._by_run.get(run_id)

    def holds(self, run_id: str, number: int) -> bool:
        """Whether this very attempt is ours."""
        attempt = self._by_run.get(run_id)
        return attempt is not None and attempt.attempt == number

    def renewed(self, attempt: Attempt, sent_at: float) -> None:
        """Its lease counts from ``sent_at`` again."""
        attempt.renewed = sent_at
        attempt.lease_until = sent_at + self.lease_s
        if attempt.why is None:
            attempt.scope.deadline = attempt.lease_until - self.margin_s

    def lose(self, attempt: Attempt, why: Why) -> None:
        """Its fence is gone: stop the play, free the slot at once, forget it."""
        attempt.stop(why)
        if attempt.holds_slot:
            self._stopped[attempt] = trio.current_time()
        self.remove(attempt)

    def ended(self, attempt: Attempt) -> None:
        """Its task is over, for whatever reason."""
        self._stopped.pop(attempt, None)

    def give_up_slot(self, attempt: Attempt) -> None:
        """The play has ended or can write no more; idempotent."""
        if attempt.holds_slot:
            attempt.holds_slot = False
            self._used -= 1
            self.freed.set()

    def remove(self, attempt: Attempt) -> None:
        """It is over; idempotent."""
        self.give_up_slot(attempt)
        if self._by_run.get(attempt.run_id) is attempt:
            if len(self._by_run) > self.most_held - self.slots:
                self.freed.set()
            del self._by_run[attempt.run_id]

    def guard(self, now: float) -> None:
        """Give each attempt that has lasted a while a deadline within its lease, whether it can be renewed or not; and
        say once of each lost one that its play does not end.

        Called at every beat of the watchdog rather than at the start: most attempts end before it, and a deadline for
        each would cost a tenth of what running it does.
        """
        for attempt in self._by_run.values():
            if attempt.scope.deadline == math.inf and now >= attempt.renewed + self.lease_s / 3:
                attempt.scope.deadline = attempt.lease_until - self.margin_s
        for attempt, since in list(self._stopped.items()):
            if now - since >= _LINGERS_S:
                del self._stopped[attempt]
                log.warning(
                    "event=play_does_not_end play=%s run=%s attempt=%d why=%s after_s=%.0f "
                    'hint="what it does is refused and its slot is free; look for a shield without a deadline"',
                    attempt.claimed.play,
                    attempt.run_id,
                    attempt.attempt,
                    "lost" if attempt.why is None else attempt.why.value,
                    now - since,
                )

    def due_for_renewal(self, older_than: float) -> list[Attempt]:
        """Attempts whose lease was last renewed before that trio time."""
        return [attempt for attempt in self._by_run.values() if attempt.renewed <= older_than]


Start = Callable[[Sequence[Claimed], float], None]
"""Starts executors for fresh claims; the second argument is when the claim was sent."""
