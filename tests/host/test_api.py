"""The verbs of the public API against a running host, and what is refused at its door."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from actors.core import Life
from runtime import (
    ConfigError,
    Context,
    DatabaseError,
    HostFailed,
    HostStopping,
    IdempotencyConflict,
    InputRefused,
    InvalidPlay,
    Lane,
    OutcomeUnknown,
    PayloadRefused,
    ResultTimeout,
    RunCancelled,
    RunFailed,
    RunlaneError,
    RunNotFound,
    Runtime,
    RuntimeConfig,
    Submit,
    UnknownPlay,
    play,
)
from sql.errors import DatabaseUnreachable, HostTooOld, InvalidDsn, MissingRights
from tests.support import servers
from tests.support.hosts import Hosts, eventually, until


@play("echo")
async def echo(_: Context, data: Any) -> Any:
    return data


@play("boom")
async def boom(_: Context, data: Any) -> None:
    raise ValueError(data)


@play("forever")
async def forever(_: Context) -> None:
    await trio.sleep_forever()


@attrs.frozen
class Order:
    item: str
    count: int


@play("typed")
async def typed(_: Context, order: Order) -> Order:
    assert isinstance(order, Order)
    return Order(order.item, order.count + 1)


# --- submit and result -----------------------------------------------------------------------------------


@pytest.mark.modes
async def test_a_run_goes_from_submit_to_its_output_and_every_fact_reaches_the_ledger(hosts: Hosts) -> None:
    """E-3, E-20, E-42, E-43."""
    async with hosts.open(echo) as rt:
        handle = await rt.submit(echo, {"path": "/x", "n": [1, 2.5, None, True, "ä"]})
        assert handle.created is True
        assert await handle.result(timeout=10) == {"path": "/x", "n": [1, 2.5, None, True, "ä"]}
        facts = await rt.facts(handle.run_id)
        assert [fact.type for fact in facts] == ["run.created", "run.started", "run.completed"]
        assert [fact.seq for fact in facts] == [1, 2, 3]
        assert all(fact.lane is Lane.LIFECYCLE for fact in facts)
        assert facts[0].payload["input"] == {"path": "/x", "n": [1, 2.5, None, True, "ä"]}
        status = await handle.status()
        assert (status.status, status.attempt, status.failures, status.terminal) == ("completed", 1, 0, True)
        assert status.finished_at is not None
        (attempt,) = await rt.attempts(handle.run_id)
        assert (attempt.attempt, attempt.outcome, attempt.error) == (1, "completed", None)
        await hosts.check([handle.run_id])


async def test_a_play_is_submitted_by_name_and_its_input_is_structured(hosts: Hosts) -> None:
    async with hosts.open(echo, typed) as rt:
        by_name = await rt.submit("echo", [1])
        by_type = await rt.submit(typed, Order("apple", 1))
        by_json = await rt.submit("typed", {"item": "pear", "count": 2})
        assert await by_name.result(timeout=10) == [1]
        assert await by_type.result(timeout=10) == Order("apple", 2)
        assert await by_json.result(timeout=10) == Order("pear", 3)


async def test_an_input_that_does_not_fit_the_plays_type_is_refused_where_the_play_is_known(
    hosts: Hosts,
) -> None:
    async with hosts.open(typed) as rt:
        for known in (typed, "typed"):
            with pytest.raises(PayloadRefused, match="count"):
                await rt.submit(known, {"item": "pear"})
        assert await rt.runs() == []


async def test_an_input_that_does_not_fit_the_plays_type_fails_its_run_elsewhere(hosts: Hosts) -> None:
    async with hosts.open(typed), hosts.open() as client:
        handle = await client.submit("typed", {"item": "pear"})
        with pytest.raises(RunFailed, match="count"):
            await handle.result(timeout=10)


async def test_a_failed_run_says_what_failed_and_where(hosts: Hosts) -> None:
    """E-3, E-8, E-43, E-47."""
    async with hosts.open(boom) as rt:
        handle = await rt.submit(boom, "no such file")
        with pytest.raises(RunFailed) as caught:
            await handle.result(timeout=10)
        assert caught.value.run_id == handle.run_id
        assert (caught.value.error_type, caught.value.message) == ("ValueError", "no such file")
        assert caught.value.failures == 1
        assert "raise ValueError(data)" in (caught.value.traceback_text or "")
        # The same from the database as from the host that ran it.
        with pytest.raises(RunFailed) as again:
            await rt.handle(handle.run_id).result(timeout=10)
        assert vars(again.value) == vars(caught.value)
        (attempt,) = await rt.attempts(handle.run_id)
        assert (attempt.outcome, attempt.error["message"]) == ("failed", "no such file")


@pytest.mark.modes
async def test_results_are_told_to_any_host_and_to_a_client_without_plays(hosts: Hosts) -> None:
    """E-4, O-1."""
    async with hosts.open(echo, forever) as rt, hosts.open() as client:
        assert client.plays == {}
        handle = await client.submit("echo", "over there")
        assert await handle.result(timeout=10) == "over there"
        theirs = await rt.submit(forever)
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(RunCancelled):
                    await client.handle(theirs.run_id).result(timeout=10)

            nursery.start_soon(wait)
            await until(client, theirs.run_id, "running")
            assert (await client.cancel(theirs.run_id)).won
        # Nobody here runs plays: what is submitted waits for a host that does.
        assert client.readiness()["ready"] is True


async def test_the_outcomes_of_run_id_and_idempotency_key(hosts: Hosts) -> None:
    async with hosts.open(echo, forever) as rt:
        first = await rt.submit(echo, 1, run_id="order-1")
        assert (first.run_id, first.created) == ("order-1", True)
        again = await rt.submit(echo, 1, run_id="order-1")
        assert (again.run_id, again.created) == ("order-1", False)
        with pytest.raises(IdempotencyConflict, match="order-1") as caught:
            await rt.submit(echo, 2, run_id="order-1")
        assert caught.value.run_id == "order-1"
        with pytest.raises(IdempotencyConflict):
            await rt.submit(forever, 1, run_id="order-1")

        keyed = await rt.submit(echo, 1, idempotency_key="k")
        assert keyed.created is True
        same = await rt.submit(echo, 1, idempotency_key="k")
        assert (same.run_id, same.created) == (keyed.run_id, False)
        with pytest.raises(IdempotencyConflict, match="'k'") as caught:
            await rt.submit(echo, 2, idempotency_key="k")
        assert caught.value.run_id == keyed.run_id
        # The key is per play and organisation.
        assert (await rt.submit(forever, idempotency_key="k")).created is True
        assert (await rt.submit(echo, 1, idempotency_key="k", org_id="acme")).created is True

        both = await rt.submit(echo, 1, run_id="order-2", idempotency_key="k2")
        assert both.created is True
        assert (await rt.submit(echo, 1, run_id="order-2", idempotency_key="k2")).created is False
        with pytest.raises(IdempotencyConflict, match="do not name the same run"):
            await rt.submit(echo, 1, run_id="order-1", idempotency_key="k2")
        with pytest.raises(IdempotencyConflict, match="do not name the same run"):
            await rt.submit(echo, 1, run_id="order-3", idempotency_key="k2")
        with pytest.raises(RunNotFound):
            await rt.status("order-3")


async def test_many_submits_of_one_key_at_once_make_one_run(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt, hosts.open(echo) as other:
        handles: list[Any] = []

        async def submit(host: Runtime) -> None:
            handles.append(await host.submit(echo, 1, idempotency_key="one"))

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(submit, (rt, other)[number % 2])
        assert len({handle.run_id for handle in handles}) == 1
        assert sum(handle.created for handle in handles) == 1
        await hosts.check([handles[0].run_id])


async def test_delay_and_at_say_when_a_run_is_due(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        soon = await rt.submit(echo, 1, delay=0.4)
        later = await rt.submit(echo, 1, delay=3600)
        at = await rt.submit(echo, 1, at=datetime.now(UTC) + timedelta(hours=2))
        past = await rt.submit(echo, "past", at=datetime.now(UTC) - timedelta(hours=2))
        assert await past.result(timeout=10) == "past"
        await soon.result(timeout=10)
        status = await soon.status()
        assert status.started_at is not None
        waited_s = (status.started_at - status.created_at).total_seconds()
        assert 0.4 <= waited_s < 0.4 + 1.0
        for handle, seconds in ((later, 3600), (at, 7200)):
            status = await handle.status()
            assert (status.status, status.attempt) == ("queued", 0)
            assert status.due_at is not None
            assert abs((status.due_at - status.created_at).total_seconds() - seconds) < 30


async def test_a_higher_priority_goes_first(hosts: Hosts) -> None:
    order: list[int] = []

    @play("ordered")
    async def ordered(_: Context, priority: int) -> None:
        order.append(priority)

    async with hosts.open(forever, ordered, slots=1) as rt:
        blocker = await rt.submit(forever)
        await until(rt, blocker.run_id, "running")
        handles = await rt.submit_many(
            [Submit(ordered, priority, priority=priority) for priority in (-2, 0, 2, 1, -1)]
        )
        await blocker.cancel()
        for handle in handles:
            await handle.result(timeout=10)
        # Every fourth claim takes the oldest, which here is any of those that are left by then; no two in a row do.
        assert order.index(2) <= 1
        falling = [sum(a > b for b in order[n + 1 :]) for n, a in enumerate(order)]
        assert sum(falling) >= 6, order  # of 10 pairs; in order of submission 5 are
        assert [(await rt.status(handle.run_id)).priority for handle in handles] == [-2, 0, 2, 1, -1]


@pytest.mark.modes
async def test_many_are_submitted_in_order(hosts: Hosts) -> None:
    async with hosts.open(echo, slots=200) as rt:
        handles = await rt.submit_many([(echo, number) for number in range(1_500)])
        assert len({handle.run_id for handle in handles}) == 1_500
        with trio.fail_after(60):
            assert [await handle.result() for handle in handles] == list(range(1_500))
        await hosts.check([handle.run_id for handle in handles])
        assert await rt.submit_many([]) == []


async def test_one_bad_item_of_many_leaves_nothing_behind(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        with pytest.raises(PayloadRefused, match="input"):
            await rt.submit_many([(echo, 1), (echo, math.nan), (echo, 3)])
        with pytest.raises(InputRefused, match="items"):
            await rt.submit_many([(echo, 1), "echo"])  # type: ignore[list-item]
        with pytest.raises(UnknownPlay):
            await rt.submit_many([(echo, 1), ("nothing", 2)])
        assert await hosts.value("SELECT count(*) FROM @.runs") == 0
        # What only the database can refuse is refused alone.
        await rt.submit(echo, 1, run_id="taken")
        with pytest.raises(IdempotencyConflict):
            await rt.submit_many([Submit(echo, 1), Submit(echo, 2, run_id="taken"), Submit(echo, 3)])
        assert await hosts.value("SELECT count(*) FROM @.runs") == 3


async def test_the_same_run_id_twice_in_one_call_is_one_run(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        handles = await rt.submit_many(
            [Submit(echo, 1, run_id="x"), Submit(echo, 1, run_id="x"), Submit(echo, 2)]
        )
        assert [handle.created for handle in handles] == [True, False, True]
        assert await handles[1].result(timeout=10) == 1


async def test_result_says_which_way_it_ended(hosts: Hosts) -> None:
    async with hosts.open(echo, forever) as rt:
        with pytest.raises(RunNotFound, match="nobody"):
            await rt.handle("nobody").result(timeout=10)
        handle = await rt.submit(forever)
        with pytest.raises(ResultTimeout, match="goes on"):
            await handle.result(timeout=0.05)
        with pytest.raises(ResultTimeout):
            await handle.result(timeout=0)
        assert (await handle.status()).status == "running"
        assert (await handle.cancel(reason="enough")).won
        with pytest.raises(RunCancelled) as caught:
            await handle.result(timeout=10)
        assert (caught.value.run_id, caught.value.reason) == (handle.run_id, "enough")
        await rt.cancel(handle.run_id)


async def test_a_bad_timeout_is_refused(hosts: Hosts) -> None:
    async with hosts.open(forever) as rt:
        handle = await rt.submit(forever)
        bad: list[Any] = [-1, math.nan, "soon", True]
        for seconds in bad:
            with pytest.raises(InputRefused, match="timeout"):
                await handle.result(timeout=seconds)


async def test_a_result_that_is_cancelled_leaves_the_run_alone(hosts: Hosts) -> None:
    async with hosts.open(forever) as rt:
        handle = await rt.submit(forever)
        with trio.move_on_after(0.1) as scope:
            await handle.result()
        assert scope.cancelled_caught
        assert (await handle.status()).status == "running"


async def test_many_wait_for_one_run(hosts: Hosts) -> None:
    async with hosts.open(forever) as rt, hosts.open() as client:
        handle = await rt.submit(forever)
        heard: list[str | None] = []

        async def wait(host: Runtime) -> None:
            with pytest.raises(RunCancelled) as caught:
                await host.handle(handle.run_id).result(timeout=10)
            heard.append(caught.value.reason)

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(wait, (rt, client)[number % 2])
            await until(rt, handle.run_id, "running")
            await client.cancel(handle.run_id, reason="over", by="me")
        assert heard == ["over"] * 10


# --- reads -----------------------------------------------------------------------------------------------


async def test_runs_are_listed_in_pages_and_found_by_what_they_are(hosts: Hosts) -> None:
    async with hosts.open(echo, boom, forever) as rt:
        many = await rt.submit_many([(echo, number) for number in range(7)])
        labelled = await rt.submit(echo, 1, labels={"team": "blue", "tier": "1"}, org_id="acme")
        failed = await rt.submit(boom, "x")
        open_ = await rt.submit(forever)
        for handle in [*many, labelled]:
            await handle.result(timeout=10)
        with pytest.raises(RunFailed):
            await failed.result(timeout=10)
        await until(rt, open_.run_id, "running")

        ids = [handle.run_id for handle in [*many, labelled, failed, open_]]
        pages: list[str] = []
        after = None
        while page := await rt.runs(limit=3, after=after):
            assert len(page) <= 3
            pages += [run.run_id for run in page]
            after = pages[-1]
        assert pages == sorted(ids, reverse=True)

        async def found(**filters: Any) -> list[str]:
            return [run.run_id for run in await rt.runs(**filters)]

        assert await found(status="failed") == [failed.run_id]
        assert await found(status="running") == [open_.run_id]
        assert await found(status="waiting") == []
        assert await found(play="forever") == [open_.run_id]
        assert await found(org_id="acme") == [labelled.run_id]
        assert await found(labels={"team": "blue"}) == [labelled.run_id]
        assert await found(labels={"team": "red"}) == []
        assert await found(play="echo", status="completed", limit=2) == sorted(ids[:8], reverse=True)[:2]
        status = await labelled.status()
        assert (status.labels, status.org_id) == ({"team": "blue", "tier": "1"}, "acme")


BAD_FILTERS: list[tuple[str, dict[str, Any]]] = [
    ("status", {"status": "done"}),
    ("status", {"status": ["failed"]}),
    ("limit", {"limit": 0}),
    ("limit", {"limit": 1_001}),
    ("limit", {"limit": True}),
    ("run_id", {"after": "no such id"}),
    ("labels", {"labels": {"a": 1}}),
    ("play", {"play": 5}),
    ("play", {"play": "a\x00b"}),
    ("org_id", {"org_id": b"acme"}),
    ("org_id", {"org_id": "\ud800"}),
]


async def test_a_bad_filter_is_refused_by_name_and_reads_go_on(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        for field, filters in BAD_FILTERS:
            with pytest.raises(InputRefused) as caught:
                await rt.runs(**filters)
            assert caught.value.field.startswith(field)
            assert await rt.runs() == []
        assert all(actor["restarts"] == 0 for actor in rt.readiness()["actors"].values())


async def test_unknown_runs_are_not_found(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        for ask in (rt.status, rt.facts, rt.cancel, rt.attempts):
            with pytest.raises(RunNotFound):
                await ask("nobody")
        for bad in ("", "a b", "x" * 129, "nul\x00", "späte", 5, None):
            for ask in (rt.status, rt.facts, rt.cancel, rt.attempts):
                with pytest.raises(InputRefused, match="run_id"):
                    await ask(bad)  # type: ignore[arg-type]
            with pytest.raises(InputRefused, match="run_id"):
                rt.handle(bad)  # type: ignore[arg-type]


# --- cancel ----------------------------------------------------------------------------------------------


@pytest.mark.modes
async def test_a_queued_run_is_cancelled_and_never_starts(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        handle = await rt.submit(echo, 1, delay=0.3)
        outcome = await rt.cancel(handle.run_id, reason="changed my mind", by="me")
        assert (outcome.won, outcome.status) == (True, "cancelled")
        again = await rt.cancel(handle.run_id, reason="twice")
        assert (again.won, again.status) == (False, "cancelled")
        with pytest.raises(RunCancelled) as caught:
            await handle.result(timeout=10)
        assert (caught.value.reason, caught.value.by) == ("changed my mind", "me")
        await trio.sleep(0.4)
        assert [fact.type for fact in await rt.facts(handle.run_id)] == ["run.created", "run.cancelled"]
        await hosts.check([handle.run_id])


async def test_cancelling_what_has_ended_says_how_it_ended(hosts: Hosts) -> None:
    async with hosts.open(echo, boom) as rt:
        done, failed = await rt.submit(echo, 1), await rt.submit(boom, 1)
        await done.result(timeout=10)
        with pytest.raises(RunFailed):
            await failed.result(timeout=10)
        for handle, status in ((done, "completed"), (failed, "failed")):
            outcome = await handle.cancel()
            assert (outcome.won, outcome.status) == (False, status)
        assert await done.result(timeout=10) == 1


BAD_REASONS: list[tuple[str, Any]] = [
    ("reason", "nul\x00"),
    ("reason", 5),
    ("by", "x" * 2_001),
    ("by", "\ud800"),
]


async def test_a_bad_reason_is_refused(hosts: Hosts) -> None:
    async with hosts.open(forever) as rt:
        handle = await rt.submit(forever)
        for field, value in BAD_REASONS:
            with pytest.raises(InputRefused) as caught:
                await rt.cancel(handle.run_id, **{field: value})
            assert caught.value.field == field
        assert (await until(rt, handle.run_id, "running")).status == "running"


# --- bad input changes nothing ---------------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


BAD: dict[str, tuple[type[RunlaneError], str, Callable[[], dict[str, Any]]]] = {
    "an unknown play": (UnknownPlay, "nobody", lambda: {"play": "nobody"}),
    "a name that is no name": (UnknownPlay, "play", lambda: {"play": "no\x00play"}),
    "a surrogate name": (InputRefused, "play", lambda: {"play": "\ud800"}),
    "a function that is no play": (InputRefused, "play", lambda: {"play": len}),
    "an object": (PayloadRefused, "input", lambda: {"input": object()}),
    "bytes": (PayloadRefused, "input.a", lambda: {"input": {"a": b"x"}}),
    "a set deep inside": (PayloadRefused, r"input.a\[1\]", lambda: {"input": {"a": [1, {2}]}}),
    "a NUL": (PayloadRefused, r"input.text", lambda: {"input": {"text": "a\x00b"}}),
    "a NUL in a key": (PayloadRefused, "input", lambda: {"input": {"a\x00": 1}}),
    "a lone surrogate": (PayloadRefused, "input", lambda: {"input": "\ud800"}),
    "NaN": (PayloadRefused, "input.x", lambda: {"input": {"x": math.nan}}),
    "Infinity": (PayloadRefused, "input", lambda: {"input": [-math.inf]}),
    "10 MB": (PayloadRefused, "1048576", lambda: {"input": "x" * 10_000_000}),
    "10,000 levels": (PayloadRefused, "64", lambda: {"input": nested(10_000)}),
    "a key that is no text": (PayloadRefused, "input", lambda: {"input": {1: 2}}),
    "a bad run id": (InputRefused, "run_id", lambda: {"run_id": "a b"}),
    "an empty run id": (InputRefused, "run_id", lambda: {"run_id": ""}),
    "a long run id": (InputRefused, "128", lambda: {"run_id": "x" * 129}),
    "an empty key": (InputRefused, "idempotency_key", lambda: {"idempotency_key": ""}),
    "a bad organisation": (InputRefused, "org_id", lambda: {"org_id": "a\x00"}),
    "a priority out of range": (InputRefused, "priority", lambda: {"priority": 3}),
    "a negative delay": (InputRefused, "delay", lambda: {"delay": -1}),
    "an endless delay": (InputRefused, "delay", lambda: {"delay": math.inf}),
    "delay and at": (InputRefused, "at", lambda: {"delay": 1, "at": datetime.now(UTC)}),
    "a moment without zone": (InputRefused, "at", lambda: {"at": datetime(2030, 1, 1)}),
    "labels that are no text": (InputRefused, "labels", lambda: {"labels": {"a": 1}}),
    "too many labels": (InputRefused, "32", lambda: {"labels": {str(n): "x" for n in range(33)}}),
}


async def test_bad_input_is_refused_by_name_and_changes_nothing(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        for name, (error, text, make) in BAD.items():
            asked: dict[str, Any] = {"play": echo, "input": None, **make()}
            with pytest.raises(error, match=text):
                await rt.submit(asked.pop("play"), asked.pop("input"), **asked)
            assert await hosts.value("SELECT count(*) FROM @.runs") == 0, name
        assert all(actor["restarts"] == 0 for actor in rt.readiness()["actors"].values())
        assert await (await rt.submit(echo, 1)).result(timeout=10) == 1


ODD: list[Any] = [
    2**63,
    10**600,
    -0.0,
    1e308,
    5e-324,
    0.1,
    "\u2028 \U0001f600 \x7f",
    {"": {"": []}},
    {"b": 1, "a": 2},
    "x" * 1_000_000,
    nested(62),
]


async def test_odd_but_good_values_come_back_as_they_were(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        for value in ODD:
            handle = await rt.submit(echo, value)
            here = await handle.result(timeout=10)
            assert here == value
            stored = (await rt.facts(handle.run_id))[-1].payload["output"]
            assert stored == value
            assert repr(here) == repr(stored)


# --- outputs and errors that cannot be stored ------------------------------------------------------------


class Hostile:
    """Whatever is asked of it goes wrong."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


