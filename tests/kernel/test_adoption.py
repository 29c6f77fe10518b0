"""Adoption: what an older generation of workers has to delete, in a table that knows no provider, is ours once."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from sql import adoption, billing, maintenance, runners, sandboxes, settle
from sql.adoption import OldTable
from sql.calls import new_token
from sql.errors import DatabaseError, SchemaNotReady
from sql.sandboxes import SandboxRecord
from tests.kernel.test_plans import Batch, rows_read
from tests.support.callers import Caller, open_caller
from tests.support.hosts import eventually
from tests.support.invariants import check_invariants
from tests.support.kernel import Kernel, open_kernel

pytestmark = pytest.mark.modes

PROVIDER = "daytona"
OLD = OldTable("sandbox_cleanup_jobs", PROVIDER)  # I-1: all of it belongs to one provider

# I-3, with the two indexes that such a table cannot do without: its key, and what its workers claim by.
TABLE = """
CREATE TABLE @schema@.sandbox_cleanup_jobs (
    sandbox_id text, run_id text, attempt bigint, environment text, routing_domain text,
    status text NOT NULL DEFAULT 'pending', attempt_count integer DEFAULT 0, failure_count integer DEFAULT 0,
    available_at timestamptz DEFAULT '2029-12-31T00:00:00Z', last_error text,
    created_at timestamptz DEFAULT '2029-12-30T00:00:00Z', updated_at timestamptz, blocked_at timestamptz,
    block_reason text, lease_owner text, lease_expires_at timestamptz, deleted_at timestamptz);
CREATE UNIQUE INDEX old_key ON @schema@.sandbox_cleanup_jobs (sandbox_id, coalesce(routing_domain, ''));
CREATE INDEX old_claim ON @schema@.sandbox_cleanup_jobs (status, available_at);
"""


@attrs.define
class Old:
    """The older generation: its table, and its workers, who speak through ``caller``."""

    kernel: Kernel
    caller: Caller

    async def write(self, sandbox_id: str | None = "box", **fields: Any) -> None:
        """One more open row."""
        row = {"sandbox_id": sandbox_id, "run_id": "run", "attempt": 1, "environment": "prod", **fields}
        places = ", ".join(f"${n}" for n in range(1, len(row) + 1))
        await self.kernel.execute(
            f"INSERT INTO @schema@.sandbox_cleanup_jobs ({', '.join(row)}) VALUES ({places})", *row.values()
        )

    async def rows(self) -> list[Any]:
        return await self.kernel.fetch("SELECT * FROM @schema@.sandbox_cleanup_jobs ORDER BY sandbox_id")

    async def row(self) -> Any:
        (row,) = await self.rows()
        return row

    async def work(self, statement: str, *args: Any) -> Any:
        """A statement of an older worker."""
        return await self.caller.fetch(self.kernel.render(statement), *args)

    async def adopt(self, limit: int = 1_000) -> tuple[int, int]:
        """How many rows a pass has settled and copied."""
        done = await adoption.adopt(self.kernel.session, OLD, limit=limit)
        assert done.found
        return done.settled, done.copied

    async def adopted(self, **fields: Any) -> SandboxRecord:
        """A new row's copy."""
        before = await self.ours()
        await self.write(**fields)
        assert await self.adopt() == (0, 1)
        (copy,) = [one for one in await self.ours() if one not in before]
        return copy

    async def ours(self) -> list[SandboxRecord]:
        return await sandboxes.read(self.kernel.session)

    async def claim(self) -> list[sandboxes.Obligation]:
        """What cleanup has to do."""
        due, _ = await sandboxes.claim_cleanup(
            self.kernel.session, [PROVIDER], token=new_token(), limit=20, lease_s=30.0
        )
        return due

    async def due(self) -> sandboxes.Obligation:
        (due,) = await self.claim()
        return due

    async def confirm(
        self,
        due: sandboxes.Obligation,
        domain: str | None = None,
        outcome: str = "deleted",
        *,
        alone: bool = False,
    ) -> str:
        """``alone``: as a host does that knows of no older table."""
        session = self.kernel.session
        if alone:
            return await sandboxes.confirm(session, due, outcome=outcome, routing_domain=domain)
        return await adoption.confirm(session, OLD, due, outcome=outcome, routing_domain=domain)


@asynccontextmanager
async def older(dsn: str, schema: str) -> AsyncIterator[Old]:
    """Our tables beside theirs, on a clock that only the test moves. Ours are in order at the end."""
    async with open_kernel(dsn, schema) as kernel, open_caller(dsn, schema) as caller:
        await kernel.freeze_clock()
        await kernel.session.script(kernel.render(TABLE))
        yield Old(kernel, caller)
        await caller.execute("ROLLBACK")
        await check_invariants(kernel.session)


def values(row: Any) -> dict[str, Any]:
    return dict(row.items())


# --- the copy ----------------------------------------------------------------------------------------


