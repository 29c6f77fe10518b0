"""growth: what a delivery turn costs beside a long history, and beside many pending lanes.

Owns the histories, written straight into the tables, and the ratio of every call to the same call in empty tables. All
schemas are on one server and take turns call by call, through one session, so that a busy machine slows all alike.
Measured is the time inside the server: no driver, no network, no commit.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from bench.figures import BenchFailed, Figure, Report
from bench.place import Place, fresh_schema
from runtime.ids import new_run_id
from sql import bundle
from sql.calls import call, new_token
from sql.connection import Session

MOST = 1.25
"""How much longer than in empty tables a call may take."""

FACTS = 3
"""Of a run in the history: created, started, completed."""

KINDS = 6
"""Pending lanes in every schema, the empty one too: a call finds the same everywhere, and only the numbers differ."""

_SIZES = {200: 1, 1: 4}  # runs of a batch: its lives in a round
_BUCKET = 7
_OWNER = 1
_LEASE_S = 600.0
_SLICE = 50_000  # runs in one statement that writes a history
_FILL_S = 600.0

_TABLES = ("runs", "facts", "attempts", "ledger_runs", "hosts")

# Runs that have ended and of which everything is delivered. Their ids are older than any that is measured.
_HISTORY = """
WITH old AS (
    INSERT INTO @schema@.runs (
        run_id, play, bucket, status, created_at, due_at, lane_due_at, last_seq, acked_seq, terminal_seq, attempt,
        attempt_at, started_at, finished_at, lease_owner, lease_token, lane_token)
    SELECT '00000000-0000-7000-8000-' || lpad(n::text, 12, '0'), 'bench', $3, 'completed', t, 'infinity', t, 3, 3, 3, 1,
           t, t, t, 1, 1, 1
      FROM generate_series($1::integer, $2::integer) AS n, (SELECT clock_timestamp() - interval '1 day' AS t) AS now
    RETURNING run_id, created_at
), tried AS (
    INSERT INTO @schema@.attempts (run_id, attempt, token, owner, started_at, ended_at, outcome)
    SELECT run_id, 1, 1, 1, created_at, created_at, 'completed' FROM old
), kept AS (
    INSERT INTO @schema@.ledger_runs (
        run_id, play, status, accepted_at, updated_at, started_at, finished_at, attempts, applied_seq, applied_facts,
        output)
    SELECT run_id, 'bench', 'completed', created_at, created_at, created_at, created_at, 1, 3, 3,
           '{"files": 12, "bytes": 34567}' FROM old
)
INSERT INTO @schema@.facts (run_id, lane, seq, type, created_at, payload)
SELECT o.run_id, 0, s.seq, s.type, o.created_at, s.payload::jsonb
  FROM old o,
       (VALUES (1, 'run.created', '{"play": "bench", "input": {"path": "/srv/data", "depth": 3}}'),
               (2, 'run.started', '{"attempt": 1}'),
               (3, 'run.completed', '{"attempt": 1, "output": {"files": 12, "bytes": 34567}}'))
           AS s (seq, type, payload)