OUTPUTS: dict[str, Callable[[], Any]] = {
    "an object": object,
    "a hostile object": Hostile,
    "a NUL": lambda: {"text": "a\x00b"},
    "NaN": lambda: math.nan,
    "a surrogate": lambda: "\ud800",
    "10 MB": lambda: "x" * 10_000_000,
    "100,000 levels": lambda: nested(100_000),
    "a huge number": lambda: 10**5_000,
}


async def test_an_output_that_cannot_be_stored_is_replaced_visibly(hosts: Hosts) -> None:
    """E-18, E-20."""

    @play("strange")
    async def strange(ctx: Context, name: str) -> Any:
        ctx.log(name)
        return OUTPUTS[name]()

    async with hosts.open(strange) as rt:
        for name in OUTPUTS:
            handle = await rt.submit(strange, name)
            output = await handle.result(timeout=10)
            assert output["$replaced"]["reason"], name
            *_, terminal, said = await rt.facts(handle.run_id)
            assert said.payload["message"] == name  # what it said stands, whatever becomes of what it gave
            assert terminal.type == "run.completed"
            assert terminal.payload["replaced"]
            await hosts.check([handle.run_id])
        assert rt.readiness()["actors"]["executors"]["restarts"] == 0


ERRORS: dict[str, Callable[[], BaseException]] = {
    "a NUL and a surrogate": lambda: ValueError("a\x00b\ud800c"),
    "10 MB": lambda: ValueError("x" * 10_000_000),
    "a hostile error": HostileError,
    "a group": lambda: ExceptionGroup(
        "several", [ValueError("one"), ExceptionGroup("more", [KeyError("two")])]
    ),
    "SystemExit": lambda: SystemExit(3),
    "a BaseException of its own": lambda: type("Odd", (BaseException,), {})("odd"),
    "GeneratorExit": GeneratorExit,
    "RecursionError": RecursionError,
}


