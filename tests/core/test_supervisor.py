"""Supervision: order, restarts, outages, escalation, and stops that are ordered, bounded and quiet."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from actors.core import (
    Backoff,
    ChildSpec,
    EndOfMailbox,
    EscalatedActor,
    Life,
    Mailbox,
    Supervisor,
    bounded_cleanup,
)
from sql.errors import DatabaseUnreachable, HostStopping, LinkLost, OutcomeUnknown

Clock = trio.testing.MockClock
Script = Callable[[Life], Awaitable[None]]


@attrs.define
class Scripted:
    """An actor that runs one script per life; the last script again for every further life."""

    scripts: list[Script]
    lives: int = 0

    async def run(self, life: Life) -> None:
        script = self.scripts[min(self.lives, len(self.scripts) - 1)]
        self.lives += 1
        await script(life)


async def serve(life: Life) -> None:
    """A well-behaved life."""
    life.ready()
    await life.stopping.wait()


def fail(*errors: Exception, after_s: float = 0.0, ready: bool = True) -> Script:
    """A life that ends with these errors (in a group in a group when there are several)."""

    async def script(life: Life) -> None:
        if ready:
            life.ready()
        await trio.sleep(after_s)
        if len(errors) == 1:
            raise errors[0]
        raise ExceptionGroup("outer", [ExceptionGroup("inner", list(errors))])

    return script


def spec(name: str, *scripts: Script, **more: Any) -> ChildSpec:
    return ChildSpec(name=name, actor=Scripted(list(scripts) or [serve]), **more)


def lives(child: ChildSpec) -> int:
    assert isinstance(child.actor, Scripted)
    return child.actor.lives


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[Supervisor]:
    """Start, yield once everything is ready, stop."""
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        yield supervisor
        await supervisor.stop()


def messages(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if f"event={event} " in record.getMessage() + " "
    ]


# --- order --------------------------------------------------------------------------------------------


async def test_children_start_in_order_each_after_the_one_before_is_ready(autojump_clock: Clock) -> None:
    started: list[str] = []

    def slow(name: str) -> ChildSpec:
        async def script(life: Life) -> None:
            started.append(f"{name} starts")
            await trio.sleep(1)
            started.append(f"{name} ready")
            await serve(life)

        return spec(name, script)

    async with running(Supervisor([slow("a"), slow("b")])) as supervisor:
        assert started == ["a starts", "a ready", "b starts", "b ready"]
        assert supervisor.ready
        assert list(supervisor.health) == ["a", "b"]


async def test_stop_is_in_reverse_order_and_each_waits_for_the_next_to_end(autojump_clock: Clock) -> None:
    """T17, design section 4: whoever others need stops last."""
    ended: list[str] = []

    def lingering(name: str) -> ChildSpec:
        async def script(life: Life) -> None:
            await serve(life)
            ended.append(f"{name} asked")
            await trio.sleep(1)
            ended.append(f"{name} ended")

        return spec(name, script)

    async with running(Supervisor([lingering("leases"), lingering("claim"), lingering("admission")])):
        pass
    assert ended == [
        "admission asked", "admission ended", "claim asked", "claim ended", "leases asked", "leases ended",
    ]  # fmt: skip


async def test_stop_by_closing_mailboxes_lets_them_drain(autojump_clock: Clock) -> None:
    box: Mailbox[int] = Mailbox("box")
    served: list[int] = []

    async def script(life: Life) -> None:
        life.ready()
        try:
            while True:
                items = await box.take(1)
                await trio.sleep(0.1)
                served.extend(items)
                box.done(items)
        except EndOfMailbox:
            return

    async with running(Supervisor([spec("a", script, mailboxes=[box])])):
        for item in range(10):
            box.send_nowait(item)
    assert served == list(range(10))


# --- restarts -----------------------------------------------------------------------------------------


async def test_a_crash_restarts_and_the_next_life_gets_what_was_not_answered(autojump_clock: Clock) -> None:
    box: Mailbox[str] = Mailbox("box")
    seen: list[tuple[int, list[str]]] = []

    async def script(life: Life) -> None:
        life.ready()
        items = await box.take(10)
        seen.append((life.number, items))
        if life.number == 1:
            raise ValueError("crash with items in hand")
        box.done(items)
        await life.stopping.wait()

    child = spec("a", script, mailboxes=[box])
    async with running(Supervisor([child])) as supervisor:
        box.send_nowait("x")
        await trio.sleep(5)
        assert seen == [(1, ["x"]), (2, ["x"])]
        assert supervisor.health["a"].restarts == 1
        assert supervisor.health["a"].last_error == "ValueError: crash with items in hand"
        assert supervisor.ready


async def test_a_loop_that_just_returns_is_a_crash(autojump_clock: Clock) -> None:
    async def leave(life: Life) -> None:
        life.ready()

    child = spec("a", leave, serve)
    async with running(Supervisor([child])) as supervisor:
        await trio.sleep(5)
        assert "ActorEnded" in (supervisor.health["a"].last_error or "")
    assert lives(child) == 2


async def test_more_crashes_than_the_intensity_escalate_after_an_ordered_stop(autojump_clock: Clock) -> None:
    ended: list[str] = []

    async def other(life: Life) -> None:
        await serve(life)
        ended.append("other")

    last = KeyError("the last one")
    bad = spec("bad", *[fail(ValueError("crash"))] * 3, fail(last))
    supervisor = Supervisor([spec("other", other), bad], intensity=3)
    with pytest.raises(EscalatedActor) as caught:
        await supervisor.run()
    assert (caught.value.name, caught.value.error) == ("bad", last)
    assert ended == ["other"]
    assert lives(bad) == 4
    assert supervisor.health["bad"].state == "failed"
    assert supervisor.health["other"].state == "stopped"


async def test_crashes_spread_over_time_do_not_escalate(autojump_clock: Clock) -> None:
    bad = spec("bad", fail(ValueError("crash"), after_s=11))
    async with running(Supervisor([bad], intensity=3, period_s=30)) as supervisor:
        await trio.sleep(300)
        assert not supervisor.stopping.is_set()
    assert lives(bad) > 20


async def test_crash_at_start_escalates_out_of_start(autojump_clock: Clock) -> None:
    """Fault 16.8: an error before readiness surfaces, and nothing hangs."""
    bad = spec("bad", fail(ValueError("never connects"), ready=False))
    with trio.fail_after(60):
        with pytest.RaisesGroup(
            pytest.RaisesExc(EscalatedActor, match="bad gave up: ValueError"), flatten_subgroups=True
        ):
            async with trio.open_nursery() as nursery:
                await nursery.start(Supervisor([spec("first"), bad, spec("after")], intensity=2).run)


# --- outages ------------------------------------------------------------------------------------------


async def test_an_outage_is_waited_out_and_logged_once(
    caplog: pytest.LogCaptureFixture, autojump_clock: Clock
) -> None:
    """Faults 4.3 and 4.4: no restart intensity is used, and the log stays short."""
    caplog.set_level(logging.INFO, "runlane")
    back = trio.Event()

    async def script(life: Life) -> None:
        if not back.is_set():
            raise DatabaseUnreachable("db:5432: refused")
        await serve(life)

    children = [spec(name, serve_until(5, LinkLost("gone")), script) for name in "abc"]
    async with running(Supervisor(children, intensity=2)) as supervisor:
        await trio.sleep(600)
        assert not supervisor.stopping.is_set()
        assert not supervisor.ready
        assert {health.state for health in supervisor.health.values()} == {"outage"}
        assert all(60 < lives(child) < 400 for child in children)
        back.set()
        await trio.sleep(10)
        assert {health.state for health in supervisor.health.values()} == {"ready"}
    assert len(messages(caplog, "outage")) == 1
    assert len(messages(caplog, "outage_over")) == 1
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def serve_until(seconds: float, error: Exception) -> Script:
    return fail(error, after_s=seconds)


async def test_the_first_try_after_a_lost_link_comes_at_once(autojump_clock: Clock) -> None:
    child = spec("a", serve_until(10, LinkLost("gone")), serve)
    async with running(Supervisor([child])) as supervisor:
        await trio.sleep(9.9)
        assert lives(child) == 1
        await trio.sleep(0.3)
        assert lives(child) == 2
        assert supervisor.ready


# --- exception groups (T9, fault 17.1) -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("errors", "state"),
    [
        ([LinkLost("a")], "outage"),
        ([LinkLost("a"), DatabaseUnreachable("b")], "outage"),
        ([LinkLost("a"), ValueError("b")], "restarting"),
        ([ValueError("a"), KeyError("b")], "restarting"),
    ],
)
async def test_a_failure_is_classified_by_its_leaves(
    errors: list[Exception], state: str, caplog: pytest.LogCaptureFixture, autojump_clock: Clock
) -> None:
    child = spec("a", fail(*errors, after_s=1), serve)
    backoff = Backoff(first_s=10, max_s=10, jitter=0)
    async with running(Supervisor([child], backoff=lambda: backoff)) as supervisor:
        await trio.sleep(2)
        assert supervisor.health["a"].state == state
    assert len(messages(caplog, "crash")) == (len(errors) if state == "restarting" else 0)


async def test_errors_beside_a_cancellation_of_the_actors_own_are_still_errors(autojump_clock: Clock) -> None:
    async def script(life: Life) -> None:
        life.ready()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            await trio.sleep(1)
            raise ValueError("one task fails, the others are cancelled")

    child = spec("a", script, serve)
    async with running(Supervisor([child])) as supervisor:
        await trio.sleep(5)
        assert supervisor.health["a"].last_error == "ValueError: one task fails, the others are cancelled"
    assert lives(child) == 2


# --- stopping -----------------------------------------------------------------------------------------


async def test_failures_while_stopping_are_noise(
    caplog: pytest.LogCaptureFixture, autojump_clock: Clock
) -> None:
    """T2: a frozen server turns a stop into errors; none of them is a crash."""
    caplog.set_level(logging.INFO, "runlane")

    async def script(life: Life) -> None:
        await serve(life)
        raise LinkLost("while it stops")

    child = spec("a", script)
    async with running(Supervisor([child], intensity=0)) as supervisor:
        pass
    assert lives(child) == 1
    assert supervisor.health["a"].state == "stopped"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_overdue_child_is_cancelled_and_its_release_still_runs(autojump_clock: Clock) -> None:
    released: list[float] = []

    async def script(life: Life) -> None:
        life.ready()
        try:
            await trio.sleep_forever()
        finally:
            with bounded_cleanup(2):
                await trio.sleep(1)
                released.append(trio.current_time())

    child = spec("a", script, stop_budget_s=3, cancel_budget_s=5)
    async with running(Supervisor([child])):
        asked = trio.current_time()
    assert [when - asked for when in released] == [4]


async def test_hurry_skips_the_grace_but_not_the_release(autojump_clock: Clock) -> None:
    """A second signal."""
    released: list[str] = []

    def child(name: str) -> ChildSpec:
        async def script(life: Life) -> None:
            life.ready()
            try:
                await trio.sleep_forever()
            finally:
                with bounded_cleanup(2):
                    await trio.sleep(0.2)
                    released.append(name)

        return spec(name, script, stop_budget_s=60)

    supervisor = Supervisor([child("a"), child("b")], hurried_budget_s=0.5)
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        start = trio.current_time()
        supervisor.request_stop()
        await trio.sleep(1)
        supervisor.hurry()
        await supervisor.stop()
    assert released == ["b", "a"]
    assert trio.current_time() - start < 3


async def test_a_stuck_child_does_not_hold_the_stop(
    caplog: pytest.LogCaptureFixture, autojump_clock: Clock
) -> None:
    """T8: even a shield without a deadline ends with the whole stop's budget."""
    order: list[str] = []

    async def stuck(life: Life) -> None:
        life.ready()
        try:
            with trio.CancelScope(shield=True):
                await trio.sleep(1000)
        finally:
            order.append("stuck ended")

    async def other(life: Life) -> None:
        await serve(life)
        order.append("other ended")

    children = [spec("other", other), spec("stuck", stuck, stop_budget_s=1, cancel_budget_s=1)]
    supervisor = Supervisor(children, stop_budget_s=10)
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        asked = trio.current_time()
        supervisor.request_stop()
        await trio.sleep(5)
        assert order == ["other ended"]  # the next in order was not held up
    assert messages(caplog, "stuck")
    assert (
        trio.current_time() - asked == 1000
    )  # a shield is a shield: only the children's discipline bounds it


