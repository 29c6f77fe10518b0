"""The demo: its audit finds what is wrong, its checks fail when they must, and it leaves nothing behind."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from rich.console import Console

from runtime import RuntimeConfig, demo_report
from runtime.demo import Demo
from runtime.demo_audit import Findings, installed, record_of, turns, verify
from runtime.demo_hosts import HostProcess, Hosts, Lags
from sql import status
from sql.reconcile import Account
from sql.status import Terminal
from tests.support import hosting
from tests.support.servers import temporary_folder

STARTED = re.compile(r"started (demo-\d) pid (\d+)")


# --- the audit ---------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path in which distributions can be installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, name: str, files: dict[str, bytes], *, record: bool = True) -> None:
    """A distribution with these files, and a RECORD that tells the truth about them."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    rows = []
    for path, content in files.items():
        (site / path).parent.mkdir(exist_ok=True)
        (site / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append([path, f"sha256={digest}", str(len(content))])
    rows.append([f"{info.name}/RECORD", "", ""])
    if record:
        with (info / "RECORD").open("w", newline="") as file:
            csv.writer(file).writerows(rows)


def audited(name: str) -> Findings:
    _, entries = record_of(name)
    assert entries is not None
    return verify(entries)


def test_a_sound_distribution_verifies(site: Path) -> None:
    install(site, "sound", {"sound/a.py": b"a" * 3_000_000, "sound/b, c.py": b""})
    assert audited("sound") == Findings(verified=2, skipped=1, bytes=3_000_000, mismatches=[])


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda file: file.write_bytes(b"xyz"), "pkg/a.py has another sha256 than its RECORD says"),
        (lambda file: file.write_bytes(b"abcd"), "pkg/a.py has 4 bytes, its RECORD says 3"),
        (lambda file: file.unlink(), "pkg/a.py is missing"),
        (lambda file: (file.unlink(), file.mkdir()), "pkg/a.py cannot be read: Is a directory"),
    ],
)
def test_every_kind_of_damage_is_found(site: Path, damage: Callable[[Path], Any], finding: str) -> None:
    install(site, "pkg", {"pkg/a.py": b"abc", "pkg/b.py": b"def"})
    damage(site / "pkg/a.py")
    found = audited("pkg")
    assert found.mismatches == [finding]
    assert found.verified == 1


def test_a_distribution_without_a_record_has_nothing_to_verify(site: Path) -> None:
    install(site, "bare", {}, record=False)
    assert record_of("bare") == ("1.0", None)


def test_installed_names_each_distribution_once(site: Path) -> None:
    install(site, "Twice", {})
    (site / "twice-0.9.dist-info").mkdir()
    (site / "twice-0.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: twice\nVersion: 0.9\n")
    (site / "left_behind-1.0.dist-info").mkdir()
    names = installed()
    assert [name.lower() for name in names].count("twice") == 1
    assert "pytest" in names
    assert not any("left" in name for name in names)


def test_turns_are_small_and_lose_nothing(site: Path) -> None:
    install(site, "many", {f"many/{number}.py": b"" for number in range(120)})
    _, entries = record_of("many")
    assert entries is not None
    portions = list(turns(entries))
    assert [len(portion) for portion in portions] == [50, 50, 21]
    assert [entry for portion in portions for entry in portion] == entries


# --- delivery lags -----------------------------------------------------------------------------------

METRICS = """\
# TYPE runlane_delivery_lag_seconds histogram
runlane_delivery_lag_seconds_bucket{type="run.created",le="0.01"} 50.0
runlane_delivery_lag_seconds_bucket{type="run.created",le="0.1"} 90.0
runlane_delivery_lag_seconds_bucket{type="run.created",le="+Inf"} 100.0
runlane_delivery_lag_seconds_bucket{type="run.log",le="0.01"} 50.0
runlane_delivery_lag_seconds_bucket{type="run.log",le="0.1"} 90.0
runlane_delivery_lag_seconds_bucket{type="run.log",le="+Inf"} 100.0
runlane_claim_lag_seconds_bucket{le="+Inf"} 7.0
"""


def test_lags_are_interpolated_within_their_bucket() -> None:
    lags = Lags.parsed(METRICS)
    assert lags.count == 200
    assert lags.quantile_s(0.25) == pytest.approx(0.005)
    assert lags.quantile_s(0.7) == pytest.approx(0.055)
    assert lags.quantile_s(0.99) == pytest.approx(0.1)  # beyond the last bound nothing more is known
    assert Lags().quantile_s(0.5) is None


