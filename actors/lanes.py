"""Lane actors: each carries leased lanes through delivery, acknowledgement and the next prefix.

Owns a delivery turn from the lease to its end: delivered until nothing is pending, scheduled again, blocked, or handed
back. It never claims from the queue (the outbox does) and never knows what a ledger is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from actors.core import (
    Backoff,
    EndOfMailbox,
    Life,
    Mailbox,
    WakeFlag,
    bounded_cleanup,
    commit_in_groups,
    leaves,
)
from actors.delivery import Deliver, GivenUp, Observe, Outcome, Room, Turn, hand_back_after
from actors.hints import Hints, LaneHints
from sql import lanes as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault
from sql.lanes import HandBack, Prefix
from sql.types import Lane

log = logging.getLogger("runlane.lanes")

# What is left of a lease must cover a request, and a little more.
_MARGIN = 1.1

_Conclusion = tuple[Prefix, HandBack | None]
"""A prefix and how its delivery ended; None: delivered."""


class LaneActor:
    """Turns arrive in ``mailbox``; after each, the outbox that listens to ``own`` hears that this carrier is free.

    ``continue_s``: a turn takes its lanes' next prefixes for so long after it began; what then still comes goes back
    to the queue, where others and more urgent ones get their chance.
    """

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Turn],
        own: LaneHints,
        hints: Hints,
        given_up: GivenUp,
        deliver: Deliver,
        *,
        room: Callable[[], Room],
        lease_s: float,
        delivery_timeout_s: float,
        continue_s: float,
        release_budget_s: float,
        observe: Observe,
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._own = own
        self._hints = hints
        self._given_up = given_up
        self._deliver = deliver
        self._room = room
        self._lease_s = lease_s
        self._delivery_timeout_s = delivery_timeout_s
        self._continue_s = continue_s
        self._release_budget_s = release_budget_s
        self._observe = observe

    async def run(self, life: Life) -> None:
        """Carry turns until the mailbox ends."""
        async with life.session(self._options) as session:
            life.ready()
            while True:
                try:
                    turns = await self._mailbox.take(1)
                except EndOfMailbox:
                    return
                life.beat()
                for turn in turns:
                    await self._carry(session, turn)
                    self._mailbox.done([turn])
                    if turn.given_up:
                        self._hints.elsewhere("lanes")
                        self._own.given_up.set()
                    else:
                        (self._own.lanes if turn.lane is Lane.LIFECYCLE else self._own.logs).set()

    async def _carry(self, session: Session, turn: Turn) -> None:
        try:
            if turn.unread:
                turn.prefixes = await door.held(session, turn.lane, turn.unread)
                for prefix in turn.prefixes:
                    prefix.leased_at = turn.begun_at
                turn.unread = []
            if trio.current_time() >= turn.deadline and not turn.sent:
                await self._give_back(session, turn)
            else:
                await self._deliver_all(session, turn)
        except BaseException as exc:
            # Deliveries go side by side: a cancellation arrives as a group of them.
            if any(isinstance(leaf, trio.Cancelled) for leaf in leaves(exc)):
                with bounded_cleanup(self._release_budget_s):
                    await self._give_back(session, turn)
            raise

    async def _deliver_all(self, session: Session, turn: Turn) -> None:
        """Deliver and go on with the successors until nothing is pending; no lane of a turn waits for another."""
        told: list[_Conclusion] = []
        wake = WakeFlag()
        locked = Backoff(first_s=0.002, max_s=0.25)

        def tell(outcomes: Sequence[tuple[Prefix, Outcome]]) -> None:
            for prefix, outcome in outcomes:
                if outcome.kind == "given_up":
                    turn.given_up = True
                    self._given_up.add(prefix.run_id)
                told.append(
                    (prefix, None if outcome.kind == "delivered" else hand_back_after(prefix, outcome))
                )
            wake.set()

        async with trio.open_nursery() as nursery:
            fresh: list[Prefix] = turn.prefixes
            while turn.prefixes:
                ready, short = await self._covered(session, turn, fresh)
                if ready:
                    turn.sent.update(prefix.run_id for prefix in ready)
                    nursery.start_soon(self._deliver, ready, tell, turn.deadline)
                if not turn.prefixes:
                    return
                busy = bool(short or told)
                await wake.wait(trio.current_time() + locked.next() if busy else None)
                concluded = told[:]
                told.clear()
                successors, unsure = await self._conclude(session, turn, concluded)
                told.extend(unsure)  # their rows are locked: asked again in a moment
                over = {prefix.run_id for prefix, _ in concluded} - {prefix.run_id for prefix, _ in unsure}
                turn.prefixes = [prefix for prefix in turn.prefixes if prefix.run_id not in over] + successors
                fresh = short + successors
                if not (short or unsure):
                    locked.reset()

    async def _covered(
        self, session: Session, turn: Turn, prefixes: Sequence[Prefix]
    ) -> tuple[list[Prefix], list[Prefix]]:
        """Those whose lease covers a request, renewed where what is left of it would not; and those to ask for again,
        because their row is locked. What was lost meanwhile leaves the turn, uncharged."""
        now = trio.current_time()
        request_s = min(self._delivery_timeout_s, turn.deadline - now) * _MARGIN
        ready = [prefix for prefix in prefixes if prefix.leased_at + self._lease_s - now > request_s]
        short = [prefix for prefix in prefixes if prefix.leased_at + self._lease_s - now <= request_s]
        if not short:
            return ready, []
        answers = await door.renew(session, turn.lane, short, lease_s=self._lease_s)
        busy: list[Prefix] = []
        for prefix, answer in zip(short, answers, strict=True):
            if answer == "renewed":
                prefix.leased_at = now
                ready.append(prefix)
            elif answer == "busy":
                busy.append(prefix)
            else:
                log.warning("event=lane_lost run=%s lane=%s", prefix.run_id, turn.lane.label)
                turn.prefixes = [mine for mine in turn.prefixes if mine is not prefix]
        return ready, busy

    async def _conclude(
        self, session: Session, turn: Turn, told: Sequence[_Conclusion]
    ) -> tuple[list[Prefix], list[_Conclusion]]:
        """Acknowledge what was delivered, hand back the rest.

        Returns the successors, under the same leases, and what has to be concluded again because its row is locked.
        """
        successors: list[Prefix] = []
        busy: list[_Conclusion] = []

        async def acknowledge(group: Sequence[_Conclusion]) -> None:
            now = trio.current_time()
            goes_on = (
                turn.deadline > now + self._delivery_timeout_s and now < turn.begun_at + self._continue_s
            )
            answers = await door.acknowledge(
                session,
                turn.lane,
                [prefix for prefix, _ in group],
                prefix=self._room().facts if goes_on else 0,
                lease_s=self._lease_s,
            )
            for conclusion, answer in zip(group, answers, strict=True):
                if answer.answer == "busy":
                    busy.append(conclusion)
                    continue
                if answer.answer == "lost":
                    log.warning("event=lane_lost run=%s lane=%s", conclusion[0].run_id, turn.lane.label)
                if answer.successor is not None:
                    answer.successor.leased_at = now
                    successors.append(answer.successor)
                if answer.lags:
                    self._observe([type_ for type_, _ in answer.lags], [lag for _, lag in answer.lags])

        back = [(prefix, ending) for prefix, ending in told if ending is not None]
        delivered = [conclusion for conclusion in told if conclusion[1] is None]
        still = await self._hand_back(session, turn, [ending for _, ending in back])
        busy += [(prefix, ending) for prefix, ending in back if ending in still]
        await commit_in_groups(delivered, acknowledge, fail=lambda item, fault: _stranded(item[0], fault))
        return successors, busy

    async def _hand_back(self, session: Session, turn: Turn, back: Sequence[HandBack]) -> list[HandBack]:
        """Hand back; those whose row is locked are returned."""
        busy: list[HandBack] = []

        async def commit(group: Sequence[HandBack]) -> None:
            answers = await door.hand_back(session, turn.lane, group)
            busy.extend(item for item, answer in zip(group, answers, strict=True) if answer == "busy")

        await commit_in_groups(back, commit, fail=_stranded)
        return busy

    async def _give_back(self, session: Session, turn: Turn) -> None:
        """End the turn here: every lane goes back, uncharged."""
        back = [
            HandBack(prefix.run_id, prefix.token, "given_up" if prefix.run_id in turn.sent else "unsent")
            for prefix in turn.prefixes
        ]
        backoff = Backoff(first_s=0.002, max_s=0.25)
        while back:
            back = await self._hand_back(session, turn, back)
            if back:
                await trio.sleep(backoff.next())


def _stranded(item: Prefix | HandBack, fault: ItemFault) -> None:
    """The end of a delivery that cannot be written: both errors are told, and the lease ends by itself."""
    reason = item.reason if isinstance(item, HandBack) else None
    log.error(
        "event=delivery_settlement_failed run=%s error=%r delivery_error=%r", item.run_id, str(fault), reason
    )
