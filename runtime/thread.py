"""A runtime in a thread of its own, beside a program on asyncio or on nothing.

Owns the thread and how calls get in and answers out: blocking, or awaited from asyncio. It is the only place of the
host that knows asyncio, and only how to await what happens in another thread.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import trio

from runtime import ids
from runtime.api import Runtime, Verbs
from runtime.handle import Handle
from runtime.plays import Play
from runtime.sync import SyncVerbs
from sql.errors import HostFailed, HostStopping, RunlaneError

P = ParamSpec("P")
T = TypeVar("T")


class RuntimeThread(SyncVerbs):
    """A host of plays in a thread, with its verbs as blocking calls; ``aio`` has them as coroutines for asyncio.

    Made by ``Runtime.start_in_thread``; ``opening`` opens the runtime, in its thread. ``with`` and (in asyncio)
    ``async with`` wait until it is ready, and stop it in order at the end of the block, as leaving the block of
    ``Runtime.open`` does; so does ``close()``, and the end of the process. A host that gives up raises HostFailed from
    every verb, from then on, and from the block's end.
    """

    def __init__(self, opening: Callable[[], AbstractAsyncContextManager[Runtime]]) -> None:
        self._open = opening
        self._ready: Future[Runtime] = Future()
        self._ended: Future[None] = Future()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._stop = trio.Event()
        self._calls: set[Future[Any]] = set()
        self.aio = AsyncioVerbs(self)
        self._thread = threading.Thread(target=self._serve, name="runlane", daemon=True)
        self._thread.start()
        # The thread is a daemon, so that a forgotten close() hangs no program; leases are handed back even so.
        atexit.register(self._stop_at_exit)

    @property
    def runtime(self) -> Runtime:
        """The runtime itself, once it is ready; its verbs are for its own thread. Blocks until then."""
        return self._ready.result()

    @property
    def failure(self) -> BaseException | None:
        """Why the host ended by itself; None while it lives, and after an orderly stop."""
        if not self._ended.done():
            return None
        return self._ended.exception()

    def close(self) -> None:
        """Stop in order and wait for the end. Can be called twice. Raises HostFailed if the host had given up."""
        self._begin_stop()
        self._ended.result()

    def __enter__(self) -> RuntimeThread:
        self._ready.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin_stop()
        self._conclude(error, self._ended.exception())

    async def __aenter__(self) -> RuntimeThread:
        await asyncio.shield(asyncio.wrap_future(self._ready))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._begin_stop()
        ended = asyncio.wrap_future(self._ended)
        await asyncio.wait([ended])
        self._conclude(error, ended.exception())

    # --- in the thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        failure: BaseException | None = None
        try:
            trio.run(self._main)
        except BaseException as exc:  # told to whoever asks; nothing can be raised from here
            failure = exc
        if not self._ready.done():
            self._ready.set_exception(failure or HostStopping("the runtime was stopped before it was ready"))
        if failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(failure)
        for call in list(self._calls):
            _set(call, error=self._refusal())
        atexit.unregister(self._stop_at_exit)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with self._open() as runtime, trio.open_nursery() as nursery:
            self._verbs, self._nursery = runtime, nursery
            try:
                self._ready.set_result(runtime)
                await self._stop.wait()
            finally:
                self._nursery = None
                nursery.cancel_scope.cancel()

    def _begin_stop(self) -> None:
        if self._ended.done():
            return
        # Also before it is ready: it then stops as soon as it is.
        self._ready.add_done_callback(lambda _: self._in_thread(self._stop.set))

    def _stop_at_exit(self) -> None:
        self._begin_stop()
        self._ended.exception()

    def _in_thread(self, act: Callable[[], None]) -> None:
        assert self._token is not None
        with contextlib.suppress(trio.RunFinishedError):  # it has ended: who waits hears so
            self._token.run_sync_soon(act)

    # --- from other threads --------------------------------------------------------------------------

    def _call(self, body: Callable[[], Awaitable[T]]) -> T:
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError(
                "a blocking call in the runtime's own thread would wait for itself; await its verbs"
            )
        self._ready.result()
        call = self._start(body)
        try:
            return call.result()
        except CancelledError:
            raise self._refusal() from None
        except BaseException:
            call.cancel()  # the caller was interrupted
            raise

    async def _await(self, body: Callable[[], Awaitable[T]]) -> T:
        await asyncio.shield(asyncio.wrap_future(self._ready))
        return await asyncio.wrap_future(self._start(body))

    def _start(self, body: Callable[[], Awaitable[T]]) -> Future[T]:
        call: Future[T] = Future()
        scope = trio.CancelScope()
        self._calls.add(call)

        async def run() -> None:
            with scope:
                try:
                    _set(call, await body())
                except Exception as exc:  # the caller's
                    _set(call, error=exc)

        def begin() -> None:
            if self._nursery is not None:
                self._nursery.start_soon(run)  # else it is answered at the end, which has begun

        def done(call: Future[T]) -> None:
            self._calls.discard(call)
            if call.cancelled():
                self._in_thread(scope.cancel)

        call.add_done_callback(done)
        self._in_thread(begin)
        if self._ended.done():
            _set(call, error=self._refusal())
        return call

    def _refusal(self) -> RunlaneError:
        failure = self.failure
        if isinstance(failure, RunlaneError):
            return failure
        if failure is not None:
            return HostFailed(f"the runtime's thread ended: {type(failure).__name__}: {failure}")
        return HostStopping("the runtime has stopped; runs go on without it")

    @staticmethod
    def _conclude(error: BaseException | None, failure: BaseException | None) -> None:
        """Raise why the host gave up, unless the block raised something of its own."""
        if failure is not None and (error is None or isinstance(error, HostStopping)):
            raise failure


def _set(call: Future[T], value: Any = None, *, error: BaseException | None = None) -> None:
    """Answer a call, unless it was cancelled or answered."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            call.set_exception(error)
        else:
            call.set_result(value)


