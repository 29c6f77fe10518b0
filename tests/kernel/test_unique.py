"""Unique keys: one run at a time holds a key, whoever asks, however often, and however late the answer comes."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

from sql import control
from sql.admission import Admitted, Submission
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

LEVELS = ("read committed", "repeatable read", "serializable")


def item(
    kernel: Kernel, on_conflict: str = "reject", key: str = "k", for_s: float | None = None, **fields: Any
) -> Submission:
    unique: dict[str, Any] = {"key": key, "on_conflict": on_conflict}
    if for_s is not None:
        unique["for_s"] = for_s
    return kernel.submission(extras=json.dumps({"unique": unique}), **fields)


async def one(kernel: Kernel, asked: Submission) -> Admitted:
    (answer,) = await kernel.admit([asked])
    return answer


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "in one call"])
@pytest.mark.parametrize(
    ("on_conflict", "outcome"), [("reject", "duplicate"), ("existing", "existing"), ("replace", "created")]
)
async def test_the_second_run_with_a_key(
    dsn: str, schema: str, together: bool, on_conflict: str, outcome: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        first, second = item(kernel, input=1), item(kernel, on_conflict, input=2)
        if together:
            was, now = await kernel.admit([first, second])
        else:
            was, now = await one(kernel, first), await one(kernel, second)
        assert (was.outcome, was.run_id) == ("created", first.run_id)
        replaced = outcome == "created"
        assert now == Admitted(outcome, second.run_id if replaced else first.run_id, replaced, False)

        # Both are asked again after lost answers: nothing changes.
        assert (await one(kernel, first)).created
        assert await one(kernel, second) in (now, Admitted("existing", now.run_id, replaced, False))
        if replaced:
            assert [claimed.run_id for claimed in await kernel.claim()] == [second.run_id]
            assert await control.sweep(kernel.session, limit=10) == (1, 0)
            assert await kernel.status(first.run_id) == "cancelled"
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runs") == 1 + replaced
        await check_invariants(kernel.session)


async def test_a_key_is_of_one_organisation_and_play(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        asked = [
            item(kernel),
            item(kernel, org_id="o"),
            item(kernel, org_id="p"),
            item(kernel, play="beta"),
            item(kernel, key="l"),
        ]
        assert {answer.outcome for answer in await kernel.admit(asked)} == {"created"}


async def test_a_key_without_a_window_is_held_until_its_run_has_ended(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        first = await one(kernel, item(kernel))
        (claimed,) = await kernel.claim()
        assert (await one(kernel, item(kernel))).outcome == "duplicate"
        await kernel.settle(claimed, "retried")
        assert (await one(kernel, item(kernel))).outcome == "duplicate"
        await kernel.cancel(first.run_id, "r", mark=False)
        assert (await one(kernel, item(kernel))).outcome == "created"


async def test_a_key_with_a_window_is_held_as_long_as_that_whatever_its_run_does(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        first = await one(kernel, item(kernel, for_s=10.0))
        await kernel.cancel(first.run_id, "r", mark=False)
        await kernel.advance(9.999)
        assert await one(kernel, item(kernel, "existing")) == Admitted("existing", first.run_id, False, False)
        await kernel.advance(0.001)
        assert (await one(kernel, item(kernel))).outcome == "created"


async def test_an_existing_run_by_id_or_idempotency_key_comes_first(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        first = await one(kernel, item(kernel, run_id="a", idempotency_key="i"))
        assert first.outcome == "created"
        both = {"run_id": "a", "idempotency_key": "i"}
        by_either: list[dict[str, Any]] = [{"run_id": "a"}, {"idempotency_key": "i"}, both]
        for again in by_either:
            assert await one(kernel, item(kernel, **again)) == Admitted("existing", "a", False, False)
        assert (await one(kernel, item(kernel, run_id="a", input=2))).outcome == "conflict"
        assert (await one(kernel, item(kernel, run_id="b"))).outcome == "duplicate"


async def test_a_replaced_run_is_asked_about_again(dsn: str, schema: str) -> None:
    """A lost answer stays what it was, also when the key has gone on since."""
    async with open_kernel(dsn, schema) as kernel:
        first, second = item(kernel), item(kernel, "replace")
        await one(kernel, first)
        await one(kernel, second)
        await one(kernel, item(kernel, "replace"))
        for asked in (first, second):
            assert await one(kernel, asked) == Admitted("existing", asked.run_id, True, False)
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.cancellations") == 2


async def test_a_running_holder_is_cancelled_as_by_anybody(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await one(kernel, item(kernel))
        (claimed,) = await kernel.claim()
        second = item(kernel, "replace")
        assert (await one(kernel, second)).created
        assert await control.sweep(kernel.session, limit=10) == (1, 0)
        assert (await kernel.settle(claimed, "completed")).answer == "lost"
        terminal = await kernel.fetchval(
            "SELECT payload->>'reason' FROM @schema@.facts WHERE run_id = $1 AND type = 'run.cancelled'",
            claimed.run_id,
        )
        assert terminal == f"replaced by run {second.run_id}, which has the same unique key"
        await check_invariants(kernel.session)


@pytest.mark.parametrize("commit", [True, False])
async def test_a_key_in_an_open_transaction_is_busy_and_holds_up_nobody(
    dsn: str, schema: str, commit: bool
) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await caller.begin()
        run_id = await caller.fetchval(
            kernel.render("""SELECT run_id FROM @schema@.submit_run('alpha', '1', '{"unique_key": "k"}')""")
        )
        mine, other = item(kernel), item(kernel, key="l")
        answers = await kernel.admit([mine, other, kernel.submission()])
        assert [answer.outcome for answer in answers] == ["busy", "created", "created"]
        await (caller.commit() if commit else caller.rollback())
        answer = await one(kernel, mine)
        assert (answer.outcome, answer.run_id) == (
            ("duplicate", run_id) if commit else ("created", mine.run_id)
        )
        await check_invariants(kernel.session)


async def test_many_hosts_at_once_make_one_run(dsn: str, schema: str) -> None:
    import trio

    async with open_kernel(dsn, schema) as first, open_kernel(dsn, schema, owner=2) as second:
        created: list[Admitted] = []

        async def ask(kernel: Kernel) -> None:
            for turn in range(30):
                answer = Admitted("busy", "", False, False)
                asked = item(kernel, key=f"k{turn}")
                while answer.outcome == "busy":
                    answer = await one(kernel, asked)
                created.append(answer)

        async with trio.open_nursery() as nursery:
            for kernel in (first, second):
                nursery.start_soon(ask, kernel)
        assert sorted(answer.outcome for answer in created) == ["created"] * 30 + ["duplicate"] * 30
        assert await first.fetchval("SELECT count(*) FROM @schema@.runs") == 30


async def test_keys_that_are_free_again_are_forgotten_on_the_way(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        runs = [
            await one(kernel, item(kernel, key=f"old-{n}", for_s=5.0 if n % 2 else None)) for n in range(20)
        ]
        for answer in runs[:10]:
            await kernel.cancel(answer.run_id, "r", mark=False)
        await kernel.advance(61.0)
        for n in range(11):
            await one(kernel, item(kernel, key=f"new-{n}"))
        left = await kernel.fetch("SELECT key FROM @schema@.unique_keys WHERE key LIKE 'old%' ORDER BY key")
        # Of the old ones only those without a window whose run is open: the even ones from 10 on.
        assert [row["key"] for row in left] == [f"old-{n}" for n in range(10, 20, 2)]
        await kernel.advance(61.0)
        assert (await one(kernel, item(kernel, key="old-10"))).outcome == "duplicate"


# --- through the SQL door --------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
async def test_submit_run_with_a_unique_key(dsn: str, schema: str, level: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        submit = kernel.render("SELECT * FROM @schema@.submit_run('alpha', $1, $2)")

        async def ask(number: int, **options: Any) -> Any:
            return await caller.fetchrow(
                submit, json.dumps(number), json.dumps({"unique_key": "k", **options})
            )

        await caller.begin(level)
        rolled_back = (await ask(0))["run_id"]
        await caller.rollback()
        first = await ask(1)
        assert first["created"]
        assert first["run_id"] != rolled_back
        with pytest.raises(asyncpg.PostgresError) as caught:
            await ask(2)
        assert (caught.value.sqlstate, caught.value.detail) == ("RL004", first["run_id"])
        same = await ask(3, on_conflict="existing")
        assert (same["run_id"], same["created"]) == (first["run_id"], False)

        await caller.begin(level)
        second = await ask(4, on_conflict="replace")
        assert second["created"]
        # Until the commit nobody sees a change, and the holder can be claimed.
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.cancellations") == 0
        await caller.commit()
        assert await control.sweep(kernel.session, limit=10) == (1, 0)
        assert await kernel.status(first["run_id"]) == "cancelled"
        assert [claimed.run_id for claimed in await kernel.claim()] == [second["run_id"]]
        await check_invariants(kernel.session)


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_key_taken_behind_the_callers_snapshot_is_never_taken_twice(
    dsn: str, schema: str, level: str
) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await caller.begin(level)
        await caller.fetchval("SELECT 1 FROM pg_class LIMIT 1")
        await one(kernel, item(kernel))
        with pytest.raises(asyncpg.SerializationError):
            await caller.fetchval(
                kernel.render("""SELECT @schema@.submit_run('alpha', '1', '{"unique_key": "k"}')""")
            )
        await caller.rollback()
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runs") == 1


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"unique_key": ""}, "options.unique_key"),
        ({"unique_key": 5}, "options.unique_key"),
        ({"unique_key": "k" * 256}, "options.unique_key"),
        ({"unique_for_s": 5}, "options.unique_key"),
        ({"on_conflict": "replace"}, "options.unique_key"),
        ({"unique_key": "k", "unique_for_s": 0}, "options.unique_for_s"),
        ({"unique_key": "k", "unique_for_s": -1}, "options.unique_for_s"),
        ({"unique_key": "k", "unique_for_s": 1e300}, "options.unique_for_s"),
        ({"unique_key": "k", "unique_for_s": "9"}, "options.unique_for_s"),
        ({"unique_key": "k", "on_conflict": "ignore"}, "options.on_conflict"),
        ({"unique_key": "k", "on_conflict": ["reject"]}, "options.on_conflict"),
        ({"surface": "telepathy"}, "options.surface"),
        ({"surface": 1}, "options.surface"),
        ({"trigger": "whim"}, "options.trigger"),
        ({"scope": "galaxy"}, "options.scope"),
        ({"terminal_receiver": ""}, "options.terminal_receiver"),
        ({"array_input_receiver": 7}, "options.array_input_receiver"),
        ({"terminal_performance": "much"}, "options.terminal_performance"),
        ({"terminal_performance": True}, "options.terminal_performance"),
    ],
)
async def test_bad_options_are_refused_by_name(
    dsn: str, schema: str, options: dict[str, Any], field: str
) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        with pytest.raises(asyncpg.PostgresError) as caught:
            await caller.fetch(
                kernel.render("SELECT * FROM @schema@.submit_run('alpha', '1', $1)"), json.dumps(options)
            )
        assert (caught.value.sqlstate, caught.value.detail) == ("RL001", field)


async def test_what_a_launch_says_of_itself_is_in_the_first_fact(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        said = {
            "surface": "sdk", "trigger": "sql_listener", "scope": "system", "terminal_receiver": "keeper",
            "terminal_performance": "full",
        }  # fmt: skip
        run_id = await kernel.fetchval(
            "SELECT run_id FROM @schema@.submit_run('alpha', '1', $1)",
            json.dumps({**said, "unique_key": "k"}),
        )
        row = await kernel.fetch(
            """SELECT f.payload, f.created_at = r.created_at AS accepted, r.terminal_receiver, r.performance
                 FROM @schema@.facts f JOIN @schema@.runs r USING (run_id) WHERE run_id = $1""",
            run_id,
        )
        payload = json.loads(row[0]["payload"])
        assert {name: payload[name] for name in said} == said
        assert payload["unique"] == {"key": "k", "on_conflict": "reject"}
        assert tuple(row[0])[1:] == (True, "keeper", "full")


def test_the_closed_lists_of_the_sql_door_are_those_of_python() -> None:
    from importlib.resources import files

    from sql import types

    text = files("sql").joinpath("functions/submit.sql").read_text()
    for allowed in (types.SURFACES, types.TRIGGERS, types.SCOPES, types.ON_CONFLICT):
        assert "'{" + ", ".join(allowed) + "}'" in text
