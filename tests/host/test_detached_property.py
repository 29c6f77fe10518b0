"""Whatever is killed, frozen or cut off: a detached run ends once, nothing of it stays, and its bill is its life.

Two hosts are processes of their own, so are the runners in their local sandboxes. Runners are killed, alone and with
their keeper, and frozen until they are lost, and then come back; hosts are killed, one or both; their gateways are out
of reach for a while. A watch that asks only the system notes when each runner began and ended; at the end the tables
must tell the same story.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from runtime.client import Client
from tests.support.hosts import QUICK, Hosts, MortalHost, eventually
from tests.support.labours import HELD
from tests.support.lives import Life, Watch

BUDGETS: dict[str, Any] = {
    "lease_s": 2.4,
    "renew_every_s": 0.6,
    "lane_lease_s": 1.5,
    "delivery_timeout_s": 1.0,
    "sandbox_create_s": 4.0,
    "cleanup_lease_s": 4.0,
    "crash_cap": 50,
    "park_after_s": 0.2,
    "log_level": "ERROR",
}
_MARK = "SOAK_OF"
# What is billed may differ by this from the life of a process, unless nobody was there to take its result, or to delete
# it.
_BILL_S = 1.0
_MOST_EXCUSED = 0.1


# --- gateways that can be out of reach -------------------------------------------------------------------


@attrs.define(eq=False)
class Gate:
    """The way to one host's gateway. Shut, it drops what there is and refuses what comes."""

    target: int
    port: int = 0
    shut: bool = False
    scopes: set[trio.CancelScope] = attrs.field(factory=set)

    def close(self) -> None:
        self.shut = True
        for scope in self.scopes:
            scope.cancel()

    def open(self) -> None:
        self.shut = False

    async def serve(self, client: trio.SocketStream) -> None:
        """One connection."""
        async with client:
            if self.shut:
                return
            with trio.CancelScope() as scope, contextlib.suppress(OSError, trio.BrokenResourceError):
                self.scopes.add(scope)
                server = await trio.open_tcp_stream("127.0.0.1", self.target)
                async with server, trio.open_nursery() as nursery:
                    nursery.start_soon(_pump, client, server, scope)
                    nursery.start_soon(_pump, server, client, scope)
            self.scopes.discard(scope)


async def _pump(source: trio.SocketStream, sink: trio.SocketStream, scope: trio.CancelScope) -> None:
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async for data in source:
            await sink.send_all(data)
    scope.cancel()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def gates(targets: Sequence[int]) -> AsyncIterator[list[Gate]]:
    """A way to each of these ports."""
    ways = [Gate(target) for target in targets]
    async with trio.open_nursery() as nursery:
        for way in ways:
            (listener, *_) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            way.port = listener.socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, way.serve, [listener])
        yield ways
        nursery.cancel_scope.cancel()


# --- what is done to them --------------------------------------------------------------------------------


