"""What the command line prints: tables for people, JSON for programs.

Owns the look of every answer. It asks nothing and decides nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import attrs
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sql.adoption import Preview
from sql.billing import ComputeRecord
from sql.circuits import Circuit
from sql.limits import Limit
from sql.rates import RateScope
from sql.receipts import StepRecord
from sql.sandboxes import SandboxRecord
from sql.schedules import Fire, ScheduleStatus
from sql.status import AttemptRecord
from sql.types import (
    TERMINAL_STATUSES,
    Event,
    Fact,
    JournalEntry,
    LaneStatus,
    Performance,
    RunDetails,
    RunnerStatus,
    RunStatus,
)

T = TypeVar("T", bound=attrs.AttrsInstance)

_STYLES = {
    "completed": "green",
    "failed": "red",
    "expired": "yellow",
    "cancelled": "magenta",
    "running": "cyan",
    "open": "green",
    "blocked": "red",
    "probing": "yellow",
}
# Where no terminal says how wide it is, lines are for grep and must not be cut.
_WIDE = 240
_PAYLOAD_CHARS = 300


def console(*, stderr: bool = False) -> Console:
    """A console that cuts nothing when its output goes to a file or a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDE)


def print_json(value: Any) -> None:
    """One line of JSON on stdout; times are ISO 8601."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=_plain) + "\n")


def show_list(
    name: str,
    found: Sequence[T],
    table: Callable[[Sequence[T]], None],
    *,
    as_json: bool,
    empty: str,
) -> None:
    """Everything there is of a kind: as JSON below ``name``, as a table, or in words that there is nothing."""
    if as_json:
        print_json({name: [attrs.asdict(one) for one in found]})
    else:
        _show_table(found, table, empty)


def show_page(
    name: str,
    found: Sequence[T],
    table: Callable[[Sequence[T]], None],
    *,
    as_json: bool,
    record: Callable[[T], Mapping[str, Any]] = lambda one: attrs.asdict(one),
    empty: str,
    limit: int,
    place: Callable[[T], Any],
    option: str = "--after",
) -> None:
    """The same for a page of at most ``limit``: ``place`` of its last one is what ``option`` takes to go on."""
    following = place(found[-1]) if len(found) == limit else None
    if as_json:
        print_json({name: [record(one) for one in found], "next": following})
        return
    _show_table(found, table, empty)
    if following is not None:
        click.echo(f"there may be more: {option} {following}", err=True)


def _show_table(found: Sequence[T], table: Callable[[Sequence[T]], None], empty: str) -> None:
    if found:
        table(found)
    else:
        click.echo(empty, err=True)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


def state(word: str) -> Text:
    """A status or outcome in its colour."""
    return Text(word, style=_STYLES.get(word, ""))


def moment(value: datetime | None) -> str:
    """A time to the millisecond, or a dash."""
    return "-" if value is None else value.isoformat(sep=" ", timespec="milliseconds")


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table in the house's look."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        made.add_column(name, header_style="dim", overflow="fold", no_wrap=name in ("run", "at"))
    return made


# --- one run -----------------------------------------------------------------------------------------


def run_record(
    run: RunStatus, attempts: Sequence[AttemptRecord], kept: Sequence[Event], facts: Sequence[Fact]
) -> dict[str, Any]:
    """Everything that ``status`` knows, for a program."""
    return {
        **run_json(run),
        "attempts": [attrs.asdict(one) for one in attempts],
        "kept_events": [attrs.asdict(event) for event in kept],
        "facts": [
            {**attrs.asdict(fact, filter=attrs.filters.exclude("run_id")), "lane": fact.lane.label}
            for fact in facts
        ],
    }


def run_json(run: RunStatus) -> dict[str, Any]:
    """A run's row, for a program."""
    absent = ("details", "log_store")  # where there is nothing to say
    return attrs.asdict(run, filter=lambda field, value: field.name not in absent or value is not None) | {
        "lane": lane_state(run)
    }