async def test_whatever_a_play_raises_fails_its_run_and_nobody_elses(hosts: Hosts) -> None:
    @play("async")
    async def strange(_: Context, name: str) -> Any:
        raise ERRORS[name]()

    @play("thread")
    def threaded(_: Context, name: str) -> Any:
        raise ERRORS[name]()

    async with hosts.open(strange, threaded, forever) as rt:
        other = await rt.submit(forever)
        await until(rt, other.run_id, "running")
        for name, make in ERRORS.items():
            for one in (strange, threaded):
                handle = await rt.submit(one, name)
                with pytest.raises(RunFailed) as caught:
                    await handle.result(timeout=10)
                assert caught.value.error_type.endswith(type(make()).__name__), name
                assert "\x00" not in caught.value.message
                assert len(caught.value.message.encode("utf-8", "replace")) <= 10_100
        assert (await rt.status(other.run_id)).attempt == 1
        assert all(actor["restarts"] == 0 for actor in rt.readiness()["actors"].values())


async def test_an_input_in_the_database_that_no_longer_parses_fails_that_run_only(hosts: Hosts) -> None:
    """11.5: one row that a host cannot decode costs nobody else anything."""

    @play("typed")
    async def strict(_: Context, order: Order) -> str:
        return order.item

    async with hosts.open(strict, echo) as rt, hosts.open() as client:
        bad = await client.submit("typed", ["not", "an", "order"])
        good = await rt.submit_many([(echo, number) for number in range(99)])
        with pytest.raises(RunFailed):
            await bad.result(timeout=10)
        for handle in good:
            await handle.result(timeout=10)


