"""Receipts: what the steps of all attempts on this host ask for, in groups.

Owns the group commit of claims and ends: one call for each of the two in a turn, whatever the number of attempts and
steps. It never runs a step, and it renews nothing: a receipt is held for as long as its attempt lives.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import attrs

from actors.attempts import Attempt, Attempts, Why
from actors.core import PASSING_FAULTS, Backoff, Life, Mailbox, Portion, Reply, commit_in_groups, each_turn
from sql import receipts as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault, RunCancelled
from sql.receipts import Receipt, ReceiptClaim, ReceiptEnd

log = logging.getLogger("runlane.receipts")

_BATCH = 1_000
# Of JSON text in one call: what a step gives is small or large, and a statement has to fit into memory twice.
_MOST_BYTES = 8 * 1_048_576


@attrs.define(slots=True, eq=False)
class StepClaim:
    """A step asks for its receipt. The reply is RunCancelled when the attempt has lost its fence.

    ``attempt`` is None for one that is detached: then the database alone knows whether it lives.
    """

    attempt: Attempt | None
    item: ReceiptClaim
    reply: Reply[Receipt] = attrs.field(factory=Reply)


@attrs.define(slots=True, eq=False)
class StepEnd:
    """A step has ended. The reply comes when that is durable; RunCancelled, or what the database had against it.

    ``attempt`` as in ``StepClaim``.
    """

    attempt: Attempt | None
    item: ReceiptEnd
    reply: Reply[None] = attrs.field(factory=Reply)


Message = StepClaim | StepEnd


class Receipts:
    """Claims and ends arrive in ``mailbox``."""

    def __init__(self, options: SessionOptions, mailbox: Mailbox[Message], attempts: Attempts) -> None:
        self._options = options
        self._mailbox = mailbox
        self._attempts = attempts
        self._locked = Backoff(first_s=0.001, max_s=0.25)
        self._portion = Portion(_BATCH)

    async def run(self, life: Life) -> None:
        """Claim and end until the mailbox ends. Connects for the first step."""
        life.ready()
        if not await self._mailbox.arrives():
            return
        async with life.session(self._options) as session:
            await each_turn(
                life,
                self._mailbox,
                lambda batch: self._turn(session, batch),
                most=lambda: self._portion.most,
                locked=self._locked,
            )

    async def _turn(self, session: Session, batch: Sequence[Message]) -> list[Message]:
        """Commit a batch; the messages whose row is locked are returned."""
        busy: list[Message] = []
        claims: list[StepClaim] = []
        ends: list[StepEnd] = []
        for message in batch:
            attempt = message.attempt
            if attempt is not None and self._attempts.get(attempt.run_id) is not attempt:
                self._lost(message)
            elif isinstance(message, StepClaim):
                claims.append(message)
            else:
                ends.append(message)

        async def claim(group: Sequence[StepClaim]) -> None:
            with self._portion.adapt():
                answers = await door.claim(session, [message.item for message in group])
            for message, answer in zip(group, answers, strict=True):
                if answer.answer == "rest":
                    self._locked.reset()  # nobody holds it: the answer was full
                if answer.answer in ("busy", "rest"):
                    busy.append(message)
                elif answer.answer == "lost":
                    self._lost(message)
                else:
                    self._mailbox.done([message])
                    message.reply.set_result(answer)

        async def end(group: Sequence[StepEnd]) -> None:
            with self._portion.adapt():
                answers = await door.settle(session, [message.item for message in group])
            for message, answer in zip(group, answers, strict=True):
                if answer.answer == "busy":
                    busy.append(message)
                elif answer.answer == "lost":
                    self._lost(message)
                else:
                    self._mailbox.done([message])
                    message.reply.set_result(None)

        def refuse(message: Message, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                busy.append(message)
                return
            log.error(
                "event=step_refused run=%s key=%r error=%r",
                message.item.run_id,
                message.item.key,
                str(fault),
            )
            self._mailbox.done([message])
            message.reply.set_error(fault)

        # Claims first: an end may be of what was claimed in the same turn, never the other way round.
        await commit_in_groups(claims, claim, fail=refuse)
        for group in _by_size(ends):
            await commit_in_groups(group, end, fail=refuse)
        return busy

    def _lost(self, message: Message) -> None:
        attempt = message.attempt
        self._mailbox.done([message])
        if isinstance(message, StepEnd) and message.item.outcome == "released":
            message.reply.set_result(None)  # what nobody holds is as good as released
            return
        message.reply.set_error(RunCancelled(message.item.run_id, "its lease is gone"))
        if attempt is not None and attempt.holds_slot and self._attempts.get(attempt.run_id) is attempt:
            log.warning("event=lease_lost run=%s attempt=%d", attempt.run_id, attempt.attempt)
            self._attempts.lose(attempt, Why.LOST)


def _by_size(ends: Sequence[StepEnd]) -> Iterator[list[StepEnd]]:
    """Groups of at most so many bytes; a larger one alone."""
    group: list[StepEnd] = []
    size = 0
    for message in ends:
        payload = message.item.payload
        length = 0 if payload is None else len(payload)
        if group and size + length > _MOST_BYTES:
            yield group
            group, size = [], 0
        group.append(message)
        size += length
    if group:
        yield group
