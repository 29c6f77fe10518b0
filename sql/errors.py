"""Every error that runlane raises, from the database border up.

Owns the names; the public ones are re-exported by ``runtime``. It never formats a driver's error itself:
``sql.connection`` translates those at the border.

The families tell a caller what to do. ``LinkError``: the link or the server is away, ask again on a new
connection. ``ItemFault``: one item of a batch caused it, the rest of the batch is fine. Everything else is
final for the call.
"""

from __future__ import annotations

from datetime import datetime


class RunlaneError(Exception):
    """Base of every error that runlane raises."""


# --- configuration and input -------------------------------------------------------------------------


class ConfigError(RunlaneError):
    """A setting is missing, unknown or out of range; the message names it and what is allowed."""


class InvalidPlay(RunlaneError):
    """A function cannot be registered as a play; the message names the play and the reason."""


class InputRefused(RunlaneError):
    """A call was refused at the door. ``field`` names the argument, ``reason`` says what is allowed."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class PayloadRefused(InputRefused):
    """A payload cannot be stored as JSON: too large, too deep, NaN, NUL, or not JSON at all."""


class UnknownPlay(InputRefused):
    """No host of this schema has ever registered a play of that name."""


class RunNotFound(RunlaneError):
    """There is no run with this id in this schema."""

    def __init__(self, run_id: str) -> None:
        super().__init__(f"run {run_id!r} does not exist")
        self.run_id = run_id


class ScheduleNotFound(RunlaneError):
    """There is no schedule with this name in this schema."""

    def __init__(self, name: str) -> None:
        super().__init__(f"schedule {name!r} does not exist")
        self.name = name


class FireNotFound(RunlaneError):
    """The schedule has no record of a fire at this time."""

    def __init__(self, name: str, fire_time: datetime) -> None:
        super().__init__(f"schedule {name!r} has no record of a fire at {fire_time.isoformat()}")
        self.name = name
        self.fire_time = fire_time


class IdempotencyConflict(RunlaneError):
    """The run id or idempotency key is taken by a run with another play or input; ``run_id`` names that run."""

    def __init__(self, message: str, run_id: str) -> None:
        super().__init__(message)
        self.run_id = run_id


class DuplicateRun(RunlaneError):
    """Another run holds the unique key; ``run_id`` names that run."""

    def __init__(self, message: str, run_id: str) -> None:
        super().__init__(message)
        self.run_id = run_id


# --- outcomes ----------------------------------------------------------------------------------------


class RunFailed(RunlaneError):
    """The run ended as failed. ``error_type``, ``message`` and ``traceback_text`` are the last attempt's."""

    def __init__(
        self,
        run_id: str,
        error_type: str,
        message: str,
        traceback_text: str | None = None,
        failures: int = 0,
        cause: str | None = None,
    ) -> None:
        super().__init__(f"run {run_id} failed: {error_type}: {message}")
        self.run_id = run_id
        self.error_type = error_type
        self.message = message
        self.traceback_text = traceback_text
        self.failures = failures
        self.cause = cause


class RunCancelled(RunlaneError):
    """The run ended as cancelled, or (inside a play) is about to: nothing more can be written for it."""

    def __init__(self, run_id: str, reason: str | None = None, by: str | None = None) -> None:
        super().__init__(f"run {run_id} was cancelled" + (f": {reason}" if reason else ""))
        self.run_id = run_id
        self.reason = reason
        self.by = by


class WaitTimedOut(RunlaneError):
    """A wait of a play was given up after its ``timeout``: nothing had come. It never passes any more."""

    def __init__(self, what: str, key: str) -> None:
        super().__init__(f"{what} (wait {key!r}) did not come in time")
        self.key = key


class OutcomeUnknown(RunlaneError):
    """A deadline passed before the database answered: the operation may or may not have happened.

    Asking again with the same run id, idempotency key or request id is always safe.
    """


class StepFailed(RunlaneError):
    """A step has failed, now or in an earlier attempt; ``error_type``, ``message`` and ``traceback_text`` say how.

    Raised alike in both cases, so that a play that handles it goes the same way each time; where the step failed in
    this very attempt the original error is the cause. ``tries`` counts the calls of its function. ``final``: no retry
    of the run gives it another chance.
    """

    def __init__(
        self,
        key: str,
        error_type: str,
        message: str,
        *,
        traceback_text: str | None = None,
        tries: int = 1,
        final: bool = False,
    ) -> None:
        super().__init__(f"step {key!r} failed: {error_type}: {message}")
        self.key = key
        self.error_type = error_type
        self.message = message
        self.traceback_text = traceback_text
        self.tries = tries
        self.final = final


class StepTimedOut(RunlaneError):
    """A step ran longer than its ``timeout``."""


