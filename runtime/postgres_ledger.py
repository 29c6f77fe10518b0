"""The default ledger: a read model of runs in the runtime's own database.

Owns nothing but the choice of how it is fed: whole turns inside the database (the default), or deliveries like any
other ledger, which shows what those cost. The read model itself, ``ledger_runs`` and ``ledger_logs``, is the kernel's.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from actors.core import EndOfMailbox, Life, Mailbox, Reply
from runtime.ledger import AppendOutcome, LedgerRejected
from sql import lanes
from sql.connection import SessionOptions
from sql.types import Delivery, Lane


@attrs.define(slots=True, eq=False)
class _Application:
    deliveries: Sequence[Delivery]
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
        return await application.reply.wait()

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
                deliveries = [delivery for item in applications for delivery in item.deliveries]
                applied: set[tuple[Lane, str]] = set()
                for lane in Lane:
                    mine = [
                        (delivery.run_id, delivery.facts[0].seq, delivery.facts[-1].seq)
                        for delivery in deliveries
                        if delivery.lane is lane
                    ]
                    if mine:
                        done, _ = await lanes.apply(session, lane, mine)
                        applied |= {(lane, run_id) for run_id in done}
                for item in applications:
                    item.reply.set_result([self._outcome(delivery, applied) for delivery in item.deliveries])
                self.mailbox.done(applications)

    def _outcome(self, delivery: Delivery, applied: set[tuple[Lane, str]]) -> AppendOutcome:
        if (delivery.lane, delivery.run_id) in applied:
            return None
        return LedgerRejected("the ledger has not applied this run's earlier facts")
