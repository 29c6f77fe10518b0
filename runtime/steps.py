"""Steps: the parts of a play that run once, by key.

Owns the course of one attempt's steps: claim the receipt, run the function, record what came of it; and the rules of
keys, retries and time limits. It never writes to the database itself: claims and ends travel with the receipts actor.

A step that completed is not run again, by whatever attempt. One that failed after its retries has its failure
recorded, and later attempts raise it again, until the run itself is retried: that gives the step another chance, unless
its failure is final. A step that was cut short, or met a passing fault of a database, leaves no record.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import trio

from actors.attempts import Attempt, Why
from actors.core import Backoff, Mailbox, Reply, bounded_cleanup, leaves
from actors.receipts import Message, StepClaim, StepEnd
from runtime import ids
from runtime.codec import JsonCodec, error_record, preview, scrub
from runtime.plays import returned_type
from runtime.transient import cut_short, is_transient
from sql.errors import (
    Fatal,
    InputRefused,
    KernelRefused,
    PayloadRefused,
    RunlaneError,
    StepConflict,
    StepFailed,
    StepTimedOut,
)
from sql.receipts import IMMUTABLE, Receipt, ReceiptClaim, ReceiptEnd

# Steps of a map that are claimed together; up to twice as many are claimed and not begun, or ended and not recorded.
_WINDOW = 256
_MOST_CONCURRENT = 10_000
_MOST_RETRIES = 1_000
_MOST_S = 315_576_000.0
_BACKOFF_MAX_S = 60.0
# What an end gets to be recorded when its play is cancelled while it waits for that.
_LAST_WORD_S = 1.0

_INDEXED = re.compile(r"(.*)\[\d+\]", re.DOTALL)

_inside: ContextVar[str | None] = ContextVar("runlane_step", default=None)


@attrs.frozen
class StepTools:
    """What the steps of all attempts on a host share. ``threads``: for functions that are a plain ``def``."""

    codec: JsonCodec
    receipts: Mailbox[Message]
    threads: trio.CapacityLimiter
    max_payload_bytes: int
    max_depth: int


@attrs.frozen
class StepPolicy:
    """How often a step is tried within one attempt, how long it may take, and what is between two tries."""

    retries: int = 0
    timeout_s: float | None = None
    backoff_s: float = 1.0

    @classmethod
    def checked(cls, retries: Any, timeout_s: Any, backoff_s: Any) -> StepPolicy:
        """From a caller's arguments. Raises InputRefused naming the one that is out of range."""
        if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= _MOST_RETRIES:
            raise InputRefused(
                "retries", f"must be a whole number from 0 to {_MOST_RETRIES}, not {preview(retries)}"
            )
        for name, value in (("timeout", timeout_s), ("backoff_s", backoff_s)):
            if value is None and name == "timeout":
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 <= value <= _MOST_S or (value == 0 and name == "timeout"):
                least = "above 0" if name == "timeout" else "from 0"
                raise InputRefused(name, f"must be a number of seconds {least}, not {preview(value)}")
        return cls(retries, timeout_s, backoff_s)


@attrs.define(slots=True, eq=False)
class Step:
    """One step under way. ``recorded``: there is nothing to run, ``value`` is what it gave before."""

    key: str
    function: str
    result_type: type | None
    policy: StepPolicy
    backoff: Backoff | None = None
    tries: int = 0
    """Calls of the function beyond the first."""
    ended: bool = False
    recorded: bool = False
    value: Any = None


