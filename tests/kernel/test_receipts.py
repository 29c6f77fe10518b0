"""Receipts of steps: who may claim, end and mark one, what a later attempt finds, and what nobody can change."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import cast

import attrs
import pytest

from sql import claim, receipts
from sql.connection import Session
from sql.errors import KernelRefused
from sql.receipts import ReceiptClaim, ReceiptEnd, ReceiptMark
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes


async def next_attempt(kernel: Kernel, item: claim.Claimed, outcome: str = "released") -> claim.Claimed:
    """The attempt ends without ending the run, and the next one is live."""
    assert (await kernel.settle(item, outcome, payload='{"error": {}}')).answer == "done"
    (live,) = [found for found in await kernel.claim() if found.run_id == item.run_id]
    return live


def claims(item: claim.Claimed, *keys: str, function: str = "work") -> list[ReceiptClaim]:
    return [ReceiptClaim(item.run_id, item.attempt, item.token, key, function) for key in keys]


def ends(item: claim.Claimed, outcome: str, *keys: str) -> list[ReceiptEnd]:
    payload = None if outcome == "released" else "1"
    return [ReceiptEnd(item.run_id, item.attempt, item.token, key, outcome, payload) for key in keys]


# --- one receipt's life: K-1, K-9 ------------------------------------------------------------------------


async def test_a_step_is_claimed_and_completed_and_a_later_attempt_gets_its_output(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        first = await kernel.started()
        answer = await kernel.claim_step(first)
        assert (answer.answer, answer.tries, answer.output) == ("claimed", 1, None)
        assert await kernel.end_step(first, payload='{"b": 1}', tries=2) == "done"
        later = await next_attempt(kernel, first)
        answer = await kernel.claim_step(later)
        assert (answer.answer, answer.output, answer.tries) == ("completed", '{"b": 1}', 3)
        record = await kernel.step(first.run_id)
        assert (record.state, record.final, record.attempt, record.output) == ("completed", True, 1, {"b": 1})
        assert record.finished_at is not None
        await check_invariants(kernel.session)


async def test_a_skipped_step_is_final_and_has_the_output_it_was_given(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.claim_step(item)
        assert await kernel.end_step(item, "skipped", payload="null") == "done"
        later = await next_attempt(kernel, item)
        answer = await kernel.claim_step(later)
        assert (answer.answer, answer.output) == ("skipped", "null")


async def test_a_failure_stands_until_the_run_itself_is_retried(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.claim_step(item)
        assert await kernel.end_step(item, "failed", payload='{"message": "no"}') == "done"
        assert (await kernel.claim_step(item)).answer == "failed"
        for outcome in ("released", "deferred"):
            item = await next_attempt(kernel, item, outcome)
            answer = await kernel.claim_step(item)
            assert (answer.answer, answer.error) == ("failed", '{"message": "no"}')
        retried = await next_attempt(kernel, item, "retried")
        answer = await kernel.claim_step(retried)
        assert (answer.answer, answer.tries, answer.error) == ("claimed", 2, None)
        # A failure of this attempt stands again until the next retry.
        assert await kernel.end_step(retried, "failed") == "done"
        assert (await kernel.claim_step(await next_attempt(kernel, retried))).answer == "failed"
        await check_invariants(kernel.session)


async def test_a_fatal_failure_stands_for_good(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.claim_step(item)
        assert await kernel.end_step(item, "fatal", payload='{"message": "never"}') == "done"
        retried = await next_attempt(kernel, item, "retried")
        answer = await kernel.claim_step(retried)
        assert (answer.answer, answer.error) == ("failed", '{"message": "never"}')
        assert (await kernel.step(item.run_id)).final


async def test_a_released_receipt_is_claimable_at_once(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.claim_step(item)
        assert await kernel.end_step(item, "released") == "done"
        assert (await kernel.step(item.run_id)).state == "released"
        answer = await kernel.claim_step(item)
        assert (answer.answer, answer.tries) == ("claimed", 2)


async def test_marks_move_what_is_held_and_beat(dsn: str, schema: str) -> None:
    """K-8."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        await kernel.claim_step(item)
        beats = []
        for state, shown in (
            ("queued", "queued"),
            ("running", "running"),
            (None, "running"),
            (None, "running"),
        ):
            assert await kernel.mark_step(item, state) == "done"
            record = await kernel.step(item.run_id)
            assert record.state == shown
            beats.append(record.heartbeat_at)
        # Time stands still, heartbeats do not.
        assert len(set(beats)) == 4
        assert beats == sorted(beats)  # type: ignore[type-var]
        assert await kernel.end_step(item) == "done"
        await check_invariants(kernel.session)