async def test_an_open_row_is_copied_whole(dsn: str, schema: str) -> None:  # I-19, I-38
    async with older(dsn, schema) as old:
        await old.write(
            routing_domain="eu", attempt=3, attempt_count=4, failure_count=2, last_error="no answer"
        )
        before = values(await old.row())
        assert await old.adopt() == (0, 1)
        assert values(await old.row()) == before  # theirs stays open, and theirs
        (copy,) = await old.ours()
        assert copy.sandbox.startswith("adopted:daytona:box:")
        assert (copy.provider, copy.provider_id, copy.routing_domain) == (PROVIDER, "box", "eu")
        assert (copy.run_id, copy.attempt, copy.environment) == ("run", 3, "prod")
        assert (copy.tries, copy.failures, copy.last_error) == (4, 2, "no answer")
        assert (copy.created_at, copy.state) == (before["created_at"], "deleting")
        due = await old.due()
        assert (due.provider_id, due.routing_domain, due.tries, due.certain) == ("box", "eu", 5, True)


async def test_availability_and_blocks_are_kept(dsn: str, schema: str) -> None:  # I-19
    async with older(dsn, schema) as old:
        await old.kernel.execute(
            """INSERT INTO @schema@.sandbox_cleanup_jobs
                      (sandbox_id, run_id, attempt, environment, status, available_at, blocked_at, block_reason)
               VALUES ('later', 'r', 1, 'prod', 'pending', '2030-01-01T00:01:00Z', NULL, NULL),
                      ('never', 'r', 1, 'prod', 'pending', 'infinity', NULL, NULL),
                      ('stuck', 'r', 1, 'prod', 'blocked', '2029-01-01', '2029-02-01', 'no such account'),
                      ('why', 'r', 1, 'prod', 'blocked', '2029-01-01', '2029-02-01', NULL)"""
        )
        assert await old.adopt() == (0, 4)
        found = {one.provider_id: one for one in await old.ours()}
        assert {name: one.block_reason for name, one in found.items() if one.state == "blocked"} == {
            "stuck": "no such account",
            "why": "an older worker blocked it",
        }
        assert (await old.due()).provider_id == "never"  # a row that nobody would ever look at is due now
        await old.kernel.advance(60)
        assert {one.provider_id for one in await old.claim()} == {"later", "never"}
        assert await sandboxes.retry(old.kernel.session, found["stuck"].sandbox)


async def test_a_pass_may_be_made_again(dsn: str, schema: str) -> None:  # I-4, I-10, I-20
    async with older(dsn, schema) as old:
        await old.write("a")
        await old.write("b", status="claimed", lease_expires_at=None)
        assert await old.adopt(limit=1) == (0, 1)
        assert await old.adopt(limit=1) == (0, 1)
        assert await old.adopt(limit=1) == (0, 0)
        await old.write("late")
        assert await old.adopt() == (0, 1)
        assert await old.adopt() == (0, 0)
        assert len(await old.ours()) == 3


async def test_every_part_of_the_identity_tells_rows_apart(
    dsn: str, schema: str
) -> None:  # I-2, I-15, I-33, I-38
    others: list[dict[str, Any]] = [
        {"sandbox_id": "other"},
        {"run_id": "other"},
        {"attempt": 2},
        {"environment": "test"},
        {"environment": None},
        {"environment": "NULL"},
        {"routing_domain": "eu"},
        {"routing_domain": "NULL"},
    ]
    async with older(dsn, schema) as old:
        await old.kernel.execute("DROP INDEX @schema@.old_key")
        first = await old.adopted()
        for other in others:
            await old.write(**other)
        assert await old.adopt() == (0, len(others))
        assert len({one.sandbox for one in await old.ours()}) == len(others) + 1
        # That one is gone proves nothing about the others.
        due = next(one for one in await old.claim() if one.sandbox == first.sandbox)
        assert await old.confirm(due) == "completed"
        assert [row["status"] for row in await old.rows()].count("pending") == len(others)
        assert await old.adopt() == (0, 0)


