"""Records that cross the border between the kernel and everybody above it.

Owns plain values only: no behaviour beyond derived properties, no I/O. Times are timezone-aware
datetimes of the database clock; durations carry their unit in the name.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import attrs

RUN_ID_PATTERN = r"[A-Za-z0-9._:-]{1,128}"

OPEN_STATUSES = frozenset({"queued", "running", "waiting"})
TERMINAL_STATUSES = frozenset({"completed", "failed", "cancelled"})
TERMINAL_FACTS = frozenset({"run.completed", "run.failed", "run.cancelled"})
FACT_TYPES = TERMINAL_FACTS | {
    "run.created", "run.started", "run.requeued", "run.waiting", "run.resumed", "run.progress", "run.log",
}  # fmt: skip

# What a launch may say of itself. Closed lists: what a newer version has stored and this one does not know is dropped
# where it is read, never passed on. ``submit.sql`` has the same.
SURFACES = ("api", "app", "chat", "cli", "sdk", "sql")
TRIGGERS = ("api", "event", "manual", "parent", "schedule", "sql_listener", "system", "webhook")
SCOPES = ("org", "system")
ON_CONFLICT = ("reject", "existing", "replace")
# How much a receiver takes of what a terminal can say of how its run went.
PERFORMANCE = ("basic", "full")


class Lane(enum.IntEnum):
    """The two ordered streams of a run's facts; order is promised per lane."""

    LIFECYCLE = 0
    OBSERVABILITY = 1

    @property
    def label(self) -> str:
        """The lane's name as it appears in delivery keys and on the wire."""
        return self.name.lower()


@attrs.frozen(slots=True)
class Fact:
    """One thing that happened to a run.

    ``seq`` counts from 1 within ``(run_id, lane)`` without gaps. ``payload`` is decoded JSON.
    """

    run_id: str
    lane: Lane
    seq: int
    type: str
    payload: Any
    created_at: datetime


@attrs.frozen(slots=True)
class Delivery:
    """A frozen prefix of one run's lane, as a ledger receives it.

    A redelivery has the same ``facts`` and the same ``delivery_key`` (``run:lane:first-last``, and ``:sN`` in
    generation N); ``attempt`` counts deliveries of this prefix from 1, those that their sender gave up excepted, and
    is not part of the key. ``digest`` is the SHA-256 (hex) of the canonical facts.

    ``token`` is the lane's lease: a receiver that can ask for proof of it knows that the sender may deliver.

    Two things let a ledger lack facts right before the first of these: ``passed`` counts those that may not have been
    sent to it, because they have no effect on a ledger or, before a terminal that goes elsewhere, went to another one;
    ``generation`` counts what operators skipped in this lane, so any gap is meant where it has risen since the delivery
    before.
    """

    run_id: str
    lane: Lane
    facts: tuple[Fact, ...]
    delivery_key: str
    attempt: int
    digest: str
    token: int = 0
    generation: int = 0
    passed: int = 0


@attrs.frozen(slots=True)
class WaitRecord:
    """One thing that a parked run stands at.

    ``kind``: sleep, event, approval or child. ``name``: the event's, or the child's run id. ``until``: when it passes
    (a sleep) or is given up (the others); None: never by itself.
    """

    kind: str
    key: str
    name: str | None
    since: datetime
    until: datetime | None


@attrs.frozen(slots=True)
class Usage:
    """What the process of a runner has used, by its own measure: seconds of CPU, and the most memory at once."""

    cpu_s: float
    peak_memory_bytes: int


@attrs.frozen(slots=True)
class Performance:
    """How a run went, by the database's clock; it is in the terminal of a run that asked for ``terminal_performance``.

    ``total_s``: from admission to end. ``queued_s``: from admission to the first attempt, a delay included; None: there
    was none. ``host_s`` and ``sandbox_s``: how long its ``attempts`` lasted, on hosts (where each takes a slot) and in
    sandboxes. ``usage``: of the runner whose result ended the run, where the launch asked for ``full``.
    """

    total_s: float
    queued_s: float | None
    host_s: float
    sandbox_s: float
    attempts: int
    usage: Usage | None = None


@attrs.frozen(slots=True)
class RunnerStatus:
    """The runner of one attempt in a sandbox of ``provider``.

    ``status`` is ``running``, or how the attempt ended. ``updated_at``: when anything of it was last heard, be it its
    detachment or its end. The rest is of a running one: ``heartbeat_at`` is its latest heartbeat (None: none yet),
    ``heartbeat`` the same as text in UTC with microseconds, never the same twice; ``silent_s`` is how long ago
    ``updated_at`` is by the database's clock, and after ``heartbeat_timeout_s`` of that its provider is asked;
    ``ceiling_at`` is when the run fails, None for never.
    """

    status: str
    sandbox: str
    provider: str
    heartbeat_at: datetime | None
    heartbeat: str | None
    updated_at: datetime
    heartbeat_timeout_s: float | None
    ceiling_at: datetime | None
    silent_s: float | None


