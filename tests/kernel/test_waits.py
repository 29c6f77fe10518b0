"""Waits and events in the kernel: who is woken by what, fences, and orders of event, park, deadline and cancel."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import attrs
import pytest

from sql import events, waits
from sql.claim import Claimed
from sql.waits import Wait
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

ANSWER = Wait("answer", "event", "answer")
SOON = Wait("answer", "event", "answer", delay_s=10.0)
DOOR = """SELECT @schema@.send_event($1, '"hello"', '{"name": "answer"}')"""


async def only(kernel: Kernel) -> Claimed:
    (item,) = await kernel.claim()
    return item


async def got(kernel: Kernel, key: str = "answer") -> Any:
    """What the run's next attempt hears of a wait: its payload, or whether it is over."""
    state = (await only(kernel)).waits[key]
    return json.loads(state.payload) if state.payload is not None else state.done


# --- orders ------------------------------------------------------------------------------------------------


async def test_an_event_before_the_park_makes_the_run_due_at_once(dsn: str, schema: str) -> None:
    """D-22."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        assert await kernel.send(item.run_id, "answer", "hello") == "kept"
        assert await kernel.sweep_wakes() == (0, False)  # nobody waits yet: the park will look itself
        await kernel.park_on(item, ANSWER)
        assert await got(kernel) == "hello"
        await check_invariants(kernel.session)


async def test_an_event_after_the_park_wakes_the_run_through_a_sweep(dsn: str, schema: str) -> None:
    """D-14, D-22."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.park_on(item, ANSWER)
        assert await kernel.claim() == []
        assert await kernel.send(item.run_id, "answer", "hello") == "delivered"
        assert await kernel.sweep_wakes() == (1, False)
        assert await kernel.sweep_wakes() == (0, False)
        assert await got(kernel) == "hello"
        assert await kernel.fact_types(item.run_id) == [
            "run.created", "run.started", "run.waiting", "run.resumed", "run.started",
        ]  # fmt: skip
        await check_invariants(kernel.session)


