"""The plays that hosts under measurement run.

Owns plays that do as little as a scenario needs. They never touch the database.
"""

from __future__ import annotations

from typing import Any

import trio

from runtime import Context, play


@play("noop")
async def noop(ctx: Context, data: Any) -> None:
    """Do nothing."""


async def nothing(n: int) -> int:
    """A step that does nothing."""
    return n


@play("counts")
async def counts(ctx: Context, data: int) -> None:
    """So many steps, one after the other."""
    for n in range(data):
        await ctx.step(f"step-{n}", nothing, n)


@play("maps")
async def maps(ctx: Context, data: dict[str, int]) -> int:
    """So many steps, as one map."""
    return len(await ctx.map("step", nothing, range(data["steps"]), concurrency=data["concurrency"]))


@play("hold")
async def hold(ctx: Context, data: Any) -> int:
    """Run for ever at the first attempt, and end at once at every later one."""
    if ctx.attempt == 1:
        await trio.sleep_forever()
    return ctx.attempt