@attrs.frozen(slots=True)
class RunDetails:
    """What the full form of a status has on top.

    ``accepted_at``: when the run was admitted. ``surface``, ``trigger`` and ``scope`` are what its launch said of
    itself; what this version does not know is dropped. ``unique_key`` is the one it asked for. ``terminal`` is its
    terminal fact's payload as stored (``result`` reads the output): ``output``, ``error`` or ``reason`` and ``by``.

    ``receiver`` gets the run's facts ("" is the hosts' own ledger), ``terminal_receiver`` its end, if another.
    ``lane_failure`` says why the latest delivery of its lifecycle facts failed, if they are still to come;
    ``log_lane_blocked`` why its logs are not delivered. ``served``: a host that claims such runs was seen within the
    last minute; ``lane_served``: one that delivers to who gets the next of its lifecycle facts. ``runtime_backend``:
    the key of the provider of the latest sandbox that it asked for; None: it has run on hosts alone. ``runner``: who
    works on it there now.

    ``performance`` is what the terminal says of how the run went, where its launch asked for that;
    ``performance_unavailable`` says what is missing of it: ``invalid_usage`` (what its runner measured cannot be) or
    ``invalid_performance`` (what is stored cannot be read).
    """

    accepted_at: datetime
    surface: str | None
    trigger: str | None
    scope: str | None
    unique_key: str | None
    idempotency_key: str | None
    concurrency_key: str | None
    array_input: bool
    receiver: str
    terminal_receiver: str | None
    lane_failure: str | None
    log_lane_blocked: str | None
    served: bool
    lane_served: bool
    terminal: Mapping[str, Any] | None
    runtime_backend: str | None = None
    runner: RunnerStatus | None = None
    performance: Performance | None = None
    performance_unavailable: str | None = None


@attrs.frozen(slots=True)
class RunStatus:
    """What is now: one run's row. ``schema`` is where it was read, ``updated_at`` when something last happened.

    ``details`` are of the full form only.

    ``facts_last`` and ``facts_delivered`` are the lifecycle lane's last appended and last acknowledged
    sequence numbers; they are equal when the ledger has everything. ``waits`` is all that a parked run stands at;
    ``wait_kind``, ``wait_key`` and ``wait_until`` are of the one that wakes it first.

    ``log_store`` is ``external`` where a ledger outside of this schema gets what the run logs, else None.
    """

    run_id: str
    play: str
    status: str
    org_id: str | None
    priority: int
    labels: Mapping[str, str] | None
    release_id: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    due_at: datetime | None
    attempt: int
    failures: int
    crashes: int
    wait_kind: str | None
    wait_key: str | None
    wait_until: datetime | None
    host: str | None
    lease_expires_at: datetime | None
    facts_last: int
    facts_delivered: int
    lane_blocked: str | None
    parent_id: str | None = None
    root_id: str | None = None
    waits: tuple[WaitRecord, ...] = ()
    environment: str | None = None
    updated_at: datetime | None = None
    schema: str = ""
    log_store: str | None = None
    details: RunDetails | None = None

    @property
    def terminal(self) -> bool:
        """Whether the run has ended."""
        return self.status in TERMINAL_STATUSES


@attrs.frozen(slots=True)
class Event:
    """Something that was sent to a run. ``wait_key`` is the wait that took it; None: it is kept for one to come."""

    event_id: str
    name: str
    payload: Any
    created_at: datetime
    wait_key: str | None


@attrs.frozen(slots=True)
class EventOutcome:
    """What became of an event.

    ``accepted``: the run has it. ``status``: ``delivered`` (a wait has taken it, or stands there for it), ``kept`` (for
    a wait that is still to come), ``duplicate`` (it was sent before with this id, and counts once) or ``ended`` (the
    run has).
    """

    accepted: bool
    status: str
    event_id: str


@attrs.frozen(slots=True)
class Approval:
    """What somebody decided: ``approved``, ``by`` whom and with which ``comment`` (as they said, if they did).

    ``payload`` is all that they sent.
    """

    approved: bool
    by: str | None
    comment: str | None
    payload: Mapping[str, Any]


@attrs.frozen(slots=True)
class FailOutcome:
    """What became of a request to fail a run that waits.

    ``outcome``: ``failed`` (this request ended the run), ``fence_lost`` (it no longer waits as it did when it was
    looked at, or is about to be cancelled) or ``not_applicable`` (it does not wait). ``status`` is what stands now.
    """

    won: bool
    outcome: str
    status: str


@attrs.frozen(slots=True)
class CancelOutcome:
    """Who won a cancellation.

    ``won`` is True when this request ended the run (also when it is asked again with the same request
    id). ``status`` is what stands now: a terminal status, or ``pending`` when the request is recorded
    and takes effect as soon as the run's row is free.
    """

    won: bool
    status: str


@attrs.frozen(slots=True)
class LaneStatus:
    """A lane that has facts its receiver does not have yet.

    ``first`` is the next fact to deliver, ``through`` the last of the prefix that is or was out (None: none is),
    ``last`` the lane's last; ``oldest_at`` and ``age_s`` belong to ``first``. ``attempts`` counts deliveries of the
    prefix, ``generation`` the skips before it. ``reason`` says why a blocked lane is; one that is not comes again in
    ``due_in_s``, or is ``leased``: being delivered. Its ``reason`` says why the latest delivery failed. ``rank`` is how
    urgent ``first`` is: 0 a new run's first fact, 1 an end, 2 a wait that people can see, 3 progress and logs.
    """

    run_id: str
    lane: Lane
    receiver: str
    rank: int
    blocked: bool
    reason: str | None
    attempts: int
    generation: int
    first: int
    through: int | None
    last: int
    oldest_at: datetime | None
    age_s: float | None
    due_in_s: float | None
    leased: bool


@attrs.frozen(slots=True)
class JournalEntry:
    """What an operator did to a lane: ``verb`` is ``retry`` or ``skip``, of the facts ``first`` to ``through``."""

    id: int
    at: datetime
    run_id: str
    lane: Lane
    verb: str
    first: int
    through: int
    because: str | None
    by: str | None
