"""What the demo says: live progress, and the table at the end.

Owns every check of the demo and its look. It asks nothing: it is given what was counted.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import attrs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from runtime.demo_hosts import Lags
from sql.reconcile import Account
from sql.status import Terminal

# Without a terminal, progress is a line every so often.
_LINE_EVERY_S = 2.0
_MOST_MISMATCHES = 10


# --- while it runs -----------------------------------------------------------------------------------


class Screen:
    """Live progress: a bar on a terminal, plain lines elsewhere. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._said_at = 0.0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("audits"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=console,
                transient=True,
            )

    def __enter__(self) -> Screen:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def event(self, text: str) -> None:
        """Something that happened once."""
        elapsed_s = time.monotonic() - self._started
        self._console.print(Text(f"{elapsed_s:5.1f} s  {text}"))

    def progress(self, done: int, total: int, running: Mapping[str, int]) -> None:
        """How many audits have ended, and how many run where."""
        where = "  ".join(f"{name}: {count} running" for name, count in running.items())
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=where)
            return
        now = time.monotonic()
        if now - self._said_at >= _LINE_EVERY_S:
            self._said_at = now
            self.event(f"{done} of {total} audits ended  {where}")


# --- at the end --------------------------------------------------------------------------------------


@attrs.frozen
class Check:
    """One thing that must hold."""

    claim: str
    held: bool


@attrs.frozen(kw_only=True)
class Counted:
    """Everything that was counted at the end. ``in_flight``: runs that the killed host held when it died."""

    submitted: int
    rounds: int
    distributions: int
    elapsed_s: float
    killed: str
    in_flight: frozenset[str]
    accounts: Sequence[Account]
    terminals: Sequence[Terminal]
    lags: Lags
    measured_hosts: int
    stopped_in_order: bool


