"""What providers of sandboxes on other machines share.

Owns how their clients are called off the loop, what is said of one that is missing or does not answer, how our names
fit into theirs, and the shell line that sets limits. It knows no provider.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
import shlex
import signal
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import trio

from runtime.sandboxes.base import TAIL_BYTES, SandboxFault
from sql.errors import ConfigError

T = TypeVar("T")

AT_ONCE = 40
"""Calls of one provider side by side: as many threads, and as many connections where each has its own."""

_FITS = re.compile(r"[A-Za-z0-9._-]{1,63}")


class Calls:
    """Calls of one provider's blocking client, each for its own time.

    The threads are the provider's alone: when it hangs, nobody else waits for them.
    """

    def __init__(self, provider: str) -> None:
        self._provider = provider
        self._threads = trio.CapacityLimiter(AT_ONCE)

    async def __call__(self, call: Callable[[], T], *, within_s: float) -> T:
        """What the call answers. Cut short, it goes on behind our back, so it has to end by itself.

        Raises SandboxFault when it takes longer than ``within_s``, with the wait for a thread.
        """
        try:
            with trio.fail_after(within_s):
                return await trio.to_thread.run_sync(call, limiter=self._threads, abandon_on_cancel=True)
        except trio.TooSlowError:
            raise no_answer(self._provider, within_s) from None


def no_answer(provider: str, within_s: float) -> SandboxFault:
    """The fault of a call that took too long."""
    return SandboxFault(f"{provider}: no answer within {within_s:g} s")


def not_installed(provider: str, extra: str, error: ImportError) -> ConfigError:
    """The error of a provider whose client is not there."""
    return ConfigError(
        f"{provider} needs {error.name}: install runlane with the extra `{extra}` "
        f"(in a checkout: pip install '.[{extra}]')"
    )


def short_name(sandbox: str) -> str:
    """Our name where a provider takes 63 letters, digits, dots, dashes and underscores: itself, or its beginning and a
    digest. Always the same one."""
    if _FITS.fullmatch(sandbox):
        return sandbox
    digest = hashlib.sha256(sandbox.encode()).hexdigest()[:24]
    return f"{re.sub(r'[^A-Za-z0-9._-]', '-', sandbox)[:38]}.{digest}"


def limited(command: Sequence[str], *, cpu_s: float | None = None, memory_bytes: int | None = None) -> str:
    """A line for ``sh`` that becomes the command, under these limits of each of its processes."""
    limits = ""
    if cpu_s is not None:
        limits += f"ulimit -t {max(1, math.ceil(cpu_s))}; "
    if memory_bytes is not None:
        limits += f"ulimit -v {max(1, memory_bytes // 1024)}; "
    return f"{limits}exec {shlex.join(command)}"


def how_it_ended(exit_code: int, output: str) -> dict[str, Any]:
    """Diagnostics of a command, as shells and containers count: 128 and more is a signal."""
    found: dict[str, Any] = {
        "reason": "its command has ended",
        "exit_code": exit_code,
        "output_tail": output[-TAIL_BYTES:],
    }
    if exit_code > 128:
        with contextlib.suppress(ValueError):  # a program may use such a number for itself
            found |= {"exit_code": None, "signal": signal.Signals(exit_code - 128).name}
    return found
