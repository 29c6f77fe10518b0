"""Every scenario of the benchmarks at a tiny size: its figures are there and plausible, and nothing is left behind.

How fast the machine is belongs to the benchmarks themselves; what is tested here is that they measure at all.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bench import (
    bridge,
    cancel,
    children,
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
from bench.cli import cli
from bench.figures import BenchFailed, Figure, Report, all_checks, median, quantile, shown
from tests.support import servers

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tidy(dsn: str) -> Iterator[str]:
    """The server, on which a scenario must leave neither schema nor database nor session."""
    yield dsn
    (row,) = servers.ask(
        dsn,
        """SELECT (SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'bench\\_%') AS schemas,
                  (SELECT count(*) FROM pg_database WHERE datname LIKE 'runlane\\_bench\\_%') AS databases,
                  (SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'bench%') AS sessions""",
    )
    assert dict(row) == {"schemas": 0, "databases": 0, "sessions": 0}


def figures(report: Report) -> dict[str, float]:
    """The figures by name, each a finite number that is not negative."""
    found = {figure.name: figure.value for figure in report.figures}
    assert all(value is not None and math.isfinite(value) and value >= 0 for value in found.values()), found
    return {name: value for name, value in found.items() if value is not None}


# --- scenarios ---------------------------------------------------------------------------------------


async def test_throughput_compares_a_host_with_the_kernel(tidy: str) -> None:
    report = await throughput.run(tidy, runs=60, rounds=2, slots=50, submit=20, warmup=10)
    found = figures(report)
    assert report.sound, report.checks
    assert len(report.checks) == 6
    assert len(report.rounds) == 2
    assert found["host, whole lifecycles"] > 0
    assert found["kernel, whole lifecycles"] > 0
    # Two at least, the claim or the end and the delivery: else something was not counted.
    assert found["host, updates of a run's row"] >= 2
    assert found["kernel, updates of a run's row"] >= 2
    ratios = [one["host_runs_per_s"] / one["kernel_runs_per_s"] for one in report.rounds]
    assert found["host / kernel"] == pytest.approx(sum(ratios) / 2)


async def test_kernel_runs_each_stage_alone_and_all_at_once(tidy: str) -> None:
    report = await kernel.run(tidy, runs=700, rounds=1, inline=0.4, warmup=10)
    found = figures(report)
    assert report.sound, report.checks
    assert min(found.values()) > 0
    # So much went through claim that a share of none or all would show.
    assert report.rounds[0]["inline"] == pytest.approx(0.4, abs=0.02)


async def test_drain_empties_a_queue(tidy: str) -> None:
    report = await drain.run(tidy, runs=60, rounds=1, slots=20)
    found = figures(report)
    assert report.sound, report.checks
    assert found["drained"] > 0
    assert found["delivered after the last terminal"] < 5


@pytest.mark.timeout(120)
async def test_fairness_compares_waits_with_and_without_a_long_queue(tidy: str) -> None:
    report = await fairness.run(tidy, flood=600, orgs=5, each=4, rounds=1, slots=4, work_ms=5.0, load=0.3)
    found = figures(report)
    assert report.sound, report.checks
    for name in ("burst", "stream"):
        beside, alone = (
            found[f"{name}: others' p99 wait with it"],
            found[f"{name}: others' p99 wait without it"],
        )
        assert found[f"{name}: with / without"] == pytest.approx(beside / alone)
    # Behind the whole queue, it would be hundreds of milliseconds.
    assert found["burst: others' p99 wait with it"] < 600 / 4 * 5.0


async def test_growth_compares_calls_with_empty_tables(tidy: str) -> None:
    report = await growth.run(tidy, delivered=[30, 300], pending=60, rounds=2, analyse=True, warm=0)
    found = figures(report)
    work, *bounds = report.checks.items()
    assert work == ("every run was claimed, delivered and ended once", True)
    assert len(bounds) == 3
    assert min(found.values()) > 0
    # A ratio over its bound fails the check of its history, whatever is small enough in such a short time.
    for case, (_, held) in zip(("30 delivered", "300 delivered", "60 pending"), bounds, strict=True):
        ratios = [one["ratio"] for one in report.rounds if one["held"] and one["case"] == case]
        assert len(ratios) == 10
        assert held is (max(ratios) <= growth.MOST)


async def test_cancel_is_seen_whoever_asks(tidy: str) -> None:
    report = await cancel.run(tidy, samples=3, held=4, gap_s=0.0)
    found = figures(report)
    assert len(found) == 9
    work, *bounds = report.checks.items()  # how fast the machine is, is not judged here
    assert work == ("every cancelled run is cancelled", True)
    assert len(bounds) == 3
    assert 0 < max(found.values()) < 30_000


async def test_latency_takes_its_steps_in_order(tidy: str) -> None:
    report = await latency.run(tidy, samples=10, gap_s=0.01)
    found = figures(report)
    assert report.sound, report.checks
    for share in ("p50", "p99"):
        started, ended, delivered = (
            found[f"submit → {step}, {share}"]
            for step in ("handler started", "durable terminal", "in the ledger")
        )
        assert 0 < started < ended < delivered < 10_000


async def test_delivery_compares_ledgers(tidy: str) -> None:
    cases = [
        case for case in delivery.CASES if case.name.startswith(("in the", "deliveries, 1", "HTTP 8x200, 4"))
    ]
    report = await delivery.run(tidy, runs=40, rounds=1, seconds=0.2, cases=cases)
    found = figures(report)
    assert report.sound, report.checks
    assert len(found) == 9
    assert all(value > 0 for value in found.values())


async def test_idle_counts_statements_and_wakeups(tidy: str) -> None:
    report = await idle.run(tidy, seconds=3.0, settle_s=0.5)
    found = figures(report)
    # In so short a time the start of the host still shows in the server's count, so its goal and check do not apply.
    assert found["statements, counted by the host"] < 60
    assert 0 < found["wake-ups of the loop"] < 60_000
    assert found["task steps"] >= found["wake-ups of the loop"]


@pytest.mark.timeout(120)
async def test_takeover_hands_everything_over(tidy: str) -> None:
    report = await takeover.run(tidy, runs=12, rounds=1, lease_s=1.0)
    found = figures(report)
    assert report.sound, report.checks
    assert len(report.checks) == 9
    # No release comes before the end of the grace period, no takeover before the lease's end.
    assert found["SIGTERM → every lease is back"] >= 0.9
    assert found["SIGKILL → all claimed by the other"] > found["  after the last lease ended"] / 1000


async def test_steps_measures_three_shapes(tidy: str) -> None:
    report = await steps.run(tidy, steps=60, rounds=1, runs=5, concurrency=4, single=5)
    found = figures(report)
    assert report.sound, report.checks
    assert report.rounds[0]["made"] == 5 + 60 + 60 + 5
    assert min(found.values()) > 0


async def test_detached_measures_results_and_heartbeats(tidy: str) -> None:
    report = await detached.run(
        tidy, samples=5, gap_s=0.01, runners=5, seconds=2.0, load_per_s=20.0, rounds=1
    )
    found = figures(report)
    assert report.sound, report.checks
    assert min(found.values()) > 0
    assert found["the load"] == pytest.approx(20.0, rel=0.5)


async def test_bridge_measures_three_ways(tidy: str) -> None:
    report = await bridge.run(tidy, queries=50, rounds=1)
    assert set(report.rounds[0]) == {"plain", "each", "all"}
    assert all(0 < us < 1e6 for us in report.rounds[0].values())


# --- processes ---------------------------------------------------------------------------------------


async def test_a_child_that_fails_says_why(tidy: str) -> None:
    with pytest.raises(BenchFailed, match=r"child kernel ended with exit code 1.*KeyError"):
        await children.measured("kernel", {"dsn": tidy})


def test_plain_asyncio_stays_plain() -> None:
    program = "import sys, bench.child, bench.kernel, bench.bridge; sys.exit('trio_asyncio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_json_is_one_line_with_everything(tidy: str) -> None:
    done = CliRunner().invoke(cli, ["bridge", "--queries", "20", "--rounds", "1", "--json", "--dsn", tidy])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["scenario"] == "bridge"
    assert answer["settings"] == {"queries": 20, "rounds": 1}
    assert set(answer["units"].values()) == {"µs/query", "µs"}
    assert set(answer["figures"]) == set(answer["units"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_scenario_leaves_nothing_behind(tidy: str, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "bench", "takeover", "--runs", "4", "--rounds", "50", "--dsn", tidy]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        hosts: set[int] = set()
        while not hosts and time.monotonic() < deadline:
            hosts = {child for child in children_of(process.pid) if "host" in command_of(child)}
            time.sleep(0.02)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert hosts
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in hosts)


def children_of(pid: int) -> list[int]:
    """The children of all threads of a process: trio starts them from one of its own."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, listing.read_text().split())
    return found


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


