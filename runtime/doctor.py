"""The doctor: what may be wrong with the database that runs live in, and what to do about it.

Owns the findings and their words. It looks once, in a few seconds, changes nothing, and never counts rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import attrs
import trio

from runtime.config import RuntimeConfig
from runtime.host import session_options
from sql import deployment, doctor, status
from sql.connection import Session, open_session
from sql.errors import HostTooOld, MissingRights, RunlaneError

OK, WARNING, PROBLEM = "ok", "warning", "problem"

_OLDEST_SERVER = 150_000
_HELD_S = 300.0
_APART_S = 5.0
_HEARD_WITHIN_S = 3.0
_HOST_CONNECTIONS = 20
_DEAD_ROWS = 100_000
_SHOWN_HOSTS = 10
_CHANNEL = "runlane_doctor"


@attrs.frozen(slots=True)
class Finding:
    """``state``: ``ok``, ``warning`` or ``problem``. ``says`` is what was found, ``advice`` what to do about it."""

    check: str
    state: str
    says: str
    advice: str | None = None


async def examine(config: RuntimeConfig) -> list[Finding]:
    """Everything that was found, in a fixed order. Raises what connecting raises."""
    assert config.dsn is not None
    async with open_session(session_options(config), "doctor") as session:
        before = time.time()
        server = await doctor.read_server(session)
        clock_off_s = server.clock - (before + time.time()) / 2
        found = [
            *_server(server, clock_off_s),
            _connections(server),
            _held(await doctor.read_holder(session), server),
            await _notifications(config),
        ]
        try:
            ready = await _schema(session)
            found.append(ready)
            if ready.state == OK:
                found += await _work(session)
        except MissingRights as error:
            found.append(
                Finding(
                    "rights", PROBLEM, f"{server.role}: {error}", "grant what Deploying in the README says"
                )
            )
        return found


def _server(server: doctor.Server, clock_off_s: float) -> Iterator[Finding]:
    about = f"PostgreSQL {server.version}, as {server.role}"
    if server.version_number < _OLDEST_SERVER:
        yield Finding("server", PROBLEM, about, "runlane needs PostgreSQL 15 or later")
    elif server.standby:
        yield Finding("server", PROBLEM, f"{about}: a standby", "give the address of the primary")
    else:
        yield Finding("server", OK, about)
    if not server.fsync or not server.full_page_writes:
        what = "fsync" if not server.fsync else "full_page_writes"
        yield Finding(
            "durability", PROBLEM, f"{what} is off: a crash may destroy everything", f"turn {what} on"
        )
    elif server.synchronous_commit == "off":
        yield Finding(
            "durability",
            WARNING,
            "synchronous_commit is off: a crash of the server forgets what it has just confirmed",
            f"ALTER ROLE {server.role} SET synchronous_commit = on",
        )
    else:
        yield Finding("durability", OK, f"synchronous_commit is {server.synchronous_commit}")
    if not server.autovacuum:
        yield Finding("autovacuum", PROBLEM, "it is off: every claim gets slower with time", "turn it on")
    if abs(clock_off_s) > _APART_S:
        yield Finding(
            "clock",
            WARNING,
            f"the server's is {abs(clock_off_s):.0f} s {'ahead' if clock_off_s > 0 else 'behind'}",
            "runs go by the server's alone, but tokens of runners and of receivers expire by both: set them right",
        )
    else:
        yield Finding("clock", OK, "the server's and ours agree")


def _connections(server: doctor.Server) -> Finding:
    free = server.most_connections - server.connections
    says = f"{server.connections} of {server.most_connections} in use, {server.our_connections} by runlane"
    if free < _HOST_CONNECTIONS:
        return Finding(
            "connections",
            WARNING,
            says,
            f"another host takes about {_HOST_CONNECTIONS}: raise max_connections, or put a pooler in front",
        )
    return Finding("connections", OK, says)


def _held(holder: doctor.Holder | None, server: doctor.Server) -> Finding:
    if holder is None or (holder.age_s is not None and holder.age_s < _HELD_S):
        if server.hidden_snapshots:
            return Finding(
                "snapshots",
                WARNING,
                f"held by {server.hidden_snapshots} sessions of other roles, for how long {server.role} may not see",
                f"GRANT pg_read_all_stats TO {server.role}, and look again",
            )
        return Finding("snapshots", OK, "nothing keeps dead rows for long")
    since = "" if holder.age_s is None else f", open for {holder.age_s:.0f} s"
    return Finding(
        "snapshots",
        WARNING,
        f"{holder.kind} {holder.what}{since}: dead rows stay, so claims get slower",
        {
            "session": "end that transaction, or set idle_in_transaction_session_timeout",
            "prepared transaction": "commit it or roll it back by its name",
        }.get(holder.kind, "drop it with pg_drop_replication_slot, unless somebody comes back for it"),
    )


async def _notifications(config: RuntimeConfig) -> Finding:
    """Whether what one session notifies another one hears, as hosts need it."""
    assert config.dsn is not None
    if not config.notify:
        return Finding("notifications", OK, f"not used: hosts look every {config.backstop_s:g} s")
    direct = attrs.evolve(
        session_options(config),
        dsn=config.listen_dsn or config.dsn,
        pooled=config.pooled and config.listen_dsn is None,
    )
    heard = trio.Event()
    try:
        async with (
            open_session(direct, "doctor-listen") as listening,
            open_session(session_options(config), "doctor-notify") as notifying,
        ):
            await listening.listen([_CHANNEL], lambda _: heard.set())
            await notifying.execute(f"NOTIFY {_CHANNEL}")
            with trio.move_on_after(_HEARD_WITHIN_S):
                await heard.wait()
    except RunlaneError as error:
        return Finding(
            "notifications", PROBLEM, f"no session can listen: {error}", "set listen_dsn to a direct address"
        )
    if heard.is_set():
        return Finding("notifications", OK, "heard")
    return Finding(
        "notifications",
        WARNING,
        f"not heard within {_HEARD_WITHIN_S:g} s: work waits for up to {config.backstop_s:g} s",
        "is a pooler in between? set pooled, and listen_dsn to a direct address",
    )


async def _schema(session: Session) -> Finding:
    schema = session.options.schema
    try:
        readiness = await deployment.check(session)
    except HostTooOld as error:
        return Finding("schema", PROBLEM, str(error), "install the newer version here")
    if not readiness.ready:
        return Finding("schema", PROBLEM, readiness.problem(schema), "run `runlane migrate`")
    return Finding("schema", OK, f"{schema} is whole")


async def _work(session: Session) -> list[Finding]:
    return [
        _hosts(await doctor.read_hosts(session)),
        *map(_unserved, await doctor.read_unserved(session)),
        *map(_undelivered, await doctor.read_undelivered(session)),
        _ledgers(await status.backlog(session)),
        *_sandboxes(await doctor.read_stuck_sandboxes(session)),
        *_dead_rows(await doctor.read_bloat(session)),
    ]


def _hosts(hosts: Mapping[str, str]) -> Finding:
    if not hosts:
        return Finding("hosts", WARNING, "none seen within a minute", "start one: `runlane serve --plays …`")
    shown = ", ".join(f"{name} ({version})" for name, version in list(hosts.items())[:_SHOWN_HOSTS])
    more = f" and {len(hosts) - _SHOWN_HOSTS} more" if len(hosts) > _SHOWN_HOSTS else ""
    return Finding("hosts", OK, f"{len(hosts)} seen within a minute: {shown}{more}")


def _unserved(runs: doctor.Unserved) -> Finding:
    parts = {"release": runs.release_id, "environment": runs.environment}
    of = " and ".join(f"{name} {value}" for name, value in parts.items() if value is not None)
    which = f"{runs.play} of {of}" if of else runs.play
    return Finding(
        "plays",
        PROBLEM,
        f"runs of {which} have been due for {runs.late_s:.0f} s and no host takes them",
        "host that play, of that release and environment" if of else "host that play",
    )


def _undelivered(receiver: str) -> Finding:
    ledger = receiver or "the hosts' own ledger"
    return Finding(
        "receivers",
        PROBLEM,
        f"facts wait for {ledger}, and no host delivers there",
        "start a host with a ledger of that receiver" if receiver else "start a host",
    )


def _ledgers(backlog: status.Backlog) -> Finding:
    if not backlog.blocked:
        return Finding("ledgers", OK, f"{backlog.lifecycle} lanes pending, none blocked")
    return Finding(
        "ledgers",
        PROBLEM,
        f"{backlog.blocked} blocked lanes: their ledgers get nothing more of these runs",
        "`runlane lanes --blocked` says why",
    )


def _sandboxes(stuck: int) -> Iterator[Finding]:
    if stuck:
        yield Finding(
            "sandboxes",
            PROBLEM,
            f"{stuck} could not be deleted, and may still cost something",
            "`runlane sandboxes` says why, `runlane sandboxes retry` tries again",
        )


def _dead_rows(worst: doctor.Bloat | None) -> Iterator[Finding]:
    if worst is not None and worst.dead > max(_DEAD_ROWS, 2 * worst.live):
        yield Finding(
            "dead rows",
            WARNING,
            f"{worst.name} has {worst.dead} beside {worst.live} live ones",
            "autovacuum does not keep up: see snapshots, or lower autovacuum_vacuum_cost_delay",
        )
