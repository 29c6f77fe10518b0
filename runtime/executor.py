"""The executor: runs the play of one attempt and turns what happens into an ending.

Owns the rules from a play's return, error, park or cancellation to the settlement of its attempt; what an error means
is ``retries``'s. It never writes to the database: endings go to settle.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import trio

from actors.attempts import Attempt, Why
from actors.core import leaves
from actors.executors import released
from runtime.codec import JsonCodec
from runtime.config import RuntimeConfig
from runtime.context import Context, Doors, SyncContext
from runtime.plays import Play
from runtime.retries import judge
from runtime.steps import Steps, StepTools
from sql.errors import ItemFault, RunlaneError
from sql.settle import Settlement
from sql.waits import waits_text

log = logging.getLogger("runlane.executor")


class PlayTimedOut(RunlaneError):
    """An attempt ran longer than its play's ``timeout_s``."""


class Executor:
    """Callable with an attempt; gives its settlement, or None when there is nothing to settle.

    ``doors`` is what contexts need of the actors; ``flush()`` makes the facts actor hurry.
    """

    def __init__(
        self,
        plays: Mapping[str, Play],
        codec: JsonCodec,
        config: RuntimeConfig,
        *,
        doors: Doors,
        flush: Callable[[], None],
    ) -> None:
        self._plays = plays
        self._codec = codec
        self._config = config
        self._doors = doors
        self._flush = flush
        self._threads = trio.CapacityLimiter(config.threads)
        # Threads of their own for steps: a play that holds one of the others must not wait for one of those.
        self._steps = StepTools(
            codec,
            doors.receipts,
            trio.CapacityLimiter(config.threads),
            config.max_payload_bytes,
            config.max_depth,
        )

    async def __call__(self, attempt: Attempt) -> Settlement | None:
        """Run the play inside the attempt's scope."""
        play = self._plays[attempt.claimed.play]
        context = Context(
            attempt,
            self._codec,
            self._doors,
            Steps(attempt, self._steps, play.final),
            park_after_s=self._config.park_after_s,
            max_depth=self._config.max_depth,
        )
        context.begin()
        output: Any = None
        failure: BaseException | None = None
        ended = False
        with attempt.scope:
            try:
                output = await self._play(play, context, attempt)
                ended = True
            except BaseException as exc:
                failure = _fault(attempt, exc)
                ended = True
        context.end()
        ending = self._ending(play, context, attempt, ended, output, failure)
        if ending is not None and ending.outcome in ("completed", "failed"):
            await context.steps.at_rest()
        if ending is not None and attempt.has_unstored:
            await self._store(attempt)
        return ending

    async def _play(self, play: Play, context: Context, attempt: Attempt) -> Any:
        arguments: list[Any] = []
        if play.takes_input:
            data = self._codec.decode(attempt.claimed.input, what="input")
            if play.input_type is not None:
                data = self._codec.structure(data, play.input_type, what="input")
            arguments.append(data)
        if play.is_sync:
            return await self._in_thread(play, context, arguments)
        if play.timeout_s is None:
            return await play.fn(context, *arguments)
        with trio.move_on_after(play.timeout_s):
            return await play.fn(context, *arguments)
        raise _timed_out(play)

    async def _in_thread(self, play: Play, context: Context, arguments: list[Any]) -> Any:
        seconds = play.timeout_s

        def begin(deadline_in_s: float) -> None:
            limit.deadline = trio.current_time() + deadline_in_s

        def in_thread() -> Any:
            if seconds is not None:  # its time counts from when it has a thread
                trio.from_thread.run_sync(begin, seconds)
            return play.fn(SyncContext(context), *arguments)

        with trio.CancelScope() as limit:
            # Abandoned when cancelled: the thread cannot be stopped, but what it does is refused by its fence.
            return await trio.to_thread.run_sync(in_thread, abandon_on_cancel=True, limiter=self._threads)
        raise _timed_out(play)

    def _ending(
        self,
        play: Play,
        context: Context,
        attempt: Attempt,
        ended: bool,
        output: Any,
        failure: BaseException | None,
    ) -> Settlement | None:
        if attempt.why in (Why.CANCELLED, Why.LOST):
            return None
        if attempt.why is Why.PARKED:
            return self._settlement(attempt, "parked", waits=waits_text(context.parking.waits))
        stopped = attempt.scope.cancel_called or trio.current_effective_deadline() == -math.inf
        if not ended or (failure is not None and stopped):
            # Stopped by a shutdown, or by its scope's deadline because the lease could not be renewed. What the play
            # made of its cancellation is not the play's failure.
            return released(attempt)
        if failure is None:
            try:
                return self._completed(attempt, output)
            except Exception as exc:  # the output's own serializer raised
                failure = exc
        return self.failed(play, attempt, failure)

    def _completed(self, attempt: Attempt, output: Any) -> Settlement:
        text, replaced = self._codec.encode_output(
            output, limit_bytes=self._config.max_payload_bytes, max_depth=self._config.max_depth
        )
        if replaced is None:
            return self._settlement(attempt, "completed", f'{{"output":{text}}}')
        log.warning("event=output_replaced run=%s reason=%r", attempt.run_id, replaced)
        return self._settlement(
            attempt, "completed", f'{{"output":{text},"replaced":{json.dumps(replaced)}}}'
        )

    def failed(self, play: Play, attempt: Attempt, failure: BaseException) -> Settlement:
        """How an attempt ends that failed like this."""
        verdict = judge(play, failure, attempt.claimed.failures, outage_max_s=self._config.outage_max_s)
        log.info(
            "event=attempt_failed run=%s play=%s attempt=%d outcome=%s error=%s",
            attempt.run_id,
            play.name,
            attempt.attempt,
            verdict.outcome,
            type(failure).__name__,
        )
        return attrs.evolve(
            self._settlement(attempt, verdict.outcome, verdict.payload, delay_s=verdict.delay_s),
            outage_max_s=verdict.outage_max_s,
            overdue=verdict.overdue,
        )

    def _settlement(
        self, attempt: Attempt, outcome: str, payload: str = "{}", *, delay_s: float = 0.0, waits: str = "[]"
    ) -> Settlement:
        return Settlement(
            attempt.run_id,
            attempt.attempt,
            attempt.token,
            outcome,
            payload,
            delay_s,
            waits,
            play=attempt.claimed.play,
        )

    async def _store(self, attempt: Attempt) -> None:
        """Wait until what the attempt has said is in the database: its ending comes after it."""
        if attempt.stored is None:
            attempt.stored = trio.Event()
        self._flush()
        stored = attempt.stored
        while not stored.is_set() and trio.current_time() < attempt.lease_until:
            # Past it, the lease was renewed meanwhile, or the ending would be refused anyway.
            with trio.move_on_at(attempt.lease_until):
                await stored.wait()


def _timed_out(play: Play) -> PlayTimedOut:
    return PlayTimedOut(f"the attempt ran longer than timeout_s={play.timeout_s:g}")


def _fault(attempt: Attempt, exc: BaseException) -> BaseException:
    """What a play raised, if that is its failure: also SystemExit, which would otherwise end every other play.

    A cancellation goes on, alone: what was raised beside it is noise of the stop. So does KeyboardInterrupt.
    """
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(exc)):
        raise exc
    if isinstance(exc, trio.Cancelled):
        raise exc
    if isinstance(exc, BaseExceptionGroup):
        cancelled, rest = exc.split(trio.Cancelled)
        if cancelled is not None:
            log.info("event=raised_while_cancelled run=%s error=%r", attempt.run_id, rest)
            raise cancelled
    return exc


def unstorable(ending: Settlement, fault: ItemFault) -> Settlement:
    """The ending that replaces one the database refuses: a run always ends."""
    record = {
        "error_type": "OutcomeUnstorable",
        "message": f"the attempt ended as {ending.outcome}, which could not be stored: {fault}",
        "traceback": None,
    }
    payload = json.dumps({"error": record})
    return attrs.evolve(ending, outcome="failed", payload=payload)
