"""The receiver's functions: that they compile, and read no more than they need, whatever is there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import cast

import attrs
import pytest

from runtime import wire
from sql import bundle, deployment
from sql import receive as door
from sql.connection import Session, open_session
from sql.errors import SchemaNotReady
from sql.receive import Parcel
from sql.types import Lane
from tests.support.callers import Caller, open_caller
from tests.support.kernel import open_kernel, options

# Raise bundle.RECEIVER's version with every change to a function that has been released, and add the pair here.
CHECKSUMS = {1: "68178736ce55e624f3ffad0dbf2c70b6659226169ad85896be1bdc83267b9fa8"}

MOST_ROWS = 1_000
_TABLES = ("cursors", "runs", "facts", "receipts")

_GROW = """
INSERT INTO @schema@.cursors (run_id, lane, applied_seq, updated_at)
SELECT 'old-' || n, lane, 3, now() FROM generate_series(1, 30000) AS n, generate_series(0, 1) AS lane;
INSERT INTO @schema@.runs (run_id, accepted_at, updated_at, status)
SELECT 'old-' || n, now(), now(), 'completed' FROM generate_series(1, 30000) AS n;
INSERT INTO @schema@.facts (run_id, lane, seq, type, created_at, received_at, payload)
SELECT 'old-' || n, 0, seq, 'run.progress', now(), now(), '{}'
  FROM generate_series(1, 30000) AS n, generate_series(1, 3) AS seq;
INSERT INTO @schema@.receipts (delivery_key, digest, received_at)
SELECT 'old-' || n || ':lifecycle:1-3', 'd', now() FROM generate_series(1, 30000) AS n;
"""
_READ = """
SELECT sum(pg_stat_get_xact_tuples_returned(c.oid))::integer
  FROM pg_class c WHERE c.relnamespace = '@schema@'::regnamespace AND c.relkind IN ('r', 'i')
"""


@asynccontextmanager
async def open_ledger(dsn: str, schema: str) -> AsyncIterator[Session]:
    async with open_session(options(dsn, schema), "test") as session:
        await deployment.ensure(session, bundle.RECEIVER)
        yield session


def parcel(run_id: str, first: int = 1, last: int = 3, lane: Lane = Lane.LIFECYCLE) -> Parcel:
    seqs = range(first, last + 1)
    return Parcel(
        run_id,
        lane,
        wire.delivery_key(run_id, lane, first, last),
        "d",
        0,
        0,
        seqs,
        ["run.progress"] * len(seqs),
        [datetime(2026, 1, 1, tzinfo=UTC)] * len(seqs),
        ["{}"] * len(seqs),
    )


async def receive(session: Session, *parcels: Parcel) -> list[str]:
    return [answer.outcome for answer in await door.receive(session, parcels)]


async def test_functions_compile_and_the_version_is_right(dsn: str, schema: str) -> None:
    async with open_ledger(dsn, schema) as session:
        await session.script(
            "SET check_function_bodies = on;" + bundle.render(bundle.functions(bundle.RECEIVER), schema)
        )
        assert not await deployment.ensure(session, bundle.RECEIVER)
        assert (await deployment.check(session, bundle.RECEIVER)).ready
    assert bundle.bundle_checksum(bundle.RECEIVER) == CHECKSUMS[bundle.RECEIVER.version]


async def test_what_is_missing_is_put_back(dsn: str, schema: str) -> None:
    async with open_ledger(dsn, schema) as session:
        await session.execute(f"DROP FUNCTION {schema}.read_received")
        readiness = await deployment.check(session, bundle.RECEIVER)
        assert readiness.missing == ("function read_received",)
        assert await deployment.ensure(session, bundle.RECEIVER)
        assert await door.read(session, "nobody") is None


async def test_each_kind_of_schema_refuses_the_other(dsn: str, schema: str) -> None:
    async with open_ledger(dsn, schema):
        with pytest.raises(SchemaNotReady, match="in use for something else"):
            async with open_kernel(dsn, schema):
                pass


async def test_lanes_of_a_run_go_together(dsn: str, schema: str) -> None:
    async with open_ledger(dsn, schema) as session:
        both = [parcel("r"), parcel("r", lane=Lane.OBSERVABILITY), parcel("s", first=2)]
        assert await receive(session, *both) == ["applied", "applied", "gap"]
        assert await receive(session, *both) == ["duplicate", "duplicate", "gap"]


@pytest.mark.parametrize("statistics", ["none", "stale, planned when tiny"])
async def test_a_call_reads_what_it_needs(dsn: str, schema: str, statistics: str) -> None:
    async with open_ledger(dsn, schema) as session, open_caller(dsn, schema) as caller:
        for table in _TABLES:
            await session.execute(f"ALTER TABLE {schema}.{table} SET (autovacuum_enabled = off)")
        await receive(session, *[parcel(f"new-{n}") for n in range(5)])
        if statistics != "none":
            for table in _TABLES:
                await session.execute(f"ANALYZE {schema}.{table}")
            for _ in range(7):
                await _rows_read(caller, schema)
        for statement in bundle.render(_GROW, schema).split(";")[:-1]:
            await session.execute(statement)
        for _ in range(2):
            read = await _rows_read(caller, schema)
        assert read < MOST_ROWS


async def _rows_read(caller: Caller, schema: str) -> int:
    """What new, repeated, overlapping and following deliveries make the server read. Undone at once."""
    session = cast(Session, caller)
    await caller.begin()
    try:
        before = await caller.fetchval(bundle.render(_READ, schema))
        new = [parcel(f"more-{n}") for n in range(5)]
        following = [parcel(f"new-{n}", first=4, last=5) for n in range(5)]
        overlapping = [
            attrs.evolve(parcel(f"new-{n}", first=2, last=6), delivery_key=f"k{n}") for n in range(5)
        ]
        assert await receive(session, *new, *following) == ["applied"] * 10
        assert await receive(session, *new) == ["duplicate"] * 5
        assert await receive(session, *overlapping) == ["applied"] * 5
        assert await door.read(session, "new-1") is not None
        after = await caller.fetchval(bundle.render(_READ, schema))
    finally:
        await caller.rollback()
    return int(after - before)