class StepConflict(InputRefused):
    """The key of a step is taken: used twice in one attempt, or recorded for another function."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__("key", f"step {key!r} {reason}")
        self.key = key


class ResultTimeout(RunlaneError):
    """``handle.result(timeout=…)`` ended before the run did; the run goes on."""


# --- what a play may raise to say what becomes of its run ------------------------------------------------

LEAST_WAIT_S, MOST_WAIT_S = 0.1, 2_592_000.0


def wait_s(field: str, value: float) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not LEAST_WAIT_S <= value <= MOST_WAIT_S:
        allowed = f"a number of seconds from {LEAST_WAIT_S:g} to {MOST_WAIT_S:.0f} (30 days)"
        raise InputRefused(field, f"must be {allowed}, not {value!r:.40}")
    return float(value)


class Fatal(RunlaneError):
    """Raised by a play: the run fails now, whatever retries are left. ``raise Fatal("no such account") from exc``."""


class Retry(RunlaneError):
    """Raised by a play: this attempt has failed, which costs a retry; the next one begins after ``after`` seconds.

    Without ``after`` the play's own backoff decides, as for every other error.
    """

    def __init__(
        self, reason: str = "the play asked to be tried again", *, after: float | None = None
    ) -> None:
        super().__init__(reason)
        self.after = None if after is None else wait_s("after", after)


class Deferral(RunlaneError):
    """Raised by a play: the attempt goes back to the queue for ``retry_after`` seconds and costs neither a retry nor a
    crash. Base of ``CapacityUnavailable`` and ``DependencyUnavailable``."""

    kind = "deferred"

    def __init__(self, reason: str, *, retry_after: float = 5.0) -> None:
        super().__init__(reason)
        self.retry_after = wait_s("retry_after", retry_after)


class CapacityUnavailable(Deferral):
    """There is no room for this attempt now (no free sandbox, no free slot of a rate scope). It goes back to the queue
    for ``retry_after`` seconds, free of charge and without a bound: capacity comes back."""

    kind = "capacity_unavailable"

    def __init__(self, reason: str = "no capacity", *, retry_after: float = 5.0) -> None:
        super().__init__(reason, retry_after=retry_after)


class DependencyUnavailable(Deferral):
    """Something that the play needs is out. The attempt goes back to the queue for ``retry_after`` seconds, free of
    charge, until that has gone on for the play's ``outage_max_s``: then the run fails."""

    kind = "dependency_unavailable"

    def __init__(self, dependency: str, reason: str = "is unavailable", *, retry_after: float = 5.0) -> None:
        super().__init__(f"{dependency}: {reason}", retry_after=retry_after)
        self.dependency = dependency


# --- the host ----------------------------------------------------------------------------------------


class HostStopping(RunlaneError):
    """The runtime is shutting down and takes no new work."""


class HostFailed(RunlaneError):
    """The runtime gave up; the message names the actor and its last error."""


class MailboxFull(RunlaneError):
    """An actor's mailbox is at its capacity."""


# --- the database ------------------------------------------------------------------------------------


class DatabaseError(RunlaneError):
    """Base of everything the database or the link to it can answer.

    When it did answer, ``sqlstate`` is its code and ``detail`` the detail that it added, if any.
    """

    def __init__(self, message: str, sqlstate: str | None = None, detail: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.detail = detail


class InvalidDsn(DatabaseError, ConfigError):
    """The DSN cannot be parsed, or names a database, role or password that the server does not accept."""


class MissingRights(DatabaseError):
    """The role may not do this (for example create the schema); the message says what to grant."""


class HostTooOld(DatabaseError):
    """The database records a minimum host version above this one."""


class SchemaNotReady(DatabaseError):
    """Tables, indexes or functions are missing; the message lists them. ``runlane migrate`` builds them."""


class WrongIsolation(DatabaseError):
    """The session's isolation level is not READ COMMITTED, which the transitions need."""


class LinkError(DatabaseError):
    """The link or the server is away: the answer, if any, was lost. Ask again on a new connection."""


class LinkLost(LinkError):
    """The connection broke or was terminated while it was in use."""


class DatabaseUnreachable(LinkError):
    """No connection could be made; the message names host and port."""


class ServerReadOnly(LinkError):
    """The server accepts no writes (a standby, or in recovery): the connection is discarded."""


class StatementTooSlow(LinkError):
    """A statement exceeded its deadline; its connection is discarded, its effect is unknown."""


class ItemFault(DatabaseError):
    """One item of a batch caused this: without it the rest of the batch goes through."""


class LockTimedOut(ItemFault):
    """A row was locked by somebody else for longer than the statement may wait."""


class Deadlock(ItemFault):
    """The server broke a deadlock by ending this statement."""


class SerializationLost(ItemFault):
    """A concurrent transaction won (SQLSTATE 40001)."""


class KernelRefused(ItemFault):
    """The kernel or a constraint refused the statement; ``sqlstate`` and the message say why."""
