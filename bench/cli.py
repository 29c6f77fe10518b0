"""The command line of the benchmarks: ``python -m bench``.

Owns the scenarios' options, where they run, and how a run ends: exit code 0 when the figures stand, whatever they
are, 1 when something went wrong, work was lost, or a bound that is the scenario's very question did not hold.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import click
import trio

from actors.core import leaves
from bench import (
    bridge,
    cancel,
    delivery,
    detached,
    drain,
    fairness,
    growth,
    idle,
    kernel,
    latency,
    steps,
    takeover,
    throughput,
)
from bench.figures import Report, console, show, show_json
from bench.place import server
from sql.errors import RunlaneError

F = TypeVar("F", bound=Callable[..., Any])

FAILED, INTERRUPTED = 1, 130

_ROUNDS = click.IntRange(1, 101)
_RUNS = click.IntRange(1, 1_000_000)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
def cli() -> None:
    """Measure runlane on this machine.

    Every scenario runs on an embedded Postgres in a temporary folder, as durable as by default, or on the server of
    --dsn or RUNLANE_DSN, there in schemas of its own. Nothing is left behind.
    """


def _scenario(verb: F) -> F:
    """The options that every scenario has."""
    verb = click.option("--json", "as_json", is_flag=True, help="One line of JSON instead of a table.")(verb)
    return click.option(
        "--dsn", envvar="RUNLANE_DSN", metavar="DSN", help="This server instead of an embedded one."
    )(verb)


def _rounds(default: int) -> Callable[[F], F]:
    return click.option(
        "--rounds", type=_ROUNDS, default=default, show_default=True, help="Rounds; medians count."
    )


def _runs(default: int) -> Callable[[F], F]:
    return click.option("--runs", type=_RUNS, default=default, show_default=True, help="Runs per round.")


@cli.command("throughput")
@_runs(20_000)
@_rounds(5)
@click.option(
    "--slots", type=click.IntRange(1, 10_000), default=1_000, show_default=True, help="Of the host."
)
@click.option(
    "--submit",
    type=click.IntRange(1, 100_000),
    default=1_000,
    show_default=True,
    help="Runs per submit_many.",
)
@_scenario
def throughput_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """Whole lifecycles in one host, beside the bare kernel."""
    _measure(partial(throughput.run, **options), dsn, as_json)


@cli.command("kernel")
@_runs(20_000)
@_rounds(3)
@click.option(
    "--inline",
    type=click.FloatRange(0.0, 1.0),
    default=1.0,
    show_default=True,
    help="Share of the runs that are admitted as already claimed.",
)
@_scenario
def kernel_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """The kernel's functions straight from asyncpg, no actors."""
    _measure(partial(kernel.run, **options), dsn, as_json)


@cli.command("drain")
@_runs(10_000)
@_rounds(5)
@click.option(
    "--slots", type=click.IntRange(1, 10_000), default=1_000, show_default=True, help="Of the host."
)
@_scenario
def drain_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """A backlog of queued runs, by one host, with delivery beside it."""
    _measure(partial(drain.run, **options), dsn, as_json)


@cli.command("delivery")
@click.option(
    "--runs",
    type=_RUNS,
    default=3_000,
    show_default=True,
    help="Runs of five facts in the backlog of a case.",
)
@_rounds(3)
@click.option(
    "--seconds",
    type=click.FloatRange(0.5, 60.0),
    default=4.0,
    show_default=True,
    help="How long lag is sampled in a case, at 100 runs/s.",
)
@_scenario
def delivery_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """Facts to a ledger: in the database, as deliveries, and over HTTP to a receiver."""
    _measure(partial(delivery.run, **options), dsn, as_json)


@cli.command("fairness")
@click.option(
    "--flood", type=_RUNS, default=50_000, show_default=True, help="Queued runs of the one organisation."
)
@click.option(
    "--orgs", type=click.IntRange(2, 10_000), default=200, show_default=True, help="Organisations in all."
)
@click.option(
    "--each",
    type=click.IntRange(1, 10_000),
    default=10,
    show_default=True,
    help="Runs of each of the others.",
)
@_rounds(3)
@click.option("--slots", type=click.IntRange(1, 10_000), default=50, show_default=True, help="Of the host.")
@click.option(
    "--work", "work_ms", type=click.FloatRange(1.0, 10_000.0), default=20.0, show_default=True,
    help="Milliseconds that a run takes.",
)  # fmt: skip
@click.option(
    "--load", type=click.FloatRange(0.01, 1.0), default=0.3, show_default=True,
    help="Share of the slots that the stream fills.",
)  # fmt: skip
@_scenario
def fairness_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """One organisation's long queue, and what it does to the waits of the others."""
    _measure(partial(fairness.run, **options), dsn, as_json)


@cli.command("growth")
@click.option(
    "--delivered",
    type=click.IntRange(1, 100_000_000),
    multiple=True,
    default=(100_000, 2_000_000),
    show_default=True,
    help="Facts of a history that is delivered; may be given more than once.",
)
@click.option(
    "--pending",
    type=click.IntRange(10, 10_000_000),
    default=50_000,
    show_default=True,
    help="Pending lanes beside those measured.",
)
@_rounds(60)
@click.option("--analyse", is_flag=True, help="Up-to-date statistics instead of none.")
@_scenario
def growth_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """Delivery turns beside a long history and many pending lanes, against empty tables."""
    _measure(partial(growth.run, **options), dsn, as_json)


