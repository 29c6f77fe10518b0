"""Status snapshots: the light and the full form, what a run waits for, and why nothing happens to it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from runtime import Client, Context, InputRefused, MemoryLedger, RunFailed, RunNotFound, play
from runtime import _cli_show as show
from runtime.testing import Lab
from tests.support import servers
from tests.support.hosts import eventually, until


@play("echo")
async def echo(_: Context, data: Any) -> Any:
    return data


@play("boom")
async def boom(_: Context) -> None:
    raise ValueError("no")


@play("naps")
async def naps(ctx: Context) -> None:
    await ctx.sleep(3600)


@play("listens")
async def listens(ctx: Context) -> Any:
    return await ctx.wait_event("approval", timeout=3600)


async def test_the_light_form_reads_the_row_and_names_its_schema(runlane: Lab) -> None:  # E-5, N-1, N-2, N-5
    async with runlane.open(echo, environment="test", release_id="r1") as rt:
        handle = await rt.submit(echo, 1, org_id="o", surface="sdk")
        await handle.result(10)
        now = await handle.status()
        assert (now.run_id, now.org_id, now.status, now.play) == (handle.run_id, "o", "completed", "echo")
        assert (now.environment, now.release_id) == ("test", "r1")
        assert now.schema == runlane.config().schema
        assert now.details is None  # so nothing of what it ran in
        assert now.started_at is not None
        assert now.created_at <= now.started_at
        assert now.updated_at == now.finished_at
        (listed,) = await rt.runs()
        assert (listed.run_id, listed.environment, listed.schema) == (now.run_id, "test", now.schema)
        with pytest.raises(RunNotFound):
            await rt.status("missing", full=True)


async def test_the_full_form_tells_where_a_launch_came_from(runlane: Lab) -> None:  # C-12 to C-17, N-6
    async with runlane.open(echo) as rt:
        given: dict[str, Any] = {"surface": "app", "trigger": "sql_listener", "scope": "system"}
        handle = await rt.submit(echo, 1, unique_key="u", idempotency_key="i", **given)
        await handle.result(10)
        details = (await rt.status(handle.run_id, full=True)).details
        assert details is not None
        assert (details.surface, details.trigger, details.scope) == ("app", "sql_listener", "system")
        assert (details.unique_key, details.idempotency_key) == ("u", "i")
        created = (await rt.facts(handle.run_id))[0]
        assert details.accepted_at == created.created_at == (await handle.status()).created_at
        assert {name: created.payload[name] for name in given} == given

        # What a newer version has stored and this one does not know is dropped.
        odd = json.dumps({"surface": "telepathy", "trigger": "whim", "scope": ["galaxy"]})
        servers.ask(
            runlane.config().dsn or "",
            f"UPDATE {runlane.config().schema}.facts SET payload = payload || '{odd}' WHERE type = 'run.created'",
        )
        details = (await rt.status(handle.run_id, full=True)).details
        assert details is not None
        assert (details.surface, details.trigger, details.scope) == (None, None, None)

        plain = await rt.submit(echo, 1)
        details = (await rt.status(plain.run_id, full=True)).details
        assert details is not None
        assert (details.surface, details.trigger, details.scope, details.unique_key) == (None,) * 4
        assert details.runtime_backend is None  # N-3: it runs on hosts


async def test_where_the_logs_go_is_told_only_where_that_is_elsewhere(runlane: Lab) -> None:  # N-4
    class Elsewhere(MemoryLedger):
        receiver = "https://ledger.example"

    for ledger, told in ((None, None), (Elsewhere(), "external")):
        async with runlane.open(echo, ledger=ledger) as rt:
            handle = await rt.submit(echo, 1)
            for full in (False, True):
                now = await rt.status(handle.run_id, full=full)
                assert now.log_store == told
                assert ("log_store" in show.run_json(now)) == (told is not None)
            await handle.result(10)


async def test_a_launch_that_asks_hears_how_its_run_went(
    runlane: Lab, capsys: pytest.CaptureFixture[str]
) -> None:  # E-37, E-39
    async with runlane.open(echo, boom) as rt:
        ledger = f"SELECT performance FROM {runlane.config().schema}.ledger_runs WHERE run_id = '{{}}'"
        for which, asked in ((echo, "basic"), (boom, "full"), (echo, None)):
            handle = await rt.submit(which, *[1] if which is echo else [], terminal_performance=asked)
            with contextlib.suppress(RunFailed):
                await handle.result(10)
            now = await rt.status(handle.run_id, full=True)
            assert now.details is not None
            said = (await rt.facts(handle.run_id))[-1].payload
            assert ("performance" in said, "performance_unavailable" in said) == (asked is not None,) * 2
            measured = now.details.performance
            assert (measured is None) == (asked is None)
            if measured is not None:
                assert 0 < measured.host_s <= measured.total_s < 10
                assert measured.attempts == 1
                assert now.details.performance_unavailable is None
                show.show_run(now, [], [], [])
                assert "s on hosts" in capsys.readouterr().out

                async def kept(text: str = ledger.format(handle.run_id)) -> Any:
                    return servers.ask(runlane.config().dsn or "", text)

                assert json.loads((await eventually(kept))[0][0] or "null") == said["performance"]
        for bad in ("much", True, 1):
            with pytest.raises(InputRefused, match="terminal_performance"):
                await rt.submit(echo, 1, terminal_performance=bad)  # type: ignore[arg-type]


async def test_the_full_form_tells_how_a_run_has_ended(runlane: Lab) -> None:  # N-1
    async def terminal(run_id: str) -> Any:
        details = (await rt.status(run_id, full=True)).details
        assert details is not None
        return details.terminal

    async with runlane.open(echo, boom, naps) as rt:
        done = await rt.submit(echo, {"a": 1})
        await done.result(10)
        assert (await terminal(done.run_id))["output"] == {"a": 1}
        failed = await rt.submit(boom)
        with pytest.raises(RunFailed):
            await failed.result(10)
        assert (await terminal(failed.run_id))["error"]["message"] == "no"
        cancelled = await rt.submit(naps)
        assert await terminal(cancelled.run_id) is None
        await cancelled.cancel(reason="enough")
        assert (await terminal(cancelled.run_id))["reason"] == "enough"


async def test_only_a_sleep_has_a_moment_until_which_it_waits(runlane: Lab) -> None:
    async with runlane.open(naps, listens) as rt:
        sleeping, listening = await rt.submit(naps), await rt.submit(listens)
        now = await until(rt, sleeping.run_id, "waiting")
        (wait,) = now.waits
        assert (wait.kind, wait.until) == ("sleep", now.wait_until)
        assert now.wait_until is not None
        now = await until(rt, listening.run_id, "waiting")
        (wait,) = now.waits
        assert (wait.kind, wait.name, now.wait_until) == ("event", "approval", None)
        assert wait.until is not None
        runlane.clock.advance(3601)
        assert await sleeping.result(5) is None


async def test_a_run_that_nobody_serves_is_seen(runlane: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    async def served(run_id: str) -> bool:
        details = (await rt.status(run_id, full=True)).details
        assert details is not None
        return details.served

    async with runlane.open(echo, release_id="new") as rt:
        mine = await rt.submit(echo, 1, delay=3600)
        await eventually(lambda: served(mine.run_id), within_s=5)
        async with runlane.open() as other:  # another release: nobody claims it
            theirs = await other.submit("echo", 1)
            assert not await served(theirs.run_id)
        now = await rt.status(theirs.run_id, full=True)
        show.show_run(now, [], [], [])
        said = capsys.readouterr().out
        assert "no host that claims play echo was seen within the last minute" in said
        show.show_run(await rt.status(mine.run_id, full=True), [], [], [])
        assert "no host" not in capsys.readouterr().out
        runlane.clock.advance(61)
        await eventually(lambda: served(mine.run_id), within_s=5)


async def test_why_facts_are_not_delivered_is_seen(runlane: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    class Deaf(MemoryLedger):
        async def append_many(self, deliveries: Any) -> Any:
            raise PermissionError("the signature is not valid")

    async def shown(run_id: str, words: str) -> bool:
        show.show_run(await rt.status(run_id, full=True), [], [], [])
        said = capsys.readouterr().out
        # The host has said by then what it delivers to.
        return words in said and ("no host" in words) == ("no host" in said)

    async with runlane.open(echo, ledger=Deaf()) as rt, Client.open(runlane.config()) as client:
        nobodys = await client.submit(echo, 1, receiver="nope")
        mine = await rt.submit(echo, 1)
        words = "the latest delivery failed: PermissionError: the signature is not valid"
        await eventually(lambda: shown(mine.run_id, words), within_s=5)
        hint = "no host that delivers to 'nope' was seen within the last minute"
        await eventually(lambda: shown(nobodys.run_id, hint), within_s=5)
        (lane,) = [one for one in await rt.lanes() if one.run_id == mine.run_id]
        assert (lane.blocked, lane.reason) == (False, "PermissionError: the signature is not valid")


async def test_what_the_command_line_shows_of_a_run(runlane: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    async def shown(run_id: str) -> str:
        show.show_run(await rt.status(run_id, full=True), [], [], [])
        return capsys.readouterr().out

    async with runlane.open(echo, listens, environment="test") as rt:
        handle = await rt.submit(listens, surface="cli", array_input_receiver="keeper")
        await until(rt, handle.run_id, "waiting")
        said = await shown(handle.run_id)
        for word in ("environment", "test", "event approval until", "surface", "cli"):
            assert word in said
        ended = await rt.submit(echo, {"a": [1]})
        await ended.result(10)
        assert '{"a": [1]}' in await shown(ended.run_id)
        as_json = show.run_record(await rt.status(handle.run_id, full=True), [], [], [])
        plain = json.loads(json.dumps(as_json, default=str))
        assert (plain["waits"][0]["kind"], plain["details"]["surface"]) == ("event", "cli")
        assert "details" not in show.run_json(await rt.status(handle.run_id))
