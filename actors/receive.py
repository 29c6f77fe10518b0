"""Receive: applies deliveries to a receiver's ledger, in groups.

Owns the receiver's one connection to its ledger. Requests that arrive while a call is in flight share the next one. It
never judges who may deliver: whoever hands something over has done that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import trio

from actors.core import PASSING_FAULTS, EndOfMailbox, Life, Mailbox, Reply, commit_in_groups
from sql import receive as door
from sql.connection import Session, SessionOptions
from sql.errors import ItemFault
from sql.receive import Parcel, Received
from sql.types import Lane

log = logging.getLogger("runlane.receive")

_REQUESTS = 32
_PARCELS = 500
_BUSY = "the ledger is busy"


@attrs.define(slots=True, eq=False)
class Batch:
    """The parcels of a request, in order. Past ``deadline`` (trio time) nobody waits: it is not applied any more."""

    parcels: Sequence[Parcel]
    deadline: float
    reply: Reply[Sequence[Received]] = attrs.field(factory=Reply)


@attrs.define(slots=True, eq=False)
class Lookup:
    """A question for what the ledger has of a run."""

    run_id: str
    deadline: float
    reply: Reply[Mapping[str, Any] | None] = attrs.field(factory=Reply)


Request: TypeAlias = Batch | Lookup


class Receive:
    """Requests arrive in ``mailbox``."""

    def __init__(self, options: SessionOptions, mailbox: Mailbox[Request]) -> None:
        self._options = options
        self._mailbox = mailbox

    async def run(self, life: Life) -> None:
        """Apply until the mailbox ends."""
        async with life.session(self._options) as session:
            life.ready()
            while True:
                try:
                    requests = await self._mailbox.take(_REQUESTS)
                except EndOfMailbox:
                    return
                life.beat()
                # Whoever gave up has said so to the sender, which may have lost its lane since.
                now = trio.current_time()
                live = [request for request in requests if request.deadline > now]
                await self._apply(session, [request for request in live if isinstance(request, Batch)])
                for request in live:
                    if isinstance(request, Lookup):
                        request.reply.set_result(await door.read(session, request.run_id))
                self._mailbox.done(requests)

    async def _apply(self, session: Session, batches: Sequence[Batch]) -> None:
        answers: dict[int, Received] = {}

        async def commit(parcels: Sequence[Parcel]) -> None:
            for parcel, answer in zip(parcels, await door.receive(session, parcels), strict=True):
                if answer.outcome == "rejected":
                    log.error(
                        "event=rejected run=%s key=%s reason=%r",
                        parcel.run_id,
                        parcel.delivery_key,
                        answer.reason,
                    )
                answers[id(parcel)] = answer

        def fail(parcel: Parcel, fault: ItemFault) -> None:
            if isinstance(fault, PASSING_FAULTS):
                answers[id(parcel)] = Received("retry", _BUSY)
            else:
                log.error("event=unstorable run=%s error=%r", parcel.run_id, str(fault))
                answers[id(parcel)] = Received("rejected", f"it cannot be stored: {fault}")

        waiting = [parcel for batch in batches for parcel in batch.parcels]
        while waiting:
            wave, waiting = _wave(waiting)
            await commit_in_groups(wave, commit, fail=fail)
        for batch in batches:
            batch.reply.set_result([answers[id(parcel)] for parcel in batch.parcels])


def _wave(parcels: Sequence[Parcel]) -> tuple[list[Parcel], list[Parcel]]:
    """The first parcel of each lane, up to a call's worth, and the rest in order."""
    wave: dict[tuple[str, Lane], Parcel] = {}
    rest: list[Parcel] = []
    for parcel in parcels:
        lane = (parcel.run_id, parcel.lane)
        if lane in wave or len(wave) >= _PARCELS:
            rest.append(parcel)
        else:
            wave[lane] = parcel
    return list(wave.values()), rest