def lane_state(run: RunStatus) -> str:
    """Where the delivery of the run's lifecycle facts stands, in one word: delivered, pending or blocked."""
    if run.lane_blocked is not None:
        return "blocked"
    return "delivered" if run.facts_delivered >= run.facts_last else "pending"


def show_run(
    run: RunStatus, attempts: Sequence[AttemptRecord], kept: Sequence[Event], facts: Sequence[Fact]
) -> None:
    """The run, its attempts and its facts, for people."""
    out = console()
    summary = Table.grid(padding=(0, 2))
    summary.add_column(style="dim")
    summary.add_column(overflow="fold")
    for name, value in _summary(run):
        summary.add_row(name, value)
    out.print(summary)
    if attempts:
        out.print()
        out.print(_attempts(attempts))
    if kept:
        out.print()
        out.print(_events(kept))
    if facts:
        out.print()
        out.print(_facts(facts))


def _summary(run: RunStatus) -> Iterable[tuple[str, Text | str]]:
    yield "run", Text(run.run_id, style="bold")
    yield "play", run.play
    yield "status", state(run.status)
    if run.host is not None:
        if run.lease_expires_at is None:  # a runner has it, for as long as it lives
            yield "in", run.host
        else:
            yield "host", f"{run.host}, lease until {moment(run.lease_expires_at)}"
    for wait in run.waits:
        name = f"{wait.kind} {wait.name or wait.key}"
        yield "waits for", name if wait.until is None else f"{name} until {moment(wait.until)}"
    if run.status == "queued":
        yield "due", moment(run.due_at)
    if run.details is not None and not run.details.served and run.status in ("queued", "waiting"):
        yield "hint", Text(_unserved(run), style="yellow")
    elif run.details is not None and not run.details.lane_served and lane_state(run) == "pending":
        yield "hint", Text(_undelivered(run, run.details), style="yellow")
    yield "created", moment(run.created_at)
    yield "started", moment(run.started_at)
    yield "finished", moment(run.finished_at)
    yield "attempts", f"{run.attempt} ({run.failures} failed, {run.crashes} crashed)"
    if run.org_id is not None:
        yield "org", run.org_id
    if run.priority:
        yield "priority", str(run.priority)
    if run.labels:
        yield "labels", " ".join(f"{key}={value}" for key, value in sorted(run.labels.items()))
    if run.release_id is not None:
        yield "release", run.release_id
    if run.environment is not None:
        yield "environment", run.environment
    if run.parent_id is not None:
        yield "parent", run.parent_id
    if run.details is not None:
        yield from _details(run.details)
    lane = f"{run.facts_delivered} of {run.facts_last} facts delivered"
    if run.lane_blocked is not None:
        lane = f"{lane}, blocked: {run.lane_blocked}"
    elif run.details is not None and run.details.lane_failure is not None:
        lane = f"{lane}, the latest delivery failed: {run.details.lane_failure}"
    yield "lane", Text(lane)


def _unserved(run: RunStatus) -> str:
    belongs = [f"play {run.play}"]
    belongs += [f"release {run.release_id}"] if run.release_id is not None else []
    belongs += [f"environment {run.environment}"] if run.environment is not None else []
    return f"no host that claims {', '.join(belongs)} was seen within the last minute"


def _undelivered(run: RunStatus, details: RunDetails) -> str:
    ends = run.status in TERMINAL_STATUSES and run.facts_delivered + 1 == run.facts_last
    receiver = (details.terminal_receiver if ends else None) or details.receiver
    who = f"that delivers to {receiver!r}" if receiver else "with a ledger of its own"
    return f"no host {who} was seen within the last minute"