@pytest.mark.timeout(120)
def test_the_embedded_server_is_gone_afterwards(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        tmp_path = Path("/tmp")
    before = set(tmp_path.glob("runlane-bench-*"))
    environ = {name: value for name, value in os.environ.items() if name != "RUNLANE_DSN"}
    done = subprocess.run(
        [sys.executable, "-m", "bench", "bridge", "--queries", "10", "--rounds", "1"],
        cwd=ROOT,
        env=environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "plain asyncio" in done.stdout
    assert set(tmp_path.glob("runlane-bench-*")) <= before


# --- figures -----------------------------------------------------------------------------------------


def test_quantiles_are_samples() -> None:
    assert quantile([5.0], 0.99) == 5.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert quantile([float(number) for number in range(1, 201)], 0.99) == 198.0
    assert quantile([3.0, 1.0], 1.0) == 3.0


def test_one_bad_round_fails_a_check() -> None:
    rounds: list[dict[str, Any]] = [
        {"x": 1.0, "checks": {"a": True, "b": True}},
        {"x": 5.0, "checks": {"a": False}},
        {"x": 2.0},
    ]
    assert median(rounds, "x") == 2.0
    assert all_checks(rounds) == {"a": False, "b": True}
    assert not Report(scenario="s", figures=[], checks=all_checks(rounds)).sound


@pytest.mark.parametrize(
    ("figure", "met"),
    [
        (Figure("f", 1.0, "s"), None),
        (Figure("f", None, "s", most=1.0), None),
        (Figure("f", 0.6, "", least=0.6), True),
        (Figure("f", 0.59, "", least=0.6), False),
        (Figure("f", 5.0, "ms", most=5.0), True),
        (Figure("f", 5.1, "ms", most=5.0), False),
    ],
)
def test_a_goal_is_met_or_missed(figure: Figure, met: bool | None) -> None:
    assert figure.met is met


def test_numbers_keep_three_digits() -> None:
    assert [shown(value) for value in (None, 0.0, 0.6134, 42.52, 139.4, 11045.3)] == [
        "-", "0", "0.613", "42.5", "139", "11,045",
    ]  # fmt: skip