@attrs.frozen
class Report:
    """The figures of one demo, its checks, and how to look at one run."""

    figures: dict[str, Any]
    checks: tuple[Check, ...]
    mismatches: tuple[str, ...]
    example: str

    @property
    def held(self) -> bool:
        """Whether every check held."""
        return all(check.held for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        """The report for a program."""
        return {
            **self.figures,
            "mismatches": list(self.mismatches),
            "checks": {check.claim: check.held for check in self.checks},
            "held": self.held,
            "example": self.example,
        }


def report(counted: Counted, example: str) -> Report:
    """Check what was counted."""
    accounts = counted.accounts
    outputs = [one.payload["output"] for one in counted.terminals if one.status == "completed"]
    outcomes = Counter(one.status for one in accounts)
    taken_over = sum(1 for one in accounts if one.attempts_expired)
    facts, applied = sum(one.facts for one in accounts), sum(one.applied for one in accounts)
    lost, duplicated = sum(one.lost for one in accounts), sum(one.duplicated for one in accounts)
    # Every round reads the same files: a mismatch is one, however often it was found.
    mismatches = sorted({f"{one['distribution']}: {text}" for one in outputs for text in one["mismatches"]})
    by_name = {one["distribution"]: one for one in outputs}
    p50, p99 = counted.lags.quantile_s(0.5), counted.lags.quantile_s(0.99)
    figures: dict[str, Any] = {
        "runs": counted.submitted,
        "rounds": counted.rounds,
        "distributions": counted.distributions,
        "outcomes": dict(sorted(outcomes.items())),
        "files_verified": sum(one["verified"] for one in outputs),
        "files_verified_per_round": sum(one["verified"] for one in by_name.values()),
        "files_skipped_per_round": sum(one["skipped"] for one in by_name.values()),
        "without_record": sorted(name for name, one in by_name.items() if not one["has_record"]),
        "bytes_read": sum(one["bytes"] for one in outputs),
        "files_mismatched": sum(one["mismatched"] for one in by_name.values()),
        "killed_host": counted.killed,
        "in_flight_at_kill": len(counted.in_flight),
        "taken_over": taken_over,
        "attempts": sum(one.attempts_ended for one in accounts),
        "facts": facts,
        "facts_delivered": applied,
        "facts_lost": lost,
        "facts_duplicated": duplicated,
        "delivery_p50_s": p50,
        "delivery_p99_s": p99,
        "delivery_measured_facts": counted.lags.count,
        "delivery_measured_hosts": counted.measured_hosts,
        "elapsed_s": round(counted.elapsed_s, 3),
    }
    in_flight = [one for one in accounts if one.run_id in counted.in_flight]
    checks = (
        Check(
            "every run ended exactly once",
            len(accounts) == counted.submitted and all(one.terminals == 1 for one in accounts),
        ),
        Check("every run completed", outcomes["completed"] == counted.submitted),
        Check("every distribution was audited", len(by_name) == counted.distributions),
        Check(
            "a host died with runs in flight, and others took them over",
            bool(in_flight) and taken_over > 0 and all(one.status == "completed" for one in in_flight),
        ),
        Check(
            "attempts are numbered without a gap",
            all(one.attempts_ended == one.attempt for one in accounts),
        ),
        Check(
            "every fact was delivered, in order and once",
            facts == applied and not lost and not duplicated and all(one.unbroken for one in accounts),
        ),
        Check("the other hosts stopped in order", counted.stopped_in_order),
    )
    return Report(figures, checks, tuple(mismatches), example)


def show(found: Report, console: Console) -> None:
    """The table at the end."""
    figures = found.figures
    rows = Table(title="Audit of the installed distributions", title_justify="left", box=None, pad_edge=False)
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in _rows(figures):
        rows.add_row(name, value)
    console.print()
    console.print(rows)
    if found.mismatches:
        console.print()
        console.print("Findings: files that are not what their RECORD says", style="bold")
        for line in found.mismatches[:_MOST_MISMATCHES]:
            console.print(Text(f"  {line}"))
        if len(found.mismatches) > _MOST_MISMATCHES:
            console.print(f"  and {len(found.mismatches) - _MOST_MISMATCHES} more")
        console.print("This says something about the environment; it is no failure of the demo.", style="dim")
    console.print()
    for check in found.checks:
        console.print(
            Text.assemble(
                ("  held  ", "green") if check.held else ("  FAILED", "bold red"), f" {check.claim}"
            )
        )
    console.print()
    console.print("Look at a run that was taken over:", style="bold")
    console.print(Text(f"  {found.example}"), soft_wrap=True)


def _rows(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    outcomes = ", ".join(f"{count:,} {status}" for status, count in figures["outcomes"].items())
    per_round = f"{figures['files_verified_per_round']:,} in each of {figures['rounds']} rounds"
    measured = f"{figures['delivery_measured_facts']:,} facts, /metrics of {figures['delivery_measured_hosts']} hosts"
    rows = [
        ("runs", f"{outcomes} ({figures['distributions']} distributions, {figures['rounds']} rounds)"),
        (
            "files verified",
            f"{figures['files_verified']:,} ({per_round}), {figures['bytes_read'] / 1e9:.1f} GB read",
        ),
        ("files without a hash", f"{figures['files_skipped_per_round']:,} in each round, skipped"),
        ("mismatches", f"{figures['files_mismatched']:,}"),
        ("killed", f"{figures['killed_host']} with {figures['in_flight_at_kill']} runs in flight"),
        ("taken over", f"{figures['taken_over']:,} runs ({figures['attempts']:,} attempts in all)"),
        ("facts delivered", f"{figures['facts_delivered']:,} of {figures['facts']:,}"),
        ("lost, duplicated", f"{figures['facts_lost']}, {figures['facts_duplicated']}"),
        (
            "commit to delivery",
            f"p50 {_ms(figures['delivery_p50_s'])}, p99 {_ms(figures['delivery_p99_s'])} (histograms: {measured})",
        ),
        ("took", f"{figures['elapsed_s']:.1f} s"),
    ]
    if figures["without_record"]:
        rows.insert(3, ("without a RECORD", ", ".join(figures["without_record"])))
    return rows


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
