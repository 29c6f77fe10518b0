"""The kernel for tests that are plain functions: open in a trio thread, reached through a portal."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import attrs
import trio

from tests.support.callers import Caller, open_caller
from tests.support.kernel import Kernel, open_kernel

T = TypeVar("T")


@attrs.frozen
class Portal:
    """The kernel, open in a trio thread of its own, for rules that are plain functions."""

    kernel: Kernel
    caller: Caller
    token: Any

    def call(self, function: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any) -> T:
        return trio.from_thread.run(partial(function, *args, **kwargs), trio_token=self.token)

    async def hold(self, statement: str, *args: Any) -> None:
        """Somebody else locks what this statement selects, until ``let_go``."""
        await self.caller.begin()
        await self.caller.fetch(self.kernel.render(statement), *args)

    async def let_go(self) -> None:
        await self.caller.rollback()


@contextmanager
def open_portal(dsn: str, schema: str, crash_cap: int) -> Iterator[Portal]:
    """The kernel on a fresh schema with a frozen clock, served by a thread until the block ends."""
    ready, stop, box = threading.Event(), trio.Event(), []

    async def main() -> None:
        try:
            async with (
                open_kernel(dsn, schema, lock_timeout_s=0.5) as kernel,
                open_caller(dsn, schema) as caller,
            ):
                await kernel.freeze_clock()
                await kernel.execute("UPDATE @schema@.plays SET crash_cap = $1", crash_cap)
                box.append(Portal(kernel, caller, trio.lowlevel.current_trio_token()))
                ready.set()
                await stop.wait()
        finally:
            ready.set()

    thread = threading.Thread(target=trio.run, args=(main,), daemon=True)
    thread.start()
    assert ready.wait(30)
    (portal,) = box
    try:
        yield portal
    finally:
        trio.from_thread.run_sync(stop.set, trio_token=portal.token)
        thread.join(30)
