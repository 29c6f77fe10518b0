"""The demo's host processes: started, scraped, frozen, killed and stopped.

Owns the child processes and signals only those. It knows nothing of runs.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import attrs
import trio
from prometheus_client.parser import text_string_to_metric_families

from runtime.config import PREFIX, RuntimeConfig
from sql.errors import RunlaneError

PLAYS = "runtime.demo_audit"
SLOTS = 8
LEASE_S = 3.0
_START_S = 30.0
_STOP_S = 10.0
_SCRAPE_S = 2.0
_REAP_S = 5.0
_LAG = "runlane_delivery_lag_seconds_bucket"

# What a host takes over from the demo's own settings; every other one is the demo's choice or the default.
_SHARED = ("dsn", "listen_dsn", "schema", "pooled", "notify", "release_id", "environment", "log_level")


class DemoFailed(RunlaneError):
    """The demo could not go on: a host did not start or ended by itself."""


@attrs.define
class Lags:
    """A histogram of delivery lags: facts by upper bound in seconds, cumulative, as Prometheus has it."""

    upto: dict[float, float] = attrs.field(factory=dict)

    @classmethod
    def parsed(cls, text: str) -> Lags:
        """The histogram of all fact types in a metrics page."""
        lags = cls()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == _LAG:
                    lags.add({float(sample.labels["le"]): sample.value})
        return lags

    def add(self, upto: Mapping[float, float]) -> None:
        """Add another histogram with the same bounds."""
        for bound, count in upto.items():
            self.upto[bound] = self.upto.get(bound, 0.0) + count

    @property
    def count(self) -> int:
        """All facts in it."""
        return int(max(self.upto.values(), default=0.0))

    def quantile_s(self, share: float) -> float | None:
        """The lag that ``share`` of the facts stay below, linear within its bucket; None of nothing."""
        rank, lower, below = share * self.count, 0.0, 0.0
        if not rank:
            return None
        for bound, count in sorted(self.upto.items()):
            if count >= rank:
                return (
                    lower
                    if bound == float("inf")
                    else lower + (bound - lower) * (rank - below) / (count - below)
                )
            lower, below = bound, count
        return None


@attrs.define(eq=False)
class HostProcess:
    """One child process. ``name`` and ``pid`` are how the database knows it."""

    name: str
    process: trio.Process
    log: Path
    health: str = ""
    lags: Lags = attrs.field(factory=Lags)
    killed: bool = False

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def label(self) -> str:
        """The host as ``status`` shows it."""
        return f"{self.name} pid {self.pid}"

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def freeze(self) -> None:
        """Stop its clock: what it runs now stays running."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on, if it is still there."""
        if self.alive:
            self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL: no handler runs, no lease is handed back."""
        if self.alive:
            self.killed = True
            self.process.kill()

    async def scrape(self) -> None:
        """Keep the latest histogram; a host that does not answer leaves the last one standing."""
        if self.alive and self.health:
            text = await trio.to_thread.run_sync(_fetch, f"{self.health}/metrics", abandon_on_cancel=True)
            if text is not None:
                self.lags = Lags.parsed(text)

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "(it said nothing)")


def _fetch(url: str) -> str | None:
    # Never through a proxy: the host is this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_SCRAPE_S) as answer:
            return str(answer.read().decode())
    except (OSError, http.client.HTTPException):  # away, or killed in the middle of its answer
        return None


class Hosts:
    """All host processes of one demo; none outlives ``stop``."""

    def __init__(self, config: RuntimeConfig, folder: Path) -> None:
        self._config = config
        self._folder = folder
        self._numbers = itertools.count(1)
        self.all: list[HostProcess] = []

    @property
    def living(self) -> list[HostProcess]:
        """Those that run, or are starting."""
        return [host for host in self.all if host.alive]

    async def start(self) -> HostProcess:
        """Start one more host and wait until it is ready. Raises DemoFailed."""
        name = f"demo-{next(self._numbers)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DemoFailed(f"cannot make the folder {self._folder}: {error.strerror}") from error
        log = self._folder / f"{name}.log"
        command = [sys.executable, "-m", "runtime", "serve", "--json", "--plays", PLAYS, "--stop-with-stdin"]
        with log.open("wb") as stderr:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,  # its end tells a host that we are gone, however we went
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=self._environment(name),
                start_new_session=True,  # Ctrl-C is for us: we stop the hosts in order
            )
        host = HostProcess(name, process, log)
        self.all.append(host)
        with trio.move_on_after(_START_S):
            line = await _first_line(process)
            if not line:
                await process.wait()
                raise DemoFailed(f"{name} ended with exit code {process.returncode}: {host.last_words()}")
            host.health = str(json.loads(line)["health"])
            return host
        raise DemoFailed(f"{name} was not ready within {_START_S:g} s: {host.last_words()}")

    def _environment(self, name: str) -> dict[str, str]:
        settings = {field: getattr(self._config, field) for field in _SHARED}
        settings |= {
            "host_name": name,
            "slots": SLOTS,
            "lease_s": LEASE_S,
            "renew_every_s": LEASE_S / 3,
            "grace_s": 2.0,
            "release_budget_s": 2.0,
            "shutdown_budget_s": _STOP_S - 1,
            "health_host": "127.0.0.1",
            "health_port": 0,
        }
        ours = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
        return ours | {
            PREFIX + key.upper(): str(value) for key, value in settings.items() if value is not None
        }

    def check(self) -> None:
        """Raise DemoFailed if a host ended that nobody killed."""
        for host in self.all:
            if not host.killed and not host.alive:
                code = host.process.returncode
                raise DemoFailed(f"{host.name} ended by itself with exit code {code}: {host.last_words()}")

    async def scrape(self) -> None:
        """Fetch the metrics of every living host."""
        async with trio.open_nursery() as nursery:
            for host in self.living:
                nursery.start_soon(host.scrape)

    async def stop(self) -> bool:
        """Ask every living host to stop and wait; whether each did in time, with exit code 0."""
        asked = self.living
        for host in asked:
            host.process.terminate()
        with trio.move_on_after(_STOP_S):
            for host in asked:
                await host.process.wait()
        self.kill()
        with trio.move_on_after(_REAP_S):
            for host in self.all:
                await host.process.wait()
        return all(host.process.poll() == 0 for host in asked)

    def kill(self) -> None:
        """End at once whatever is left."""
        for host in self.living:
            host.process.kill()


async def _first_line(process: trio.Process) -> bytes:
    """The first line of a process's output; empty if it ended without one."""
    assert process.stdout is not None
    text = b""
    while b"\n" not in text:
        chunk = await process.stdout.receive_some()
        if not chunk:
            return b""
        text += chunk
    return text.partition(b"\n")[0]