@cli.command("latency")
@click.option(
    "--samples", type=click.IntRange(1, 100_000), default=400, show_default=True, help="Single runs."
)
@click.option(
    "--gap",
    "gap_s",
    type=click.FloatRange(0.0, 60.0),
    default=0.06,
    show_default=True,
    help="Seconds between two, on average.",
)
@_scenario
def latency_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """One run on an idle host: submit, start, terminal, ledger."""
    _measure(partial(latency.run, **options), dsn, as_json)


@cli.command("cancel")
@click.option(
    "--samples",
    type=click.IntRange(1, 100_000),
    default=200,
    show_default=True,
    help="Cancellations in each way.",
)
@click.option(
    "--held",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Plays that run at the same time.",
)
@click.option(
    "--gap",
    "gap_s",
    type=click.FloatRange(0.0, 60.0),
    default=0.02,
    show_default=True,
    help="Seconds between two, on average.",
)
@_scenario
def cancel_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """How soon a running play sees that it was cancelled, by whichever host. Exits 1 where p99 is above 100 ms."""
    _measure(partial(cancel.run, **options), dsn, as_json)


@cli.command("idle")
@click.option(
    "--seconds",
    type=click.FloatRange(1.0, 3_600.0),
    default=60.0,
    show_default=True,
    help="How long to watch.",
)
@_scenario
def idle_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """Statements and wake-ups of a host that has nothing to do."""
    # Autovacuum's visits would count as the host's statements.
    _measure(partial(idle.run, **options), dsn, as_json, settings={"autovacuum": "off"})


@cli.command("takeover")
@_runs(200)
@_rounds(3)
@click.option(
    "--lease",
    "lease_s",
    type=click.FloatRange(0.5, 60.0),
    default=3.0,
    show_default=True,
    help="Seconds of a lease of the host that is killed.",
)
@_scenario
def takeover_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """SIGTERM and SIGKILL with long plays running; another host takes over."""
    _measure(partial(takeover.run, **options), dsn, as_json)


@cli.command("steps")
@click.option(
    "--steps", type=click.IntRange(1, 1_000_000), default=20_000, show_default=True, help="Of each shape."
)
@_rounds(3)
@click.option(
    "--runs", type=click.IntRange(1, 10_000), default=400, show_default=True, help="That make steps at once."
)
@click.option(
    "--concurrency", type=click.IntRange(1, 256), default=100, show_default=True, help="Of the map."
)
@click.option(
    "--single", type=click.IntRange(1, 100_000), default=500, show_default=True, help="Steps, one by one."
)
@_scenario
def steps_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """Steps recorded by one host: many runs, one map, one by one."""
    _measure(partial(steps.run, **options), dsn, as_json)


@cli.command("detached")
@click.option(
    "--samples", type=click.IntRange(1, 10_000), default=400, show_default=True, help="Results, one by one."
)
@click.option(
    "--gap", "gap_s", type=click.FloatRange(0.0, 60.0), default=0.06, show_default=True,
    help="Seconds between two of them, on average.",
)  # fmt: skip
@click.option(
    "--runners", type=click.IntRange(1, 10_000), default=200, show_default=True, help="That are heard of."
)
@click.option(
    "--seconds", type=click.FloatRange(1.0, 600.0), default=20.0, show_default=True, help="For so long."
)
@click.option(
    "--load", "load_per_s", type=click.FloatRange(0.0, 100_000.0), default=100.0, show_default=True,
    help="Runs per second beside them.",
)  # fmt: skip
@_rounds(3)
@_scenario
def detached_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """Runners in sandboxes: results and heartbeats through the gateway."""
    _measure(partial(detached.run, **options), dsn, as_json)


@cli.command("bridge")
@click.option(
    "--queries", type=click.IntRange(1, 1_000_000), default=2_000, show_default=True, help="Per round."
)
@_rounds(5)
@_scenario
def bridge_verb(dsn: str | None, as_json: bool, **options: Any) -> None:
    """What the crossing from trio to asyncio costs."""
    _measure(partial(bridge.run, **options), dsn, as_json)


# --- running -----------------------------------------------------------------------------------------


def _measure(
    scenario: Callable[[str], Awaitable[Report]],
    dsn: str | None,
    as_json: bool,
    settings: dict[str, str] | None = None,
) -> None:
    """Run a scenario and print its report; exit 1 when one of its checks did not hold."""
    words = console(stderr=True)
    # A program reads --json; a log is not a place for a spinner.
    with server(dsn, settings) as address, words.status("measuring…", spinner="line"):
        report = trio.run(scenario, address)
    (show_json if as_json else show)(report)
    if not report.sound:
        raise SystemExit(FAILED)


def main() -> None:
    """Run the scenario of ``sys.argv`` and exit. SIGTERM ends it as Ctrl-C does, with everything cleaned up."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: signal.raise_signal(signal.SIGINT))
    code = FAILED
    try:
        cli.main(standalone_mode=False)
        code = 0
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:  # how click passes a KeyboardInterrupt on
        code = _ended_by(KeyboardInterrupt())
    except RunlaneError as error:
        code = _ended_by(error)
    except BaseExceptionGroup as group:
        code = _ended_by(*leaves(group))
    sys.exit(code)


def _ended_by(*errors: BaseException) -> int:
    """One line for an error that is expected; every other one leaves with its traceback."""
    if any(isinstance(error, KeyboardInterrupt) for error in errors):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    for error in errors:
        if not isinstance(error, RunlaneError):
            raise error
    click.echo(f"Error: {errors[0]}", err=True)
    return FAILED
