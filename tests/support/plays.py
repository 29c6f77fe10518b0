"""Plays for hosts that tests start as processes of their own."""

from __future__ import annotations

from typing import Any

import trio

from runtime import Context, StepFailed, play


@play("echo")
async def echo(ctx: Context, data: Any) -> Any:
    """Gives its input back."""
    ctx.log("echoing", size=len(str(data)))
    return data


@play("fails")
async def fails(ctx: Context, data: Any) -> None:
    """Always fails."""
    raise ValueError(f"no good: {data}")


@play("waits")
async def waits(ctx: Context, data: Any) -> None:
    """Runs until it is cancelled."""
    await trio.sleep_forever()


@play("stubborn")
async def stubborn(ctx: Context, data: Any) -> None:
    """Takes a long time to clean up: it shields itself for ``data`` seconds."""
    with trio.move_on_after(data, shield=True):
        await trio.sleep_forever()


@play("stepping")
async def stepping(ctx: Context, data: list[int]) -> int:
    """A step for each number, which divides by it; how many went well."""
    done = 0
    for n in data:
        try:
            await ctx.step(str(n), lambda n: 1 / n, n)
        except StepFailed:
            continue
        done += 1
    return done


quick = [echo, fails]
number = 42
