"""Plays whose steps leave a mark outside of runlane: hosts of them are killed, and the marks tell what they did.

A mark is one row of a table of the test's own, committed by itself: one when a step's function begins, and one when it
is about to give its output back, a number drawn anew in each call. Runlane's tables have no part in it.
"""

from __future__ import annotations

import functools
import os
import secrets
import threading
from typing import Any

import psycopg
import trio
from psycopg import sql

from runtime import Context, WaitTimedOut, play

STEPS = 50  # of a journey
LEG_STEPS = 5


def marks_schema(schema: str) -> str:
    """Where the marks are that plays leave on hosts of this schema."""
    return f"m{schema}"


_turn = threading.Lock()


@functools.cache
def _connection() -> psycopg.Connection[Any]:
    """This process's own. Its threads take turns."""
    return psycopg.connect(os.environ["RUNLANE_DSN"], autocommit=True)


def leave(ctx: Context, key: str, what: str, output: int) -> None:
    """Leave a mark; when this returns, it is committed."""
    table = sql.Identifier(marks_schema(os.environ["RUNLANE_SCHEMA"]), "marks")
    insert = sql.SQL("INSERT INTO {} (run_id, key, attempt, what, output) VALUES (%s, %s, %s, %s, %s)")
    with _turn:
        _connection().execute(insert.format(table), (ctx.run_id, key, ctx.attempt, what, output))


async def work(ctx: Context, key: str) -> int:
    """A step's function: what it gives back is never the same again."""
    output = secrets.randbits(48)
    await trio.to_thread.run_sync(leave, ctx, key, "begun", output)
    await trio.sleep(0.001 * (output % 20))
    await trio.to_thread.run_sync(leave, ctx, key, "done", output)
    return output


def work_in_thread(ctx: Context, key: str) -> int:
    """The same as a plain function."""
    output = secrets.randbits(48)
    leave(ctx, key, "begun", output)
    leave(ctx, key, "done", output)
    return output


@play("leg")
async def leg(ctx: Context, _: Any) -> dict[str, int]:
    """A child: a few steps around a sleep that parks it. What each step gave, by key."""
    given = {}
    for number in range(LEG_STEPS):
        if number == 2:
            await ctx.sleep(0.4)
        given[f"leg-{number}"] = await ctx.step(f"leg-{number}", work, ctx, f"leg-{number}")
    return given


@play("journey", retries=2, backoff_s=0.1)
async def journey(ctx: Context, data: dict[str, Any]) -> dict[str, Any]:
    """Fifty steps, one by one, at once and in a map; sleeps, events before and after their wait, two children.

    ``data["stumbles"]``: it fails the first time that it comes to its middle.
    """
    given: dict[str, int] = {}

    async def step(key: str) -> None:
        given[key] = await ctx.step(key, work, ctx, key)

    for number in range(8):
        await step(f"alone-{number}")
    early = await ctx.wait_event("early", key="early")
    child = await ctx.start_run(leg, {"of": "start_run"}, key="beside")

    async def mapped(number: int) -> int:
        return await work(ctx, f"mapped[{number}]")

    outputs = await ctx.map("mapped", mapped, range(20), concurrency=5)
    given |= {f"mapped[{number}]": output for number, output in enumerate(outputs)}
    await ctx.sleep(0.5, key="nap")
    if data["stumbles"] and ctx.failures == 0:
        raise ConnectionError("the first time")
    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(step, f"beside-{number}")
    called = await ctx.call(leg, {"of": "call"}, key="called")
    for number in range(8):
        key = f"thread-{number}"
        given[key] = await ctx.step(key, work_in_thread, ctx, key)
    late = await ctx.wait_event("late", key="late")
    try:
        await ctx.wait_event("never", timeout=0.3, key="never")
    except WaitTimedOut:
        for number in range(8):
            await step(f"last-{number}")
    return {"given": given, "early": early, "late": late, "legs": [await child.result(), called]}