def _awaited(
    verb: Callable[Concatenate[Verbs, P], Awaitable[T]],
) -> Callable[Concatenate[AsyncioVerbs, P], Coroutine[Any, Any, T]]:
    @functools.wraps(verb)
    async def call(self: AsyncioVerbs, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._beside._await(lambda: verb(self._beside._verbs, *args, **kwargs))

    return call


def _one(
    verb: Callable[Concatenate[Verbs, P], Awaitable[Handle]],
) -> Callable[Concatenate[AsyncioVerbs, P], Coroutine[Any, Any, Handle]]:
    @functools.wraps(verb)
    async def call(self: AsyncioVerbs, /, *args: P.args, **kwargs: P.kwargs) -> Handle:
        return self._own(await self._beside._await(lambda: verb(self._beside._verbs, *args, **kwargs)))

    return call


def _many(
    verb: Callable[Concatenate[Verbs, P], Awaitable[list[Handle]]],
) -> Callable[Concatenate[AsyncioVerbs, P], Coroutine[Any, Any, list[Handle]]]:
    @functools.wraps(verb)
    async def call(self: AsyncioVerbs, /, *args: P.args, **kwargs: P.kwargs) -> list[Handle]:
        made = await self._beside._await(lambda: verb(self._beside._verbs, *args, **kwargs))
        return [self._own(one) for one in made]

    return call


class AsyncioVerbs:
    """The verbs of a runtime in a thread, as coroutines for asyncio. Cancelling one gives up the wait for it."""

    def __init__(self, beside: RuntimeThread) -> None:
        self._beside = beside

    submit = _one(Verbs.submit)
    submit_many = _many(Verbs.submit_many)
    result = _awaited(Verbs.result)
    status = _awaited(Verbs.status)
    facts = _awaited(Verbs.facts)
    attempts = _awaited(Verbs.attempts)
    runs = _awaited(Verbs.runs)
    steps = _awaited(Verbs.steps)
    journal = _awaited(Verbs.journal)
    lanes = _awaited(Verbs.lanes)
    retry_lane = _awaited(Verbs.retry_lane)
    skip_lane = _awaited(Verbs.skip_lane)
    redeliver_lane = _awaited(Verbs.redeliver_lane)
    cancel = _awaited(Verbs.cancel)
    send_event = _awaited(Verbs.send_event)
    events = _awaited(Verbs.events)
    fail = _awaited(Verbs.fail)
    schedule = _awaited(Verbs.schedule)
    schedules = _awaited(Verbs.schedules)
    pause_schedule = _awaited(Verbs.pause_schedule)
    resume_schedule = _awaited(Verbs.resume_schedule)
    delete_schedule = _awaited(Verbs.delete_schedule)
    set_rate = _awaited(Verbs.set_rate)
    rates = _awaited(Verbs.rates)
    set_circuit = _awaited(Verbs.set_circuit)
    circuits = _awaited(Verbs.circuits)
    set_limit = _awaited(Verbs.set_limit)
    sandboxes = _awaited(Verbs.sandboxes)
    retry_sandbox = _awaited(Verbs.retry_sandbox)
    compute_records = _awaited(Verbs.compute_records)
    limits = _awaited(Verbs.limits)
    fires = _awaited(Verbs.fires)
    repair_fire = _one(Verbs.repair_fire)

    def handle(self, run_id: str, play: Play | None = None) -> Handle:
        """A handle of any run of this schema, whose calls are awaited from asyncio. Asks nothing yet."""
        return Handle(ids.check_run_id(run_id), self, play=play)

    def _own(self, handle: Handle) -> Handle:
        """The same run, its calls awaited from asyncio."""
        return Handle(handle.run_id, self, created=handle.created, play=handle.play)
