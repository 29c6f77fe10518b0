"""Plays in local sandboxes for hosts that are killed, and such a host.

``python -m tests.support.labours SETTINGS FOLDER`` says on stdout, as a line of JSON, that it is ready,
and stops at the end of stdin or by a signal.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import trio

from runtime import Context, Runtime, RuntimeConfig, play
from runtime.sandboxes import LocalProvider, SandboxRef

HELD = "held"
HELD_S = 8.0
"""The longest that a deletion is put off for a sandbox that has a file of that name."""


class Patient(LocalProvider):
    """The local provider, slow to delete what is held: what comes back from the dead gets its time to speak."""

    async def delete(self, ref: SandboxRef) -> str:
        """Once nobody holds it any more."""
        with trio.move_on_after(HELD_S):
            while await trio.Path(self.folder / ref.sandbox / HELD).exists():  # noqa: ASYNC110 - another process has it
                await trio.sleep(0.05)
        return await super().delete(ref)


@play("labour", sandbox="local", ceiling_s=600)
async def labour(ctx: Context, data: dict[str, Any]) -> dict[str, Any]:
    """A step, some work, a nap that gives the sandbox up if it shall, and more work: who did it, and who its step."""
    ctx.log("at work", pid=os.getpid())
    step = await ctx.step("pid", os.getpid)
    await trio.sleep(data["work_s"])
    if data["nap_s"]:
        await ctx.sleep(data["nap_s"], key="nap")
    ctx.progress(1, 2)
    await trio.sleep(data["work_s"])
    return {"attempt": ctx.attempt, "pid": os.getpid(), "step": step, "echo": data["echo"]}


async def main(settings: dict[str, Any], folder: Path) -> None:
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="%(levelname)s %(name)s %(message)s")
    config = RuntimeConfig(**settings)
    async with Runtime.open(config, plays=[labour], sandboxes={"local": Patient(folder)}) as runtime:
        sys.stdout.write(json.dumps({"host": runtime.host_id}) + "\n")
        sys.stdout.flush()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_until_parent_is_gone, nursery.cancel_scope)
            await runtime.wait_for_signal()
            nursery.cancel_scope.cancel()


async def _until_parent_is_gone(scope: trio.CancelScope) -> None:
    await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    scope.cancel()


if __name__ == "__main__":
    trio.run(main, json.loads(sys.argv[1]), Path(sys.argv[2]))
