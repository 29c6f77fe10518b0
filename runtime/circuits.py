"""Dependencies as a play sees them: ``async with ctx.dependency("crm")``.

Owns what counts as a failure of a dependency, and what an open circuit means for a play. It never talks to the
database: messages go to the circuits actor.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import attrs
import trio

from actors.attempts import Attempt
from actors.circuits import Circuits, Enter
from actors.core import leaves
from runtime.codec import preview, scrub, type_name
from runtime.ids import check_shared_name
from sql import circuits as door
from sql.calls import new_token
from sql.errors import (
    LEAST_WAIT_S,
    MOST_WAIT_S,
    DependencyUnavailable,
    HostStopping,
    InputRefused,
    RunlaneError,
)

_ERROR_BYTES = 500

Errors = type[Exception] | tuple[type[Exception], ...]
Pending = Callable[[], contextlib.AbstractContextManager[None]]


@attrs.frozen(slots=True)
class Entry:
    """A call that may be made, and how its end is reported."""

    name: str
    token: int
    probe: bool
    errors: tuple[type[Exception], ...]
    circuits: Circuits

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Reports how the block went, without waiting."""
        try:
            yield
        except BaseException as exc:
            self._ended(exc)
            raise
        self._ended(None)

    @contextlib.contextmanager
    def ending_in_thread(self) -> Iterator[None]:
        """The same for a play that runs in a thread."""
        try:
            yield
        except BaseException as exc:
            trio.from_thread.run_sync(self._ended, exc)
            raise
        trio.from_thread.run_sync(self._ended, None)

    def give_up(self) -> None:
        """The call is not made after all, nobody knows whether it would have been the probe."""
        self._tell("none")

    def _ended(self, exc: BaseException | None) -> None:
        failure = None if exc is None else self._failure(exc)
        if failure is not None:
            self._tell("failed", scrub(f"{type_name(failure)}: {failure}", _ERROR_BYTES))
        elif exc is not None:
            if self.probe:
                self._tell("none")
        elif self.probe or not self.circuits.healthy(self.name):
            # Of a healthy circuit, nobody needs to hear that it is.
            self._tell("ok")

    def _failure(self, exc: BaseException) -> Exception | None:
        """The failure of the dependency in what was raised, if any.

        A cancellation says nothing about it, and neither do errors of ours (Fatal, Retry, another deferral), but for
        the play's own word that this dependency is unavailable.
        """
        found = leaves(exc)
        if not all(isinstance(leaf, Exception) for leaf in found):
            return None
        for leaf in found:
            if isinstance(leaf, DependencyUnavailable) and leaf.dependency == self.name:
                return leaf
            if isinstance(leaf, self.errors) and not isinstance(leaf, RunlaneError):
                return leaf
        return None

    def _tell(self, result: str, error: str | None = None) -> None:
        with contextlib.suppress(HostStopping):
            self.circuits.tell(door.Report(self.name, self.token, result, error))


@contextlib.asynccontextmanager
async def dependency(
    circuits: Circuits, attempt: Attempt, name: Any, errors: Any, *, pending: Pending
) -> AsyncIterator[None]:
    """A call of the dependency ``name`` for the length of the block. Raises DependencyUnavailable."""
    entry = await enter(circuits, attempt, name, errors, pending=pending)
    with entry.ending():
        yield


async def enter(circuits: Circuits, attempt: Attempt, name: Any, errors: Any, *, pending: Pending) -> Entry:
    """Permission to call. Raises DependencyUnavailable where the circuit is open. ``pending`` surrounds the wait."""
    name = check_shared_name(name)
    kinds = errors if isinstance(errors, tuple) else (errors,)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise InputRefused(
            "errors", f"must be a class of exceptions, or a tuple of them, not {preview(errors)}"
        )
    call = door.Call(name, new_token(), attempt.run_id, attempt.attempt)
    if circuits.healthy(name):
        return Entry(name, call.token, False, kinds, circuits)
    asked = Enter(call)
    circuits.mailbox.send_nowait(asked)
    try:
        with pending():
            answer = await asked.reply.wait()
    except BaseException:
        # It may be the probe by now, and nobody would report.
        Entry(name, call.token, True, kinds, circuits).give_up()
        raise
    if answer.answer == "open":
        retry_after = min(max(answer.retry_after_s or LEAST_WAIT_S, LEAST_WAIT_S), MOST_WAIT_S)
        raise DependencyUnavailable(name, "its circuit is open", retry_after=retry_after)
    return Entry(name, call.token, answer.answer == "probe", kinds, circuits)