async def test_an_event_whose_sender_commits_after_the_park_is_not_lost(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        await caller.begin()
        assert await caller.fetchval(kernel.render(DOOR), item.run_id) == "kept"
        await kernel.park_on(item, ANSWER)  # nobody waits for the sender, and nothing is seen of it
        assert await kernel.sweep_wakes() == (0, False)
        assert await kernel.claim() == []
        await caller.commit()
        assert await kernel.sweep_wakes() == (1, False)
        assert await got(kernel) == "hello"


async def test_a_sweep_that_finds_the_run_locked_leaves_its_wake_and_hides_nobody(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as parking:
        first, second = await kernel.started(), await kernel.started()
        await kernel.park_on(second, ANSWER)
        await parking.begin()
        # Still open: it has not seen the event that comes now.
        await parking.doors(kernel).park_on(first, ANSWER)
        assert await kernel.send(first.run_id, "answer", 1) == "kept"
        assert await kernel.send(second.run_id, "answer", 2) == "delivered"
        assert await kernel.sweep_wakes(1) == (1, True)
        assert (await only(kernel)).run_id == second.run_id
        await parking.commit()
        assert await kernel.sweep_wakes(1) == (1, True)  # a full batch: there may be more
        assert (await only(kernel)).run_id == first.run_id


async def test_a_deadline_passes_the_wait_as_timed_out_for_good(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        await kernel.park_on(item, SOON)
        await kernel.advance(9.0)
        assert await kernel.claim() == []
        await kernel.advance(1.0)
        again = await only(kernel)
        assert (again.waits["answer"].done, again.waits["answer"].payload) == (True, None)
        assert await kernel.send(item.run_id, "answer", "too late") == "kept"
        await kernel.park_on(again, SOON)
        assert (await only(kernel)).waits["answer"].payload is None
        await check_invariants(kernel.session)


async def test_what_came_before_the_deadline_was_judged_goes_before_it(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        await kernel.park_on(item, SOON)
        await kernel.advance(10.0)
        assert await kernel.send(item.run_id, "answer", "just in time") == "delivered"
        assert await got(kernel) == "just in time"  # no sweep has seen it yet
        assert await kernel.sweep_wakes() == (0, False)


async def test_a_cancelled_run_takes_no_event_and_leaves_no_wake(dsn: str, schema: str) -> None:
    """O-1."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.park_on(item, ANSWER)
        assert await kernel.send(item.run_id, "answer", 1) == "delivered"
        assert await kernel.cancel(item.run_id) == "cancelled"
        assert await kernel.sweep_wakes() == (0, False)
        assert await kernel.claim() == []
        assert await kernel.send(item.run_id, "answer", 2) == "ended"
        assert [event.wait_key for event in await events.read(kernel.session, item.run_id)] == [None]
        await check_invariants(kernel.session)


async def test_a_marked_run_is_not_woken_into_an_attempt(dsn: str, schema: str) -> None:
    """O-4."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.park_on(item, ANSWER)
        await kernel.fetchval("SELECT @schema@.cancel_run($1)", item.run_id)
        await kernel.send(item.run_id, "answer", 1)
        assert await kernel.sweep_wakes() == (1, False)
        assert await kernel.claim() == []


# --- which wait takes which event --------------------------------------------------------------------------


async def test_events_of_a_name_go_to_its_waits_one_each_in_order(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        for number in range(3):
            await kernel.send(item.run_id, "answer", number)
        await kernel.send(item.run_id, "other", "x")
        tried = await kernel.try_waits(item, Wait("b", "event", "answer"))
        assert tried.states["b"].payload == "0"
        tried = await kernel.try_waits(item, Wait("a", "event", "answer"), Wait("b", "event", "answer"))
        assert {key: state.payload for key, state in tried.states.items()} == {"a": "1", "b": "0"}
        found = await events.read(kernel.session, item.run_id)
        assert [(event.name, event.wait_key) for event in found] == [
            ("answer", "b"), ("answer", "a"), ("answer", None), ("other", None),
        ]  # fmt: skip
        await check_invariants(kernel.session)


async def test_a_wait_that_the_play_has_abandoned_takes_nothing(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.park_on(item, Wait("a", "event", "a"), Wait("b", "event", "b"))
        await kernel.send(item.run_id, "a", 1)
        await kernel.sweep_wakes()
        again = await only(kernel)
        await kernel.park_on(again, Wait("c", "event", "c"))
        assert await kernel.send(item.run_id, "b", 2) == "kept"
        assert await kernel.sweep_wakes() == (0, False)
        assert await kernel.claim() == []
        await kernel.send(item.run_id, "c", 3)
        await kernel.sweep_wakes()
        last = await only(kernel)
        assert {key: state.payload for key, state in last.waits.items()} == {"a": "1", "b": None, "c": "3"}
        tried = await kernel.try_waits(last, Wait("late", "event", "b"))
        assert tried.states["late"].payload == "2"


async def test_an_approval_takes_only_what_says_yes_or_no(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        assert (
            await kernel.send(item.run_id, "deploy", {"approve": True}, event_id="early", request=7) == "kept"
        )
        await kernel.park_on(item, Wait("answer", "approval", "deploy"))
        for payload in ({"approved": "yes"}, {"by": "ada"}, True, None):
            assert await kernel.send(item.run_id, "deploy", payload) == "undecided"
        # What was sent before is asked again after a lost answer, or sent again: it is there, and not delivered.
        assert (
            await kernel.send(item.run_id, "deploy", {"approve": True}, event_id="early", request=7) == "kept"
        )
        assert await kernel.send(item.run_id, "deploy", {"approve": True}, event_id="early") == "duplicate"
        assert await kernel.sweep_wakes() == (0, False)
        assert await kernel.send(item.run_id, "deploy", {"approved": False, "by": "ada"}) == "delivered"
        assert await kernel.sweep_wakes() == (1, False)
        assert await got(kernel) == {"approved": False, "by": "ada"}
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.events") == 2


async def test_an_event_of_any_shape_is_taken_where_an_approval_of_its_name_is_not_alone(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.park_on(item, Wait("yes", "approval", "deploy"), Wait("any", "event", "deploy"))
        assert await kernel.send(item.run_id, "deploy", "hello") == "delivered"
        assert await kernel.sweep_wakes() == (1, False)
        assert await got(kernel, "any") == "hello"


async def test_a_run_goes_on_with_the_first_of_several(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        nap = Wait("nap", "sleep", delay_s=5.0)
        await kernel.park_on(item, ANSWER, nap)
        row = (await kernel.fetch("SELECT wait_kind, wait_key, wait_until FROM @schema@.runs"))[0]
        assert (row["wait_kind"], row["wait_key"]) == ("sleep", "nap")
        await kernel.advance(5.0)
        again = await only(kernel)
        assert (again.waits["nap"].done, again.waits["answer"].done) == (True, False)
        await kernel.park_on(again, ANSWER)
        row = (
            await kernel.fetch(
                "SELECT wait_kind, wait_until, due_at = 'infinity' AS never FROM @schema@.runs"
            )
        )[0]
        assert tuple(row) == ("event", None, True)
        payloads = await kernel.fetch(
            "SELECT payload FROM @schema@.facts WHERE type = 'run.waiting' ORDER BY seq"
        )
        first, second = (json.loads(row["payload"]) for row in payloads)
        assert first == {"kind": "sleep", "key": "nap", "wait_until": 1893456005000}
        assert second == {"kind": "event", "key": "answer", "name": "answer"}  # D-15, D-16, D-18
        await check_invariants(kernel.session)


# --- fences ------------------------------------------------------------------------------------------------


async def test_a_stale_attempt_neither_parks_nor_takes(dsn: str, schema: str) -> None:
    """D-14."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.settle(item, "released")
        again = await only(kernel)
        await kernel.send(item.run_id, "answer", 1)
        for stale in (item, attrs.evolve(again, token=1), attrs.evolve(again, attempt=7)):
            assert (await kernel.try_waits(stale, ANSWER)).answer == "lost"
            assert (await kernel.park_on(stale, ANSWER)).answer == "lost"
        assert (await kernel.try_waits(again, ANSWER)).states["answer"].payload == "1"


async def test_a_locked_run_is_busy_and_holds_up_nobody(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        held, free = await kernel.started(), await kernel.started()
        await caller.begin()
        await caller.execute(
            kernel.render("SELECT 1 FROM @schema@.runs WHERE run_id = $1 FOR UPDATE"), held.run_id
        )
        trials = [waits.Trial(item.run_id, item.attempt, item.token, [ANSWER]) for item in (held, free)]
        answers = await waits.try_waits(kernel.session, trials)
        assert [answer.answer for answer in answers] == ["busy", "done"]
        assert await kernel.send(held.run_id) == "kept"
        await caller.rollback()
        answers = await waits.try_waits(kernel.session, trials)
        assert [answer.answer for answer in answers] == ["done", "done"]


async def test_payloads_beyond_the_bound_are_read_on_demand(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        text = "".join(chr(33 + (n * n) % 90) + str(n) for n in range(20_000))
        for number in range(3):
            await kernel.send(item.run_id, "answer", [number, text])
        keys = ["a", "b", "c"]
        await kernel.park_on(item, *(Wait(key, "event", "answer") for key in keys))
        again = await only(kernel)
        inline = [again.waits[key].payload is not None for key in keys]
        assert inline == sorted(inline, reverse=True)
        assert not all(inline)
        for number, key in enumerate(keys):
            state = again.waits[key]
            assert state.stored == (state.payload is None)
            payload = await waits.read_payload(kernel.session, item.run_id, key)
            assert json.loads(payload or "") == [number, text]


# --- the senders' door -------------------------------------------------------------------------------------


async def test_an_event_id_counts_once_and_names_one_event(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        assert await kernel.send(item.run_id, "answer", 1, event_id="i", request=5) == "kept"
        assert await kernel.send(item.run_id, "answer", 1, event_id="i", request=5) == "kept"  # a lost answer
        assert await kernel.send(item.run_id, "answer", 1, event_id="i") == "duplicate"
        assert await kernel.send(item.run_id, "answer", 2, event_id="i") == "conflict"
        assert await kernel.send(item.run_id, "other", 1, event_id="i") == "conflict"
        assert await kernel.send("nobody") == "missing"
        await kernel.complete(item)
        assert await kernel.send(item.run_id, "answer", 1, event_id="i") == "duplicate"
        assert await kernel.send(item.run_id, "answer", 1) == "ended"
        assert len(await events.read(kernel.session, item.run_id)) == 1


async def test_an_event_id_in_an_open_transaction_makes_only_itself_busy(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        await caller.begin()
        await caller.doors(kernel).send(item.run_id, event_id="i", request=1)
        assert await kernel.send(item.run_id, event_id="i", request=2) == "busy"
        assert await kernel.send(item.run_id, event_id="j") == "kept"
        await caller.commit()
        assert await kernel.send(item.run_id, event_id="i", request=2) == "duplicate"


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read", "serializable"])
async def test_the_door_works_in_any_transaction_and_rolled_back_means_never_sent(
    dsn: str, schema: str, isolation: str
) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        await kernel.park_on(item, ANSWER)
        await caller.begin(isolation)
        assert await caller.fetchval(kernel.render(DOOR), item.run_id) == "delivered"
        assert (await kernel.renew(item)).answer == "lost"  # parked: and nobody had to wait for the sender
        await caller.rollback()
        assert await kernel.sweep_wakes() == (0, False)
        await caller.begin(isolation)
        await caller.fetchval(kernel.render(DOOR), item.run_id)
        await caller.commit()
        assert await kernel.sweep_wakes() == (1, False)
        assert await got(kernel) == "hello"


@pytest.mark.parametrize(
    ("payload", "options", "named"),
    [
        ("1", "{}", "options.name: is required"),
        ("1", '{"name": ""}', "options.name: must be a string of 1 to 255"),
        ("1", '{"name": 5}', "options.name: must be a string of 1 to 255"),
        ("1", json.dumps({"name": "x" * 256}), "options.name: must be a string of 1 to 255"),
        ("1", '{"name": "e", "event_id": ""}', "options.event_id: must be a string of 1 to 255"),
        ("1", '{"name": "e", "evnt_id": "x"}', "options.evnt_id: unknown option"),
        ("1", '{"name": "e", "notify": 1}', "options.notify: must be true or false"),
        ("1", "[]", "options: must be an object"),
        (None, '{"name": "e"}', "payload: must be JSON"),
        (json.dumps("x" * 1_100_000), '{"name": "e"}', "payload: 1100002 bytes are more than"),
    ],
)
async def test_the_door_refuses_bad_input_by_name(
    dsn: str, schema: str, payload: str | None, options: str, named: str
) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        run_id = await kernel.submit()
        with pytest.raises(asyncpg.PostgresError) as caught:
            await caller.fetchval(
                kernel.render("SELECT @schema@.send_event($1, $2, $3)"), run_id, payload, options
            )
        assert caught.value.sqlstate == "RL001"
        assert named in str(caught.value)


async def test_the_door_answers_as_hosts_do(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        text = kernel.render("""SELECT @schema@.send_event($1, $2, '{"name": "e", "event_id": "i"}')""")
        assert await caller.fetchval(text, item.run_id, "1") == "kept"
        assert await caller.fetchval(text, item.run_id, "1") == "duplicate"
        with pytest.raises(asyncpg.PostgresError) as caught:
            await caller.fetchval(text, item.run_id, "2")
        assert caught.value.sqlstate == "RL003"
        assert await caller.fetchval(text, "nobody", "1") == "missing"
        await kernel.try_waits(item, Wait("yes", "approval", "answer"))
        with pytest.raises(
            asyncpg.PostgresError, match=r"payload: run .* waits for an approval 'answer'"
        ) as caught:
            await caller.fetchval(kernel.render(DOOR), item.run_id)
        assert caught.value.sqlstate == "RL001"
        await kernel.complete(item)
        assert await caller.fetchval(kernel.render(DOOR), item.run_id) == "ended"


async def test_wakes_of_runs_that_are_gone_are_forgotten(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.send(item.run_id)
        await kernel.execute("DELETE FROM @schema@.runs")
        assert await kernel.sweep_wakes() == (0, False)
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.wakes") == 0
