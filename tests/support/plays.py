"""Plays for hosts that tests start as processes of their own."""

from __future__ import annotations

from typing import Any

import trio

from runtime import Context, play


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


quick = [echo, fails]
number = 42