async def test_several_holders_of_one_attempt_have_leases_of_their_own(dsn: str, schema: str) -> None:
    """K-8."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started()
        assert (await kernel.claim_step(item, lease=1, lease_s=10.0)).answer == "claimed"
        assert (await kernel.claim_step(item, lease=2, lease_s=10.0)).answer == "held"
        await kernel.advance(9.0)
        assert await kernel.mark_step(item, lease=1, lease_s=10.0) == "done"
        assert await kernel.mark_step(item, lease=2, lease_s=10.0) == "lost"
        await kernel.advance(9.0)
        assert (await kernel.claim_step(item, lease=2, lease_s=10.0)).answer == "held"
        await kernel.advance(1.0)
        answer = await kernel.claim_step(item, lease=2, lease_s=10.0)
        assert (answer.answer, answer.tries) == ("claimed", 2)
        assert await kernel.end_step(item, lease=1) == "lost"
        assert await kernel.end_step(item, lease=2) == "done"
        # Without a lease of its own, a receipt is held for as long as its attempt lives.
        await kernel.claim_step(item, "other")
        await kernel.advance(30.0)
        assert (await kernel.claim_step(item, "other", lease=3)).answer == "held"


# --- functions, functions of others, cache inserts: K-6 ----------------------------------------------------


async def test_what_was_recorded_for_another_function_is_a_conflict_not_a_result(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        for key, outcome in (("done", "completed"), ("failed", "failed"), ("open", None)):
            await kernel.claim_step(item, key, "old")
            if outcome is not None:
                await kernel.end_step(item, outcome, key)
        later = await next_attempt(kernel, item)
        for key in ("done", "failed"):
            answer = await kernel.claim_step(later, key, "new")
            assert (answer.answer, answer.function) == ("conflict", "old")
        # Nothing is recorded for it yet: there is nothing that could be taken for something else.
        answer = await kernel.claim_step(later, "open", "new")
        assert (answer.answer, answer.function) == ("claimed", "new")


async def test_a_receipt_can_be_inserted_as_ended(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        assert await kernel.end_step(item, key="never claimed") == "lost"
        assert await kernel.end_step(item, key="cached", payload='"v"', function="work") == "done"
        assert await kernel.end_step(item, key="cached", payload='"v"', function="work") == "done"
        answer = await kernel.claim_step(item, "cached")
        assert (answer.answer, answer.output, answer.tries) == ("completed", '"v"', 0)
        # What a dead attempt left open is taken over on the way.
        await kernel.claim_step(item, "left open")
        later = await next_attempt(kernel, item)
        assert await kernel.end_step(later, key="left open", payload="2", function="work") == "done"
        assert (await kernel.claim_step(later, "left open")).output == "2"
        await check_invariants(kernel.session)


async def test_inserts_and_leased_ends_in_one_call_keep_their_order(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item, other = await kernel.started(), await kernel.started()
        await receipts.claim(kernel.session, claims(item, "a", "c"))
        mixed = [
            *ends(item, "completed", "a"),
            attrs.evolve(ends(other, "completed", "b")[0], function="work", payload='"b"'),
            *ends(item, "completed", "c"),
            *ends(item, "completed", "never claimed"),
            attrs.evolve(ends(item, "skipped", "d")[0], function="work", payload='"d"'),
        ]
        answers = await receipts.settle(kernel.session, mixed, outputs=True)
        found = [(answer.answer, answer.output) for answer in answers]
        assert found == [("done", "1"), ("done", '"b"'), ("done", "1"), ("lost", None), ("done", '"d"')]


async def test_outputs_come_only_when_asked_for(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:  # K-7
        item = await kernel.started()
        await kernel.claim_step(item)
        for outputs, expected in ((False, None), (True, "1")):
            (answer,) = await receipts.settle(
                kernel.session, ends(item, "completed", "step"), outputs=outputs
            )
            assert (answer.answer, answer.output) == ("done", expected)
        for outputs, shown in ((False, None), (True, 1)):
            (record,) = await receipts.read(
                kernel.session, item.run_id, after=None, limit=10, outputs=outputs
            )
            assert record.output == shown


# --- fences: K-5, B-4 --------------------------------------------------------------------------------------


async def all_steps(kernel: Kernel, run_id: str) -> list[receipts.StepRecord]:
    return await receipts.read(kernel.session, run_id, after=None, limit=100, outputs=True)


async def refused_everything(kernel: Kernel, stale: claim.Claimed) -> None:
    """Nothing that this attempt asks for changes anything."""
    before = await all_steps(kernel, stale.run_id)
    assert (await kernel.claim_step(stale, "left")).answer == "lost"
    assert (await kernel.claim_step(stale, "new")).answer == "lost"
    assert await kernel.mark_step(stale, "running", "left") == "lost"
    for outcome in ("completed", "failed", "fatal", "skipped", "released"):
        assert await kernel.end_step(stale, outcome, "left") == "lost"
    assert await kernel.end_step(stale, key="new", function="work") == "lost"
    assert await all_steps(kernel, stale.run_id) == before


@pytest.mark.parametrize("outcome", ["released", "retried", "completed", "cancelled", "expired"])
async def test_an_attempt_that_has_ended_can_write_nothing(dsn: str, schema: str, outcome: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        old = await kernel.started()
        await kernel.claim_step(old, "left")
        if outcome == "cancelled":
            await kernel.cancel(old.run_id)
        elif outcome == "expired":
            await kernel.advance(61.0)
            await kernel.expire()
        else:
            await kernel.settle(old, outcome, payload='{"error": {}}')
        await refused_everything(kernel, old)
        for live in await kernel.claim():
            await refused_everything(kernel, old)
            answer = await kernel.claim_step(live, "left")
            assert (answer.answer, answer.tries) == ("claimed", 2)
            await refused_everything(kernel, old)
            assert await kernel.end_step(live, key="left") == "done"
            await refused_everything(kernel, old)
        await check_invariants(kernel.session)


async def test_a_wrong_token_or_attempt_is_refused(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.claim_step(item)
        for wrong in (
            attrs.evolve(item, token=item.token + 1),
            attrs.evolve(item, attempt=item.attempt + 1),
            attrs.evolve(item, run_id="nobody"),
        ):
            assert (await kernel.claim_step(wrong)).answer == "lost"
            assert await kernel.end_step(wrong) == "lost"
            assert await kernel.mark_step(wrong) == "lost"
            assert await kernel.end_step(wrong, key="cached", function="work") == "lost"


async def test_no_stale_completion_lands_once_a_newer_attempt_has_claimed(dsn: str, schema: str) -> None:
    """Each order of a completion that saw its lease alive and the next attempt's claim, one of them held open."""
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        held = caller.doors(kernel)

        # The completion is open when the run moves on: the next attempt is told to wait, and then gets the output.
        old = await kernel.started()
        await kernel.claim_step(old)
        await caller.begin()
        assert await held.end_step(old, payload='"kept"') == "done"
        live = await next_attempt(kernel, old)
        assert (await kernel.claim_step(live)).answer == "busy"
        await caller.commit()
        answer = await kernel.claim_step(live)
        assert (answer.answer, answer.output) == ("completed", '"kept"')

        # The same, rolled back: the next attempt runs the step.
        old = await kernel.started()
        await kernel.claim_step(old)
        await caller.begin()
        assert await held.end_step(old) == "done"
        live = await next_attempt(kernel, old)
        assert (await kernel.claim_step(live)).answer == "busy"
        await caller.rollback()
        assert (await kernel.claim_step(live)).answer == "claimed"
        assert await kernel.end_step(old) == "lost"

        # The next attempt's claim is open: a completion of the old one finds its lease gone.
        old = await kernel.started()
        await kernel.claim_step(old)
        live = await next_attempt(kernel, old)
        await caller.begin()
        assert (await held.claim_step(live)).answer == "claimed"
        assert await kernel.end_step(old) == "lost"
        await caller.commit()
        assert await kernel.end_step(old) == "lost"
        assert (await kernel.step(old.run_id)).attempt == 2

        # The first claim is open when the run moves on: what it inserts is taken over.
        old = await kernel.started()
        await caller.begin()
        assert (await held.claim_step(old)).answer == "claimed"
        live = await next_attempt(kernel, old)
        assert (await kernel.claim_step(live)).answer == "busy"
        await caller.commit()
        answer = await kernel.claim_step(live)
        assert (answer.answer, answer.tries) == ("claimed", 2)
        await check_invariants(kernel.session)


