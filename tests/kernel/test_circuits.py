"""Circuits in the kernel (L-1, L-2, L-3)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest

from sql import circuits
from sql.calls import new_token
from sql.circuits import Call, Circuit, Report
from sql.claim import Claimed
from sql.errors import InputRefused
from tests.support.callers import open_caller
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

PROBE_S = 30.0


@attrs.define
class Crm:
    """A dependency and an attempt that calls it."""

    kernel: Kernel
    item: Claimed
    name: str = "crm"

    def call(self, item: Claimed | None = None) -> Call:
        item = item or self.item
        return Call(self.name, new_token(), item.run_id, item.attempt)

    async def enter(self, *calls: Call) -> list[str]:
        answers = await circuits.enter(self.kernel.session, calls, probe_s=PROBE_S)
        return [answer.answer for answer in answers]

    async def tell(self, result: str, *calls: Call) -> list[str]:
        reports = [Report(call.name, call.token, result, "no answer") for call in calls]
        answers = await circuits.report(self.kernel.session, reports)
        assert {answer.answer for answer in answers} == {"done"}
        return [answer.state for answer in answers]

    async def fail(self, times: int) -> list[str]:
        return await self.tell("failed", *(self.call() for _ in range(times)))

    async def now(self) -> Circuit:
        (found,) = await circuits.read(self.kernel.session)
        return found


@asynccontextmanager
async def open_crm(dsn: str, schema: str, **fields: Any) -> AsyncIterator[Crm]:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        crm = Crm(kernel, await kernel.started())
        if fields:
            await circuits.set_circuit(kernel.session, crm.name, **fields)
        yield crm


async def test_a_healthy_dependency_leaves_no_row(dsn: str, schema: str) -> None:
    async with open_crm(dsn, schema) as crm:
        assert await crm.enter(crm.call(), crm.call()) == ["closed", "closed"]
        assert await crm.tell("ok", crm.call()) == ["closed"]
        assert await crm.tell("none", crm.call()) == ["closed"]
        assert await circuits.read(crm.kernel.session) == []


async def test_failures_in_a_row_open_it_and_a_success_starts_the_count_anew(dsn: str, schema: str) -> None:
    async with open_crm(dsn, schema) as crm:
        assert await crm.fail(4) == ["closed"] * 4
        assert (await crm.now()).failures == 4
        await crm.tell("ok", crm.call())
        assert (await crm.now()).failures == 0
        await crm.fail(4)
        assert await crm.enter(crm.call()) == ["closed"]
        assert await crm.fail(1) == ["open"]
        now = await crm.now()
        assert (now.state, now.retry_after_s, now.error, now.openings) == ("open", 10.0, "no answer", 1)
        (answer,) = await circuits.enter(crm.kernel.session, [crm.call()], probe_s=PROBE_S)
        assert (answer.answer, answer.retry_after_s) == ("open", 10.0)


async def test_a_report_made_again_counts_once(dsn: str, schema: str) -> None:
    async with open_crm(dsn, schema) as crm, open_caller(dsn, schema) as caller:
        calls = [crm.call() for _ in range(4)]
        for _ in range(3):
            await crm.tell("failed", *calls)
        assert (await crm.now()).failures == 4
        # The old backend finishes late.
        last = crm.call()
        await caller.begin()
        old = attrs.evolve(crm, kernel=caller.doors(crm.kernel))
        assert await old.tell("failed", last) == ["open"]
        reports = [Report("crm", last.token, "failed", "no answer")]
        (busy,) = await circuits.report(crm.kernel.session, reports)
        assert busy.answer == "busy"
        await caller.commit()
        assert await crm.tell("failed", last) == ["open"]
        assert (await crm.now()).openings == 1


async def test_one_probe_decides(dsn: str, schema: str) -> None:
    async with open_crm(dsn, schema, failures=2) as crm:
        await crm.fail(2)
        late = crm.call()
        await crm.kernel.advance(10.0)
        probe, other = crm.call(), crm.call()
        for _ in range(2):
            assert await crm.enter(probe, other) == ["probe", "open"]
        assert (await crm.now()).state == "half_open"
        # Only the probe is listened to.
        assert await crm.tell("ok", other, late) == ["half_open"] * 2
        assert await crm.tell("failed", other) == ["half_open"]
        for _ in range(2):
            assert await crm.tell("ok", probe) == ["closed"]
        assert await crm.enter(other) == ["closed"]
        assert (await crm.now()).openings == 0


async def test_each_failed_probe_doubles_the_time_up_to_a_limit(dsn: str, schema: str) -> None:
    async with open_crm(dsn, schema, failures=1, open_s=10.0, open_max_s=35.0) as crm:
        await crm.fail(1)
        lengths = []
        for _ in range(4):
            open_s = (await crm.now()).retry_after_s
            assert open_s is not None
            lengths.append(open_s)
            await crm.kernel.advance(open_s - 0.001)
            assert await crm.enter(crm.call()) == ["open"]
            await crm.kernel.advance(0.001)
            assert await crm.enter(probe := crm.call()) == ["probe"]
            for _again in range(2):
                assert await crm.tell("failed", probe) == ["open"]
        assert lengths == [10.0, 20.0, 35.0, 35.0]


@pytest.mark.parametrize("end", ["none", "dies", "hangs"])
async def test_a_probe_without_a_verdict_passes_its_turn_on(dsn: str, schema: str, end: str) -> None:
    async with open_crm(dsn, schema, failures=1) as crm:
        prober = await crm.kernel.started()
        await crm.fail(1)
        await crm.kernel.advance(10.0)
        probe, other = crm.call(prober), crm.call()
        assert await crm.enter(probe, other) == ["probe", "open"]
        if end == "none":
            await crm.tell("none", probe)
        elif end == "dies":
            await crm.kernel.settle(prober, "released")
        else:
            await crm.kernel.advance(PROBE_S)
        assert await crm.enter(other) == ["probe"]
        assert await crm.tell("ok", probe) == ["half_open"]
        assert await crm.tell("ok", other) == ["closed"]


async def test_a_locked_circuit_is_busy_and_holds_up_no_other(dsn: str, schema: str) -> None:
    async with open_crm(dsn, schema, failures=1) as crm, open_caller(dsn, schema) as caller:
        other = attrs.evolve(crm, name="erp")
        await crm.fail(1)
        await caller.begin()
        await caller.execute(crm.kernel.render("SELECT 1 FROM @schema@.circuits FOR UPDATE"))
        assert await crm.enter(crm.call(), other.call()) == ["busy", "closed"]
        reports = [Report("crm", 1, "failed", None), Report("erp", 2, "failed", None)]
        answers = await circuits.report(crm.kernel.session, reports)
        assert [answer.answer for answer in answers] == ["busy", "done"]
        await caller.rollback()
        assert await crm.enter(crm.call()) == ["open"]


async def test_a_circuit_can_be_closed_by_hand(dsn: str, schema: str) -> None:
    async with open_crm(dsn, schema, failures=1, open_s=99.0) as crm:
        await crm.fail(1)
        session = crm.kernel.session
        assert await circuits.set_circuit(session, "crm", close=True)
        assert not await circuits.set_circuit(session, "crm", close=True)
        assert await crm.enter(crm.call()) == ["closed"]
        now = await crm.now()
        assert (now.threshold, now.open_s, now.open_max_s) == (1, 99.0, 300.0)
        assert await circuits.set_circuit(session, "crm", failures=3)
        assert (await crm.now()).open_s == 99.0


async def test_they_are_counted_for_metrics_and_listed_with_the_open_ones_first(
    dsn: str, schema: str
) -> None:
    async with open_crm(dsn, schema, failures=1) as crm:
        await attrs.evolve(crm, name="erp").fail(1)
        await crm.fail(1)
        await crm.kernel.advance(10.0)
        await attrs.evolve(crm, name="aaa").tell("failed", Call("aaa", 1, "run", 1))
        await crm.enter(crm.call())
        assert await circuits.count(crm.kernel.session) == circuits.Shared(0, 1, 0)
        found = [(one.name, one.state) for one in await circuits.read(crm.kernel.session)]
        assert found == [("crm", "half_open"), ("aaa", "closed"), ("erp", "closed")]
        indexes = await crm.kernel.fetchval(
            "SELECT indexdef FROM pg_indexes WHERE schemaname = $1 AND indexname = 'circuits_state_idx'",
            schema,
        )
        assert "(state, updated_at)" in indexes


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"failures": 0}, "failures"),
        ({"failures": 101}, "failures"),
        ({"open_s": 0.01}, "open_s"),
        ({"open_s": 20.0, "open_max_s": 10.0}, "open_max_s"),
        ({"open_max_s": 86_401.0}, "open_max_s"),
    ],
)
async def test_bad_settings_are_refused_by_name(
    dsn: str, schema: str, fields: dict[str, Any], field: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        with pytest.raises(InputRefused) as caught:
            await circuits.set_circuit(kernel.session, "crm", **fields)
        assert caught.value.field == field
        with pytest.raises(InputRefused, match="name"):
            await circuits.set_circuit(kernel.session, "a b")
