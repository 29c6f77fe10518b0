"""The context: what a play may ask of runlane while it runs.

Owns durable waits, steps, log lines and progress as a play sees them, and the keys of waits. It never writes to the
database itself: waits go to ``parking``, steps to ``steps``, and what is said travels with the facts actor.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import attrs
import trio

from actors.attempts import Attempt, Why
from actors.circuits import Circuits
from actors.core import Mailbox
from actors.rates import Acquire, Release
from actors.receipts import Message
from actors.waits import Stand
from runtime import circuits, ids, rates
from runtime.codec import JsonCodec, preview, scrub
from runtime.handle import output_of
from runtime.parking import Parking
from runtime.plays import Play
from runtime.rates import Permit, SyncPermit
from runtime.steps import StepPolicy, Steps, is_async, refuse_inside_step
from runtime.submit import Submit
from sql.admission import Submission
from sql.errors import InputRefused, RunCancelled, WaitTimedOut
from sql.status import Terminal
from sql.types import Approval, Lane
from sql.waits import Wait, WaitState

_LOG_BYTES = 65_536
_MAX_WAIT_S = 315_576_000.0
_MAX_KEY = 255
_MAX_NUMBER = sys.float_info.max

T = TypeVar("T")


Register = Callable[[Attempt], Awaitable[str]]
"""Registers an attempt's intent to stage array input: ``done``, ``lost`` or ``no_receiver``."""


@attrs.frozen
class Doors:
    """What contexts need of their host's actors.

    ``register`` registers an intent to stage array input. ``rates`` takes requests for slots of rate scopes,
    ``circuits`` says whether a dependency is worth calling, ``receipts`` takes what steps claim and record.

    ``say(attempt)`` hands over an attempt with something to say. ``hold(attempt, wait)`` holds a wait in memory.
    ``payload(run_id, key)`` reads what a wait was given, where it was too large to come along. ``prepare(submit)``
    checks a child, and ``launch(attempt, key, submission)`` starts it: ``started``, ``conflict`` or ``lost``.
    """

    say: Callable[[Attempt], None]
    register: Register
    rates: Mailbox[Acquire | Release]
    circuits: Circuits
    receipts: Mailbox[Message]
    hold: Callable[[Attempt, Wait], Stand]
    payload: Callable[[str, str], Awaitable[str | None]]
    prepare: Callable[[Submit], Awaitable[Submission]]
    launch: Callable[[Attempt, str, Submission], Awaitable[str]]