async def test_a_cache_insert_that_is_open_makes_its_run_busy_and_nobody_waits(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        held = caller.doors(kernel)
        old, other = await kernel.started(), await kernel.started()
        await caller.begin()
        assert await held.end_step(old, key="k", payload='"old"', function="work") == "done"
        live = await next_attempt(kernel, old)
        answers = await receipts.claim(kernel.session, [*claims(live, "k", "l"), *claims(other, "k")])
        assert [answer.answer for answer in answers] == ["busy", "busy", "claimed"]
        await caller.commit()
        answers = await receipts.claim(kernel.session, claims(live, "k", "l"))
        assert [(answer.answer, answer.output) for answer in answers] == [
            ("completed", '"old"'),
            ("claimed", None),
        ]


async def test_a_row_that_somebody_holds_is_busy_and_the_rest_goes_through(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        await receipts.claim(kernel.session, claims(item, "a", "b", "c"))
        await caller.begin()
        await caller.execute(kernel.render("SELECT FROM @schema@.receipts WHERE key = 'b' FOR UPDATE"))
        marked = await receipts.mark(
            kernel.session,
            [ReceiptMark(item.run_id, item.attempt, item.token, key, "running") for key in "abc"],
        )
        assert marked == ["done", "busy", "done"]
        ended = await receipts.settle(kernel.session, ends(item, "completed", "a", "b", "c"))
        assert [answer.answer for answer in ended] == ["done", "busy", "done"]
        # The run's row is not needed: renewals go on beside it.
        assert (await kernel.renew(item)).answer == "renewed"
        live = await next_attempt(kernel, item)
        found = await receipts.claim(kernel.session, claims(live, "a", "b", "c"))
        assert [answer.answer for answer in found] == ["completed", "busy", "completed"]
        await caller.rollback()
        assert (await kernel.claim_step(live, "b")).answer == "claimed"


async def test_a_locked_run_row_holds_up_no_step(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema, lock_timeout_s=0.1) as kernel, open_caller(dsn, schema) as caller:
        item = await kernel.started()
        await caller.begin()
        await caller.execute(kernel.render("SELECT FROM @schema@.runs FOR UPDATE"))
        assert (await kernel.claim_step(item)).answer == "claimed"
        assert await kernel.end_step(item) == "done"
        await caller.rollback()
        # And the other way round: a step that is open holds up no renewal.
        await caller.begin()
        assert (await caller.doors(kernel).claim_step(item, "other")).answer == "claimed"
        assert (await kernel.renew(item)).answer == "renewed"
        assert (await kernel.complete(item)).answer == "done"
        await caller.commit()


# --- what is final: K-2 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("final", ["completed", "skipped", "fatal"])
async def test_one_final_receipt_refuses_the_whole_call_and_nothing_is_written(
    dsn: str, schema: str, final: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await receipts.claim(kernel.session, claims(item, "a", "final", "b"))
        assert await kernel.end_step(item, final, "final") == "done"
        before = await all_steps(kernel, item.run_id)

        calls: list[Awaitable[object]] = [
            receipts.settle(kernel.session, ends(item, outcome, "a", "final", "b"))
            for outcome in ("completed", "failed", "fatal", "skipped", "released")
            if outcome != final
        ]
        calls.append(
            receipts.mark(
                kernel.session,
                [ReceiptMark(item.run_id, item.attempt, item.token, key) for key in ("a", "final", "b")],
            )
        )
        for calling in calls:
            with pytest.raises(KernelRefused, match=r'step "final" of run .* for good') as caught:
                await calling
            assert (caught.value.sqlstate, caught.value.detail) == (receipts.IMMUTABLE, "final")
            assert await all_steps(kernel, item.run_id) == before
        # What made it final may be asked again; a later attempt may not even say the same.
        assert await kernel.end_step(item, final, "final") == "done"
        later = await next_attempt(kernel, item)
        with pytest.raises(KernelRefused, match="for good"):
            await kernel.end_step(later, final, "final", function="work")
        await check_invariants(kernel.session)


# --- batches: K-3, K-4 -------------------------------------------------------------------------------------


async def test_an_empty_batch_asks_nothing() -> None:
    nobody = cast(Session, None)
    assert await receipts.claim(nobody, []) == []
    assert await receipts.settle(nobody, []) == []
    assert await receipts.mark(nobody, []) == []


async def test_answers_are_aligned_over_many_runs(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        for _ in range(20):
            await kernel.submit()
        items = await kernel.claim()
        stale = attrs.evolve(items[3], token=1)
        asked = [
            one for n, item in enumerate(items) for one in claims(stale if n == 3 else item, f"k{n}", f"k{n}")
        ]
        answers = await receipts.claim(kernel.session, asked)
        expected = ["lost" if n == 3 else "claimed" for n in range(20) for _ in "ab"]
        assert [answer.answer for answer in answers] == expected
        done = await receipts.settle(
            kernel.session,
            [
                attrs.evolve(one, payload=str(n))
                for n, item in enumerate(items)
                for one in ends(stale if n == 3 else item, "completed", f"k{n}")
            ],
            outputs=True,
        )
        assert [answer.output for answer in done] == [None if n == 3 else str(n) for n in range(20)]
        answers = await receipts.claim(kernel.session, asked[::-1])
        assert [answer.output for answer in answers[::2]] == [
            None if n == 3 else str(n) for n in reversed(range(20))
        ]
        await check_invariants(kernel.session)


async def test_an_answer_is_of_bounded_size_and_the_rest_is_asked_for_again(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        keys = [f"k{n}" for n in range(5)]
        await kernel.execute("ALTER TABLE @schema@.receipts ALTER COLUMN output SET STORAGE EXTERNAL")
        await receipts.claim(kernel.session, claims(item, *keys))
        large = '"' + "x" * 3_000_000 + '"'
        await receipts.settle(
            kernel.session, [attrs.evolve(one, payload=large) for one in ends(item, "completed", *keys)]
        )
        live = await next_attempt(kernel, item)
        asked = claims(live, *keys, "new")
        answers = await receipts.claim(kernel.session, asked)
        assert [answer.answer for answer in answers] == ["completed"] * 3 + ["rest"] * 2 + ["claimed"]
        assert [answer.output for answer in answers] == [large] * 3 + [None] * 3
        answers = await receipts.claim(kernel.session, asked[3:])
        assert [answer.answer for answer in answers] == ["completed", "completed", "claimed"]


async def test_pages_of_steps_go_by_key(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        keys = [f"k{n:02}" for n in range(10)]
        await receipts.claim(kernel.session, claims(item, *reversed(keys)))
        seen: list[str] = []
        after: str | None = None
        while page := await receipts.read(kernel.session, item.run_id, after=after, limit=4, outputs=False):
            seen += [record.key for record in page]
            after = seen[-1]
        assert seen == keys


async def test_a_key_that_is_too_long_or_empty_is_refused_by_name(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        for key in ("", "k" * 256):
            with pytest.raises(KernelRefused, match="receipts_key_check"):
                await kernel.claim_step(item, key)
        assert (await kernel.claim_step(item, "k" * 255)).answer == "claimed"
