-- status: reading runs. Nothing here writes or locks.

-- What is now, for some runs. Missing ones are left out. log_store: external, where a ledger elsewhere gets their logs.
CREATE OR REPLACE FUNCTION @schema@.read_runs(p_run_ids text[])
RETURNS TABLE (
    run_id text, play text, status text, org_id text, priority smallint, labels jsonb, release_id text,
    created_at timestamptz, started_at timestamptz, finished_at timestamptz, due_at timestamptz, attempt integer,
    failures integer, crashes integer, wait_kind text, wait_key text, wait_until timestamptz, host text,
    lease_expires_at timestamptz, last_seq integer, acked_seq integer, lane_error text, parent_id text, root_id text,
    waits jsonb, environment text, updated_at timestamptz, log_store text
)
LANGUAGE sql STABLE
@lookup@
AS $$
    SELECT r.run_id, r.play, r.status, r.org_id, r.priority, r.labels, r.release_id, r.created_at, r.started_at,
           r.finished_at, nullif(r.due_at, 'infinity'), r.attempt, r.failures, r.crashes, r.wait_kind, r.wait_key,
           r.wait_until,
           CASE WHEN r.status <> 'running' THEN NULL
                WHEN r.lease_owner = 0 THEN attempt_sandbox(r.run_id, r.attempt)
                ELSE coalesce(h.name || ' pid ' || h.pid, r.lease_owner::text) END,
           nullif(r.lease_expires_at, 'infinity'), r.last_seq, r.acked_seq, r.lane_error, r.parent_id, r.root_id,
           CASE WHEN r.wait_kind IS NOT NULL THEN standing_waits(r.run_id, r.wait_seq) END,
           r.environment, f.created_at, CASE WHEN r.receiver <> '' THEN 'external' END
      FROM unnest(p_run_ids) AS i (run_id)
      JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN hosts h ON h.host = r.lease_owner
      LEFT JOIN facts f ON f.run_id = ANY (ARRAY[r.run_id]) AND f.lane = 0 AND f.seq = r.last_seq
$$;

-- What the full form of a status has on top: the launch without its input, the end, and why nothing happens.
-- `served`: a host that claims such runs was seen within the last minute; `lane_served`: one that delivers to whoever
-- gets the next of its lifecycle facts. `lane_failure`: why those came back the last time. `runtime_backend`: the
-- provider of the latest sandbox that the run asked for; NULL: it has run on hosts alone.
CREATE OR REPLACE FUNCTION @schema@.read_run_details(p_run_id text)
RETURNS TABLE (
    accepted_at timestamptz, launch jsonb, terminal jsonb, array_input boolean, receiver text, terminal_receiver text,
    concurrency_key text, idempotency_key text, lane_failure text, log_lane_error text, served boolean,
    lane_served boolean, runtime_backend text
)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT f.created_at, f.payload - 'input' - 'request', t.payload, r.array_input, r.receiver, r.terminal_receiver,
           r.concurrency_key, r.idempotency_key, r.lane_failure, l.lane_error,
           EXISTS (SELECT 1 FROM hosts h
                    WHERE r.bucket = ANY (h.buckets) AND h.seen_at > clock() - interval '1 minute'),
           EXISTS (SELECT 1 FROM hosts h
                    WHERE r.lane_receiver = ANY (h.receivers) AND h.seen_at > clock() - interval '1 minute'),
           (SELECT nullif(s.provider, '') FROM sandboxes s WHERE s.run_id = ANY (ARRAY[r.run_id])
             ORDER BY s.attempt DESC LIMIT 1)
      FROM runs r
      JOIN facts f ON f.run_id = ANY (ARRAY[r.run_id]) AND f.lane = 0 AND f.seq = 1
      LEFT JOIN facts t ON t.run_id = ANY (ARRAY[r.run_id]) AND t.lane = 0 AND t.seq = r.terminal_seq
      LEFT JOIN lanes l ON l.run_id = ANY (ARRAY[r.run_id])
     WHERE r.run_id = ANY (ARRAY[p_run_id])
$$;

-- What a run stands at since that park, the first to pass in front.
CREATE OR REPLACE FUNCTION @schema@.standing_waits(p_run_id text, p_wait_seq integer) RETURNS jsonb
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT jsonb_agg(jsonb_build_object('kind', kind, 'key', key, 'name', name, 'since', created_at, 'until', due_at)
                     ORDER BY due_at, key)
      FROM waits WHERE run_id = p_run_id AND wait_seq = p_wait_seq
$$;

-- One page of runs, newest first by id, with run ids below p_after. Filters are optional; a page may take a
-- walk over runs that do not match, so callers set a statement timeout.
CREATE OR REPLACE FUNCTION @schema@.list_runs(
    p_status text, p_play text, p_org text, p_labels jsonb, p_limit integer, p_after text
) RETURNS SETOF text
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT r.run_id FROM runs r
     WHERE r.run_id < coalesce(p_after, '~')  -- sorts after every run id
       AND (p_status IS NULL OR r.status = p_status)
       AND (p_play IS NULL OR r.play = p_play)
       AND (p_org IS NULL OR r.org_id = p_org)
       AND (p_labels IS NULL OR r.labels @> p_labels)
     ORDER BY r.run_id DESC LIMIT p_limit
