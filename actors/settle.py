"""Settle: endings of attempts become facts, in groups.

Owns the group commit of terminals, retries, deferrals, parks and releases, and who hears of them. It never chooses an
outcome, and it never gives up an ending while its lease may live.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from actors.attempts import Attempts, Why
from actors.core import PASSING_FAULTS, Backoff, Life, Mailbox, Portion, commit_in_groups, each_turn
from actors.hints import Hints
from sql import settle as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault
from sql.settle import Settlement

log = logging.getLogger("runlane.settle")

_BATCH = 500

OnSettled = Callable[[Settlement, door.Settled], None]
"""Told of each ending with its answer, after the commit."""


class Settle:
    """Endings arrive in ``mailbox``; ``on_settled`` hears each answer, ``unstorable`` replaces one that the
    database refuses."""

    def __init__(
        self,
        options: SessionOptions,
        mailbox: Mailbox[Settlement],
        attempts: Attempts,
        hints: Hints,
        *,
        on_settled: OnSettled,
        unstorable: Callable[[Settlement, ItemFault], Settlement],
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._attempts = attempts
        self._hints = hints
        self._on_settled = on_settled
        self._unstorable = unstorable
        self._locked = Backoff(first_s=0.001, max_s=0.25)
        self._portion = Portion(_BATCH)

    async def run(self, life: Life) -> None:
        """Settle until the mailbox ends."""
        async with life.session(self._options) as session:
            life.ready()
            await each_turn(
                life,
                self._mailbox,
                lambda batch: self._settle(session, batch),
                most=lambda: self._portion.most,
                locked=self._locked,
            )

    async def _settle(self, session: Session, batch: Sequence[Settlement]) -> list[Settlement]:
        """Commit a batch; the items whose row is locked are returned."""
        busy: list[Settlement] = []
        replaced: list[Settlement] = []
        woken: list[bool] = []

        async def commit(items: Sequence[Settlement]) -> None:
            verb = _verb(items[0])
            with self._portion.adapt():
                answers = await verb(session, items)
            for item, answer in zip(items, answers, strict=True):
                if answer.answer == "busy":
                    busy.append(item)
                elif answer.answer == "over":
                    # The same item, which stays in flight: its run ends through a fenced failure like any other.
                    log.warning("event=outage_over run=%s since=%s", item.run_id, answer.outage_at)
                    item.outcome, item.payload, item.outage_max_s = "failed", item.overdue, None
                    replaced.append(item)
                else:
                    woken.append(answer.woke)
                    self._answered(item, answer)

        def refuse(item: Settlement, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                busy.append(item)
                return
            log.error("event=unstorable run=%s outcome=%s error=%r", item.run_id, item.outcome, str(fault))
            if item.replaced:
                # Not even that it could not be stored: its lease runs out, which counts against the crash cap.
                self._answered(item, door.Settled("lost", None))
                return
            # The same item, which stays in flight: it must be answered also if the link breaks now.
            other = self._unstorable(item, fault)
            item.outcome, item.payload, item.replaced = other.outcome, other.payload, True
            replaced.append(item)

        for verb in (door.settle, door.defer, door.park):
            group = [item for item in batch if _verb(item) is verb]
            await commit_in_groups(group, commit, fail=refuse)
        self._tell(batch)
        if any(woken):
            self._hints.everywhere(["wakes"])
        return busy + replaced

    def _answered(self, item: Settlement, answer: door.Settled) -> None:
        self._mailbox.done([item])
        attempt = self._attempts.get(item.run_id)
        if attempt is not None and attempt.attempt == item.attempt:
            if attempt.claimed.limited:
                self._hints.everywhere(["runs"])  # somebody may have waited for this
            if attempt.holds_slot:  # settled behind its back: what it still does counts for nothing
                self._attempts.lose(attempt, Why.LOST)
            self._attempts.remove(attempt)
        if answer.answer == "lost":
            log.warning(
                "event=ending_refused run=%s attempt=%d outcome=%s status=%s",
                item.run_id,
                item.attempt,
                item.outcome,
                answer.status,
            )
        self._on_settled(item, answer)

    def _tell(self, batch: Sequence[Settlement]) -> None:
        outcomes = {item.outcome for item in batch}
        self._hints.lanes.set()
        if outcomes & {"completed", "failed"}:
            self._hints.elsewhere("terminals")
        if outcomes & {"released", "retried", "deferred", "parked"}:
            self._hints.runs.set()
        if "released" in outcomes:
            self._hints.elsewhere("runs")


def _verb(item: Settlement) -> Callable[[Session, Sequence[Settlement]], Awaitable[list[door.Settled]]]:
    if item.outcome == "parked":
        return door.park
    return door.settle if item.outage_max_s is None else door.defer
