"""Which errors of a step say nothing about the step.

Owns that judgement: a step that was cut short or met a passing fault of a database has no result, so nothing is
recorded and it runs again. It imports no driver: their errors are known by SQLSTATE and by name.
"""

from __future__ import annotations

from typing import Any

from actors.core import leaves
from sql.errors import (
    Deadlock,
    Deferral,
    HostStopping,
    LinkError,
    LockTimedOut,
    OutcomeUnknown,
    Retry,
    RunCancelled,
    SerializationLost,
)

# Serialization and deadlock; the connection; the server shutting down or starting; a lock that did not come in time.
_SQLSTATES = ("40", "08", "57P0", "55P03")
# What drivers raise without a SQLSTATE when the connection itself is gone.
_DRIVERS = frozenset({"asyncpg", "psycopg", "psycopg2", "pg8000"})
_BROKEN = frozenset({"InterfaceError", "InternalClientError", "OperationalError"})
_OURS = (LinkError, Deadlock, SerializationLost, LockTimedOut, OutcomeUnknown, HostStopping)


def cut_short(error: BaseException) -> bool:
    """Whether the step was stopped rather than failed: cancellation, exit, or what tells the run what becomes of it.

    Alone or anywhere in an exception group. Trying again within this attempt makes no sense.
    """
    return any(
        not isinstance(leaf, Exception) or isinstance(leaf, (RunCancelled, Deferral, Retry))
        for leaf in leaves(error)
    )


def is_transient(error: BaseException) -> bool:
    """Whether the error is a passing fault: serialization, deadlock, a lost connection, alone or in a group."""
    return any(_transient(leaf) for leaf in leaves(error))


def _transient(error: BaseException) -> bool:
    if isinstance(error, (*_OURS, ConnectionError)):
        return True
    original = getattr(error, "orig", None)  # SQLAlchemy wraps the driver's own
    if isinstance(original, BaseException) and original is not error:
        return _transient(original)
    sqlstate: Any = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    if isinstance(sqlstate, str):
        return sqlstate.startswith(_SQLSTATES)
    return any(
        kind.__name__ in _BROKEN and kind.__module__.partition(".")[0] in _DRIVERS
        for kind in type(error).__mro__
    )
