"""Admission: one run per run id and key, answers for every way to ask, and the SQL door for other programs."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from sql import admission, control, facts
from sql.errors import KernelRefused, LockTimedOut
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import open_kernel

pytestmark = pytest.mark.modes

LEVELS = ("read committed", "repeatable read", "serializable")


async def test_a_run_begins_queued_with_its_input_in_the_first_fact(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        run_id = await kernel.submit(
            input={"path": "ü"}, idempotency_key="k", org_id="o", priority=1, labels='{"a": "b"}'
        )
        assert await kernel.status(run_id) == "queued"
        (fact,) = await facts.read(kernel.session, run_id)
        assert (fact.seq, fact.type) == (1, "run.created")
        request = fact.payload.pop("request")
        assert request
        assert fact.payload == {
            "play": "alpha",
            "input": {"path": "ü"},
            "org_id": "o",
            "priority": 1,
            "labels": {"a": "b"},
            "idempotency_key": "k",
        }
        await check_invariants(kernel.session)


async def test_a_delayed_run_is_due_later(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        run_id = await kernel.submit(delay_s=10.0)
        await kernel.advance(9.999)
        assert await kernel.claim() == []
        await kernel.advance(0.001)
        (claimed,) = await kernel.claim()
        assert (claimed.run_id, claimed.lag_s) == (run_id, 0.0)


async def test_a_run_can_be_admitted_as_already_claimed(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = kernel.submission(claim=True)
        (answer,) = await kernel.admit([item])
        assert (answer.outcome, answer.created, answer.claimed) == ("created", True, True)
        assert await kernel.fact_types(item.run_id) == ["run.created", "run.started"]
        assert await kernel.claim() == []
        await check_invariants(kernel.session)

        # Asked again after a lost answer it is still this call's attempt, until somebody ends that.
        assert await kernel.admit([item]) == [admission.Admitted("existing", item.run_id, True, True)]
        await kernel.execute(
            "UPDATE @schema@.runs SET lease_expires_at = created_at, due_at = created_at WHERE run_id = $1",
            item.run_id,
        )
        assert (await kernel.expire()).expired == 1
        assert await kernel.admit([item]) == [admission.Admitted("existing", item.run_id, True, False)]
        await check_invariants(kernel.session)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # first, second: fields of the submissions; then the second one's outcome
    "same id, same input": ({"run_id": "a"}, {"run_id": "a"}, "existing"),
    "same id, other input": ({"run_id": "a"}, {"run_id": "a", "input": 2}, "conflict"),
    "same id, other play": ({"run_id": "a"}, {"run_id": "a", "play": "beta"}, "conflict"),
    "same id, other organisation": (
        {"run_id": "a", "org_id": "x"},
        {"run_id": "a", "org_id": "y"},
        "conflict",
    ),
    "same key, same input": ({"idempotency_key": "k"}, {"idempotency_key": "k"}, "existing"),
    "same key, other input": ({"idempotency_key": "k"}, {"idempotency_key": "k", "input": 2}, "conflict"),
    "same key, other play": ({"idempotency_key": "k"}, {"idempotency_key": "k", "play": "beta"}, "created"),
    "same key, an organisation": (
        {"idempotency_key": "k"},
        {"idempotency_key": "k", "org_id": "o"},
        "created",
    ),
    "same key, other organisation": (
        {"idempotency_key": "k", "org_id": "o"},
        {"idempotency_key": "k", "org_id": "p"},
        "created",
    ),
    "same key and organisation": (
        {"idempotency_key": "k", "org_id": "o"},
        {"idempotency_key": "k", "org_id": "o"},
        "existing",
    ),
    "same id and key": (
        {"run_id": "a", "idempotency_key": "k"},
        {"run_id": "a", "idempotency_key": "k"},
        "existing",
    ),
    "id of a run that has a key": ({"run_id": "a", "idempotency_key": "k"}, {"run_id": "a"}, "existing"),
    "key of a run with its own id": (
        {"run_id": "a", "idempotency_key": "k"},
        {"idempotency_key": "k"},
        "existing",
    ),
    "id with a key that the run lacks": (
        {"run_id": "a"},
        {"run_id": "a", "idempotency_key": "k"},
        "two_runs",
    ),
    "id with another key": (
        {"run_id": "a", "idempotency_key": "k"},
        {"run_id": "a", "idempotency_key": "l"},
        "two_runs",
    ),
    "key with another id": (
        {"run_id": "a", "idempotency_key": "k"},
        {"run_id": "b", "idempotency_key": "k"},
        "two_runs",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "in one call"])
async def test_idempotency(dsn: str, schema: str, case: str, together: bool) -> None:
    first, second, expected = CASES[case]
    async with open_kernel(dsn, schema) as kernel:
        items = [kernel.submission(**{"input": 1, **fields}) for fields in (first, second)]
        if together:
            was, answer = await kernel.admit(items)
            if items[0].run_id == items[1].run_id:
                assert answer.outcome == "busy"  # the second one is told to ask again
                answer = (await kernel.admit(items[1:]))[0]
        else:
            was = (await kernel.admit(items[:1]))[0]
            answer = (await kernel.admit(items[1:]))[0]
        assert (was.outcome, was.created, was.run_id) == ("created", True, items[0].run_id)
        created = expected == "created"
        assert (answer.outcome, answer.created) == (expected, created)
        if expected != "two_runs":
            assert answer.run_id == (items[1] if created else items[0]).run_id
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runs") == 1 + created
        await check_invariants(kernel.session)


async def test_a_key_names_its_run_for_as_long_as_the_run_exists(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started(idempotency_key="k")
        await kernel.complete(item)
        (answer,) = await kernel.admit([kernel.submission(idempotency_key="k")])
        assert (answer.outcome, answer.run_id) == ("existing", item.run_id)


async def test_a_batch_is_answered_item_by_item(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        old = await kernel.submit(idempotency_key="old", input=1)
        answers = await kernel.admit(
            [
                kernel.submission(),
                kernel.submission(idempotency_key="old", input=1),
                kernel.submission(idempotency_key="new"),
                kernel.submission(idempotency_key="old", input=2),
                kernel.submission(idempotency_key="new"),
            ]
        )
        assert [answer.outcome for answer in answers] == [
            "created", "existing", "created", "conflict", "existing",
        ]  # fmt: skip
        assert answers[1].run_id == answers[3].run_id == old
        assert answers[4].run_id == answers[2].run_id
        await check_invariants(kernel.session)


async def test_a_key_in_an_open_transaction_makes_only_its_own_item_busy(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.05) as kernel, open_caller(dsn, schema) as caller:
        await caller.begin()
        await caller.fetch(
            kernel.render("""SELECT * FROM @schema@.submit_run('alpha', '1', '{"idempotency_key": "k"}')""")
        )
        await caller.fetch(
            kernel.render("""SELECT * FROM @schema@.submit_run('alpha', '1', '{"run_id": "mine"}')""")
        )
        items = [
            kernel.submission(input=1, idempotency_key="other"),
            kernel.submission(input=1, idempotency_key="k"),
            kernel.submission(input=1),
            kernel.submission(input=1, run_id="mine"),
        ]
        answers = await kernel.admit(items)
        assert [answer.outcome for answer in answers] == ["created", "busy", "created", "busy"]
        assert [answer.created for answer in answers] == [True, False, True, False]
        await check_invariants(kernel.session)

        await caller.commit()
        answers = await kernel.admit(items)
        assert [answer.outcome for answer in answers] == ["existing"] * 4
        assert [answer.created for answer in answers] == [True, False, True, False]
        await check_invariants(kernel.session)


async def test_a_key_is_free_again_after_a_rollback(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await caller.begin()
        await caller.fetch(
            kernel.render("""SELECT * FROM @schema@.submit_run('alpha', '1', '{"idempotency_key": "k"}')""")
        )
        await caller.rollback()
        (answer,) = await kernel.admit([kernel.submission(input=2, idempotency_key="k")])
        assert answer.outcome == "created"


async def test_an_item_that_cannot_be_stored_is_refused_and_leaves_nothing(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        bad = kernel.submission()
        bad.input = "{"
        with pytest.raises(KernelRefused):
            await kernel.admit([kernel.submission(), bad])
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runs") == 0
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.facts") == 0


# --- the SQL door ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
async def test_submit_run_is_part_of_the_callers_transaction(dsn: str, schema: str, level: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        submit = kernel.render("SELECT * FROM @schema@.submit_run('alpha', '{\"a\": 1}', $1)")
        await caller.begin(level)
        await caller.fetchrow(submit, "{}")
        await caller.rollback()
        assert await kernel.claim() == []

        await caller.begin(level)
        row = await caller.fetchrow(submit, '{"idempotency_key": "k", "priority": 2}')
        assert row["created"]
        again = await caller.fetchrow(submit, '{"idempotency_key": "k", "priority": 2}')
        assert (again["run_id"], again["created"]) == (row["run_id"], False)
        assert await kernel.claim() == []
        await caller.commit()

        (claimed,) = await kernel.claim()
        assert (claimed.run_id, json.loads(claimed.input)) == (row["run_id"], {"a": 1})
        await check_invariants(kernel.session)


@pytest.mark.parametrize("level", LEVELS)
async def test_submit_run_never_answers_wrongly_about_a_key_it_cannot_see(
    dsn: str, schema: str, level: str
) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        submit = kernel.render(
            "SELECT * FROM @schema@.submit_run('alpha', '1', '{\"idempotency_key\": \"k\"}')"
        )
        await caller.begin(level)
        await caller.fetch("SELECT 1 FROM pg_class LIMIT 1")  # takes the snapshot, where one lasts
        run_id = await kernel.submit(input=1, idempotency_key="k")
        if level == "read committed":
            row = await caller.fetchrow(submit)
            assert (row["run_id"], row["created"]) == (run_id, False)
        else:
            with pytest.raises(asyncpg.SerializationError):
                await caller.fetchrow(submit)


async def test_submit_run_waits_for_the_same_key_of_another_transaction(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as first:
        submit = kernel.render(
            "SELECT * FROM @schema@.submit_run('alpha', '1', '{\"idempotency_key\": \"k\"}')"
        )
        async with open_caller(dsn, schema) as second:
            await first.begin()
            row = await first.fetchrow(submit)
            await second.execute("SET lock_timeout = '50ms'")
            with pytest.raises(asyncpg.LockNotAvailableError):
                await second.fetchrow(submit)
            await first.commit()
            again = await second.fetchrow(submit)
            assert (again["run_id"], again["created"]) == (row["run_id"], False)


async def test_submit_run_says_which_run_has_the_key(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        run_id = await kernel.submit(input=1, idempotency_key="k")
        with pytest.raises(asyncpg.PostgresError) as caught:
            await caller.fetch(
                kernel.render(
                    """SELECT * FROM @schema@.submit_run('alpha', '2', '{"idempotency_key": "k"}')"""
                )
            )
        assert (caught.value.sqlstate, caught.value.detail) == ("RL003", run_id)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


BAD_OPTIONS: dict[str, tuple[str, str]] = {
    "options that are no object": ("[]", "options"),
    "null options": ("null", "options"),
    "unknown": ('{"prio": 1}', "options.prio"),
    "empty run id": ('{"run_id": ""}', "options.run_id"),
    "long run id": (json.dumps({"run_id": "a" * 129}), "options.run_id"),
    "run id with a space": ('{"run_id": "a b"}', "options.run_id"),
    "run id with a newline": ('{"run_id": "a\\n"}', "options.run_id"),
    "run id that is no text": ('{"run_id": 7}', "options.run_id"),
    "empty key": ('{"idempotency_key": ""}', "options.idempotency_key"),
    "long key": (json.dumps({"idempotency_key": "k" * 256}), "options.idempotency_key"),
    "key that is no text": ('{"idempotency_key": {}}', "options.idempotency_key"),
    "empty organisation": ('{"org_id": ""}', "options.org_id"),
    "long organisation": (json.dumps({"org_id": "o" * 256}), "options.org_id"),
    "empty release": ('{"release_id": ""}', "options.release_id"),
    "environment that is no text": ('{"environment": 1}', "options.environment"),
    "high priority": ('{"priority": 3}', "options.priority"),
    "broken priority": ('{"priority": 0.5}', "options.priority"),
    "priority as text": ('{"priority": "1"}', "options.priority"),
    "huge priority": ('{"priority": 1e400}', "options.priority"),
    "negative delay": ('{"delay": -1}', "options.delay"),
    "long delay": ('{"delay": 1e10}', "options.delay"),
    "huge delay": ('{"delay": 1e400}', "options.delay"),
    "delay as text": ('{"delay": "1"}', "options.delay"),
    "delay and at": ('{"delay": 1, "at": "2030-01-01T00:00Z"}', "options.at"),
    "at that is no time": ('{"at": "soon"}', "options.at"),
    "at that is no text": ('{"at": 5}', "options.at"),
    "at without a zone": ('{"at": "2026-12-24 10:00"}', "options.at"),
    "at that is a day": ('{"at": "2026-12-24"}', "options.at"),
    "at that is another day elsewhere": ('{"at": "tomorrow"}', "options.at"),
    "infinite at": ('{"at": "infinity"}', "options.at"),
    "labels that are a list": ('{"labels": []}', "options.labels"),
    "labels that are text": ('{"labels": "x"}', "options.labels"),
    "label that is a number": ('{"labels": {"a": 1}}', "options.labels"),
    "label that is null": ('{"labels": {"a": null}}', "options.labels"),
    "many labels": (json.dumps({"labels": {f"l{n}": "" for n in range(33)}}), "options.labels"),
    "long label": (json.dumps({"labels": {"a": "b" * 257}}), "options.labels"),
    "label without a name": ('{"labels": {"": "b"}}', "options.labels"),
    "notify as text": ('{"notify": "yes"}', "options.notify"),
}
BAD_INPUTS: dict[str, tuple[str | None, str]] = {
    "no input": (None, "input"),
    "large input": (json.dumps("x" * 1_048_576), "input"),
    "deep input": (nested(65), "input"),
    "number that no host can read": ("[1e700]", "input"),
}


@pytest.mark.parametrize(
    "at",
    [
        "2026-12-24T10:00Z",
        "2026-12-24 11:00+01",
        "2026-12-24 05:00 America/New_York",
        "Dec 24 10:00 2026 GMT",
    ],
)
async def test_a_moment_has_its_zone_with_it(dsn: str, schema: str, at: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await caller.fetchval("SELECT set_config('TimeZone', 'Asia/Tokyo', false)")
        submit = kernel.render("SELECT run_id FROM @schema@.submit_run('alpha', '1', $1)")
        await caller.fetchval(submit, json.dumps({"at": at}))
        due = await kernel.fetchval("SELECT due_at FROM @schema@.runs")
        assert due == datetime(2026, 12, 24, 10, tzinfo=UTC)
        assert await caller.fetchval("SHOW TimeZone") == "Asia/Tokyo"
        with pytest.raises(
            asyncpg.PostgresError, match="'10:00 Dec 24 2026' has no time zone: add Z or an offset"
        ):
            await caller.fetchval(submit, '{"at": "10:00 Dec 24 2026"}')


async def refused(caller: Any, statement: str, *args: Any) -> str | None:
    """The SQLSTATE and field of a refusal, as one text."""
    with pytest.raises(asyncpg.PostgresError) as caught:
        await caller.fetch(statement, *args)
    assert str(caught.value).startswith(f"{caught.value.detail}: ")
    return f"{caught.value.sqlstate} {caught.value.detail}"


async def test_submit_run_refuses_by_name(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        submit = kernel.render("SELECT * FROM @schema@.submit_run($1, $2, $3)")
        found = {
            name: await refused(caller, submit, "alpha", "1", bad) for name, (bad, _) in BAD_OPTIONS.items()
        }
        found |= {
            name: await refused(caller, submit, "alpha", bad, "{}") for name, (bad, _) in BAD_INPUTS.items()
        }
        expected = {name: f"RL001 {field}" for name, (_, field) in (BAD_OPTIONS | BAD_INPUTS).items()}
        assert found == expected
        assert await refused(caller, submit, "nobody", "1", "{}") == "RL001 play"
        assert await refused(caller, submit, None, "1", "{}") == "RL001 play"
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.runs") == 0


async def test_submit_run_takes_what_is_at_the_limit(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        submit = kernel.render("SELECT * FROM @schema@.submit_run('alpha', $1, $2)")
        labels = {f"l{n}" + "x" * 60: "v" * 256 for n in range(32)}
        good = {
            "run_id": "a.B_c:-" + "9" * 121,
            "idempotency_key": "ü" * 255,
            "org_id": "o" * 255,
            "priority": -2,
            "delay": 0,
            "at": None,
            "labels": labels,
            "release_id": "r",
            "environment": "e",
            "notify": False,
        }
        row = await caller.fetchrow(submit, nested(64), json.dumps(good))
        assert (row["run_id"], row["created"]) == (good["run_id"], True)
        await caller.fetchrow(submit, "1e400", None)
        await caller.fetchrow(submit, "null", '{"at": "2031-01-01T00:00:00Z", "delay": null}')
        await check_invariants(kernel.session)


async def test_run_ids_made_by_the_database_are_uuids_in_order(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        ids = []
        for _ in range(3):
            ids.append(await caller.fetchval(kernel.render("SELECT @schema@.new_run_id()")))
            await caller.fetch("SELECT pg_sleep(0.002)")  # to the next millisecond
        assert ids == sorted(ids)
        assert all(run_id[14] == "7" and run_id[19] in "89ab" and len(run_id) == 36 for run_id in ids)


async def test_cancel_run_refuses_by_name(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        run_id = await kernel.submit()
        cancel = kernel.render("SELECT @schema@.cancel_run($1, $2)")
        for bad, field in [
            ("[]", "options"),
            ('{"force": true}', "options.force"),
            ('{"request_id": 1}', "options.request_id"),
            ('{"request_id": ""}', "options.request_id"),
            ('{"reason": []}', "options.reason"),
            ('{"by": {}}', "options.by"),
            ('{"notify": 0}', "options.notify"),
        ]:
            assert await refused(caller, cancel, run_id, bad) == f"RL001 {field}"
        assert await kernel.fetchval("SELECT count(*) FROM @schema@.cancellations") == 0


@pytest.mark.parametrize("level", LEVELS)
async def test_cancel_run_is_part_of_the_callers_transaction_and_delays_nobody(
    dsn: str, schema: str, level: str
) -> None:
    """L-6, O-3."""
    async with open_kernel(dsn, schema, lock_timeout_s=0.05) as kernel, open_caller(dsn, schema) as caller:
        cancel = kernel.render("SELECT @schema@.cancel_run($1, $2)")
        item = await kernel.started()
        await caller.begin(level)
        assert await caller.fetchval(cancel, item.run_id, '{"reason": "no", "request_id": "q"}') == "pending"
        assert await caller.fetchval(cancel, item.run_id, '{"request_id": "q"}') == "pending"
        assert await caller.fetchval(cancel, "nothing", "{}") == "missing"

        renewal = await kernel.renew(item)
        assert (renewal.answer, renewal.cancel) == ("renewed", False)
        assert await kernel.say(item, 1) == "done"
        assert (await kernel.deliver()).lanes == 1
        assert await control.sweep(kernel.session, limit=10) == (0, 0)
        await caller.commit()

        assert (await kernel.renew(item)).cancel
        assert await control.sweep(kernel.session, limit=10) == (1, 0)
        assert (await kernel.renew(item)).answer == "lost"
        last = (await facts.read(kernel.session, item.run_id))[-1]
        assert (last.type, last.payload) == (
            "run.cancelled",
            {"request_id": "q", "reason": "no", "by": None},
        )
        assert await caller.fetchval(cancel, item.run_id, "{}") == "cancelled"
        await check_invariants(kernel.session)


async def test_a_rolled_back_cancel_run_is_never_seen(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        await caller.begin()
        await caller.fetch(kernel.render("SELECT @schema@.cancel_run($1)"), item.run_id)
        await caller.rollback()
        assert await control.sweep(kernel.session, limit=10) == (0, 0)
        assert (await kernel.complete(item)).answer == "done"


async def test_cancel_run_of_a_run_in_the_same_transaction(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await caller.begin("repeatable read")
        await caller.fetch(kernel.render("""SELECT @schema@.submit_run('alpha', '1', '{"run_id": "a"}')"""))
        assert await caller.fetchval(kernel.render("SELECT @schema@.cancel_run('a')")) == "pending"
        await caller.commit()
        assert await kernel.claim() == []  # a marked run is nobody's to start
        assert await control.sweep(kernel.session, limit=10) == (1, 0)
        assert await kernel.status("a") == "cancelled"


async def test_transitions_refuse_a_session_that_is_not_read_committed(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        for level in LEVELS[1:]:
            await caller.begin(level)
            with pytest.raises(asyncpg.PostgresError, match="READ COMMITTED") as caught:
                await caller.doors(kernel).complete(item)
            assert caught.value.sqlstate == "RL002"
            await caller.rollback()


async def test_lock_timeouts_of_tests_do_fire(dsn: str, schema: str) -> None:
    # The tests that show that nobody waits rest on this.
    async with open_kernel(dsn, schema, lock_timeout_s=0.05) as kernel, open_caller(dsn, schema) as caller:
        run_id = await kernel.submit()
        await caller.begin()
        await caller.fetch(kernel.render("SELECT 1 FROM @schema@.runs WHERE run_id = $1 FOR UPDATE"), run_id)
        with pytest.raises(LockTimedOut):
            await kernel.fetch("SELECT 1 FROM @schema@.runs WHERE run_id = $1 FOR UPDATE", run_id)