class Steps:
    """The steps of one attempt. ``final``: errors after which nothing is worth another try."""

    def __init__(
        self, attempt: Attempt, tools: StepTools, final: tuple[type[BaseException], ...] = ()
    ) -> None:
        self._attempt = attempt
        self._tools = tools
        self._final: tuple[type[BaseException], ...] = (Fatal, *final)
        self._keys: set[str] = set()
        self._maps: set[str] = set()
        self._indexed: set[str] = set()  # what stands before the index in keys that look like a map's
        self._released: dict[str, Reply[None]] = {}

    # --- one step ------------------------------------------------------------------------------------

    async def run(
        self,
        key: str,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        policy: StepPolicy,
    ) -> Any:
        """The output of a step: recorded, or from calling ``fn(*args, **kwargs)`` now."""
        step = await self.open(key, fn, policy)
        if step.recorded:
            return step.value
        with self.held(step):
            text = await self._called(step, functools.partial(fn, *args, **kwargs) if args or kwargs else fn)
            return await self.close(step, text)

    async def open(self, key: str, fn: Callable[..., Any], policy: StepPolicy) -> Step:
        """Claim a step's receipt. Raises StepConflict for a key that is taken, StepFailed for a recorded failure."""
        ids.check_step_key(key)
        refuse_inside_step()
        if (released := self._released.get(key)) is not None:
            await released.wait()
            self._released.pop(key, None)
        step = Step(key, function_name(fn), returned_type(fn), policy)
        self._take_key(key)
        claim = self._claim(step)
        try:
            receipt = await claim.reply.wait()
        except trio.Cancelled:
            self.release(step)
            raise
        self._apply(step, receipt)
        return step

    @contextmanager
    def held(self, step: Step) -> Iterator[None]:
        """Surrounds the work on a claimed step: what is left without an end is released."""
        try:
            yield
        finally:
            if not step.ended:
                self.release(step)

    async def close(self, step: Step, text: str) -> Any:
        """Record an output, given as JSON text, and return it as a later attempt will have it."""
        await self._recorded(step, self._end(step, "completed", text))
        return self._value(step, text)

    async def failed(self, step: Step, error: BaseException) -> float:
        """Seconds until the next try; or, after the last one, record the failure and raise it."""
        if cut_short(error) or self._attempt.why in (Why.CANCELLED, Why.LOST):
            raise error
        final = any(isinstance(leaf, self._final) for leaf in leaves(error))
        if not final and not isinstance(error, PayloadRefused) and step.tries < step.policy.retries:
            step.tries += 1
            if step.backoff is None:
                first_s = step.policy.backoff_s
                step.backoff = Backoff(first_s, max(first_s, _BACKOFF_MAX_S))
            return step.backoff.next()
        if is_transient(error) or isinstance(error, PayloadRefused):
            raise error  # it says nothing of the step, or a new release may store what this one cannot
        record = {**error_record(error), "final": final}
        await self._recorded(step, self._end(step, "fatal" if final else "failed", json.dumps(record)))
        raise _step_failed(step.key, record, 1 + step.tries) from error

    def encode(self, step: Step, value: Any) -> str:
        """An output as JSON text. Raises PayloadRefused naming the step."""
        return self._tools.codec.encode(
            value,
            what=f"step {step.key!r} output",
            limit_bytes=self._tools.max_payload_bytes,
            max_depth=self._tools.max_depth,
        )

    def call_here(self, step: Step, call: Callable[[], Any]) -> Any:
        """Call the function in this thread."""
        mark = _inside.set(step.key)
        try:
            return call()
        finally:
            _inside.reset(mark)

    async def _called(self, step: Step, call: Callable[[], Any]) -> str:
        """Call the function until it succeeds; its output as JSON text."""
        while True:
            try:
                return self.encode(step, await self._call(step, call))
            except BaseException as error:  # also exits, which must not be recorded
                delay_s = await self.failed(step, error)
            await trio.sleep(delay_s)

    async def _call(self, step: Step, call: Callable[[], Any]) -> Any:
        mark = _inside.set(step.key)
        try:
            if is_async(call):
                if step.policy.timeout_s is None:
                    return await call()
                with trio.move_on_after(step.policy.timeout_s):
                    return await call()
                raise _timed_out(step)
            return await self._call_in_thread(step, call)
        finally:
            _inside.reset(mark)

    async def _call_in_thread(self, step: Step, call: Callable[[], Any]) -> Any:
        seconds = step.policy.timeout_s

        def begin(deadline_in_s: float) -> None:
            limit.deadline = trio.current_time() + deadline_in_s

        def in_thread() -> list[Any]:
            if seconds is not None:  # its time counts from when it has a thread
                trio.from_thread.run_sync(begin, seconds)
            return [call()]  # boxed: trio lets no coroutine out of a thread

        with trio.CancelScope() as limit:
            # Abandoned when cancelled: the thread cannot be stopped, but what it gives is not recorded.
            (value,) = await trio.to_thread.run_sync(
                in_thread, abandon_on_cancel=True, limiter=self._tools.threads
            )
            return await value if inspect.isawaitable(value) else value  # a lambda around an async call
        raise _timed_out(step)

    # --- many ----------------------------------------------------------------------------------------

    async def map(
        self, key: str, fn: Callable[..., Any], items: Iterable[Any], concurrency: int, policy: StepPolicy
    ) -> list[Any]:
        """The outputs of the steps ``key[0]``, ``key[1]``, … in order: ``fn(item)`` for each item."""
        most = isinstance(concurrency, int) and not isinstance(concurrency, bool)
        if not most or not 1 <= concurrency <= _MOST_CONCURRENT:
            raise InputRefused(
                "concurrency",
                f"must be a whole number from 1 to {_MOST_CONCURRENT}, not {preview(concurrency)}",
            )
        name, result_type = function_name(fn), returned_type(fn)
        try:
            iterator = iter(items)
        except TypeError:
            raise InputRefused("items", f"must be iterable, not {type(items).__name__}") from None
        self._take_map_key(key)
        course = _Course(self, key, fn, lambda one: Step(one, name, result_type, policy))
        return await course.run(iterator, concurrency)

    # --- keys ----------------------------------------------------------------------------------------

    def _take_key(self, key: str) -> None:
        indexed = _INDEXED.fullmatch(key)
        if key in self._keys or (indexed is not None and indexed[1] in self._maps):
            raise StepConflict(key, "is used twice in this attempt; each step needs a key of its own")
        self._keys.add(key)
        if indexed is not None:
            self._indexed.add(indexed[1])

    def _take_map_key(self, key: str) -> None:
        ids.check_step_key(key, most=ids.MAX_MAP_KEY_CHARS)
        refuse_inside_step()
        if key in self._maps or key in self._indexed:
            raise StepConflict(
                f"{key}[…]", "are used twice in this attempt; each step needs a key of its own"
            )
        self._maps.add(key)

    # --- receipts ------------------------------------------------------------------------------------

    def _claim(self, step: Step) -> StepClaim:
        attempt = self._attempt
        claim = StepClaim(
            attempt, ReceiptClaim(attempt.run_id, attempt.attempt, attempt.token, step.key, step.function)
        )
        self._tools.receipts.send_nowait(claim)
        return claim

    def _apply(self, step: Step, receipt: Receipt) -> None:
        """What a claim found: permission to run, or what was recorded."""
        if receipt.answer == "claimed":
            return
        if receipt.answer in ("completed", "skipped"):
            step.recorded = True
            step.value = self._value(step, receipt.output or "null")
        elif receipt.answer == "failed":
            raise _step_failed(step.key, json.loads(receipt.error or "{}"), receipt.tries or 0)
        elif receipt.answer == "conflict":
            raise StepConflict(
                step.key, f"is recorded for {receipt.function!r} and was called with {step.function!r}"
            )
        else:
            raise StepConflict(step.key, "is held by another worker of this attempt")

    def _end(self, step: Step, outcome: str, payload: str | None) -> Reply[None]:
        attempt = self._attempt
        item = ReceiptEnd(
            attempt.run_id, attempt.attempt, attempt.token, step.key, outcome, payload, step.tries
        )
        end = StepEnd(attempt, item)
        self._tools.receipts.send_nowait(end)
        step.ended = True
        return end.reply

    async def _recorded(self, step: Step, reply: Reply[None]) -> None:
        """Wait until an end is durable: not before that is the step over for its play."""
        try:
            await reply.wait()
        except trio.Cancelled:
            await self._last_word(reply)
            raise
        except KernelRefused as fault:
            if fault.sqlstate == IMMUTABLE:
                raise StepConflict(step.key, "is recorded for good and cannot be changed") from fault
            raise PayloadRefused(f"step {step.key!r} output", f"cannot be stored: {fault}") from fault

    async def _last_word(self, reply: Reply[None]) -> None:
        """When cancelled: the work is done, so let it be recorded. A stopping host hands its lease back after this."""
        if self._attempt.why not in (Why.CANCELLED, Why.LOST):
            with bounded_cleanup(_LAST_WORD_S):
                await _answered(reply)

    def release(self, step: Step) -> None:
        """Nobody works on this step any more, and nothing is recorded: it may be called again.

        The end of the attempt does the same for all of its steps.
        """
        if self._attempt.why is None and not self._tools.receipts.closed:
            self._released[step.key] = self._end(step, "released", None)
            self._keys.discard(step.key)

    async def at_rest(self) -> None:
        """Wait a moment until what was released is so in the database, too: once the run has ended, its fence is gone,
        and the steps would be told as held for ever."""
        if not self._released:
            return
        with trio.move_on_after(_LAST_WORD_S):
            for reply in self._released.values():
                await _answered(reply)

    def _value(self, step: Step, text: str) -> Any:
        value = self._tools.codec.decode(text, what=f"step {step.key!r} output")
        if step.result_type is None:
            return value
        return self._tools.codec.structure(value, step.result_type, what=f"step {step.key!r} output")


