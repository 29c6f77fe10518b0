"""The default ledger: a read model of runs in the runtime's own database.

Owns nothing but the choice of how it is fed: whole turns inside the database (the default), or deliveries like any
other ledger, which shows what those cost. The read model itself, ``ledger_runs`` and ``ledger_logs``, is the kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import trio

from actors.core import EndOfMailbox, Life, Mailbox, Reply
from runtime.ledger import AppendOutcome, LedgerRejected
from sql import lanes
from sql.connection import Session, SessionOptions
from sql.types import Delivery, Lane

_Prefix = tuple[Lane, str, int, int]
"""Lane, run id, first and last fact."""


def _prefix(delivery: Delivery) -> _Prefix:
    return delivery.lane, delivery.run_id, delivery.facts[0].seq, delivery.facts[-1].seq


@attrs.define(slots=True, eq=False)
class _Application:
    """Deliveries and where their answers go. ``given_up``: nobody waits for these any more."""

    deliveries: Sequence[Delivery]
    given_up: bool = False
    reply: Reply[Sequence[AppendOutcome]] = attrs.field(factory=Reply)


class PostgresLedger:
    """Applies runs' facts, in order and once, to ``ledger_runs`` and ``ledger_logs`` of the runtime's schema.

    ``in_database`` (default): the outbox picks, applies and acknowledges in one statement, and facts never leave the
    server. False: deliveries come here through lane actors.
    """

    def __init__(self, *, in_database: bool = True) -> None:
        self.in_database = in_database
        self.mailbox: Mailbox[_Application] = Mailbox("ledger")
        self._options: SessionOptions | None = None

    @property
    def mailboxes(self) -> Sequence[Mailbox[_Application]]:
        """Where deliveries wait for the read model."""
        return (self.mailbox,)

    def use(self, options: SessionOptions) -> None:
        """Where the read model is. Called by the host."""
        self._options = options
        self.mailbox = Mailbox("ledger")  # a host closes the one it has used

    async def append(self, delivery: Delivery) -> None:
        """Apply one delivery. Raises LedgerRejected when the read model lacks the run's earlier facts."""
        (outcome,) = await self.append_many([delivery])
        if outcome is not None:
            raise outcome

    async def append_many(self, deliveries: Sequence[Delivery]) -> Sequence[AppendOutcome]:
        """Apply each delivery on its own merits; one outcome each."""
        application = _Application(deliveries)
        await self.mailbox.send(application)
        try:
            return await application.reply.wait()
        except trio.Cancelled:
            application.given_up = True
            raise

    async def run(self, life: Life) -> None:
        """Apply what arrives until the mailbox ends. Hosted as an actor when not ``in_database``."""
        assert self._options is not None, "the host says where the read model is"
        async with life.session(self._options) as session:
            life.ready()
            while True:
                try:
                    applications = await self.mailbox.take(16)
                except EndOfMailbox:
                    return
                life.beat()
                wanted = [item for item in applications if not item.given_up]
                applied = await self._apply(session, [one for item in wanted for one in item.deliveries])
                for item in wanted:
                    item.reply.set_result([self._outcome(delivery, applied) for delivery in item.deliveries])
                self.mailbox.done(applications)

    async def _apply(self, session: Session, deliveries: Sequence[Delivery]) -> set[_Prefix]:
        """Apply, and answer what the read model has now."""
        applied: set[_Prefix] = set()
        left = dict.fromkeys(map(_prefix, deliveries))  # one that was given up may be here with the next try
        while left:
            # One prefix per lane and call: a later one of the same lane wants to find the first applied.
            now = {(lane, run_id): (first, last) for lane, run_id, first, last in reversed(left)}
            for lane in Lane:
                items = [(run_id, *ends) for (of, run_id), ends in now.items() if of is lane]
                if items:
                    done, _ = await lanes.apply(session, lane, items)
                    applied |= {(lane, *item) for item in items if item[0] in done}
            left = dict.fromkeys(prefix for prefix in left if now[prefix[:2]] != prefix[2:])
        return applied

    def _outcome(self, delivery: Delivery, applied: set[_Prefix]) -> AppendOutcome:
        if _prefix(delivery) in applied:
            return None
        return LedgerRejected("the ledger has not applied this run's earlier facts")
