"""The context: what a play may ask of runlane while it runs.

Owns durable sleeps, log lines and progress as a play sees them. It never writes to the database itself: waits end the
attempt through its scope, and what is said travels with the facts actor.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import attrs
import trio

from actors.attempts import Attempt, Why
from actors.core import Mailbox
from actors.rates import Acquire, Release
from runtime import rates
from runtime.codec import JsonCodec, preview, scrub
from runtime.rates import Permit, SyncPermit
from sql.errors import InputRefused, RunCancelled
from sql.types import Lane

_LOG_BYTES = 65_536
_MAX_SLEEP_S = 315_576_000.0
_MAX_KEY = 255
_MAX_NUMBER = sys.float_info.max
# Tasks that were started beside a wait come to their own waits first, so that all of them count from now.
_TURNS_FOR_SIBLINGS = 3


Register = Callable[[Attempt], Awaitable[str]]
"""Registers an attempt's intent to stage array input: ``done``, ``lost`` or ``no_receiver``."""


@attrs.define(slots=True)
class Wait:
    """A durable wait that an attempt stands at."""

    key: str
    kind: str
    delay_s: float


class Context:
    """One attempt of a run, given to its play.

    ``run_id`` names the run; ``attempt`` counts its attempts from 1; ``failures`` how many of them have failed.
    """

    def __init__(
        self,
        attempt: Attempt,
        codec: JsonCodec,
        *,
        say: Callable[[Attempt], None],
        register: Register,
        rates_box: Mailbox[Acquire | Release],
        park_after_s: float,
        max_depth: int,
    ) -> None:
        self.run_id = attempt.run_id
        self.attempt = attempt.attempt
        self.failures = attempt.claimed.failures
        self.org_id = attempt.claimed.org_id
        self._attempt = attempt
        self._codec = codec
        self._say = say
        self._register = register
        self._rates = rates_box
        self._park_after_s = park_after_s
        self._max_depth = max_depth
        self._task: trio.lowlevel.Task | None = None
        self._ordinal = 0
        self._keys: set[str] = set()
        self.waits: dict[str, Wait] = {}

    def __repr__(self) -> str:
        return f"<Context run={self.run_id} attempt={self.attempt}>"

    @property
    def labels(self) -> dict[str, str]:
        """The labels that the run was submitted with."""
        labels: dict[str, str] = json.loads(self._attempt.claimed.labels or "{}")
        return labels

    async def sleep(self, seconds: float, *, key: str | None = None) -> None:
        """Sleep durably: a long sleep parks the run, which frees its slot and survives every restart.

        The play is then run again from its beginning by whichever host is free, and passes this line at once. A sleep
        up to the host's ``park_after_s`` stays in memory. Its length counts on the database clock from the first time
        the run came here.

        ``key`` names the wait, unique within the run. Without one, waits are numbered in the order in which the play
        comes to them, which is only possible outside of nested nurseries.
        """
        if not await self._passed(seconds, key):
            # Unwound by cancellation: no `except Exception` of the play can swallow it, every `finally` runs.
            await trio.sleep_forever()

    async def _passed(self, seconds: Any, key: Any) -> bool:
        """Whether the wait is over; False when the attempt has been told to park."""
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
            raise InputRefused("seconds", f"must be a number, not {type(seconds).__name__}")
        if not 0 <= seconds <= _MAX_SLEEP_S:
            raise InputRefused(
                "seconds", f"must be from 0 to {_MAX_SLEEP_S:.0f} (10 years), not {preview(seconds)}"
            )
        self._check_live()
        key = self._wait_key(key)
        left = self._attempt.claimed.waits.get(key, seconds)
        if left is None:
            await trio.lowlevel.checkpoint()
            return True
        if key not in self._attempt.claimed.waits and left <= self._park_after_s:
            await trio.sleep(left)
            return True
        self.waits[key] = Wait(key, "sleep", float(seconds))
        for _ in range(_TURNS_FOR_SIBLINGS):
            await trio.lowlevel.checkpoint()
        self._attempt.stop(Why.PARKED)
        return False

    def log(self, message: str, **fields: Any) -> None:
        """Say something about the run: a fact of its observability lane, stored within the host's ``flush_ms``.

        Never fails and never waits. ``fields`` are JSON; what cannot be stored is replaced and says so.
        """
        self._check_live()
        if self._attempt.say(Lane.OBSERVABILITY, "run.log", self._log_record(message, fields)):
            self._say(self._attempt)

    def _log_record(self, message: Any, fields: dict[str, Any]) -> str:
        """The JSON text of a log line. The message stays readable whatever becomes of the fields."""
        try:
            shown = message if isinstance(message, str) else str(message)
        except Exception:  # the caller's own object
            shown = preview(message)
        line = json.dumps(scrub(shown, _LOG_BYTES), ensure_ascii=False)
        if not fields:
            return f'{{"attempt":{self.attempt},"message":{line}}}'
        try:
            text, _ = self._codec.encode_output(fields, limit_bytes=_LOG_BYTES, max_depth=self._max_depth)
        except Exception as exc:  # their serializer's own
            text = json.dumps({"$replaced": {"reason": "payload_not_json", "detail": type(exc).__name__}})
        return f'{{"attempt":{self.attempt},"fields":{text},"message":{line}}}'

    async def register_array_input(self) -> None:
        """Register, durably, that this run is about to stage input pages outside of the database.

        Call it before the first page is written; again is harmless. From then on, whatever becomes of the run, its end
        goes to the launch's ``array_input_receiver`` (or ``terminal_receiver``), which has to retire the pages before
        it acknowledges. Raises InputRefused when the launch names neither, and RunCancelled when this attempt is over:
        nothing may be staged then.
        """
        self._check_live()
        answer = await self._register(self._attempt)
        if answer == "no_receiver":
            raise InputRefused(
                "array_input_receiver", "the run was submitted without one, so nobody could retire its pages"
            )
        if answer != "done":
            raise RunCancelled(self.run_id, "its lease is gone")

    def progress(self, done: float, total: float | None = None) -> None:
        """Say how far the run has come. Only the latest word within ``flush_ms`` is stored."""
        self._check_live()
        for name, value in (("done", done), ("total", total)):
            if value is None and name == "total":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or value is None or not -_MAX_NUMBER <= value <= _MAX_NUMBER:
                raise InputRefused(name, f"must be a finite number, not {preview(value)}")
        record = {"done": done, "total": total, "attempt": self.attempt}
        self._attempt.say(Lane.LIFECYCLE, "run.progress", json.dumps(record), replaces=True)
        self._say(self._attempt)

    # --- what hosts share ------------------------------------------------------------------------------

    def rate(
        self,
        name: str,
        *,
        cost: float = 1.0,
        timeout: float | None = None,
    ) -> contextlib.AbstractAsyncContextManager[Permit]:
        """A slot of the rate scope ``name``, shared by all hosts: ``async with ctx.rate("provider") as permit:``.

        Waits, in memory, until it is this caller's turn: first come, first served. ``cost`` in the scope's units.
        Where the turn is known to be more than ``timeout`` seconds away, or has not come by then, raises
        CapacityUnavailable, which (if the play lets it pass) puts the run back into the queue until then, free of
        charge. Time spent waiting counts as running time. Tell a provider's refusal to ``permit.retry_after(seconds)``.
        """
        self._check_live()
        return rates.permit(self._rates, self._attempt, name, cost, timeout)

    # --- waits ---------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Remember the play's own task, outside of which waits need keys."""
        self._task = trio.lowlevel.current_task()

    def _wait_key(self, key: Any) -> str:
        if key is None:
            if trio.lowlevel.current_task() is not self._task:
                raise InputRefused(
                    "key", "a wait inside a nested nursery needs key=…: its order is not repeatable"
                )
            self._ordinal += 1
            key = f"#{self._ordinal}"
        elif (
            not isinstance(key, str)
            or not 1 <= len(key) <= _MAX_KEY
            or key[0] == "#"
            or not key.isprintable()
        ):
            raise InputRefused("key", f"must be 1 to {_MAX_KEY} printable characters and not begin with #")
        if key in self._keys:
            raise InputRefused("key", f"{key!r} already names another wait of this run")
        self._keys.add(key)
        return str(key)

    def _check_live(self) -> None:
        why = self._attempt.why
        if why in (Why.CANCELLED, Why.LOST):
            reason = "its lease is gone" if why is Why.LOST else None
            raise RunCancelled(self.run_id, reason)
        if why is Why.PARKED:
            raise InputRefused("ctx", "the run is parking: its cleanup can write nothing more")