async def test_a_blank_domain_is_none(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        assert (await old.adopted(routing_domain="")).routing_domain is None
        assert await old.confirm(await old.due()) == "completed"
        assert (await old.row())["status"] == "deleted"


# --- whether there is anything to do -----------------------------------------------------------------


async def test_a_table_may_come_and_go(dsn: str, schema: str) -> None:  # absence is never cached
    async with open_kernel(dsn, schema) as kernel:
        nothing = adoption.Adopted(False, 0, 0, 0)
        for _ in range(2):
            assert await adoption.adopt(kernel.session, OLD, limit=10) == nothing
            await kernel.session.script(kernel.render(TABLE))
            assert await adoption.adopt(kernel.session, OLD, limit=10) == attrs.evolve(nothing, found=True)
            await Old(kernel, None).write()  # type: ignore[arg-type]
            assert (await adoption.adopt(kernel.session, OLD, limit=10)).malformed == 0
            await kernel.execute("DROP TABLE @schema@.sandbox_cleanup_jobs")


async def test_deleted_rows_are_history(dsn: str, schema: str) -> None:  # I-4, I-8
    async with older(dsn, schema) as old:
        await old.write(status="deleted", lease_owner="w", last_error="x")
        before = values(await old.row())
        await old.kernel.execute(
            """CREATE OR REPLACE FUNCTION @schema@.old_obligations(p_table regclass, p_provider text)
               RETURNS TABLE (place tid, sandbox text, sandbox_id text, run_id text, attempt integer, environment text,
                   routing_domain text, tries integer, failures integer, created_at timestamptz, due_at timestamptz,
                   last_error text, block_reason text, leased boolean, known boolean, gone_at timestamptz, fault text)
               LANGUAGE plpgsql STABLE AS $$ BEGIN RAISE EXCEPTION 'looked at'; END $$"""
        )
        assert await old.adopt() == (0, 0)  # the rows are not even looked at
        assert values(await old.row()) == before
        await old.write("b")
        with pytest.raises(DatabaseError, match="looked at"):
            await old.adopt()


async def test_a_probe_without_an_answer_is_an_error(dsn: str, schema: str) -> None:  # I-9
    async with older(dsn, schema) as old:
        await old.write()
        await old.kernel.execute(
            """CREATE OR REPLACE FUNCTION @schema@.old_table_open(p_table regclass) RETURNS boolean
               LANGUAGE sql STABLE AS 'SELECT NULL::boolean'"""
        )
        with pytest.raises(DatabaseError, match="not answered"):
            await old.adopt()
        assert await old.ours() == []


async def test_what_is_no_such_table_is_named(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        session = old.kernel.session
        await old.kernel.execute("CREATE VIEW @schema@.seen AS SELECT * FROM @schema@.sandbox_cleanup_jobs")
        await old.kernel.execute("CREATE TABLE @schema@.else (status text)")
        with pytest.raises(DatabaseError, match="no ordinary table"):
            await adoption.adopt(session, OldTable("seen", PROVIDER), limit=1)
        await old.kernel.execute("INSERT INTO @schema@.else VALUES ('pending')")
        with pytest.raises(SchemaNotReady, match="does not exist"):
            await adoption.adopt(session, OldTable("else", PROVIDER), limit=1)
        preview = await adoption.preview(session, OldTable("else", PROVIDER))
        assert preview.missing is not None
        assert len(preview.missing) == 16
        assert "column lease_owner" in preview.missing
        assert preview.open is None
        # Names are names, whatever is in them.
        await old.kernel.execute('ALTER TABLE @schema@.sandbox_cleanup_jobs RENAME TO "Old; DROP"')
        await old.kernel.execute(
            """INSERT INTO @schema@."Old; DROP" (sandbox_id, run_id, attempt) VALUES ('a', 'b', 1)"""
        )
        done = await adoption.adopt(session, OldTable(f'{schema}."Old; DROP"', PROVIDER), limit=1)
        assert (done.found, done.copied) == (True, 1)
        await old.kernel.execute('ALTER TABLE @schema@."Old; DROP" RENAME TO sandbox_cleanup_jobs')


# --- the proof ---------------------------------------------------------------------------------------


async def test_a_confirmed_copy_ends_its_row_in_the_same_call(dsn: str, schema: str) -> None:  # I-33, I-39
    async with older(dsn, schema) as old:
        await old.adopted(routing_domain="eu", last_error="x", status="claimed", lease_owner="w")
        due = await old.due()
        await old.write("other")
        await sandboxes.accept(old.kernel.session, due, outcome="deleted", routing_domain="eu")
        await old.kernel.advance(5)
        assert await old.confirm(due, "eu") == "completed"
        row, other = await old.rows()
        (copy,) = await old.ours()
        assert (row["status"], row["deleted_at"]) == ("deleted", copy.accepted_at)
        assert (row["lease_owner"], row["lease_expires_at"], row["last_error"]) == (None, None, None)
        assert row["updated_at"] == copy.confirmed_at
        assert other["status"] == "pending"
        assert await old.confirm(due, "eu") == "already_completed"
        assert await old.adopt() == (0, 1)  # the other one


async def test_a_refused_confirmation_leaves_the_row_alone(dsn: str, schema: str) -> None:  # I-31, I-32
    async with older(dsn, schema) as old:
        await old.adopted(routing_domain="eu")
        due = await old.due()
        before = values(await old.row())
        assert await old.confirm(due, "us") == "wrong_routing_domain"
        assert await old.confirm(attrs.evolve(due, token=1), "eu") == "lease_lost"
        assert await old.confirm(attrs.evolve(due, sandbox="none"), "eu") == "missing_obligation"
        assert values(await old.row()) == before


async def test_a_domain_that_is_learned_late_ends_the_row_that_had_none(dsn: str, schema: str) -> None:
    # I-29, I-33, I-42: the event tells what the obligation was filed under, and that is how the row is found.
    async with older(dsn, schema) as old:
        copy = await old.adopted()
        assert await old.confirm(await old.due(), "eu") == "completed"
        assert (await old.row())["status"] == "deleted"
        (event,) = await old.kernel.fetch("SELECT * FROM @schema@.sandbox_events")
        assert (event["routing_domain"], event["details"]) == (
            None,
            '{"outcome": "deleted", "routing_domain": "eu"}',
        )
        (after,) = await old.ours()
        assert (after.sandbox, after.routing_domain) == (copy.sandbox, "eu")


@pytest.mark.parametrize("outcome", ["deleted", "already_absent"])
@pytest.mark.parametrize("filed", [None, "eu"])
@pytest.mark.parametrize("seen", [None, "eu"])
async def test_a_host_that_knows_nothing_of_the_table_leaves_a_proof(
    dsn: str, schema: str, filed: str | None, seen: str | None, outcome: str
) -> None:  # I-11, I-15, I-16, I-17
    async with older(dsn, schema) as old:
        await old.adopted(routing_domain=filed, lease_owner="w", last_error="x")
        due = await old.due()
        await sandboxes.accept(old.kernel.session, due, outcome=outcome, routing_domain=seen)
        await old.kernel.advance(5)
        assert await old.confirm(due, seen, outcome, alone=True) == "completed"
        assert (await old.row())["status"] == "pending"
        assert await old.adopt() == (1, 0)
        (copy,) = await old.ours()
        row = await old.row()
        assert (row["status"], row["deleted_at"]) == ("deleted", copy.accepted_at)
        assert (row["lease_owner"], row["last_error"]) == (None, None)
        assert await old.adopt() == (0, 0)


@pytest.mark.parametrize("seen", [None, "eu"])
async def test_a_row_that_learns_its_domain_is_not_adopted_for_ever(
    dsn: str, schema: str, seen: str | None
) -> None:  # I-11
    async with older(dsn, schema) as old:
        await old.adopted()
        due = await old.due()
        # An older worker has found out meanwhile.
        await old.work("UPDATE @schema@.sandbox_cleanup_jobs SET routing_domain = 'eu'")
        assert await old.confirm(due, seen) == "completed"
        assert (await old.row())["status"] == "pending"  # it was filed otherwise
        if seen is None:
            assert await old.adopt() == (0, 1)  # where it was looked for says nothing: once more, there
            assert await old.confirm(await old.due(), "eu", "already_absent") == "completed"
        else:
            assert await old.adopt() == (1, 0)
        assert (await old.row())["status"] == "deleted"
        assert await old.adopt() == (0, 0)
        assert all(one.confirmed_at for one in await old.ours())


async def own(
    old: Old, *, filed: str | None, seen: str | None, outcome: str = "deleted", gone: bool = True
) -> sandboxes.Obligation:
    """A sandbox of this generation's, with the identity of the older row."""
    await old.kernel.execute(
        """INSERT INTO @schema@.sandboxes (sandbox, provider, provider_id, run_id, attempt, environment, routing_domain,
                  created_at, custody_at, wanted_at, due_at, certain_at)
           SELECT 'own', 'daytona', 'box', 'run', 1, 'prod', $1, n, n, n, n, n FROM @schema@.clock() n""",
        filed,
    )
    await old.kernel.execute(
        "INSERT INTO @schema@.billing_jobs (run_id, created_at, due_at) VALUES ('run', '2030-01-01', '2031-01-01')"
    )
    due = next(one for one in await old.claim() if one.sandbox == "own")
    if gone:
        assert await old.confirm(due, seen, outcome, alone=True) == "completed"
    return due


@pytest.mark.parametrize(
    ("row", "filed", "seen", "outcome", "proven"),
    [
        (None, None, None, "deleted", True),  # I-15: the same domain, or none like it, however it ended
        (None, None, None, "already_absent", True),
        ("eu", "eu", "eu", "already_absent", True),
        ("eu", None, "eu", "deleted", True),
        (
            None,
            None,
            "eu",
            "deleted",
            True,
        ),  # I-13: filed alike, and seen to be deleted where it is known to be
        (None, None, "eu", "already_absent", False),  # I-13: only looked at in one place
        (None, "eu", "eu", "deleted", False),  # I-13: filed otherwise
        ("eu", None, None, "deleted", False),
        ("eu", "us", "us", "deleted", False),
        ("eu", None, "us", "deleted", False),
    ],
)
async def test_an_obligation_of_ours_proves_what_it_is_exactly(
    dsn: str, schema: str, row: str | None, filed: str | None, seen: str | None, outcome: str, proven: bool
) -> None:
    async with older(dsn, schema) as old:
        await own(old, filed=filed, seen=seen, outcome=outcome)
        await old.kernel.advance(5)
        await old.write(routing_domain=row)
        assert await old.adopt() == ((1, 0) if proven else (0, 1))
        if not proven:
            assert await old.confirm(await old.due(), row, "already_absent") == "completed"
        assert (await old.row())["status"] == "deleted"
        assert await old.adopt() == (0, 0)


@pytest.mark.parametrize(
    "other", [{"run_id": "x"}, {"attempt": 2}, {"environment": "x"}, {"sandbox_id": "x"}]
)
async def test_another_identity_proves_nothing(dsn: str, schema: str, other: dict[str, Any]) -> None:  # I-15
    async with older(dsn, schema) as old:
        await own(old, filed=None, seen="eu")
        await old.write(**other)
        assert await old.adopt() == (0, 1)


async def test_a_domain_that_no_event_tells_of_proves_nothing(dsn: str, schema: str) -> None:  # I-13, I-42
    async with older(dsn, schema) as old:
        await own(old, filed=None, seen=None)
        await sandboxes.record_custody(old.kernel.session, [sandboxes.Custody("own", "box", "eu")])
        await old.write()
        assert await old.adopt() == (0, 1)


async def test_another_provider_proves_nothing(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        await own(old, filed=None, seen=None)
        await old.kernel.execute("UPDATE @schema@.sandboxes SET provider = 'modal'")
        await old.write()
        assert await old.adopt() == (0, 1)


async def test_an_event_alone_proves_nothing(dsn: str, schema: str) -> None:  # I-15
    async with older(dsn, schema) as old:
        await own(old, filed=None, seen="eu")
        await old.kernel.execute("UPDATE @schema@.sandboxes SET confirmed_at = NULL, due_at = '2030-01-01'")
        await old.write()
        assert await old.adopt() == (0, 1)


async def test_what_is_ours_is_not_copied(dsn: str, schema: str) -> None:  # I-19
    async with older(dsn, schema) as old:
        due = await own(old, filed=None, seen=None, gone=False)
        await old.write()
        assert await old.adopt() == (0, 0)
        await sandboxes.accept(old.kernel.session, due, outcome="deleted", routing_domain=None)
        assert await old.adopt() == (0, 0)  # taken is not gone
        assert await old.confirm(due, "eu") == "completed"
        assert (await old.row())["status"] == "deleted"  # I-33: any obligation that was filed like it
        assert [one.sandbox for one in await old.ours()] == ["own"]


async def test_a_copy_of_what_is_proven_ends_with_its_row(dsn: str, schema: str) -> None:  # I-12, I-14
    async with older(dsn, schema) as old:
        copy = await old.adopted(status="blocked", block_reason="no such account", last_error="x")
        await own(old, filed=None, seen="eu")
        assert await old.adopt() == (1, 0)
        ours = {one.sandbox: one for one in await old.ours()}
        ended = ours[copy.sandbox]
        assert (ended.state, ended.last_error) == ("gone", None)
        assert ended.accepted_at == ours["own"].accepted_at == (await old.row())["deleted_at"]
        # What the provider said is told of no other sandbox.
        assert await old.kernel.fetchval("SELECT count(*) FROM @schema@.sandbox_events") == 1
        assert await old.adopt() == (0, 0)


# --- beside older workers ----------------------------------------------------------------------------

CLAIM = """
UPDATE @schema@.sandbox_cleanup_jobs
   SET status = 'claimed', lease_owner = 'w', lease_expires_at = @schema@.clock() + interval '1 minute'
 WHERE status = 'pending' RETURNING 1
"""
COMPLETE = """
UPDATE @schema@.sandbox_cleanup_jobs SET status = 'deleted', deleted_at = @schema@.clock(), lease_owner = NULL
 WHERE status <> 'deleted' RETURNING 1
"""


async def test_a_live_lease_is_respected_until_it_ends(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        await old.write()
        await old.work(CLAIM)
        assert await old.adopt() == (0, 0)
        assert await old.ours() == []
        await old.kernel.advance(59)
        assert await old.adopt() == (0, 0)
        await old.kernel.advance(1)
        assert await old.adopt() == (0, 1)
        assert (await old.row())["lease_owner"] == "w"  # theirs all the same


async def test_what_is_proven_ends_whoever_has_it(dsn: str, schema: str) -> None:  # I-17
    async with older(dsn, schema) as old:
        await own(old, filed=None, seen=None)
        await old.write()
        await old.work(CLAIM)
        assert await old.adopt() == (1, 0)
        row = await old.row()
        assert (row["status"], row["lease_owner"], row["lease_expires_at"]) == ("deleted", None, None)
        assert await old.work(COMPLETE) == []


@pytest.mark.parametrize(("statement", "then"), [(CLAIM, (0, 0)), (COMPLETE, (0, 0)), (None, (0, 1))])
async def test_a_row_that_an_older_worker_holds_waits_for_the_next_pass(
    dsn: str, schema: str, statement: str | None, then: tuple[int, int]
) -> None:
    async with older(dsn, schema) as old:
        await old.write()
        await old.write("free", status="waiting")
        await old.caller.begin()
        await old.work("SELECT 1 FROM @schema@.sandbox_cleanup_jobs WHERE sandbox_id = 'box' FOR UPDATE")
        if statement is not None:
            await old.work(statement.replace("WHERE", "WHERE sandbox_id = 'box' AND"))
        assert await old.adopt() == (0, 1)  # and nothing waits for it
        await old.caller.commit()
        assert await old.adopt() == then


async def test_a_proven_row_that_is_held_waits_too(dsn: str, schema: str) -> None:  # I-18
    async with older(dsn, schema) as old:
        await old.adopted()
        due = await old.due()
        await old.kernel.execute(
            "ALTER FUNCTION @schema@.confirm_adopted(text, text, bigint, text, text) SET lock_timeout = '1min'"
        )
        await old.caller.begin()
        await old.work(CLAIM)
        assert await old.confirm(due) == "completed"  # ours is, without waiting
        assert await old.adopt() == (0, 0)
        await old.caller.commit()
        assert (await old.row())["status"] == "claimed"
        assert await old.adopt() == (1, 0)


async def test_a_row_that_changes_during_the_call_is_left_to_the_next(dsn: str, schema: str) -> None:
    # The caller's pass has read everything when another session changes the row: its own lock comes too late.
    async with older(dsn, schema) as old, open_kernel(dsn, schema) as other:
        await old.write()
        await old.kernel.execute(
            """CREATE OR REPLACE FUNCTION @schema@.adopted_name(p_provider text, p_sandbox_id text, p_run_id text,
                   p_attempt integer, p_environment text, p_routing_domain text) RETURNS text LANGUAGE plpgsql AS $$
               BEGIN PERFORM pg_advisory_xact_lock_shared(4711); RETURN 'adopted:' || p_sandbox_id; END $$"""
        )
        await old.caller.execute("SELECT pg_advisory_lock(4711)")
        done: list[tuple[int, int]] = []

        async def pass_() -> None:
            done.append(await old.adopt())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_)
            await blocked(other, old.kernel)
            await old.work(COMPLETE)
            await old.caller.execute("SELECT pg_advisory_unlock(4711)")
        assert done == [(0, 0)]
        assert await old.ours() == []


async def blocked(by: Kernel, kernel: Kernel) -> None:
    """Wait until the server itself says that this session waits for a lock."""
    assert kernel.session.backend is not None
    pid = kernel.session.backend.pid

    async def waits() -> Any:
        return await by.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", pid)

    await eventually(waits)


async def test_two_passes_at_once_do_everything_once(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        for name in "abcd":
            await old.write(name)
        await old.caller.begin()
        there = await adoption.adopt(old.caller.doors(old.kernel).session, OLD, limit=2)
        assert (there.settled, there.copied) == (0, 2)
        assert await old.adopt() == (0, 2)  # what the other one has is neither waited for nor copied
        await old.caller.commit()
        assert await old.adopt() == (0, 0)
        assert sorted(str(one.provider_id) for one in await old.ours()) == ["a", "b", "c", "d"]


async def test_our_rows_that_are_held_are_not_waited_for(dsn: str, schema: str) -> None:  # I-18, I-40
    async with older(dsn, schema) as old:
        await old.adopted(status="blocked", block_reason="why")
        await own(old, filed=None, seen="eu")
        await old.caller.begin()
        await old.work("SELECT 1 FROM @schema@.sandboxes FOR UPDATE")
        assert await old.adopt() == (1, 0)
        await old.caller.commit()
        assert await old.adopt() == (0, 0)


async def test_beside_older_workers_everything_ends(dsn: str, schema: str) -> None:  # I-18, I-40
    chance = random.Random(schema)
    some = "sandbox_id IN (SELECT sandbox_id FROM @schema@.sandbox_cleanup_jobs ORDER BY random() LIMIT 3)"

    async def older_worker(caller: Caller, kernel: Kernel) -> None:
        """Claims, completes and crashes, several rows at a time, and learns where things are."""
        doing = (CLAIM, COMPLETE, "UPDATE @schema@.sandbox_cleanup_jobs SET routing_domain = 'eu' WHERE true")
        for _ in range(25):
            await caller.begin()
            for statement in chance.sample(doing, 2):
                await caller.execute(
                    kernel.render(statement.split("RETURNING")[0])
                    + kernel.render(
                        f" AND ctid = ANY (ARRAY(SELECT ctid FROM @schema@.sandbox_cleanup_jobs WHERE {some}"
                        " FOR UPDATE SKIP LOCKED))"
                    )
                )
            await (caller.commit if chance.random() < 0.8 else caller.rollback)()

    async def host(old: Old) -> None:
        for turn in range(25):
            await old.adopt(limit=5)
            for due in await old.claim():
                outcome = chance.choice(["deleted", "already_absent"])
                seen = due.routing_domain or chance.choice([None, "eu"])
                answer = await old.confirm(due, seen, outcome, alone=turn % 3 == 0)
                assert answer in ("completed", "already_completed", "busy")

    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(older(dsn, schema))
        for n in range(60):
            await old.write(f"box-{n}", routing_domain=chance.choice([None, "eu"]))
        callers = [await stack.enter_async_context(open_caller(dsn, schema)) for _ in range(3)]
        kernels = [await stack.enter_async_context(open_kernel(dsn, schema)) for _ in range(2)]
        async with trio.open_nursery() as nursery:
            for caller in callers:
                nursery.start_soon(older_worker, caller, old.kernel)
            for kernel in kernels:
                nursery.start_soon(host, Old(kernel, old.caller))
        await old.kernel.advance(61)  # whoever has claimed and crashed
        await host(old)
        assert {row["status"] for row in await old.rows()} == {"deleted"}
        assert all(one.confirmed_at for one in await old.ours())


# --- what must not break -----------------------------------------------------------------------------


async def test_what_is_wrong_with_the_table_does_not_undo_a_confirmation(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        await old.adopted()
        due = await old.due()
        await old.kernel.execute("ALTER TABLE @schema@.sandbox_cleanup_jobs RENAME last_error TO gone")
        assert await old.confirm(due) == "completed"
        with pytest.raises(SchemaNotReady, match="last_error"):
            await old.adopt()
        await old.kernel.execute("ALTER TABLE @schema@.sandbox_cleanup_jobs RENAME gone TO last_error")
        assert await old.adopt() == (1, 0)


async def test_a_confirmation_needs_no_table(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        await old.adopted()
        await old.kernel.execute("DROP TABLE @schema@.sandbox_cleanup_jobs")
        assert await old.confirm(await old.due()) == "completed"


async def test_malformed_rows_are_named_and_left_alone(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        await old.write(None)
        await old.write("")
        await old.write("a", run_id=None)
        await old.write("b", run_id="r" * 3_000)
        await old.write("c", attempt=None)
        await old.write("d", attempt=2**40)
        await old.write("fine", attempt_count=None, failure_count=None, available_at=None, created_at=None)
        await old.write(
            "leased", lease_expires_at=await old.kernel.fetchval("SELECT @schema@.clock() + interval '1 h'")
        )
        await own(old, filed="us", seen="us")
        await old.write("box", routing_domain="us")
        before = await adoption.preview(old.kernel.session, OLD, most_faults=4)
        assert (before.found, before.missing, before.indexed) == (True, None, True)
        assert (before.open, before.proven, before.to_copy, before.leased) == (9, 1, 1, 1)
        assert (before.under_way, before.malformed) == (0, 6)
        assert before.faults is not None
        assert len(before.faults) == 4
        assert "sandbox 'a', run NULL: no run id" in " / ".join(before.faults)
        assert await adoption.adopt(old.kernel.session, OLD, limit=10) == adoption.Adopted(True, 1, 1, 6)
        after = await adoption.preview(old.kernel.session, OLD)
        assert (after.open, after.proven, after.to_copy, after.leased) == (8, 0, 0, 1)
        assert (after.under_way, after.malformed) == (1, 6)


@pytest.mark.parametrize(
    ("index", "seek"),
    [
        ("(status, available_at)", True),
        ("(available_at) WHERE status <> 'deleted'", True),
        ("(available_at)", False),
    ],
)
async def test_a_missing_index_is_told(dsn: str, schema: str, index: str, seek: bool) -> None:
    async with older(dsn, schema) as old:
        await old.kernel.execute("DROP INDEX @schema@.old_claim")
        await old.kernel.execute(f"CREATE INDEX ON @schema@.sandbox_cleanup_jobs {index}")
        assert (await adoption.preview(old.kernel.session, OLD)).indexed is seek
        assert (await adoption.preview(old.kernel.session, OldTable("none", PROVIDER))).found is False


async def test_missing_rights_are_told(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        session, role = old.caller.doors(old.kernel).session, f"{schema}_reader"
        await old.caller.begin()
        await old.work(f"CREATE ROLE {role}")
        await old.work(f"GRANT USAGE ON SCHEMA @schema@ TO {role}")
        await old.work(f"GRANT SELECT ON @schema@.sandbox_cleanup_jobs TO {role}")
        await old.work(f"SET LOCAL ROLE {role}")
        assert (await adoption.preview(session, OLD)).missing == ["right to UPDATE"]
        await old.caller.rollback()


async def test_copies_are_not_billed_and_spoil_no_bill(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        session = old.kernel.session
        # A run that was brought along keeps its id: the older generation tried it too, as often.
        item = await old.kernel.started(org_id="acme")
        fence = (item.run_id, item.attempt, item.token)
        await old.adopted(run_id=item.run_id)
        await sandboxes.reserve(session, [sandboxes.Reservation(*fence, "own", "pretended")], due_s=60.0)
        await old.kernel.advance(5)
        await sandboxes.record_custody(session, [sandboxes.Custody("own", "p")])
        await runners.detach(session, [runners.Detachment(*fence, "own", 30.0, 600.0)])
        await old.kernel.advance(20)
        await runners.push(session, [settle.Settlement(*fence, "completed", '{"output": 1}')])
        await old.kernel.advance(100)

        async def pass_() -> billing.Finalised:
            return await billing.finalise(session, limit=10, grace_s=60.0, again_s=0.0)

        assert (await pass_()).postponed == 1
        own_, _ = await sandboxes.claim_cleanup(session, ["pretended"], token=7, limit=9, lease_s=30.0)
        assert await old.confirm(own_[0], alone=True) == "completed"
        assert (await pass_()).finalised == 1
        assert {(one.kind, one.provider, one.org_id, one.seconds) for one in await billing.read(session)} == {
            ("runner", "pretended", "acme", 20.0),
            ("sandbox", "pretended", "acme", 120.0),
        }


async def test_a_run_of_ours_stays_until_its_copies_are_gone_and_takes_them_along(
    dsn: str, schema: str
) -> None:
    async with older(dsn, schema) as old:
        item = await old.kernel.started()
        await old.kernel.complete(item)
        await old.kernel.deliver()
        await old.adopted(run_id=item.run_id)
        await old.adopted(sandbox_id="theirs", run_id="theirs")
        await old.kernel.advance(100)

        async def purge() -> int:
            pass_ = await maintenance.purge_runs(
                old.kernel.session, age_s=50.0, limit=10, ledger=True, start=None
            )
            return pass_.items

        assert await purge() == 0
        for due in await old.claim():
            assert await old.confirm(due) == "completed"
        assert await purge() == 1
        assert [one.run_id for one in await old.ours()] == ["theirs"]
        assert await old.adopt() == (0, 0)


async def test_a_census_knows_what_was_adopted(dsn: str, schema: str) -> None:
    async with older(dsn, schema) as old:
        copy = await old.adopted()
        assert await sandboxes.unknown(old.kernel.session, [copy.sandbox, "x"]) == ["x"]


# --- what it costs -----------------------------------------------------------------------------------

_HISTORY = """
INSERT INTO @schema@.sandbox_cleanup_jobs (sandbox_id, run_id, attempt, environment, status, deleted_at)
SELECT 'gone-' || n, 'run-' || n, 1, 'prod', 'deleted', '2029-12-31' FROM generate_series(1, 100000) n;
INSERT INTO @schema@.sandboxes (sandbox, provider, provider_id, run_id, attempt, environment, created_at, wanted_at,
       accepted_at, confirmed_at, due_at, certain_at)
SELECT 'adopted:' || n, 'daytona', 'gone-' || n, 'run-' || n, 1, 'prod', t, t, t, t, 'infinity', t
  FROM generate_series(1, 20000) n, @schema@.clock() t;
"""


@pytest.mark.parametrize(
    ("index", "analysed"),
    [("(status, available_at)", False), ("(available_at) WHERE status <> 'deleted'", True)],
)
async def test_a_long_history_is_not_read(dsn: str, schema: str, index: str, analysed: bool) -> None:  # I-8
    async with older(dsn, schema) as old:
        kernel = old.kernel
        await kernel.execute("ALTER TABLE @schema@.sandbox_cleanup_jobs SET (autovacuum_enabled = off)")
        await kernel.execute("DROP INDEX @schema@.old_claim")
        await kernel.execute(f"CREATE INDEX ON @schema@.sandbox_cleanup_jobs {index}")
        if analysed:  # when it was tiny
            await kernel.execute("ANALYZE @schema@.sandbox_cleanup_jobs, @schema@.sandboxes")
        for statement in _HISTORY.split(";")[:-1]:
            await kernel.execute(statement)

        async def pass_(doors: Kernel, _: Batch) -> None:
            assert (await adoption.adopt(doors.session, OLD, limit=10)).found

        nothing = await rows_read(old.caller, kernel, pass_, Batch([]))
        assert nothing == {}
        for n in range(3):
            await old.write(f"new-{n}")
        some = await rows_read(old.caller, kernel, pass_, Batch([]))
        assert sum(some.values()) <= 20, some
        assert await old.adopt() == (0, 3)
        due = (await old.claim())[0]

        async def confirm(doors: Kernel, _: Batch) -> None:
            answer = await adoption.confirm(doors.session, OLD, due, outcome="deleted", routing_domain=None)
            assert answer == "completed"

        confirmed = await rows_read(old.caller, kernel, confirm, Batch([]))
        assert sum(confirmed.values()) <= 20, confirmed
