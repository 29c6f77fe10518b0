"""Clients on trio: the verbs of a runtime at the cost of two connections."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from runtime import Client, Context, DatabaseError, ResultTimeout, RunCancelled, Submit, play
from sql.errors import SchemaNotReady
from tests.support.hosts import Hosts, eventually


@play("echo")
async def echo(_: Context, data: Any) -> Any:
    return data


@play("forever")
async def forever(_: Context) -> None:
    await trio.sleep_forever()


async def test_a_client_uses_two_connections_and_so_does_a_runtime_without_plays(alone: Hosts) -> None:
    async with alone.open():
        assert len(await alone.backends()) == 2
    async with Client.open(alone.config()) as client:
        assert await client.runs() == []
        assert len(await alone.backends()) == 2
        assert len(await alone.backends("client")) == len(await alone.backends("listener")) == 1


async def test_the_verbs_of_a_client_at_work_together_on_one_connection(hosts: Hosts) -> None:
    async with hosts.open(echo, forever), Client.open(hosts.config()) as client:
        outputs: list[Any] = []

        async def one(number: int) -> None:
            handle = await client.submit("echo", number)
            outputs.append(await handle.result(10))

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(one, number)
        assert sorted(outputs) == list(range(50))
        assert len(await client.runs(play="echo")) == 50

        handles = await client.submit_many([("forever", None), Submit("forever", run_id="mine")])
        with pytest.raises(ResultTimeout):
            await client.result("mine", timeout=0.05)
        for handle in handles:
            assert (await handle.cancel(reason="enough")).won
            with pytest.raises(RunCancelled, match="enough"):
                await client.result(handle.run_id)
        assert [fact.type for fact in await client.facts("mine")][-1] == "run.cancelled"


async def test_what_a_client_asked_survives_the_loss_of_its_connection(hosts: Hosts) -> None:
    async with hosts.open(echo), Client.open(hosts.config()) as client:
        (pid,) = await hosts.backends("client")
        async with trio.open_nursery() as nursery:

            async def one(number: int) -> None:
                assert await (await client.submit("echo", number, run_id=f"r-{number}")).result(15) == number

            for number in range(20):
                nursery.start_soon(one, number)
            await hosts.ask(f"SELECT pg_terminate_backend({pid})")

        async def replaced() -> bool:
            return await hosts.backends("client") not in ([], [pid])

        await eventually(replaced)
        assert (await client.cancel("r-0")).status == "completed"
        await hosts.check([f"r-{number}" for number in range(20)])


async def test_a_client_does_not_build_a_schema(hosts: Hosts) -> None:
    with pytest.raises(SchemaNotReady, match=r"does not exist.*runlane migrate"):
        async with Client.open(hosts.config()):
            pass
    assert not await hosts.ask(f"SELECT FROM pg_namespace WHERE nspname = '{hosts.schema}'")


async def test_an_error_in_the_block_of_a_client_leaves_it_as_it_is(hosts: Hosts) -> None:
    async with hosts.open():
        with pytest.raises(DatabaseError, match="mine"):
            async with Client.open(hosts.config()):
                raise DatabaseError("mine")
