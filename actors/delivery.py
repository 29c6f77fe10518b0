"""What the outbox, its lane actors and the host agree on about deliveries.

Owns the message types between them. It never delivers anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import attrs

from sql.lanes import Prefix
from sql.types import Lane


@attrs.frozen
class Outcome:
    """What a ledger made of a prefix: ``delivered``, ``retry`` (after ``after_s`` seconds, or the lane's own backoff)
    or ``rejected``; ``reason`` says why."""

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

Deliver = Callable[[Sequence[Prefix], Tell], Awaitable[None]]
"""Hands prefixes of different lanes to the ledger. Bounded in time; raises nothing of a ledger's."""

Observe = Callable[[Sequence[str], Sequence[float]], None]
"""Told type and lag in seconds of facts that were acknowledged."""


@attrs.define(slots=True, eq=False)
class Turn:
    """Lanes of one kind that were claimed together.

    ``claimed_at``: trio time before the claim was sent. ``sent``: runs whose prefix may have reached the ledger, kept
    across lives of the lane actor.
    """

    lane: Lane
    prefixes: list[Prefix]
    claimed_at: float
    sent: set[str] = attrs.field(factory=set)