# --- opening -------------------------------------------------------------------------------------------


async def refused(error: type[Exception], text: str, config: RuntimeConfig) -> None:
    started = time.monotonic()
    with pytest.raises(error, match=text):
        async with Runtime.open(config, plays=[echo]):
            raise AssertionError("it opened")
    assert time.monotonic() - started < config.connect_timeout_s + 5


async def test_a_server_that_cannot_be_reached_is_named(hosts: Hosts, tmp_path: Path) -> None:
    await refused(
        DatabaseUnreachable, str(tmp_path), hosts.config(dsn=f"postgresql://postgres@/x?host={tmp_path}")
    )
    await refused(DatabaseUnreachable, "127.0.0.1:1", hosts.config(dsn="postgresql://postgres@127.0.0.1:1/x"))


@pytest.mark.parametrize(
    "dsn", ["nonsense", "postgresql://u@h:notaport/x", "postgresql://u@h/x?sslmode=perhaps", "mysql://u@h/x"]
)
async def test_a_dsn_that_is_none_is_named(hosts: Hosts, dsn: str) -> None:
    await refused(InvalidDsn, "DSN", hosts.config(dsn=dsn))


async def test_an_unknown_database_and_role_are_named(hosts: Hosts) -> None:
    await refused(InvalidDsn, "no_such_db", hosts.config(dsn=servers.with_database(hosts.dsn, "no_such_db")))


