"""Exception groups, taken apart.

Owns flattening; deciding what a failure means is the supervisor's.
"""

from __future__ import annotations


def leaves(exc: BaseException) -> list[BaseException]:
    """Every exception inside nested groups, in order; of a plain exception, itself."""
    if not isinstance(exc, BaseExceptionGroup):
        return [exc]
    return [leaf for inner in exc.exceptions for leaf in leaves(inner)]


def only(exc: BaseException) -> BaseException:
    """The single exception inside nested groups of one; a group with several stays as it is."""
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc


def hidden_by(exc: BaseException) -> BaseException | None:
    """The first exception in the context chain of ``exc`` that is of another type, or None."""
    seen = {id(exc)}
    inner = exc.__context__
    while inner is not None and id(inner) not in seen:
        if type(inner) is not type(exc):
            return inner
        seen.add(id(inner))
        inner = inner.__context__
    return None