def _details(details: RunDetails) -> Iterable[tuple[str, Text | str]]:
    for name in ("surface", "trigger", "scope", "unique_key", "idempotency_key", "concurrency_key"):
        value = getattr(details, name)
        if value is not None:
            yield name.replace("_", " "), Text(value)
    if details.terminal_receiver is not None:
        yield "end goes to", Text(details.terminal_receiver)
    if details.array_input:
        yield "array input", "staged: the end's delivery retires it"
    if details.log_lane_blocked is not None:
        yield "logs", Text(f"blocked: {details.log_lane_blocked}")
    if details.runtime_backend is not None:
        yield "runs in", Text(details.runtime_backend)
    if details.runner is not None:
        yield "runner", _runner(details.runner)
    if details.performance is not None:
        yield "took", _took(details.performance)
    end = details.terminal or {}
    if "output" in end:
        yield "output", Text(_short(json.dumps(end["output"], ensure_ascii=False)))
    if isinstance(end.get("error"), Mapping):
        words = [str(end["error"][key]) for key in ("error_type", "message") if end["error"].get(key)]
        yield "error", Text(_short(": ".join(words)), style="red")
    if end.get("reason") is not None:
        yield "reason", Text(str(end["reason"]))


def _runner(runner: RunnerStatus) -> str:
    if runner.heartbeat_at is None:
        words = f"began {runner.silent_s:.1f} s ago and was not heard of yet"
    else:
        words = f"heard of {runner.silent_s:.1f} s ago"
    return f"{words}; its provider is asked after {runner.heartbeat_timeout_s:g} s of silence"


def _took(took: Performance) -> str:
    words = [f"{took.total_s:g} s in all"]
    words += [f"{took.queued_s:g} s until its first attempt"] if took.queued_s is not None else []
    words += [f"{took.host_s:g} s on hosts"]
    words += [f"{took.sandbox_s:g} s in sandboxes"] if took.sandbox_s else []
    if took.usage is not None:
        words += [f"{took.usage.cpu_s:g} s of CPU", f"{took.usage.peak_memory_bytes / 2**20:.0f} MiB at most"]
    return ", ".join(words)


def _attempts(attempts: Sequence[AttemptRecord]) -> Table:
    made = table("attempt", "outcome", "host", "started", "seconds", "error", title="Ended attempts")
    for one in attempts:
        seconds = (one.ended_at - one.started_at).total_seconds()
        made.add_row(
            str(one.attempt),
            state(one.outcome),
            one.host,
            moment(one.started_at),
            f"{seconds:.3f}",
            Text(_error_words(one.error), style="red"),
        )
    return made


def _events(events: Sequence[Event]) -> Table:
    made = table("at", "name", "id", "payload", title="Events that no wait has taken")
    for event in events:
        payload = Text(_short(json.dumps(event.payload, ensure_ascii=False)))
        made.add_row(moment(event.created_at), Text(event.name), event.event_id, payload)
    return made


def _facts(facts: Sequence[Fact]) -> Table:
    made = table("at", "lane", "seq", "type", "payload", title="Facts")
    for fact in facts:
        made.add_row(
            moment(fact.created_at),
            fact.lane.label,
            str(fact.seq),
            fact.type,
            Text(_short(json.dumps(fact.payload, ensure_ascii=False))),
        )
    return made


def _short(text: str) -> str:
    return text if len(text) <= _PAYLOAD_CHARS else text[: _PAYLOAD_CHARS - 1] + "…"


# --- steps -------------------------------------------------------------------------------------------


def step_json(step: StepRecord, outputs: bool) -> dict[str, Any]:
    """A step, for a program; its output only where it was asked for."""
    record = attrs.asdict(step)
    if not outputs:
        del record["output"]
    return record


def show_steps(steps: Sequence[StepRecord], *, outputs: bool) -> None:
    """One line per step."""
    made = table("step", "state", "attempt", "tries", "claimed", "seconds", "function", "result")
    for one in steps:
        seconds = (
            "-" if one.finished_at is None else f"{(one.finished_at - one.claimed_at).total_seconds():.3f}"
        )
        result = Text(_error_words(one.error), style="red")
        if outputs and one.state in ("completed", "skipped"):
            result = Text(_short(json.dumps(one.output, ensure_ascii=False)))
        made.add_row(
            Text(one.key),
            state(one.state),
            str(one.attempt),
            str(one.tries),
            moment(one.claimed_at),
            seconds,
            Text(one.function),
            result,
        )
    console().print(made)


