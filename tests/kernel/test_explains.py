"""Explains: every statement inside a hot call is an index seek, whatever the planner knows about the tables.

What a call reads is counted in ``test_plans``. Here its plans themselves are judged, those of the statements inside the
functions too, as the server's auto_explain tells them; the embedded server does not have it, Debian's PostgreSQL has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

import asyncpg
import attrs
import pytest

from tests.kernel.test_plans import CALLS, DETACHED, Batch, Call, analyse, grow, tiny_tables
from tests.support.callers import Caller
from tests.support.kernel import Kernel

pytestmark = pytest.mark.modes

# Of the background or of people who look: they page through an index, or through what is bounded by design.
_NOT_HOT = {"page", "backlog", "read", "read fires", "retain", "scrub", "chore"}
# What somebody has configured: a handful of rows, however long the history is.
_SMALL = {"chores", "limits", "plays", "rate_scopes"}
# A sweep walks its queue from the front.
_QUEUES = {
    "cancel a family": {"cancellations"},
    "cancel_run and sweep": {"cancellations"},
    "start children": {"wakes"},
    "wait for events": {"wakes"},
}

_COLUMNS = """
SELECT c.relname AS name, array_agg(pg_get_indexdef(c.oid, n, true) ORDER BY n) AS columns,
       pg_get_expr(i.indpred, i.indrelid) AS condition, i.indrelid::regclass::text AS of
  FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid, generate_series(1, i.indnkeyatts) AS n
 WHERE c.relnamespace = '@schema@'::regnamespace
 GROUP BY c.oid, i.indexrelid
"""
_SETTINGS = """
LOAD 'auto_explain';
SET auto_explain.log_nested_statements = on;
SET auto_explain.log_format = json;
SET auto_explain.log_level = notice;
"""


async def explains(caller: Caller) -> None:
    """From now on the server can tell the connection each statement's plan; the test is skipped where it cannot."""
    try:
        await caller.execute(_SETTINGS)
    except (asyncpg.UndefinedFileError, asyncpg.InsufficientPrivilegeError) as error:
        pytest.skip(f"no auto_explain: {error}")


@attrs.frozen
class Index:
    columns: list[str]
    table: str
    condition: str | None


@attrs.frozen
class Judge:
    """What makes a scan a seek. ``indexes`` are those of the schema, ``walked`` the tables that may be read whole."""

    indexes: Mapping[str, Index]
    walked: Set[str] = _SMALL

    def scans(self, statement: Mapping[str, Any]) -> set[str]:
        """The nodes of a statement's plan that are no seeks."""
        return {
            f"{node['Node Type']} of {node.get('Index Name') or node['Relation Name']}, "
            f"cond {node.get('Index Cond')}, filter {node.get('Filter')}, in: {statement['Query Text']}"
            for node, above in _nodes(statement["Plan"], [])
            if not self._seeks(node, above)
        }

    def _seeks(self, node: Mapping[str, Any], above: list[str]) -> bool:
        if node["Node Type"] == "Seq Scan":
            # The driver asks the catalogues.
            return node["Relation Name"] in self.walked or node["Relation Name"].startswith("pg_")
        index = self.indexes.get(node.get("Index Name", ""))
        if index is None or index.table in self.walked:
            return True
        if not _equals(index.columns[0], node.get("Index Cond", "")):
            # It begins at an end of the index or at a moment, and only the first rows are wanted.
            return node.get("Filter") in (None, index.condition) and above[-1:] in (["Limit"], ["InitPlan"])
        return not any(_equals(column, node.get("Filter", "")) for column in index.columns)


def _equals(column: str, condition: str) -> bool:
    return re.search(rf"\((\w+\.)?{re.escape(column)} = ", condition) is not None


def _nodes(plan: Mapping[str, Any], above: list[str]) -> Iterator[tuple[Mapping[str, Any], list[str]]]:
    """Each node, with what takes its rows. A node that locks takes no more than is taken of it."""
    if plan.get("Parent Relationship") == "InitPlan":
        above = [*above, "InitPlan"]
    yield plan, above
    for below in plan.get("Plans", ()):
        yield from _nodes(below, above if plan["Node Type"] == "LockRows" else [*above, plan["Node Type"]])


async def judge_of(kernel: Kernel) -> Judge:
    """A judge who knows the schema."""
    return Judge(
        {
            row["name"]: Index(row["columns"], row["of"].split(".")[-1], row["condition"])
            for row in await kernel.fetch(_COLUMNS)
        }
    )


async def scans_of(caller: Caller, kernel: Kernel, judge: Judge, call: Call, batch: Batch) -> set[str]:
    """What is no seek in a call, which is undone at once."""
    await caller.begin()
    try:
        await caller.execute("SET LOCAL auto_explain.log_min_duration = 0")
        caller.notices.clear()
        await call(caller.doors(kernel), batch)
        plans = [json.loads(said.split("plan:", 1)[1]) for said in caller.notices if "plan:" in said]
    finally:
        await caller.rollback()
    assert plans
    return set().union(*map(judge.scans, plans))


@pytest.mark.timeout(120)
async def test_hot_statements_are_seeks(dsn: str, schema: str) -> None:
    async with tiny_tables(dsn, schema) as (kernel, caller, batch):
        await explains(caller)
        judge = await judge_of(kernel)
        greedy: dict[str, list[str]] = {}
        for statistics in ("none, tiny", "up to date, tiny", "stale, grown"):
            if statistics == "up to date, tiny":
                await analyse(kernel)
            if statistics == "stale, grown":
                await grow(kernel)
            await caller.execute("DISCARD PLANS")
            for name, call in {**CALLS, **DETACHED}.items():
                if name not in _NOT_HOT:
                    of = attrs.evolve(judge, walked=_SMALL | _QUEUES.get(name, set()))
                    for scan in await scans_of(caller, kernel, of, call, batch):
                        greedy.setdefault(scan, []).append(f"{name} ({statistics})")
        assert not greedy, "\n\n".join(f"{calls}: {scan}" for scan, calls in greedy.items())


@pytest.mark.parametrize(
    ("statement", "greedy"),
    [
        ("SELECT FROM @schema@.runs WHERE run_id = 'x'", False),
        ("SELECT FROM @schema@.runs WHERE run_id = ANY ('{x,y}')", False),
        ("SELECT FROM @schema@.runs WHERE status = 'running' ORDER BY due_at LIMIT 1", False),
        ("SELECT FROM @schema@.runs WHERE play = 'x'", True),
        ("SELECT FROM @schema@.facts WHERE seq = 1", True),
        ("SELECT FROM @schema@.runs ORDER BY run_id", True),
        ("SELECT FROM @schema@.runs WHERE status = 'running' AND play = 'x' ORDER BY due_at LIMIT 1", True),
        ("SELECT FROM @schema@.runs WHERE run_id > 'x'", True),
    ],
)
async def test_what_is_no_seek_is_seen(dsn: str, schema: str, statement: str, greedy: bool) -> None:
    async with tiny_tables(dsn, schema) as (kernel, caller, batch):
        await explains(caller)
        await caller.execute("SET enable_seqscan = off")

        async def call(doors: Kernel, _: Batch) -> None:
            await doors.fetch(
                f"DO 'BEGIN PERFORM 1 FROM ({statement.replace(chr(39), chr(39) * 2)}) AS s; END'"
            )

        assert bool(await scans_of(caller, kernel, await judge_of(kernel), call, batch)) is greedy