@attrs.define
class Field:
    """Where the work is done, and everything that is done to it."""

    hosts: Hosts
    client: Client
    processes: list[MortalHost]
    ways: list[Gate]
    watch: Watch
    chance: random.Random
    outage_s: float
    runs: int
    submitted: int = 0
    done: Counter[str] = attrs.field(factory=Counter)
    resumed: int = 0
    away: list[tuple[float, float]] = attrs.field(factory=list)
    """When a host was away, with what it had leased, or the gateways."""

    async def work(self) -> None:
        """One run after the other."""
        while self.submitted < self.runs:
            self.submitted += 1
            number, naps = self.submitted, self.chance.random() < 0.25
            data = {
                "echo": number,
                "work_s": self.chance.uniform(0.3, 1.0),
                "nap_s": self.chance.uniform(0.5, 1.5) if naps else 0,
            }
            output = await (await self.client.submit("labour", data)).result()
            assert output["echo"] == number

    async def harm(self, kinds: Sequence[str], gap_s: float) -> None:
        """One thing after the other, some of which take their time."""
        async with trio.open_nursery() as nursery:
            for kind in kinds:
                await trio.sleep(gap_s * self.chance.uniform(0.5, 1.5))
                if kind == "freeze":
                    life = await self.victim()
                    self.freeze(life)
                    nursery.start_soon(self.thaw, life)
                else:
                    await getattr(self, kind)()
                self.done[kind] += 1

    async def victim(self) -> Life:
        """A runner at work that nobody has touched, and that was heard of: else it might still be starting, which is
        given minutes."""

        async def found() -> Life | None:
            rows = await self.hosts.ask("SELECT sandbox FROM @.runners WHERE heartbeat_at IS NOT NULL")
            heard = {row[0] for row in rows}
            unhurt = [life for life in self.watch.alive if life.sandbox in heard and not life.harmed]
            return self.chance.choice(unhurt) if unhurt else None

        life: Life = await eventually(found, within_s=120.0)
        return life

    async def kill(self) -> None:
        life = await self.victim()
        _signal(life, "killed", life.pid, signal.SIGKILL)

    async def kill_all(self) -> None:
        """With its keeper, so that nobody is left to say how it ended."""
        life = await self.victim()
        _signal(life, "killed with its keeper", -life.keeper, signal.SIGKILL)

    def freeze(self, life: Life) -> None:
        with contextlib.suppress(OSError):
            (self.watch.folder / life.sandbox / HELD).touch()
        _signal(life, "frozen", life.pid, signal.SIGSTOP)

    async def thaw(self, life: Life) -> None:
        """Once its attempt is over, let it go on, and give it time to say its last word."""

        async def over() -> bool:
            query = f"SELECT 1 FROM @.runners WHERE sandbox = '{life.sandbox}'"
            return life.ended is not None or not await self.hosts.ask(query)

        await eventually(over, within_s=240.0, every_s=0.1)
        if life.ended is None:
            self.resumed += 1
        _signal(life, "frozen", life.pid, signal.SIGCONT)
        with trio.move_on_after(10.0):
            while life.ended is None:  # noqa: ASYNC110 - another process does
                await trio.sleep(0.02)
        (self.watch.folder / life.sandbox / HELD).unlink(missing_ok=True)

    async def host(self) -> None:
        process = self.chance.choice(self.processes)
        with self.missing():
            process.kill()
            await trio.sleep(self.chance.uniform(0.0, 1.0))
            await process.start()

    async def both(self) -> None:
        """Both hosts and a runner, all at once."""
        life = await self.victim()
        with self.missing():
            for process in self.processes:
                process.kill()
            _signal(life, "killed", life.pid, signal.SIGKILL)
            await trio.sleep(self.chance.uniform(0.0, 1.0))
            async with trio.open_nursery() as nursery:
                for process in self.processes:
                    nursery.start_soon(process.start)

    async def outage(self) -> None:
        """No runner reaches any gateway; the hosts go on."""
        with self.missing():
            for way in self.ways:
                way.close()
            await trio.sleep(self.outage_s)
            for way in self.ways:
                way.open()

    @contextlib.contextmanager
    def missing(self) -> Iterator[None]:
        began = time.time()
        yield
        self.away.append((began, max(time.time(), began + BUDGETS["cleanup_lease_s"]) + _BILL_S))


def _signal(life: Life, harm: str, pid: int, number: int) -> None:
    """The process is still the one that we know: nobody has seen it end."""
    if life.ended is None:
        life.harmed = harm
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if pid < 0 else os.kill)(abs(pid), number)


# --- what must be true afterwards ------------------------------------------------------------------------

_SETTLED = """
SELECT NOT EXISTS (SELECT 1 FROM @.sandboxes WHERE confirmed_at IS NULL)
   AND NOT EXISTS (SELECT 1 FROM @.billing_jobs WHERE finalised_at IS NULL)
"""
_VIOLATIONS = {
    "a run has not completed": "SELECT run_id, status FROM @.runs WHERE status <> 'completed'",
    "a result was not settled, or a run has another one than its last attempt's": """
        SELECT r.run_id, q.attempt, q.settled_at FROM @.runs r LEFT JOIN @.runner_results q USING (run_id)
          LEFT JOIN @.facts f ON f.run_id = r.run_id AND f.type = 'run.completed'
         GROUP BY r.run_id, q.attempt, q.settled_at, f.payload, q.payload, r.attempt, q.outcome
        HAVING q.settled_at IS NULL
            OR (q.attempt = r.attempt)
               <> (q.outcome = 'completed' AND q.payload -> 'output' = f.payload -> 'output')""",
    "an attempt that was judged has ended its run": """
        SELECT a.run_id FROM @.attempts a JOIN @.runs r USING (run_id, attempt) WHERE a.outcome <> 'completed'""",
    "a detached attempt has not one runner's record, or a sandbox more than one": """
        SELECT s.sandbox FROM @.sandboxes s
          LEFT JOIN @.attempts a ON a.run_id = s.run_id AND a.attempt = s.attempt AND a.owner = 0
          LEFT JOIN @.compute_records c ON c.run_id = s.run_id AND c.attempt = s.attempt
         GROUP BY s.sandbox, a.run_id
        HAVING count(*) FILTER (WHERE c.kind = 'runner') <> (a.run_id IS NOT NULL)::integer
            OR count(*) FILTER (WHERE c.kind = 'sandbox') > 1
            OR count(*) FILTER (WHERE c.kind = 'late_sandbox') > 0""",
    "a deletion was not told, or not in order": """
        SELECT s.sandbox FROM @.sandboxes s LEFT JOIN @.sandbox_events e USING (sandbox)
         GROUP BY s.sandbox
        HAVING array_agg(e.type ORDER BY e.happened_at, e.type) <> '{delete_accepted,delete_confirmed}'""",
}
_BILLS = """
SELECT s.sandbox, s.custody_at IS NULL AS unseen, a.outcome, a.error ->> 'message' AS error,
       extract(epoch FROM a.ended_at)::float8 AS judged,
       extract(epoch FROM w.started_at)::float8 AS runner_from, extract(epoch FROM w.ended_at)::float8 AS runner_to,
       extract(epoch FROM b.started_at)::float8 AS box_from, extract(epoch FROM b.ended_at)::float8 AS box_to
  FROM @.sandboxes s
  LEFT JOIN @.attempts a ON a.run_id = s.run_id AND a.attempt = s.attempt AND a.owner = 0
  LEFT JOIN @.compute_records w ON w.record_id = s.run_id || ':runner:' || s.attempt
  LEFT JOIN @.compute_records b ON b.record_id = s.run_id || ':sandbox:' || s.sandbox
"""


