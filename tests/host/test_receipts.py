"""Steps of plays: what runs once, what later attempts get, how failures are recorded, and what never is."""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio
import trio.lowlevel

from runtime import (
    Context,
    DependencyUnavailable,
    Fatal,
    InputRefused,
    PayloadRefused,
    RunFailed,
    Runtime,
    StepConflict,
    StepFailed,
    StepTimedOut,
    SyncContext,
    play,
)
from runtime import steps as steps_of_plays
from sql.errors import SerializationLost
from tests.support.callers import open_caller
from tests.support.hosts import Hosts, eventually, host_process, until


@attrs.define
class Tally:
    """How often each thing happened, from any thread."""

    calls: dict[Any, int] = attrs.field(factory=dict)
    lock: Any = attrs.field(factory=threading.Lock)

    def __call__(self, what: Any) -> int:
        with self.lock:
            self.calls[what] = self.calls.get(what, 0) + 1
            return self.calls[what]

    def of(self, what: Any) -> int:
        return self.calls.get(what, 0)


@pytest.fixture
def tally() -> Tally:
    return Tally()


async def states(rt: Runtime, run_id: str) -> dict[str, str]:
    return {step.key: step.state for step in await rt.steps(run_id, limit=1000)}


# --- once ------------------------------------------------------------------------------------------------


@pytest.mark.modes
async def test_a_step_runs_once_and_later_attempts_get_what_it_gave(hosts: Hosts, tally: Tally) -> None:
    async def fetch(name: str, *, suffix: str = "") -> dict[str, Any]:
        tally("fetch")
        return {"name": name + suffix, "n": [1, (2, 3)]}

    def count(items: list[int]) -> int:
        tally("count")
        return len(items)

    @play("steps", retries=1, backoff_s=0)
    async def steps(ctx: Context) -> Any:
        got = await ctx.step("fetch", fetch, "a", suffix="b")
        total = await ctx.step("count", count, [1, 2, 3])
        await ctx.sleep(0.3)
        if ctx.failures == 0:
            raise ValueError("once")
        return [got, total, ctx.attempt]

    async with hosts.open(steps) as rt:
        handle = await rt.submit(steps)
        # Plain JSON the first time as ever after: a tuple is a list.
        assert await handle.result(timeout=10) == [{"name": "ab", "n": [1, [2, 3]]}, 3, 3]
        assert tally.calls == {"fetch": 1, "count": 1}
        found = await rt.steps(handle.run_id, outputs=True)
        assert [(one.key, one.state, one.attempt, one.tries, one.final) for one in found] == [
            ("count", "completed", 1, 1, True),
            ("fetch", "completed", 1, 1, True),
        ]
        assert found[0].output == 3
        assert found[0].function.endswith("count")
        await hosts.check([handle.run_id])


async def test_what_a_step_gives_is_the_same_live_and_replayed(hosts: Hosts) -> None:
    @attrs.frozen
    class Point:
        x: int
        y: float = 0.5

    async def typed() -> Point:
        return Point(1)

    async def untyped():  # type: ignore[no-untyped-def]
        return Point(2)

    async def nothing() -> None:
        return None

    seen: list[Any] = []

    @play("types")
    async def types(ctx: Context) -> int:
        typed.__annotations__["return"] = Point
        values = [await ctx.step(fn.__name__, fn) for fn in (typed, untyped, nothing)]
        seen.append(values)
        await ctx.sleep(0.3)
        return ctx.attempt

    async with hosts.open(types) as rt:
        assert await (await rt.submit(types)).result(timeout=10) == 2
    assert seen == [[Point(1), {"x": 2, "y": 0.5}, None]] * 2


