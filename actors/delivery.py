"""What admissions, the outbox, its lane actors and the host agree on about deliveries.

Owns the message types between them, and what a failed delivery costs its lane. It never delivers anything.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence

import attrs
import trio

from actors.core import Backoff, Mailbox
from sql.errors import HostStopping, MailboxFull
from sql.lanes import HandBack, Prefix
from sql.types import Lane

log = logging.getLogger("runlane.lanes")

MOST_ATTEMPTS = 20
"""A prefix that failed this often is blocked until an operator decides."""

OTHERS_FIRST_S = 0.15
"""For so long a host leaves a lane to others that it could not deliver in time."""

FIRST_LEASE_S = 5.0
"""The lease under which an admission hands its first fact over."""

_BACKOFF_S = (1.0, 300.0)
# Of why a delivery failed: it is kept in the run's own row, which stays narrow.
_REASON_CHARS = 300
# A receiver that does not accept our lease has seen another one, or an older state: soon it may see this one.
_NOT_CURRENT_S = 0.5


@attrs.frozen
class Outcome:
    """What a ledger made of a prefix: ``delivered``, ``retry`` (after ``after_s`` seconds, or the lane's own backoff),
    ``rejected``, ``not_current`` (it does not accept the lease) or ``given_up`` (its sender's time was over before the
    ledger's); ``reason`` says why."""

    kind: str
    after_s: float | None = None
    reason: str | None = None


@attrs.frozen
class Room:
    """How much a ledger takes now: ``lanes`` in one turn, ``facts`` of one lane in a delivery."""

    lanes: int
    facts: int


Tell = Callable[[Sequence[tuple[Prefix, Outcome]]], None]
"""Told what became of prefixes, each once, as soon as it is known."""

Deliver = Callable[[Sequence[Prefix], Tell, float], Awaitable[None]]
"""Hands prefixes of different lanes to the ledger, and gives up at the deadline (on the trio clock). Bounded in time;
raises nothing of a ledger's."""

Observe = Callable[[Sequence[str], Sequence[float]], None]
"""Told type and lag in seconds of facts that were acknowledged."""


@attrs.define(slots=True, eq=False)
class Turn:
    """Lanes of one kind and of one ledger that were leased together.

    ``begun_at``: trio time before the lease was asked for. ``unread``: run ids and tokens of lanes that were leased
    without their facts. ``deadline``: when their first delivery is given up; ``given_up``: for some it was.
    ``sent``: runs whose prefix may have reached the ledger, kept across lives of the lane actor.
    """

    lane: Lane
    prefixes: list[Prefix]
    begun_at: float
    unread: list[tuple[str, int]] = attrs.field(factory=list)
    deadline: float = math.inf
    given_up: bool = False
    sent: set[str] = attrs.field(factory=set)


class GivenUp:
    """Lanes that this host could not deliver in time: for a moment it leaves them to others, who may do better."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def add(self, run_id: str) -> None:
        """From now on."""
        self._until[run_id] = trio.current_time() + OTHERS_FIRST_S

    def now(self) -> list[str]:
        """Those that are left to others now."""
        now = trio.current_time()
        self._until = {run_id: until for run_id, until in self._until.items() if until > now}
        return list(self._until)


@attrs.frozen(eq=False)
class Firsts:
    """The short way of new runs' first facts: straight from their admission to the carrier of urgent turns.

    Only while that carrier is idle, and as many as the ledger takes at once; ``budget_s`` is what it then gets to
    answer.
    """

    carrier: Mailbox[Turn]
    takes: Callable[[], Room]
    budget_s: float

    def room(self) -> int:
        """How many would be delivered at once."""
        busy = len(self.carrier) or self.carrier.in_flight or self.carrier.closed
        return 0 if busy else self.takes().lanes

    def hand_over(self, leases: Sequence[tuple[str, int]], leased_at: float) -> None:
        """These lanes (run id, token) were leased at admission. If nobody takes them, their lease ends by itself."""
        now = trio.current_time()
        turn = Turn(Lane.LIFECYCLE, [], leased_at, unread=list(leases), deadline=now + self.budget_s)
        with contextlib.suppress(MailboxFull, HostStopping):
            self.carrier.send_nowait(turn)


def hand_back_after(prefix: Prefix, outcome: Outcome) -> HandBack:
    """How a lane whose delivery did not succeed is handed back, and a line in the log about it."""
    if outcome.kind == "given_up":
        return HandBack(prefix.run_id, prefix.token, "given_up")
    exhausted = outcome.kind == "retry" and prefix.attempt >= MOST_ATTEMPTS
    if outcome.kind == "rejected" or exhausted:
        reason = outcome.reason or "rejected"
        if exhausted:
            reason = f"gave up after {prefix.attempt} deliveries: {reason}"
        log.error(
            "event=lane_blocked run=%s lane=%s facts=%d-%d reason=%r",
            prefix.run_id,
            prefix.lane.label,
            prefix.seqs[0],
            prefix.through,
            reason,
        )
        return HandBack(prefix.run_id, prefix.token, "blocked", reason=reason[:2000])
    if outcome.kind == "not_current":
        ending, delay_s = "given_up", Backoff(first_s=_NOT_CURRENT_S).next()
    elif outcome.after_s is not None:
        ending, delay_s = "failed", outcome.after_s
    else:
        first_s, max_s = _BACKOFF_S
        step_s = min(max_s, first_s * 2.0 ** (prefix.attempt - 1))
        ending, delay_s = "failed", Backoff(first_s=step_s, max_s=max_s).next()
    log.info(
        "event=delivery_failed run=%s lane=%s facts=%d-%d attempt=%d retry_s=%.3f code=%s reason=%r",
        prefix.run_id,
        prefix.lane.label,
        prefix.seqs[0],
        prefix.through,
        prefix.attempt,
        delay_s,
        outcome.kind,
        outcome.reason,
    )
    said = None if outcome.reason is None else outcome.reason[:_REASON_CHARS]
    return HandBack(prefix.run_id, prefix.token, ending, delay_s, said)
