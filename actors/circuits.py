"""Circuits: whether this host's attempts may call a dependency, and how their calls went, in groups.

Owns when the database is asked, and the short memory of circuits that were closed without a failure a moment ago: a
hint that saves a round trip for each call of a healthy dependency. It never decides the state of a circuit: the
database does, for all hosts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs
import trio

from actors.core import PASSING_FAULTS, Backoff, Life, Mailbox, Portion, Reply, commit_in_groups
from sql import circuits as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault

log = logging.getLogger("runlane.circuits")

_BATCH = 500
# A probe that takes longer is followed by another.
_PROBE_S = 30.0
# How long a circuit that was closed without a failure is taken to be so still.
_TRUST_S = 1.0
_MOST_TRUSTED = 1_000


@attrs.define(slots=True, eq=False)
class Enter:
    """An attempt wants to call a dependency. ``reply``: ``closed``, ``probe`` or ``open``."""

    call: door.Call
    reply: Reply[door.Entered] = attrs.field(factory=Reply)


@attrs.define(slots=True, eq=False)
class Outcome:
    """How a call went. Nobody waits for the answer."""

    report: door.Report


class Circuits:
    """Messages arrive in ``mailbox``."""

    def __init__(self, options: SessionOptions, mailbox: Mailbox[Enter | Outcome]) -> None:
        self.mailbox = mailbox
        self._options = options
        self._portion = Portion(_BATCH)
        self._healthy: dict[str, float] = {}
        self._enters: list[Enter] = []
        self._outcomes: list[Outcome] = []

    def healthy(self, name: str) -> bool:
        """Whether the circuit was closed without a failure a moment ago."""
        return self._healthy.get(name, 0.0) > trio.current_time()

    def tell(self, report: door.Report) -> None:
        """Report how a call went, without waiting. ``HostStopping`` once the host has stopped."""
        if report.result == "failed":
            self._healthy.pop(report.name, None)
        self.mailbox.send_nowait(Outcome(report))

    async def run(self, life: Life) -> None:
        """Ask and report until the mailbox ends. Connects when somebody first wants something."""
        self._enters, self._outcomes = [], []  # what is unanswered is in the mailbox again
        life.ready()
        if not await self.mailbox.arrives():
            return
        locked = Backoff(first_s=0.001, max_s=0.05)
        async with life.session(self._options) as session:
            while True:
                busy = bool(self._enters or self._outcomes)
                if not len(self.mailbox):
                    if self.mailbox.closed and not busy:
                        return
                    await self.mailbox.wake.wait(trio.current_time() + locked.next() if busy else None)
                if not busy:
                    locked.reset()
                life.beat()
                for message in self.mailbox.take_nowait(_BATCH):
                    if isinstance(message, Enter):
                        self._enters.append(message)
                    else:
                        self._outcomes.append(message)
                await self._report(session)
                await self._enter(session)

    async def _report(self, session: Session) -> None:
        todo, self._outcomes = self._outcomes, []

        async def commit(items: Sequence[Outcome]) -> None:
            with self._portion.adapt():
                answers = await door.report(session, [item.report for item in items])
            for item, answer in zip(items, answers, strict=True):
                if answer.answer == "busy":
                    self._outcomes.append(item)
                    continue
                self.mailbox.done([item])
                if answer.state == "open" and item.report.result == "failed":
                    log.warning("event=circuit_open name=%s error=%s", item.report.name, item.report.error)

        def refuse(item: Outcome, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                self._outcomes.append(item)
                return
            log.error("event=unreported name=%s error=%r", item.report.name, str(fault))
            self.mailbox.done([item])

        await commit_in_groups(todo, commit, fail=refuse)

    async def _enter(self, session: Session) -> None:
        todo, self._enters = self._enters, []

        async def commit(items: Sequence[Enter]) -> None:
            sent_at = trio.current_time()
            with self._portion.adapt():
                answers = await door.enter(session, [item.call for item in items], probe_s=_PROBE_S)
            for item, answer in zip(items, answers, strict=True):
                if answer.answer == "busy":
                    self._enters.append(item)
                    continue
                self.mailbox.done([item])
                self._remember(item.call.name, answer, sent_at)
                item.reply.set_result(answer)

        def refuse(item: Enter, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                self._enters.append(item)
                return
            self.mailbox.done([item])
            item.reply.set_error(fault)

        await commit_in_groups(todo, commit, fail=refuse)

    def _remember(self, name: str, answer: door.Entered, sent_at: float) -> None:
        if answer.answer != "closed" or answer.failures:
            self._healthy.pop(name, None)
        else:
            if len(self._healthy) >= _MOST_TRUSTED:
                self._healthy.clear()
            self._healthy[name] = sent_at + _TRUST_S
