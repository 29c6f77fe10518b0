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


@play("hold")
async def hold(ctx: Context, data: Any) -> int:
    """Run for ever at the first attempt, and end at once at every later one."""
    if ctx.attempt == 1:
        await trio.sleep_forever()
    return ctx.attempt
