"""Array-input intent as a play registers it."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from runtime import Context, InputRefused, RunFailed, SyncContext, play
from tests.support.hosts import Hosts, eventually

_STANDS = "SELECT array_input, terminal_receiver FROM @.runs WHERE run_id = '{}'"


@play("stages")
async def stages(ctx: Context) -> None:
    for _ in range(3):
        await ctx.register_array_input()


@play("stages-in-thread")
def stages_in_thread(ctx: SyncContext) -> None:
    ctx.register_array_input()


@play("stages-late")
async def stages_late(ctx: Context) -> None:
    """Cancelled, it still tries to stage."""
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await ctx.register_array_input()


@pytest.mark.parametrize("which", [stages, stages_in_thread])
async def test_a_play_registers_before_it_stages(hosts: Hosts, which: Any) -> None:  # M-1, M-4
    async with hosts.open(which) as rt:
        handle = await rt.submit(which, array_input_receiver="keeper", org_id="o")
        await handle.result(10)
        (row,) = await hosts.ask(_STANDS.format(handle.run_id))
        assert tuple(row) == (True, "keeper")


async def test_a_launch_without_a_receiver_may_stage_nothing(hosts: Hosts) -> None:  # M-7, M-11
    async with hosts.open(stages) as rt:
        with pytest.raises(RunFailed, match="array_input_receiver: the run was submitted without one"):
            await (await rt.submit(stages)).result(10)
        for bad in ("", 5, "x" * 129):
            with pytest.raises(InputRefused, match="array_input_receiver"):
                await rt.submit(stages, array_input_receiver=bad)  # type: ignore[arg-type]


async def test_a_cancelled_attempt_may_stage_nothing(hosts: Hosts) -> None:  # M-2, M-3
    async with hosts.open(stages_late) as rt:
        handle = await rt.submit(stages_late, array_input_receiver="keeper")

        async def running() -> bool:
            return (await handle.status()).status == "running"

        await eventually(running)
        assert (await handle.cancel()).won
        (row,) = await hosts.ask(_STANDS.format(handle.run_id))
        assert tuple(row) == (False, None)


async def test_a_registration_survives_the_loss_of_the_connection(hosts: Hosts) -> None:
    async with hosts.open(stages) as rt:
        (pid,) = await hosts.backends("control")
        handles = [await rt.submit(stages, array_input_receiver="keeper") for _ in range(10)]
        await hosts.ask(f"SELECT pg_terminate_backend({pid})")
        for handle in handles:
            await handle.result(15)
            (row,) = await hosts.ask(_STANDS.format(handle.run_id))
            assert tuple(row) == (True, "keeper")
