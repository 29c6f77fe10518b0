"""Door of the concern doctor: what an operator wants to know of a database that gives trouble.

Owns the reads. They are plain queries and not functions of the schema, because they have to work where that is missing,
old or half built. It judges nothing and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from sql import bundle
from sql.connection import Session

_SERVER = """
SELECT current_setting('server_version') AS version, current_setting('server_version_num')::integer AS version_number,
       quote_ident(current_user) AS role, pg_is_in_recovery() AS standby,
       current_setting('fsync')::boolean AS fsync, current_setting('full_page_writes')::boolean AS full_page_writes,
       -- As a new session has it, not as ours was told.
       (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit') AS synchronous_commit,
       current_setting('autovacuum')::boolean AS autovacuum,
       extract(epoch FROM clock_timestamp())::double precision AS clock,
       current_setting('max_connections')::integer
           - current_setting('superuser_reserved_connections')::integer AS most_connections,
       -- Of other roles' sessions most is hidden from a role without pg_read_all_stats, their type too; this is not.
       (SELECT sum(numbackends)::integer FROM pg_stat_database) AS connections,
       (SELECT count(*)::integer FROM pg_stat_activity
         WHERE backend_type = 'client backend' AND application_name LIKE 'runlane%') AS our_connections,
       (SELECT count(*)::integer FROM pg_stat_activity
         WHERE backend_type IS NULL AND usesysid IS NOT NULL
           AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)) AS hidden_snapshots
