-- claim: due runs become attempts of one host, in sets.
--
-- Lock order: run rows, SKIP LOCKED, so nothing is ever waited for.
-- Fence: a claimed row is queued, or waiting and due; only a row that this statement changed is permission
-- to execute. The token is made by the client, so that a claim whose answer was lost can be read back.

-- Claims up to p_limit runs from p_buckets.
--
--   p_priorities  of the buckets, same positions: higher first, equal ones share the limit evenly
--   p_oldest      this turn takes whoever has waited longest, whatever the priority
--   p_from        low-water mark: entries due earlier are not looked at. NULL starts at the front. Behind a
--                 held snapshot the front of the index is full of entries that no longer lead anywhere.
--
-- Answers one row per claimed run, then always one row with run_id NULL, whose next_due_s is the number of
-- seconds until the next due time in these buckets (NULL: nothing there; zero or less: due rows are left,
-- because of the limit or because somebody holds them).
CREATE OR REPLACE FUNCTION @schema@.claim_runs(
    p_owner bigint, p_token bigint, p_buckets bigint[], p_priorities smallint[], p_limit integer,
    p_lease_s double precision, p_oldest boolean, p_from timestamptz
) RETURNS TABLE (
    run_id text, attempt integer, play text, input jsonb, failures integer, waits jsonb, org_id text,
    labels jsonb, was_due_at timestamptz, lag_s double precision, next_due_s double precision
)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz;
    v_from     CONSTANT timestamptz := coalesce(p_from, '-infinity');
    v_left     integer := p_limit;
    v_quota    integer;
    v_ids      text[] := '{}';
    v_dues     timestamptz[] := '{}';
    v_parked   boolean := false;
    v_more     bigint[] := '{}';  -- buckets that filled their share
    v_bucket   record;
    v_picked   record;
    v_next     timestamptz;
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    FOR v_bucket IN
        SELECT b.bucket, k.round,
               count(*) OVER (PARTITION BY k.round, CASE WHEN p_oldest THEN 0 ELSE b.priority END)
                 - row_number() OVER (PARTITION BY k.round, CASE WHEN p_oldest THEN 0 ELSE b.priority END
                                      ORDER BY h.due_at, b.bucket) + 1 AS sharers
          FROM unnest(p_buckets, p_priorities) AS b (bucket, priority)
         CROSS JOIN LATERAL (
                SELECT r.due_at FROM runs r
                 WHERE r.bucket = b.bucket AND r.status IN ('queued', 'waiting')
                   AND r.due_at >= v_from AND r.due_at <= v_now
                   AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[r.run_id]))
                 ORDER BY r.due_at LIMIT 1) h
         CROSS JOIN generate_series(1, CASE WHEN p_oldest THEN 1 ELSE 2 END) AS k (round)
         ORDER BY CASE WHEN p_oldest THEN 0 ELSE -b.priority END, k.round, h.due_at, b.bucket
    LOOP
        EXIT WHEN v_left <= 0;
        -- First an even share of what is left, then what others of the same priority left over. On an oldest-first
        -- turn the first bucket may take everything.
        CONTINUE WHEN v_bucket.round = 2 AND NOT (v_bucket.bucket = ANY (v_more));
        v_quota := CASE WHEN p_oldest OR v_bucket.round = 2 THEN v_left
                        ELSE ceil(v_left::numeric / v_bucket.sharers) END;
        SELECT array_agg(t.run_id) AS ids, array_agg(t.due_at) AS dues, bool_or(t.status = 'waiting') AS parked
          INTO v_picked
          FROM (SELECT r.run_id, r.due_at, r.status FROM runs r
                 WHERE r.bucket = v_bucket.bucket AND r.status IN ('queued', 'waiting')
                   AND r.due_at >= v_from AND r.due_at <= v_now
                   AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[r.run_id]))
                   AND (v_bucket.round = 1 OR r.run_id <> ALL (v_ids))
                 ORDER BY r.due_at
                 LIMIT v_quota
                   FOR NO KEY UPDATE SKIP LOCKED) t;
        CONTINUE WHEN v_picked.ids IS NULL;
        v_ids := v_ids || v_picked.ids;
        v_dues := v_dues || v_picked.dues;
        v_parked := v_parked OR v_picked.parked;
        v_left := v_left - cardinality(v_picked.ids);
        IF cardinality(v_picked.ids) = v_quota THEN
            v_more := v_more || v_bucket.bucket;
        END IF;
    END LOOP;

    IF v_parked THEN
        WITH resumed AS (
            UPDATE runs r
               SET last_seq = r.last_seq + 1,
                   lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
             WHERE r.run_id = ANY (v_ids) AND r.wait_kind IS NOT NULL
            RETURNING r.run_id, r.last_seq, r.wait_kind, r.wait_key
        ), passed AS (
            UPDATE waits c SET done_at = v_now
              FROM resumed
             WHERE c.run_id = ANY (ARRAY[resumed.run_id]) AND c.done_at IS NULL AND c.due_at <= v_now
        )
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT run_id, 0, last_seq, 'run.resumed', v_now, jsonb_build_object('kind', wait_kind, 'key', wait_key)
          FROM resumed;
    END IF;

    IF cardinality(v_ids) > 0 THEN
        RETURN QUERY
        WITH claimed AS (
            UPDATE runs r
               SET status = 'running', attempt = r.attempt + 1, appended = 0,
                   lease_owner = p_owner, lease_token = p_token,
                   lease_expires_at = v_now + make_interval(secs => p_lease_s),
                   due_at = v_now + make_interval(secs => p_lease_s),
                   attempt_at = v_now, started_at = coalesce(r.started_at, v_now),
                   wait_kind = NULL, wait_key = NULL, wait_until = NULL,
                   last_seq = r.last_seq + 1,
                   lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
              FROM unnest(v_ids, v_dues) AS p (run_id, due_at)
             WHERE r.run_id = ANY (ARRAY[p.run_id]) AND r.finished_at IS NULL AND r.lease_expires_at IS NULL
            RETURNING r.run_id, r.attempt, r.play, r.failures, r.org_id, r.labels, r.last_seq, p.due_at AS was_due_at
        ), started AS (
            INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
            SELECT c.run_id, 0, c.last_seq, 'run.started', v_now,
                   jsonb_build_object('attempt', c.attempt, 'host', p_owner::text)
              FROM claimed c
        )
        SELECT c.run_id, c.attempt, c.play, f.payload -> 'input', c.failures,
               CASE WHEN c.attempt > 1 THEN run_waits(c.run_id, v_now) END,
               c.org_id, c.labels, c.was_due_at,
               extract(epoch FROM v_now - c.was_due_at)::double precision,
               NULL::double precision
          FROM claimed c
          JOIN facts f ON f.run_id = ANY (ARRAY[c.run_id]) AND f.lane = 0 AND f.seq = 1;
    END IF;

    IF v_left <= 0 THEN
        v_next := v_now;
    ELSE
        v_next := next_run_due(p_buckets, p_from);
    END IF;
    RETURN QUERY SELECT NULL::text, NULL::integer, NULL::text, NULL::jsonb, NULL::integer, NULL::jsonb, NULL::text,
                        NULL::jsonb, NULL::timestamptz, NULL::double precision, seconds_until(v_next, v_now);