async def test_a_cancellation_from_outside_becomes_an_ordered_stop(autojump_clock: Clock) -> None:
    """T17: the plain nursery cancel is the last resort, also when the caller's own scope is cancelled."""
    ended: list[str] = []

    def child(name: str) -> ChildSpec:
        async def script(life: Life) -> None:
            await serve(life)
            await trio.sleep(0.1)
            ended.append(name)

        return spec(name, script)

    supervisor = Supervisor([child("a"), child("b"), child("c")])
    with trio.move_on_after(5) as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(supervisor.run)
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert ended == ["c", "b", "a"]


async def test_cancelled_while_starting_ends(caplog: pytest.LogCaptureFixture, autojump_clock: Clock) -> None:
    """T14: started() says nothing once the starter is cancelled; the tree must end all the same."""
    ended: list[str] = []

    async def never_ready(life: Life) -> None:
        await life.stopping.wait()
        ended.append(life.name)

    with trio.fail_after(60), trio.move_on_after(5) as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(Supervisor([spec("first"), spec("second", never_ready), spec("third")]).run)
    assert scope.cancelled_caught
    assert ended == ["second"]


async def test_stop_while_waiting_for_the_database_is_immediate(autojump_clock: Clock) -> None:
    child = spec("a", serve_until(1, LinkLost("gone")), fail(DatabaseUnreachable("away"), ready=False))
    backoff = Backoff(first_s=50, max_s=50, jitter=0)
    async with running(Supervisor([child], backoff=lambda: backoff)):
        await trio.sleep(3)
        asked = trio.current_time()
    assert trio.current_time() - asked < 1


