"""Door of the concern reconcile: whether the default ledger holds exactly what the log holds.

Owns the read that sets facts, attempts and the ledger's rows side by side. It never repairs anything, and its
cost is that of reading all facts of the runs it is asked about.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from sql import bundle
from sql.connection import Session
from sql.types import TERMINAL_FACTS

_PAGE = 500

# By run and through primary keys only, so that the history of others costs nothing.
_ACCOUNTS = """
SELECT r.run_id, r.status, r.attempt, a.ended AS attempts_ended, a.expired AS attempts_expired,
       f.terminals, f.lifecycle, f.logged, coalesce(l.applied_facts, 0) AS lifecycle_applied,
       g.applied AS logged_applied,
       f.numbered = coalesce(f.last_seq, 0) AND f.numbered = r.last_seq AS unbroken
  FROM unnest($1::text[]) AS i (run_id)
  JOIN @schema@.runs r ON r.run_id = i.run_id
 CROSS JOIN LATERAL (
        SELECT count(*) FILTER (WHERE lane = 0 AND NOT @schema@.quiet_fact(type, payload)) AS lifecycle,
               count(*) FILTER (WHERE lane = 1) AS logged, count(*) FILTER (WHERE lane = 0) AS numbered,
               max(seq) FILTER (WHERE lane = 0) AS last_seq, count(*) FILTER (WHERE type = ANY ($2)) AS terminals
          FROM @schema@.facts WHERE run_id = r.run_id) f
 CROSS JOIN LATERAL (
        SELECT count(*) AS ended, count(*) FILTER (WHERE outcome = 'expired') AS expired
          FROM @schema@.attempts WHERE run_id = r.run_id) a
 CROSS JOIN LATERAL (SELECT count(*) AS applied FROM @schema@.ledger_logs WHERE run_id = r.run_id) g
  LEFT JOIN @schema@.ledger_runs l ON l.run_id = r.run_id
"""


@attrs.frozen(slots=True)
class Account:
    """One run: what its log says and what the ledger applied.

    ``lifecycle`` and ``logged`` count the facts of the two lanes that a ledger is told of; ``…_applied`` how many
    of them it says it applied. ``terminals`` counts terminal facts. ``unbroken``: the lifecycle facts are numbered
    without a gap up to the run's last.
    """

    run_id: str
    status: str
    attempt: int
    attempts_ended: int
    attempts_expired: int
    terminals: int
    lifecycle: int
    logged: int
    lifecycle_applied: int
    logged_applied: int
    unbroken: bool

    @property
    def facts(self) -> int:
        """Facts of both lanes."""
        return self.lifecycle + self.logged

    @property
    def applied(self) -> int:
        """Facts of both lanes that the ledger applied."""
        return self.lifecycle_applied + self.logged_applied

    @property
    def lost(self) -> int:
        """Facts that the ledger does not have (yet)."""
        return max(0, self.lifecycle - self.lifecycle_applied) + max(0, self.logged - self.logged_applied)

    @property
    def duplicated(self) -> int:
        """Facts that the ledger applied more than once."""
        return max(0, self.lifecycle_applied - self.lifecycle) + max(0, self.logged_applied - self.logged)


async def accounts(session: Session, run_ids: Sequence[str]) -> list[Account]:
    """The accounts of those of the runs that exist, read in pages."""
    text = _ACCOUNTS.replace("@schema@", bundle.quote(session.options.schema))
    found: list[Account] = []
    for start in range(0, len(run_ids), _PAGE):
        page = list(run_ids[start : start + _PAGE])
        found += [Account(**dict(row)) for row in await session.fetch(text, page, sorted(TERMINAL_FACTS))]
    return found
