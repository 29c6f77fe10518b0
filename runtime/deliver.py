"""Deliveries: prefixes of lanes as a ledger sees them, and its answers as the outbox understands them.

Owns how a prefix becomes a delivery and the mapping of every way a ledger can fail. It never acknowledges anything.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence

import trio

from actors.delivery import Outcome, Room, Tell
from runtime import wire
from runtime.codec import scrub
from runtime.ledger import (
    AppendOutcome,
    Ledger,
    LedgerNotCurrent,
    LedgerRejected,
    LedgerRetry,
    LimitedLedger,
    takes_batches,
)
from sql.lanes import Prefix
from sql.types import Delivery, Fact

log = logging.getLogger("runlane.deliver")

_DELIVERED = Outcome("delivered")
_GIVEN_UP = Outcome("given_up")
_REASON_BYTES = 2_000
_LONGEST_RETRY_S = 86_400.0
# Lanes of one turn: many where one call takes them all, few where each is a call of its own.
_MANY_LANES = 200
_FEW_LANES = 8
_CONVERTED_AT_ONCE = 8


def delivery_of(prefix: Prefix) -> Delivery:
    """The delivery of a prefix: the same facts, key and digest each time it is delivered."""
    facts = tuple(
        Fact(prefix.run_id, prefix.lane, seq, type_, json.loads(payload), created_at)
        for seq, type_, payload, created_at in zip(
            prefix.seqs, prefix.types, prefix.payloads, prefix.created_ats, strict=True
        )
    )
    key = wire.delivery_key(prefix.run_id, prefix.lane, prefix.seqs[0], prefix.through, prefix.generation)
    digest = wire.digest_of(
        key, ((fact.seq, fact.type, fact.created_at.isoformat(), fact.payload) for fact in facts)
    )
    return Delivery(
        prefix.run_id,
        prefix.lane,
        facts,
        key,
        prefix.attempt,
        digest,
        prefix.token,
        prefix.generation,
        prefix.passed,
    )


class Deliveries:
    """Hands prefixes to ``ledger`` within ``timeout_s``: all at once where it takes batches, else side by side.

    ``facts`` is the most that one delivery holds, unless the ledger takes less.
    """

    def __init__(self, ledger: Ledger, *, timeout_s: float, facts: int) -> None:
        self._ledger = ledger
        self._timeout_s = timeout_s
        self._usual = Room(_MANY_LANES if takes_batches(ledger) else _FEW_LANES, facts)

    def room(self) -> Room:
        """How much the ledger takes now."""
        if not isinstance(self._ledger, LimitedLedger):
            return self._usual
        limits = self._ledger.limits
        return Room(min(self._usual.lanes, limits.deliveries), min(self._usual.facts, limits.facts))

    async def __call__(self, prefixes: Sequence[Prefix], tell: Tell, deadline: float = math.inf) -> None:
        """Tell the outcome of each prefix: of all together from a batch, else of each as soon as it is there.

        ``deadline`` (trio time) is the sender's: what has no answer by then is given up.
        """
        deliveries: list[tuple[Prefix, Delivery]] = []
        for number, prefix in enumerate(prefixes, 1):
            if number % _CONVERTED_AT_ONCE == 0:
                # A big turn of progress takes its time: urgent ones, and whatever else the host does, go between.
                await trio.lowlevel.checkpoint()
            try:
                deliveries.append((prefix, delivery_of(prefix)))
            except (ValueError, RecursionError) as exc:
                reason = scrub(f"a fact cannot be decoded: {exc}", _REASON_BYTES)
                tell([(prefix, Outcome("rejected", reason=reason))])

        async def one(prefix: Prefix, delivery: Delivery) -> None:
            tell([(prefix, await self._one(delivery, deadline))])

        if not takes_batches(self._ledger):
            async with trio.open_nursery() as nursery:
                for prefix, delivery in deliveries:
                    nursery.start_soon(one, prefix, delivery)
        elif deliveries:
            answers = await self._many([delivery for _, delivery in deliveries], deadline)
            tell([(prefix, answer) for (prefix, _), answer in zip(deliveries, answers, strict=True)])

    async def _one(self, delivery: Delivery, deadline: float) -> Outcome:
        try:
            with trio.move_on_at(self._until(deadline)):
                await self._ledger.append(delivery)
                return _DELIVERED
        except Exception as exc:  # the ledger is the user's: whatever it raises is its answer
            return _outcome(exc)
        return self._too_slow(deadline)

    async def _many(self, deliveries: Sequence[Delivery], deadline: float) -> Sequence[Outcome]:
        assert takes_batches(self._ledger)
        try:
            with trio.move_on_at(self._until(deadline)):
                answers = await self._ledger.append_many(deliveries)
                if len(answers) != len(deliveries):
                    reason = f"append_many answered {len(answers)} outcomes for {len(deliveries)} deliveries"
                    return [Outcome("retry", reason=reason)] * len(deliveries)
                return [_answer(answer) for answer in answers]
        except Exception as exc:
            return [_outcome(exc)] * len(deliveries)
        return [self._too_slow(deadline)] * len(deliveries)

    def _until(self, deadline: float) -> float:
        return min(deadline, trio.current_time() + self._timeout_s)

    def _too_slow(self, deadline: float) -> Outcome:
        if trio.current_time() >= deadline:
            return _GIVEN_UP
        return Outcome("retry", reason=f"no answer within {self._timeout_s:g} s")


def _answer(answer: AppendOutcome) -> Outcome:
    return _DELIVERED if answer is None else _outcome(answer)


def _outcome(error: Exception) -> Outcome:
    """What an error of the user's means, in words and figures that the database takes."""
    if isinstance(error, LedgerRetry):
        after_s = None if error.after is None else min(error.after, _LONGEST_RETRY_S)
        return Outcome("retry", after_s, scrub(str(error), _REASON_BYTES))
    if isinstance(error, LedgerNotCurrent):
        return Outcome("not_current", reason=scrub(str(error.reason), _REASON_BYTES))
    if isinstance(error, LedgerRejected):
        return Outcome("rejected", reason=scrub(str(error.reason), _REASON_BYTES))
    return Outcome("retry", reason=scrub(f"{type(error).__name__}: {error}", _REASON_BYTES))
