"""The composition root: one host, put together from its actors.

Owns which actors there are, what they share, in which order they start (and, reversed, stop) and with which budgets.
It is the only place that knows all actors; it never acts itself.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, TypeVar

import attrs
import trio

from actors.admission import Admission, Admit
from actors.array_input import ArrayInput, IntentRequest
from actors.attempts import Attempt, Attempts
from actors.circuits import Circuits, Enter, Outcome
from actors.claim import Claim
from actors.control import Control, Request
from actors.core import Actor, ChildSpec, Mailbox, Reply, Supervisor, Together
from actors.delivery import Firsts, GivenUp, Observe
from actors.executors import Execute, Executors
from actors.facts import Facts
from actors.hints import Hints
from actors.lanes import LaneActor
from actors.leases import Leases
from actors.listener import Listener
from actors.maintenance import Keep, Maintenance
from actors.outbox import Carrier, InDatabaseOutbox, Outbox
from actors.rates import Acquire, Rates, Release
from actors.receipts import Message as StepMessage
from actors.receipts import Receipts
from actors.schedules import Adoption, Change, Schedules
from actors.settle import Settle
from actors.timers import Timers
from actors.waits import LaunchRequest, Stand, Waits
from actors.watch import Query, Waiters, Watch
from actors.watchdog import Watchdog
from runtime.codec import JsonCodec
from runtime.config import RuntimeConfig
from runtime.context import Doors
from runtime.deliver import Deliveries
from runtime.detached import LaunchingExecutor
from runtime.detached_host import DetachedWork, providers_of
from runtime.dispatch import Gatekeeper
from runtime.executor import Executor, unstorable
from runtime.http_ledger import HttpLedger
from runtime.ledger import HostedLedger, Ledger
from runtime.metrics import Metrics
from runtime.plays import Play
from runtime.postgres_ledger import PostgresLedger
from runtime.routes import Route, Routes
from runtime.sandboxes import SandboxProvider
from runtime.submit import Submissions, Submit, plays_from
from runtime.view import Reports, View
from sql import admission, circuits, claim, deployment, proof, status, waits
from sql.admission import Submission
from sql.array_input import Intent
from sql.children import Launch
from sql.claim import Buckets
from sql.connection import Session, SessionOptions, open_session
from sql.errors import OutcomeUnknown, RunlaneError
from sql.lanes import OWN_LEDGER
from sql.proof import Claimed
from sql.runners import Pushed
from sql.settle import Settled, Settlement
from sql.types import TERMINAL_STATUSES
from sql.waits import Wait

log = logging.getLogger("runlane.host")

T = TypeVar("T")

# Runs of one delivery turn inside the database.
_TURN_IN_DATABASE = 400
_PREFIX_IN_DATABASE = 100
# A turn goes on with its lanes' next prefixes for so long: what then still comes lets others have their turn. Shorter
# where urgent lanes wait for this very carrier.
_CONTINUE_S = 1.0
_CONTINUE_EXPRESS_S = 0.05
# Turns of a carrier that wait: one, and first facts from admissions that did not see it.
_MOST_TURNS = 8
_BLOCKED_AFTER_S = 2.0
_MOST_WAITING = 2_000
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
    requests: Mailbox[Request]
    queries: Mailbox[Query]
    changes: Mailbox[Change]
    submissions: Submissions
    executors: Executors
    detached: DetachedWork | None
    supervisor: Supervisor
    view: View
    gatekeepers: Sequence[Gatekeeper]

    async def prove(self, claims: Sequence[Claimed]) -> Sequence[bool]:
        """Whether somebody holds these lanes now."""
        proven: Sequence[bool] = await ask(
            self.queries, lambda session: proof.prove(session, claims), self.config.statement_timeout_s
        )
        return proven


async def compose(
    config: RuntimeConfig,
    plays: Mapping[str, Play],
    ledger: Ledger | None,
    codec: JsonCodec,
    sandboxes: Mapping[str, SandboxProvider] | None = None,
    *,
    receivers: Mapping[str, Ledger] | None = None,
    on_delivery: Observe | None = None,
    deploy: bool = True,
) -> Host:
    """Make sure of the schema, register this host, and put its actors together. Starts nothing.

    ``receivers`` are ledgers beside ``ledger``, by name. ``on_delivery`` is told of acknowledged facts.
    ``deploy`` brings the schema up to date; without it one that is not raises SchemaNotReady.
    """
    own = ledger or (_usual_ledger(config) if plays else None)
    routes = Routes(own, receivers or {})
    owner = secrets.randbits(62) + 1
    identity = _identity(config, owner, plays)
    options = session_options(config)
    providers = providers_of(plays, sandboxes, config)
    buckets, secret = await _register(options, config, plays, identity, deploy)
    return _Composition(
        config, plays, codec, owner, options, buckets, routes, on_delivery, providers, secret
    ).host(identity)


def _usual_ledger(config: RuntimeConfig) -> Ledger:
    """The ledger of a host that was given none."""
    if config.ledger_url is None:
        return PostgresLedger()
    return HttpLedger(
        config.ledger_url,
        secret=config.ledger_secret,
        internal_token=config.ledger_internal_token,
        timeout_s=0.9 * config.delivery_timeout_s,
    )


class _Composition:
    """What the actors of one host share, and each group of them."""

    def __init__(
        self,
        config: RuntimeConfig,
        plays: Mapping[str, Play],
        codec: JsonCodec,
        owner: int,
        options: SessionOptions,
        buckets: Mapping[str, Mapping[int, int]],
        routes: Routes,
        on_delivery: Observe | None,
        providers: Mapping[str, SandboxProvider],
        secret: str,
    ) -> None:
        self.config = config
        self.plays = plays
        self.codec = codec
        self.owner = owner
        self.options = options
        self.buckets = buckets
        self.routes = routes
        self.firsts: dict[str, Firsts] = {}
        self.hints = hints = Hints()
        self.attempts = Attempts(config.slots, config.lease_s, freed=hints.freed, added=hints.added)
        self.waiters = Waiters()
        self.metrics = Metrics()
        self.reports = Reports(self.metrics, on_delivery)
        # Endings, sayings, stands and steps are bounded by the attempts that have them, and none may be refused.
        self.endings: Mailbox[Settlement] = Mailbox("settle", sys.maxsize)
        self.sayings: Mailbox[Attempt] = Mailbox("facts", sys.maxsize)
        self.slots: Mailbox[Acquire | Release] = Mailbox(
            "rates", sys.maxsize, wake=hints.wake_rates, abandon=_abandon_slot
        )
        self.receipts: Mailbox[StepMessage] = Mailbox("receipts", sys.maxsize)
        self.admissions: Mailbox[Admission] = Mailbox("admission", _MOST_WAITING, abandon=_abandon)
        self.requests: Mailbox[Request] = Mailbox(
            "control", _MOST_WAITING, wake=hints.wake_control, abandon=_abandon
        )
        self.intents: Mailbox[IntentRequest] = Mailbox("array_input", sys.maxsize, abandon=_abandon)
        self._look_up = plays_from(lambda read: ask(self.queries, read, config.operation_timeout_s), config)
        self.queries: Mailbox[Query] = Mailbox(
            "watch", _MOST_WAITING, wake=hints.wake_watch, abandon=_abandon
        )
        self.changes: Mailbox[Change] = Mailbox(
            "schedules", _MOST_WAITING, wake=hints.wake_schedules, abandon=_abandon
        )
        self.stands: Mailbox[Stand] = Mailbox("waits", sys.maxsize, wake=hints.wake_waits)
        self.circuits = Circuits(options, Mailbox("circuits", sys.maxsize, abandon=_abandon_entry))
        self.launches: Mailbox[LaunchRequest] = Mailbox(
            "children", sys.maxsize, wake=hints.wake_waits, abandon=_abandon
        )
        self.submissions = Submissions(config, codec, plays, self._find_play, self.routes)
        self.facts = Facts(options, self.sayings, self.attempts, hints, flush_s=config.flush_ms / 1000)
        doors = Doors(
            say=_Say(self.sayings),
            register=lambda attempt: self._register_array_input(attempt.claimed),
            rates=self.slots,
            hold=self._hold,
            payload=self._payload,
            receipts=self.receipts,
            circuits=self.circuits,
            prepare=self.submissions.prepare,
            launch=self._launch,
        )
        execute = Executor(plays, codec, config, doors=doors, flush=self.facts.hurry.set)
        self.detached = self._detached(providers, secret) if providers else None
        run: Execute = execute
        if self.detached is not None:
            run = LaunchingExecutor(plays, execute, self.detached.launcher)
        self.executors = Executors(
            self.attempts,
            run,
            self.endings,
            cleanup_s=config.release_budget_s / 2,
            on_start=self.reports.claimed,
        )
        self.claim = Claim(
            options,
            Buckets.of(
                {
                    (play, priority): bucket
                    for play, by_priority in buckets.items()
                    for priority, bucket in by_priority.items()
                }
            ),
            self.attempts,
            hints,
            self.executors.start,
            owner=owner,
            lease_s=config.lease_s,
        )
        self.listener = self._listener()
        self.watchdog = Watchdog(
            hints,
            blocked_after_s=_BLOCKED_AFTER_S,
            lease_s=config.lease_s,
            backstop_s=config.backstop_s,
            reachable_at=lambda: self.listener.reachable_at,
            guard=self.attempts.guard,
        )

    def host(self, identity: Mapping[str, Any]) -> Host:
        """The host. Actors start in this order and stop in the reverse: new work first, leases late, ears last."""
        children = [
            _child("watchdog", self.watchdog, stop=_nothing),
            _child("listener", self.listener, stop=self.hints.to_send.set),
        ]
        if self.routes.receivers:
            children.append(_child("watch", self._watch(), self.queries))
            if self.plays:
                children += self._custody()
            for route in self.routes:
                children += self._delivery(route)
            # Both are rare: one connection is enough for them.
            desk = Together(self.options, [self._control(), ArrayInput(self.options, self.intents)])
            children.append(_child("control", desk, self.requests, self.intents))
            if self.detached is not None:
                children += [
                    _child(name, actor, *mail, stop=stop)
                    for name, actor, stop, mail in self.detached.actors()
                ]
            if self.plays:
                children += self._work()
                children.append(_child("maintenance", self._maintenance(), stop=self.hints.chores.set))
            children.append(_child("schedules", self._schedules(), self.changes))
            children.append(_child("admission", self._admission(), self.admissions))
        else:
            desk = Together(
                self.options, [self._watch(), self._control(), self._schedules(), self._admission()]
            )
            mail = (self.admissions, self.requests, self.queries, self.changes)
            children.append(_child("client", desk, *mail))
        supervisor = Supervisor(children, stop_budget_s=self.config.shutdown_budget_s)
        view = View(
            identity,
            self.metrics,
            self.reports,
            self.attempts,
            supervisor,
            self.listener,
            self.watchdog,
            self._count,
        )
        return Host(
            identity=identity,
            config=self.config,
            plays=self.plays,
            attempts=self.attempts,
            hints=self.hints,
            waiters=self.waiters,
            admissions=self.admissions,
            requests=self.requests,
            queries=self.queries,
            changes=self.changes,
            submissions=self.submissions,
            executors=self.executors,
            detached=self.detached,
            supervisor=supervisor,
            view=view,
            gatekeepers=[
                route.ledger.gatekeeper for route in self.routes if isinstance(route.ledger, HttpLedger)
            ],
        )

    # --- groups of actors, in start order --------------------------------------------------------------

    def _watch(self) -> Watch:
        return Watch(self.options, self.queries, self.waiters, ended=self.hints.terminals)

    def _custody(self) -> list[ChildSpec]:
        config, hints = self.config, self.hints
        leases = Leases(
            self.options,
            self.attempts,
            hints,
            self.endings,
            owner=self.owner,
            lease_s=config.lease_s,
            renew_every_s=config.renew_every_s,
            on_lost=self.metrics.leases_lost,
        )
        timers = Timers(self.options, hints, crash_cap=config.crash_cap)
        return [
            _child("leases", leases, stop=hints.wake_leases.set),
            _child("timers", timers, stop=hints.timers.set),
        ]

    def _delivery(self, route: Route) -> list[ChildSpec]:
        """The outbox of one ledger and, if that is outside of the database, its lane actors."""
        config, ledger, own = self.config, route.ledger, self.hints.outbox()
        suffix = f"-{route.name}" if route.name else ""
        children: list[ChildSpec] = []
        if isinstance(ledger, PostgresLedger) and ledger.in_database:
            turns = InDatabaseOutbox(
                self.options,
                own,
                receivers=route.receivers,
                limit=_TURN_IN_DATABASE,
                prefix=_PREFIX_IN_DATABASE,
                observe=self.reports.delivered,
            )
            return [_child(f"outbox{suffix}", turns, stop=own.wake.set)]
        if isinstance(ledger, HostedLedger):
            ledger.use(self.options)
            children.append(_child(f"ledger{suffix}", ledger, *ledger.mailboxes))
        deliver = Deliveries(ledger, timeout_s=config.delivery_timeout_s, facts=config.delivery_prefix)
        given_up = GivenUp()
        several = config.lane_actors > 1
        carriers = [
            Carrier(Mailbox(f"lane-{number}{suffix}", _MOST_TURNS), express=several and number == 1)
            for number in range(1, config.lane_actors + 1)
        ]
        for carrier in carriers:
            lane_actor = LaneActor(
                self.options,
                carrier.mailbox,
                own,
                self.hints,
                given_up,
                deliver,
                room=deliver.room,
                lease_s=config.lane_lease_s,
                delivery_timeout_s=config.delivery_timeout_s,
                continue_s=_CONTINUE_EXPRESS_S if carrier.express or not several else _CONTINUE_S,
                release_budget_s=config.release_budget_s,
                observe=self.reports.delivered,
            )
            children.append(
                _child(
                    carrier.mailbox.name,
                    lane_actor,
                    carrier.mailbox,
                    cancel_budget_s=config.release_budget_s,
                )
            )
        outbox = Outbox(
            self.options,
            own,
            given_up,
            carriers,
            receivers=route.receivers,
            room=deliver.room,
            lease_s=config.lane_lease_s,
        )
        children.append(_child(f"outbox{suffix}", outbox, stop=own.wake.set))
        if config.inline_delivery_ms:
            first = Firsts(carriers[0].mailbox, deliver.room, config.inline_delivery_ms / 1000)
            self.firsts.update(dict.fromkeys(route.receivers, first))
        return children

    def _control(self) -> Control:
        return Control(self.options, self.requests, self.attempts, self.hints, owner=self.owner)

    def _work(self) -> list[ChildSpec]:
        config = self.config
        settle = Settle(
            self.options,
            self.endings,
            self.attempts,
            self.hints,
            on_settled=self._on_settled,
            unstorable=unstorable,
        )
        waiting = Waits(
            self.options,
            self.stands,
            self.launches,
            self.attempts,
            self.hints,
            release_id=config.release_id,
            environment=config.environment,
            backstop_s=config.backstop_s,
        )
        receipts = Receipts(self.options, self.receipts, self.attempts)
        return [
            _child("waits", waiting, self.stands, self.launches),
            _child("facts", self.facts, self.sayings, stop_budget_s=config.release_budget_s),
            _child("settle", settle, self.endings, stop_budget_s=config.release_budget_s),
            _child("rates", Rates(self.options, self.slots, self.hints), self.slots),
            _child("receipts", receipts, self.receipts, stop_budget_s=config.release_budget_s),
            _child("circuits", self.circuits, self.circuits.mailbox),
            _child(
                "executors",
                self.executors,
                stop=_nothing,
                stop_budget_s=config.grace_s,
                cancel_budget_s=config.release_budget_s,
            ),
            _child("claim", self.claim, stop=self.hints.wake_claim.set),
        ]

    def _admission(self) -> Admit:
        return Admit(
            self.options,
            self.admissions,
            self.attempts,
            self.hints,
            self.executors.start,
            owner=self.owner,
            lease_s=self.config.lease_s,
            release_id=self.config.release_id,
            environment=self.config.environment,
            hosted=self.plays.__contains__,
            caught_up=lambda: self.claim.caught_up,
            firsts=self.firsts,
        )

    def _detached(self, providers: Mapping[str, SandboxProvider], secret: str) -> DetachedWork:
        return DetachedWork(
            self.options,
            self.config,
            self.hints,
            self.plays,
            providers,
            secret,
            owner=self.owner,
            ask=lambda read: ask(self.queries, read, self.config.operation_timeout_s),
            register=self._register_array_input,
            payload=self._payload,
            rates=self.slots,
            receipts=self.receipts,
            circuits=self.circuits.mailbox,
            start_run=self._start_child,
            on_settled=self._on_pushed,
            on_orphans=self.metrics.orphans,
        )

    def _schedules(self) -> Schedules:
        config = self.config
        adoption = Adoption(sorted(self.plays), config.release_id, config.environment)
        return Schedules(
            self.options,
            self.changes,
            self.hints,
            adoption=adoption if self.plays else None,
            on_fired=self.metrics.fired,
        )

    def _maintenance(self) -> Maintenance:
        config = self.config
        keep = Keep(runs_s=config.retention_s, logs_s=config.log_retention_s, ledger=config.keep_ledger)
        return Maintenance(self.options, self.hints, keep, on_done=self.metrics.maintained)

    def _listener(self) -> Listener:
        config = self.config
        ears = self.options
        if config.listen_dsn is not None:
            ears = attrs.evolve(ears, dsn=config.listen_dsn, pooled=False)
        return Listener(
            ears,
            self.hints,
            host=self.owner,
            buckets=[bucket for by_priority in self.buckets.values() for bucket in by_priority.values()],
            receivers=self.routes.receivers or (OWN_LEDGER,),
            providers=[] if self.detached is None else self.detached.keys,
            backstop_s=config.backstop_s,
            notify=config.notify and not ears.pooled,
        )

    # --- what they call back ---------------------------------------------------------------------------

    def _on_settled(self, item: Settlement, answer: Settled) -> None:
        self.reports.settled(item, answer)
        ended = answer.answer == "done" and item.outcome in TERMINAL_STATUSES
        if ended and self.waiters.waited_for(item.run_id):
            payload = self.codec.decode(item.payload)
            self.waiters.tell(status.Terminal(item.run_id, item.outcome, payload))

    def _on_pushed(self, item: Settlement, answer: Pushed) -> None:
        if answer.answer == "settled" and answer.first:
            self._on_settled(item, Settled("done", None))

    async def _register_array_input(self, claimed: claim.Claimed) -> str:
        intent = Intent(claimed.run_id, claimed.org_id, claimed.attempt, claimed.token)
        request = IntentRequest(intent)
        await self.intents.send(request)
        return await request.reply.wait(self.config.operation_timeout_s)

    def _hold(self, attempt: Attempt, wait: Wait) -> Stand:
        stand = Stand(attempt, wait)
        self.stands.send_nowait(stand)
        return stand

    async def _launch(self, attempt: Attempt, key: str, submission: Submission) -> str:
        item = Launch(attempt.run_id, attempt.attempt, attempt.token, key, submission)
        request = LaunchRequest(attempt, item)
        self.launches.send_nowait(request)
        return (await request.reply.wait()).answer

    async def _start_child(self, claimed: claim.Claimed, key: str, item: Submit) -> str:
        """For an attempt that is detached: the database alone knows whether it lives."""
        elsewhere = Attempt(claimed, math.inf, trio.current_time())
        return await self._launch(elsewhere, key, await self.submissions.prepare(item))

    async def _payload(self, run_id: str, key: str) -> str | None:
        text: str | None = await ask(
            self.queries,
            lambda session: waits.read_payload(session, run_id, key),
            self.config.operation_timeout_s,
        )
        return text

    async def _count(self) -> tuple[status.Backlog, circuits.Shared]:
        async def read(session: Session) -> tuple[status.Backlog, circuits.Shared]:
            return await status.backlog(session), await circuits.count(session)

        counted: tuple[status.Backlog, circuits.Shared] = await ask(
            self.queries, read, self.config.operation_timeout_s
        )
        return counted

    async def _find_play(self, name: str) -> admission.Registered | None:
        play = self.plays.get(name)
        if play is not None:
            return admission.Registered(self.buckets[name], _per_key(play) is not None)
        return await self._look_up(name)


def _child(
    name: str,
    actor: Actor,
    *mailboxes: Mailbox[Any],
    stop: Callable[[], None] | None = None,
    stop_budget_s: float = _SHORT_S,
    cancel_budget_s: float = _SHORT_S,
) -> ChildSpec:
    return ChildSpec(
        name=name,
        actor=actor,
        stop=stop,
        mailboxes=mailboxes,
        stop_budget_s=stop_budget_s,
        cancel_budget_s=cancel_budget_s,
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
    query = Query(read, trio.current_time() + timeout_s)
    await send_by(query.deadline, queries, query)
    return await query.reply.wait(query.deadline - trio.current_time())


async def send_by(deadline: float, mailbox: Mailbox[T], *items: T) -> None:
    """Hand over, or raise ``OutcomeUnknown`` when the mailbox stays full until then: not everything was handed over."""
    with trio.move_on_at(deadline) as limit:
        for item in items:
            await mailbox.send(item)
    if limit.cancelled_caught:
        raise OutcomeUnknown(f"{mailbox.name}: overloaded, or the database is away: not handed over in time")


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
    options: SessionOptions,
    config: RuntimeConfig,
    plays: Mapping[str, Play],
    identity: Mapping[str, Any],
    deploy: bool,
) -> tuple[dict[str, dict[int, int]], str]:
    """Bring the schema up to date and make the host known.

    The buckets of its plays, by priority, and the secret that signs the tokens of runners in sandboxes.
    """
    async with open_session(options, "deployment") as session:
        if deploy:
            await deployment.ensure(session)
        else:
            await deployment.require(session)
        if not plays:
            return {}, ""
        await admission.register_host(
            session,
            host=int(identity["host"]),
            name=identity["name"],
            pid=identity["pid"],
            version=identity["version"],
            plays={
                play.name: admission.PlayRules(
                    play.crash_cap or config.crash_cap, play.max_running, _per_key(play)
                )
                for play in plays.values()
            },
        )
        found = await admission.play_buckets(
            session, list(plays), release_id=config.release_id, environment=config.environment
        )
        secret = ""
        if any(play.sandbox is not None for play in plays.values()):
            secret = config.gateway_secret or await deployment.shared_secret(session, "gateway_secret")
    buckets: dict[str, dict[int, int]] = {}
    for (play, priority), bucket in found.items():
        buckets.setdefault(play, {})[priority] = bucket
    return buckets, secret


def _per_key(play: Play) -> int | None:
    """How many of one key run at once, for everybody to see; None for a play that makes no keys and limits none."""
    return 1 if play.max_per_key is None and play.concurrency_key is not None else play.max_per_key


class _Say:
    """Hands an attempt with something to say to the facts actor, once until it was flushed."""

    def __init__(self, mailbox: Mailbox[Attempt]) -> None:
        self._mailbox = mailbox

    def __call__(self, attempt: Attempt) -> None:
        if not attempt.queued:
            attempt.queued = True
            self._mailbox.send_nowait(attempt)


def _abandon(
    item: Admission | Request | Change | IntentRequest | LaunchRequest | Query,
    error: RunlaneError,
) -> None:
    reply: Reply[Any] = item.reply
    reply.set_error(error)


def _abandon_entry(item: Enter | Outcome, error: RunlaneError) -> None:
    if isinstance(item, Enter):
        item.reply.set_error(error)


def _abandon_slot(item: Acquire | Release, error: RunlaneError) -> None:
    if isinstance(item, Acquire):
        item.reply.set_error(error)


def _nothing() -> None:
    """For an actor that watches ``life.stopping``."""
