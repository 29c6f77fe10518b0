"""Deployment: any number of builders at once, readiness by shape, and old and new hosts side by side."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import trio

from sql import bundle, deployment
from sql.connection import Session, open_session
from sql.errors import ConfigError, HostTooOld, MissingRights, SchemaNotReady
from tests.support.kernel import open_kernel, options
from tests.support.servers import ask

pytestmark = pytest.mark.modes

# Raise bundle.BUNDLE_VERSION with every change to a released function, and add the pair here.
CHECKSUMS = {1: "34bf2b258dff09f11b3f846042f1e17c4885646bd38f15f8a3d847eb8bbda04a"}


@asynccontextmanager
async def session_on(dsn: str, schema: str) -> AsyncIterator[Session]:
    async with open_session(options(dsn, schema), "deploy") as session:
        yield session


async def test_many_build_an_empty_database_at_once(dsn: str, schema: str) -> None:
    changed: list[bool] = []

    async def build() -> None:
        async with session_on(dsn, schema) as session:
            changed.append(await deployment.ensure(session))
            assert (await deployment.check(session)).ready

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(build)
    assert True in changed
    assert ask(dsn, f'SELECT count(*) FROM "{schema}".migrations')[0][0] == len(bundle.migrations())


async def test_building_again_changes_nothing_and_asks_for_no_lock(dsn: str, schema: str) -> None:
    async with session_on(dsn, schema) as session, session_on(dsn, schema) as other:
        assert await deployment.ensure(session)
        await other.fetchval("SELECT pg_advisory_lock($1)", deployment._lock_key(other))
        for _ in range(3):
            assert not await deployment.ensure(session)


async def test_nothing_is_ready_before_it_is_built(dsn: str, schema: str) -> None:
    async with session_on(dsn, schema) as session:
        assert await deployment.check(session) == deployment.Readiness(False, (f"schema {schema}",))


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        ("DROP INDEX @schema@.runs_claim_idx", "index runs_claim_idx"),
        ("ALTER TABLE @schema@.runs DROP COLUMN labels", "column runs.labels"),
        ("DROP TABLE @schema@.waits", "column waits.created_at"),
    ],
)
async def test_what_is_missing_is_named(dsn: str, schema: str, damage: str, missing: str) -> None:
    async with session_on(dsn, schema) as session:
        await deployment.ensure(session)
        await session.script(bundle.render(damage, schema))
        readiness = await deployment.check(session)
        assert not readiness.ready
        assert missing in readiness.missing
        with pytest.raises(SchemaNotReady, match=missing):
            await deployment.ensure(session)


async def test_an_invalid_index_is_not_there(dsn: str, schema: str) -> None:
    async with session_on(dsn, schema) as session:
        await deployment.ensure(session)
        await session.execute(
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = $1::text::regclass",
            f'"{schema}".runs_lane_idx',
        )
        assert (await deployment.check(session)).missing == ("index runs_lane_idx",)


async def test_a_function_that_was_dropped_is_put_back(dsn: str, schema: str) -> None:
    async with session_on(dsn, schema) as session:
        await deployment.ensure(session)
        await session.script(bundle.render("DROP FUNCTION @schema@.expire_leases", schema))
        assert (await deployment.check(session)).missing == ("function expire_leases",)
        assert await deployment.ensure(session)
        assert (await deployment.check(session)).ready


async def test_a_newer_minimum_refuses_this_host_and_only_that(dsn: str, schema: str) -> None:
    async with session_on(dsn, schema) as session:
        await deployment.ensure(session)
        record = f"INSERT INTO \"{schema}\".deployment VALUES ('min_host_version', '{{}}') ON CONFLICT (key) DO UPDATE"
        record += " SET value = excluded.value"
        await session.execute(record.format(bundle.HOST_VERSION))
        assert not await deployment.ensure(session)
        await session.execute(record.format(bundle.HOST_VERSION + 1))
        for refused in (deployment.check, deployment.ensure):
            with pytest.raises(HostTooOld, match=str(bundle.HOST_VERSION + 1)):
                await refused(session)


async def test_an_older_host_leaves_newer_functions_alone(dsn: str, schema: str) -> None:
    async with session_on(dsn, schema) as session:
        await deployment.ensure(session)
        await session.script(
            bundle.render(
                """UPDATE @schema@.deployment SET value = '1000' WHERE key = 'bundle_version';
                   CREATE OR REPLACE FUNCTION @schema@.clock() RETURNS timestamptz LANGUAGE sql STABLE
                   AS $$ SELECT 'epoch'::timestamptz $$;
                   CREATE FUNCTION @schema@.of_the_future() RETURNS void LANGUAGE sql AS $$ $$""",
                schema,
            )
        )
        assert not await deployment.ensure(session)
        assert await session.fetchval(f'SELECT extract(epoch FROM "{schema}".clock())') == 0


async def test_a_newer_host_replaces_older_functions(dsn: str, schema: str) -> None:
    async with session_on(dsn, schema) as session:
        await deployment.ensure(session)
        await session.script(
            bundle.render(
                """UPDATE @schema@.deployment SET value = '0' WHERE key = 'bundle_version';
                   CREATE OR REPLACE FUNCTION @schema@.clock() RETURNS timestamptz LANGUAGE sql STABLE
                   AS $$ SELECT 'epoch'::timestamptz $$""",
                schema,
            )
        )
        assert await deployment.ensure(session)
        assert await session.fetchval(f'SELECT extract(epoch FROM "{schema}".clock())') > 0


@pytest.fixture
def plain_role(dsn: str) -> Iterator[str]:
    """A role that may connect and nothing else."""
    role = f"r_{secrets.token_hex(6)}"
    ask(dsn, f"CREATE ROLE {role} LOGIN")
    yield role
    ask(dsn, f"DROP OWNED BY {role}", f"DROP ROLE {role}")


async def become(session: Session, role: str) -> None:
    await session.execute(f"SET ROLE {role}")


async def test_a_role_without_rights_hears_what_to_grant(dsn: str, schema: str, plain_role: str) -> None:
    async with session_on(dsn, schema) as session:
        await become(session, plain_role)
        with pytest.raises(MissingRights, match="grant it CREATE on the database"):
            await deployment.ensure(session)
        assert session.usable
        assert not (await deployment.check(session)).ready


async def test_a_role_may_build_in_a_schema_that_it_was_given(dsn: str, schema: str, plain_role: str) -> None:
    ask(dsn, f'CREATE SCHEMA "{schema}" AUTHORIZATION {plain_role}')
    async with session_on(dsn, schema) as session:
        await become(session, plain_role)
        assert await deployment.ensure(session)
        assert not await deployment.ensure(session)


async def test_a_migration_that_fails_leaves_nothing_and_can_be_tried_again(dsn: str, schema: str) -> None:
    ask(dsn, f'CREATE SCHEMA "{schema}"', f'CREATE TABLE "{schema}".lanes (nothing integer)')  # in the way
    async with session_on(dsn, schema) as session:
        with pytest.raises(Exception, match="already exists"):
            await deployment.ensure(session)
        assert session.usable
        assert await session.fetchval(f"SELECT to_regclass('\"{schema}\".runs') IS NULL")
        await session.script(f'DROP TABLE "{schema}".lanes')
        assert await deployment.ensure(session)


async def test_a_frozen_builder_is_waited_for_only_so_long(
    dsn: str, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_LOCK_WAIT_S", 0.3)
    async with session_on(dsn, schema) as session, session_on(dsn, schema) as other:
        await other.fetchval("SELECT pg_advisory_lock($1)", deployment._lock_key(other))
        with pytest.raises(SchemaNotReady, match="another process"):
            await deployment.ensure(session)


async def test_the_shape_is_what_the_migrations_build(dsn: str, schema: str) -> None:
    # The shape is read off the files with expressions; the database is the judge of what they say.
    async with open_kernel(dsn, schema) as kernel:
        wanted = bundle.shape()
        columns = await kernel.fetch(
            """SELECT c.relname, a.attname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
                WHERE c.relnamespace = $1::text::regnamespace AND c.relkind = 'r' AND a.attnum > 0
                  AND NOT a.attisdropped AND c.relname NOT IN ('migrations', 'deployment')""",
            f'"{schema}"',
        )
        assert {tuple(row) for row in columns} == wanted.columns
        indexes = await kernel.fetch(
            """SELECT c.relname FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid
                WHERE c.relnamespace = $1::text::regnamespace AND NOT i.indisprimary""",
            f'"{schema}"',
        )
        assert {row[0] for row in indexes} == wanted.indexes
        functions = await kernel.fetch(
            "SELECT proname FROM pg_proc WHERE pronamespace = $1::text::regnamespace", f'"{schema}"'
        )
        assert {row[0] for row in functions} == wanted.functions


async def test_every_function_body_compiles(dsn: str, schema: str) -> None:
    # The bundle is loaded without looking into the bodies, because they call each other.
    async with open_kernel(dsn, schema) as kernel:
        await kernel.session.script("SET check_function_bodies = on;" + kernel.render(bundle.functions()))


async def test_schemas_beside_each_other_share_nothing(dsn: str, schema: str) -> None:
    second = f"{schema}_2"
    try:
        async with open_kernel(dsn, schema) as one, open_kernel(dsn, second) as two:
            await one.submit(run_id="same", idempotency_key="k")
            await two.submit(run_id="same", idempotency_key="k")
            assert len(await one.claim()) == len(await two.claim()) == 1
            assert await one.claim_lanes()
            assert await two.claim_lanes()
    finally:
        ask(dsn, f'DROP SCHEMA IF EXISTS "{second}" CASCADE')


async def test_a_schema_name_may_be_long_or_mixed(dsn: str) -> None:
    for name in (f"L{secrets.token_hex(31)}", f"Mixed_{secrets.token_hex(4)}"):
        try:
            async with open_kernel(dsn, name) as kernel:
                await kernel.submit()
                channel = await kernel.fetchval("SELECT @schema@.channel('terminals')")
                assert len(channel.encode()) <= 63
        finally:
            ask(dsn, f'DROP SCHEMA IF EXISTS "{name}" CASCADE')


@pytest.mark.parametrize("name", ["", "1a", "a-b", 'a"b', "a" * 64, "ä"])
def test_a_bad_schema_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        bundle.quote(name)


def test_a_changed_bundle_has_a_new_version() -> None:
    assert bundle.bundle_checksum() == CHECKSUMS[bundle.BUNDLE_VERSION], (
        "the functions changed: raise BUNDLE_VERSION if the last one was released, and write down the checksum "
        f"{bundle.bundle_checksum()}"
    )
