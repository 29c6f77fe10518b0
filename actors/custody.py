"""Custody: sandboxes are reserved, recorded, and handed to their runners, in groups.

Owns the group commit of what a launch has to write down before and after each of its steps. It never talks to a
provider.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs

from actors.core import PASSING_FAULTS, Backoff, Life, Mailbox, Reply, commit_in_groups, each_turn
from actors.hints import Hints
from sql import runners
from sql import sandboxes as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault
from sql.runners import Detachment
from sql.sandboxes import Custody, Reservation

log = logging.getLogger("runlane.custody")

_BATCH = 200


@attrs.frozen(slots=True)
class GivenUp:
    """A sandbox that its attempt does not need any more."""

    sandbox: str


@attrs.define(slots=True, eq=False)
class Entry:
    """One thing to write down. The answer is the kernel's word for it: ``reserved``, ``full``, ``done``, ``lost`` …"""

    item: Reservation | Custody | Detachment | GivenUp
    reply: Reply[str] = attrs.field(factory=Reply)


class Keeping:
    """Entries arrive in ``mailbox``. ``create_s``: how long a launch may take before its sandbox is deleted again."""

    def __init__(
        self, options: SessionOptions, mailbox: Mailbox[Entry], hints: Hints, *, create_s: float
    ) -> None:
        self._options = options
        self._mailbox = mailbox
        self._hints = hints
        self._create_s = create_s
        self._locked = Backoff(first_s=0.002, max_s=0.25)

    async def run(self, life: Life) -> None:
        """Write down until the mailbox ends."""
        async with life.session(self._options) as session:
            life.ready()
            await each_turn(
                life,
                self._mailbox,
                lambda batch: self._commit(session, batch),
                most=lambda: _BATCH,
                locked=self._locked,
            )

    async def _commit(self, session: Session, batch: Sequence[Entry]) -> list[Entry]:
        busy: list[Entry] = []

        def refuse(entry: Entry, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                busy.append(entry)
            else:
                self._mailbox.done([entry])
                entry.reply.set_error(fault)

        for kind in (Reservation, Custody, Detachment, GivenUp):
            entries = [entry for entry in batch if isinstance(entry.item, kind)]

            async def commit(entries: Sequence[Entry]) -> None:
                answers = await self._write(session, entries)
                for entry, answer in zip(entries, answers, strict=True):
                    if answer == "busy":
                        busy.append(entry)
                    else:
                        self._mailbox.done([entry])
                        entry.reply.set_result(answer)

            await commit_in_groups(entries, commit, fail=refuse)
        return busy

    async def _write(self, session: Session, entries: Sequence[Entry]) -> Sequence[str]:
        """The entries are all of one kind."""
        items = [entry.item for entry in entries]
        match items[0]:
            case Reservation():
                return await door.reserve(session, items, due_s=self._create_s)  # type: ignore[arg-type]
            case Custody():
                await door.record_custody(session, items)  # type: ignore[arg-type]
            case Detachment():
                answers = await runners.detach(session, items)  # type: ignore[arg-type]
                self._hints.runners.set()
                self._hints.lanes.set()
                return answers
            case GivenUp():
                await door.give_up(session, [item.sandbox for item in items])
                self._hints.cleanup.set()
        return ["done"] * len(items)