"""
# Lanes whose receiver has had the first fact: every second waits behind, due but less urgent than what is measured; of
# the others, with ends to tell, a third each is backing off, under another's lease, and blocked.
_PENDING = """
WITH old AS (
    INSERT INTO @schema@.runs (
        run_id, play, bucket, status, created_at, due_at, lane_due_at, last_seq, acked_seq, terminal_seq,
        frozen_seq, lane_attempts, attempt, attempt_at, started_at, finished_at, lease_owner, lease_token,
        lane_expires_at, lane_token, lane_error, wait_kind, wait_key, wait_until)
    SELECT '00000000-0000-7000-9000-' || lpad(n::text, 12, '0'), 'bench', $3, k.status, t,
           CASE WHEN k.status = 'completed' THEN 'infinity' ELSE t + interval '2 days' END,
           CASE k.name WHEN 'behind' THEN t WHEN 'blocked' THEN 'infinity' ELSE t + interval '2 days' END,
           3, 1, CASE WHEN k.status = 'completed' THEN 3 END,
           CASE WHEN k.name <> 'behind' THEN 3 END, (k.name <> 'behind')::integer, 1, t, t,
           CASE WHEN k.status = 'completed' THEN t END, 1, 1,
           CASE k.name WHEN 'leased' THEN t + interval '2 days' END, 1, CASE k.name WHEN 'blocked' THEN 'refused' END,
           CASE WHEN k.status = 'waiting' THEN 'sleep' END, CASE WHEN k.status = 'waiting' THEN 'nap' END,
           CASE WHEN k.status = 'waiting' THEN t + interval '2 days' END
      FROM generate_series($1::integer, $2::integer) AS n, (SELECT clock_timestamp() - interval '1 day' AS t) AS now,
           LATERAL (SELECT p.name, CASE p.name WHEN 'behind' THEN 'waiting' ELSE 'completed' END AS status
                      FROM (SELECT CASE n % 6 WHEN 1 THEN 'later' WHEN 3 THEN 'leased' WHEN 5 THEN 'blocked'
                                              ELSE 'behind' END AS name) AS p) AS k
    RETURNING run_id, created_at
)
INSERT INTO @schema@.facts (run_id, lane, seq, type, created_at, payload)
SELECT o.run_id, 0, s, CASE s WHEN 1 THEN 'run.created' ELSE 'run.progress' END, o.created_at, '{"play": "bench"}'
  FROM old o, generate_series(1, 3) AS s
"""
_SUBMIT = """
WITH added AS (
    INSERT INTO @schema@.runs (run_id, play, bucket, status, created_at, due_at, lane_due_at, last_seq)
    SELECT run_id, 'bench', $2, 'queued', t, t, t, 1
      FROM unnest($1::text[]) AS run_id, (SELECT clock_timestamp() AS t) AS now
    RETURNING run_id, created_at
)
INSERT INTO @schema@.facts (run_id, lane, seq, type, created_at, payload)
SELECT run_id, 0, 1, 'run.created', created_at, '{"play": "bench", "input": {"path": "/srv/data", "depth": 3}}'
  FROM added
"""
_HOST = """
INSERT INTO @schema@.hosts (host, started_at, seen_at, pid, name, version) VALUES ($1, now(), now(), 1, 'bench', '0')
"""
_APPLY = "SELECT count(*) FROM @schema@.ledger_apply_lifecycle($1, $2, $3)"
_AUDIT = """
SELECT count(*) FILTER (WHERE r.status = 'completed' AND r.acked_seq = 3 AND r.last_seq = 3 AND NOT r.lane_pending
                          AND l.applied_facts = 3) AS done
  FROM @schema@.runs r JOIN @schema@.ledger_runs l USING (run_id)
 WHERE r.run_id >= $1
"""


@attrs.frozen
class Case:
    """A schema's history: facts delivered already, and pending lanes that are not what is measured."""

    name: str
    delivered: int = 0
    pending: int = 0


EMPTY = Case("empty")


def cases(delivered: Sequence[int], pending: int) -> list[Case]:
    """Empty tables first, then each history, then the pending lanes."""
    grown = [Case(f"{count:,} delivered", delivered=count) for count in delivered]
    return [EMPTY, *grown, Case(f"{pending:,} pending", pending=pending)]


@attrs.define
class _Batch:
    """Runs of one schema that go through one life together."""

    schema: str
    ids: list[str]
    token: int = attrs.field(factory=new_token)

    @property
    def size(self) -> int:
        return len(self.ids)


_Arguments = Callable[[_Batch], tuple[Any, ...]]


@attrs.frozen
class _Step:
    """A call in the life of a batch, ``held`` to the bound or measured for reference.

    ``rows``: how many it answers, per run and beside.
    """

    name: str
    function: str
    arguments: _Arguments
    held: bool = True
    rows: tuple[int, int] = (1, 0)

    def of(self, size: int) -> str:
        """Its name for batches of that size."""
        return f"{self.name}, {size} lane{'s' if size > 1 else ''}"