$$;

-- Terminals of those of the runs that have ended; status NULL for a run that does not exist.
CREATE OR REPLACE FUNCTION @schema@.read_terminals(p_run_ids text[])
RETURNS TABLE (run_id text, status text, payload jsonb)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT i.run_id, r.status, f.payload
      FROM unnest(p_run_ids) AS i (run_id)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN facts f ON f.run_id = ANY (ARRAY[r.run_id]) AND f.lane = 0 AND f.seq = r.terminal_seq
     WHERE r.run_id IS NULL OR r.finished_at IS NOT NULL
$$;

-- Where a detached attempt works or has worked.
CREATE OR REPLACE FUNCTION @schema@.attempt_sandbox(p_run_id text, p_attempt integer) RETURNS text
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT coalesce((SELECT 'sandbox ' || s.sandbox || ' (' || s.provider || ')' FROM sandboxes s
                      WHERE s.run_id = ANY (ARRAY[p_run_id]) AND s.attempt = p_attempt LIMIT 1), 'a sandbox')
$$;

-- Attempts of a run, oldest first.
CREATE OR REPLACE FUNCTION @schema@.read_attempts(p_run_id text)
RETURNS TABLE (
    attempt integer, outcome text, host text, started_at timestamptz, ended_at timestamptz, error jsonb
)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT a.attempt, a.outcome,
           CASE a.owner WHEN 0 THEN attempt_sandbox(a.run_id, a.attempt)
                        ELSE coalesce(h.name || ' pid ' || h.pid, a.owner::text) END,
           a.started_at, a.ended_at, a.error
      FROM attempts a
      LEFT JOIN hosts h ON h.host = a.owner
     WHERE a.run_id = p_run_id ORDER BY a.attempt
$$;

-- Open work, counted over the partial indexes of open rows and at most to p_limit per number: its cost does not
-- grow with what has ended. kept: all runs by status, as maintenance counted them so many seconds ago (NULL: not yet).
CREATE OR REPLACE FUNCTION @schema@.backlog(p_limit integer)
RETURNS TABLE (
    queued bigint, waiting bigint, running bigint, lifecycle bigint, observability bigint, blocked bigint,
    oldest_snapshot_s double precision, kept jsonb, kept_age_s double precision
)
LANGUAGE sql STABLE
@seek@
AS $$
    -- Receivers that have something pending, one seek each.
    WITH RECURSIVE pending AS (
        (SELECT lane_receiver AS receiver FROM runs WHERE lane_pending ORDER BY lane_receiver LIMIT 1)
         UNION ALL
        SELECT (SELECT r.lane_receiver FROM runs r
                 WHERE r.lane_pending AND r.lane_receiver > p.receiver ORDER BY r.lane_receiver LIMIT 1)
          FROM pending p WHERE p.receiver IS NOT NULL
    )
    SELECT o.queued, o.waiting,
           (SELECT count(*) FROM (SELECT 1 FROM runs WHERE status = 'running' LIMIT p_limit) t),
           (SELECT count(*) FROM (SELECT 1 FROM runs WHERE lane_pending LIMIT p_limit) t),
           (SELECT count(*) FROM (SELECT 1 FROM lanes WHERE lane_pending LIMIT p_limit) t),
           (SELECT count(*)
              FROM (SELECT 1
                      FROM pending p
                     CROSS JOIN (VALUES (0::smallint), (1::smallint), (2::smallint), (3::smallint)) AS k (rank)
                     CROSS JOIN LATERAL (
                            SELECT 1 FROM runs r
                             WHERE r.lane_receiver = p.receiver AND r.lane_rank = k.rank AND r.lane_pending
                               AND r.lane_due_at = 'infinity'
                             LIMIT p_limit) b
                     LIMIT p_limit) t),
           (SELECT extract(epoch FROM max(clock_timestamp() - xact_start))::double precision
              FROM pg_stat_activity WHERE backend_xmin IS NOT NULL AND pid <> pg_backend_pid()),
           c.kept, c.age_s
      FROM (SELECT count(*) FILTER (WHERE t.status = 'queued') AS queued,
                   count(*) FILTER (WHERE t.status = 'waiting') AS waiting
              FROM (SELECT status FROM runs WHERE status IN ('queued', 'waiting') AND turn IS NULL
                     UNION ALL
                    SELECT status FROM runs WHERE status IN ('queued', 'waiting') AND turn >= 0
                     LIMIT p_limit) t) o,
           (SELECT jsonb_object_agg(s.status, s.runs) AS kept,
                   extract(epoch FROM clock() - min(s.counted_at))::double precision AS age_s
              FROM status_counts s) c
$$;
