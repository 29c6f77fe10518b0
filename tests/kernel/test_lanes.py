"""Lanes: whose turn it is, what travels together, what is passed over, and what operators may do.

Turns, leases, frozen prefixes and ranks are tested with all other transitions (test_transitions, test_fairness,
test_pairs, test_lost_answers) and against the model (test_model).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from sql import journal, lanes, reconcile
from sql.claim import Claimed
from sql.errors import InputRefused, LockTimedOut
from sql.types import Lane
from tests.support.callers import open_caller
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

BILLING = "https://billing.example"
LATER = "https://later.example"
_TOLD = "SELECT applied_seq, applied_facts, passed_facts, status FROM @schema@.ledger_runs"


async def row(kernel: Kernel, run_id: str, columns: str) -> Any:
    (found,) = await kernel.fetch(f"SELECT {columns} FROM @schema@.runs WHERE run_id = $1", run_id)
    return tuple(found)


async def terminal_to(kernel: Kernel, run_id: str, receiver: str) -> None:
    """What a registration of staged input leaves behind: only an open run's terminal can be sent elsewhere."""
    await kernel.execute(
        "UPDATE @schema@.runs SET terminal_receiver = $2 WHERE run_id = $1 AND finished_at IS NULL",
        run_id,
        receiver,
    )


# --- receivers ---------------------------------------------------------------------------------------------


async def test_a_claim_takes_only_lanes_of_its_receivers(dsn: str, schema: str) -> None:
    """G-12."""
    async with open_kernel(dsn, schema) as kernel:
        own = await kernel.submit()
        other = await kernel.submit(receiver=BILLING)
        item = next(run for run in await kernel.claim() if run.run_id == other)
        await kernel.say(item, 1, Lane.OBSERVABILITY)
        for lane in Lane:
            assert {one.run_id for one in await kernel.claim_lanes(lane)} <= {own}
            (taken,) = await kernel.claim_lanes(lane, receivers=[BILLING])
            assert taken.run_id == other
        due = await kernel.fetchval("SELECT @schema@.lifecycle_next_due($1)", ["https://nobody.example"])
        assert due is None
        assert (await kernel.deliver(receivers=["https://nobody.example"])).lanes == 0
        facts = await kernel.fetchval(
            "SELECT payload ->> 'receiver' FROM @schema@.facts WHERE run_id = $1 AND lane = 0 AND seq = 1",
            other,
        )
        assert facts == BILLING
        await check_invariants(kernel.session)


