"""Outbox: finds lanes with something to deliver, most urgent first.

Owns when lanes are claimed and who carries them. A ledger in this database is served by whole turns inside it;
any other one through lane actors. It never calls a ledger itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from actors.core import Backoff, Life, Mailbox, Portion
from actors.delivery import Observe, Room, Turn
from actors.hints import Hints
from sql import lanes as door
from sql.calls import new_token
from sql.connection import Session, SessionOptions
from sql.types import Lane

# Every fourth turn takes the longest waiter, whatever its rank.
_OLDEST_EVERY = 4
# A run that went straight into a slot often ends at once: its first facts wait this long for their successors.
_STARTED_S = 0.005
# While turns come back small, at most one per moment: what arrives meanwhile travels together.
_PACE_S = 0.003


class _Schedule:
    """When each lane has to be looked at next, on the trio clock."""

    def __init__(self) -> None:
        self._next: dict[Lane, float | None] = dict.fromkeys(Lane, 0.0)
        self._held = {lane: Backoff(first_s=0.005, max_s=1.0) for lane in Lane}
        self._turn = 0

    def hinted(self, hints: Hints) -> None:
        """Something may have come."""
        now = trio.current_time()
        if hints.lanes.clear():
            self._next[Lane.LIFECYCLE] = now
        if hints.logs.clear():
            self._next[Lane.OBSERVABILITY] = now
        if hints.started.clear():
            looked_at = self._next[Lane.LIFECYCLE]
            self._next[Lane.LIFECYCLE] = (
                now + _STARTED_S if looked_at is None else min(looked_at, now + _STARTED_S)
            )

    def due(self) -> list[Lane]:
        """Lanes to look at now, lifecycle first."""
        now = trio.current_time()
        return [lane for lane in Lane if (at := self._next[lane]) is not None and at <= now]

    @property
    def wake_at(self) -> float | None:
        """The earliest look; None: only a hint will do."""
        return min((at for at in self._next.values() if at is not None), default=None)

    def oldest(self) -> bool:
        """Whether the next claim is an oldest-first turn."""
        self._turn += 1
        return self._turn % _OLDEST_EVERY == 0

    def looked(self, lane: Lane, got: int, next_due_s: float | None) -> None:
        """A turn took ``got`` lanes and found the next due in ``next_due_s``."""
        now = trio.current_time()
        if got:
            self._held[lane].reset()
        if next_due_s is None:
            self._next[lane] = None
        elif next_due_s <= 0:
            # Overdue although nothing was taken: somebody holds it. Ever less often.
            self._next[lane] = now if got else now + self._held[lane].next()
        else:
            self._next[lane] = now + next_due_s


class InDatabaseOutbox:
    """For a ledger in this database: one statement picks, applies and acknowledges."""

    def __init__(
        self,
        options: SessionOptions,
        hints: Hints,
        *,
        receivers: Sequence[str],
        limit: int,
        prefix: int,
        observe: Observe,
    ) -> None:
        self._options = options
        self._hints = hints
        self._receivers = receivers
        self._portion = Portion(limit)
        self._prefix = prefix
        self._observe = observe

    async def run(self, life: Life) -> None:
        """Deliver until asked to stop; then once more, so that what ended during the stop is delivered."""
        schedule = _Schedule()
        async with life.session(self._options) as session:
            life.ready()
            while not life.stopping.is_set():
                if await self._hints.wake_outbox.wait(schedule.wake_at):
                    schedule.hinted(self._hints)
                life.beat()
                paced = trio.current_time() + _PACE_S
                taken = [await self._turn(session, schedule, lane) for lane in schedule.due()]
                if taken and max(taken) < self._portion.most:
                    await trio.sleep_until(paced)
            for lane in Lane:
                await self._turn(session, schedule, lane)

    async def _turn(self, session: Session, schedule: _Schedule, lane: Lane) -> int:
        with self._portion.adapt():
            turn = await door.deliver(
                session,
                lane,
                receivers=self._receivers,
                limit=self._portion.most,
                prefix=self._prefix,
                oldest=schedule.oldest(),
            )
        schedule.looked(lane, turn.lanes + turn.blocked, turn.next_due_s)
        if turn.lag_types:
            self._observe(turn.lag_types, turn.lags_s)
        return turn.lanes


class Outbox:
    """For any other ledger: claims lanes in sets for whichever lane actor is idle.

    ``carriers`` are the lane actors' mailboxes; each lane actor hints at its lane when a turn ends. ``room`` says how
    much the ledger takes now.
    """

    def __init__(
        self,
        options: SessionOptions,
        hints: Hints,
        carriers: Sequence[Mailbox[Turn]],
        *,
        receivers: Sequence[str],
        room: Callable[[], Room],
        lease_s: float,
    ) -> None:
        self._options = options
        self._hints = hints
        self._carriers = carriers
        self._receivers = receivers
        self._room = room
        self._lease_s = lease_s

    async def run(self, life: Life) -> None:
        """Claim until asked to stop. What a lost answer claimed comes back when its short lease ends."""
        schedule = _Schedule()
        async with life.session(self._options) as session:
            life.ready()
            while not life.stopping.is_set():
                idle = self._idle()
                if await self._hints.wake_outbox.wait(schedule.wake_at if idle is not None else None):
                    schedule.hinted(self._hints)
                life.beat()
                for lane in schedule.due():
                    idle = self._idle()
                    if idle is not None and not life.stopping.is_set():
                        await self._claim(session, schedule, lane, idle)

    def _idle(self) -> Mailbox[Turn] | None:
        return next((box for box in self._carriers if not len(box) and not box.in_flight), None)

    async def _claim(self, session: Session, schedule: _Schedule, lane: Lane, carrier: Mailbox[Turn]) -> None:
        room = self._room()
        claimed_at = trio.current_time()
        prefixes, next_due_s = await door.claim(
            session,
            lane,
            receivers=self._receivers,
            token=new_token(),
            limit=room.lanes,
            prefix=room.facts,
            lease_s=self._lease_s,
            oldest=schedule.oldest(),
        )
        schedule.looked(lane, len(prefixes), next_due_s)
        if prefixes:
            carrier.send_nowait(Turn(lane, prefixes, claimed_at))