def _bill_errors(life: Life, bill: Any) -> tuple[float, float]:
    """By how many seconds the bill of a runner's process begins and ends late, or early.

    A process that outlived its attempt is on its sandbox's bill; so is one whose attempt never was detached.
    """
    assert life.ended is not None
    outlived = bill["runner_to"] is None or life.ended > bill["judged"] + _BILL_S
    kind = "box" if outlived else "runner"
    return bill[f"{kind}_from"] - life.began, bill[f"{kind}_to"] - life.ended


def _left(mark: str, folder: Path) -> list[str]:
    """Processes that have the mark, and whatever is in the folder of sandboxes."""
    found = [path.name for path in folder.iterdir()]
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in entry.read_bytes().split(b"\x00"):
                found.append(entry.parent.name)
    return found


# --- the test --------------------------------------------------------------------------------------------


async def survive(
    hosts: Hosts,
    folder: Path,
    *,
    seed: int,
    runs: int,
    workers: int,
    kinds: Sequence[str],
    gap_s: float,
    outage_s: float,
    heartbeat_timeout_s: float,
) -> dict[str, Any]:
    """Let runs pass and do all of that to them, wait for the last trace to go, and check everything. What there was."""
    chance = random.Random(seed)
    ports = [_free_port(), _free_port()]
    watch = Watch(folder)
    mark = f"{_MARK}={hosts.schema}"
    async with AsyncExitStack() as stack:
        killed = stack.enter_context(ExitStack())
        killed.callback(watch.kill_rest)
        async with hosts.open():
            pass  # the schema
        ways = await stack.enter_async_context(gates(ports))
        processes = []
        for port, way in zip(ports, ways, strict=True):
            settings = {
                "dsn": hosts.dsn,
                "schema": hosts.schema,
                "notify": hosts.notify,
                **QUICK,
                **BUDGETS,
                "heartbeat_timeout_s": heartbeat_timeout_s,
                "health_port": port,
                "gateway_url": f"http://127.0.0.1:{way.port}",
            }
            command = [sys.executable, "-m", "tests.support.labours", json.dumps(settings), str(folder)]
            processes.append(MortalHost(command, {**os.environ, _MARK: hosts.schema}))
        async with trio.open_nursery() as nursery:
            for process in processes:
                killed.callback(process.kill)
                nursery.start_soon(process.start)
        client = await stack.enter_async_context(Client.open(hosts.config()))
        field = Field(hosts, client, processes, ways, watch, chance, outage_s, runs)
        async with trio.open_nursery() as looking:
            looking.start_soon(watch.run)
            async with trio.open_nursery() as harming:
                harming.start_soon(field.harm, kinds, gap_s)
                async with trio.open_nursery() as working:
                    for _ in range(workers):
                        working.start_soon(field.work)
                harming.cancel_scope.cancel()
            for way in ways:
                way.open()
            for process in processes:
                if process.process is None:
                    await process.start()
            for life in watch.alive:
                _signal(life, "frozen", life.pid, signal.SIGCONT)
            await eventually(lambda: hosts.value(_SETTLED), within_s=90.0, every_s=0.1)
            looking.cancel_scope.cancel()
        run_ids = [row[0] for row in await hosts.ask("SELECT run_id FROM @.runs")]
        await hosts.check(run_ids, within_s=60.0)
    assert watch.alive == []
    assert _left(mark, folder) == []
    for what, query in _VIOLATIONS.items():
        found = await hosts.ask(query)
        assert not found, (what, len(found), found[:5])
    return {**_figures(field), **await _billed(hosts, field), "late": await _late(hosts)}


