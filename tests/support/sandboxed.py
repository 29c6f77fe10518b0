"""Plays that run in local sandboxes, in a module that a runner's process can import."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import attrs
import trio

from runtime import Context, SyncContext, play
from runtime.sandboxes import Created, Inspection, SandboxRef, SandboxSpec


@attrs.define
class Pretended:
    """A provider whose sandboxes are nothing but entries: the test is the runner.

    ``create_s``: how long making one takes, also when it is cut short: then it comes into being all the same.
    """

    key: str = "pretended"
    create_s: float = 0.0
    specs: dict[str, SandboxSpec] = attrs.field(factory=dict)
    fails: bool = False

    async def create(self, spec: SandboxSpec) -> Created:
        """It is there when the time is over, whoever still waits for it."""
        self.check()
        if self.create_s:
            trio.lowlevel.spawn_system_task(self._later, spec)
            await trio.sleep(self.create_s)
        self.specs[spec.sandbox] = spec
        return Created(f"p-{spec.sandbox}")

    async def _later(self, spec: SandboxSpec) -> None:
        await trio.sleep(self.create_s)
        self.specs[spec.sandbox] = spec

    async def inspect(self, ref: SandboxRef) -> Inspection:
        """Whether there is an entry."""
        self.check()
        return Inspection("running" if ref.sandbox in self.specs else "absent")

    async def delete(self, ref: SandboxRef) -> str:
        """No entry any more."""
        self.check()
        return "already_absent" if self.specs.pop(ref.sandbox, None) is None else "deleted"

    async def names(self) -> Sequence[str]:
        """The entries."""
        self.check()
        return list(self.specs)

    def check(self) -> None:
        """Raise while it fails."""
        if self.fails:
            raise ConnectionError("the provider is away")


@play("boxed", sandbox="local", ceiling_s=120)
async def boxed(ctx: Context, data: dict[str, Any]) -> dict[str, Any]:
    """Says a little, works for ``data["work_s"]`` and answers who it was."""
    ctx.log("hello from a sandbox", pid=os.getpid())
    ctx.progress(1, 2)
    await trio.sleep(data.get("work_s", 0.0))
    return {"pid": os.getpid(), "attempt": ctx.attempt, "echo": data.get("echo")}


@play("boxed-sync", sandbox="local", ceiling_s=120)
def boxed_sync(ctx: SyncContext, data: dict[str, Any]) -> dict[str, Any]:
    """The same for a thread."""
    ctx.log("hello from a thread")
    time.sleep(data.get("work_s", 0.0))
    return {"pid": os.getpid()}


@play("boxed-fails", sandbox="local", retries=1, backoff_s=0.1, ceiling_s=120)
async def boxed_fails(ctx: Context, data: dict[str, Any]) -> int:
    """Fails at its first attempt."""
    if ctx.attempt == 1:
        raise ValueError("not yet")
    return ctx.attempt


@play("boxed-naps", sandbox="local", ceiling_s=120)
async def boxed_naps(ctx: Context, data: dict[str, Any]) -> int:
    """Sleeps long enough to give its sandbox up."""
    await ctx.sleep(data["nap_s"])
    return ctx.attempt


@play("boxed-steps", sandbox="local", ceiling_s=120)
async def boxed_steps(ctx: Context, data: dict[str, Any]) -> dict[str, Any]:
    """Steps, a crash between them, and what is recorded of them."""
    first = await ctx.step("pid", os.getpid)
    if ctx.attempt == 1:
        os._exit(3)
    doubled = await ctx.map("double", _double, range(20))
    return {"first": first, "mine": os.getpid(), "doubled": doubled}


async def _double(n: int) -> int:
    return 2 * n


@play("boxed-parent", sandbox="local", ceiling_s=120)
async def boxed_parent(ctx: Context, data: dict[str, Any]) -> dict[str, Any]:
    """Asks for everything that is only to be had of the host: children, events, rate scopes, dependencies."""
    child = await ctx.start_run("boxed-child", {"n": 20}, key="child")
    async with ctx.rate("slow"), ctx.dependency("crm"):
        pass
    event = await ctx.wait_event("go", key="go")
    return {"child": await child.result(), "event": event, "attempt": ctx.attempt}


@play("boxed-child")
async def boxed_child(ctx: Context, data: dict[str, Any]) -> int:
    """On a host."""
    return 2 * int(data["n"])


@play("boxed-dies", sandbox="local", ceiling_s=120)
async def boxed_dies(ctx: Context, data: dict[str, Any]) -> int:
    """Its process is gone without a word, the first time."""
    if ctx.attempt == 1:
        print("about to die \x00", flush=True)
        os._exit(7)
    return ctx.attempt


@play("pretended", sandbox="pretended", ceiling_s=120)
async def pretended(ctx: Context, data: dict[str, Any]) -> int:
    """Never runs here: the test is its runner."""
    return ctx.attempt


providers = {"pretended": Pretended()}