async def test_a_role_without_rights_is_told_what_to_grant(hosts: Hosts) -> None:
    role = f"role_{hosts.schema}"
    await hosts.ask(f"CREATE ROLE {role} LOGIN")
    try:
        as_role = hosts.dsn.replace("postgres@", f"{role}@", 1)
        assert as_role != hosts.dsn
        await refused(MissingRights, hosts.schema, hosts.config(dsn=as_role))
        assert await hosts.value(f"SELECT count(*) FROM pg_namespace WHERE nspname = '{hosts.schema}'") == 0
    finally:
        await hosts.ask(f"DROP ROLE {role}")


async def test_a_database_for_newer_hosts_is_left_alone(hosts: Hosts) -> None:
    async with hosts.open(echo):
        pass
    await hosts.ask("DELETE FROM @.deployment WHERE key = 'min_host_version'")
    await hosts.ask("INSERT INTO @.deployment VALUES ('min_host_version', '99')")
    before = await hosts.value("SELECT count(*) FROM @.hosts")
    await refused(HostTooOld, "99", hosts.config())
    assert await hosts.value("SELECT count(*) FROM @.hosts") == before


async def test_two_hosts_that_open_an_empty_database_at_once_are_both_fine(hosts: Hosts) -> None:
    outputs: list[Any] = []

    async def host(number: int) -> None:
        async with hosts.open(echo) as rt:
            outputs.append(await (await rt.submit(echo, number)).result(timeout=10))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(host, number)
    assert sorted(outputs) == [0, 1, 2]