class Context:
    """One attempt of a run, given to its play.

    ``run_id`` names the run; ``attempt`` counts its attempts from 1; ``failures`` how many of them have failed.
    """

    def __init__(
        self,
        attempt: Attempt,
        codec: JsonCodec,
        doors: Doors,
        steps: Steps,
        *,
        park_after_s: float,
        max_depth: int,
    ) -> None:
        self.run_id = attempt.run_id
        self.attempt = attempt.attempt
        self.failures = attempt.claimed.failures
        self.org_id = attempt.claimed.org_id
        self.parking = Parking(attempt, doors.hold, park_after_s=park_after_s)
        self.steps = steps
        self._attempt = attempt
        self._codec = codec
        self._doors = doors
        self._park_after_s = park_after_s
        self._max_depth = max_depth
        self._ended = False
        self._task: trio.lowlevel.Task | None = None
        self._ordinal = 0
        self._keys: set[str] = set()

    def __repr__(self) -> str:
        return f"<Context run={self.run_id} attempt={self.attempt}>"

    @property
    def labels(self) -> dict[str, str]:
        """The labels that the run was submitted with."""
        labels: dict[str, str] = json.loads(self._attempt.claimed.labels or "{}")
        return labels

    # --- steps ---------------------------------------------------------------------------------------

    async def step(
        self,
        key: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        retries: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 - it ends the function, not the call
        backoff_s: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        """Run ``fn(*args, **kwargs)`` once, durably: its output is recorded, and a later attempt gets that instead.

        ``key`` names the step, unique within the run and the same each time the play comes here, 1 to 255 printable
        characters. ``fn`` is ``async def``, or a ``def``, which runs in a thread. It returns JSON, or a dataclass,
        attrs or pydantic object; with such a return annotation it comes back as one, else as plain JSON, also the
        first time.

        ``timeout`` (seconds) limits each call. An error is tried again ``retries`` times within this attempt, after
        ``backoff_s`` seconds that double each time up to a minute. The last error is recorded and raised as StepFailed.
        Later attempts raise it again, until the run itself is retried, which gives the step another chance, unless the
        error is Fatal (or one that the play declares final). A cancellation, a deadlock, a serialization failure and a
        lost connection are never recorded.

        Raises StepConflict for a key that is used twice in one attempt or is recorded for another function, and
        PayloadRefused, naming the key, for an output that cannot be stored.
        """
        self._check_live()
        policy = StepPolicy.checked(retries, timeout, backoff_s)
        with self.parking.calling():
            return await self.steps.run(key, fn, args, kwargs, policy)

    async def map(
        self,
        key: str,
        fn: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        concurrency: int = 10,
        retries: int = 0,
        timeout: float | None = None,  # noqa: ASYNC109 - as for a step
        backoff_s: float = 1.0,
    ) -> list[Any]:
        """Run ``fn(item)`` for each item as the steps ``key[0]``, ``key[1]``, …; their outputs in the order of items.

        Up to ``concurrency`` run at once. Claims and outputs travel in sets, so that thousands are cheap; what has
        completed in an earlier attempt is not run again. Items must come in the same order in each attempt. The first
        failure ends the map and is raised; what has completed until then stays recorded.
        """
        self._check_live()
        policy = StepPolicy.checked(retries, timeout, backoff_s)
        with self.parking.calling():
            return await self.steps.map(key, fn, items, concurrency, policy)

    # --- waits ---------------------------------------------------------------------------------------
    #
    # A long wait parks the run, which frees its slot and survives every restart. The play is then run again from its
    # beginning by whichever host is free, and passes this line at once, with what it got the first time.
    #
    # `key` names the wait, unique within the run. Without one, waits are numbered in the order in which the play comes
    # to them, which is only possible outside of nested nurseries.

    async def sleep(self, seconds: float, *, key: str | None = None) -> None:
        """Sleep durably. A sleep up to the host's ``park_after_s`` stays in memory, a longer one parks the run.

        Its length counts on the database clock from the first time the run came here.
        """
        seconds = _checked_seconds("seconds", seconds)
        self._check_live()
        key = self._wait_key(key)
        if key not in self._attempt.claimed.waits and seconds <= self._park_after_s:
            with self.parking.calling():
                await trio.sleep(seconds)
            self.parking.returned(self._who())
            return
        await self._wait(Wait(key, "sleep", delay_s=seconds), at_once=True)

    async def sleep_until(self, moment: datetime, *, key: str | None = None) -> None:
        """Sleep durably until a moment of the database clock; one in the past passes at once.

        ``moment`` must be timezone-aware.
        """
        moment = _checked_moment(moment)
        self._check_live()
        key = self._wait_key(key)
        # By this host's clock, which only decides whether to hold it in memory first.
        is_long = (moment - datetime.now(UTC)).total_seconds() > self._park_after_s
        await self._wait(Wait(key, "sleep", until=moment), at_once=is_long)

    async def wait_event(self, name: str, *, timeout: float | None = None, key: str | None = None) -> Any:  # noqa: ASYNC109 - part of the pinned API
        """Wait for an event that somebody sends to this run with ``send_event``, and return its payload.

        Events are kept: one that was sent before is taken at once. Each goes to one wait, in the order of arrival per
        name. Raises WaitTimedOut when none has come within ``timeout`` seconds from the first time the run came here;
        then so it does each time the run comes here again.
        """
        wait = self._event_wait("event", name, timeout, key)
        state = await self._wait(wait)
        return self._decoded(await self._payload(wait, state, f"event {name!r}"), f"event {name!r}")

    async def wait_approval(
        self,
        name: str = "approval",
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - part of the pinned API
        key: str | None = None,
    ) -> Approval:
        """Wait until somebody says yes or no, and return what they said.

        Whoever decides sends an event of that name whose payload has ``"approved": true`` or ``false``, and ``"by"``
        and ``"comment"`` if they like; other events of that name are left alone. Raises WaitTimedOut as ``wait_event``.
        """
        wait = self._event_wait("approval", name, timeout, key)
        state = await self._wait(wait)
        given = self._decoded(await self._payload(wait, state, f"approval {name!r}"), f"approval {name!r}")
        by, comment = given.get("by"), given.get("comment")
        return Approval(
            given["approved"],
            by if isinstance(by, str) else None,
            comment if isinstance(comment, str) else None,
            given,
        )

    async def start_run(
        self,
        play: Play | str,
        input: Any = None,
        *,
        key: str | None = None,
        priority: int = 0,
        delay: float | None = None,
        labels: Mapping[str, str] | None = None,
        concurrency_key: str | None = None,
    ) -> Child:
        """Start another run as this one's child, durably, and return it without waiting for its end.

        It starts once: on later attempts the same ``key`` gives the same child. It belongs to this run's organisation,
        and is cancelled when this run is; otherwise it outlives it. The rest is as for ``Runtime.submit``.

        Raises InputRefused (PayloadRefused, UnknownPlay) naming the field; ``key`` where it has started another play,
        or the same one with another input.
        """
        self._check_live()
        key = self._wait_key(key)
        run_id = ids.child_run_id(self.run_id, key)
        child = Child(self, run_id, Wait(key, "child", run_id), play if isinstance(play, Play) else None)
        if key in self._attempt.claimed.waits:
            self._known(child.wait)  # it was started by an earlier attempt
            await trio.lowlevel.checkpoint()
            return child
        item = Submit(
            play,
            input,
            run_id=run_id,
            org_id=self.org_id,
            priority=priority,
            delay=delay,
            labels=labels,
            concurrency_key=concurrency_key,
        )
        with self.parking.calling():
            answer = await self._doors.launch(self._attempt, key, await self._doors.prepare(item))
        if answer == "lost":
            raise RunCancelled(self.run_id, "its lease is gone")
        if answer == "conflict":
            raise InputRefused(
                "key",
                f"{key!r} has started run {run_id!r} with another play or input; one key starts one child",
            )
        return child

    async def call(
        self, play: Play | str, input: Any = None, *, key: str | None = None, **options: Any
    ) -> Any:
        """Start a child, wait for its end and return its output: ``start_run`` and then ``child.result()``.

        To wait for no longer than some time, take those two: ``child.result(timeout=…)``.

        Raises what both raise: RunFailed or RunCancelled, with the child's id, when it ended so.
        """
        child = await self.start_run(play, input, key=key, **options)
        return await child.result()

    async def result_of(self, child: Child, timeout: float | None, key: str | None) -> Any:  # noqa: ASYNC109
        """As ``child.result()``."""
        if timeout is None and key is not None:
            raise InputRefused(
                "key", "is of a wait with a timeout; without one, the child's own key is enough"
            )
        delay_s = None if timeout is None else _checked_seconds("timeout", timeout)
        self._check_live()
        wait = child.wait
        if delay_s is not None:  # a wait of its own: giving it up leaves the child's own as it was
            wait = Wait(self._wait_key(key), "child", child.run_id, delay_s)
        state = await self._wait(wait)
        ended = json.loads(await self._payload(wait, state, f"run {child.run_id}"))
        return output_of(Terminal(child.run_id, ended["status"], ended["payload"]), self._codec, child.play)

    def _event_wait(self, kind: str, name: Any, timeout: Any, key: Any) -> Wait:
        name = ids.check_event_name(name)
        delay_s = None if timeout is None else _checked_seconds("timeout", timeout)
        self._check_live()
        return Wait(self._wait_key(key), kind, name, delay_s)

    async def _wait(self, wait: Wait, *, at_once: bool = False) -> WaitState:
        """Stand at a wait until it is over. Unwound by cancellation when the run parks."""
        known = self._known(wait)
        if known is not None and known.done:
            await trio.lowlevel.checkpoint()
            self.parking.returned(self._who())
            return known
        return await self.parking.stand(wait, task=self._who(), at_once=at_once or known is not None)

    def _known(self, wait: Wait) -> WaitState | None:
        """What earlier attempts know of a wait. InputRefused if they waited for something else there."""
        known = self._attempt.claimed.waits.get(wait.key)
        if known is not None and (known.kind, known.name) != (wait.kind, wait.name):
            raise InputRefused(
                "key",
                f"{wait.key!r} is a wait for {_named(known.kind, known.name)} in this run, not for "
                f"{_named(wait.kind, wait.name)}: the play asks in another order than before, so give its waits keys",
            )
        return known

    async def _payload(self, wait: Wait, state: WaitState, what: str) -> str:
        """What a wait was given, as JSON text."""
        text = state.payload
        if state.stored:
            with self.parking.calling():
                text = await self._doors.payload(self.run_id, wait.key)
        if text is None:
            raise WaitTimedOut(what, wait.key)
        return text

    def _decoded(self, text: str, what: str) -> Any:
        return self._codec.decode(text, what=what)

    def _who(self) -> object:
        """The task that calls; None for the play's own, or its thread."""
        task = trio.lowlevel.current_task()
        return None if task is self._task else task

    # --- what it says --------------------------------------------------------------------------------

    def log(self, message: str, **fields: Any) -> None:
        """Say something about the run: a fact of its observability lane, stored within the host's ``flush_ms``.

        Never fails and never waits. ``fields`` are JSON; what cannot be stored is replaced and says so.
        """
        self._check_live()
        if self._attempt.say(Lane.OBSERVABILITY, "run.log", self._log_record(message, fields)):
            self._doors.say(self._attempt)

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
        answer = await self._doors.register(self._attempt)
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
        self._doors.say(self._attempt)

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
        return rates.permit(
            self._doors.rates, self._attempt, name, cost, timeout, pending=self.parking.calling
        )

    def dependency(
        self, name: str, *, errors: circuits.Errors = Exception
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """A call of something that may be out: ``async with ctx.dependency("crm"):``, with a circuit for all hosts.

        Errors of the types ``errors`` that leave the block are failures of the dependency; after some in a row (by
        default 5) its circuit is open, and entering raises DependencyUnavailable at once, which (if the play lets it
        pass) defers the run free of charge for as long as its ``outage_max_s`` allows. Then one call probes.
        """
        self._check_live()
        return circuits.dependency(
            self._doors.circuits, self._attempt, name, errors, pending=self.parking.calling
        )

    # --- keys ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Remember the play's own task, outside of which waits need keys."""
        self._task = trio.lowlevel.current_task()

    def end(self) -> None:
        """The play has ended: whoever has kept its context can do nothing with it."""
        self._ended = True

    async def call_of_thread(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call for the play's thread, which ends it when the attempt is told to stop.

        Calls of a thread that may be abandoned run in a task of their own, outside of the attempt's scope.
        """
        self.begin()
        with trio.CancelScope() as scope:
            self._attempt.thread_calls.add(scope)
            try:
                return await call()
            finally:
                self._attempt.thread_calls.discard(scope)
        if self._attempt.why is Why.PARKED:
            raise Unwind
        raise RunCancelled(self.run_id)

    def _wait_key(self, key: Any) -> str:
        refuse_inside_step()
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
        if self._ended:
            raise InputRefused("ctx", f"attempt {self.attempt} of run {self.run_id} has ended")


class Child:
    """A run that this one has started. ``run_id`` names it."""

    def __init__(self, context: Context, run_id: str, wait: Wait, play: Play | None) -> None:
        self.run_id = run_id
        self.wait = wait
        self.play = play
        self._context = context

    def __repr__(self) -> str:
        return f"<Child run={self.run_id}>"

    async def result(self, timeout: float | None = None, *, key: str | None = None) -> Any:  # noqa: ASYNC109
        """The child's output, once it has ended: a durable wait, which parks this run when it is long.

        Of the output class of the play's annotation, where it was started as a play and not by name. Raises RunFailed
        or RunCancelled, with the child's id, when it ended so. Asked again, it says the same again.

        Without ``timeout`` it waits for as long as the child takes, however often the child is retried; the child's
        ``ceiling_s``, ``timeout_s`` and ``retries`` bound that, or a cancellation of either. With one it raises
        WaitTimedOut when the child has not ended that many seconds (up to 10 years) after the run first came here,
        then and whenever the run comes here again; the child goes on, and may be waited for again. Such a wait is one
        more of this run's: inside nested nurseries give it a ``key``.
        """
        return await self._context.result_of(self, timeout, key)


class SyncChild:
    """As ``Child``, for a play that runs in a thread."""

    def __init__(self, child: Child, ask: Callable[[Callable[[], Awaitable[Any]]], Any]) -> None:
        self.run_id = child.run_id
        self._child = child
        self._ask = ask

    def __repr__(self) -> str:
        return repr(self._child)

    def result(self, timeout: float | None = None, *, key: str | None = None) -> Any:
        """As ``Child.result``; blocks the thread."""
        return self._ask(partial(self._child.result, timeout, key=key))


class Unwind(BaseException):
    """Ends the thread of a play that parks. Like a cancellation, nothing that catches ``Exception`` sees it."""


class SyncContext:
    """The same for a play that is a plain ``def`` and runs in a thread; its waits block the thread."""

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
        self._ask(partial(self._context.sleep, seconds, key=key))

    def sleep_until(self, moment: datetime, *, key: str | None = None) -> None:
        """As ``Context.sleep_until``."""
        self._ask(partial(self._context.sleep_until, moment, key=key))

    def wait_event(self, name: str, *, timeout: float | None = None, key: str | None = None) -> Any:
        """As ``Context.wait_event``."""
        return self._ask(partial(self._context.wait_event, name, timeout=timeout, key=key))

    def wait_approval(
        self, name: str = "approval", *, timeout: float | None = None, key: str | None = None
    ) -> Approval:
        """As ``Context.wait_approval``."""
        return self._ask(partial(self._context.wait_approval, name, timeout=timeout, key=key))

    def start_run(
        self, play: Play | str, input: Any = None, *, key: str | None = None, **options: Any
    ) -> SyncChild:
        """As ``Context.start_run``."""
        child = self._ask(partial(self._context.start_run, play, input, key=key, **options))
        return SyncChild(child, self._ask)

    def call(self, play: Play | str, input: Any = None, *, key: str | None = None, **options: Any) -> Any:
        """As ``Context.call``."""
        return self._ask(partial(self._context.call, play, input, key=key, **options))

    def step(
        self,
        key: str,
        fn: Callable[..., Any],
        /,
        *args: Any,
        retries: int = 0,
        timeout: float | None = None,
        backoff_s: float = 1.0,
        **kwargs: Any,
    ) -> Any:
        """As ``Context.step``. A ``def`` runs in the play's own thread, where no ``timeout`` can stop it."""
        call = partial(fn, *args, **kwargs) if args or kwargs else fn
        if is_async(fn):
            return self._ask(
                partial(self._context.step, key, call, retries=retries, timeout=timeout, backoff_s=backoff_s)
            )
        if timeout is not None:
            raise InputRefused(
                "timeout", "a def runs in the thread of its play, which cannot be stopped: use async def"
            )
        trio.from_thread.run_sync(self._context._check_live)
        steps = self._context.steps
        step = self._ask(partial(steps.open, key, call, StepPolicy.checked(retries, None, backoff_s)))
        if step.recorded:
            return step.value
        try:
            while True:
                try:
                    text = steps.encode(step, steps.call_here(step, call))
                except BaseException as error:  # also exits, which must not be recorded
                    delay_s = self._ask(partial(steps.failed, step, error))
                else:
                    return self._ask(partial(steps.close, step, text))
                time.sleep(delay_s)
        finally:
            if not step.ended:
                trio.from_thread.run_sync(steps.release, step)

    def map(
        self,
        key: str,
        fn: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        concurrency: int = 10,
        retries: int = 0,
        timeout: float | None = None,
        backoff_s: float = 1.0,
    ) -> list[Any]:
        """As ``Context.map``; a ``def`` runs in threads of its own."""
        return self._ask(
            partial(
                self._context.map,
                key,
                fn,
                items,
                concurrency=concurrency,
                retries=retries,
                timeout=timeout,
                backoff_s=backoff_s,
            )
        )

    def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        return trio.from_thread.run(self._context.call_of_thread, call)

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
        granted = trio.from_thread.run(
            self._context.call_of_thread, partial(self._granted, name, cost, timeout)
        )
        with SyncPermit(granted).ending() as permit:
            yield permit

    async def _granted(self, name: str, cost: float, timeout: float | None) -> Permit:  # noqa: ASYNC109
        context = self._context
        context._check_live()
        return await rates.acquire(
            context._doors.rates, context._attempt, name, cost, timeout, pending=context.parking.calling
        )

    @contextlib.contextmanager
    def dependency(self, name: str, *, errors: circuits.Errors = Exception) -> Iterator[None]:
        """As ``Context.dependency``, with a plain ``with``."""
        entry = trio.from_thread.run(self._context.call_of_thread, partial(self._entered, name, errors))
        with entry.ending_in_thread():
            yield

    async def _entered(self, name: str, errors: circuits.Errors) -> circuits.Entry:
        context = self._context
        context._check_live()
        return await circuits.enter(
            context._doors.circuits, context._attempt, name, errors, pending=context.parking.calling
        )


def _checked_seconds(field: str, seconds: Any) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InputRefused(field, f"must be a number, not {type(seconds).__name__}")
    if not 0 <= seconds <= _MAX_WAIT_S:
        raise InputRefused(field, f"must be from 0 to {_MAX_WAIT_S:.0f} (10 years), not {preview(seconds)}")
    return float(seconds)


def _checked_moment(moment: Any) -> datetime:
    if not isinstance(moment, datetime):
        raise InputRefused("moment", f"must be a datetime, not {type(moment).__name__}")
    if moment.tzinfo is None or moment.utcoffset() is None:
        raise InputRefused("moment", "must be timezone-aware, for example datetime.now(UTC)")
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise InputRefused("moment", "is outside the years 1 to 9999 in UTC") from None


def _named(kind: str, name: str | None) -> str:
    return f"a {kind}" if name is None else f"{kind} {name!r}"