# --- the checks --------------------------------------------------------------------------------------

OUTPUT = {
    "distribution": "pkg",
    "version": "1",
    "has_record": True,
    "verified": 3,
    "skipped": 1,
    "bytes": 10,
    "mismatched": 0,
    "mismatches": [],
}


def account(**changes: Any) -> Account:
    sound = Account(
        run_id="r",
        status="completed",
        attempt=2,
        attempts_ended=2,
        attempts_expired=1,
        terminals=1,
        lifecycle=7,
        logged=1,
        lifecycle_applied=7,
        logged_applied=1,
        unbroken=True,
    )
    return attrs.evolve(sound, **changes)


def counted(**changes: Any) -> demo_report.Counted:
    sound = demo_report.Counted(
        submitted=1,
        rounds=1,
        distributions=1,
        elapsed_s=1.0,
        killed="demo-1 pid 1",
        in_flight=frozenset({"r"}),
        accounts=[account()],
        terminals=[Terminal("r", "completed", {"output": OUTPUT})],
        lags=Lags(),
        measured_hosts=2,
        stopped_in_order=True,
    )
    return attrs.evolve(sound, **changes)


def broken(found: demo_report.Counted) -> list[str]:
    report = demo_report.report(found, "status r")
    failed = [check.claim for check in report.checks if not check.held]
    assert report.held is not bool(failed)
    return failed


def test_every_check_holds_for_a_sound_count() -> None:
    assert broken(counted()) == []


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({"submitted": 2}, "every run ended exactly once"),
        ({"accounts": [account(terminals=2)]}, "every run ended exactly once"),
        ({"accounts": [account(status="failed")]}, "every run completed"),
        ({"distributions": 2}, "every distribution was audited"),
        ({"in_flight": frozenset()}, "a host died with runs in flight, and others took them over"),
        (
            {"accounts": [account(attempts_expired=0)]},
            "a host died with runs in flight, and others took them over",
        ),
        ({"accounts": [account(attempts_ended=1)]}, "attempts are numbered without a gap"),
        ({"accounts": [account(lifecycle_applied=6)]}, "every fact was delivered, in order and once"),
        ({"accounts": [account(logged_applied=0)]}, "every fact was delivered, in order and once"),
        ({"accounts": [account(lifecycle_applied=8)]}, "every fact was delivered, in order and once"),
        (
            {"accounts": [account(lifecycle_applied=6), account(lifecycle_applied=8)], "submitted": 2},
            "every fact was delivered, in order and once",
        ),
        ({"accounts": [account(unbroken=False)]}, "every fact was delivered, in order and once"),
        ({"stopped_in_order": False}, "the other hosts stopped in order"),
    ],
)
def test_each_check_can_fail(changes: dict[str, Any], claim: str) -> None:
    assert claim in broken(counted(**changes))


def test_a_mismatch_is_a_finding_and_no_failure() -> None:
    output = OUTPUT | {"mismatched": 1, "mismatches": ["pkg/a.py is missing"]}
    found = counted(terminals=[Terminal("r", "completed", {"output": output})])
    report = demo_report.report(found, "status r")
    assert report.held
    assert report.mismatches == ("pkg: pkg/a.py is missing",)
    said = io.StringIO()
    demo_report.show(report, Console(file=said, width=200))
    assert "pkg: pkg/a.py is missing" in said.getvalue()


# --- progress ----------------------------------------------------------------------------------------


async def test_progress_names_a_host_once_it_has_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def no_runs(*_: object) -> dict[str, Any]:
        return {}

    class Alive:
        pid = 7

        def poll(self) -> None:
            return None

    shown: list[list[str]] = []
    screen: Any = SimpleNamespace(progress=lambda done, total, where: shown.append(list(where)))
    monkeypatch.setattr(status, "read_runs", no_runs)
    process: Any = Alive()
    hosts = Hosts(RuntimeConfig(), tmp_path)
    hosts.all = [
        HostProcess("demo-1", process, tmp_path, health="http://h"),
        HostProcess("demo-2", process, tmp_path),
    ]
    session: Any = None
    await Demo(RuntimeConfig(), hosts, screen, 1.0, "status", distributions=[])._look(session)
    assert shown == [["demo-1"]]


# --- the whole ---------------------------------------------------------------------------------------


