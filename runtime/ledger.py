"""The ledger contract: who receives a run's facts, and how it says what became of them.

Owns the protocol, its answers and the in-memory ledger. It never claims or acknowledges anything: the
outbox does.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias, TypeGuard, runtime_checkable

import attrs

from actors.core import Life, Mailbox
from runtime import ids
from runtime.codec import preview
from sql.connection import SessionOptions
from sql.errors import InputRefused, RunlaneError
from sql.types import Delivery, Fact, Lane


class LedgerRetry(RunlaneError):
    """The ledger could not take a delivery now; it is delivered again after at least ``after`` seconds
    (None: the lane's own backoff). ``reason`` says why, for people."""

    def __init__(self, after: float | None = None, reason: str = "try again") -> None:
        if after is not None and not _is_wait(after):
            raise InputRefused(
                "after", f"must be a finite number of seconds, 0 or more, not {preview(after)}"
            )
        super().__init__(reason + ("" if after is None else f" after {after:g} s"))
        self.after = after


class LedgerRejected(RunlaneError):
    """The ledger will never take this delivery: its lane is blocked, visibly, until an operator acts."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LedgerNotCurrent(RunlaneError):
    """It is not this delivery's turn: the sender does not hold the lane any more.

    Nothing was applied. The turn ends at once, and is not counted as a failed one.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _is_wait(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


AppendOutcome: TypeAlias = LedgerRetry | LedgerRejected | LedgerNotCurrent | None
"""What became of one delivery of a batch; None means applied."""


class Ledger(Protocol):
    """Receives deliveries: at least once each, in order per run and lane.

    ``append`` returns when the facts are durable. It raises LedgerRetry, LedgerRejected or LedgerNotCurrent; any other
    error counts as a failed delivery and is tried again with backoff. Applying the same delivery again must have
    no further effect: ``delivery_key`` and each fact's ``seq`` tell.

    A ledger that has a ``receiver`` (text, such as its address) gets all facts of the runs that its host admits, from
    whichever host has a ledger with the same ``receiver``; without one they go to each host's own ledger.
    """

    async def append(self, delivery: Delivery) -> None:
        """Apply one delivery."""
        ...


@runtime_checkable
class BatchLedger(Protocol):
    """A ledger that also takes many deliveries of different lanes at once."""

    async def append(self, delivery: Delivery) -> None:
        """Apply one delivery."""
        ...

    async def append_many(self, deliveries: Sequence[Delivery]) -> Sequence[AppendOutcome]:
        """Apply each delivery on its own merits and answer one outcome per delivery, in their order."""
        ...


@attrs.frozen
class Limits:
    """How much a ledger takes at once: ``facts`` of one run in a delivery, ``deliveries`` in one ``append_many``."""

    facts: int
    deliveries: int


@runtime_checkable
class LimitedLedger(Protocol):
    """A ledger that says how much it takes. Asked before each claim: the answer may change."""

    @property
    def limits(self) -> Limits:
        """The most that it takes at once."""
        ...


@runtime_checkable
class HostedLedger(Protocol):
    """A ledger that works inside the host, as an actor, for as long as the host delivers to it."""

    @property
    def mailboxes(self) -> Sequence[Mailbox[Any]]:
        """What is handed to it and survives its lives."""
        ...

    def use(self, options: SessionOptions) -> None:
        """Where the runtime is. Called before ``run``, at each start of a host."""
        ...

    async def run(self, life: Life) -> None:
        """Serve ``append`` until asked to stop."""
        ...


def takes_batches(ledger: Ledger) -> TypeGuard[BatchLedger]:
    """Whether the ledger has ``append_many``."""
    return isinstance(ledger, BatchLedger)


def check_ledger(field: str, ledger: object) -> None:
    """Raises InputRefused for something that is no ledger."""
    if isinstance(ledger, type):
        raise InputRefused(field, f"give an object, not its class: {ledger.__name__}(…)")
    if not callable(getattr(ledger, "append", None)):
        raise InputRefused(field, f"{preview(ledger)} is no ledger: it has no method append")
    for name in ("append", "append_many"):
        method = getattr(ledger, name, None)
        if method is not None and not _is_async(method):
            raise InputRefused(field, f"{type(ledger).__name__}.{name} must be an async def")


def _is_async(method: Any) -> bool:
    """Whether it, what it wraps, or its ``__call__`` is an ``async def``."""
    shapes = (method, inspect.unwrap(method), getattr(method, "__call__", None))  # noqa: B004
    return any(map(inspect.iscoroutinefunction, shapes))


def receiver_of(ledger: Ledger) -> str | None:
    """The ledger's ``receiver``, if it has one. Raises InputRefused for one that runs cannot carry."""
    return ids.check_receiver("ledger.receiver", getattr(ledger, "receiver", None))


@attrs.define(slots=True)
class _Log:
    """Facts by seq, in order. ``generation`` is that of the latest delivery."""

    facts: dict[int, Fact] = attrs.field(factory=dict)
    digests: dict[str, str] = attrs.field(factory=dict)
    generation: int = 0
    last: int = 0


class MemoryLedger:
    """Keeps everything in memory: for tests and for trying things out. Nothing is ever dropped.

    Idempotent by delivery key and seq; a delivery that leaves a gap which is not meant, is out of order, or differs
    from what is already here is rejected. ``deliveries`` lists what arrived, repeated or rejected ones included;
    ``repeated`` counts facts that arrived again.
    """

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.repeated = 0
        self._logs: dict[tuple[str, Lane], _Log] = {}

    async def append(self, delivery: Delivery) -> None:
        """Apply one delivery. Raises LedgerRejected, changing nothing, when its order or content is wrong."""
        self._append(delivery)

    async def append_many(self, deliveries: Sequence[Delivery]) -> Sequence[AppendOutcome]:
        """Apply each delivery; one outcome per delivery."""
        return [self._outcome(delivery) for delivery in deliveries]

    def facts(self, run_id: str, lane: Lane | None = None) -> tuple[Fact, ...]:
        """The facts of a run in order: those of one lane, or the lifecycle's followed by the others."""
        lanes = sorted(Lane) if lane is None else [lane]
        return tuple(fact for one in lanes for fact in self._log(run_id, one).facts.values())

    def run_ids(self) -> tuple[str, ...]:
        """Every run that has facts here, in order of arrival."""
        return tuple(dict.fromkeys(run_id for run_id, _ in self._logs))

    def _log(self, run_id: str, lane: Lane) -> _Log:
        return self._logs.get((run_id, lane)) or _Log()

    def _outcome(self, delivery: Delivery) -> AppendOutcome:
        try:
            self._append(delivery)
        except LedgerRejected as rejected:
            return rejected
        return None

    def _append(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)
        log = self._log(delivery.run_id, delivery.lane)
        problem = _problem(delivery, log)
        if problem is not None:
            raise LedgerRejected(f"{delivery.delivery_key}: {problem}")
        new = [fact for fact in delivery.facts if fact.seq > log.last]
        self.repeated += len(delivery.facts) - len(new)
        log.facts.update((fact.seq, fact) for fact in new)
        log.last = max(log.last, delivery.facts[-1].seq)
        log.generation = max(log.generation, delivery.generation)
        log.digests[delivery.delivery_key] = delivery.digest
        self._logs[delivery.run_id, delivery.lane] = log


def _problem(delivery: Delivery, log: _Log) -> str | None:
    """Why the delivery cannot be applied to the log, or None."""
    if not delivery.facts:
        return "it has no facts"
    if log.digests.get(delivery.delivery_key, delivery.digest) != delivery.digest:
        return "the same delivery key came with another digest"
    first = delivery.facts[0].seq
    gap_is_meant = delivery.generation > log.generation or first - delivery.passed <= log.last + 1
    if first < 1 or (first > log.last + 1 and not gap_is_meant):
        return f"expected seq {log.last + 1}, got {first}"
    for expected, fact in enumerate(delivery.facts, first):
        if (fact.run_id, fact.lane) != (delivery.run_id, delivery.lane):
            return f"it holds a fact of another run or lane ({fact.run_id}, {fact.lane.label})"
        if fact.seq != expected:
            return f"expected seq {expected}, got {fact.seq}"
        if fact != log.facts.get(expected, fact):
            return f"the fact with seq {expected} differs from the one already here"
    return None