class Unwind(BaseException):
    """Ends the thread of a play that parks. Like a cancellation, nothing that catches ``Exception`` sees it."""


class SyncContext:
    """The same for a play that is a plain ``def`` and runs in a thread; ``sleep`` blocks the thread."""

    def __init__(self, context: Context) -> None:
        self.run_id = context.run_id
        self.attempt = context.attempt
        self.failures = context.failures
        self.org_id = context.org_id
        self._context = context

    def __repr__(self) -> str:
        return repr(self._context)

    @property
    def labels(self) -> dict[str, str]:
        """The labels that the run was submitted with."""
        return self._context.labels

    def sleep(self, seconds: float, *, key: str | None = None) -> None:
        """As ``Context.sleep``."""
        if not trio.from_thread.run(self._passed, seconds, key):
            raise Unwind

    async def _passed(self, seconds: float, key: str | None) -> bool:
        self._context.begin()  # calls from a thread that may be abandoned run in a task of their own
        return await self._context._passed(seconds, key)

    def log(self, message: str, **fields: Any) -> None:
        """As ``Context.log``."""
        trio.from_thread.run_sync(lambda: self._context.log(message, **fields))

    def register_array_input(self) -> None:
        """As ``Context.register_array_input``."""
        trio.from_thread.run(self._context.register_array_input)

    def progress(self, done: float, total: float | None = None) -> None:
        """As ``Context.progress``."""
        trio.from_thread.run_sync(self._context.progress, done, total)

    @contextlib.contextmanager
    def rate(self, name: str, *, cost: float = 1.0, timeout: float | None = None) -> Iterator[SyncPermit]:
        """As ``Context.rate``, with a plain ``with``; the thread waits."""
        granted = trio.from_thread.run(self._granted, name, cost, timeout)
        with SyncPermit(granted).ending() as permit:
            yield permit

    async def _granted(self, name: str, cost: float, timeout: float | None) -> Permit:  # noqa: ASYNC109
        context = self._context
        context._check_live()
        return await rates.acquire(context._rates, context._attempt, name, cost, timeout)