def _error_words(error: Any) -> str:
    words = error if isinstance(error, dict) else {}
    return ": ".join(str(words[key]) for key in ("error_type", "message") if words.get(key))


# --- lanes -------------------------------------------------------------------------------------------


def lane_json(lane: LaneStatus) -> dict[str, Any]:
    """A lane, for a program."""
    return {**attrs.asdict(lane), "lane": lane.lane.label}


def show_lanes(lanes: Sequence[LaneStatus]) -> None:
    """One line per lane."""
    made = table("run", "lane", "receiver", "state", "rank", "age", "facts", "attempts", "reason")
    for lane in lanes:
        if lane.blocked:
            word = Text("blocked", style="red")
        elif lane.leased:
            word = Text("delivering", style="cyan")
        else:
            due_in_s = lane.due_in_s or 0.0
            word = Text("due" if due_in_s <= 0 else f"again in {due_in_s:.0f} s")
        out = "" if lane.through is None else f", out {lane.first}-{lane.through}"
        made.add_row(
            lane.run_id,
            lane.lane.label,
            lane.receiver or "(own)",
            word,
            str(lane.rank),
            "-" if lane.age_s is None else f"{lane.age_s:.1f} s",
            f"{lane.first}-{lane.last}{out}",
            str(lane.attempts),
            Text(_short(lane.reason or "")),
        )
    console().print(made)


def journal_json(entry: JournalEntry) -> dict[str, Any]:
    """An entry of the journal, for a program."""
    return {**attrs.asdict(entry), "lane": entry.lane.label}


def show_journal(entries: Sequence[JournalEntry]) -> None:
    """One line per entry."""
    made = table("at", "run", "lane", "verb", "facts", "by", "because")
    for entry in entries:
        made.add_row(
            moment(entry.at),
            entry.run_id,
            entry.lane.label,
            entry.verb,
            f"{entry.first}-{entry.through}",
            entry.by or "-",
            Text(_short(entry.because or "")),
        )
    console().print(made)


# --- many runs ---------------------------------------------------------------------------------------


def show_runs(runs: Sequence[RunStatus]) -> None:
    """One line per run."""
    made = table("run", "play", "status", "attempt", "created", "finished", "lane", "labels")
    for run in runs:
        made.add_row(
            run.run_id,
            run.play,
            state(run.status),
            str(run.attempt),
            moment(run.created_at),
            moment(run.finished_at),
            lane_state(run),
            " ".join(f"{key}={value}" for key, value in sorted((run.labels or {}).items())),
        )
    console().print(made)


# --- what hosts share --------------------------------------------------------------------------------


def show_rates(scopes: Sequence[RateScope]) -> None:
    """One line per rate scope."""
    made = table(
        "scope", "per s", "burst", "in flight", "waiting", "state", "used", "measured/s", "refused at"
    )
    for one in scopes:
        blocked = "" if one.blocked_s is None else f" {one.blocked_s:.0f} s more"
        most = "" if one.max_in_flight is None else f" of {one.max_in_flight}"
        made.add_row(
            one.name,
            "-" if one.per_s is None else f"{one.per_s:g}",
            f"{one.burst:g}",
            f"{one.in_flight}{most}",
            str(one.waiting),
            state(one.state) + blocked,
            f"{one.used:g}",
            f"{one.measured_per_s:.2f}",
            "-" if one.refused_per_s is None else f"{one.refused_per_s:.2f}/s {moment(one.refused_at)}",
        )
    console().print(made)


def show_circuits(circuits: Sequence[Circuit]) -> None:
    """One line per circuit."""
    made = table("circuit", "state", "failures", "openings", "changed", "latest error")
    for one in circuits:
        left = "" if one.retry_after_s is None else f" {one.retry_after_s:.0f} s more"
        made.add_row(
            one.name,
            circuit_state(one.state) + left,
            f"{one.failures} of {one.threshold}",
            str(one.openings),
            moment(one.updated_at),
            Text(_short(one.error or ""), style="red"),
        )
    console().print(made)


