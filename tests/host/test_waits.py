"""Plays that wait: for events before and after they park, with deadlines, for approvals, and for several at once."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
import trio

from runtime import (
    Approval,
    Context,
    IdempotencyConflict,
    InputRefused,
    PayloadRefused,
    RunCancelled,
    RunFailed,
    RunNotFound,
    Runtime,
    SyncContext,
    WaitTimedOut,
    play,
)
from tests.support.hosts import Hosts, eventually, until


async def types(rt: Runtime, run_id: str) -> list[str]:
    return [fact.type for fact in await rt.facts(run_id)]


NEVER_PARKED = ["run.created", "run.started", "run.completed"]


@play("asks")
async def asks(ctx: Context, limit_s: Any) -> Any:
    return [await ctx.wait_event("answer", timeout=limit_s), ctx.attempt]


# --- events ------------------------------------------------------------------------------------------------


@pytest.mark.modes
async def test_an_event_that_comes_before_its_wait_is_kept_and_costs_no_park(hosts: Hosts) -> None:
    async with hosts.open(asks) as rt:
        handle = await rt.submit(asks, delay=0.3)
        outcome = await rt.send_event(handle.run_id, "answer", {"n": 1})
        assert (outcome.accepted, outcome.status) == (True, "kept")
        assert await handle.result(timeout=10) == [{"n": 1}, 1]
        assert await types(rt, handle.run_id) == NEVER_PARKED
        (event,) = await rt.events(handle.run_id)
        assert (event.name, event.payload, event.event_id, event.wait_key) == (
            "answer", {"n": 1}, outcome.event_id, "#1",
        )  # fmt: skip
        await hosts.check([handle.run_id])


@pytest.mark.modes
async def test_an_event_wakes_a_parked_run(hosts: Hosts) -> None:
    async with hosts.open(asks) as rt:
        handle = await rt.submit(asks)
        waiting = await until(rt, handle.run_id, "waiting")
        (wait,) = waiting.waits
        assert (wait.kind, wait.key, wait.name, wait.until) == ("event", "#1", "answer", None)
        assert (waiting.wait_kind, waiting.wait_key, waiting.wait_until) == ("event", "#1", None)
        assert (waiting.due_at, rt.readiness()["slots"]["used"]) == (None, 0)
        assert (await rt.send_event(handle.run_id, "other", 0)).status == "kept"
        assert (await rt.send_event(handle.run_id, "answer", [1])).status == "delivered"
        assert await handle.result(timeout=10) == [[1], 2]
        waits = [fact.payload for fact in await rt.facts(handle.run_id) if fact.type == "run.waiting"]
        assert waits == [{"kind": "event", "key": "#1", "name": "answer"}]
        await hosts.check([handle.run_id])


async def test_an_event_that_comes_soon_is_taken_in_memory(hosts: Hosts) -> None:
    async with hosts.open(asks, park_after_s=5.0) as rt:
        handle = await rt.submit(asks)
        await until(rt, handle.run_id, "running")
        await trio.sleep(0.1)  # it stands at its wait by now; if not, the event is only kept
        assert (await rt.send_event(handle.run_id, "answer", 1)).accepted
        assert await handle.result(timeout=3) == [1, 1]
        assert await types(rt, handle.run_id) == NEVER_PARKED


@pytest.mark.modes
async def test_an_event_sent_at_another_host_wakes_the_run_here(hosts: Hosts) -> None:
    async with hosts.open(asks, park_after_s=0.0) as rt, hosts.open() as client:
        handle = await rt.submit(asks)
        await until(rt, handle.run_id, "waiting")
        assert (await client.send_event(handle.run_id, "answer", 1)).status == "delivered"
        assert await handle.result(timeout=10) == [1, 2]
    async with hosts.open(asks, park_after_s=30.0) as rt, hosts.open() as client:
        handle = await rt.submit(asks)
        await until(rt, handle.run_id, "running")
        await client.send_event(handle.run_id, "answer", 1)
        assert await handle.result(timeout=10) == [1, 1]


async def test_an_event_from_sql_wakes_the_run(hosts: Hosts) -> None:
    async with hosts.open(asks) as rt:
        handle = await rt.submit(asks)
        await until(rt, handle.run_id, "waiting")
        answer = await hosts.value(
            f"""SELECT @.send_event('{handle.run_id}', '{{"by": "sql"}}', '{{"name": "answer"}}')"""
        )
        assert answer == "delivered"
        assert await handle.result(timeout=10) == [{"by": "sql"}, 2]


async def test_an_event_counts_once_by_its_id(hosts: Hosts) -> None:
    @play("twice")
    async def twice(ctx: Context) -> list[Any]:
        return [await ctx.wait_event("e"), await ctx.wait_event("e")]

    async with hosts.open(twice) as rt:
        handle = await rt.submit(twice)
        first = await rt.send_event(handle.run_id, "e", 1, event_id="one")
        assert first.event_id == "one"
        again = await rt.send_event(handle.run_id, "e", 1, event_id="one")
        assert (again.accepted, again.status) == (True, "duplicate")
        with pytest.raises(IdempotencyConflict, match="'one'"):
            await rt.send_event(handle.run_id, "e", 2, event_id="one")
        await rt.send_event(handle.run_id, "e", 2, event_id="two")
        assert await handle.result(timeout=10) == [1, 2]
        ended = await rt.send_event(handle.run_id, "e", 3)
        assert (ended.accepted, ended.status) == (False, "ended")
        with pytest.raises(RunNotFound):
            await rt.send_event("nobody", "e")
        with pytest.raises(RunNotFound):
            await rt.events("nobody")


async def test_many_events_reach_many_runs(hosts: Hosts) -> None:
    @play("collects")
    async def collects(ctx: Context, count: int) -> list[Any]:
        return [await ctx.wait_event("e") for _ in range(count)]

    async with hosts.open(collects, slots=50) as rt, hosts.open(collects) as other:
        handles = await rt.submit_many([(collects, 4)] * 25)

        async def feed(run_id: str, sender: Runtime) -> None:
            for number in range(4):
                await sender.send_event(run_id, "e", number, event_id=str(number))
                await trio.sleep(0.03)

        async with trio.open_nursery() as nursery:
            for index, handle in enumerate(handles):
                nursery.start_soon(feed, handle.run_id, (rt, other)[index % 2])
        for handle in handles:
            assert await handle.result(timeout=20) == [0, 1, 2, 3]
        assert await hosts.value("SELECT count(*) FROM @.wakes") == 0
        await hosts.check([handle.run_id for handle in handles])


async def test_a_large_payload_survives_replays(hosts: Hosts) -> None:
    @play("large")
    async def large(ctx: Context) -> list[int]:
        first = await ctx.wait_event("e")
        second = await ctx.wait_event("e")
        await ctx.sleep(0.3)
        return [len(first), len(second)]

    async with hosts.open(large) as rt:
        handle = await rt.submit(large)
        text = "".join(chr(33 + (n * n) % 90) + str(n) for n in range(30_000))
        await rt.send_event(handle.run_id, "e", text)
        await rt.send_event(handle.run_id, "e", text[1:])
        assert await handle.result(timeout=10) == [len(text), len(text) - 1]


# --- deadlines ---------------------------------------------------------------------------------------------


@pytest.mark.modes
@pytest.mark.parametrize("park_after_s", [0.05, 5.0])
async def test_a_wait_is_given_up_after_its_timeout_for_good(hosts: Hosts, park_after_s: float) -> None:
    @play("patient")
    async def patient(ctx: Context) -> Any:
        try:
            await ctx.wait_event("answer", timeout=0.4)
        except WaitTimedOut as exc:
            said = str(exc)
        await ctx.wait_event("go")
        try:
            return await ctx.wait_event("answer", timeout=0.0, key="now")
        except WaitTimedOut:
            return [said, "and not now"]

    async with hosts.open(patient, park_after_s=park_after_s) as rt:
        handle = await rt.submit(patient)
        await trio.sleep(0.8)
        status = await handle.status()
        assert [wait.name for wait in status.waits] == (["go"] if park_after_s < 1 else [])
        # Too late for the first wait, whatever comes: on the next attempt, too.
        await rt.send_event(handle.run_id, "go")
        assert await handle.result(timeout=10) == [
            "event 'answer' (wait '#1') did not come in time", "and not now",
        ]  # fmt: skip
        await hosts.check([handle.run_id])


async def test_a_timeout_that_nobody_catches_fails_the_run(hosts: Hosts) -> None:
    async with hosts.open(asks) as rt:
        handle = await rt.submit(asks, 0.1)
        with pytest.raises(RunFailed, match="WaitTimedOut: event 'answer'"):
            await handle.result(timeout=10)


async def test_sleeping_until_a_moment_of_the_database_clock(hosts: Hosts) -> None:
    @play("until")
    async def sleeps(ctx: Context, moment: str) -> int:
        await ctx.sleep_until(datetime(2001, 1, 1, tzinfo=UTC))  # past: passes at once
        await ctx.sleep_until(datetime.fromisoformat(moment))
        return ctx.attempt

    async with hosts.open(sleeps) as rt:
        moment = datetime.now(timezone(timedelta(hours=5))) + timedelta(seconds=0.8)
        handle = await rt.submit(sleeps, moment.isoformat())
        waiting = await until(rt, handle.run_id, "waiting")
        assert waiting.wait_until == moment
        assert await handle.result(timeout=10) == 2
        finished_at = (await handle.status()).finished_at
        assert finished_at is not None
        assert moment <= finished_at < moment + timedelta(seconds=2)


# --- approvals ---------------------------------------------------------------------------------------------


async def test_an_approval_waits_for_a_yes_or_no(hosts: Hosts) -> None:
    seen: list[Approval] = []

    @play("deploys")
    async def deploys(ctx: Context) -> str:
        approval = await ctx.wait_approval("deploy", timeout=600)
        seen.append(approval)
        return f"{approval.approved} by {approval.by}: {approval.comment}"

    async with hosts.open(deploys) as rt:
        handle = await rt.submit(deploys)
        (wait,) = (await until(rt, handle.run_id, "waiting")).waits
        assert (wait.kind, wait.name) == ("approval", "deploy")
        assert wait.until is not None
        with pytest.raises(InputRefused, match=r"payload: run .* waits for an approval 'deploy'"):
            await rt.send_event(handle.run_id, "deploy", {"by": "nobody in particular"})
        await rt.send_event(
            handle.run_id, "deploy", {"approved": False, "by": "ada", "comment": "not today", "ticket": 7}
        )
        assert await handle.result(timeout=10) == "False by ada: not today"
        assert seen[-1].payload["ticket"] == 7
        assert [event.wait_key for event in await rt.events(handle.run_id)] == ["#1"]


# --- several at once ---------------------------------------------------------------------------------------


@pytest.mark.modes
async def test_the_first_of_several_waits_wins_and_the_others_take_nothing(hosts: Hosts) -> None:
    @play("race")
    async def race(ctx: Context) -> list[Any]:
        won: list[Any] = []

        async with trio.open_nursery() as nursery:

            async def wait(name: str) -> None:
                won.append(await ctx.wait_event(name, key=name))
                nursery.cancel_scope.cancel()

            for name in ("a", "b", "c"):
                nursery.start_soon(wait, name)
        await ctx.sleep(0.3, key="in between")
        return [*won, await ctx.wait_event("a", key="late")]

    async with hosts.open(race) as rt:
        handle = await rt.submit(race)
        assert len((await until(rt, handle.run_id, "waiting")).waits) == 3
        await rt.send_event(handle.run_id, "b", "B")

        async def sleeping() -> bool:
            return (await handle.status()).wait_kind == "sleep"

        await eventually(sleeping)
        assert (await rt.send_event(handle.run_id, "a", "A")).status == "kept"
        assert await handle.result(timeout=10) == ["B", "A"]
        await hosts.check([handle.run_id])


async def test_branches_wait_side_by_side_and_each_goes_on_alone(hosts: Hosts) -> None:
    @play("branches")
    async def branches(ctx: Context) -> dict[str, Any]:
        said: dict[str, Any] = {}

        async def branch(name: str) -> None:
            first = await ctx.wait_event(f"{name}1", key=f"{name}1")
            await trio.sleep(0.1)  # work of its own, which the other branch's parking must not undo for ever
            said[name] = [first, await ctx.wait_event(f"{name}2", key=f"{name}2")]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(branch, "a")
            nursery.start_soon(branch, "b")
        return said

    async with hosts.open(branches) as rt:
        handle = await rt.submit(branches)
        for number, name in enumerate(("a1", "b1", "b2", "a2")):
            wanted = name

            async def stands() -> bool:
                return wanted in {wait.name for wait in (await handle.status()).waits}  # noqa: B023

            await eventually(stands)
            await rt.send_event(handle.run_id, name, number)
        assert await handle.result(timeout=10) == {"a": [0, 3], "b": [1, 2]}
        await hosts.check([handle.run_id])


async def test_a_sleep_in_memory_beside_a_long_wait_is_not_undone_by_parking(hosts: Hosts) -> None:
    @play("both")
    async def both(ctx: Context) -> int:
        async with trio.open_nursery() as nursery:

            async def short() -> None:
                await ctx.sleep(0.15, key="short")
                nursery.cancel_scope.cancel()

            async def long() -> None:
                await ctx.sleep(3600, key="long")

            nursery.start_soon(short)
            nursery.start_soon(long)
        return ctx.attempt

    async with hosts.open(both) as rt:
        assert await (await rt.submit(both)).result(timeout=5) == 1


async def test_parking_on_an_event_runs_finally_and_cannot_be_swallowed(hosts: Hosts) -> None:
    said: list[str] = []

    @play("guards")
    async def guards(ctx: Context) -> Any:
        try:
            return await ctx.wait_event("e")
        except Exception:
            said.append("swallowed")
            return "swallowed"
        finally:
            said.append("finally")
            if len(said) == 1:
                try:
                    await ctx.wait_event("late", key="late")
                except InputRefused as exc:
                    said.append(exc.reason)

    async with hosts.open(guards) as rt:
        handle = await rt.submit(guards)
        await until(rt, handle.run_id, "waiting")
        await rt.send_event(handle.run_id, "e", 5)
        assert await handle.result(timeout=10) == 5
        assert said == ["finally", "the run is parking: its cleanup can write nothing more", "finally"]


# --- threads, and ends -------------------------------------------------------------------------------------


async def test_a_thread_waits_for_events(hosts: Hosts) -> None:
    said: list[Any] = []

    @play("plain")
    def plain(ctx: SyncContext) -> Any:
        try:
            first = ctx.wait_event("e")
            with pytest.raises(WaitTimedOut):
                ctx.wait_event("f", timeout=0)
            ctx.sleep_until(datetime(2001, 1, 1, tzinfo=UTC))
            return [first, ctx.wait_approval().approved, ctx.attempt]
        finally:
            said.append("finally")

    async with hosts.open(plain) as rt:
        handle = await rt.submit(plain)
        await until(rt, handle.run_id, "waiting")
        await rt.send_event(handle.run_id, "e", 5)
        await eventually_waits(rt, handle.run_id, "approval")
        await rt.send_event(handle.run_id, "approval", {"approved": True})
        assert await handle.result(timeout=10) == [5, True, 3]
        assert said == ["finally"] * 3


async def eventually_waits(rt: Runtime, run_id: str, kind: str) -> None:
    async def stands() -> bool:
        return (await rt.status(run_id)).wait_kind == kind

    await eventually(stands)


async def test_a_thread_that_waits_in_memory_hears_of_its_cancellation(hosts: Hosts) -> None:
    heard: list[BaseException] = []

    @play("plain")
    def plain(ctx: SyncContext) -> None:
        try:
            ctx.wait_event("e")
        except BaseException as exc:
            heard.append(exc)
            raise

    async with hosts.open(plain, park_after_s=60.0) as rt:
        handle = await rt.submit(plain)
        await until(rt, handle.run_id, "running")
        await trio.sleep(0.1)
        assert (await rt.cancel(handle.run_id)).won

        async def told() -> bool:
            return bool(heard)

        await eventually(told, within_s=5.0)
        assert isinstance(heard[0], RunCancelled)


@pytest.mark.modes
async def test_a_host_stops_while_waits_are_held_in_memory(hosts: Hosts) -> None:
    async with hosts.open(asks, park_after_s=60.0) as rt:
        handle = await rt.submit(asks)
        await until(rt, handle.run_id, "running")
        await trio.sleep(0.05)
    assert await hosts.leases() == 0
    async with hosts.open(asks) as rt:
        await rt.send_event(handle.run_id, "answer", "later")
        output, _ = await rt.handle(handle.run_id).result(timeout=10)
        assert output == "later"
        await hosts.check([handle.run_id])


async def test_waits_outlive_their_actors_connection(hosts: Hosts) -> None:
    async with hosts.open(asks, park_after_s=60.0) as rt:
        handle = await rt.submit(asks)
        await until(rt, handle.run_id, "running")
        await trio.sleep(0.1)
        (pid,) = await hosts.backends("waits")
        await hosts.ask(f"SELECT pg_terminate_backend({pid})")
        await rt.send_event(handle.run_id, "answer", 1)
        assert await handle.result(timeout=10) == [1, 1]


# --- bad input ---------------------------------------------------------------------------------------------

AWARE = datetime(2040, 1, 1, tzinfo=UTC)
BAD_CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("sleep_until", (datetime(2040, 1, 1),), {}, "moment: must be timezone-aware"),
    ("sleep_until", ("2040-01-01",), {}, "moment: must be a datetime"),
    ("sleep_until", (datetime.max.replace(tzinfo=timezone(timedelta(hours=-5))),), {}, "moment: is outside"),
    ("sleep_until", (AWARE,), {"key": "#1"}, "key: must be"),
    ("wait_event", (5,), {}, "name: must be str"),
    ("wait_event", ("",), {}, "name: must have 1 to 255 characters"),
    ("wait_event", ("x" * 256,), {}, "name: must have 1 to 255 characters"),
    ("wait_event", ("a\x00",), {}, "name: must not hold a NUL"),
    ("wait_event", ("e",), {"timeout": -1}, "timeout: must be from 0"),
    ("wait_event", ("e",), {"timeout": float("nan")}, "timeout: must be from 0"),
    ("wait_event", ("e",), {"timeout": "1"}, "timeout: must be a number"),
    ("wait_event", ("e",), {"key": ""}, "key: must be"),
    ("wait_approval", ("",), {}, "name: must have 1 to 255 characters"),
    ("wait_approval", (), {"timeout": float("inf")}, "timeout: must be from 0"),
]


async def test_bad_waits_are_refused_by_name(hosts: Hosts) -> None:
    @play("bad")
    async def bad(ctx: Context) -> list[str]:
        said = []
        for verb, arguments, keywords, _ in BAD_CALLS:
            with pytest.raises(InputRefused) as caught:
                await getattr(ctx, verb)(*arguments, **keywords)
            said.append(str(caught.value))
        return said

    async with hosts.open(bad) as rt:
        said = await (await rt.submit(bad)).result(timeout=10)
        for message, (*_, wanted) in zip(said, BAD_CALLS, strict=True):
            assert message.startswith(wanted)


async def test_bad_events_are_refused_by_name(hosts: Hosts) -> None:
    async with hosts.open() as rt:
        for arguments, wanted in [
            (("bad id!", "e"), "run_id"),
            (("r", ""), "name"),
            (("r", "x" * 256), "name"),
            (("r", None), "name"),
            (("r", "\ud800"), "name"),
        ]:
            with pytest.raises(InputRefused) as caught:
                await rt.send_event(*arguments)  # type: ignore[arg-type]
            assert caught.value.field == wanted
        with pytest.raises(InputRefused, match="event_id"):
            await rt.send_event("r", "e", event_id="")
        with pytest.raises(PayloadRefused, match="payload"):
            await rt.send_event("r", "e", float("nan"))
        with pytest.raises(PayloadRefused, match="payload"):
            await rt.send_event("r", "e", "x" * 2_000_000)
        with pytest.raises(RunNotFound, match="nobody"):
            await rt.send_event("nobody", "e")


async def test_a_key_that_named_another_wait_is_refused_on_replay(hosts: Hosts) -> None:
    attempts: list[int] = []

    @play("changes")
    async def changes(ctx: Context) -> Any:
        attempts.append(ctx.attempt)
        if ctx.attempt == 1:
            await ctx.sleep(0.3, key="one")
        return await ctx.wait_event("e", key="one")

    async with hosts.open(changes) as rt:
        handle = await rt.submit(changes)
        with pytest.raises(RunFailed, match="'one' is a wait for a sleep in this run, not for event 'e'"):
            await handle.result(timeout=10)


# --- failing what waits ------------------------------------------------------------------------------------


@pytest.mark.modes
async def test_a_waiting_run_is_failed_without_waking(hosts: Hosts) -> None:
    begun: list[int] = []

    @play("waits")
    async def waits(ctx: Context) -> None:
        begun.append(ctx.attempt)
        await ctx.wait_approval()

    async with hosts.open(waits) as rt:
        handle = await rt.submit(waits)
        assert (await rt.fail(handle.run_id, "too early")).outcome in ("not_applicable", "failed")
        handle = await rt.submit(waits)
        await until(rt, handle.run_id, "waiting")
        begun.clear()
        outcome = await rt.fail(handle.run_id, "nobody will answer", by="ada")
        assert (outcome.won, outcome.outcome, outcome.status) == (True, "failed", "failed")
        with pytest.raises(RunFailed, match="FailedWhileWaiting: nobody will answer"):
            await handle.result(timeout=5)
        again = await rt.fail(handle.run_id, "nobody will answer")
        assert (again.won, again.outcome, again.status) == (False, "not_applicable", "failed")
        assert begun == []
        with pytest.raises(RunNotFound):
            await rt.fail("nobody", "why")
        for reason in ("", "x" * 2001, "a\x00"):
            with pytest.raises(InputRefused, match="reason"):
                await rt.fail(handle.run_id, reason)
        await hosts.check([handle.run_id])


# --- cancellation from elsewhere ---------------------------------------------------------------------------


async def test_a_cancellation_from_another_host_is_no_lost_lease(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    """O-1."""
    heard: list[str] = []

    @play("endless")
    async def endless(ctx: Context) -> None:
        try:
            await trio.sleep_forever()
        finally:
            try:
                ctx.log("too late")
            except RunCancelled as exc:
                heard.append(str(exc))

    async with hosts.open(endless) as rt, hosts.open() as other:
        handle = await rt.submit(endless)
        await until(rt, handle.run_id, "running")
        assert (await other.cancel(handle.run_id)).won

        async def told() -> bool:
            return bool(heard)

        await eventually(told)
        assert heard == [f"run {handle.run_id} was cancelled"]
        assert "lease_lost" not in caplog.text
