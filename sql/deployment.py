"""Bringing a database to the shape that this version needs, and telling whether it has it.

Owns the schema, its migrations, the function bundle and their record. It never drops or rewrites anything that
an older host may still use. Any number of processes may call it at once.
"""

from __future__ import annotations

import hashlib
import logging
import secrets

import attrs
import trio

from sql import bundle
from sql.bundle import KERNEL, Part
from sql.connection import Session
from sql.errors import HostTooOld, MissingRights, SchemaNotReady

log = logging.getLogger("runlane.deployment")

_LOCK_POLL_S = 0.1
_LOCK_WAIT_S = 120.0
_STATEMENT_S = 60.0
# A concurrent build waits for every old snapshot; it is not hurried.
_CONCURRENT_S = 3600.0

_RECORD = """
CREATE TABLE IF NOT EXISTS @schema@.migrations (
    version integer PRIMARY KEY, name text NOT NULL, checksum text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE IF NOT EXISTS @schema@.deployment (key text PRIMARY KEY, value text NOT NULL);
"""

_SHAPE = """
SELECT
    (SELECT array_agg(c.relname || '.' || a.attname)
       FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
      WHERE c.relnamespace = n.oid AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped) AS columns,
    (SELECT array_agg(c.relname)
       FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid
      WHERE c.relnamespace = n.oid AND i.indisvalid AND i.indisready) AS indexes,
    (SELECT array_agg(DISTINCT p.proname) FROM pg_proc p WHERE p.pronamespace = n.oid) AS functions
FROM pg_namespace n WHERE n.nspname = $1
"""


@attrs.frozen
class Readiness:
    """Whether the schema has the shape that this version needs; ``missing`` names what it lacks."""

    ready: bool
    missing: tuple[str, ...]

    def problem(self, schema: str) -> str:
        """What is wrong with the schema, in words."""
        if self.missing == (_whole(schema),):
            return f"schema {schema} does not exist"
        return f"schema {schema} lacks {', '.join(self.missing)}"


def _whole(schema: str) -> str:
    return f"schema {schema}"


async def check(session: Session, part: Part = KERNEL) -> Readiness:
    """Compare the schema's shape with the one this version needs. Reads catalogues only.

    Raises ``HostTooOld`` when the database records a minimum host version above this one.
    """
    schema = session.options.schema
    row = await session.fetchrow(_SHAPE, schema)
    if row is None:
        return Readiness(False, (_whole(schema),))
    columns = {tuple(name.split(".", 1)) for name in row["columns"] or ()}
    indexes, functions = set(row["indexes"] or ()), set(row["functions"] or ())
    wanted = bundle.shape(part)
    missing = [f"column {table}.{column}" for table, column in sorted(wanted.columns - columns)]
    missing += [f"index {name}" for name in sorted(wanted.indexes - indexes)]
    missing += [f"function {name}" for name in sorted(wanted.functions - functions)]
    if ("deployment", "value") in columns:
        await _refuse_newer(session, part)
    return Readiness(not missing, tuple(missing))


async def require(session: Session) -> None:
    """Raise ``SchemaNotReady`` unless the schema has the shape that this version needs. Changes nothing."""
    readiness = await check(session)
    if not readiness.ready:
        raise SchemaNotReady(
            f"{readiness.problem(session.options.schema)}; `runlane migrate` builds what is missing"
        )


async def ensure(session: Session, part: Part = KERNEL) -> bool:
    """Bring the schema up to this version and return whether anything was changed.

    Needs the right to create the schema and its objects only when something is missing. Raises ``MissingRights``,
    ``HostTooOld`` or ``SchemaNotReady``.
    """
    if (await check(session, part)).ready and await _functions_version(session) >= part.version:
        return False
    await _lock(session)
    try:
        # Whoever held the lock before may have done it all.
        if not (await check(session, part)).ready or await _functions_version(session) < part.version:
            await _build(session, part)
    except MissingRights as exc:
        raise MissingRights(
            f"the role may not create or change schema {session.options.schema!r} ({exc}); grant it CREATE on the "
            "database, or run `runlane migrate` once with a role that may",
            exc.sqlstate,
        ) from exc
    finally:
        if session.usable:
            await session.fetchval("SELECT pg_advisory_unlock($1)", _lock_key(session))
    readiness = await check(session, part)
    if not readiness.ready:
        raise SchemaNotReady(f"schema {session.options.schema!r} still lacks {', '.join(readiness.missing)}")
    return True