def _acknowledge(through: int, prefix: int) -> _Arguments:
    return lambda b: (b.ids, [b.token] * b.size, [through] * b.size, prefix, _LEASE_S)


def _settle(b: _Batch) -> tuple[Any, ...]:
    one = (b.ids, [1] * b.size, [b.token] * b.size, ["completed"] * b.size)
    return (*one, ['{"output": {"files": 12}}'] * b.size, [0.0] * b.size)


_LIFE = (
    _Step("discovery", "next_due", lambda b: (_OWNER, [_BUCKET], [""]), rows=(0, 1)),
    # What it and the turns below ask beside everything else. Alone it is so short that a level of the index shows.
    _Step("lanes' part of discovery", "lifecycle_next_due", lambda b: ([""],), held=False, rows=(0, 1)),
    _Step(
        "claim of runs", "claim_runs",
        lambda b: (_OWNER, b.token, [_BUCKET], [0], ["bench"], b.size, _LEASE_S, False, None, []),
        held=False, rows=(1, 1),
    ),
    _Step(
        "claim", "lifecycle_claim",
        lambda b: ([""], b.token, b.size, 1, _LEASE_S, 3, False, []), rows=(1, 1),
    ),
    _Step("acknowledgement, going on", "lifecycle_acknowledge", _acknowledge(1, 1)),
    _Step("acknowledgement", "lifecycle_acknowledge", _acknowledge(2, 0)),
    _Step("settlement", "settle_attempts", _settle, held=False),
    _Step(
        "delivery in the database", "lifecycle_deliver", lambda b: ([""], b.size, 100, False), rows=(0, 1)
    ),
)  # fmt: skip


# --- the histories -----------------------------------------------------------------------------------------