async def test_steps_are_known_by_key_in_whatever_order_they_come_back(hosts: Hosts, tally: Tally) -> None:
    async def work(n: int) -> int:
        tally(n)
        await trio.sleep(0.01 * ((n * 7) % 5))
        return n * n

    @play("together")
    async def together(ctx: Context) -> dict[str, int]:
        found: dict[str, int] = {}

        async def one(n: int) -> None:
            found[str(n)] = await ctx.step(f"work {n}", work, n)

        order = range(9) if ctx.attempt == 1 else reversed(range(12))
        async with trio.open_nursery() as nursery:
            for n in order:
                nursery.start_soon(one, n)
        await ctx.sleep(0.3)
        return found

    async with hosts.open(together) as rt:
        handle = await rt.submit(together)
        assert await handle.result(timeout=10) == {str(n): n * n for n in range(12)}
        assert tally.calls == dict.fromkeys(range(12), 1)
        await hosts.check([handle.run_id])


async def test_many_runs_share_their_round_trips(hosts: Hosts, tally: Tally) -> None:
    async def work(n: int) -> int:
        return n + 1

    @play("adds")
    async def adds(ctx: Context, data: int) -> int:
        for n in range(5):
            data = await ctx.step(f"add {n}", work, data)
        return data

    async with hosts.open(adds, slots=200) as rt:
        handles = await rt.submit_many([(adds, n) for n in range(200)])
        assert [await handle.result(timeout=20) for handle in handles] == [n + 5 for n in range(200)]
        assert await hosts.value("SELECT count(*) FROM @.receipts WHERE state = 'completed'") == 1000
        await hosts.check([handle.run_id for handle in handles])


# --- threads ---------------------------------------------------------------------------------------------


async def test_steps_of_a_play_in_a_thread(hosts: Hosts, tally: Tally) -> None:
    def here(ident: int) -> bool:
        tally("here")
        return threading.get_ident() == ident

    async def there(n: int) -> int:
        tally("there")
        await trio.lowlevel.checkpoint()
        return n

    def flaky() -> str:
        if tally("flaky") < 3:
            raise ValueError("not yet")
        return "at last"

    @play("in-a-thread")
    def in_a_thread(ctx: SyncContext) -> Any:
        # In the play's own thread, so that what is bound to it (connections, locals) can be used.
        same = ctx.step("here", here, threading.get_ident())
        other = ctx.step("there", there, 5)
        squares = ctx.map("squares", lambda n: n * n, range(20), concurrency=5)
        late = ctx.step("flaky", flaky, retries=5, backoff_s=0.01)
        with pytest.raises(InputRefused, match="timeout: a def runs in the thread of its play"):
            ctx.step("limited", here, 1, timeout=1.0)
        with pytest.raises(StepConflict, match="used twice"):
            ctx.step("here", here, 1)
        with pytest.raises(StepFailed, match="called inside step 'nested'"):
            ctx.step("nested", lambda: ctx.step("inner", here, 1))
        ctx.sleep(0.3)
        return [same, other, squares, late, ctx.attempt]

    async with hosts.open(in_a_thread) as rt:
        handle = await rt.submit(in_a_thread)
        assert await handle.result(timeout=10) == [True, 5, [n * n for n in range(20)], "at last", 2]
        assert (tally.of("here"), tally.of("there"), tally.of("flaky")) == (1, 1, 3)
        await hosts.check([handle.run_id])


async def test_threads_of_plays_and_of_their_steps_do_not_wait_for_each_other(hosts: Hosts) -> None:
    @play("nested-threads")
    def nested(ctx: SyncContext) -> int:
        return sum(ctx.map("m", lambda n: n, range(4), concurrency=2))

    async with hosts.open(nested, threads=2) as rt:
        handles = await rt.submit_many([(nested, None)] * 6)
        assert [await handle.result(timeout=20) for handle in handles] == [6] * 6


async def test_a_lambda_around_an_async_call_is_awaited(hosts: Hosts) -> None:
    async def work(n: int) -> int:
        await trio.lowlevel.checkpoint()
        return n

    @play("lambdas")
    async def lambdas(ctx: Context) -> list[int]:
        return [
            await ctx.step("lambda", lambda: work(1)),
            await ctx.step("partial", functools.partial(work, 2)),
        ]

    async with hosts.open(lambdas) as rt:
        assert await (await rt.submit(lambdas)).result(timeout=10) == [1, 2]


# --- failures --------------------------------------------------------------------------------------------


