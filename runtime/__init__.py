"""The host: composition, the public API, plays, health, ledgers and the command line."""

from __future__ import annotations

__runlane__ = "0.1.0"

from runtime import _names

_names.check()

from runtime.api import Runtime  # noqa: E402 - the check comes first
from runtime.client import Client, SyncClient  # noqa: E402
from runtime.codec import JsonCodec, Seal, SealedCodec  # noqa: E402
from runtime.config import RuntimeConfig  # noqa: E402
from runtime.context import Child, Context, SyncChild, SyncContext  # noqa: E402
from runtime.executor import PlayTimedOut  # noqa: E402
from runtime.handle import Handle  # noqa: E402
from runtime.http_ledger import HttpLedger  # noqa: E402
from runtime.ledger import (  # noqa: E402
    Ledger,
    LedgerNotCurrent,
    LedgerRejected,
    LedgerRetry,
    MemoryLedger,
)
from runtime.plays import Play, play  # noqa: E402
from runtime.postgres_ledger import PostgresLedger  # noqa: E402
from runtime.rates import Permit  # noqa: E402
from runtime.schedules import Schedule  # noqa: E402
from runtime.submit import Submit  # noqa: E402
from sql.circuits import Circuit  # noqa: E402
from sql.errors import (  # noqa: E402
    CapacityUnavailable,
    ConfigError,
    DatabaseError,
    Deferral,
    DependencyUnavailable,
    DuplicateRun,
    Fatal,
    FireNotFound,
    HostFailed,
    HostStopping,
    IdempotencyConflict,
    InputRefused,
    InvalidPlay,
    OutcomeUnknown,
    PayloadRefused,
    ResultTimeout,
    Retry,
    RunCancelled,
    RunFailed,
    RunlaneError,
    RunNotFound,
    ScheduleNotFound,
    StepConflict,
    StepFailed,
    StepTimedOut,
    UnknownPlay,
    WaitTimedOut,
)
from sql.limits import Limit  # noqa: E402
from sql.rates import RateScope  # noqa: E402
from sql.receipts import StepRecord  # noqa: E402
from sql.schedules import Fire, ScheduleStatus  # noqa: E402
from sql.types import (  # noqa: E402
    Approval,
    CancelOutcome,
    Delivery,
    Event,
    EventOutcome,
    Fact,
    FailOutcome,
    JournalEntry,
    Lane,
    LaneStatus,
    Performance,
    RunDetails,
    RunnerStatus,
    RunStatus,
    Usage,
    WaitRecord,
)

__all__ = [
    "Approval",
    "CancelOutcome",
    "CapacityUnavailable",
    "Child",
    "Circuit",
    "Client",
    "ConfigError",
    "Context",
    "DatabaseError",
    "Deferral",
    "Delivery",
    "DependencyUnavailable",
    "DuplicateRun",
    "Event",
    "EventOutcome",
    "Fact",
    "FailOutcome",
    "Fatal",
    "Fire",
    "FireNotFound",
    "Handle",
    "HostFailed",
    "HostStopping",
    "HttpLedger",
    "IdempotencyConflict",
    "InputRefused",
    "InvalidPlay",
    "JournalEntry",
    "JsonCodec",
    "Lane",
    "LaneStatus",
    "Ledger",
    "LedgerNotCurrent",
    "LedgerRejected",
    "LedgerRetry",
    "Limit",
    "MemoryLedger",
    "OutcomeUnknown",
    "PayloadRefused",
    "Performance",
    "Permit",
    "Play",
    "PlayTimedOut",
    "PostgresLedger",
    "RateScope",
    "ResultTimeout",
    "Retry",
    "RunCancelled",
    "RunDetails",
    "RunFailed",
    "RunNotFound",
    "RunStatus",
    "RunlaneError",
    "RunnerStatus",
    "Runtime",
    "RuntimeConfig",
    "Schedule",
    "ScheduleNotFound",
    "ScheduleStatus",
    "Seal",
    "SealedCodec",
    "StepConflict",
    "StepFailed",
    "StepRecord",
    "StepTimedOut",
    "Submit",
    "SyncChild",
    "SyncClient",
    "SyncContext",
    "UnknownPlay",
    "Usage",
    "WaitRecord",
    "WaitTimedOut",
    "play",
]

for _name in __all__:
    _kind = globals()[_name]
    if isinstance(_kind, type) and issubclass(_kind, BaseException):
        _kind.__module__ = __name__  # what tracebacks and stored errors call them is what programs import
