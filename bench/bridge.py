"""bridge: what the crossing from trio to asyncio costs.

Owns one trivial query, asked over and over in three ways: on plain asyncio, through the border with one crossing for
each, and with one crossing for all. Each way has a process of its own: importing trio-asyncio changes asyncio's policy.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import asyncpg
import trio

from bench import children
from bench.figures import Figure, Report, median
from sql.connection import SessionOptions, open_session
from sql.dsn import known_to_driver, tls_mode

WAYS = ("plain", "each", "all")
_WARMUP = 100
_QUERY = "SELECT $1::int"


def crossed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Child: microseconds per query in one way."""
    if spec["way"] == "plain":
        if "trio_asyncio" in sys.modules:
            raise RuntimeError("trio_asyncio is imported: this would not be plain asyncio")
        return {"us": asyncio.run(_plain(spec["dsn"], spec["queries"]))}
    return {"us": trio.run(_bridged, spec["dsn"], spec["queries"], spec["way"])}


async def _ask(connection: Any, queries: int) -> float:
    for number in range(_WARMUP):
        await connection.fetchval(_QUERY, number)
    start = time.perf_counter()
    for number in range(queries):
        await connection.fetchval(_QUERY, number)
    return (time.perf_counter() - start) / queries * 1e6


async def _plain(dsn: str, queries: int) -> float:
    known, _ = known_to_driver(dsn)
    connection = await asyncpg.connect(known, ssl=tls_mode(known))
    try:
        return await _ask(connection, queries)
    finally:
        await connection.close(timeout=5)


async def _bridged(dsn: str, queries: int, way: str) -> float:
    async with open_session(SessionOptions(dsn, statement_timeout_s=120.0), "bridge") as session:
        if way == "each":
            return await _ask(session, queries)
        # A transaction's body crosses once, and asks the connection from the other side.
        return await session.transact(partial(_ask, queries=queries))


async def run(dsn: str, *, queries: int, rounds: int) -> Report:
    """Interleaved rounds of the three ways; medians."""
    found = []
    for _ in range(rounds):
        found.append(
            {
                way: (await children.measured("bridge", {"dsn": dsn, "queries": queries, "way": way}))["us"]
                for way in WAYS
            }
        )
    of = partial(median, found)
    return Report(
        scenario="bridge",
        figures=[
            Figure("plain asyncio", of("plain"), "µs/query"),
            Figure("trio-asyncio, one crossing for all", of("all"), "µs/query"),
            Figure("trio-asyncio, one crossing for each", of("each"), "µs/query"),
            Figure("a crossing", of("each") - of("all"), "µs"),
        ],
        rounds=found,
        settings={"queries": queries, "rounds": rounds},
        notes=["one crossing for all is one transaction: its queries do not commit"],
    )
