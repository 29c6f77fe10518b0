"""The command line: ``python -m runtime`` and ``runlane``.

Owns which verbs there are, and those of hosts, the schema and runs, with their options. The verbs of a client open one
session and call the kernel's doors; only ``serve`` and ``demo`` start hosts.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import attrs
import click
import trio

from runtime import __runlane__, _client, ids, logs
from runtime import _cli_show as show
from runtime import serve as hosting
from runtime._cli_base import (
    EXIT_CODES,
    FAILED,
    INTERRUPTED,
    NO_DATABASE,
    USAGE,
    Refusal,
    Verbs,
    database_options,
    json_option,
    moment_of,
    settings_of_command,
)
from runtime._cli_doctor import doctor_verb
from runtime._cli_lanes import lanes_verbs
from runtime._cli_limits import circuits_verb, limits_verb, rates_verb, set_limit_verb, set_rate_verb
from runtime._cli_receive import receive
from runtime._cli_sandboxes import compute_verb, sandboxes_verbs
from runtime._cli_schedules import schedules_group
from runtime.api import Runtime
from runtime.client import SyncClient
from runtime.codec import JsonCodec
from runtime.config import LOG_LEVELS, RuntimeConfig
from runtime.demo import run_demo
from runtime.handle import output_of
from sql import control, deployment, due, events, facts, receipts, status, submit
from sql.connection import Session
from sql.errors import InputRefused, LinkLost, PayloadRefused, RunNotFound
from sql.events import Sending
from sql.receipts import StepRecord
from sql.types import ON_CONFLICT, OPEN_STATUSES, PERFORMANCE, TERMINAL_STATUSES


@click.group(cls=Verbs, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__runlane__, prog_name="runlane")
@json_option
@database_options
def cli() -> None:
    """Durable runs on Postgres: submit them, host them, look at them.

    Every setting is also read from the environment as RUNLANE_<SETTING>, for example RUNLANE_DSN. Without a DSN the
    embedded Postgres of RUNLANE_EMBEDDED_DIR (or a default folder) is started for as long as a command needs it.

    \b
    Examples:
      runlane demo                              watch the whole thing work
      runlane serve --plays myapp.plays         host plays until Ctrl-C
      runlane submit audit '{"path": "/srv"}'   run one of them
    """


# --- demo --------------------------------------------------------------------------------------------


@cli.command()
@json_option
@database_options
@click.option(
    "--seconds",
    type=click.FloatRange(1, 600),
    default=20.0,
    show_default=True,
    help="How long to submit audits.",
)
def demo(seconds: float) -> None:
    """Audit every installed distribution with two hosts, and kill one on the way.

    Starts the embedded Postgres in .runlane/demo (RUNLANE_DSN or --dsn use another server) and two host processes.
    One run per distribution verifies the files of its RECORD, round after round. While it is going on, one host is
    killed with SIGKILL and another is started. At the end everything is counted. Exits 0 only if every check held; a
    file that does not match its RECORD is reported as a finding about this environment, and fails nothing.

    \b
    Examples:
      runlane demo
      runlane demo --seconds 60 --json
    """
    settings = settings_of_command()
    if not run_demo(settings.dsn, settings.schema, seconds=seconds, as_json=settings.as_json):
        raise click.exceptions.Exit(FAILED)


# --- serve -------------------------------------------------------------------------------------------


@cli.command()
@json_option
@database_options
@click.option(
    "--plays",
    "targets",
    multiple=True,
    required=True,
    metavar="MODULE[:ATTR]",
    help="A module with plays, or a play or list of plays in it. Repeatable.",
)
@click.option(
    "--sandboxes",
    "sandboxes_target",
    metavar="MODULE:ATTR",
    help="A dict of providers of sandboxes, by the names that plays give. local is there without it.",
)
@click.option("--slots", type=int, help="Attempts that run here at once.  [RUNLANE_SLOTS]")
@click.option("--health-host", help="Address of the health server.  [RUNLANE_HEALTH_HOST]")
@click.option("--health-port", type=int, help="Its port; 0 takes any free one.  [RUNLANE_HEALTH_PORT]")
@click.option(
    "--log-level",
    type=click.Choice(LOG_LEVELS, case_sensitive=False),
    help="Least level logged.  [RUNLANE_LOG_LEVEL]",
)
@click.option("--stop-with-stdin", is_flag=True, hidden=True, help="Stop at the end of stdin, too.")
def serve(
    targets: tuple[str, ...],
    sandboxes_target: str | None,
    slots: int | None,
    health_host: str | None,
    health_port: int | None,
    log_level: str | None,
    stop_with_stdin: bool,
) -> None:
    """Host plays until SIGTERM or Ctrl-C.

    Prints one line when it is ready and logs to stderr. The first signal lets running plays end within the grace
    period and hands every lease back; a second one skips the grace period. Exits 0 then, and 1 when the host had to
    give up. The current directory is importable. Of a module every play is hosted and every schedule created (or
    changed) that is at its top level or in a list there.

    \b
    Examples:
      runlane serve --plays myapp.plays
      runlane serve --plays myapp.plays:nightly --slots 50 --health-port 8080 --sandboxes myapp.boxes:providers
    """
    settings = settings_of_command()
    config = settings.config(
        slots=slots,
        health_host=health_host,
        health_port=health_port,
        log_level=log_level and log_level.upper(),
    )
    plays, schedules = hosting.load_plays(targets), hosting.load_schedules(targets)
    sandboxes = hosting.load_sandboxes(sandboxes_target) if sandboxes_target else None
    logs.configure(config.log_level)

    def announce(runtime: Runtime) -> None:
        ready = hosting.ready(runtime)
        if settings.as_json:
            show.print_json(ready)
        else:
            click.echo(" ".join(f"{name}={value}" for name, value in ready.items() if value is not None))
        sys.stdout.flush()

    trio.run(
        partial(
            hosting.serve,
            config,
            plays,
            announce,
            schedules=schedules,
            sandboxes=sandboxes,
            stop_with_stdin=stop_with_stdin,
        )
    )


cli.add_command(receive)


@cli.command()
def runner() -> None:
    """Run the play of one detached attempt. Started by a host, inside a sandbox.

    What to run and where its gateway is comes from RUNLANE_RUNNER_GATEWAY, RUNLANE_RUNNER_TOKEN and
    RUNLANE_RUNNER_PLAYS. Exits 0 once the attempt's end has been taken.
    """
    from runtime.runner import main

    main()


# --- migrate -----------------------------------------------------------------------------------------


@cli.command()
@json_option
@database_options
@click.option("--check", is_flag=True, help="Only look: exit 1 and say what is missing, change nothing.")
def migrate(check: bool) -> None:
    """Bring the schema up to this version.

    Creates the schema, its tables and its functions, or what is missing of them. Running hosts are not disturbed, and
    any number of processes may do it at once. Hosts also do it when they start; do it by hand where their role may
    not create anything.

    \b
    Examples:
      runlane migrate
      runlane migrate --check --dsn postgresql://owner@db/app
    """
    settings = settings_of_command()
    config = settings.config()
    if check:
        readiness = _client.ask(config, deployment.check)
        missing = list(readiness.missing)
        if settings.as_json:
            show.print_json({"schema": config.schema, "ready": readiness.ready, "missing": missing})
        elif readiness.ready:
            click.echo(f"schema {config.schema} is ready")
        if not readiness.ready:
            raise Refusal(readiness.problem(config.schema), FAILED)
        return
    changed = _client.ask(config, deployment.ensure)
    if settings.as_json:
        show.print_json({"schema": config.schema, "ready": True, "changed": changed})
    else:
        click.echo(f"schema {config.schema} {'brought up to date' if changed else 'was up to date'}")


# --- submit ------------------------------------------------------------------------------------------


@cli.command("submit")
@json_option
@database_options
@click.argument("play")
@click.argument("input", required=False, metavar="[INPUT-JSON|-]")
@click.option("--run-id", help="An id of your own; submitting it again gives the same run.")
@click.option("--idempotency-key", help="Submitting the same key and input again gives the same run.")
@click.option("--org", help="Organisation that the run belongs to.")
@click.option("--priority", type=int, default=0, show_default=True, help="From -2 (last) to 2 (first).")
@click.option("--delay", type=float, metavar="SECONDS", help="Not before this many seconds from now.")
@click.option("--at", metavar="TIME", help="Not before this time: ISO 8601 with an offset or Z.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Repeatable.")
@click.option("--concurrency-key", metavar="KEY", help="Of runs with one key only so many run at once.")
@click.option("--unique-key", metavar="KEY", help="One run at a time has it, until that run has ended.")
@click.option("--unique-for", type=float, metavar="SECONDS", help="Held for so long instead.")
@click.option("--on-conflict", type=click.Choice(ON_CONFLICT), help="Where another run holds the unique key.")
@click.option("--receiver", metavar="NAME", help="Who gets its facts, as runs carry it.")
@click.option("--terminal-receiver", metavar="NAME", help="Who gets its end, if another.")
@click.option(
    "--terminal-performance", type=click.Choice(PERFORMANCE), help="Let its end say how long everything took."
)
@click.option("--wait", is_flag=True, help="Wait until the run has ended, and print its output.")
def submit_verb(play: str, input: str | None, wait: bool, **options: Any) -> None:
    """Submit a run of PLAY.

    INPUT-JSON is the play's input, - reads it from stdin, and without one it is null. Prints the run's id. With --wait
    it prints the output instead, and exits 3 when the run failed and 4 when it was cancelled. A host that serves the
    play must have registered it once; it need not be running now.

    \b
    Examples:
      runlane submit audit '{"path": "/srv"}' --idempotency-key srv-2026-01-31
      generate-input | runlane submit report - --label team=ops --wait
    """
    settings = settings_of_command()
    config = settings.config()
    text = _input_text(input, config)
    options = _submit_options(options, config)
    own_id = options["run_id"] is None and options["idempotency_key"] is None
    if own_id:
        # So that asking again after a lost answer cannot make a second run.
        options["run_id"] = ids.new_run_id()

    async def body(session: Session) -> tuple[str, bool]:
        return await submit.submit(session, play, text, options)

    with _client.reachable(config) as found:
        try:
            run_id, created = _client.ask(found, body)
        except LinkLost as exc:
            name = options["run_id"] or f"with idempotency key {options['idempotency_key']!r}"
            raise Refusal(f"run {name} may have been submitted or not: {exc}", NO_DATABASE) from exc
        created = created or (own_id and run_id == options["run_id"])
        if not wait:
            if settings.as_json:
                show.print_json({"run_id": run_id, "created": created})
            else:
                click.echo(run_id)
                if not created:
                    click.echo("the run was there already", err=True)
            return
        if not settings.as_json:
            click.echo(f"run {run_id}", err=True)
        try:
            terminal = _client.wait_for_end(found, run_id)
        except KeyboardInterrupt:
            raise Refusal(f"interrupted; run {run_id} goes on", INTERRUPTED) from None
    if settings.as_json:
        show.print_json(
            {"run_id": run_id, "created": created, "status": terminal.status, **(terminal.payload or {})}
        )
    output = output_of(terminal, JsonCodec())
    if not settings.as_json:
        show.print_json(output)


def _input_text(given: str | None, config: RuntimeConfig, *, what: str = "input") -> str:
    text = "null" if given is None else given
    if given == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as exc:
            raise InputRefused(what, f"stdin is not UTF-8: {exc.reason}") from None
    codec = JsonCodec()
    try:
        value = codec.decode(text, what=what)
    except PayloadRefused as exc:
        if not isinstance(exc.__context__, json.JSONDecodeError):
            raise
        shown = "INPUT-JSON" if what == "input" else "JSON"
        raise Refusal(f"{shown} is not JSON: {exc.reason}", USAGE) from exc
    return codec.encode(value, what=what, limit_bytes=config.max_payload_bytes, max_depth=config.max_depth)


def _submit_options(given: dict[str, Any], config: RuntimeConfig) -> dict[str, Any]:
    at = None if given["at"] is None else moment_of("at", given["at"])
    delay_s, at = ids.check_when(given["delay"], at)
    ids.check_unique(given["unique_key"], given["unique_for"], given["on_conflict"])
    return {
        "run_id": None if given["run_id"] is None else ids.check_run_id(given["run_id"]),
        "idempotency_key": ids.check_idempotency_key(given["idempotency_key"]),
        "org_id": ids.check_org_id(given["org"]),
        "priority": ids.check_priority(given["priority"]),
        "delay": delay_s,
        "at": None if at is None else at.isoformat(),
        "labels": _labels(given["labels"]),
        "concurrency_key": ids.check_concurrency_key(given["concurrency_key"]),
        "unique_key": given["unique_key"],
        "unique_for_s": given["unique_for"],
        "on_conflict": given["on_conflict"],
        "receiver": ids.check_receiver("receiver", given["receiver"]),
        "terminal_receiver": ids.check_receiver("terminal_receiver", given["terminal_receiver"]),
        "terminal_performance": given["terminal_performance"],
        "surface": "cli",
        "release_id": config.release_id,
        "environment": config.environment,
        "notify": config.notify,
    }


def _labels(pairs: tuple[str, ...]) -> dict[str, str] | None:
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InputRefused("label", f"write it as KEY=VALUE, not {pair!r}")
        labels[key] = value
    return ids.check_labels(labels) or None


# --- status ------------------------------------------------------------------------------------------


@cli.command("status")
@json_option
@database_options
@click.argument("run_id", metavar="RUN")
@click.option(
    "--facts", "most", type=click.IntRange(min=0), default=20, show_default=True, help="Newest facts to show."
)
def status_verb(run_id: str, most: int) -> None:
    """Show a run: what is now, who tried, what happened.

    Prints the run's row and end, what it waits for, events that no wait has taken, its ended attempts, its newest facts
    and how many of its facts the ledger has; and a hint where no host is there to claim it. Exits 5 when there is no
    such run.

    \b
    Examples:
      runlane status 0199b7a4-7d5c-7c1e-9d3a-6f0c1f1c2d3e
      runlane status nightly-42 --facts 100 --json
    """
    settings = settings_of_command()
    ids.check_run_id(run_id)

    async def body(session: Session) -> tuple[Any, Any, Any, Any]:
        run = await status.read_run(session, run_id, full=True)
        if run is None:
            raise RunNotFound(run_id)
        attempts = await status.read_attempts(session, run_id)
        kept = [event for event in await events.read(session, run_id) if event.wait_key is None]
        return run, attempts, kept, await facts.read(session, run_id) if most else []

    run, attempts, kept, found = _client.ask(settings.config(), body)
    # Both lanes in the order of time; within one lane the order of its numbers always stands.
    found = sorted(found, key=lambda fact: fact.created_at)[-most:] if most else []
    if settings.as_json:
        show.print_json(show.run_record(run, attempts, kept, found))
    else:
        show.show_run(run, attempts, kept, found)


# --- steps -------------------------------------------------------------------------------------------


@cli.command("steps")
@json_option
@database_options
@click.argument("run_id", metavar="RUN")
@click.option("--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Steps to list.")
@click.option("--after", metavar="KEY", help="Go on after this step, the last of the page before.")
@click.option("--outputs", is_flag=True, help="Also what each step has given.")
def steps_verb(run_id: str, limit: int, after: str | None, outputs: bool) -> None:
    """List the steps of a run by key, with their state, attempt and tries.

    A step that is claimed, queued or running is held by that attempt of the run, as long as the attempt lives. With
    --json the answer has "next": the value for --after that gives the following page, or null. Exits 5 when there is
    no such run.

    \b
    Examples:
      runlane steps 0199b7a4-7d5c-7c1e-9d3a-6f0c1f1c2d3e
      runlane steps nightly-42 --outputs --json
    """
    settings = settings_of_command()
    ids.check_run_id(run_id)
    if after is not None:
        ids.check_step_key(after)

    async def body(session: Session) -> list[StepRecord]:
        found = await receipts.read(session, run_id, after=after, limit=limit, outputs=outputs)
        if not found and run_id not in await status.read_runs(session, [run_id]):
            raise RunNotFound(run_id)
        return found

    found = _client.ask(settings.config(), body)
    if settings.as_json:
        following = found[-1].key if len(found) == limit else None
        show.print_json({"steps": [show.step_json(step, outputs) for step in found], "next": following})
        return
    show.show_page(
        "steps",
        found,
        partial(show.show_steps, outputs=outputs),
        as_json=False,
        empty="no steps",
        limit=limit,
        place=lambda step: repr(step.key),
    )


# --- cancel ------------------------------------------------------------------------------------------


@cli.command("cancel")
@json_option
@database_options
@click.argument("run_id", metavar="RUN")
@click.option("--reason", help="Kept with the run, for people.")
def cancel_verb(run_id: str, reason: str | None) -> None:
    """Cancel a run, whatever it is doing.

    A run that is executing loses its lease at once and its play is cancelled. "pending" means that the request is
    recorded and takes effect in a moment. Exits 1 when the run had already completed or failed, 5 when there is no
    such run; cancelling a cancelled run is fine.

    \b
    Examples:
      runlane cancel 0199b7a4-7d5c-7c1e-9d3a-6f0c1f1c2d3e --reason duplicate
      runlane cancel nightly-42 --json
    """
    settings = settings_of_command()
    config = settings.config()
    request = control.Cancellation(ids.check_run_id(run_id), ids.new_run_id(), reason, "command line")

    async def body(session: Session) -> str:
        (answer,) = await control.cancel(session, [request], mark=True)
        if config.notify and answer.answer in ("cancelled", "pending"):
            await due.notify(session, ["control", "terminals", "lanes", "wakes", "runs"])
        return answer.answer

    answer = _client.ask(config, body)
    if answer == "missing":
        raise RunNotFound(run_id)
    stands = "cancelled" if answer == "cancelled_before" else answer
    if settings.as_json:
        show.print_json({"run_id": run_id, "won": answer == "cancelled", "status": stands})
    elif stands not in ("completed", "failed"):
        words = {"cancelled": "cancelled", "pending": "pending: the request is recorded"}
        click.echo("was cancelled before" if answer == "cancelled_before" else words[answer])
    if stands in ("completed", "failed"):
        raise Refusal(f"run {run_id} had already {stands}", FAILED)


# --- fail --------------------------------------------------------------------------------------------


@cli.command("fail")
@json_option
@database_options
@click.argument("run_id", metavar="RUN")
@click.option("--reason", required=True, help="The failure's message.")
def fail_verb(run_id: str, reason: str) -> None:
    """End a run that waits as failed, without waking it.

    For a run that sleeps, or waits for an event, an approval or a child that will not come. It fails only if it still
    waits as it does now, and nobody has asked to cancel it. Exits 1 when it does not wait, or has gone on meanwhile
    (look at it again), 5 when there is no such run. What runs, or is queued, can be cancelled.

    \b
    Examples:
      runlane fail nightly-42 --reason "the approver has left"
      runlane fail 0199b7a4-7d5c-7c1e-9d3a-6f0c1f1c2d3e --reason "the file was lost" --json
    """
    settings = settings_of_command()
    with _client.reachable(settings.config()) as found, SyncClient.open(found) as client:
        outcome = client.fail(run_id, reason, by="command line")
    if settings.as_json:
        show.print_json({"run_id": run_id, **attrs.asdict(outcome)})
    elif outcome.won:
        click.echo("failed")
    if outcome.outcome == "not_applicable":
        raise Refusal(f"run {run_id} does not wait: it is {outcome.status}", FAILED)
    if not outcome.won:
        raise Refusal(f"run {run_id} no longer waits as it did, or is about to be cancelled", FAILED)


# --- event -------------------------------------------------------------------------------------------


@cli.command("event")
@json_option
@database_options
@click.argument("run_id", metavar="RUN")
@click.argument("name")
@click.argument("payload", required=False, metavar="[JSON|-]")
@click.option("--event-id", help="An id of your own: an event with the same id counts once.")
def event_verb(run_id: str, name: str, payload: str | None, event_id: str | None) -> None:
    """Send a run the event NAME.

    JSON is its payload, - reads it from stdin, and without one it is null. Prints "delivered" when a wait takes it,
    "kept" when it is for a wait to come, "duplicate" when it was sent before under this id. Exits 1 when the run has
    ended or the id was used for another event, 2 when the run waits for an approval of that name and JSON does not say
    {"approved": true} or false, 5 when there is no such run.

    \b
    Examples:
      runlane event nightly-42 approval '{"approved": true, "by": "ada"}'
      runlane event nightly-42 file-arrived '{"path": "/srv/a"}' --event-id a
    """
    settings = settings_of_command()
    config = settings.config()
    own_id = ids.check_event_id(event_id)
    item = Sending(
        ids.check_run_id(run_id),
        ids.check_event_name(name),
        _input_text(payload, config, what="payload"),
        own_id or ids.new_run_id(),
        own_id is not None,
    )

    async def body(session: Session) -> str:
        (answer,) = await events.send(session, [item])
        if config.notify and answer in ("delivered", "kept"):
            await due.notify(session, ["wakes"])
        return answer

    answer = _client.ask(config, body)
    if answer == "missing":
        raise RunNotFound(run_id)
    if answer == "undecided":
        raise events.undecided(item)
    if answer == "busy":
        raise Refusal(f"event id {event_id!r} is held by a transaction that is still open", FAILED)
    if settings.as_json:
        show.print_json({"run_id": run_id, "event_id": item.event_id, "status": answer})
    elif answer not in ("ended", "conflict"):
        click.echo(answer)
    if answer == "ended":
        raise Refusal(f"run {run_id} has ended", FAILED)
    if answer == "conflict":
        raise Refusal(f"event id {event_id!r} was used for another event of run {run_id}", FAILED)


# --- runs --------------------------------------------------------------------------------------------


@cli.command("runs")
@json_option
@database_options
@click.option("--status", "wanted", type=click.Choice(sorted(OPEN_STATUSES | TERMINAL_STATUSES)))
@click.option("--play", help="Only runs of this play.")
@click.option("--org", help="Only runs of this organisation.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Only runs with it. Repeatable.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Runs to list.")
@click.option("--after", metavar="RUN", help="Go on after this run, the last of the page before.")
def runs_verb(
    wanted: str | None,
    play: str | None,
    org: str | None,
    labels: tuple[str, ...],
    limit: int,
    after: str | None,
) -> None:
    """List runs, newest first.

    Filters add up. "lane" says whether the ledger has all facts of a run. With --json the answer has "next": the value
    for --after that gives the following page, or null.

    \b
    Examples:
      runlane runs --status failed --play audit
      runlane runs --label team=ops --limit 100 --json
    """
    settings = settings_of_command()
    wanted_labels = _labels(labels)
    if after is not None:
        ids.check_run_id(after)

    async def body(session: Session) -> list[Any]:
        return await status.list_runs(
            session,
            status=wanted,
            play=play,
            org_id=org,
            labels=None if wanted_labels is None else json.dumps(wanted_labels),
            limit=limit,
            after=after,
        )

    found = _client.ask(settings.config(), body)
    show.show_page(
        "runs",
        found,
        show.show_runs,
        as_json=settings.as_json,
        record=show.run_json,
        empty="no runs",
        limit=limit,
        place=lambda run: run.run_id,
    )


# --- verbs that have modules of their own ------------------------------------------------------------

for _verb in (
    schedules_group,
    rates_verb,
    set_rate_verb,
    limits_verb,
    set_limit_verb,
    circuits_verb,
    lanes_verbs,
    sandboxes_verbs,
    compute_verb,
    doctor_verb,
):
    cli.add_command(_verb)


# --- the entry ---------------------------------------------------------------------------------------


def main() -> None:
    """The console script: run the verb of ``sys.argv`` and exit."""
    cli()
