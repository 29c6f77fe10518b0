"""Schedules through the public API: verbs, one run per fire whichever hosts live, refusals."""

from __future__ import annotations

import signal
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
import trio

from runtime import (
    Context,
    Fire,
    FireNotFound,
    InputRefused,
    PayloadRefused,
    Runtime,
    Schedule,
    ScheduleNotFound,
    UnknownPlay,
    play,
)
from tests.support.hosted import quick
from tests.support.hosts import Hosts, eventually, host_process


@play("labelled")
async def labelled(ctx: Context, data: Any) -> Any:
    return [data, dict(ctx.labels or {})]


async def fires(rt: Runtime, name: str, count: int, *, within_s: float = 15.0) -> list[Fire]:
    """Wait for so many fires; the first of them, oldest first."""

    async def enough() -> list[Fire] | None:
        found = await rt.fires(name)
        return found[::-1][:count] if len(found) >= count else None

    found: list[Fire] = await eventually(enough, within_s=within_s, every_s=0.05)
    return found


async def check_one_run_per_fire(hosts: Hosts, every_s: int = 1) -> int:
    """Each fire of every schedule has its run, no run lacks its fire, and no fire was left out. How many there are."""
    rows = await hosts.ask(
        "SELECT f.schedule, f.fire_at, r.labels ->> 'fire_at' = to_char(f.fire_at, 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"')"
        " FROM @.fires f FULL JOIN @.runs r ON r.run_id = f.run_id ORDER BY 1, 2"
    )
    assert all(row[2] for row in rows), rows
    for (name, one, _), (other, next_, _) in pairwise(rows):
        assert name != other or next_ - one == timedelta(seconds=every_s)
    return len(rows)


@pytest.mark.modes
async def test_a_schedule_submits_runs_until_it_is_paused_or_deleted(hosts: Hosts) -> None:
    async with hosts.open(labelled) as rt:
        stands = await rt.schedule("secondly", labelled, {"n": 1}, cron="* * * * * *", labels={"team": "ops"})
        assert (stands.cron, stands.missed, stands.paused_at, stands.input) == (
            "* * * * * *",
            "last",
            None,
            {"n": 1},
        )
        first, second = await fires(rt, "secondly", 2)
        created, *_ = await rt.facts(first.run_id)
        assert created.payload["trigger"] == "schedule"
        assert second.fire_at - first.fire_at == timedelta(seconds=1)
        assert await rt.handle(first.run_id).result(timeout=10) == [
            {"n": 1},
            {"team": "ops", "schedule": "secondly", "fire_at": first.fire_at.strftime("%Y-%m-%dT%H:%M:%SZ")},
        ]
        assert first.run_id in {run.run_id for run in await rt.runs(labels={"schedule": "secondly"})}
        await rt.pause_schedule("secondly")
        (stands,) = await rt.schedules()
        assert stands.paused_at is not None
        count = len(await rt.fires("secondly"))
        await trio.sleep(1.3)
        assert len(await rt.fires("secondly")) == count
        await rt.resume_schedule("secondly")
        await fires(rt, "secondly", count + 2)
        assert await rt.delete_schedule("secondly") is True
        assert await rt.delete_schedule("secondly") is False
        assert await rt.schedules() == []
        assert await rt.fires("secondly")  # what was fired is kept


async def test_runs_are_made_within_milliseconds(hosts: Hosts) -> None:
    async with hosts.open(quick) as rt:
        await rt.schedule("secondly", quick, cron="* * * * * *")
        found = await fires(rt, "secondly", 4)
        lags = [(fire.fired_at - fire.fire_at).total_seconds() for fire in found]
        assert min(lags) >= 0
        assert sorted(lags)[1] < 0.1


