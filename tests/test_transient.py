"""Which errors of a step are recorded as its result, and which say nothing of it."""

from __future__ import annotations

from typing import Any

import asyncpg
import psycopg
import pytest
import trio

from runtime import DependencyUnavailable, Fatal, InputRefused, Retry, RunCancelled, StepTimedOut
from runtime.transient import cut_short, is_transient
from sql.errors import Deadlock, LinkLost, OutcomeUnknown, SerializationLost

LASTING = [
    ValueError("no"),
    Fatal("never"),
    InputRefused("field", "no"),
    StepTimedOut("slow"),
    TimeoutError("slow"),
    FileNotFoundError("no file"),
    asyncpg.UniqueViolationError("taken"),
    psycopg.errors.UniqueViolation("taken"),
    psycopg.errors.UndefinedTable("no table"),
]
PASSING = [
    SerializationLost("lost"),
    Deadlock("broken"),
    LinkLost("gone"),
    OutcomeUnknown("who knows"),
    ConnectionResetError("reset"),
    BrokenPipeError("broken"),
    asyncpg.SerializationError("lost"),
    asyncpg.DeadlockDetectedError("broken"),
    asyncpg.ConnectionDoesNotExistError("gone"),
    asyncpg.AdminShutdownError("stopping"),
    asyncpg.InterfaceError("connection is closed"),
    psycopg.errors.SerializationFailure("lost"),
    psycopg.errors.DeadlockDetected("broken"),
    psycopg.OperationalError("the connection is lost"),
]


def names(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__name__}"


def wrapped(error: Exception) -> list[BaseException]:
    """An error alone, behind an ORM's, and in groups."""
    outer: Any = RuntimeError("(driver) error")
    outer.orig = error
    return [
        error,
        outer,
        ExceptionGroup("g", [error]),
        ExceptionGroup("g", [ExceptionGroup("h", [ValueError(), error])]),
    ]


@pytest.mark.parametrize("error", PASSING, ids=names)
def test_passing_faults(error: Exception) -> None:
    for one in wrapped(error):
        assert is_transient(one)
        assert not cut_short(one)


@pytest.mark.parametrize("error", LASTING, ids=names)
def test_errors_that_are_the_steps_own(error: Exception) -> None:
    for one in wrapped(error):
        assert not is_transient(one)
        assert not cut_short(one)


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(1), RunCancelled("r"), Retry("again"), DependencyUnavailable("db")],
    ids=names,
)
def test_what_stops_a_step(error: BaseException) -> None:
    assert cut_short(error)
    assert cut_short(BaseExceptionGroup("g", [ValueError(), error]))


async def test_a_cancellation_stops_a_step() -> None:
    caught: list[BaseException] = []
    with trio.CancelScope() as scope:
        scope.cancel()
        try:
            await trio.lowlevel.checkpoint()
        except BaseException as error:
            caught.append(error)
            raise
    assert cut_short(caught[0])
    assert cut_short(BaseExceptionGroup("g", [ValueError(), caught[0]]))
