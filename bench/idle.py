"""idle: what a host costs that has nothing to do.

Owns the count of statements, by the server and by the host's own sessions, and of the event loop's wake-ups.
"""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import trio

from bench import children
from bench.figures import Figure, Report
from bench.place import fresh_database
from bench.plays import noop
from runtime import Runtime, RuntimeConfig
from sql.connection import Session

# A backend reports its statistics when it has been idle for 10 s at the latest.
_SETTLE_S = 12.0
_CALLS = ("fetch", "fetchrow", "fetchval", "execute", "script", "transact", "listen")
_TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1"
_FUNCTION = re.compile(r'FROM "[^"]+"\.(\w+)')


class _Steps(trio.abc.Instrument):
    """Counts how often the loop woke up, and the task steps it then made."""

    def __init__(self) -> None:
        self.wakeups = 0
        self.steps = 0

    def after_io_wait(self, timeout: float) -> None:
        self.wakeups += timeout > 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps += 1


def _count_calls(counted: Counter[str]) -> None:
    """Count every call of every session of this process, by session and function."""

    def counting(name: str, method: Any) -> Any:
        @functools.wraps(method)
        async def call(session: Session, *args: Any, **kwargs: Any) -> Any:
            text = args[0] if args and isinstance(args[0], str) else name
            found = _FUNCTION.search(text)
            counted[f"{session.name}: {found[1] if found else name}"] += 1
            return await method(session, *args, **kwargs)

        return call

    for name in _CALLS:
        setattr(Session, name, counting(name, getattr(Session, name)))


def watched(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: an idle host; says when the watch begins, and at its end what it counted."""
    answer: dict[str, Any] = trio.run(_watched, spec)
    return answer


async def _watched(spec: Mapping[str, Any]) -> dict[str, Any]:
    config = RuntimeConfig(dsn=spec["dsn"], schema=spec["schema"], health_port=0)
    counted: Counter[str] = Counter()
    _count_calls(counted)
    async with Runtime.open(config, plays=[noop]):
        await trio.sleep(spec["settle_s"])
        counted.clear()
        steps = _Steps()
        trio.lowlevel.add_instrument(steps)
        start, cpu = time.perf_counter(), time.process_time()
        children.say({})
        await trio.sleep(spec["seconds"])
        minutes = (time.perf_counter() - start) / 60
        return {
            "calls": dict(counted),
            "calls_per_min": sum(counted.values()) / minutes,
            "wakeups_per_min": steps.wakeups / minutes,
            "steps_per_min": steps.steps / minutes,
            "cpu_ms_per_min": (time.process_time() - cpu) * 1000 / minutes,
        }


async def run(dsn: str, *, seconds: float, settle_s: float = _SETTLE_S) -> Report:
    """One idle host for ``seconds``, in a database of its own."""
    async with fresh_database(dsn) as (own_dsn, database, session):
        spec = {"dsn": own_dsn, "schema": "runlane", "seconds": seconds, "settle_s": settle_s}
        async with children.running("idle", spec) as child:
            before, start = await session.fetchval(_TRANSACTIONS, database), time.perf_counter()
            await trio.sleep(seconds - 0.5)
            transactions = await session.fetchval(_TRANSACTIONS, database) - before
            minutes = (time.perf_counter() - start) / 60
            answer = await child.line()
    return Report(
        scenario="idle",
        figures=[
            Figure("statements, counted by the server", transactions / minutes, "per min", most=10),
            Figure("statements, counted by the host", answer["calls_per_min"], "per min", most=10),
            Figure("wake-ups of the loop", answer["wakeups_per_min"], "per min"),
            Figure("task steps", answer["steps_per_min"], "per min"),
            Figure("CPU", answer["cpu_ms_per_min"], "ms/min"),
        ],
        rounds=[answer],
        checks={"the host did not ask more than it says": transactions <= sum(answer["calls"].values()) + 2},
        settings={"seconds": seconds},
        notes=[
            "the server's count is the transactions of a database of its own (pg_stat_database): each statement of a "
            "host is one; a backend may report them up to 10 s late. Autovacuum is off in the embedded server; in "
            "another one its visits count too",
            "the host's count is the calls of all of its sessions: "
            + (", ".join(f"{name} {count}" for name, count in sorted(answer["calls"].items())) or "none"),
        ],
    )