async def test_schedules_are_declared_with_the_plays_and_adopted_by_the_next_release(hosts: Hosts) -> None:
    declared = [
        Schedule("a", labelled, 1, cron="0 3 * * *", timezone="Europe/Berlin"),
        Schedule("b", "labelled", every_s=60),
    ]
    async with Runtime.open(hosts.config(release_id="v1"), plays=[labelled], schedules=declared) as rt:
        before = await rt.schedules()
        assert [(one.name, one.release_id) for one in before] == [("a", "v1"), ("b", "v1")]
    async with Runtime.open(hosts.config(release_id="v2"), plays=[labelled], schedules=declared[:1]) as rt:

        async def adopted() -> bool:
            return [one.release_id for one in await rt.schedules()] == ["v2", "v2"]

        await eventually(adopted)
        after = await rt.schedules()
        assert [one.next_fire_at for one in after] == [one.next_fire_at for one in before]
        # Their runs find this host.
        await hosts.ask(
            "UPDATE @.schedules SET next_fire_at = next_fire_at - interval '2 day' WHERE name = 'b'"
        )
        (fire,) = await fires(rt, "b", 1)
        assert (await rt.handle(fire.run_id).result(timeout=10))[1]["schedule"] == "b"


async def test_a_runtime_without_plays_changes_schedules_and_fires_nothing(hosts: Hosts) -> None:
    async with hosts.open(quick):
        pass
    async with hosts.open() as rt:
        await rt.schedule("secondly", "quick", 7, cron="* * * * * *")
        await trio.sleep(1.5)
        assert await rt.fires("secondly") == []
        async with hosts.open(
            labelled
        ) as other:  # a host that does not serve the play submits it all the same
            await fires(other, "secondly", 1)
            assert {run.status for run in await other.runs()} == {"queued"}


async def test_what_was_missed_while_no_host_lived_is_made_up_for(hosts: Hosts) -> None:
    async with hosts.open(quick) as rt:
        for missed in ("last", "all", "skip"):
            await rt.schedule(missed, quick, cron="0 * * * *", missed=missed)
    await hosts.ask("UPDATE @.schedules SET next_fire_at = next_fire_at - interval '5 hours'")
    async with hosts.open(quick) as rt:
        assert len(await fires(rt, "all", 5)) == 5
        assert len(await rt.fires("last")) == 1

        async def moved() -> bool:
            now = datetime.now(UTC)
            return all(one.next_fire_at > now for one in await rt.schedules())

        await eventually(moved)
        late_s = (
            datetime.now(UTC) - datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        ).total_seconds()
        assert len(await rt.fires("skip")) == (1 if late_s < 60 else 0)


@pytest.mark.timeout(120)
async def test_one_run_per_fire_while_hosts_die_and_connections_break(hosts: Hosts) -> None:  # L-4
    async with hosts.open(quick) as rt:
        for number in range(10):
            await rt.schedule(f"s-{number}", quick, number, cron="* * * * * *", missed="all")
        async with host_process(hosts) as one, host_process(hosts):
            for round_ in range(12):
                await trio.sleep(0.4)
                # Wherever it is: before the fire, between the fire and its commit, or between that and the answer.
                await hosts.ask(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND application_name = 'runlane schedules'"
                )
                if round_ == 5:
                    one.signal(signal.SIGKILL)
                    await one.ended()
        for number in range(10):
            count = len(await rt.fires(f"s-{number}"))
            await fires(rt, f"s-{number}", count + 1)
            await rt.pause_schedule(f"s-{number}")
        assert await check_one_run_per_fire(hosts) >= 40
        await hosts.check([run.run_id for run in await rt.runs(limit=1000)])


async def test_a_lost_run_is_repaired_once(hosts: Hosts) -> None:
    async with hosts.open(labelled) as rt:
        await rt.schedule("secondly", labelled, 5, cron="* * * * * *")
        (fire,) = await fires(rt, "secondly", 1)
        await rt.pause_schedule("secondly")
        await rt.handle(fire.run_id).result(timeout=10)
        intact = await rt.repair_fire("secondly", fire.fire_at)
        assert (intact.run_id, intact.created) == (fire.run_id, False)
        await hosts.ask(f"DELETE FROM @.runs WHERE run_id = '{fire.run_id}'")
        assert (await rt.fires("secondly"))[-1].status is None
        again = await rt.repair_fire("secondly", fire.fire_at)
        assert again.created is True
        assert again.run_id != fire.run_id
        assert (await again.result(timeout=10))[0] == 5
        assert (await rt.repair_fire("secondly", fire.fire_at)).run_id == again.run_id
        with pytest.raises(FireNotFound, match="no record of a fire at 2026-01-01"):
            await rt.repair_fire("secondly", datetime(2026, 1, 1, tzinfo=UTC))


