"""Outbox: finds lanes with something to deliver, most urgent first.

Owns when lanes are claimed and who carries them. A ledger in this database is served by whole turns inside it;
any other one through lane actors. Each ledger has an outbox and carriers of its own, so that one which is slow or dead
holds up no other. It never calls a ledger itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import attrs
import trio

from actors.core import Backoff, Life, Mailbox, Portion, commit_in_groups
from actors.delivery import OTHERS_FIRST_S, GivenUp, Observe, Outcome, Room, Turn, hand_back_after
from actors.hints import LaneHints
from sql import lanes as door
from sql.calls import new_token
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault
from sql.lanes import LEAST_URGENT, HandBack, Prefix
from sql.types import Lane

# Every fourth turn takes the longest waiter, whatever its rank.
_OLDEST_EVERY = 4
# A run that went straight into a slot often ends at once: its first facts wait this long for their successors.
_STARTED_S = 0.005
# While turns come back small, at most one per moment: what arrives meanwhile travels together.
_PACE_S = 0.003
# Admissions, ends and waits that people can see; above is what nobody waits for.
_URGENT = 2
# Facts of a turn outside of the database, but for urgent ones: reading and writing so many keeps a host busy for a few
# milliseconds, in which nothing else gets its turn.
_MOST_FACTS = 200
_FEW_LANES = 8
# Logs come in hundreds per run: a turn of them inside the database is kept short, for a lifecycle turn waits for it.
_LOG_LANES = 16
# A turn that the database refuses is made step by step, under leases of this length.
_STEP_LEASE_S = 5.0


class _Schedule:
    """When each lane has to be looked at next, on the trio clock."""

    def __init__(self) -> None:
        self._next: dict[Lane, float | None] = dict.fromkeys(Lane, 0.0)
        self._held = {lane: Backoff(first_s=0.005, max_s=1.0) for lane in Lane}
        self._turn = 0

    def hinted(self, hints: LaneHints) -> None:
        """Something may have come."""
        now = trio.current_time()
        if hints.lanes.clear():
            self._next[Lane.LIFECYCLE] = now
        if hints.logs.clear():
            self._next[Lane.OBSERVABILITY] = now
        for flag, after_s in ((hints.started, _STARTED_S), (hints.given_up, OTHERS_FIRST_S)):
            if flag.clear():
                looked_at = self._next[Lane.LIFECYCLE]
                soon = now + after_s
                self._next[Lane.LIFECYCLE] = soon if looked_at is None else min(looked_at, soon)

    def again(self, lanes: Iterable[Lane]) -> None:
        """There was more than could be taken, and now there may be somebody to take it."""
        self._next.update(dict.fromkeys(lanes, trio.current_time()))

    def due(self) -> list[Lane]:
        """Lanes to look at now, lifecycle first."""
        now = trio.current_time()
        return [lane for lane in Lane if (at := self._next[lane]) is not None and at <= now]

    def wake_at(self, lanes: Iterable[Lane] = tuple(Lane)) -> float | None:
        """The earliest look at these lanes; None: only a hint will do."""
        return min((at for lane in lanes if (at := self._next[lane]) is not None), default=None)

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
        hints: LaneHints,
        *,
        receivers: Sequence[str],
        limit: int,
        prefix: int,
        observe: Observe,
    ) -> None:
        self._options = options
        self._hints = hints
        self._receivers = receivers
        self._portions = {
            Lane.LIFECYCLE: Portion(limit),
            Lane.OBSERVABILITY: Portion(min(limit, _LOG_LANES)),
        }
        self._prefix = prefix
        self._observe = observe

    async def run(self, life: Life) -> None:
        """Deliver until asked to stop; then once more, so that what ended during the stop is delivered."""
        schedule = _Schedule()
        async with life.session(self._options) as session:
            life.ready()
            while not life.stopping.is_set():
                if await self._hints.wake.wait(schedule.wake_at()):
                    schedule.hinted(self._hints)
                life.beat()
                paced = trio.current_time() + _PACE_S
                small = [await self._turn(session, schedule, lane) for lane in schedule.due()]
                if small and all(small):
                    await trio.sleep_until(paced)
            for lane in Lane:
                await self._turn(session, schedule, lane)

    async def _turn(self, session: Session, schedule: _Schedule, lane: Lane) -> bool:
        """One turn; whether it took less than it might have."""
        portion = self._portions[lane]
        try:
            with portion.adapt():
                turn = await door.deliver(
                    session,
                    lane,
                    receivers=self._receivers,
                    limit=portion.most,
                    prefix=self._prefix,
                    oldest=schedule.oldest(),
                )
        except ItemFault:
            await self._step_by_step(session, schedule, lane)
            return True
        schedule.looked(lane, turn.lanes + turn.blocked, turn.next_due_s)
        if turn.lag_types:
            self._observe(turn.lag_types, turn.lags_s)
        return turn.lanes < portion.most

    async def _step_by_step(self, session: Session, schedule: _Schedule, lane: Lane) -> None:
        """A turn of which the database refuses something: everybody else's part goes through, and the lane that is to
        blame is scheduled again, or blocked, like any other whose delivery fails."""
        prefixes, next_due_s = await door.claim(
            session,
            lane,
            receivers=self._receivers,
            token=new_token(),
            limit=self._portions[lane].most,
            prefix=self._prefix,
            lease_s=_STEP_LEASE_S,
            oldest=schedule.oldest(),
        )
        schedule.looked(lane, len(prefixes), next_due_s)
        back: list[HandBack] = []

        async def apply(group: Sequence[Prefix]) -> None:
            items = [(prefix.run_id, prefix.seqs[0], prefix.through) for prefix in group]
            applied, _ = await door.apply(session, lane, items)
            delivered = [prefix for prefix in group if prefix.run_id in applied]
            # One whose row is locked comes again when its lease ends: the ledger knows what it has.
            for answer in await door.acknowledge(session, lane, delivered, prefix=0, lease_s=_STEP_LEASE_S):
                if answer.lags:
                    self._observe([type_ for type_, _ in answer.lags], [lag for _, lag in answer.lags])
            gap = Outcome("rejected", reason="the ledger has not applied this run's earlier facts")
            back.extend(hand_back_after(prefix, gap) for prefix in group if prefix.run_id not in applied)

        def refused(prefix: Prefix, fault: ItemFault) -> None:
            back.append(hand_back_after(prefix, Outcome("retry", reason=str(fault))))

        await commit_in_groups(prefixes, apply, fail=refused)
        if back:
            await door.hand_back(session, lane, back)


@attrs.frozen(eq=False)
class Carrier:
    """A lane actor as its outbox sees it. ``express``: for urgent lanes only, so that they never find all busy."""

    mailbox: Mailbox[Turn]
    express: bool = False

    @property
    def idle(self) -> bool:
        """Whether a turn would begin at once."""
        return not len(self.mailbox) and not self.mailbox.in_flight


def _lanes_of(room: Room) -> int:
    """Lanes of a turn that may be all progress: what waits for its end waits for its facts, not for its lanes."""
    return min(room.lanes, max(_FEW_LANES, _MOST_FACTS // room.facts))


class Outbox:
    """For any other ledger: claims lanes in sets for whichever lane actor is idle.

    Each lane actor hints at its lane when a turn ends. Where there are several, one is ``express``, and logs leave one
    of the others alone: neither a chatty run nor a backlog of progress can occupy them all. ``room`` says how much the
    ledger takes now.
    """

    def __init__(
        self,
        options: SessionOptions,
        hints: LaneHints,
        given_up: GivenUp,
        carriers: Sequence[Carrier],
        *,
        receivers: Sequence[str],
        room: Callable[[], Room],
        lease_s: float,
    ) -> None:
        self._options = options
        self._hints = hints
        self._given_up = given_up
        self._carriers = sorted(carriers, key=lambda carrier: not carrier.express)
        self._regular = sum(not carrier.express for carrier in carriers)
        self._most_logs = max(1, self._regular - 1)
        self._logs: list[Carrier] = []  # that carried logs when last seen
        self._left: set[Lane] = set()  # lanes of which more was due than there were carriers for
        self._receivers = receivers
        self._room = room
        self._lease_s = lease_s

    async def run(self, life: Life) -> None:
        """Claim until asked to stop. What a lost answer claimed comes back when its short lease ends."""
        schedule = _Schedule()
        async with life.session(self._options) as session:
            life.ready()
            while not life.stopping.is_set():
                served = [lane for lane in Lane if self._idle(lane)]
                if await self._hints.wake.wait(schedule.wake_at(served)):
                    schedule.hinted(self._hints)
                    schedule.again(self._left)
                life.beat()
                for lane in schedule.due():
                    if not life.stopping.is_set():
                        await self._look(session, schedule, lane)

    def _idle(self, lane: Lane) -> list[Carrier]:
        """Who can take a turn of this kind now, express first."""
        self._logs = [carrier for carrier in self._logs if not carrier.idle]
        idle = [carrier for carrier in self._carriers if carrier.idle]
        if lane is Lane.LIFECYCLE:
            return idle
        if len(self._logs) >= self._most_logs:
            return []
        return [carrier for carrier in idle if not carrier.express]

    async def _look(self, session: Session, schedule: _Schedule, lane: Lane) -> None:
        """Claim for the idle carriers, one after the other, until nothing more is due."""
        got, next_due_s, looked = 0, None, False
        for carrier in self._idle(lane):
            if not carrier.idle or (lane is Lane.OBSERVABILITY and len(self._logs) >= self._most_logs):
                continue
            room = self._room()
            # Where logs have all the others, progress is not left to wait for their end.
            express = carrier.express and len(self._logs) < self._regular
            claimed_at = trio.current_time()
            prefixes, next_due_s = await door.claim(
                session,
                lane,
                receivers=self._receivers,
                token=new_token(),
                limit=room.lanes if express else _lanes_of(room),
                prefix=room.facts,
                lease_s=self._lease_s,
                most_rank=_URGENT if express else LEAST_URGENT,
                oldest=not express and schedule.oldest(),
                without=self._given_up.now() if lane is Lane.LIFECYCLE else (),
            )
            looked = True
            got += len(prefixes)
            if prefixes:
                for prefix in prefixes:
                    prefix.leased_at = claimed_at
                carrier.mailbox.send_nowait(Turn(lane, prefixes, claimed_at))
                if lane is Lane.OBSERVABILITY:
                    self._logs.append(carrier)
            if next_due_s is None or next_due_s > 0:
                break
        if looked:
            schedule.looked(lane, got, next_due_s)
            more = next_due_s is not None and next_due_s <= 0
            (self._left.add if more else self._left.discard)(lane)
