"""Admission: submitted runs become rows, in groups.

Owns the group commit of submissions, the retry of those whose key an open transaction holds, and the short way of a new
run into a free slot of its own host. It never checks a payload: the host's door did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import attrs
import trio

from actors.attempts import Attempts, Start
from actors.core import Backoff, EndOfMailbox, Life, Mailbox, Portion, Reply, commit_in_groups
from actors.delivery import FIRST_LEASE_S, Firsts
from actors.hints import Hints
from sql import admission as door
from sql.claim import Claimed
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault, LockTimedOut

_BATCH = 500


@attrs.define(slots=True, eq=False)
class Admission:
    """Submissions that came together, and where their answers go, in order.

    ``deadline`` is on the trio clock, as is ``asked_at``: when they were first sent, from which a lease counts.
    """

    items: list[door.Submission]
    deadline: float
    reply: Reply[list[door.Admitted]] = attrs.field(factory=Reply)
    answers: dict[int, door.Admitted] = attrs.field(factory=dict)
    asked_at: float | None = None


@attrs.define(slots=True, eq=False)
class _Place:
    """One item of a message, through splitting and retries."""

    message: Admission
    index: int

    @property
    def item(self) -> door.Submission:
        return self.message.items[self.index]


class Admit:
    """Messages arrive in ``mailbox``. ``hosted(play)`` says whether this host runs a play; ``caught_up()`` whether
    nothing older waits, so that a new run may go straight into a free slot. ``firsts``: by receiver, the short way of
    first facts to ledgers of this host."""

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Admission],
        attempts: Attempts,
        hints: Hints,
        start: Start,
        *,
        owner: int,
        lease_s: float,
        release_id: str | None,
        environment: str | None,
        hosted: Callable[[str], bool],
        caught_up: Callable[[], bool],
        firsts: Mapping[str, Firsts],
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._attempts = attempts
        self._hints = hints
        self._start = start
        self._owner = owner
        self._lease_s = lease_s
        self._release_id = release_id
        self._environment = environment
        self._hosted = hosted
        self._caught_up = caught_up
        self._firsts = firsts
        self._portion = Portion(_BATCH)

    async def run(self, life: Life) -> None:
        """Admit until the mailbox ends."""
        locked = Backoff(first_s=0.005, max_s=1.0)
        async with life.session(self._options) as session:
            life.ready()
            busy: list[_Place] = []
            while True:
                try:
                    messages = await self._take(busy, locked)
                except EndOfMailbox:
                    return
                life.beat()
                fresh = [
                    _Place(message, index)
                    for message in messages
                    for index in range(len(message.items))
                    if index not in message.answers
                ]
                if fresh:
                    still = await self._admit(session, fresh)
                    busy += still
                if busy and not fresh:
                    # Alone, so that a key held for long costs the others nothing.
                    busy = await self._admit(session, self._in_time(busy))

    async def _take(self, busy: Sequence[_Place], locked: Backoff) -> list[Admission]:
        if not busy:
            locked.reset()
            first = await self._mailbox.take(1)
        else:
            first = await self._mailbox.take(1, trio.current_time() + locked.next())
        room = _BATCH - sum(len(message.items) for message in first)
        # Messages hold at most a batch each; a few small ones share one.
        return first + self._mailbox.take_nowait(room) if first and room > 0 else first

    async def _admit(self, session: Session, places: Sequence[_Place]) -> list[_Place]:
        """Admit what these places hold; those whose key an open transaction holds are returned."""
        busy: list[_Place] = []
        reserved = self._reserve(places)
        self._lease_firsts(places)
        started = 0

        async def commit(group: Sequence[_Place]) -> None:
            nonlocal started
            now = trio.current_time()
            for place in group:
                place.message.asked_at = place.message.asked_at or now
            with self._portion.adapt():
                answers = await door.admit(
                    session,
                    [place.item for place in group],
                    owner=self._owner,
                    lease_s=self._lease_s,
                    release_id=self._release_id,
                    environment=self._environment,
                )
            claims: dict[float, list[Claimed]] = defaultdict(list)
            firsts: dict[tuple[str, float], list[tuple[str, int]]] = defaultdict(list)
            for place, answer in zip(group, answers, strict=True):
                item, asked_at = place.item, place.message.asked_at or now
                if answer.outcome == "busy":
                    item.claim, item.lane_lease_s = (
                        False,
                        None,
                    )  # not in: it may come in any way the next time
                    busy.append(place)
                    continue
                place.item.claim = answer.claimed  # what counts against a limit is queued instead
                if answer.claimed:
                    claims[asked_at].append(_claimed(item))
                if answer.created and item.lane_lease_s is not None:
                    firsts[item.receiver, asked_at].append((item.run_id, item.request))
                self._answered(place, answer)
            for (receiver, asked_at), leases in firsts.items():
                self._firsts[receiver].hand_over(leases, asked_at)
            for asked_at, claimed in claims.items():
                started += len(claimed)
                self._start(claimed, asked_at)

        def refuse(place: _Place, fault: ItemFault) -> None:
            self._mailbox.done([place.message])
            place.message.reply.set_error(fault)

        try:
            rest = list(places)
            while rest:
                most = self._portion.most
                await commit_in_groups(rest[:most], commit, fail=refuse)
                rest = rest[most:]
        finally:
            self._attempts.reserved -= reserved
            if reserved > started:
                self._hints.freed.set()  # a claim may have found no free slot meanwhile
        self._tell(places)
        return busy

    def _reserve(self, places: Sequence[_Place]) -> int:
        """Mark what may go straight into a free slot, and reserve the slots until the answer is here."""
        room = self._attempts.free if self._caught_up() else 0
        reserved = 0
        for place in places:
            item = place.item
            if item.claim:
                reserved += 1  # asked before with a lost answer: asked alike again
            elif reserved < room and item.delay_s is None and item.at is None and self._hosted(item.play):
                item.claim = True
                reserved += 1
        self._attempts.reserved += reserved
        return reserved

    def _lease_firsts(self, places: Sequence[_Place]) -> None:
        """Mark whose first fact goes straight to its ledger: as many as that takes now."""
        rooms = {receiver: firsts.room() for receiver, firsts in self._firsts.items()}
        for place in places:
            item = place.item
            if item.lane_lease_s is None and place.message.asked_at is None and rooms.get(item.receiver, 0):
                item.lane_lease_s = FIRST_LEASE_S
                rooms[item.receiver] -= 1

    def _answered(self, place: _Place, answer: door.Admitted) -> None:
        message = place.message
        message.answers[place.index] = answer
        if len(message.answers) == len(message.items):
            self._mailbox.done([message])
            message.reply.set_result([message.answers[index] for index in range(len(message.items))])

    def _in_time(self, busy: Sequence[_Place]) -> list[_Place]:
        """Those whose caller still waits; the others hear why."""
        now = trio.current_time()
        for place in busy:
            if place.message.deadline <= now and not place.message.reply.done:
                self._mailbox.done([place.message])
                place.message.reply.set_error(
                    LockTimedOut(
                        f"run id {place.item.run_id!r}, idempotency key {place.item.idempotency_key!r} or the "
                        "unique key is held by another transaction that is still open"
                    )
                )
        return [place for place in busy if not place.message.reply.done]

    def _tell(self, places: Sequence[_Place]) -> None:
        left = [place.item for place in places if not place.item.claim]
        if len(left) < len(places):
            self._hints.started.set()
        if any(place.item.replaces for place in places):
            self._hints.everywhere(["control"])  # requests to cancel may be recorded
        if any(place.item.lane_lease_s is None for place in places):
            self._hints.lanes.set()
        if left:
            self._hints.runs.set()
            if len(left) > self._attempts.free or not all(self._hosted(item.play) for item in left):
                self._hints.elsewhere("runs")


def _claimed(item: door.Submission) -> Claimed:
    return Claimed(
        item.run_id, 1, item.request, item.play, item.input, org_id=item.org_id, labels=item.labels
    )
