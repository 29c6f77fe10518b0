"""Rate scopes as a play sees them: ``async with ctx.rate("provider") as permit``.

Owns the life of one permit: asked for, granted, refused by the provider, given back. It never talks to the database:
messages go to the rates actor.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

import trio

from actors.attempts import Attempt
from actors.core import Mailbox
from actors.rates import Acquire, Release
from runtime.codec import preview
from runtime.ids import check_shared_name
from sql import rates as door
from sql.calls import new_token
from sql.errors import CapacityUnavailable, HostStopping, InputRefused, wait_s

MAX_COST = 1_000_000.0
_PATIENCE_S = 1.0


Pending = Callable[[], contextlib.AbstractContextManager[None]]


class Permit:
    """A granted slot. ``granted_at`` is by the database's clock."""

    def __init__(self, slot: door.Slot, granted_at: datetime, mailbox: Mailbox[Acquire | Release]) -> None:
        self.granted_at = granted_at
        self._slot = slot
        self._mailbox = mailbox
        self._refused = False

    def retry_after(self, seconds: float) -> None:
        """The provider has refused, for so many seconds: the scope is blocked for everybody, on all hosts.

        Then one permit probes, and the others go on as soon as that one has ended well. Raise what you like to end this
        attempt; ``CapacityUnavailable(retry_after=seconds)`` costs nothing.
        """
        seconds = wait_s("seconds", seconds)
        self._refused = True
        self._send("refused", seconds)

    def end(self, *, well: bool) -> None:
        """Give it back."""
        self._send("done" if well and not self._refused else "failed")

    def _send(self, result: str, retry_after_s: float = 0.0) -> None:
        send(self._mailbox, self._slot, result, retry_after_s)


class SyncPermit:
    """The same for a play that runs in a thread."""

    def __init__(self, permit: Permit) -> None:
        self.granted_at = permit.granted_at
        self._permit = permit

    def retry_after(self, seconds: float) -> None:
        """As ``Permit.retry_after``."""
        trio.from_thread.run_sync(self._permit.retry_after, seconds)

    @contextlib.contextmanager
    def ending(self) -> Iterator[SyncPermit]:
        """Gives the permit back at the end of the block, without waiting."""
        try:
            yield self
        except BaseException:
            trio.from_thread.run_sync(partial(self._permit.end, well=False))
            raise
        trio.from_thread.run_sync(partial(self._permit.end, well=True))


def send(
    mailbox: Mailbox[Acquire | Release], slot: door.Slot, result: str, retry_after_s: float = 0.0
) -> None:
    """Report a slot's result. On a host that has stopped, the end of the attempt's lease does."""
    with contextlib.suppress(HostStopping):
        mailbox.send_nowait(Release(door.Result(slot.scope, slot.token, result, retry_after_s)))


@contextlib.asynccontextmanager
async def permit(
    mailbox: Mailbox[Acquire | Release],
    attempt: Attempt,
    name: Any,
    cost: Any,
    timeout_s: Any,
    *,
    pending: Pending,
) -> AsyncIterator[Permit]:
    """A slot of the scope ``name`` for the length of the block."""
    granted = await acquire(mailbox, attempt, name, cost, timeout_s, pending=pending)
    with ending(granted):
        yield granted


@contextlib.contextmanager
def ending(granted: Permit) -> Iterator[None]:
    """Gives a permit back at the end of the block, without waiting."""
    try:
        yield
    except BaseException:
        granted.end(well=False)
        raise
    granted.end(well=True)


async def acquire(
    mailbox: Mailbox[Acquire | Release],
    attempt: Attempt,
    name: Any,
    cost: Any,
    timeout_s: Any,
    *,
    pending: Pending,
) -> Permit:
    """Wait for a slot. CapacityUnavailable when it is more than ``timeout_s`` away. ``pending`` surrounds the wait."""
    slot = door.Slot(check_shared_name(name), new_token(), _cost(cost), attempt.run_id, attempt.attempt)
    most_s = _timeout(timeout_s)
    wanted = Acquire(slot, most_s)
    mailbox.send_nowait(wanted)
    try:
        # An answer to a patient caller takes a round trip, however short its patience.
        with pending(), trio.move_on_after(max(most_s, _PATIENCE_S)):
            granted_at, starts = await wanted.reply.wait()
            await trio.sleep_until(starts)
            return Permit(slot, granted_at, mailbox)
        raise CapacityUnavailable(f"rate scope {slot.scope}: no slot within {most_s:g} s")
    except BaseException:
        send(mailbox, slot, "unused")
        raise


def _cost(cost: Any) -> float:
    number = isinstance(cost, (int, float)) and not isinstance(cost, bool)
    if not number or not 0 < cost <= MAX_COST:
        raise InputRefused("cost", f"must be a number above 0 and at most {MAX_COST:g}, not {preview(cost)}")
    return float(cost)


def _timeout(timeout: Any) -> float:
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise InputRefused("timeout", f"must be a number of seconds from 0, or None, not {preview(timeout)}")
    return float(timeout)