def circuit_state(word: str) -> Text:
    """A circuit's state in its colour: an open circuit is bad news, an open rate scope is not."""
    return Text(word, style={"open": "red", "half_open": "yellow"}.get(word, "green"))


# --- limits ------------------------------------------------------------------------------------------


def show_limits(limits: Sequence[Limit]) -> None:
    """A line per limit."""
    lines = table("limit", "of", "at most", "running")
    for one in limits:
        kind = "each key" if one.kind == "key" else one.kind
        lines.add_row(kind, one.name, str(one.max_running), "-" if one.running is None else str(one.running))
    console().print(lines)


def show_sandboxes(sandboxes: Sequence[SandboxRecord]) -> None:
    """One line per sandbox."""
    lines = table("sandbox", "provider", "state", "run", "attempt", "created", "failures", "why")
    for one in sandboxes:
        why = one.block_reason or one.last_error or ""
        lines.add_row(
            one.sandbox,
            one.provider,
            one.state,
            one.run_id,
            str(one.attempt),
            moment(one.created_at),
            str(one.failures),
            Text(_short(why), style="red"),
        )
    console().print(lines)


def show_adoption(preview: Preview) -> None:
    """What is open in an older generation's table."""
    lines = table("open", "proven to be gone", "to copy", "copied", "leased", "malformed")
    counts = (
        preview.open,
        preview.proven,
        preview.to_copy,
        preview.under_way,
        preview.leased,
        preview.malformed,
    )
    lines.add_row(*map(str, counts))
    console().print(lines)
    for fault in preview.faults or ():
        console().print(Text(f"malformed: {fault}", style="red"))
    if not preview.indexed:
        console().print("no index begins with status: each look reads the whole table")


def show_compute(records: Sequence[ComputeRecord]) -> None:
    """One line per record."""
    lines = table("recorded", "run", "attempt", "kind", "provider", "organisation", "seconds")
    for one in records:
        lines.add_row(
            moment(one.recorded_at),
            one.run_id,
            str(one.attempt),
            one.kind,
            one.provider,
            one.org_id or "-",
            f"{one.seconds:.3f}",
        )
    console().print(lines)


# --- schedules ---------------------------------------------------------------------------------------


def timing(schedule: ScheduleStatus) -> str:
    """When it fires, in words."""
    if schedule.every_s is not None:
        return f"every {schedule.every_s} s"
    return f"{schedule.cron} {schedule.timezone}"


def show_schedules(schedules: Sequence[ScheduleStatus]) -> None:
    """One line per schedule."""
    made = table("schedule", "play", "fires", "missed", "next", "last", "run")
    for one in schedules:
        made.add_row(
            one.name,
            one.play,
            timing(one),
            one.missed,
            moment(one.next_fire_at) if one.paused_at is None else Text("paused", style="yellow"),
            moment(one.last_fire_at),
            one.last_run_id or "-",
        )
    console().print(made)


def show_schedule(schedule: ScheduleStatus, fires: Sequence[Fire]) -> None:
    """A schedule and what it has fired, for people."""
    out = console()
    summary = Table.grid(padding=(0, 2))
    summary.add_column(style="dim")
    summary.add_column(overflow="fold")
    for name, value in (
        ("schedule", Text(schedule.name, style="bold")),
        ("play", schedule.play),
        ("input", _short(json.dumps(schedule.input, ensure_ascii=False))),
        ("fires", timing(schedule)),
        ("missed", schedule.missed),
        ("next", moment(schedule.next_fire_at)),
        ("paused", moment(schedule.paused_at)),
        ("release", schedule.release_id or "-"),
    ):
        summary.add_row(name, value)
    out.print(summary)
    if fires:
        made = table("at", "seconds late", "run", "status", title="Fires")
        for fire in fires:
            late_s = (fire.fired_at - fire.fire_at).total_seconds()
            lost = Text("lost", style="red")
            made.add_row(
                moment(fire.fire_at),
                f"{late_s:.3f}",
                fire.run_id,
                lost if fire.status is None else state(fire.status),
            )
        out.print()
        out.print(made)