async def test_a_schedule_that_cannot_be_read_here_holds_up_no_other(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosts.open(quick) as rt:
        for name in ("bad", "good"):
            await rt.schedule(name, quick, cron="* * * * * *")
        await hosts.ask("UPDATE @.schedules SET timezone = 'Mars/Olympus' WHERE name = 'bad'")
        count = len(await rt.fires("good"))
        await fires(rt, "good", count + 2)
        said = [
            record.message for record in caplog.records if "event=fire_failed schedule=bad" in record.message
        ]
        assert len(said) == 1


async def test_a_held_schedule_holds_up_only_its_own_changes(hosts: Hosts) -> None:
    async with hosts.open(quick, operation_timeout_s=5.5) as rt:
        for name in ("held", "free"):
            await rt.schedule(name, quick, cron="* * * * * *")
        done = trio.Event()

        async def pause() -> None:
            await rt.pause_schedule("held")
            done.set()

        async with trio.open_nursery() as nursery, hosts.session() as session:

            async def hold(connection: Any) -> None:
                await connection.fetch(
                    f"SELECT * FROM {hosts.schema}.schedules WHERE name = 'held' FOR UPDATE"
                )
                await connection.fetch("SELECT pg_sleep(2.5)")

            nursery.start_soon(session.transact, hold)
            await trio.sleep(0.2)
            nursery.start_soon(pause)
            count = len(await rt.fires("free"))
            await fires(rt, "free", count + 1)
            assert not done.is_set()
            with trio.fail_after(5):
                await done.wait()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"name": "a b"}, "name"),
        ({"play": "no-such-play"}, "play"),
        ({"play": 3}, "play"),
        ({"cron": "99 * * * *"}, "cron"),
        ({"cron": None}, "cron"),
        ({"timezone": "Europe/Atlantis"}, "timezone"),
        ({"every_s": 5}, "cron"),
        ({"missed": "sometimes"}, "missed"),
        ({"priority": 3}, "priority"),
        ({"org_id": ""}, "org_id"),
        ({"labels": {"schedule": "x"}}, "labels"),
        ({"labels": {str(n): "x" for n in range(31)}}, "labels"),
        ({"input": float("nan")}, "input"),
    ],
)
async def test_bad_schedules_are_refused_by_name(quiet: Runtime, given: dict[str, Any], field: str) -> None:
    arguments = {"name": "nightly", "play": quick, "cron": "0 3 * * *", **given}
    with pytest.raises(InputRefused) as caught:
        await quiet.schedule(**arguments)
    assert caught.value.field == field
    assert isinstance(caught.value, UnknownPlay) == (given.get("play") == "no-such-play")
    assert isinstance(caught.value, PayloadRefused) == ("input" in given)
    assert await quiet.schedules() == []


@pytest.mark.parametrize(
    ("declared", "field", "says"),
    [
        ([Schedule("a", quick, every_s=1), Schedule("a", quick, every_s=2)], "schedules", "declared twice"),
        ([quick], "schedules", "must be Schedule"),
        ([Schedule("a", quick, cron="nightly")], "cron", "wrong number of fields"),
        ([Schedule("a", "no-such-play", every_s=1)], "play", "no-such-play"),
    ],
)
async def test_a_host_with_a_bad_schedule_does_not_open(
    hosts: Hosts, declared: list[Any], field: str, says: str
) -> None:
    with pytest.raises(InputRefused, match=says) as caught:
        async with Runtime.open(hosts.config(), plays=[quick], schedules=declared):
            raise AssertionError("it opened")
    assert caught.value.field == field


async def test_what_is_not_there_is_said_so(quiet: Runtime) -> None:
    for verb in (quiet.pause_schedule, quiet.resume_schedule, quiet.fires):
        with pytest.raises(ScheduleNotFound, match="'none'"):
            await verb("none")
    with pytest.raises(ScheduleNotFound):
        await quiet.repair_fire("none", datetime.now(UTC))
    with pytest.raises(InputRefused, match="fire_time"):
        await quiet.repair_fire("none", datetime.now())
    with pytest.raises(InputRefused, match="limit"):
        await quiet.fires("none", limit=0)
    with pytest.raises(InputRefused, match="before"):
        await quiet.fires("none", before=datetime.now())


@pytest.fixture
async def quiet(hosts: Hosts) -> Any:
    """A host with nothing to do."""
    async with hosts.open(quick) as rt:
        yield rt
