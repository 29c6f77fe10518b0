"""What a scenario found: figures, the rounds behind them, and whether the work was all there.

Owns the arithmetic over rounds and samples, and how a report looks. It measures nothing.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table

from sql.errors import RunlaneError

# Where no terminal says how wide it is, lines are for grep and must not be cut.
_WIDE = 160


class BenchFailed(RunlaneError):
    """A scenario could not be measured: a process ended early, or nothing happened in time."""


@attrs.frozen
class Figure:
    """One number with its unit. ``least`` or ``most`` is the goal it is held against, if it has one."""

    name: str
    value: float | None
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal or a value."""
        if self.value is None or (self.least is None and self.most is None):
            return None
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )

    @property
    def goal(self) -> str:
        """The goal as people write it."""
        if self.least is not None:
            return f"≥ {shown(self.least)}"
        return "" if self.most is None else f"≤ {shown(self.most)}"


@attrs.frozen(kw_only=True)
class Report:
    """The answer of one scenario.

    ``rounds`` are the raw figures, oldest first. ``checks`` say what had to hold of the data afterwards: a figure of
    work that was lost or doubled is worth nothing.
    """

    scenario: str
    figures: Sequence[Figure]
    rounds: Sequence[Mapping[str, Any]] = ()
    checks: Mapping[str, bool] = attrs.field(factory=dict)
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    notes: Sequence[str] = ()

    @property
    def sound(self) -> bool:
        """Whether every check held."""
        return all(self.checks.values())

    def value(self, name: str) -> float | None:
        """The figure of that name."""
        return next(figure.value for figure in self.figures if figure.name == name)


def median(rounds: Sequence[Mapping[str, Any]], name: str) -> float:
    """The median of one figure over the rounds."""
    return statistics.median(float(one[name]) for one in rounds)


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all do not exceed (nearest rank)."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def all_checks(rounds: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    """Each check of the rounds; it holds if it held in every one."""
    names = {name: None for one in rounds for name in one.get("checks", {})}
    return {
        name: all(one["checks"][name] for one in rounds if name in one.get("checks", {})) for name in names
    }


# --- how it looks ------------------------------------------------------------------------------------


def shown(value: float | None) -> str:
    """A number as people read it: three digits that count, thousands apart."""
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def console(*, stderr: bool = False) -> Console:
    """A console that cuts nothing when its output goes to a file or a pipe."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDE)


def show(report: Report) -> None:
    """The report as a table."""
    settings = ", ".join(f"{name}={value}" for name, value in report.settings.items())
    table = Table(title=f"{report.scenario} ({settings})", title_justify="left")
    for column in ("figure", "value", "unit", "goal", ""):
        table.add_column(column, justify="right" if column == "value" else "left")
    for figure in report.figures:
        words = {None: "", True: "[green]met", False: "[red]missed"}
        table.add_row(figure.name, shown(figure.value), figure.unit, figure.goal, words[figure.met])
    out = console()
    out.print(table)
    for check, held in report.checks.items():
        out.print(f"{'[green]ok    ' if held else '[red]FAILED'}[/] {check}")
    for note in report.notes:
        out.print(f"- {note}", soft_wrap=True)


def show_json(report: Report) -> None:
    """The report as one line of JSON."""
    value = {
        "scenario": report.scenario,
        "figures": {figure.name: figure.value for figure in report.figures},
        "units": {figure.name: figure.unit for figure in report.figures},
        "goals": {figure.name: figure.met for figure in report.figures if figure.met is not None},
        "checks": dict(report.checks),
        "rounds": [dict(one) for one in report.rounds],
        "settings": dict(report.settings),
        "notes": list(report.notes),
        "python": platform.python_version(),
    }
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