async def test_a_claim_of_several_receivers_is_ordered_by_rank_over_all_of_them(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        ended = await kernel.started(receiver=BILLING)
        (first,) = await kernel.claim_lanes(receivers=[BILLING], prefix=1)
        await kernel.acknowledge(first)
        await kernel.complete(ended)
        fresh = await kernel.submit()
        (urgent,) = await kernel.claim_lanes(receivers=["", BILLING], limit=1)
        (then,) = await kernel.claim_lanes(receivers=["", BILLING], limit=1)
        assert (urgent.run_id, then.run_id) == (fresh, ended.run_id)


async def test_a_claim_up_to_a_rank_leaves_progress_alone(dsn: str, schema: str) -> None:
    """F-15: what nobody waits for."""
    async with open_kernel(dsn, schema) as kernel:
        talks, ends = await kernel.started(), await kernel.started()
        for prefix in await kernel.claim_lanes():
            await kernel.acknowledge(prefix)
        await kernel.say(talks, 1)
        await kernel.complete(ends)
        prefixes, next_due_s = await lanes.claim(
            kernel.session, Lane.LIFECYCLE, receivers=[""], token=7, limit=10, prefix=8, lease_s=30.0, most_rank=2,
            oldest=False,
        )  # fmt: skip
        assert [prefix.run_id for prefix in prefixes] == [ends.run_id]
        assert next_due_s is not None
        assert next_due_s <= 0  # and it says that there is more
        (rest,) = await kernel.claim_lanes()
        assert rest.run_id == talks.run_id


# --- a terminal with a receiver of its own (M-7, G-12, G-13, G-20) ---------------------------------------------


async def test_a_terminal_that_goes_elsewhere_travels_alone(dsn: str, schema: str) -> None:
    """M-6, M-8, M-9."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started(receiver=BILLING)
        await terminal_to(kernel, item.run_id, LATER)
        await kernel.say(item, 1)
        await kernel.complete(item)
        assert await kernel.claim_lanes(receivers=[LATER]) == []
        (prefix,) = await kernel.claim_lanes(receivers=[BILLING], prefix=8)
        assert list(prefix.types) == ["run.created", "run.started", "run.progress"]
        answer = await kernel.acknowledge(prefix, prefix=8)
        assert (answer.answer, answer.successor) == ("acked", None)  # the old receiver's turn ends here
        assert (await kernel.acknowledge(prefix, prefix=8)).successor is None
        assert await row(kernel, item.run_id, "receiver, lane_receiver, lane_expires_at") == (
            BILLING,
            LATER,
            None,
        )
        assert await kernel.claim_lanes(receivers=[BILLING]) == []
        (end,) = await kernel.claim_lanes(receivers=[LATER])
        assert list(end.types) == ["run.completed"]
        assert (prefix.passed, end.passed) == (0, 3)  # this receiver has nothing of what came before
        held = await lanes.held(kernel.session, Lane.LIFECYCLE, [(end.run_id, end.token)])
        assert [one.passed for one in held] == [3]
        assert (await kernel.acknowledge(end, prefix=8)).answer == "acked"
        await check_invariants(kernel.session)


@pytest.mark.parametrize("ends", ["idle", "in flight", "cancelled", "expired"])
async def test_whoever_ends_the_run_and_whenever_the_terminal_goes_where_it_must(
    dsn: str, schema: str, ends: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await kernel.started(receiver=BILLING)
        await terminal_to(kernel, item.run_id, LATER)
        (prefix,) = await kernel.claim_lanes(receivers=[BILLING], lease_s=1000.0)
        if ends != "in flight":
            await kernel.acknowledge(prefix)
        if ends == "cancelled":
            await kernel.cancel(item.run_id)
        elif ends == "expired":
            await kernel.execute("UPDATE @schema@.plays SET crash_cap = 0")
            await kernel.advance(61.0)
            assert (await kernel.expire(crash_cap=0)).failed == 1
        else:
            await kernel.complete(item)
        if ends == "in flight":
            assert await kernel.claim_lanes(receivers=[LATER]) == []
            assert (await kernel.acknowledge(prefix, prefix=8)).successor is None
        assert await kernel.claim_lanes(receivers=[BILLING, ""]) == []
        (end,) = await kernel.claim_lanes(receivers=[LATER])
        assert len(end.types) == 1
        await check_invariants(kernel.session)


async def test_a_terminal_for_the_same_receiver_travels_with_the_others(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started(receiver=BILLING)
        await terminal_to(kernel, item.run_id, BILLING)
        await kernel.complete(item)
        (prefix,) = await kernel.claim_lanes(receivers=[BILLING])
        assert prefix.types[-1] == "run.completed"


async def test_a_frozen_prefix_stays_with_its_receiver(dsn: str, schema: str) -> None:
    """What was out keeps members and receiver, although the terminal's own was set meanwhile (M-10)."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started(receiver=BILLING)
        (prefix,) = await kernel.claim_lanes(receivers=[BILLING])
        await kernel.hand_back(prefix)
        await terminal_to(kernel, item.run_id, LATER)
        await kernel.complete(item)
        (again,) = await kernel.claim_lanes(receivers=[BILLING])
        assert again.seqs == prefix.seqs
        await kernel.acknowledge(again)
        (end,) = await kernel.claim_lanes(receivers=[LATER])
        assert list(end.seqs) == [3]


async def test_a_turn_inside_the_database_ends_before_a_terminal_that_goes_elsewhere(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await terminal_to(kernel, item.run_id, LATER)
        await kernel.complete(item)
        assert (await kernel.deliver()).lanes == 1
        assert (await kernel.deliver()).lanes == 0
        assert await row(kernel, item.run_id, "acked_seq, lane_receiver") == (2, LATER)
        (end,) = await kernel.claim_lanes(receivers=[LATER])
        assert list(end.types) == ["run.completed"]
        await check_invariants(kernel.session)


# --- facts without effect (F-55 to F-60, D-20) --------------------------------------------------------------


async def caught_up(kernel: Kernel) -> Claimed:
    """A running run whose ledger has everything."""
    item = await kernel.started()
    assert (await kernel.deliver()).lanes == 1
    return item


async def test_leading_facts_without_effect_are_passed_without_a_delivery(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await caught_up(kernel)
        await kernel.append_quiet(item.run_id)
        await kernel.append_quiet(item.run_id, "run.resumed")
        assert await kernel.claim_lanes() == []
        assert await row(kernel, item.run_id, "acked_seq, lane_pending, lane_attempts") == (4, False, 0)
        await kernel.append_quiet(item.run_id)
        await kernel.complete(item)
        (prefix,) = await kernel.claim_lanes()
        assert (list(prefix.types), prefix.passed) == (["run.completed"], 3)
        assert await kernel.apply(prefix)
        assert (await kernel.acknowledge(prefix)).answer == "acked"
        (told,) = await kernel.fetch(
            "SELECT applied_seq, applied_facts, passed_facts, status FROM @schema@.ledger_runs"
        )
        assert tuple(told) == (6, 3, 3, "completed")
        await check_invariants(kernel.session)


async def test_one_that_is_in_a_prefix_already_is_delivered_with_it(dsn: str, schema: str) -> None:
    """F-55: never frozen. The prefix comes back as it was, and the fact changes nothing at the ledger."""
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await caught_up(kernel)
        await kernel.say(item, 1)
        await kernel.append_quiet(item.run_id)
        (prefix,) = await kernel.claim_lanes(prefix=2)
        assert list(prefix.types) == ["run.progress", "run.waiting"]
        await kernel.hand_back(prefix)
        (again,) = await kernel.claim_lanes()
        assert again.seqs == prefix.seqs
        assert await kernel.apply(again)
        assert await kernel.fetchval("SELECT status FROM @schema@.ledger_runs") == "running"
        await kernel.append_quiet(item.run_id, "run.resumed")
        await kernel.say(item, 2)
        answer = await kernel.acknowledge(again, prefix=8)
        assert answer.successor is not None
        # The ledger may lack the one that was passed; the one before it came with its prefix.
        assert (list(answer.successor.seqs), answer.successor.passed) == ([6], 2)
        assert await kernel.acknowledge(again, prefix=8) == attrs_without_lags(answer)
        assert await kernel.apply(answer.successor)
        (account,) = await reconcile.accounts(kernel.session, [item.run_id])
        assert (account.lifecycle, account.lifecycle_applied, account.duplicated) == (4, 4, 0)
        await check_invariants(kernel.session)


def attrs_without_lags(answer: lanes.Acknowledged) -> lanes.Acknowledged:
    return lanes.Acknowledged(answer.answer, answer.successor, [])


async def test_an_acknowledgement_passes_what_follows_and_may_end_the_turn_so(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        (prefix,) = await kernel.claim_lanes()
        await kernel.append_quiet(item.run_id)
        answer = await kernel.acknowledge(prefix, prefix=8)
        assert (answer.answer, answer.successor) == ("acked", None)
        assert len(answer.lags) == 2  # of what was delivered
        assert await row(kernel, item.run_id, "acked_seq, lane_expires_at, frozen_seq") == (3, None, None)


async def test_a_wait_that_people_see_is_not_passed(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await caught_up(kernel)
        await kernel.append_quiet(item.run_id)
        await kernel.append_quiet(item.run_id, "run.resumed", quiet=False)
        await kernel.append_quiet(item.run_id)
        (prefix,) = await kernel.claim_lanes()
        assert (list(prefix.seqs), prefix.passed) == ([4, 5], 1)


async def test_turns_inside_the_database_pass_them_too(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await caught_up(kernel)
        await kernel.append_quiet(item.run_id)
        assert (await kernel.deliver()).lanes == 0
        assert (await row(kernel, item.run_id, "acked_seq, lane_pending"))[1] is False
        await kernel.append_quiet(item.run_id, "run.resumed")
        await kernel.complete(item)
        turn = await kernel.deliver()
        assert (turn.lanes, turn.blocked) == (1, 0)
        (told,) = await kernel.fetch("SELECT applied_seq, passed_facts, status FROM @schema@.ledger_runs")
        assert tuple(told) == (5, 2, "completed")
        await check_invariants(kernel.session)


async def test_a_passed_fact_may_leave_a_terminal_that_goes_elsewhere(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await caught_up(kernel)
        await terminal_to(kernel, item.run_id, LATER)
        await kernel.append_quiet(item.run_id)
        await kernel.complete(item)
        assert await kernel.claim_lanes() == []
        (end,) = await kernel.claim_lanes(receivers=[LATER])
        assert (list(end.types), end.passed) == (["run.completed"], 3)


# --- the first fact, out for delivery at admission -----------------------------------------------------------


async def test_a_run_may_come_in_with_its_first_fact_out_for_delivery(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = kernel.submission(receiver=BILLING, lane_lease_s=5.0, claim=True)
        for _ in range(2):  # also when the first answer was lost
            (answer,) = await kernel.admit([item])
            assert (answer.created, answer.claimed) == (True, True)
        assert await kernel.claim_lanes(receivers=[BILLING]) == []
        (prefix,) = await lanes.held(kernel.session, Lane.LIFECYCLE, [(item.run_id, item.request)])
        assert (list(prefix.types), prefix.attempt, prefix.token) == (["run.created"], 1, item.request)
        payload = json.loads(prefix.payloads[0])
        assert payload["receiver"] == BILLING
        assert "lane_lease_s" not in payload
        assert await lanes.held(kernel.session, Lane.LIFECYCLE, [(item.run_id, 1)]) == []
        assert (await kernel.acknowledge(prefix)).answer == "acked"
        (rest,) = await kernel.claim_lanes(receivers=[BILLING])
        assert list(rest.types) == ["run.started"]
        await check_invariants(kernel.session)


async def test_a_first_fact_that_nobody_carries_is_stranded_for_its_lease_only(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        run_id = await kernel.submit(lane_lease_s=5.0)
        await kernel.advance(4.9)
        assert await kernel.claim_lanes() == []
        await kernel.advance(0.1)
        (prefix,) = await kernel.claim_lanes()
        assert (prefix.run_id, prefix.attempt, list(prefix.seqs)) == (run_id, 2, [1])


async def test_a_delivery_that_its_sender_gives_up_is_not_charged_and_never_thaws(
    dsn: str, schema: str
) -> None:
    """F-87, F-88."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        for _ in range(30):
            (prefix,) = await kernel.claim_lanes(prefix=1)
            assert prefix.attempt <= 2
            await kernel.hand_back(prefix)
        (prefix,) = await kernel.claim_lanes()
        assert await kernel.hand_back(prefix, ending="unsent") == "done"
        await kernel.complete(item)
        (prefix,) = await kernel.claim_lanes()
        assert list(prefix.seqs) == [1]
        await check_invariants(kernel.session)


# --- what operators do -------------------------------------------------------------------------------------


async def blocked(kernel: Kernel, *, lane: Lane = Lane.LIFECYCLE, prefix: int = 2) -> Claimed:
    """A run whose lane is blocked, with more behind the blocked prefix."""
    item = await kernel.started()
    for number in range(1, 5):
        await kernel.say(item, number, lane)
    taken = await kernel.claim_lanes(lane, prefix=prefix)
    (mine,) = [one for one in taken if one.run_id == item.run_id]
    await kernel.hand_back(mine, ending="blocked", reason="we do not take poison")
    return item


async def skip(kernel: Kernel, run_id: str, seq: int, **more: Any) -> tuple[int, int]:
    options: dict[str, Any] = {
        "lane": Lane.LIFECYCLE,
        "because": "it is poison",
        "by": "ada",
        "notify": True,
        **more,
    }
    return await journal.skip_lane(kernel.session, run_id, seq, **options)


@pytest.mark.parametrize("lane", list(Lane))
async def test_a_skip_gives_up_the_blocked_prefix_and_nothing_else(dsn: str, schema: str, lane: Lane) -> None:
    async with open_kernel(dsn, schema) as kernel:
        await kernel.freeze_clock()
        item = await blocked(kernel, lane=lane)
        for _ in range(2):  # asked again after a lost answer
            assert await skip(kernel, item.run_id, 2, lane=lane) == (1, 2)
        (entry,) = await journal.read_journal(kernel.session, run_id=item.run_id, limit=10, before=None)
        assert (entry.verb, entry.lane, entry.first, entry.through) == ("skip", lane, 1, 2)
        assert (entry.because, entry.by) == ("it is poison", "ada")
        (prefix,) = await kernel.claim_lanes(lane)
        assert (prefix.seqs[0], prefix.generation, prefix.attempt) == (3, 1, 1)
        assert await kernel.apply(prefix)  # the ledger knows that this gap is meant
        assert (await kernel.acknowledge(prefix)).answer == "acked"


async def test_a_part_of_the_prefix_may_be_skipped_and_the_rest_is_delivered_anew(
    dsn: str, schema: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await blocked(kernel, prefix=3)
        assert await skip(kernel, item.run_id, 1) == (1, 1)
        (prefix,) = await kernel.claim_lanes(prefix=2)
        assert (list(prefix.seqs), prefix.generation) == ([2, 3], 1)
        await kernel.hand_back(prefix, ending="blocked", reason="again")
        assert await skip(kernel, item.run_id, 2) == (2, 2)
        (prefix,) = await kernel.claim_lanes(prefix=1)
        assert (list(prefix.seqs), prefix.generation) == ([3], 2)
        assert await kernel.apply(prefix)
        (told,) = await kernel.fetch(
            "SELECT applied_seq, applied_facts, passed_facts, play FROM @schema@.ledger_runs"
        )
        assert tuple(told) == (3, 1, 2, "alpha")


async def test_a_ledger_that_had_the_skipped_facts_after_all_goes_on_from_where_it_is(
    dsn: str, schema: str
) -> None:
    """Applied, but every answer was lost: the next prefix overlaps with what the ledger has."""
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.say(item, 1)
        (prefix,) = await kernel.claim_lanes()
        assert await kernel.apply(prefix)
        await kernel.hand_back(prefix, ending="blocked", reason="no answer")
        assert await skip(kernel, item.run_id, 1) == (1, 1)
        await kernel.complete(item)
        turn = await kernel.deliver()
        assert (turn.lanes, turn.blocked) == (1, 0)
        (told,) = await kernel.fetch(
            "SELECT applied_seq, applied_facts, passed_facts, status FROM @schema@.ledger_runs"
        )
        assert tuple(told) == (4, 4, 0, "completed")
        await check_invariants(kernel.session)


async def test_a_gap_that_nobody_meant_blocks_and_a_skip_goes_over_it(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await caught_up(kernel)
        await kernel.execute("TRUNCATE @schema@.ledger_runs")
        await kernel.say(item, 1)
        await kernel.say(item, 2)
        turn = await kernel.deliver()
        assert (turn.lanes, turn.blocked) == (0, 1)
        (state,) = await journal.list_lanes(kernel.session, blocked=True, limit=10, after=None)
        assert (state.first, state.through, state.blocked) == (3, 4, True)
        assert state.reason is not None
        assert "earlier facts" in state.reason
        # Skipping what is blocked does not make up for what the ledger lost before it.
        await skip(kernel, item.run_id, 4)
        await kernel.complete(item)
        assert (await kernel.deliver()).blocked == 1


@pytest.mark.parametrize(
    ("seq", "more", "field", "word"),
    [
        (3, {}, "seq", "1 to 2, not 3"),
        (0, {}, "seq", "1 to 2, not 0"),
        (-1, {}, "seq", "1 to 2"),
        (2, {"because": None}, "because", "say why"),
        (2, {"because": ""}, "because", "1 to 2000"),
        (2, {"lane": Lane.OBSERVABILITY}, "run_id", "no such lane"),
    ],
)
async def test_a_skip_that_may_not_be_is_refused_by_name(
    dsn: str, schema: str, seq: int, more: dict[str, Any], field: str, word: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await blocked(kernel)
        with pytest.raises(InputRefused, match=word) as caught:
            await skip(kernel, item.run_id, seq, **more)
        assert caught.value.field == field
        assert await row(kernel, item.run_id, "acked_seq, frozen_seq, lane_skips") == (0, 2, 0)
        assert await journal.read_journal(kernel.session, run_id=None, limit=10, before=None) == []


async def test_only_a_blocked_lane_can_be_skipped_and_only_what_was_blocked(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        with pytest.raises(InputRefused, match="is not blocked"):
            await skip(kernel, item.run_id, 1)
        with pytest.raises(InputRefused, match="does not exist"):
            await skip(kernel, "nobody", 1)
        poison = await blocked(kernel)
        await skip(kernel, poison.run_id, 2)
        with pytest.raises(InputRefused, match="is not blocked"):
            await skip(kernel, poison.run_id, 3)
        with pytest.raises(InputRefused, match="is not blocked"):
            await skip(kernel, poison.run_id, 1)  # not what was skipped


async def test_a_terminal_may_be_skipped_and_nothing_comes_after_it(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.complete(item)
        (prefix,) = await kernel.claim_lanes()
        await kernel.hand_back(prefix, ending="blocked", reason="poison")
        assert await skip(kernel, item.run_id, 3) == (1, 3)
        assert await row(kernel, item.run_id, "acked_seq, last_seq, lane_pending") == (3, 3, False)
        assert await kernel.fact_types(item.run_id) == ["run.created", "run.started", "run.completed"]
        assert await kernel.claim_lanes() == []


async def test_a_stale_sender_cannot_undo_a_skip(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        await kernel.say(item, 1)
        (prefix,) = await kernel.claim_lanes(prefix=2)
        await kernel.hand_back(prefix, ending="blocked", reason="poison")
        await skip(kernel, item.run_id, 1)
        assert (await kernel.acknowledge(prefix, prefix=8)).answer == "lost"
        assert await kernel.hand_back(prefix) == "done"
        assert await row(kernel, item.run_id, "acked_seq, frozen_seq, lane_error") == (1, None, None)


async def redeliver(kernel: Kernel, run_id: str, seq: int, **more: Any) -> tuple[int, int]:
    options: dict[str, Any] = {"lane": Lane.LIFECYCLE, "because": "restored", "by": "ada", "notify": False}
    return await journal.redeliver_lane(kernel.session, run_id, seq, **(options | more))


async def test_what_the_ledger_has_lost_is_delivered_again(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await caught_up(kernel)
        ledger = "SELECT applied_seq, applied_facts, status FROM @schema@.ledger_runs"
        (before,) = await kernel.fetch(ledger)
        await kernel.execute("TRUNCATE @schema@.ledger_runs")
        await kernel.say(item, 1)
        assert (await kernel.deliver()).blocked == 1
        assert await redeliver(kernel, item.run_id, 1) == (1, 2)
        assert await redeliver(kernel, item.run_id, 1) == (1, 0)  # asked again: it is on its way
        turn = await kernel.deliver()
        assert (turn.lanes, turn.blocked) == (1, 0)
        (after,) = await kernel.fetch(ledger)
        assert tuple(after) == (before["applied_seq"] + 1, before["applied_facts"] + 1, before["status"])
        (entry,) = await journal.read_journal(kernel.session, run_id=item.run_id, limit=10, before=None)
        assert (entry.verb, entry.first, entry.through, entry.by) == ("redeliver", 1, 2, "ada")


async def test_a_delivery_that_is_out_cannot_undo_a_redelivery(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await caught_up(kernel)
        await kernel.say(item, 1)
        (out,) = await kernel.claim_lanes()
        assert await redeliver(kernel, item.run_id, 2) == (2, 2)
        assert (await kernel.acknowledge(out, prefix=8)).answer == "lost"
        (prefix,) = await kernel.claim_lanes()
        assert (list(prefix.seqs), prefix.attempt) == ([2, 3], 1)
        assert await kernel.apply(prefix)  # a ledger that has a part of it takes the rest
        assert (await kernel.acknowledge(prefix, prefix=8)).answer != "lost"
        assert await row(kernel, item.run_id, "acked_seq, lane_pending") == (3, False)


@pytest.mark.parametrize(
    ("seq", "more", "field", "word"),
    [
        (4, {}, "seq", "facts from 3 on"),
        (0, {}, "seq", "from 1"),
        (1, {"because": None}, "because", "say why"),
        (1, {"lane": Lane.OBSERVABILITY}, "run_id", "no such lane"),
    ],
)
async def test_a_redelivery_that_may_not_be_is_refused_by_name(
    dsn: str, schema: str, seq: int, more: dict[str, Any], field: str, word: str
) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await caught_up(kernel)
        with pytest.raises(InputRefused, match=word) as caught:
            await redeliver(kernel, item.run_id, seq, **more)
        assert caught.value.field == field
        assert await row(kernel, item.run_id, "acked_seq, lane_pending") == (2, False)


async def test_a_retry_is_in_the_journal(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        item = await blocked(kernel)
        options = {"because": "fixed", "by": "ada", "notify": False}
        assert await journal.retry_lane(kernel.session, item.run_id, **options) is True  # type: ignore[arg-type]
        assert await journal.retry_lane(kernel.session, item.run_id, **options) is False  # type: ignore[arg-type]
        (entry,) = await journal.read_journal(kernel.session, run_id=None, limit=10, before=None)
        assert (entry.verb, entry.first, entry.through, entry.because) == ("retry", 1, 2, "fixed")
        (prefix,) = await kernel.claim_lanes()
        assert (list(prefix.seqs), prefix.generation, prefix.attempt) == ([1, 2], 0, 2)


async def test_a_row_that_somebody_holds_is_waited_for_shortly_and_named(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as other:
        item = await blocked(kernel)
        await other.begin()
        await other.execute(
            kernel.render("UPDATE @schema@.runs SET priority = 0 WHERE run_id = $1"), item.run_id
        )
        with pytest.raises(LockTimedOut):
            await skip(kernel, item.run_id, 2)
        await other.rollback()
        assert await skip(kernel, item.run_id, 2) == (1, 2)


@pytest.mark.parametrize("lane", list(Lane))
async def test_why_the_latest_delivery_failed_stands_until_one_succeeds(
    dsn: str, schema: str, lane: Lane
) -> None:
    async def reason() -> str | None:
        found = await journal.list_lanes(kernel.session, blocked=False, limit=10, after=None)
        (told,) = {one.reason for one in found if one.lane is lane}
        return told

    async with open_kernel(dsn, schema) as kernel:
        item = await kernel.started()
        for number in range(1, 5):
            await kernel.say(item, number, lane)
        for ending, said, kept in (
            ("failed", "no signature", "no signature"),
            ("unsent", None, "no signature"),
            ("given_up", None, "no signature"),
            ("given_up", "not your turn", "not your turn"),
            ("blocked", "poison", "poison"),
        ):
            (prefix,) = await kernel.claim_lanes(lane, prefix=1)
            await kernel.hand_back(prefix, ending=ending, reason=said)
            assert await reason() == kept
            await check_invariants(kernel.session)
        assert await journal.retry_lane(kernel.session, item.run_id, because=None, by=None, notify=False)
        assert await reason() == "poison"
        (prefix,) = await kernel.claim_lanes(lane, prefix=1)
        await kernel.acknowledge(prefix)
        assert await reason() is None
        (prefix,) = await kernel.claim_lanes(lane, prefix=1)
        await kernel.hand_back(prefix, ending="failed", reason="no signature")
        await lanes.deliver(kernel.session, lane, receivers=[""], limit=10, prefix=1, oldest=False)
        assert await kernel.fetchval("SELECT bool_and(lane_failure IS NULL) FROM @schema@.runs")
        assert await kernel.fetchval("SELECT bool_and(lane_failure IS NULL) FROM @schema@.lanes") is not False


async def test_lanes_are_listed_blocked_ones_first_in_pages(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        bad = [(await blocked(kernel)).run_id for _ in range(3)]
        logs = (await blocked(kernel, lane=Lane.OBSERVABILITY)).run_id
        good = [await kernel.submit(receiver=BILLING) for _ in range(3)]
        done = await kernel.started()
        whole = await journal.list_lanes(kernel.session, blocked=False, limit=100, after=None)
        assert [one.blocked for one in whole] == [True] * 4 + [False] * (len(whole) - 4)
        assert {one.run_id for one in whole[:4]} == {*bad, logs}
        assert {*good, done.run_id, logs} == {one.run_id for one in whole[4:]}
        assert {one.receiver for one in whole if one.run_id in good} == {BILLING}
        first = next(one for one in whole if one.run_id == bad[0])
        assert (first.rank, first.attempts, first.first, first.through, first.last) == (0, 1, 1, 2, 6)
        assert first.reason == "we do not take poison"
        assert first.age_s is not None
        assert first.age_s >= 0
        assert first.due_in_s is None
        only = await journal.list_lanes(kernel.session, blocked=True, limit=100, after=None)
        assert only == [one for one in whole if one.blocked] or [o.run_id for o in only] == [
            o.run_id for o in whole[:4]
        ]
        paged: list[tuple[str, Lane]] = []
        after: tuple[bool, str, Lane] | None = None
        while page := await journal.list_lanes(kernel.session, blocked=False, limit=3, after=after):
            paged += [(one.run_id, one.lane) for one in page]
            after = (page[-1].blocked, page[-1].run_id, page[-1].lane)
        assert paged == [(one.run_id, one.lane) for one in whole]


async def test_the_journal_is_read_in_pages_newest_first(dsn: str, schema: str) -> None:
    async with open_kernel(dsn, schema) as kernel:
        runs = [(await blocked(kernel)).run_id for _ in range(3)]
        for run_id in runs:
            await skip(kernel, run_id, 2)
        page = await journal.read_journal(kernel.session, run_id=None, limit=2, before=None)
        assert [entry.run_id for entry in page] == [runs[2], runs[1]]
        (rest,) = await journal.read_journal(kernel.session, run_id=None, limit=2, before=page[-1].id)
        assert rest.run_id == runs[0]