async def test_a_failure_that_the_play_handles_is_the_same_in_every_attempt(
    hosts: Hosts, tally: Tally
) -> None:
    async def breaks() -> None:
        raise KeyError(f"no {tally('breaks')}")

    seen: list[tuple[Any, ...]] = []

    @play("handles")
    async def handles(ctx: Context) -> int:
        try:
            await ctx.step("breaks", breaks, retries=1, backoff_s=0)
        except StepFailed as exc:
            seen.append((exc.key, exc.error_type, exc.message, exc.tries, exc.final))
        await ctx.sleep(0.3)
        return ctx.attempt

    async with hosts.open(handles) as rt:
        handle = await rt.submit(handles)
        assert await handle.result(timeout=10) == 2
        assert seen == [("breaks", "KeyError", "'no 2'", 2, False)] * 2
        assert tally.of("breaks") == 2
        (record,) = await rt.steps(handle.run_id)
        assert (record.state, record.tries, record.error["error_type"]) == ("failed", 2, "KeyError")
        assert "no 2" in record.error["traceback"]


async def test_a_retry_of_the_run_gives_a_failed_step_another_chance(hosts: Hosts, tally: Tally) -> None:
    async def flaky() -> str:
        if tally("flaky") < 4:
            raise ValueError("not yet")
        return "at last"

    @play("retries", retries=1, backoff_s=0)
    async def retries(ctx: Context) -> list[Any]:
        return [await ctx.step("flaky", flaky, retries=1, backoff_s=0.01), ctx.attempt]

    async with hosts.open(retries) as rt:
        handle = await rt.submit(retries)
        assert await handle.result(timeout=10) == ["at last", 2]
        (record,) = await rt.steps(handle.run_id)
        assert (record.state, record.tries, record.attempt) == ("completed", 4, 2)


@pytest.mark.parametrize("kind", ["fatal", "declared"])
async def test_a_final_failure_ends_the_run_and_no_retry_helps(hosts: Hosts, tally: Tally, kind: str) -> None:
    async def breaks() -> None:
        tally("breaks")
        raise Fatal("never") if kind == "fatal" else LookupError("never")

    @play("final", retries=5, backoff_s=0, final=LookupError)
    async def final(ctx: Context) -> None:
        await ctx.step("breaks", breaks, retries=5, backoff_s=0)

    async with hosts.open(final) as rt:
        handle = await rt.submit(final)
        with pytest.raises(RunFailed, match=r"step 'breaks' failed.*never"):
            await handle.result(timeout=10)
        assert tally.of("breaks") == 1
        (record,) = await rt.steps(handle.run_id)
        assert (record.state, record.final) == ("failed", True)


async def test_a_step_that_takes_too_long_is_cut_and_fails(hosts: Hosts, tally: Tally) -> None:
    release = threading.Event()

    async def hangs() -> None:
        tally("async")
        await trio.sleep_forever()

    def hangs_in_a_thread() -> None:
        tally("thread")
        release.wait(20)

    seen: list[StepFailed] = []

    @play("slow")
    async def slow(ctx: Context) -> None:
        for fn in (hangs, hangs_in_a_thread):
            try:
                await ctx.step(fn.__name__, fn, timeout=0.1, retries=1, backoff_s=0)
            except StepFailed as exc:
                seen.append(exc)

    async with hosts.open(slow) as rt:
        handle = await rt.submit(slow)
        await handle.result(timeout=10)
        release.set()
        assert [exc.message for exc in seen] == [
            "step 'hangs' ran longer than timeout=0.1",
            "step 'hangs_in_a_thread' ran longer than timeout=0.1",
        ]
        assert [type(exc.__cause__) for exc in seen] == [StepTimedOut] * 2
        assert (tally.of("async"), tally.of("thread")) == (2, 2)