async def test_things_that_are_no_plays_are_refused_before_anything_is_opened(hosts: Hosts) -> None:
    async def bare(ctx: Context) -> None: ...

    @play("echo")
    async def other(_: Context) -> None: ...

    for plays, text in (
        ([bare], "bare is not a play"),
        ([echo, other], "registered twice"),
        (["echo"], "not a play"),
    ):
        with pytest.raises(InvalidPlay, match=text):
            async with Runtime.open(hosts.config(), plays=plays):  # type: ignore[arg-type]
                raise AssertionError("it opened")
    assert await hosts.value(f"SELECT count(*) FROM pg_namespace WHERE nspname = '{hosts.schema}'") == 0
    with pytest.raises(InvalidPlay, match=r"\(ctx, a, b\)"):

        @play("two")
        async def two(ctx: Context, a: int, b: int) -> None: ...


async def test_the_settings_come_from_the_environment_when_none_are_given(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNLANE_DSN", hosts.dsn)
    monkeypatch.setenv("RUNLANE_SCHEMA", hosts.schema)
    async with Runtime.open(plays=[echo]) as rt:
        assert rt.config.schema == hosts.schema
        assert await (await rt.submit(echo, 1)).result(timeout=10) == 1
    monkeypatch.setenv("RUNLANE_SCHEME", hosts.schema)
    with pytest.raises(ConfigError, match="RUNLANE_SCHEME"):
        async with Runtime.open(plays=[echo]):
            raise AssertionError("it opened")


# --- the block -------------------------------------------------------------------------------------------


class OfTheBody(Exception):
    pass


async def test_an_error_of_the_body_leaves_unwrapped_and_the_host_stops_first(hosts: Hosts) -> None:
    error = OfTheBody("mine")
    with pytest.raises(OfTheBody) as caught:  # noqa: PT012 - the block is what is tested
        async with hosts.open(forever) as rt:
            handle = await rt.submit(forever)
            await until(rt, handle.run_id, "running")
            raise error
    assert caught.value is error
    assert await hosts.leases() == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_harder_errors_of_the_body_leave_unwrapped_too(
    hosts: Hosts, error: type[BaseException]
) -> None:
    with pytest.raises(error):
        async with hosts.open(echo):
            raise error


async def test_a_group_of_the_body_leaves_as_it_is(hosts: Hosts) -> None:
    group = ExceptionGroup("mine", [ValueError(1), KeyError(2)])
    with pytest.raises(ExceptionGroup) as caught:
        async with hosts.open(echo):
            raise group
    assert caught.value is group


async def test_a_host_that_gives_up_raises_one_host_failed_in_the_body(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ready(life: Life) -> None:
        if life.name == "timers":
            raise LookupError("broken for good")
        original(life)

    original = Life.ready
    seen: list[str] = []
    with pytest.raises(HostFailed, match="timers") as caught:  # noqa: PT012 - the block is what is tested
        async with hosts.open(forever) as rt:
            handle = await rt.submit(forever)
            await until(rt, handle.run_id, "running")
            monkeypatch.setattr(Life, "ready", ready)
            monkeypatch.setattr(Life, "beat", ready)
            rt._host.hints.timers.set()
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                seen.append("cancelled")
                raise
    assert seen == ["cancelled"]
    assert isinstance(caught.value.__cause__, LookupError)
    # It gave up in good order.
    assert await hosts.leases() == 0


async def test_a_schema_that_vanishes_under_a_host_makes_it_give_up(hosts: Hosts) -> None:
    with pytest.raises((HostFailed, DatabaseError)):  # noqa: PT012 - the block is what is tested
        async with hosts.open(echo, backstop_s=0.2) as rt:
            await hosts.ask("DROP SCHEMA @. CASCADE".replace("@.", hosts.schema))
            with trio.fail_after(60):
                while True:
                    await rt.submit(echo, 1)
                    await trio.sleep(0.1)


@pytest.mark.parametrize("verb", ["submit", "cancel", "status"])
async def test_a_verb_ends_within_its_time_also_when_nobody_takes_it(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """One is under way, one waits, and there is no room for the others."""
    release = trio.Event()
    door = {
        "submit": "actors.admission.door.admit",
        "cancel": "actors.control.door.cancel",
        "status": "sql.status.read_runs",
    }[verb]

    async def stuck(*_: Any, **__: Any) -> Any:
        await release.wait()
        raise DatabaseUnreachable("was stuck")

    outcomes: list[float] = []
    monkeypatch.setattr("runtime.host._MOST_WAITING", 1)
    async with hosts.open(echo, operation_timeout_s=1.0, statement_timeout_s=0.9) as rt:
        verbs: dict[str, Callable[[], Any]] = {
            "submit": lambda: rt.submit(echo, 1),
            "cancel": lambda: rt.cancel("r"),
            "status": lambda: rt.status("r"),
        }

        async def call() -> None:
            asked_at = trio.current_time()
            with pytest.raises(OutcomeUnknown):
                await verbs[verb]()
            outcomes.append(trio.current_time() - asked_at)

        with monkeypatch.context() as patched:
            patched.setattr(door, stuck)
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    for _ in range(5):
                        nursery.start_soon(call)
            release.set()
        assert len(outcomes) == 5
        # A submit waits a little longer, for the actor's own answer.
        assert 1.0 <= min(outcomes) <= max(outcomes) < (2.5 if verb == "submit" else 1.8)
        # What it was full of is answered, and there is room again.
        handle = await rt.submit(echo, 2)
        assert await handle.result(timeout=10) == 2
        assert (await rt.cancel(handle.run_id)).status == "completed"
        assert (await rt.status(handle.run_id)).status == "completed"


async def test_verbs_after_the_end_are_refused(hosts: Hosts) -> None:
    async with hosts.open(echo, forever) as rt:
        handle = await rt.submit(forever)
    for ask in (
        lambda: rt.submit(echo, 1),
        lambda: rt.status(handle.run_id),
        lambda: rt.facts(handle.run_id),
        lambda: rt.runs(),
        lambda: rt.cancel(handle.run_id),
        lambda: handle.result(),
        lambda: handle.status(),
    ):
        with trio.fail_after(5), pytest.raises(HostStopping):
            await ask()


async def test_whoever_waits_when_the_host_stops_is_told(hosts: Hosts) -> None:
    told: list[str] = []
    async with trio.open_nursery() as nursery, hosts.open(forever) as rt:
        handle = await rt.submit(forever)

        async def wait() -> None:
            with pytest.raises(HostStopping):
                await handle.result()
            told.append("stopping")

        nursery.start_soon(wait)
        await until(rt, handle.run_id, "running")
    assert told == ["stopping"]


async def test_a_host_opens_and_closes_many_times_and_leaves_no_connection(alone: Hosts) -> None:
    """3.16: start and stop many times, and nothing stays behind."""
    for number in range(5):
        async with alone.open(echo) as rt:
            assert await (await rt.submit(echo, number)).result(timeout=10) == number

    async def none_left() -> bool:
        return not await alone.backends()

    await eventually(none_left)


async def test_an_opened_host_says_what_it_is(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "runlane")
    async with hosts.open(echo, health_port=0) as rt, hosts.open(echo) as other:
        assert rt.host_id != other.host_id
        assert rt.health_port
        assert other.health_port is None
        assert list(rt.plays) == ["echo"]
        assert rt.readiness()["ready"] is True
        assert "event=ready" in caplog.text
    assert rt.readiness()["ready"] is False
    assert rt.readiness()["draining"] is True


async def test_readiness_says_what_the_schema_lacks(hosts: Hosts) -> None:
    async with hosts.open(echo) as rt:
        assert rt.readiness()["schema"] == {"name": hosts.schema, "ready": True, "missing": []}
        await hosts.ask("DROP FUNCTION @.retry_lane")
        (pid,) = await hosts.backends("listener")
        await hosts.ask(f"SELECT pg_terminate_backend({pid})")

        async def noticed() -> bool:
            return not rt.readiness()["ready"] and rt.readiness()["schema"]["missing"] == [
                "function retry_lane"
            ]

        await eventually(noticed)