@attrs.define(eq=False)
class _Course:
    """One map under way: a feeder claims in windows, workers call the function, a recorder waits for what is durable.

    Each hands over through a bounded channel, so that memory is bounded by the windows, whatever the number of items.
    """

    steps: Steps
    key: str
    fn: Callable[..., Any]
    make: Callable[[str], Step]
    results: list[Any] = attrs.field(factory=list)
    last: Reply[None] | None = None
    """Of the end that was sent last; but for locked rows, the ones before it are recorded no later."""

    async def run(self, items: Iterator[Any], concurrency: int) -> list[Any]:
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                begin, begun = trio.open_memory_channel[tuple[int, Step, Any]](_WINDOW)
                end, ended = trio.open_memory_channel[tuple[int, Step, str, Reply[None]]](_WINDOW)
                nursery.start_soon(self._feed, items, begin)
                for _ in range(min(concurrency, _WINDOW)):
                    nursery.start_soon(self._work, begun.clone(), end.clone())
                begun.close()
                end.close()
                nursery.start_soon(self._record, ended)
        except BaseExceptionGroup as group:
            # One failure ends the map, as it ends a loop: the play sees that one, not what its end did to the others.
            failure = _first_failure(group)
        if failure is not None:
            raise failure
        return self.results

    async def _feed(self, items: Iterator[Any], begin: trio.MemorySendChannel[tuple[int, Step, Any]]) -> None:
        with begin:
            while window := list(itertools.islice(items, _WINDOW)):
                first = len(self.results)
                self.results += [None] * len(window)
                claimed = []
                for index, item in enumerate(window, first):
                    step = self.make(f"{self.key}[{index}]")
                    claimed.append((index, step, item, self.steps._claim(step)))
                for index, step, item, claim in claimed:
                    self.steps._apply(step, await claim.reply.wait())
                    if step.recorded:
                        self.results[index] = step.value
                    else:
                        await begin.send((index, step, item))

    async def _work(
        self,
        begun: trio.MemoryReceiveChannel[tuple[int, Step, Any]],
        end: trio.MemorySendChannel[tuple[int, Step, str, Reply[None]]],
    ) -> None:
        with begun, end:
            async for index, step, item in begun:
                with self.steps.held(step):
                    text = await self.steps._called(step, functools.partial(self.fn, item))
                    self.last = reply = self.steps._end(step, "completed", text)
                await end.send((index, step, text, reply))

    async def _record(self, ended: trio.MemoryReceiveChannel[tuple[int, Step, str, Reply[None]]]) -> None:
        with ended:
            try:
                async for index, step, text, reply in ended:
                    await self.steps._recorded(step, reply)
                    self.results[index] = self.steps._value(step, text)
            except trio.Cancelled:
                if self.last is not None:
                    await self.steps._last_word(self.last)
                raise


