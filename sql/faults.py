"""Translation of every foreign error into ``sql.errors``, the second half of the border.

Owns the mapping from the driver's classes, the operating system's errors and SQLSTATEs to ours. It never
decides what a caller does about one; the families in ``sql.errors`` say that.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket

import asyncpg
from asyncpg.exceptions import _base as base

from sql import errors

_BY_STATE: dict[str, type[errors.DatabaseError]] = {
    "57014": errors.StatementTooSlow,
    "55P03": errors.LockTimedOut,
    "40P01": errors.Deadlock,
    "40001": errors.SerializationLost,
    "25006": errors.ServerReadOnly,
    "25P02": errors.LinkLost,
    "25P03": errors.LinkLost,
    "42501": errors.MissingRights,
    "42P01": errors.SchemaNotReady,
    "42703": errors.SchemaNotReady,
    "42883": errors.SchemaNotReady,
    "3F000": errors.SchemaNotReady,
    "0A000": errors.DatabaseError,
    "28000": errors.InvalidDsn,
    "28P01": errors.InvalidDsn,
    "3D000": errors.InvalidDsn,
}
_BY_CLASS: dict[str, type[errors.DatabaseError]] = {
    "08": errors.LinkLost,  # connection
    "53": errors.LinkLost,  # out of memory, disk or connections: away until somebody helps
    "57": errors.LinkLost,  # shutdown, crash of another backend, starting up
    "58": errors.LinkLost,  # I/O error of the server
    "25": errors.DatabaseError,  # a statement in the wrong place: a fault of ours
    "26": errors.LinkLost,  # a prepared statement that is not there: a pooler, or a lost connection
    "42": errors.DatabaseError,
    "F0": errors.DatabaseError,
    "XX": errors.DatabaseError,
}


def translate(exc: BaseException, *, closed: bool = True) -> errors.DatabaseError | None:
    """Our error for a foreign one, or None when it is neither the driver's nor the link's.

    ``closed`` says whether the connection is closed: a refusal of the driver is a lost link only then, else a
    misuse, which no new connection would cure.
    """
    if isinstance(exc, errors.DatabaseError):
        return exc
    if isinstance(exc, asyncpg.InvalidCachedStatementError):
        return errors.LinkLost(f"a cached plan is out of date: {exc}", exc.sqlstate)
    if isinstance(exc, asyncpg.PostgresError):
        state = exc.sqlstate or "XX000"
        kind = _BY_STATE.get(state) or _BY_CLASS.get(state[:2], errors.KernelRefused)
        detail = getattr(exc, "detail", None)
        message = exc.args[0] if exc.args else state  # str() would repeat the detail and the hint
        return kind(f"{message}" + (f" ({detail})" if detail else "") + f" [{state}]", state, detail)
    # A TimeoutError is an OSError, so it comes first.
    if isinstance(exc, TimeoutError):
        return errors.StatementTooSlow(f"no answer in time: {exc}" if str(exc) else "no answer in time")
    if isinstance(exc, OSError):
        return errors.LinkLost(f"the connection broke: {exc}")
    if isinstance(exc, base.DataError):  # an argument that the driver could not encode: nothing was sent
        return errors.KernelRefused(f"an argument cannot be sent: {exc}", "22000")
    if isinstance(exc, asyncpg.InterfaceError) and not closed:
        return errors.DatabaseError(f"the driver refused the call: {exc}")
    if isinstance(exc, (asyncpg.InterfaceError, base.InternalClientError)):
        return errors.LinkLost(f"the connection is not usable: {exc}")
    if isinstance(exc, asyncio.CancelledError):
        return errors.LinkLost("the driver cancelled the call")
    return None


def translate_connecting(exc: BaseException, where: str, timeout_s: float) -> errors.DatabaseError | None:
    """Like :func:`translate` while a connection is being made to ``where``."""
    if isinstance(exc, base.TargetServerAttributeNotMatched):
        return errors.ServerReadOnly(f"{where}: {exc}")
    if isinstance(exc, asyncpg.PostgresError) and "startup parameter" in str(exc):
        return errors.InvalidDsn(f"{where}: {exc}; a pooler is between: set pooled to true", exc.sqlstate)
    if isinstance(exc, (base.ClientConfigurationError, UnicodeError)) or type(exc) is ValueError:
        return errors.InvalidDsn(f"the DSN cannot be used: {exc}")
    translated = translate(exc)
    if translated is None:
        return None
    if isinstance(translated, errors.StatementTooSlow):
        return errors.DatabaseUnreachable(f"cannot connect to {where}: no connection within {timeout_s:g} s")
    if isinstance(translated, errors.LinkLost):
        return errors.DatabaseUnreachable(f"cannot connect to {where}: {_reason(exc)}", translated.sqlstate)
    return type(translated)(f"{where}: {translated}", translated.sqlstate)


def _reason(exc: BaseException) -> str:
    """Why no connection could be made, in the system's words: asyncio puts addresses and numbers in their place."""
    if isinstance(exc, socket.gaierror):
        return (exc.strerror or str(exc)).lower()
    # One for each address of a name that has several.
    numbers = dict.fromkeys(re.findall(r"\[Errno (\d+)\]", str(exc))) if isinstance(exc, OSError) else {}
    if numbers:
        return ", ".join(os.strerror(int(number)).lower() for number in numbers)
    return str(exc) or type(exc).__name__
