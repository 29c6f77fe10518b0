"""Unique runs through the public API."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from runtime import Context, DuplicateRun, InputRefused, RunCancelled, Submit, play
from runtime.testing import Lab
from tests.support.hosts import Hosts, until


@play("works")
async def works(_: Context, data: Any) -> Any:
    if data == "forever":
        await trio.sleep_forever()
    return data


async def test_one_run_at_a_time_has_the_key(hosts: Hosts) -> None:
    async with hosts.open(works) as rt:
        first = await rt.submit(works, "forever", unique_key="k")
        with pytest.raises(DuplicateRun) as caught:
            await rt.submit(works, 2, unique_key="k")
        assert caught.value.run_id == first.run_id
        same = await rt.submit(works, 2, unique_key="k", on_conflict="existing")
        assert (same.run_id, same.created) == (first.run_id, False)
        await until(rt, first.run_id, "running")

        last = await rt.submit(works, 3, unique_key="k", on_conflict="replace")
        with pytest.raises(RunCancelled, match=f"replaced by run {last.run_id}"):
            await first.result(5)
        assert await last.result(5) == 3
        assert await (await rt.submit(works, 4, unique_key="k")).result(5) == 4
        await hosts.check([first.run_id, last.run_id])


async def test_a_key_with_a_window(runlane: Lab) -> None:
    async with runlane.open(works) as rt:
        first = await rt.submit(works, 1, unique_key="k", unique_for_s=3600)
        assert await first.result(5) == 1
        runlane.clock.advance(3590)
        with pytest.raises(DuplicateRun):
            await rt.submit(works, 2, unique_key="k")
        runlane.clock.advance(10)
        assert (await rt.submit(works, 2, unique_key="k")).created


async def test_many_submits_of_a_key_at_once_and_from_two_hosts(hosts: Hosts) -> None:
    async with hosts.open(works) as rt, hosts.open(works) as other:
        created: list[str] = []

        async def ask(runtime: Any, number: int) -> None:
            item = Submit(works, "forever", unique_key=f"k{number % 5}", on_conflict="existing")
            created.extend(
                handle.run_id for handle in await runtime.submit_many([item] * 3) if handle.created
            )

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(ask, rt if number % 2 else other, number)
        assert len(created) == 5
        assert await hosts.value("SELECT count(*) FROM @.runs") == 5


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"unique_key": ""}, "unique_key"),
        ({"unique_key": 7}, "unique_key"),
        ({"unique_for_s": 5.0}, "unique_key"),
        ({"on_conflict": "reject"}, "unique_key"),
        ({"unique_key": "k", "unique_for_s": 0}, "unique_for_s"),
        ({"unique_key": "k", "unique_for_s": float("nan")}, "unique_for_s"),
        ({"unique_key": "k", "unique_for_s": True}, "unique_for_s"),
        ({"unique_key": "k", "on_conflict": "ignore"}, "on_conflict"),
        ({"unique_key": "k", "on_conflict": ["reject"]}, "on_conflict"),
        ({"surface": "telepathy"}, "surface"),
        ({"trigger": ""}, "trigger"),
        ({"scope": "galaxy"}, "scope"),
        ({"terminal_receiver": "a\x00"}, "terminal_receiver"),
    ],
)
async def test_bad_options_are_refused_by_name(hosts: Hosts, options: dict[str, Any], field: str) -> None:
    async with hosts.open(works) as rt:
        with pytest.raises(InputRefused) as caught:
            await rt.submit(works, 1, **options)
        assert caught.value.field == field
