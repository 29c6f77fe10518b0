"""A host in a process of its own: ``python -m tests.support.hosted SETTINGS``, until a signal.

Says on stdout, as lines of JSON, that it is ready and what its plays do. Its plays are importable by others.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import trio

from runtime import Context, Runtime, RuntimeConfig, play


def say(**what: Any) -> None:
    """A line for the parent."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


@play("quick")
async def quick(_: Context, data: Any) -> Any:
    """Gives back its input."""
    return data


@play("busy")
async def busy(ctx: Context, data: Any) -> Any:
    """Works for a moment, and says so."""
    ctx.log("at work", attempt=ctx.attempt)
    ctx.progress(1, 2)
    await trio.sleep(float(data))
    return ctx.attempt


@play("endless")
async def endless(ctx: Context, _: Any) -> None:
    """Never ends on its own."""
    await trio.sleep_forever()


@play("deaf")
def deaf(_: Any, data: Any) -> None:
    """A thread that hears nothing."""
    time.sleep(float(data))


@play("naps")
async def naps(ctx: Context, data: Any) -> int:
    """Parks, and then works."""
    await ctx.sleep(float(data))
    return ctx.attempt


@play("holder")
async def holder(ctx: Context, _: Any) -> None:
    """Holds a permit, and never lets go."""
    async with ctx.rate("browser"):
        say(holds=ctx.run_id)
        await trio.sleep_forever()


@play("rated")
async def rated(ctx: Context, _: Any) -> None:
    """Takes a permit for a moment."""
    async with ctx.rate("browser"):
        pass


@play("stepping")
async def stepping(ctx: Context, data: Any) -> int:
    """Steps that each leave a line in a file, which survives this process."""

    async def work(n: int) -> int:
        with (Path(data["folder"]) / f"{ctx.run_id}.{ctx.attempt}").open("a") as file:
            file.write(f"{ctx.run_id} step-{n} {ctx.attempt}\n")
        await trio.sleep(data["pause"])
        return n

    return sum([await ctx.step(f"step-{n}", work, n) for n in range(data["steps"])])


PLAYS = [quick, busy, endless, deaf, naps, holder, rated, stepping]


async def main(settings: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    async with Runtime.open(RuntimeConfig(**settings), plays=PLAYS) as runtime:
        say(host=runtime.host_id, health=runtime.health_port)
        await runtime.wait_for_signal()
    say(stopped=True)


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]))