async def test_items_that_nobody_answered_are_told_so_at_the_end(autojump_clock: Clock) -> None:
    fates: dict[str, type[Exception]] = {}
    box: Mailbox[str] = Mailbox("box", abandon=lambda item, error: fates.update({item: type(error)}))

    async def script(life: Life) -> None:
        life.ready()
        await box.take(1)
        await trio.sleep_forever()

    async with running(Supervisor([spec("a", script, mailboxes=[box])])):
        box.send_nowait("taken")
        box.send_nowait("waiting")
        await trio.testing.wait_all_tasks_blocked()
    assert fates == {"taken": OutcomeUnknown, "waiting": HostStopping}


async def test_a_failing_stop_request_does_not_stop_the_stop(autojump_clock: Clock) -> None:
    def broken() -> None:
        raise ValueError("stop() is broken")

    ended: list[str] = []

    async def other(life: Life) -> None:
        await serve(life)
        ended.append("other")

    async with running(Supervisor([spec("other", other), spec("a", stop=broken)])):
        pass
    assert ended == ["other"]


async def test_an_error_behind_a_foreign_cancellation_is_logged(
    caplog: pytest.LogCaptureFixture, autojump_clock: Clock
) -> None:
    """T15: a finally that awaits without a shield leaves the true error as the context only."""

    async def script(life: Life) -> None:
        life.ready()
        try:
            try:
                await trio.sleep_forever()
            finally:
                raise KeyError("the true error")
        finally:
            await trio.sleep(1)

    async def interrupted(life: Life) -> None:
        life.ready()
        await trio.sleep(1)
        raise KeyboardInterrupt  # cancels the whole tree, which is nobody's stop

    with pytest.RaisesGroup(KeyboardInterrupt, flatten_subgroups=True):
        async with running(Supervisor([spec("a", script), spec("b", interrupted)])):
            await trio.sleep_forever()
    assert any("the true error" in line for line in messages(caplog, "hidden_by_cancellation"))


async def test_keyboard_interrupt_keeps_its_way(autojump_clock: Clock) -> None:
    async def script(life: Life) -> None:
        life.ready()
        await trio.sleep(1)
        raise KeyboardInterrupt

    supervisor = Supervisor([spec("a", script)])
    with pytest.RaisesGroup(KeyboardInterrupt, flatten_subgroups=True):
        async with running(supervisor):
            await trio.sleep_forever()
