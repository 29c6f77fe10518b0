"""The ledger contract and the in-memory ledger."""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import Any

import attrs
import pytest

from runtime.http_ledger import HttpLedger
from runtime.ledger import Ledger, LedgerRejected, LedgerRetry, MemoryLedger, takes_batches
from runtime.postgres_ledger import PostgresLedger
from runtime.routes import Routes
from sql.errors import InputRefused, RunlaneError
from sql.types import Delivery, Fact, Lane

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def fact(seq: int, run_id: str = "r", lane: Lane = Lane.LIFECYCLE, payload: Any = None) -> Fact:
    return Fact(run_id, lane, seq, "run.progress", payload, NOW)


def delivery(
    first: int,
    last: int,
    *,
    run_id: str = "r",
    lane: Lane = Lane.LIFECYCLE,
    payload: Any = None,
    attempt: int = 1,
) -> Delivery:
    facts = tuple(fact(seq, run_id, lane, payload) for seq in range(first, last + 1))
    key = f"{run_id}:{lane.label}:{first}-{last}"
    return Delivery(run_id, lane, facts, key, attempt, f"digest of {payload}")


async def test_facts_are_kept_in_order_per_run_and_lane() -> None:
    ledger = MemoryLedger()
    await ledger.append(delivery(1, 2))
    await ledger.append(delivery(1, 1, lane=Lane.OBSERVABILITY))
    await ledger.append(delivery(3, 3))
    await ledger.append(delivery(1, 1, run_id="other"))
    assert [(one.lane, one.seq) for one in ledger.facts("r")] == [(0, 1), (0, 2), (0, 3), (1, 1)]
    assert [one.seq for one in ledger.facts("r", Lane.OBSERVABILITY)] == [1]
    assert ledger.facts("nobody") == ()
    assert ledger.run_ids() == ("r", "other")
    assert ledger.repeated == 0


async def test_a_redelivery_has_no_further_effect() -> None:
    ledger = MemoryLedger()
    await ledger.append(delivery(1, 2))
    await ledger.append(delivery(3, 3))
    before = ledger.facts("r")
    await ledger.append(delivery(1, 2, attempt=2))
    assert ledger.facts("r") == before
    assert ledger.repeated == 2
    assert len(ledger.deliveries) == 3


async def test_a_prefix_that_overlaps_adds_only_what_is_new() -> None:
    ledger = MemoryLedger()
    await ledger.append(delivery(1, 2))
    await ledger.append(delivery(2, 4))
    assert [one.seq for one in ledger.facts("r")] == [1, 2, 3, 4]
    assert ledger.repeated == 1


def _with(one: Delivery, **changes: Any) -> Delivery:
    return attrs.evolve(one, **changes)


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        (delivery(4, 4), "expected seq 3, got 4"),
        (_with(delivery(3, 4), facts=(fact(3), fact(5))), "expected seq 4, got 5"),
        (_with(delivery(3, 4), facts=(fact(4), fact(3))), "expected seq 3, got 4"),
        (_with(delivery(3, 4), facts=(fact(3), fact(3))), "expected seq 4, got 3"),
        (_with(delivery(3, 3), facts=()), "no facts"),
        (_with(delivery(3, 3), facts=(fact(3, run_id="x"),)), "another run or lane"),
        (_with(delivery(3, 3), facts=(fact(3, lane=Lane.OBSERVABILITY),)), "another run or lane"),
        (_with(delivery(1, 2), digest="changed"), "another digest"),
        (_with(delivery(2, 2, payload="changed")), "seq 2 differs"),
    ],
)
async def test_wrong_order_or_content_is_rejected_and_changes_nothing(bad: Delivery, word: str) -> None:
    ledger = MemoryLedger()
    await ledger.append(delivery(1, 2))
    before = ledger.facts("r")
    with pytest.raises(LedgerRejected, match=word):
        await ledger.append(bad)
    assert ledger.facts("r") == before
    await ledger.append(delivery(3, 3))


async def test_a_batch_answers_each_delivery_for_itself() -> None:
    ledger = MemoryLedger()
    outcomes = await ledger.append_many([delivery(1, 1), delivery(9, 9, run_id="x"), delivery(2, 2)])
    assert [type(outcome) for outcome in outcomes] == [type(None), LedgerRejected, type(None)]
    assert [one.seq for one in ledger.facts("r")] == [1, 2]
    assert ledger.run_ids() == ("r",)


def test_a_users_object_is_a_ledger_with_or_without_batches() -> None:
    class Mine:
        async def append(self, delivery: Delivery) -> None: ...

    mine: Ledger = Mine()
    memory: Ledger = MemoryLedger()
    assert not takes_batches(mine)
    assert takes_batches(memory)


def test_what_is_no_ledger_is_refused_at_the_start() -> None:
    class Plain:
        def append(self, delivery: Delivery) -> None: ...

    class PlainBatches(MemoryLedger):
        def append_many(self, deliveries: Any) -> Any: ...

    class Wrapped:
        @functools.wraps(MemoryLedger.append)
        def append(self, delivery: Delivery) -> Any: ...

    for wrong, words in {
        "mine": r"ledger: 'mine' is no ledger",
        object(): r"ledger: <object> is no ledger: it has no method append",
        Plain(): r"ledger: Plain\.append must be an async def",
        PlainBatches(): r"ledger: PlainBatches\.append_many must be an async def",
        MemoryLedger: r"ledger: give an object, not its class: MemoryLedger\(…\)",
    }.items():
        with pytest.raises(InputRefused, match=words):
            Routes(wrong, {})  # type: ignore[arg-type]
    with pytest.raises(InputRefused, match=r"receivers\['books'\]: Plain\.append must be"):
        Routes(None, {"books": Plain()})  # type: ignore[dict-item]
    wrapped: Any = Wrapped()
    far = HttpLedger("http://x", secret="s" * 32)
    assert Routes(wrapped, {"other": PostgresLedger(), "far": far}).receivers


def test_the_two_answers() -> None:
    assert LedgerRetry().after is None
    assert LedgerRetry(after=2.5).after == 2.5
    assert str(LedgerRetry(after=2.5)) == "try again after 2.5 s"
    assert LedgerRejected("not ours").reason == "not ours"
    assert issubclass(LedgerRetry, RunlaneError)
    assert issubclass(LedgerRejected, RunlaneError)


@pytest.mark.parametrize("after", [-1, float("nan"), float("inf"), "5", True])
def test_a_wait_must_be_a_number_of_seconds(after: Any) -> None:
    with pytest.raises(InputRefused, match="after"):
        LedgerRetry(after=after)