END
$$;

-- Waits of a run as {key: seconds until it passes, or null when it has passed}.
CREATE OR REPLACE FUNCTION @schema@.run_waits(p_run_id text, p_now timestamptz) RETURNS jsonb
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT jsonb_object_agg(key, CASE WHEN done_at IS NULL THEN extract(epoch FROM due_at - p_now) END)
      FROM waits WHERE run_id = p_run_id
$$;

-- The earliest due time of these buckets. One seek per bucket.
CREATE OR REPLACE FUNCTION @schema@.next_run_due(p_buckets bigint[], p_from timestamptz) RETURNS timestamptz
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT min(h.due_at)
      FROM unnest(p_buckets) AS b (bucket)
     CROSS JOIN LATERAL (
            SELECT r.due_at FROM runs r
             WHERE r.bucket = b.bucket AND r.status IN ('queued', 'waiting')
               AND r.due_at >= coalesce(p_from, '-infinity')
             ORDER BY r.due_at LIMIT 1) h
$$;

-- What a claim with this owner and token took, when its answer was lost. Walks the running runs, whose
-- number is bounded by the hosts' slots.
CREATE OR REPLACE FUNCTION @schema@.read_claim(p_owner bigint, p_token bigint)
RETURNS TABLE (
    run_id text, attempt integer, play text, input jsonb, failures integer, waits jsonb, org_id text,
    labels jsonb, was_due_at timestamptz, lag_s double precision, next_due_s double precision
)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT r.run_id, r.attempt, r.play, f.payload -> 'input', r.failures,
           CASE WHEN r.attempt > 1 THEN run_waits(r.run_id, clock()) END,
           r.org_id, r.labels, r.attempt_at, 0::double precision, NULL::double precision
      FROM runs r
      JOIN facts f ON f.run_id = ANY (ARRAY[r.run_id]) AND f.lane = 0 AND f.seq = 1
     WHERE r.status = 'running' AND r.due_at > '-infinity' AND r.lease_owner = p_owner AND r.lease_token = p_token
$$;