async def _build(session: Session, part: Part) -> None:
    schema = session.options.schema
    # Asked first: even with IF NOT EXISTS, creating needs a right that whoever was given a schema may lack.
    if not await session.fetchval("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", schema):
        await session.script(bundle.render("CREATE SCHEMA IF NOT EXISTS @schema@", schema))
    await session.script(bundle.render(_RECORD, schema))
    await _refuse_newer(session, part)
    applied = {
        row["version"]: (row["name"], row["checksum"])
        for row in await session.fetch(
            f"SELECT version, name, checksum FROM {bundle.quote(schema)}.migrations"
        )
    }
    for step in bundle.migrations(part):
        if step.version in applied:
            name, checksum = applied[step.version]
            if name != step.name:
                raise SchemaNotReady(
                    f"schema {schema!r} is in use for something else ({name} was applied to it, not {step.name})"
                )
            if checksum != step.checksum:
                log.warning("event=migration_differs schema=%s step=%s", schema, step.name)
            continue
        await _apply(session, step)
        log.info("event=migrated schema=%s step=%s", schema, step.name)
    # One that somebody has dropped is put back; the functions of a newer version are left alone.
    version = await _functions_version(session)
    if version < part.version or (version == part.version and not (await check(session, part)).ready):
        await session.script(
            "SET LOCAL check_function_bodies = off;"
            + bundle.render(bundle.functions(part), schema)
            + _record("bundle_version", str(part.version), schema)
            + _record("bundle_checksum", bundle.bundle_checksum(part), schema),
            timeout_s=_STATEMENT_S,
        )
        log.info("event=functions_replaced schema=%s version=%s", schema, part.version)


async def _apply(session: Session, step: bundle.Migration) -> None:
    schema = session.options.schema
    done = (
        f"INSERT INTO {bundle.quote(schema)}.migrations (version, name, checksum) "
        f"VALUES ({step.version}, '{step.name}', '{step.checksum}');"
    )
    text = bundle.render(step.text, schema)
    if not step.concurrent:
        # The statements of one script are one transaction, undone as a whole by an error.
        await session.script(f"SET LOCAL lock_timeout = '2s'; {text} {done}", timeout_s=_STATEMENT_S)
        return
    # A build that was interrupted leaves an invalid index of that name in the way.
    for name in await _invalid_indexes(session):
        await session.script(f"DROP INDEX CONCURRENTLY IF EXISTS {bundle.quote(schema)}.{bundle.quote(name)}")
    await session.script(text, timeout_s=_CONCURRENT_S)
    await session.script(done)


async def _invalid_indexes(session: Session) -> list[str]:
    rows = await session.fetch(
        """SELECT c.relname FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid
            WHERE c.relnamespace = $1::text::regnamespace AND NOT i.indisvalid""",
        bundle.quote(session.options.schema),
    )
    return [row["relname"] for row in rows]


async def _refuse_newer(session: Session, part: Part) -> None:
    minimum = await session.fetchval(
        f"SELECT value FROM {bundle.quote(session.options.schema)}.deployment WHERE key = 'min_host_version'"
    )
    if minimum is not None and int(minimum) > part.host_version:
        raise HostTooOld(
            f"schema {session.options.schema!r} needs hosts of version {minimum} or later, this one is "
            f"{part.host_version}; upgrade runlane here"
        )


async def _functions_version(session: Session) -> int:
    schema = bundle.quote(session.options.schema)
    if not await session.fetchval("SELECT to_regclass($1) IS NOT NULL", f"{schema}.deployment"):
        return 0
    value = await session.fetchval(f"SELECT value FROM {schema}.deployment WHERE key = 'bundle_version'")
    return int(value or 0)


def _record(key: str, value: str, schema: str) -> str:
    return (
        f"INSERT INTO {bundle.quote(schema)}.deployment (key, value) VALUES ('{key}', '{value}') "
        "ON CONFLICT (key) DO UPDATE SET value = excluded.value;"
    )


def _lock_key(session: Session) -> int:
    digest = hashlib.sha256(f"runlane {session.options.schema}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


async def _lock(session: Session) -> None:
    """Take the deployment lock by polling: a blocking wait would be one side of a deadlock with the snapshots
    that a concurrent index build of the lock's holder waits for."""
    with trio.move_on_after(_LOCK_WAIT_S):
        while not await session.fetchval("SELECT pg_try_advisory_lock($1)", _lock_key(session)):  # noqa: ASYNC110
            await trio.sleep(_LOCK_POLL_S)
        return
    raise SchemaNotReady(
        f"another process has been building schema {session.options.schema!r} for {_LOCK_WAIT_S:g} s"
    )


async def shared_secret(session: Session, name: str) -> str:
    """A secret that all hosts of this schema share; the first one that asks makes it."""
    table = f"{bundle.quote(session.options.schema)}.deployment"
    await session.execute(
        f"INSERT INTO {table} (key, value) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        name,
        secrets.token_urlsafe(48),
    )
    found: str = await session.fetchval(f"SELECT value FROM {table} WHERE key = $1", name)
    return found