def _figures(field: Field) -> dict[str, Any]:
    return {"runs": field.runs, "runners": len(field.watch.lives), "resumed": field.resumed, **field.done}


async def _late(hosts: Hosts) -> int:
    return int(
        await hosts.value("""
            SELECT count(*) FROM @.runner_results q JOIN @.attempts a USING (run_id, attempt)
             WHERE a.outcome = 'lost'""")
    )


async def _billed(hosts: Hosts, field: Field) -> dict[str, Any]:
    """Each life against its bill; and nobody was lost whom nothing had happened to."""
    watch = field.watch
    bills = {row["sandbox"]: row for row in await hosts.ask(_BILLS)}
    lost = {name: bill["error"] for name, bill in bills.items() if bill["outcome"] == "lost"}
    unharmed = [name for name in lost if name not in watch.lives or not watch.lives[name].harmed]
    assert not unharmed, [(name, lost[name]) for name in unharmed]
    begins, ends, wrong, excused = [], [], [], 0
    for life in watch.lives.values():
        bill = bills[life.sandbox]
        if bill["box_from"] is None:
            wrong.append(f"{life.sandbox} {life.harmed}: no bill")
            continue
        begin, end = _bill_errors(life, bill)
        assert life.ended is not None
        last, first = max(life.ended, life.ended + end) + _BILL_S, min(life.ended, life.ended + end) - _BILL_S
        if abs(end) > _BILL_S and any(since < last and first < until for since, until in field.away):
            excused, end = excused + 1, 0.0
        if begin < -_BILL_S and bill["unseen"]:
            # Its host died before it could write down that it was there: it counts from when it was asked for.
            excused, begin = excused + 1, 0.0
        begins.append(begin)
        ends.append(end)
        if abs(begin) > _BILL_S or abs(end) > _BILL_S:
            ended = {
                name: round(bill[name] - life.ended, 2)
                for name in ("judged", "runner_to", "box_to")
                if bill[name]
            }
            wrong.append(
                f"{life.sandbox} {life.harmed} {bill['outcome']}: begins {begin:+.2f}, ends {end:+.2f}; {ended}"
            )
    assert not wrong, "\n".join([f"{len(wrong)} wrong bills", *wrong])
    assert excused <= max(1, _MOST_EXCUSED * len(ends)), (excused, len(ends))
    return {
        "lost": len(lost),
        "sandboxes": len(bills),
        "lived_s": round(sum(life.seconds for life in watch.lives.values()), 1),
        "bill_begins_off_s": round(max(map(abs, begins)), 3),
        "bill_ends_off_s": round(max(map(abs, ends)), 3),
        "excused": excused,
    }


async def told(hosts: Hosts, folder: Path, *, seed: int, **how: Any) -> dict[str, Any]:
    print(f"seed {seed}")
    try:
        figures = await survive(hosts, folder, seed=seed, **how)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    print(json.dumps(figures))
    return figures


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
async def test_a_detached_run_ends_once_whatever_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    figures = await told(
        hosts,
        tmp_path / "sandboxes",
        seed=5,
        runs=10,
        workers=5,
        kinds=["freeze", "kill", "host", "kill_all", "outage", "both"],
        gap_s=0.6,
        outage_s=2.0,
        heartbeat_timeout_s=2.0,
    )
    assert all(figures[name] for name in ("lost", "resumed", "kill", "host")), figures


@pytest.mark.soak
@pytest.mark.timeout(1_800)
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
async def test_two_hundred_detached_runs_end_once_whatever_is_killed(hosts: Hosts, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    chance = random.Random(seed)
    some = ["kill", "freeze", "kill_all", "host", "kill", "freeze", "kill_all", "host", "both"] * 8
    chance.shuffle(some)
    figures = await told(
        hosts,
        tmp_path / "sandboxes",
        seed=seed,
        runs=200,
        workers=12,
        kinds=[*some, "outage"],
        gap_s=2.0,
        outage_s=30.0,
        heartbeat_timeout_s=14.0,
    )
    assert all(figures[name] for name in ("lost", "late", "resumed", *some, "outage")), figures