"""

# What keeps dead rows from being removed, the oldest first: sessions, prepared transactions, replication slots.
_HOLDERS = """
SELECT kind, what, age_s
  FROM (SELECT 'session' AS kind,
               format('pid %s (%s%s, %s)', a.pid, coalesce(nullif(a.application_name, ''), 'unnamed'),
                      ', as ' || a.usename, a.state) AS what,
               extract(epoch FROM clock_timestamp() - a.xact_start)::double precision AS age_s
          FROM pg_stat_activity a
         WHERE (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.pid <> pg_backend_pid()
           AND a.backend_type = 'client backend'
         UNION ALL
        SELECT 'prepared transaction', p.gid,
               extract(epoch FROM clock_timestamp() - p.prepared)::double precision
          FROM pg_prepared_xacts p
         UNION ALL
        SELECT 'inactive replication slot', s.slot_name::text, NULL
          FROM pg_replication_slots s
         WHERE NOT s.active AND (s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL)) h
 ORDER BY age_s DESC NULLS FIRST
 LIMIT 1
"""

_BLOAT = """
SELECT relname::text AS name, n_live_tup AS live, n_dead_tup AS dead
  FROM pg_stat_user_tables
 WHERE schemaname = $1
 ORDER BY n_dead_tup DESC
 LIMIT 1
"""

_STUCK_SANDBOXES = """
SELECT count(*)::integer FROM (
    SELECT 1 FROM @schema@.sandboxes
     WHERE confirmed_at IS NULL AND due_at = 'infinity' AND block_reason IS NOT NULL
     LIMIT 1000) t
"""

_HOSTS = """
SELECT name || ' pid ' || pid AS name, version FROM @schema@.hosts
 WHERE seen_at > @schema@.clock() - interval '1 minute'
 ORDER BY 1
"""

# Per bucket that has open runs a few seeks, whatever their number. Two indexes hold them: without turns, and with.
_UNSERVED = """
WITH RECURSIVE open AS (
    SELECT least((SELECT min(bucket) FROM @schema@.runs WHERE status IN ('queued', 'waiting') AND turn IS NULL),
                 (SELECT min(bucket) FROM @schema@.runs WHERE status IN ('queued', 'waiting') AND turn >= 0)) AS bucket
     UNION ALL
    SELECT least((SELECT min(r.bucket) FROM @schema@.runs r
                   WHERE r.status IN ('queued', 'waiting') AND r.turn IS NULL AND r.bucket > o.bucket),
                 (SELECT min(r.bucket) FROM @schema@.runs r
                   WHERE r.status IN ('queued', 'waiting') AND r.turn >= 0 AND r.bucket > o.bucket))
      FROM open o
     WHERE o.bucket IS NOT NULL
)
SELECT f.play, f.release_id, f.environment,
       extract(epoch FROM @schema@.clock() - f.due_at)::double precision AS late_s
  FROM open o
 CROSS JOIN LATERAL (
        (SELECT r.play, r.release_id, r.environment, r.due_at FROM @schema@.runs r
          WHERE r.status IN ('queued', 'waiting') AND r.turn IS NULL AND r.bucket = o.bucket
          ORDER BY r.due_at LIMIT 1)
         UNION ALL
        (SELECT r.play, r.release_id, r.environment, r.due_at FROM @schema@.runs r
          WHERE r.status IN ('queued', 'waiting') AND r.turn >= 0 AND r.bucket = o.bucket
          ORDER BY r.due_at LIMIT 1)
         ORDER BY due_at LIMIT 1) f
 WHERE f.due_at <= @schema@.clock()
   AND NOT EXISTS (SELECT 1 FROM @schema@.hosts h
                    WHERE o.bucket = ANY (h.buckets) AND h.seen_at > @schema@.clock() - interval '1 minute')
 ORDER BY late_s DESC
 LIMIT 20
"""

# Receivers that something is pending for, a seek each in the lanes of runs and in those of logs.
_UNDELIVERED = """
WITH RECURSIVE pending AS (
    SELECT least((SELECT min(lane_receiver) FROM @schema@.runs WHERE lane_pending),
                 (SELECT min(lane_receiver) FROM @schema@.lanes WHERE lane_pending)) AS receiver
     UNION ALL
    SELECT least((SELECT min(r.lane_receiver) FROM @schema@.runs r
                   WHERE r.lane_pending AND r.lane_receiver > p.receiver),
                 (SELECT min(l.lane_receiver) FROM @schema@.lanes l
                   WHERE l.lane_pending AND l.lane_receiver > p.receiver))
      FROM pending p
     WHERE p.receiver IS NOT NULL
)
SELECT p.receiver FROM pending p
 WHERE p.receiver IS NOT NULL
   AND NOT EXISTS (SELECT 1 FROM @schema@.hosts h
                    WHERE p.receiver = ANY (h.receivers) AND h.seen_at > @schema@.clock() - interval '1 minute')
 ORDER BY p.receiver
 LIMIT 20
"""


@attrs.frozen(slots=True, kw_only=True)
class Server:
    """The server and the role, quoted where SQL needs that. ``clock`` is its time, in seconds since the epoch.
    ``synchronous_commit`` is as a new session of the role has it. Connections are counted over all databases;
    ``our_connections`` are runlane's. ``hidden_snapshots``: sessions that hold one, but may not be looked at."""

    version: str
    version_number: int
    role: str
    standby: bool
    fsync: bool
    full_page_writes: bool
    synchronous_commit: str
    autovacuum: bool
    clock: float
    most_connections: int
    connections: int
    our_connections: int
    hidden_snapshots: int


@attrs.frozen(slots=True)
class Holder:
    """What keeps the oldest dead rows: ``kind`` in words, ``what`` names it, open for ``age_s`` (None: not known)."""

    kind: str
    what: str
    age_s: float | None


@attrs.frozen(slots=True)
class Bloat:
    """The table with the most dead rows, by the statistics of autovacuum."""

    name: str
    live: int
    dead: int


@attrs.frozen(slots=True)
class Unserved:
    """Runs that are due and that no host seen lately takes, of one play; the longest due for ``late_s``."""

    play: str
    release_id: str | None
    environment: str | None
    late_s: float


async def read_server(session: Session) -> Server:
    """What the server is and how it is set."""
    row = await session.fetchrow(_SERVER)
    assert row is not None
    return Server(**dict(row))


async def read_holder(session: Session) -> Holder | None:
    """What holds the oldest snapshot besides this session; None: nothing does that the role may look at."""
    row = await session.fetchrow(_HOLDERS)
    return None if row is None else Holder(**dict(row))


async def read_bloat(session: Session) -> Bloat | None:
    """The worst table of the schema; None where there is none."""
    row = await session.fetchrow(_BLOAT, session.options.schema)
    return None if row is None else Bloat(**dict(row))


async def read_hosts(session: Session) -> Mapping[str, str]:
    """Versions by name of the hosts seen within the last minute."""
    return {row["name"]: row["version"] for row in await _rendered(session, _HOSTS)}


async def read_stuck_sandboxes(session: Session) -> int:
    """Sandboxes whose deletion was given up; counted up to 1,000."""
    count: int = (await _rendered(session, _STUCK_SANDBOXES))[0][0]
    return count


async def read_unserved(session: Session) -> list[Unserved]:
    """Plays that have due runs and no host, the latest first; at most 20."""
    return [Unserved(**dict(row)) for row in await _rendered(session, _UNSERVED)]


async def read_undelivered(session: Session) -> list[str]:
    """Receivers that have facts pending and no host seen lately ("": the hosts' own ledger); at most 20."""
    return [row["receiver"] for row in await _rendered(session, _UNDELIVERED)]


async def _rendered(session: Session, query: str) -> list[Any]:
    return await session.fetch(bundle.render(query, session.options.schema))