# --- helpers -----------------------------------------------------------------------------------------


def refuse_inside_step() -> None:
    """Raise InputRefused inside a step: what it does runs once or again as a whole, so it contains no other steps and
    no waits."""
    key = _inside.get()
    if key is not None:
        raise InputRefused("ctx", f"called inside step {key!r}: steps contain no other steps and no waits")


def function_name(fn: Callable[..., Any]) -> str:
    """What a step is recorded for. Without the module, which changes when code is moved or run as a script."""
    if not callable(fn):
        raise InputRefused("fn", f"must be a function, not {type(fn).__name__}")
    inner = _unwrapped(fn)
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return scrub(name, 255)


def _unwrapped(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def is_async(fn: Any) -> bool:
    """Whether calling the function gives something to await."""
    inner = _unwrapped(fn)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__)


def _step_failed(key: str, record: dict[str, Any], tries: int) -> StepFailed:
    return StepFailed(
        key,
        str(record.get("error_type")),
        str(record.get("message")),
        traceback_text=record.get("traceback"),
        tries=tries,
        final=bool(record.get("final")),
    )


def _timed_out(step: Step) -> StepTimedOut:
    return StepTimedOut(f"step {step.key!r} ran longer than timeout={step.policy.timeout_s:g}")


def _first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What ended a group of tasks: the first error, unless the group was cancelled from outside."""
    found = leaves(group)
    failures = [leaf for leaf in found if not isinstance(leaf, trio.Cancelled)]
    return failures[0] if failures else found[0]


async def _answered(reply: Reply[None]) -> None:
    try:
        await reply.wait()
    except RunlaneError:
        return  # it was refused: its attempt is over