async def _fill(place: Place, case: Case) -> None:
    session = place.session
    await session.execute(bundle.render(_HOST, place.schema), _OWNER)
    for table in _TABLES:
        # What it finds to do, and when, would depend on the history.
        await session.execute(
            f"ALTER TABLE {bundle.quote(place.schema)}.{table} SET (autovacuum_enabled = off)"
        )
    for text, runs in ((_HISTORY, case.delivered // FACTS), (_PENDING, max(case.pending, KINDS))):
        statement = bundle.render(text, place.schema)
        for first in range(1, runs + 1, _SLICE):
            last = min(first + _SLICE - 1, runs)
            await session.execute(statement, first, last, _BUCKET, timeout_s=_FILL_S)


@contextlib.asynccontextmanager
async def _histories(dsn: str, wanted: Sequence[Case], analyse: bool) -> AsyncIterator[dict[str, Place]]:
    async with contextlib.AsyncExitStack() as stack:
        places = {}
        for case in wanted:
            place = await stack.enter_async_context(fresh_schema(dsn))
            # A history need not survive a crash. What is measured commits as hosts do: until a commit is on disk, the
            # index entries that it has left dead cannot be told to be, and are visited again and again.
            await place.session.execute("SET synchronous_commit = off")
            await _fill(place, case)
            await place.session.execute("RESET synchronous_commit")
            for table in _TABLES if analyse else ():
                await place.session.execute(
                    f"ANALYZE {bundle.quote(place.schema)}.{table}", timeout_s=_FILL_S
                )
            places[case.name] = place
        await place.settle_disk()
        yield places


# --- one life ----------------------------------------------------------------------------------------------


async def _life(
    session: Session, places: Mapping[str, Place], size: int, first: int
) -> dict[_Step, list[float]]:
    """The milliseconds of each step, by schema: a batch in each goes through its life, step by step together."""
    batches = [_Batch(place.schema, [new_run_id() for _ in range(size)]) for place in places.values()]
    for batch in batches:
        await session.execute(bundle.render(_SUBMIT, batch.schema), batch.ids, _BUCKET)
    found = {}
    for number, step in enumerate(_LIFE):
        if step.function == "lifecycle_deliver":
            for batch in batches:
                seqs = [[seq] * size for seq in (1, 2)]
                await session.execute(bundle.render(_APPLY, batch.schema), batch.ids, *seqs)
        spent = [0.0] * len(batches)
        for turn in range(len(batches)):
            index = (first + number + turn) % len(batches)
            spent[index] = await _timed(session, batches[index], step)
        found[step] = spent
    return found


async def _timed(session: Session, batch: _Batch, step: _Step) -> float:
    """Milliseconds in the server. Raises BenchFailed if the call did not find what it should: then they say nothing."""
    arguments = step.arguments(batch)
    row = await session.fetchrow(
        "SELECT count(*) AS rows, extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000 AS ms"
        f"  FROM ({call(batch.schema, step.function, len(arguments))}) AS answer",
        *arguments,
    )
    assert row is not None
    per_run, beside = step.rows
    if row["rows"] != per_run * batch.size + beside:
        raise BenchFailed(f"{step.function} answered {row['rows']} rows for {batch.size} runs")
    return float(row["ms"])


# --- the scenario ------------------------------------------------------------------------------------------


async def run(
    dsn: str, *, delivered: Sequence[int], pending: int, rounds: int, analyse: bool, warm: int = 2
) -> Report:
    """Rounds of lives of 200 runs and of single ones in each schema; medians, and their ratio to empty tables."""
    wanted = cases(delivered, pending)
    spent: dict[str, list[list[float]]] = {}
    async with _histories(dsn, wanted, analyse) as places:
        session, lives = places[EMPTY.name].session, 0
        start = new_run_id()
        for number in range(-warm, rounds):
            for size, times in _SIZES.items():
                for _ in range(times):
                    lives += 1
                    for step, by_schema in (await _life(session, places, size, lives)).items():
                        if number >= 0:
                            spent.setdefault(step.of(size), []).append(by_schema)
        runs = (rounds + warm) * sum(size * times for size, times in _SIZES.items())
        whole = [(await place.fetchrow(_AUDIT, start))["done"] == runs for place in places.values()]

    found: list[dict[str, Any]] = []
    for size in _SIZES:
        for step in _LIFE:
            name = step.of(size)
            medians = [statistics.median(column) for column in zip(*spent[name], strict=True)]
            for case, ms in zip(wanted, medians, strict=True):
                found.append(
                    {"call": name, "case": case.name, "ms": ms, "ratio": ms / medians[0], "held": step.held}
                )
    return Report(
        scenario="growth",
        figures=list(_figures(found)),
        rounds=found,
        checks={
            "every run was claimed, delivered and ended once": all(whole),
            **{
                f"{case.name}: every call within {MOST}x of empty": all(
                    one["ratio"] <= MOST for one in found if one["held"] and one["case"] == case.name
                )
                for case in wanted[1:]
            },
        },
        settings={"delivered": list(delivered), "pending": pending, "rounds": rounds, "analyse": analyse},
        notes=[
            "milliseconds inside the server, without driver, network and commit; ratios of medians; the schemas take "
            "turns call by call on one connection",
            f"delivered: facts of ended runs, {FACTS} each, with attempts and ledger; pending: half of the lanes due "
            "but less urgent, the others backing off, leased or blocked; "
            f"empty tables have {KINDS} of them, so that a call finds the same everywhere",
            "statistics: "
            + ("up to date" if analyse else "none, as before the first ANALYZE")
            + "; autovacuum off",
        ],
    )


def _figures(found: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    for one in found:
        if one["case"] == EMPTY.name:
            yield Figure(f"{one['call']}: {EMPTY.name}", one["ms"], "ms")
        else:
            goal = MOST if one["held"] else None
            yield Figure(f"{one['call']}: {one['case']} / empty", one["ratio"], "", most=goal)