def test_the_demo_holds_on_another_server_and_can_be_run_again(dsn: str, schema: str, tmp_path: Path) -> None:
    for _ in range(2):
        demo = hosting.spawn(
            "demo", "--seconds", "4", "--json", dsn=dsn, schema=schema, embedded_dir=str(tmp_path)
        )
        out, err = demo.communicate(timeout=120)
        assert demo.returncode == 0, out + err
        found = json.loads(out)
        assert found["held"] is True
        assert found["in_flight_at_kill"] >= 1
        assert found["taken_over"] >= 1
        assert found["outcomes"] == {"completed": found["runs"]}
        assert (found["facts_lost"], found["facts_duplicated"]) == (0, 0)
        assert found["files_verified"] > 1000
        assert len(STARTED.findall(err)) == 3
        assert_gone(err)


def test_its_last_word_is_a_command_that_works() -> None:
    with temporary_folder() as folder:
        demo = hosting.spawn("demo", "--seconds", "2", embedded_dir=str(folder))
        out, err = demo.communicate(timeout=120)
        assert demo.returncode == 0, out + err
        assert "FAILED" not in out
        command = out.strip().splitlines()[-1].strip()
        assert command.startswith(f"RUNLANE_EMBEDDED_DIR={folder}")
        shown = subprocess.run(
            ["/bin/sh", "-c", command],
            cwd=hosting.ROOT,
            env=hosting.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        assert "expired" in shown
        assert "run.completed" in shown
        assert not (folder / "pgdata/postmaster.pid").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything(number: signal.Signals) -> None:
    with temporary_folder() as folder:
        demo = hosting.spawn("demo", "--seconds", "60", embedded_dir=str(folder))
        said = _read_until(demo, lambda text: len(STARTED.findall(text)) == 2)
        demo.send_signal(number)
        out, err = demo.communicate(timeout=60)
        assert demo.returncode == 130
        assert err == "Error: interrupted\n"
        assert "interrupted: stopping the hosts" in out
        assert_gone(said)
        assert not (folder / "pgdata/postmaster.pid").exists()


def test_a_signal_while_the_server_starts() -> None:
    with temporary_folder() as folder:
        demo = hosting.spawn("demo", "--seconds", "60", embedded_dir=str(folder))
        _read_until(demo, lambda text: "starting Postgres" in text)
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=60)
        assert demo.returncode == 130
        assert not (folder / "pgdata/postmaster.pid").exists()


def test_a_signal_while_the_hosts_start(dsn: str, schema: str, tmp_path: Path) -> None:
    demo = hosting.spawn("demo", "--seconds", "60", dsn=dsn, schema=schema, embedded_dir=str(tmp_path))
    _read_until(demo, lambda text: "distributions to audit" in text)
    demo.send_signal(signal.SIGINT)
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 130
    assert err == "Error: interrupted\n"


def test_hosts_do_not_outlive_a_demo_that_was_killed(dsn: str, schema: str, tmp_path: Path) -> None:
    demo = hosting.spawn("demo", "--seconds", "60", dsn=dsn, schema=schema, embedded_dir=str(tmp_path))
    said = _read_until(demo, lambda text: len(STARTED.findall(text)) == 2)
    demo.kill()
    demo.communicate(timeout=10)
    deadline = time.monotonic() + 20
    try:
        while not _all_gone(said):
            assert time.monotonic() < deadline, "a host is still there"
            time.sleep(0.05)
    finally:
        for _, pid in STARTED.findall(said):
            if _is_host(int(pid)):
                os.kill(int(pid), signal.SIGKILL)


def test_an_unreachable_server_is_one_line() -> None:
    demo = hosting.spawn("demo", dsn="postgresql://127.0.0.1:1/db")
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 6
    assert len(err.splitlines()) == 1


def _read_until(demo: subprocess.Popen[str], enough: Callable[[str], bool]) -> str:
    assert demo.stdout is not None
    text = ""
    for line in demo.stdout:
        text += line
        if enough(text):
            return text
    raise AssertionError(f"it ended: {text}")


def assert_gone(said: str) -> None:
    assert _all_gone(said)


def _all_gone(said: str) -> bool:
    return not any(_is_host(int(pid)) for _, pid in STARTED.findall(said))


def _is_host(pid: int) -> bool:
    """Whether that pid is a live host of a demo: no zombie, and nobody else's process by now."""
    if Path("/proc/self").exists():
        file = Path(f"/proc/{pid}/cmdline")
        words = file.read_bytes().replace(b"\0", b" ").decode() if file.exists() else ""
    else:
        command = ["ps", "-o", "args=", "-p", str(pid)]
        words = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return "runtime serve" in words
