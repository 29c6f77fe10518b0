"""Lane actors: each carries claimed lanes through delivery, acknowledgement and the next prefix.

Owns a delivery turn from the claim to its end: delivered until nothing is pending, scheduled again, blocked, or handed
back. It never claims from the queue (the outbox does) and never knows what a ledger is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import trio

from actors.core import Backoff, EndOfMailbox, Life, Mailbox, WakeFlag, bounded_cleanup, leaves
from actors.delivery import Deliver, Observe, Outcome, Room, Turn
from actors.hints import Hints
from sql import lanes as door
from sql.connection import Session, SessionOptions
from sql.lanes import HandBack, Prefix
from sql.types import Lane

log = logging.getLogger("runlane.lanes")

# A prefix that failed this often is blocked until an operator decides.
_MOST_ATTEMPTS = 20
_BACKOFF_S = (1.0, 300.0)


class LaneActor:
    """Turns arrive in ``mailbox``; after each, the outbox is told to look at that lane again."""

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Turn],
        hints: Hints,
        deliver: Deliver,
        *,
        room: Callable[[], Room],
        lease_s: float,
        delivery_timeout_s: float,
        release_budget_s: float,
        observe: Observe,
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._hints = hints
        self._deliver = deliver
        self._room = room
        self._lease_s = lease_s
        self._delivery_timeout_s = delivery_timeout_s
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
                    (self._hints.lanes if turn.lane is Lane.LIFECYCLE else self._hints.logs).set()

    async def _carry(self, session: Session, turn: Turn) -> None:
        """Deliver and go on with the successors until nothing is pending; no lane of a turn waits for another."""
        told: list[tuple[Prefix, Outcome]] = []
        wake = WakeFlag()
        locked = Backoff(first_s=0.002, max_s=0.25)

        def tell(outcomes: Sequence[tuple[Prefix, Outcome]]) -> None:
            told.extend(outcomes)
            wake.set()

        try:
            turn.prefixes = await self._renewed(session, turn)
            async with trio.open_nursery() as nursery:
                fresh, busy = turn.prefixes, False
                while turn.prefixes:
                    if fresh:
                        turn.sent.update(prefix.run_id for prefix in fresh)
                        nursery.start_soon(self._deliver, fresh, tell)
                    await wake.wait(trio.current_time() + locked.next() if busy else None)
                    concluded = told[:]
                    told.clear()
                    fresh, unsure = await self._conclude(session, turn.lane, concluded)
                    busy = bool(unsure)
                    told.extend(unsure)  # their rows are locked: asked again in a moment
                    over = {prefix.run_id for prefix, _ in concluded} - {
                        prefix.run_id for prefix, _ in unsure
                    }
                    turn.prefixes = [prefix for prefix in turn.prefixes if prefix.run_id not in over] + fresh
                    if not busy:
                        locked.reset()
        except BaseException as exc:
            # Deliveries go side by side: a cancellation arrives as a group of them.
            if any(isinstance(leaf, trio.Cancelled) for leaf in leaves(exc)):
                with bounded_cleanup(self._release_budget_s):
                    back = [
                        HandBack(prefix.run_id, prefix.token, unsent=prefix.run_id not in turn.sent)
                        for prefix in turn.prefixes
                    ]
                    await self._hand_all_back(session, turn.lane, back)
            raise

    async def _renewed(self, session: Session, turn: Turn) -> list[Prefix]:
        """Renew only if the lease left would not cover a request; what was lost meanwhile is dropped uncharged.

        A successor is delivered as soon as the acknowledgement that claimed it is back, so its lease covers that.
        """
        if turn.claimed_at + self._lease_s - trio.current_time() > self._delivery_timeout_s * 1.1:
            return turn.prefixes
        answers = await door.renew(session, turn.lane, turn.prefixes, lease_s=self._lease_s)
        return [prefix for prefix, answer in zip(turn.prefixes, answers, strict=True) if answer == "renewed"]

    async def _conclude(
        self, session: Session, lane: Lane, told: Sequence[tuple[Prefix, Outcome]]
    ) -> tuple[list[Prefix], list[tuple[Prefix, Outcome]]]:
        """Acknowledge what was delivered, hand back the rest.

        Returns the successors, under the same leases, and what has to be concluded again because its row is locked.
        """
        delivered = [(prefix, outcome) for prefix, outcome in told if outcome.kind == "delivered"]
        back = [self._hand_back(prefix, outcome) for prefix, outcome in told if outcome.kind != "delivered"]
        if back:
            await self._hand_all_back(session, lane, back)
        if not delivered:
            return [], []
        successors: list[Prefix] = []
        busy: list[tuple[Prefix, Outcome]] = []
        answers = await door.acknowledge(
            session,
            lane,
            [prefix for prefix, _ in delivered],
            prefix=self._room().facts,
            lease_s=self._lease_s,
        )
        for (prefix, outcome), answer in zip(delivered, answers, strict=True):
            if answer.answer == "busy":
                busy.append((prefix, outcome))
                continue
            if answer.answer == "lost":
                log.warning("event=lane_lost run=%s lane=%s", prefix.run_id, lane.label)
            if answer.successor is not None:
                successors.append(answer.successor)
            if answer.lags:
                self._observe([type_ for type_, _ in answer.lags], [lag for _, lag in answer.lags])
        return successors, busy

    async def _hand_all_back(self, session: Session, lane: Lane, back: list[HandBack]) -> None:
        backoff = Backoff(first_s=0.002, max_s=0.25)
        while back:
            answers = await door.hand_back(session, lane, back)
            back = [item for item, answer in zip(back, answers, strict=True) if answer == "busy"]
            if back:
                await trio.sleep(backoff.next())

    def _hand_back(self, prefix: Prefix, outcome: Outcome) -> HandBack:
        exhausted = outcome.kind == "retry" and prefix.attempt >= _MOST_ATTEMPTS
        if outcome.kind == "rejected" or exhausted:
            reason = outcome.reason or "rejected"
            if exhausted:
                reason = f"gave up after {prefix.attempt} deliveries: {reason}"
            log.error("event=lane_blocked run=%s lane=%s reason=%r", prefix.run_id, prefix.lane.label, reason)
            return HandBack(prefix.run_id, prefix.token, reason=reason[:2000])
        first_s, max_s = _BACKOFF_S
        delay_s = outcome.after_s
        if delay_s is None:
            backoff = Backoff(first_s=min(max_s, first_s * 2.0 ** (prefix.attempt - 1)), max_s=max_s)
            delay_s = backoff.next()
        log.info(
            "event=delivery_failed run=%s lane=%s attempt=%d retry_s=%.3f reason=%r",
            prefix.run_id,
            prefix.lane.label,
            prefix.attempt,
            delay_s,
            outcome.reason,
        )
        return HandBack(prefix.run_id, prefix.token, delay_s=delay_s)
