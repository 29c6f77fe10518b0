"""Rate scopes in the kernel: slots, the bucket, holds, refusals and probes (L-5, A-20)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import attrs
import pytest

from sql import rates
from sql.calls import new_token
from sql.claim import Claimed
from sql.errors import InputRefused
from sql.rates import Granted, RateScope, Result, Slot
from tests.support.callers import open_caller
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

PROBE_S = 30.0


@attrs.define
class Scope:
    """One scope, and a live attempt that asks."""

    kernel: Kernel
    item: Claimed
    name: str = "api"
    ahead_s: float = 0.0

    async def set(self, **fields: Any) -> bool:
        fields = {"per_s": None, "burst": 1.0, "max_in_flight": None, **fields}
        return await rates.set_rate(self.kernel.session, self.name, **fields)

    def slot(self, cost: float = 1.0, item: Claimed | None = None) -> Slot:
        item = item or self.item
        return Slot(self.name, new_token(), cost, item.run_id, item.attempt)

    async def ask(self, *slots: Slot) -> list[Granted]:
        return await rates.acquire(self.kernel.session, slots, ahead_s=self.ahead_s, probe_s=PROBE_S)

    async def tell(self, result: str, *slots: Slot, retry_after_s: float = 0.0) -> list[rates.Released]:
        results = [Result(slot.scope, slot.token, result, retry_after_s) for slot in slots]
        return await rates.release(self.kernel.session, results)

    async def now(self) -> RateScope:
        (found,) = await rates.read(self.kernel.session)
        return found


@asynccontextmanager
async def open_scope(dsn: str, schema: str, **fields: Any) -> AsyncIterator[Scope]:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        scope = Scope(kernel, await kernel.started())
        await scope.set(**fields)
        yield scope


def waits(answers: Sequence[Granted]) -> list[float | None]:
    """Seconds until each slot; 0 for granted, None for held."""
    return [0.0 if a.answer == "granted" else a.wait_s for a in answers]


async def test_each_of_a_batch_has_a_slot_of_its_own_in_order(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=10.0, burst=3.0) as scope:
        slots = [scope.slot() for _ in range(6)]
        assert waits(await scope.ask(*slots)) == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3])
        # Asked again, as after a lost answer: the same slots, and no more is charged.
        assert waits(await scope.ask(*slots)) == pytest.approx([0, 0, 0, 0.1, 0.2, 0.3])
        assert waits(await scope.ask(scope.slot())) == pytest.approx([0.4])
        await scope.kernel.advance(0.25)
        assert waits(await scope.ask(*slots[3:])) == pytest.approx([0, 0, 0.05])
        assert (await scope.now()).used == 5.0


async def test_the_bucket_fills_to_its_burst_and_no_further(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=2.0, burst=4.0) as scope:
        await scope.ask(*(scope.slot() for _ in range(4)))
        await scope.kernel.advance(1.0)
        assert waits(await scope.ask(*(scope.slot() for _ in range(3)))) == pytest.approx([0, 0, 0.5])
        await scope.kernel.advance(1_000.0)
        assert waits(await scope.ask(*(scope.slot() for _ in range(5)))) == pytest.approx([0, 0, 0, 0, 0.5])


async def test_costs_count_also_above_the_burst(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=1.0, burst=5.0) as scope:
        assert waits(await scope.ask(scope.slot(4.0), scope.slot(3.0))) == pytest.approx([0, 2.0])
        assert waits(await scope.ask(scope.slot(10.0))) == pytest.approx([12.0])


async def test_slots_that_come_soon_are_granted_ahead_for_their_moment(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=10.0, burst=2.0) as scope:
        scope.ahead_s = 0.25
        slots = [scope.slot() for _ in range(6)]
        for _ in range(2):
            answers = await scope.ask(*slots)
            assert [a.answer for a in answers] == ["granted"] * 4 + ["wait"] * 2
            assert [a.wait_s for a in answers] == pytest.approx([0, 0, 0.1, 0.2, 0.3, 0.4])
        await scope.kernel.advance(0.1)
        (fifth,) = await scope.ask(slots[4])
        assert fifth.answer == "granted"
        assert fifth.wait_s == pytest.approx(0.2)
        assert answers[0].started_at is not None
        assert fifth.started_at is not None
        assert (fifth.started_at - answers[0].started_at).total_seconds() == pytest.approx(0.3)


async def test_who_starts_late_pushes_nobody_together(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=10.0) as scope:
        slots = [scope.slot() for _ in range(4)]
        assert waits(await scope.ask(*slots)) == pytest.approx([0, 0.1, 0.2, 0.3])
        await scope.kernel.advance(0.27)
        # The third one's slot has come, but the second one has only just started; the fourth hears of it later.
        assert waits(await scope.ask(*slots[1:])) == pytest.approx([0, 0.1, 0.03])
        await scope.kernel.advance(0.1)
        assert waits(await scope.ask(*slots[2:])) == pytest.approx([0, 0.1])


async def test_a_slot_given_up_comes_back_if_it_was_the_last(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=1.0) as scope:
        first, second, third, fourth = (scope.slot() for _ in range(4))
        assert waits(await scope.ask(first, second, third, fourth)) == pytest.approx([0, 1, 2, 3])
        for _ in range(2):
            assert [a.answer for a in await scope.tell("unused", fourth, third)] == ["done", "done"]
        assert waits(await scope.ask(third)) == pytest.approx([2.0])
        # One in the middle is lost.
        await scope.tell("unused", second)
        assert waits(await scope.ask(scope.slot())) == pytest.approx([3.0])
        # Granted and not used is no different.
        await scope.kernel.advance(3.0)
        last = scope.slot()
        assert waits(await scope.ask(last)) == pytest.approx([1.0])
        await scope.kernel.advance(1.0)
        assert waits(await scope.ask(last)) == [0.0]
        before = (await scope.now()).used
        await scope.tell("unused", last)
        assert (await scope.now()).used == before - 1.0
        assert waits(await scope.ask(scope.slot())) == [0.0]


async def test_a_late_start_given_up_lets_nobody_start_who_would_not_have(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=1.0) as scope:
        slots = [scope.slot() for _ in range(4)]
        await scope.ask(*slots)
        await scope.kernel.advance(10.0)
        assert waits(await scope.ask(slots[1])) == [0.0]
        await scope.kernel.advance(5.0)
        assert waits(await scope.ask(slots[2])) == [0.0]
        await scope.tell("unused", slots[1])  # time has given back long since what it had charged
        assert waits(await scope.ask(slots[3])) == [1.0]
        await scope.tell("unused", slots[2])
        assert waits(await scope.ask(slots[3])) == [0.0]


async def test_only_so_many_are_in_flight_and_the_first_in_line_is_next(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, max_in_flight=2) as scope:
        slots = [scope.slot() for _ in range(5)]
        answers = await scope.ask(*slots)
        assert [a.answer for a in answers] == ["granted", "granted", "held", "held", "held"]
        assert waits(answers)[2:] == [None] * 3
        (told,) = await scope.tell("done", slots[0])
        assert told.waiting
        # Who asks first does not pass who came first, be it from another host.
        assert [a.answer for a in await scope.ask(slots[3], slots[4], scope.slot())] == ["held"] * 3
        assert [a.answer for a in await scope.ask(slots[4], slots[2])] == ["held", "granted"]
        now = await scope.now()
        assert (now.in_flight, now.waiting, now.max_in_flight) == (2, 3, 2)


async def test_a_hold_ends_with_its_attempt(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, max_in_flight=1) as scope:
        held, line = scope.slot(), scope.slot()
        other = await scope.kernel.started()
        mine = scope.slot(item=other)
        assert [a.answer for a in await scope.ask(held, line, mine)] == ["granted", "held", "held"]
        # The lease lapses, for the holder and for the one that is first in line.
        await scope.kernel.advance(30.0)
        await scope.kernel.renew(other, 120.0)
        assert [a.answer for a in await scope.ask(mine)] == ["held"]
        await scope.kernel.advance(31.0)
        assert [a.answer for a in await scope.ask(mine)] == ["granted"]
        assert await rates.sweep(scope.kernel.session, limit=10) == 2
        assert await rates.sweep(scope.kernel.session, limit=10) == 0
        assert await scope.kernel.fetchval("SELECT count(*) FROM @schema@.rate_holds") == 1
        # Ended in order, it is gone at once.
        await scope.kernel.complete(other)
        assert (await scope.now()).in_flight == 0


async def test_a_refusal_blocks_the_scope_and_one_probe_opens_it(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=1.0, burst=2.0) as scope:
        slots = [scope.slot() for _ in range(6)]
        assert waits(await scope.ask(*slots)) == pytest.approx([0, 0, 1, 2, 3, 4])
        await scope.kernel.advance(1.5)
        await scope.tell("refused", slots[0], retry_after_s=10.0)
        await scope.tell("failed", slots[0])
        now = await scope.now()
        assert now.state == "blocked"
        assert now.blocked_s == pytest.approx(10.0)
        assert now.refused_per_s == pytest.approx(2 / 1.5)
        # Nobody starts, whatever its slot; an older refusal does not shorten the block.
        await scope.tell("refused", slots[1], retry_after_s=3.0)
        answers = await scope.ask(*slots[2:])
        assert [a.answer for a in answers] == ["held"] * 4
        assert waits(answers) == pytest.approx([10.0] * 4)
        await scope.kernel.advance(10.0)
        assert (await scope.now()).state == "probing"
        answers = await scope.ask(*slots[2:])
        assert [a.answer for a in answers] == ["granted", "held", "held", "held"]
        assert [a.answer for a in await scope.ask(*slots[2:], scope.slot())] == ["granted"] + ["held"] * 4
        # The holder of an old slot can neither open the scope nor end the probe.
        await scope.tell("done", slots[1])
        assert (await scope.now()).state == "probing"
        await scope.kernel.advance(2.0)
        for expected in (True, False):
            (told,) = await scope.tell("done", slots[2])
            assert told.waiting is expected
        # Slots keep their distance: later by the 12 s of the pause, no herd.
        assert (await scope.now()).state == "open"
        assert waits(await scope.ask(*slots[3:])) == pytest.approx([0.5, 1.5, 2.5])


async def test_a_probe_that_is_refused_blocks_again(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=100.0, burst=5.0) as scope:
        first, probe, other = (scope.slot() for _ in range(3))
        await scope.ask(first)
        await scope.tell("refused", first, retry_after_s=1.0)
        await scope.kernel.advance(1.0)
        assert [a.answer for a in await scope.ask(probe, other)] == ["granted", "held"]
        await scope.tell("refused", probe, retry_after_s=20.0)
        await scope.tell("failed", probe)
        assert waits(await scope.ask(other)) == pytest.approx([20.0])
        await scope.kernel.advance(20.0)
        assert waits(await scope.ask(other)) == [0.0]


@pytest.mark.parametrize("end", ["failed", "unused", "dies", "hangs"])
async def test_a_probe_without_a_verdict_passes_its_turn_on(dsn: str, schema: str, end: str) -> None:
    async with open_scope(dsn, schema, per_s=100.0, burst=5.0) as scope:
        prober, keeper = await scope.kernel.started(), await scope.kernel.started()
        first, probe = scope.slot(item=keeper), scope.slot(item=prober)
        other, third = scope.slot(item=keeper), scope.slot(item=keeper)
        await scope.ask(first)
        await scope.tell("refused", first, retry_after_s=1.0)
        await scope.kernel.advance(1.0)
        assert [a.answer for a in await scope.ask(probe, other, third)] == ["granted", "held", "held"]
        if end == "dies":
            await scope.kernel.settle(prober, "released")
        elif end == "hangs":
            await scope.kernel.advance(PROBE_S - 1.0)
            assert [a.answer for a in await scope.ask(other)] == ["held"]
            await scope.kernel.advance(1.0)
        else:
            await scope.tell(end, probe)
        assert [a.answer for a in await scope.ask(other, third)] == ["granted", "held"]
        await scope.tell("done", probe)  # late: it is no longer the probe
        assert (await scope.now()).state == "probing"
        await scope.tell("done", other)
        assert (await scope.now()).state == "open"
        assert waits(await scope.ask(third)) == [0.0]


async def test_the_measured_rate_is_that_of_the_last_minute(dsn: str, schema: str) -> None:
    """A-20: a count and a clock as baseline."""
    async with open_scope(dsn, schema, per_s=10.0, burst=100.0) as scope:
        await scope.ask(*(scope.slot() for _ in range(50)))
        await scope.kernel.advance(50.0)
        assert (await scope.now()).measured_per_s == pytest.approx(1.0)
        await scope.kernel.advance(11.0)
        await scope.ask(scope.slot(7.0))
        await scope.kernel.advance(10.0)
        now = await scope.now()
        assert now.measured_per_s == pytest.approx(0.7)
        assert now.used == 57.0


async def test_a_locked_scope_is_busy_and_holds_up_no_other(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=1.0) as scope, open_caller(dsn, schema) as caller:
        other = attrs.evolve(scope, name="other")
        await other.set(per_s=1.0)
        held, free = scope.slot(), other.slot()
        (granted,) = await scope.ask(done := scope.slot())
        assert granted.answer == "granted"
        await caller.begin()
        await caller.execute(
            scope.kernel.render("SELECT 1 FROM @schema@.rate_scopes WHERE name = 'api' FOR UPDATE")
        )
        assert [a.answer for a in await scope.ask(held, free)] == ["busy", "granted"]
        assert [a.answer for a in await scope.tell("unused", held, free)] == ["busy", "done"]
        # An ordinary end needs nobody.
        assert [a.answer for a in await scope.tell("done", done)] == ["done"]
        await caller.rollback()
        assert [a.answer for a in await scope.ask(held)] == ["wait"]


async def test_a_late_commit_and_the_call_made_again_charge_once(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=1.0) as scope, open_caller(dsn, schema) as caller:
        slots = [scope.slot(), scope.slot()]
        await caller.begin()
        old = attrs.evolve(scope, kernel=caller.doors(scope.kernel))
        first = await old.ask(*slots)
        assert [a.answer for a in await scope.ask(*slots)] == ["busy", "busy"]
        await caller.commit()
        assert await scope.ask(*slots) == first
        assert waits(await scope.ask(scope.slot())) == pytest.approx([2.0])


async def test_scopes_are_declared_changed_and_unknown(dsn: str, schema: str) -> None:
    async with open_scope(dsn, schema, per_s=1.0) as scope:
        assert not await scope.set(per_s=1.0)
        late = scope.slot()
        await scope.ask(scope.slot(), late)
        assert await scope.set(per_s=10.0, burst=2.0)
        # What is reserved keeps its slot.
        assert waits(await scope.ask(late)) == pytest.approx([1.0])
        nowhere = attrs.evolve(scope, name="nowhere")
        assert [a.answer for a in await nowhere.ask(nowhere.slot())] == ["unknown"]
        assert [a.answer for a in await nowhere.tell("done", nowhere.slot())] == ["done"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ('{"per_s": 0}', "options.per_s"),
        ('{"per_s": 1e9}', "options.per_s"),
        ('{"per_s": "5"}', "options.per_s"),
        ('{"per_s": 5, "burst": 0.5}', "options.burst"),
        ('{"max_in_flight": 1.5}', "options.max_in_flight"),
        ('{"max_in_flight": 0}', "options.max_in_flight"),
        ('{"burst": 5}', "options"),
        ('{"rate": 5}', "options.rate"),
        ("[]", "options"),
    ],
)
async def test_bad_scopes_are_refused_by_name(dsn: str, schema: str, options: str, field: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        with pytest.raises(Exception, match="RL001") as caught:
            await kernel.fetchval("SELECT @schema@.set_rate('api', $1)", options)
        assert caught.value.detail == field  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "ü"])
async def test_bad_names_are_refused(dsn: str, schema: str, name: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        with pytest.raises(InputRefused, match="name"):
            await rates.set_rate(kernel.session, name, per_s=1.0, burst=1.0, max_in_flight=None)


async def test_grants_of_two_hosts_never_exceed_the_rate(dsn: str, schema: str) -> None:
    """By the database's own clock, which goes on."""
    per_s, burst = 200.0, 10.0
    granted: list[datetime] = []
    async with open_kernel(dsn, schema) as one, open_kernel(dsn, schema, owner=2) as two:
        scopes = [Scope(one, await one.started(), ahead_s=0.1)]
        scopes.append(attrs.evolve(scopes[0], kernel=two))
        await scopes[0].set(per_s=per_s, burst=burst)
        open_slots: list[list[Slot]] = [[scope.slot() for _ in range(60)] for scope in scopes]
        while any(open_slots):
            for scope, slots in zip(scopes, open_slots, strict=True):
                answers = await scope.ask(*slots)
                for slot, answer in zip(list(slots), answers, strict=True):
                    if answer.started_at is not None:
                        granted.append(answer.started_at)
                        slots.remove(slot)
    granted.sort()
    assert len(granted) == 120
    for first, start in enumerate(granted):
        for last in range(first, len(granted)):
            window_s = (granted[last] - start) / timedelta(seconds=1)
            assert last - first + 1 <= burst + per_s * window_s + 1e-6
