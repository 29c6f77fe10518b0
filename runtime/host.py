"""The composition root: one host, put together from its actors.

Owns which actors there are, what they share, in which order they start (and, reversed, stop) and with which budgets.
It is the only place that knows all actors; it never acts itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import attrs

from actors.admission import Admission, Admit
from actors.attempts import Attempt, Attempts
from actors.claim import Claim
from actors.control import CancelRequest, Control
from actors.core import Actor, ChildSpec, Mailbox, Reply, Supervisor
from actors.delivery import Turn
from actors.executors import Executors
from actors.facts import Facts
from actors.hints import Hints
from actors.lanes import LaneActor
from actors.leases import Leases
from actors.listener import Listener
from actors.outbox import InDatabaseOutbox, Outbox
from actors.settle import Settle
from actors.timers import Timers
from actors.watch import Query, Waiters, Watch
from actors.watchdog import Watchdog
from runtime.codec import JsonCodec
from runtime.config import RuntimeConfig
from runtime.deliver import Deliveries
from runtime.executor import Executor, unstorable
from runtime.ledger import Ledger, takes_batches
from runtime.metrics import Metrics
from runtime.plays import Play
from runtime.postgres_ledger import PostgresLedger
from runtime.submit import Submissions
from runtime.view import Reports, View
from sql import admission, deployment, lanes, status
from sql.claim import Buckets
from sql.connection import SessionOptions, open_session
from sql.errors import RunlaneError
from sql.settle import Settled, Settlement
from sql.types import TERMINAL_STATUSES

log = logging.getLogger("runlane.host")

# Runs of one delivery turn: many where one call takes them all, few where each is a call of its own.
_TURN_IN_DATABASE = 400
_TURN_BATCHED = 200
_TURN_SINGLE = 8
_PREFIX_IN_DATABASE = 100
_RECEIVERS = (lanes.OWN_LEDGER,)
_BLOCKED_AFTER_S = 2.0
# What a stop gives an actor that has only a statement to finish.
_SHORT_S = 2.0


@attrs.define(eq=False)
class Host:
    """A composed host: what ``Runtime`` works with."""

    identity: Mapping[str, Any]
    config: RuntimeConfig
    plays: Mapping[str, Play]
    attempts: Attempts
    hints: Hints
    waiters: Waiters
    admissions: Mailbox[Admission]
    cancellations: Mailbox[CancelRequest]
    queries: Mailbox[Query]
    submissions: Submissions
    executors: Executors
    supervisor: Supervisor
    view: View


async def compose(
    config: RuntimeConfig, plays: Mapping[str, Play], ledger: Ledger | None, codec: JsonCodec
) -> Host:
    """Make sure of the schema, register this host, and put its actors together. Starts nothing."""
    assert config.dsn is not None
    options = session_options(config)
    owner = secrets.randbits(62) + 1
    identity = _identity(config, owner, plays)
    buckets = await _register(options, config, plays, identity)

    ears = (
        options if config.listen_dsn is None else attrs.evolve(options, dsn=config.listen_dsn, pooled=False)
    )
    notify = config.notify and not ears.pooled
    hints = Hints()
    attempts = Attempts(config.slots, config.lease_s, freed=hints.freed, added=hints.added)
    waiters = Waiters()
    metrics = Metrics()
    reports = Reports(metrics)

    admissions: Mailbox[Admission] = Mailbox("admission", 2_000, abandon=_abandon)
    endings: Mailbox[Settlement] = Mailbox("settle", 10 * config.slots + 1_000)
    sayings: Mailbox[Attempt] = Mailbox("facts", 10 * config.slots + 1_000)
    cancellations: Mailbox[CancelRequest] = Mailbox("control", 2_000, wake=hints.control, abandon=_abandon)
    queries: Mailbox[Query] = Mailbox("watch", 2_000, wake=hints.wake_watch, abandon=_abandon)

    facts_actor = Facts(options, sayings, attempts, hints, flush_s=config.flush_ms / 1000)
    execute = Executor(plays, codec, config, say=_Say(sayings), flush=facts_actor.hurry.set)
    executors = Executors(attempts, execute, endings, on_start=reports.claimed)
    listener = Listener(
        ears,
        hints,
        host=owner,
        buckets=[bucket for by_priority in buckets.values() for bucket in by_priority.values()],
        receivers=_RECEIVERS,
        backstop_s=config.backstop_s,
        notify=notify,
    )
    watchdog = Watchdog(
        hints,
        blocked_after_s=_BLOCKED_AFTER_S,
        lease_s=config.lease_s,
        backstop_s=config.backstop_s,
        reachable_at=lambda: listener.reachable_at,
    )
    claim = Claim(
        options,
        _claimable(buckets),
        attempts,
        hints,
        executors.start,
        owner=owner,
        lease_s=config.lease_s,
    )

    def on_settled(item: Settlement, answer: Settled) -> None:
        reports.settled(item, answer)
        if answer.answer == "done" and item.outcome in TERMINAL_STATUSES and waiters.waited_for(item.run_id):
            payload = codec.decode(item.payload)
            waiters.tell(status.Terminal(item.run_id, item.outcome, payload))

    children = [
        ChildSpec(name="watchdog", actor=watchdog, stop_budget_s=_SHORT_S),
        ChildSpec(name="listener", actor=listener, stop=hints.to_send.set, stop_budget_s=_SHORT_S),
        ChildSpec(
            name="watch",
            actor=Watch(options, queries, waiters, ended=hints.terminals),
            mailboxes=[queries],
            stop_budget_s=_SHORT_S,
        ),
    ]
    if plays:
        children.append(
            ChildSpec(
                name="leases",
                actor=Leases(
                    options,
                    attempts,
                    hints,
                    endings,
                    owner=owner,
                    lease_s=config.lease_s,
                    renew_every_s=config.renew_every_s,
                    on_lost=metrics.leases_lost,
                ),
                stop=hints.wake_leases.set,
                stop_budget_s=_SHORT_S,
            )
        )
        children.append(
            ChildSpec(
                name="timers",
                actor=Timers(options, hints, crash_cap=config.crash_cap),
                stop=hints.timers.set,
                stop_budget_s=_SHORT_S,
            )
        )
    if plays or ledger is not None:
        children += _delivery(config, options, hints, ledger or PostgresLedger(), reports)
    children.append(
        ChildSpec(
            name="control",
            actor=Control(options, cancellations, attempts, hints, owner=owner),
            mailboxes=[cancellations],
            stop_budget_s=_SHORT_S,
        )
    )
    if plays:
        children += [
            ChildSpec(
                name="facts", actor=facts_actor, mailboxes=[sayings], stop_budget_s=config.release_budget_s
            ),
            ChildSpec(
                name="settle",
                actor=Settle(options, endings, attempts, hints, on_settled=on_settled, unstorable=unstorable),
                mailboxes=[endings],
                stop_budget_s=config.release_budget_s,
            ),
            ChildSpec(
                name="executors",
                actor=executors,
                stop=_nothing,
                stop_budget_s=config.grace_s,
                cancel_budget_s=config.release_budget_s,
            ),
            ChildSpec(name="claim", actor=claim, stop=hints.wake_claim.set, stop_budget_s=_SHORT_S),
        ]
    children.append(
        ChildSpec(
            name="admission",
            actor=Admit(
                options,
                admissions,
                attempts,
                hints,
                executors.start,
                owner=owner,
                lease_s=config.lease_s,
                release_id=config.release_id,
                environment=config.environment,
                hosted=plays.__contains__,
                caught_up=lambda: bool(plays) and claim.caught_up,
            ),
            mailboxes=[admissions],
            stop_budget_s=_SHORT_S,
        )
    )
    supervisor = Supervisor(children, stop_budget_s=config.shutdown_budget_s)

    async def count() -> status.Backlog:
        counted: status.Backlog = await ask(queries, status.backlog, config.operation_timeout_s)
        return counted

    async def buckets_of(play: str) -> Mapping[int, int] | None:
        if play in buckets:
            return buckets[play]
        found, registered = await ask(
            queries,
            lambda session: admission.play_buckets(
                session, [play], release_id=config.release_id, environment=config.environment
            ),
            config.operation_timeout_s,
        )
        return {priority: bucket for (_, priority), bucket in found.items()} if play in registered else None

    return Host(
        identity=identity,
        config=config,
        plays=plays,
        attempts=attempts,
        hints=hints,
        waiters=waiters,
        admissions=admissions,
        cancellations=cancellations,
        queries=queries,
        submissions=Submissions(config, codec, plays, buckets_of),
        executors=executors,
        supervisor=supervisor,
        view=View(identity, metrics, reports, attempts, supervisor, listener, watchdog, count),
    )


def session_options(config: RuntimeConfig) -> SessionOptions:
    """How the actors of this configuration reach the database."""
    assert config.dsn is not None
    return SessionOptions(
        dsn=config.dsn,
        schema=config.schema,
        connect_timeout_s=config.connect_timeout_s,
        statement_timeout_s=config.statement_timeout_s,
        pooled=config.pooled,
    )


async def ask(queries: Mailbox[Query], read: Any, timeout_s: float) -> Any:
    """The answer of ``read(session)`` on the connection that reads share."""
    query = Query(read)
    await queries.send(query)
    return await query.reply.wait(timeout_s)


# --- parts -----------------------------------------------------------------------------------------------


def _identity(config: RuntimeConfig, owner: int, plays: Mapping[str, Play]) -> dict[str, Any]:
    return {
        "host": str(owner),
        "name": config.host_name or socket.gethostname(),
        "pid": os.getpid(),
        "version": metadata.version("runlane"),
        "schema": config.schema,
        "plays": sorted(plays),
    }


async def _register(
    options: SessionOptions, config: RuntimeConfig, plays: Mapping[str, Play], identity: Mapping[str, Any]
) -> dict[str, dict[int, int]]:
    """Bring the schema up to date and make the host known. The buckets of its plays, by priority."""
    async with open_session(options, "deployment") as session:
        await deployment.ensure(session)
        if not plays:
            return {}
        await admission.register_host(
            session,
            host=int(identity["host"]),
            name=identity["name"],
            pid=identity["pid"],
            version=identity["version"],
            crash_caps={play.name: play.crash_cap or config.crash_cap for play in plays.values()},
        )
        found, _ = await admission.play_buckets(
            session, list(plays), release_id=config.release_id, environment=config.environment
        )
    buckets: dict[str, dict[int, int]] = {}
    for (play, priority), bucket in found.items():
        buckets.setdefault(play, {})[priority] = bucket
    return buckets


def _claimable(buckets: Mapping[str, Mapping[int, int]]) -> Buckets:
    pairs = [
        (bucket, priority) for by_priority in buckets.values() for priority, bucket in by_priority.items()
    ]
    return Buckets(tuple(bucket for bucket, _ in pairs), tuple(priority for _, priority in pairs))


def _delivery(
    config: RuntimeConfig, options: SessionOptions, hints: Hints, ledger: Ledger, reports: Reports
) -> Sequence[ChildSpec]:
    """The outbox and, for a ledger outside of the database, its lane actors."""
    children: list[ChildSpec] = []
    if isinstance(ledger, PostgresLedger):
        if ledger.in_database:
            outbox: Actor = InDatabaseOutbox(
                options,
                hints,
                receivers=_RECEIVERS,
                limit=_TURN_IN_DATABASE,
                prefix=_PREFIX_IN_DATABASE,
                observe=reports.delivered,
            )
            return [
                ChildSpec(name="outbox", actor=outbox, stop=hints.wake_outbox.set, stop_budget_s=_SHORT_S)
            ]
        ledger.use(options)
        children.append(
            ChildSpec(name="ledger", actor=ledger, mailboxes=[ledger.mailbox], stop_budget_s=_SHORT_S)
        )
    carriers: list[Mailbox[Turn]] = []
    deliver = Deliveries(ledger, timeout_s=config.delivery_timeout_s)
    for number in range(1, config.lane_actors + 1):
        carrier: Mailbox[Turn] = Mailbox(f"lane {number}", 1)
        carriers.append(carrier)
        lane_actor = LaneActor(
            options,
            carrier,
            hints.wake_outbox,
            deliver,
            prefix=config.delivery_prefix,
            lease_s=config.lane_lease_s,
            delivery_timeout_s=config.delivery_timeout_s,
            release_budget_s=config.release_budget_s,
            observe=reports.delivered,
        )
        children.append(
            ChildSpec(
                name=f"lane-{number}",
                actor=lane_actor,
                mailboxes=[carrier],
                stop_budget_s=_SHORT_S,
                cancel_budget_s=config.release_budget_s,
            )
        )
    outbox = Outbox(
        options,
        hints,
        carriers,
        receivers=_RECEIVERS,
        limit=_TURN_BATCHED if takes_batches(ledger) else _TURN_SINGLE,
        prefix=config.delivery_prefix,
        lease_s=config.lane_lease_s,
    )
    children.append(
        ChildSpec(name="outbox", actor=outbox, stop=hints.wake_outbox.set, stop_budget_s=_SHORT_S)
    )
    return children


class _Say:
    """Hands an attempt with something to say to the facts actor, once until it was flushed."""

    def __init__(self, mailbox: Mailbox[Attempt]) -> None:
        self._mailbox = mailbox

    def __call__(self, attempt: Attempt) -> None:
        if not attempt.queued:
            attempt.queued = True
            self._mailbox.send_nowait(attempt)


def _abandon(item: Admission | CancelRequest | Query, error: RunlaneError) -> None:
    reply: Reply[Any] = item.reply
    reply.set_error(error)


def _nothing() -> None:
    """Executors watch ``life.stopping``."""