class PgError(Exception):
    """As drivers have them."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


class Wrapped(Exception):
    """As an ORM has them."""

    def __init__(self, orig: Exception) -> None:
        super().__init__(str(orig))
        self.orig = orig


@pytest.mark.parametrize(
    "make",
    [
        lambda: PgError("40001"),
        lambda: PgError("40P01"),
        lambda: PgError("57P01"),
        lambda: Wrapped(PgError("08006")),
        lambda: ConnectionResetError("gone"),
        lambda: SerializationLost("lost"),
        lambda: ExceptionGroup("several", [ValueError("x"), PgError("40001")]),
        lambda: ExceptionGroup("deep", [ExceptionGroup("inner", [ConnectionAbortedError()])]),
        lambda: DependencyUnavailable("db", retry_after=0.1),
    ],
    ids=["serialization", "deadlock", "shutdown", "wrapped", "reset", "ours", "group", "deep", "deferral"],
)
async def test_passing_faults_are_never_recorded(
    hosts: Hosts, tally: Tally, make: Callable[[], Exception]
) -> None:
    async def meets() -> str:
        if tally("meets") == 1:
            raise make()
        return "through"

    @play("meets", retries=1, backoff_s=0)
    async def meeting(ctx: Context) -> str:
        try:
            result: str = await ctx.step("meets", meets)
        except Exception:
            tally(tuple((await states(rt, ctx.run_id)).items()))
            raise
        return result

    async with hosts.open(meeting) as rt:
        handle = await rt.submit(meeting)
        assert await handle.result(timeout=10) == "through"
        assert tally.of("meets") == 2
        (record,) = await rt.steps(handle.run_id)
        assert (record.state, record.error) == ("completed", None)


async def test_a_cancelled_step_is_released_and_may_be_called_again(hosts: Hosts, tally: Tally) -> None:
    limit = trio.CancelScope()

    async def slow() -> str:
        if tally("slow") == 1:
            limit.cancel()
            await trio.sleep_forever()
        return "done"

    @play("cut")
    async def cut(ctx: Context) -> str:
        with limit:
            await ctx.step("slow", slow)
        return str(await ctx.step("slow", slow))

    async with hosts.open(cut) as rt:
        handle = await rt.submit(cut)
        assert await handle.result(timeout=10) == "done"
        (record,) = await rt.steps(handle.run_id)
        assert (record.state, record.tries) == ("completed", 2)


async def test_a_shutdown_records_nothing_and_the_next_host_runs_the_step(hosts: Hosts, tally: Tally) -> None:
    async def slow() -> str:
        if tally("slow") == 1:
            await trio.sleep_forever()
        return "done"

    async def before() -> int:
        return tally("before")

    @play("moves")
    async def moves(ctx: Context) -> str:
        await ctx.step("before", before)
        return str(await ctx.step("slow", slow))

    async with hosts.open(moves) as rt:
        handle = await rt.submit(moves)

        async def begun() -> bool:
            return tally.of("slow") == 1

        await eventually(begun)
    assert await hosts.value("SELECT count(*) FROM @.receipts WHERE error IS NOT NULL") == 0
    async with hosts.open(moves) as rt:
        assert await rt.handle(handle.run_id).result(timeout=10) == "done"
        assert (tally.of("before"), tally.of("slow")) == (1, 2)
        found = {step.key: (step.state, step.attempt, step.tries) for step in await rt.steps(handle.run_id)}
        assert found == {"before": ("completed", 1, 1), "slow": ("completed", 2, 2)}
        await hosts.check([handle.run_id])


async def test_what_is_done_when_the_host_stops_is_still_recorded(
    hosts: Hosts, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_of_plays, "_LAST_WORD_S", 3.0)  # on a busy machine
    go, cancelled = trio.Event(), trio.Event()

    async def work() -> int:
        await go.wait()
        return tally("work")

    @play("late")
    async def late(ctx: Context) -> int:
        async def watch() -> None:
            try:
                await trio.sleep_forever()
            finally:
                cancelled.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            result: int = await ctx.step("work", work)
            nursery.cancel_scope.cancel()
        return result

    async def claimed() -> bool:
        return bool(await hosts.value("SELECT count(*) FROM @.receipts"))

    async def worked() -> bool:
        return tally.of("work") == 1

    async with open_caller(hosts.dsn, hosts.schema) as caller, trio.open_nursery() as nursery:

        async def let_go() -> None:
            await cancelled.wait()
            await trio.sleep(0.3)  # in which a play that did not wait for its record would have been released
            await caller.rollback()

        async with hosts.open(late, grace_s=0.0, release_budget_s=7.0, shutdown_budget_s=10.0) as rt:
            handle = await rt.submit(late)
            await eventually(claimed)
            # The end of the step finds its receipt held by somebody, and the host stops meanwhile.
            await caller.begin()
            await caller.execute(f"SELECT FROM {hosts.schema}.receipts FOR UPDATE")
            go.set()
            await eventually(worked)
            nursery.start_soon(let_go)
    assert await hosts.value("SELECT state FROM @.receipts") == "completed"
    async with hosts.open(late) as rt:
        assert await rt.handle(handle.run_id).result(timeout=10) == 1
        assert tally.of("work") == 1
        await hosts.check([handle.run_id])


async def test_a_cancelled_run_records_nothing(hosts: Hosts, tally: Tally) -> None:
    async def slow() -> None:
        tally("slow")
        await trio.sleep_forever()

    @play("cancelled")
    async def cancelled(ctx: Context) -> None:
        await ctx.step("slow", slow, retries=5)

    async with hosts.open(cancelled) as rt:
        handle = await rt.submit(cancelled)

        async def begun() -> bool:
            return tally.of("slow") == 1

        await eventually(begun)
        assert (await rt.cancel(handle.run_id)).won
        await until(rt, handle.run_id, "cancelled")
        (record,) = await rt.steps(handle.run_id)
        assert (record.state, record.error) == ("claimed", None)
        assert tally.of("slow") == 1


# --- bad input -------------------------------------------------------------------------------------------


async def test_bad_steps_are_refused_by_name(hosts: Hosts) -> None:
    async def good(*_: Any, **__: Any) -> int:
        return 1

    async def bad(value: Any) -> Any:
        return value

    class Strange:
        pass

    endless: list[Any] = []
    endless.append(endless)
    refused: dict[str, str] = {}

    @play("refused")
    async def refused_(ctx: Context) -> None:
        async def attempt(name: str, *args: Any, **kwargs: Any) -> None:
            try:
                await ctx.step(*args, **kwargs)
            except InputRefused as exc:
                refused[name] = str(exc)

        await attempt("empty", "", good)
        await attempt("long", "k" * 256, good)
        await attempt("control", "a\nb", good)
        await attempt("nul", "a\x00", good)
        await attempt("no text", 5, good)
        await attempt("no function", "a", 5)
        await attempt("retries", "a", good, retries=-1)
        await attempt("timeout", "a", good, timeout=0)
        await attempt("backoff", "a", good, backoff_s=float("nan"))
        await attempt("object", "object", bad, Strange())
        await attempt("nan", "nan", bad, {"x": [float("nan")]})
        await attempt("large", "large", bad, "x" * 2_000)
        await attempt("deep", "deep", bad, endless)
        await attempt("text", "text", bad, {"x": "a\x00"})
        await attempt("twice 1", "k" * 255, good)
        await attempt("twice", "k" * 255, good)
        await attempt("again", "object", good)  # nothing was recorded under that key
        try:
            await ctx.map("m" * 241, good, [])
        except InputRefused as exc:
            refused["map key"] = str(exc)
        for name, arguments in {
            "concurrency": {"items": [], "concurrency": 0},
            "items": {"items": 5},
        }.items():
            try:
                await ctx.map(name, good, **arguments)  # type: ignore[arg-type]
            except InputRefused as exc:
                refused[name] = str(exc)

    async with hosts.open(refused_, max_payload_bytes=1_000) as rt:
        await (await rt.submit(refused_)).result(timeout=10)
    words = {
        "empty": "key: must be text of 1 to 255",
        "long": "not 256 characters",
        "control": "printable",
        "nul": "printable",
        "no text": "not 5",
        "no function": "fn: must be a function, not int",
        "retries": "retries: must be a whole number from 0 to 1000, not -1",
        "timeout": "timeout: must be a number of seconds above 0, not 0",
        "backoff": "backoff_s: must be a number of seconds from 0, not nan",
        "object": "step 'object' output: ",
        "nan": "step 'nan' output.x[0]: nan is not JSON",
        "large": "step 'large' output: needs 2002 bytes as JSON; the limit is 1000",
        "deep": "step 'deep' output",
        "text": "step 'text' output.x: the text holds a NUL",
        "twice": "is used twice in this attempt",
        "map key": "must be text of 1 to 240",
        "concurrency": "concurrency: must be a whole number from 1 to 10000, not 0",
        "items": "items: must be iterable, not int",
    }
    assert {name: word in refused.get(name, "") for name, word in words.items()} == dict.fromkeys(
        words, True
    ), refused
    assert len(refused) == len(words)


async def test_an_output_that_cannot_be_stored_ends_the_run_and_a_new_release_may_save_it(
    hosts: Hosts,
) -> None:
    @play("unstorable", retries=3, backoff_s=0)
    async def unstorable(ctx: Context) -> None:
        await ctx.step("bad", lambda: {1, 2})

    async with hosts.open(unstorable) as rt:
        handle = await rt.submit(unstorable)
        with pytest.raises(RunFailed, match="step 'bad' output: set is not JSON; store a list") as caught:
            await handle.result(timeout=10)
        assert caught.value.error_type.endswith(PayloadRefused.__name__)
        (record,) = await rt.steps(handle.run_id)
        assert record.state == "released"


async def test_a_key_recorded_for_another_function_is_a_conflict(hosts: Hosts) -> None:
    async def old() -> int:
        return 1

    async def new() -> int:
        return 2

    seen: list[str] = []

    @play("renamed")
    async def renamed(ctx: Context) -> None:
        try:
            await ctx.step("key", old if ctx.attempt == 1 else new)
        except StepConflict as exc:
            seen.append(str(exc))
        await ctx.sleep(0.3)

    async with hosts.open(renamed) as rt:
        await (await rt.submit(renamed)).result(timeout=10)
    (message,) = seen
    assert "step 'key' is recorded for" in message
    assert "old' and was called with" in message


async def test_a_step_contains_no_other_steps_and_no_waits(hosts: Hosts) -> None:
    seen: list[str] = []

    @play("nested")
    async def nested(ctx: Context) -> None:
        async def inside() -> None:
            ctx.log("may be said")
            for call in (
                functools.partial(ctx.step, "inner", lambda: 1),
                functools.partial(ctx.map, "inner", lambda n: n, [1]),
                functools.partial(ctx.sleep, 5, key="inner"),
            ):
                try:
                    await call()
                except InputRefused as exc:
                    seen.append(str(exc))

        await ctx.step("outer", inside)
        await ctx.step("inner", lambda: 1)

    async with hosts.open(nested) as rt:
        await (await rt.submit(nested)).result(timeout=10)
    assert seen == ["ctx: called inside step 'outer': steps contain no other steps and no waits"] * 3


async def test_a_step_in_flight_holds_the_park(hosts: Hosts, tally: Tally) -> None:
    async def slow(n: int) -> int:
        tally(n)
        await trio.sleep(0.15)
        return n

    @play("beside")
    async def beside(ctx: Context) -> int:
        async def work() -> None:
            for n in range(3):
                await ctx.step(f"slow {n}", slow, n)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            await ctx.sleep(2.0, key="nap")
        return ctx.attempt

    async with hosts.open(beside, park_after_s=0.0) as rt:
        handle = await rt.submit(beside)
        assert await handle.result(timeout=10) == 2
        assert tally.calls == {0: 1, 1: 1, 2: 1}
        found = await rt.steps(handle.run_id)
        assert {(step.state, step.attempt) for step in found} == {("completed", 1)}


async def test_cleanup_while_parking_can_make_no_steps(hosts: Hosts) -> None:
    seen: list[str] = []

    @play("parking")
    async def parking(ctx: Context) -> None:
        try:
            await ctx.sleep(0.3)
        finally:
            if ctx.attempt == 1:
                with trio.CancelScope(shield=True):
                    try:
                        await ctx.step("late", lambda: 1)
                    except InputRefused as exc:
                        seen.append(str(exc))

    async with hosts.open(parking) as rt:
        handle = await rt.submit(parking)
        await handle.result(timeout=10)
        assert await rt.steps(handle.run_id) == []
    assert seen == ["ctx: the run is parking: its cleanup can write nothing more"]


# --- map -------------------------------------------------------------------------------------------------


async def test_a_map_gives_its_results_in_order_and_is_bounded(hosts: Hosts) -> None:
    at_once: list[int] = [0, 0]

    async def work(n: int) -> int:
        at_once[0] += 1
        at_once[1] = max(at_once)
        await trio.sleep(0.001 * (n % 3))
        at_once[0] -= 1
        return n * n

    @play("maps")
    async def maps(ctx: Context) -> Any:
        squares = await ctx.map("square", work, (n for n in range(3_000)), concurrency=50)
        assert squares == [n * n for n in range(3_000)]
        assert await ctx.map("none", work, []) == []
        with pytest.raises(StepConflict, match=r"step 'square\[7\]' is used twice"):
            await ctx.step("square[7]", work, 7)
        with pytest.raises(StepConflict, match=r"step 'square\[…\]' are used twice"):
            await ctx.map("square", work, [1])
        await ctx.step("other[1]", work, 1)
        with pytest.raises(StepConflict, match="used twice"):
            await ctx.map("other", work, [1])
        await ctx.sleep(0.3)
        return ctx.attempt

    async with hosts.open(maps) as rt:
        handle = await rt.submit(maps)
        assert await handle.result(timeout=30) == 2
        assert 1 < at_once[1] <= 50
        assert (
            await hosts.value("SELECT count(*) FROM @.receipts WHERE state = 'completed' AND tries = 1")
            == 3_001
        )
        await hosts.check([handle.run_id])


async def test_a_later_attempt_maps_only_what_is_missing(hosts: Hosts, tally: Tally) -> None:
    async def work(n: int) -> int:
        if n == 700 and tally("breaks") == 1:
            await trio.sleep(0.05)  # others go on beside it
            raise ValueError("this one")
        tally(n)
        return n

    @play("resumes", retries=1, backoff_s=0)
    async def resumes(ctx: Context) -> int:
        return sum(await ctx.map("work", work, range(1_000), concurrency=20))

    async with hosts.open(resumes) as rt:
        handle = await rt.submit(resumes)
        assert await handle.result(timeout=30) == sum(range(1_000))
        assert [n for n in range(1_000) if tally.of(n) != 1] == []
        attempts = await hosts.ask("SELECT attempt, count(*) FROM @.receipts GROUP BY 1 ORDER BY 1")
        assert len(attempts) == 2
        assert attempts[0][1] > 600
        await hosts.check([handle.run_id])


async def test_a_map_goes_on_at_another_host_when_its_own_stops(hosts: Hosts, tally: Tally) -> None:
    async def work(n: int) -> int:
        tally(n)
        await trio.sleep(0.005)
        return n

    @play("moves-on")
    async def moves_on(ctx: Context) -> int:
        return sum(await ctx.map("work", work, range(2_000), concurrency=8))

    async with hosts.open(moves_on, grace_s=0.0) as rt:
        handle = await rt.submit(moves_on)

        async def begun() -> bool:
            return len(tally.calls) > 300

        await eventually(begun)
    recorded = await hosts.ask("SELECT key FROM @.receipts WHERE state = 'completed'")
    assert 0 < len(recorded) < 2_000
    async with hosts.open(moves_on) as rt:
        assert await rt.handle(handle.run_id).result(timeout=30) == sum(range(2_000))
        for (key,) in recorded:
            assert tally.of(int(key.removeprefix("work[").removesuffix("]"))) == 1
        # Only what was cut short was called again.
        assert sum(calls > 1 for calls in tally.calls.values()) <= 8
        await hosts.check([handle.run_id])


async def test_large_outputs_come_back_whole(hosts: Hosts) -> None:
    made: dict[int, str] = {}

    async def large(n: int) -> str:
        made[n] = secrets.token_hex(125_000)
        return made[n]

    @play("large")
    async def large_(ctx: Context) -> int:
        found = await ctx.map("large", large, range(45))
        assert found == [made[n] for n in range(45)]
        await ctx.sleep(1.0)
        return ctx.attempt

    async with hosts.open(large_) as rt:
        assert await (await rt.submit(large_)).result(timeout=30) == 2


async def test_the_first_failure_ends_a_map_and_is_raised_alone(hosts: Hosts) -> None:
    async def work(n: int) -> int:
        if n == 3:
            raise KeyError("three")
        await trio.sleep(10)
        return n

    seen: list[Any] = []

    @play("breaks")
    async def breaks(ctx: Context) -> None:
        try:
            await ctx.map("work", work, range(10))
        except StepFailed as exc:
            seen.append((exc.key, exc.error_type, type(exc.__cause__)))

    async with hosts.open(breaks) as rt:
        handle = await rt.submit(breaks)
        await handle.result(timeout=5)
        assert seen == [("work[3]", "KeyError", KeyError)]


# --- crashes ---------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)
async def test_no_step_that_completed_runs_again_after_its_host_was_killed(
    hosts: Hosts, tmp_path: Any
) -> None:
    data = {"folder": str(tmp_path), "steps": 40, "pause": 0.01}
    run_ids: list[str] = []
    async with hosts.open() as client:
        for round_ in range(3):
            async with host_process(hosts, lease_s=1.5, renew_every_s=0.3) as process:
                if not run_ids:
                    handles = await client.submit_many([("stepping", data)] * 4)
                    run_ids = [handle.run_id for handle in handles]
                want = 30 * (round_ + 1)

                async def enough(want: int = want) -> bool:
                    done = "SELECT count(*) FROM @.receipts WHERE state = 'completed'"
                    return int(await hosts.value(done)) >= want

                await eventually(enough, within_s=20)
                process.signal(9)
                await process.ended()
        async with host_process(hosts, lease_s=1.5, renew_every_s=0.3):
            for run_id in run_ids:
                assert await client.handle(run_id).result(timeout=30) == sum(range(40))
        await hosts.check(run_ids)
        calls = [line.split() for path in tmp_path.iterdir() for line in path.read_text().splitlines()]
        for run_id in run_ids:
            steps = await client.steps(run_id, limit=1000)
            assert len(steps) == 40
            assert all(step.state == "completed" for step in steps)
            for step in steps:
                made = [int(attempt) for run, key, attempt in calls if (run, key) == (run_id, step.key)]
                # Each attempt tries a step once at most; none does once one of them has recorded it.
                assert len(made) == len(set(made))
                assert max(made) == step.attempt
                assert len(made) <= step.tries  # a host may die between a claim and the call


@pytest.mark.modes
async def test_a_lost_connection_loses_no_step_and_doubles_none(hosts: Hosts, tally: Tally) -> None:
    async def work(n: int) -> int:
        tally(n)
        await trio.sleep(0.002)
        return n

    @play("steady")
    async def steady(ctx: Context) -> int:
        total = 0
        for n in range(100):
            total += await ctx.step(f"work {n}", work, n)
        return total

    async with hosts.open(steady) as rt:
        handle = await rt.submit(steady)
        for most in (20, 50, 80):

            async def far(most: int = most) -> bool:
                return len(tally.calls) > most

            await eventually(far)
            await hosts.ask(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'runlane receipts'"
                " AND query LIKE '%@.%'".replace("@.", f'"{hosts.schema}".')
            )
        assert await handle.result(timeout=20) == sum(range(100))
        assert set(tally.calls.values()) == {1}
        assert (await handle.status()).attempt == 1
        await hosts.check([handle.run_id])


async def test_steps_of_a_run_that_is_not_there(hosts: Hosts) -> None:
    async with hosts.open() as rt:
        with pytest.raises(Exception, match="does not exist"):
            await rt.steps("nobody")
        for wrong in ({"limit": 0}, {"after": "a\n"}):
            with pytest.raises(InputRefused):
                await rt.steps("nobody", **wrong)
