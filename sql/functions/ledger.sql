-- ledger: the read model that the default ledger keeps in this database.
--
-- Lock order: ledger rows, by run; under the lane's lock or lease, so one writer per run at a time.
-- Idempotent and ordered by its own cursor: a prefix is applied only if it begins right after what was applied, or if
-- all that lies between is meant to be missing.

-- The facts of a lane after p_after up to p_through, in order.
CREATE OR REPLACE FUNCTION @schema@.prefix_of(p_run_id text, p_lane smallint, p_after integer, p_through integer)
RETURNS TABLE (seqs integer[], types text[], payloads jsonb[], created_ats timestamptz[])
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT array_agg(f.seq ORDER BY f.seq), array_agg(f.type ORDER BY f.seq), array_agg(f.payload ORDER BY f.seq),
           array_agg(f.created_at ORDER BY f.seq)
      FROM facts f
     WHERE f.run_id = p_run_id AND f.lane = p_lane AND f.seq > p_after AND f.seq <= p_through
$$;

-- A fact that means nothing to a ledger: the park or the return of a run whose runner lives on in a sandbox. A cursor may
-- pass it without a delivery. Who appends one sets quiet_seq of the lane's row to its seq, in the same statement.
CREATE OR REPLACE FUNCTION @schema@.quiet_fact(p_type text, p_payload jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT p_type IN ('run.waiting', 'run.resumed') AND coalesce(p_payload ->> 'kind' = 'detached_runner', false)
$$;

-- The last of the facts without effect that follow p_after without a gap; p_after if there is none. p_quiet is the last
-- such fact of all. It never answers beyond what the caller's snapshot shows.
CREATE OR REPLACE FUNCTION @schema@.quiet_until(p_run_id text, p_lane smallint, p_after integer, p_quiet integer)
RETURNS integer
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT coalesce(min(f.seq) FILTER (WHERE NOT quiet_fact(f.type, f.payload)) - 1, max(f.seq), p_after)
      FROM facts f
     WHERE f.run_id = p_run_id AND f.lane = p_lane AND f.seq > p_after AND f.seq <= p_quiet
$$;

-- How many facts without effect stand right before and at p_acked: their receiver may not have them.
CREATE OR REPLACE FUNCTION @schema@.quiet_before(p_run_id text, p_lane smallint, p_acked integer) RETURNS integer
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT p_acked - coalesce((SELECT f.seq FROM facts f
                                WHERE f.run_id = p_run_id AND f.lane = p_lane AND f.seq <= p_acked
                                  AND NOT quiet_fact(f.type, f.payload)
                                ORDER BY f.run_id DESC, f.lane DESC, f.seq DESC LIMIT 1), 0)
$$;

-- Whether a ledger may lack all facts between p_after and p_before: each has no effect, or an operator skipped it.
CREATE OR REPLACE FUNCTION @schema@.gap_is_meant(p_run_id text, p_lane smallint, p_after integer, p_before integer)
RETURNS boolean
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT NOT EXISTS (
        SELECT 1 FROM facts f
         WHERE f.run_id = p_run_id AND f.lane = p_lane AND f.seq > p_after AND f.seq < p_before
           AND NOT quiet_fact(f.type, f.payload)
           AND NOT EXISTS (SELECT 1 FROM journal j
                            WHERE j.run_id = f.run_id AND j.lane = f.lane AND j.verb = 'skip'
                              AND f.seq BETWEEN j.first AND j.through))
$$;

-- A JSON number as a double; NULL for anything else. What a play reports must not be able to stop a whole turn.
CREATE OR REPLACE FUNCTION @schema@.as_double(p_value jsonb) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN jsonb_typeof(p_value) = 'number' AND abs(p_value::numeric) < 1e308
                THEN p_value::double precision END
$$;

-- Applies lifecycle prefixes p_first … p_through of runs. Answers one row: the runs whose prefix the ledger has now
-- (applied or already there) with its end, and type and lag (seconds up to p_now) of each fact applied.
-- Facts without effect change nothing here, whether they come or not: they count as passed over.
-- A run that is not answered has a gap: the ledger lacks its earlier facts, or the log lacks one of these.
CREATE OR REPLACE FUNCTION @schema@.ledger_apply_lifecycle(
    p_run_ids text[], p_first integer[], p_through integer[], p_now timestamptz DEFAULT @schema@.clock()
) RETURNS TABLE (run_ids text[], through integer[], lag_types text[], lags_s double precision[])
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_done  text[];
    v_ends  integer[];
    v_types text[];
    v_lags  double precision[];
    v_begun text[];
    v_more  record;
BEGIN
    WITH told AS MATERIALIZED (
        SELECT i.run_id, i.first, i.through,
               count(*) FILTER (WHERE NOT quiet_fact(f.type, f.payload))::integer AS facts,
               min(f.created_at) AS accepted_at,  -- of use where the first fact is among them
               max(f.created_at) AS updated_at,
               min(f.created_at) FILTER (WHERE f.type = 'run.started') AS started_at,
               count(*) FILTER (WHERE f.type = 'run.started')::integer AS attempts,
               (array_agg(f.payload) FILTER (WHERE f.type = 'run.created'))[1] AS created,
               (array_agg(f.payload) FILTER (WHERE f.type IN ('run.completed', 'run.failed', 'run.cancelled')))[1] AS ended,
               -- The latest fact that says where the run stands, and what it says.
               max(f.seq * 8 + CASE f.type WHEN 'run.created' THEN 1 WHEN 'run.requeued' THEN 1
                                           WHEN 'run.resumed' THEN CASE WHEN NOT quiet_fact(f.type, f.payload) THEN 1 END
                                           WHEN 'run.started' THEN 2
                                           WHEN 'run.waiting' THEN CASE WHEN NOT quiet_fact(f.type, f.payload) THEN 3 END
                                           WHEN 'run.completed' THEN 4 WHEN 'run.failed' THEN 5
                                           WHEN 'run.cancelled' THEN 6 END) % 8 AS stand,
               array_agg(f.type) AS types,
               array_agg(greatest(extract(epoch FROM p_now - f.created_at), 0)::double precision) AS lags
          FROM unnest(p_run_ids, p_first, p_through) AS i (run_id, first, through)
         -- OFFSET 0 keeps it a seek per run. Joined plainly, a plan made when the log was short walks all of it.
         CROSS JOIN LATERAL (
                SELECT g.seq, g.type, g.created_at, g.payload FROM facts g
                 WHERE g.run_id = i.run_id AND g.lane = 0 AND g.seq >= i.first AND g.seq <= i.through
                OFFSET 0) f
         GROUP BY i.run_id, i.first, i.through
        HAVING count(*) = i.through - i.first + 1
    ), begun AS (
        INSERT INTO ledger_runs (
            run_id, play, org_id, labels, status, accepted_at, updated_at, started_at, finished_at, attempts,
            applied_seq, applied_facts, passed_facts, output, error, performance)
        SELECT t.run_id, t.created ->> 'play', t.created ->> 'org_id', t.created -> 'labels',
               (ARRAY['queued', 'running', 'waiting', 'completed', 'failed', 'cancelled'])[t.stand],
               t.accepted_at, t.updated_at, t.started_at, CASE WHEN t.stand >= 4 THEN t.updated_at END, t.attempts,
               t.through, t.facts, t.through - t.facts,
               t.ended -> 'output', t.ended -> 'error', nullif(t.ended -> 'performance', 'null')
          FROM told t
         WHERE t.first = 1
        ON CONFLICT (run_id) DO NOTHING
        RETURNING run_id, applied_seq
    ), moved AS (
        UPDATE ledger_runs l
           SET status = coalesce((ARRAY['queued', 'running', 'waiting', 'completed', 'failed', 'cancelled'])[t.stand], l.status),
               updated_at = t.updated_at,
               started_at = coalesce(l.started_at, t.started_at),
               finished_at = CASE WHEN t.stand >= 4 THEN t.updated_at END,
               -- A wait is over as soon as the run stands elsewhere; a new one is told below.
               wait_kind = CASE WHEN coalesce(t.stand, 3) = 3 THEN l.wait_kind END,
               wait_until = CASE WHEN coalesce(t.stand, 3) = 3 THEN l.wait_until END,
               attempts = l.attempts + t.attempts,
               applied_seq = t.through, applied_facts = l.applied_facts + t.facts,
               passed_facts = l.passed_facts + t.through - l.applied_seq - t.facts,
               output = t.ended -> 'output', error = t.ended -> 'error',
               performance = nullif(t.ended -> 'performance', 'null')
          FROM told t
         WHERE l.run_id = ANY (ARRAY[t.run_id]) AND t.first > 1
           AND CASE WHEN l.applied_seq < t.first - 1 THEN gap_is_meant(t.run_id, 0::smallint, l.applied_seq, t.first)
                    ELSE l.applied_seq = t.first - 1 END
        RETURNING l.run_id, l.applied_seq
    ), applied AS (
        SELECT run_id, applied_seq FROM begun UNION ALL SELECT run_id, applied_seq FROM moved
    )
    SELECT (SELECT array_agg(run_id ORDER BY run_id) FROM applied),
           (SELECT array_agg(applied_seq ORDER BY run_id) FROM applied),
           (SELECT array_agg(g.type) FROM told, unnest(told.types) AS g (type)),
           (SELECT array_agg(g.lag) FROM told, unnest(told.lags) AS g (lag))
      INTO v_done, v_ends, v_types, v_lags;

    -- Waits and progress are rare next to ends: their own statement, only when there are any.
    IF 'run.waiting' = ANY (v_types) OR 'run.progress' = ANY (v_types) THEN
        UPDATE ledger_runs l
           SET wait_kind = CASE WHEN l.status = 'waiting' THEN coalesce(w.payload ->> 'kind', l.wait_kind) END,
               wait_until = CASE WHEN l.status <> 'waiting' THEN NULL
                                 WHEN w.payload IS NULL THEN l.wait_until
                                 ELSE to_timestamp(as_double(w.payload -> 'wait_until') / 1000) END,
               progress_done = coalesce(as_double(g.payload -> 'done'), l.progress_done),
               progress_total = coalesce(as_double(g.payload -> 'total'), l.progress_total)
          FROM unnest(p_run_ids, p_first, p_through) AS i (run_id, first, through)
          LEFT JOIN LATERAL (
                SELECT f.payload FROM facts f
                 WHERE f.run_id = i.run_id AND f.lane = 0 AND f.seq BETWEEN i.first AND i.through
                   AND f.type = 'run.waiting' AND NOT quiet_fact(f.type, f.payload) ORDER BY f.seq DESC LIMIT 1) w ON true
          LEFT JOIN LATERAL (
                SELECT f.payload FROM facts f
                 WHERE f.run_id = i.run_id AND f.lane = 0 AND f.seq BETWEEN i.first AND i.through
                   AND f.type = 'run.progress' ORDER BY f.seq DESC LIMIT 1) g ON true
         WHERE l.run_id = ANY (ARRAY[i.run_id]) AND l.applied_seq = i.through AND coalesce(w.payload, g.payload) IS NOT NULL
           AND i.run_id = ANY (v_done);
    END IF;

    IF cardinality(v_done) IS DISTINCT FROM cardinality(p_run_ids) THEN
        SELECT coalesce(v_done, '{}') || coalesce(array_agg(i.run_id), '{}'),
               coalesce(v_ends, '{}') || coalesce(array_agg(i.through), '{}')
          INTO v_done, v_ends
          FROM unnest(p_run_ids, p_through) AS i (run_id, through)
          JOIN ledger_runs l ON l.run_id = ANY (ARRAY[i.run_id]) AND l.applied_seq >= i.through
         WHERE NOT (i.run_id = ANY (coalesce(v_done, '{}')));

        -- A run whose first facts were skipped begins here with what its first fact says, and nothing applied yet.
        WITH begun AS (
            INSERT INTO ledger_runs (
                run_id, play, org_id, labels, status, accepted_at, updated_at, applied_seq, applied_facts)
            SELECT i.run_id, f.payload ->> 'play', f.payload ->> 'org_id', f.payload -> 'labels', 'queued',
                   f.created_at, f.created_at, 0, 0
              FROM unnest(p_run_ids, p_first) AS i (run_id, first)
              JOIN facts f ON f.run_id = ANY (ARRAY[i.run_id]) AND f.lane = 0 AND f.seq = 1
             WHERE i.first > 1 AND NOT (i.run_id = ANY (v_done)) AND gap_is_meant(i.run_id, 0::smallint, 0, i.first)
            ON CONFLICT DO NOTHING
            RETURNING run_id
        )
        SELECT coalesce(array_agg(run_id), '{}') INTO v_begun FROM begun;

        -- What overlaps with what is here, because the rest of a prefix was skipped, is applied from where that ends.
        SELECT array_agg(i.run_id) AS run_ids, array_agg(greatest(i.first, l.applied_seq + 1)) AS first,
               array_agg(i.through) AS through INTO v_more
          FROM unnest(p_run_ids, p_first, p_through) AS i (run_id, first, through)
          JOIN ledger_runs l ON l.run_id = ANY (ARRAY[i.run_id])
         WHERE NOT (i.run_id = ANY (v_done)) AND (l.applied_seq >= i.first OR i.run_id = ANY (v_begun));
        IF v_more.run_ids IS NOT NULL THEN
            SELECT v_done || a.run_ids, v_ends || a.through, v_types || a.lag_types, v_lags || a.lags_s
              INTO v_done, v_ends, v_types, v_lags
              FROM ledger_apply_lifecycle(v_more.run_ids, v_more.first, v_more.through, p_now) a;
        END IF;
    END IF;

    RETURN QUERY SELECT v_done, v_ends, v_types, v_lags;
END
$$;

-- The same for observability prefixes: log facts are kept line by line.
CREATE OR REPLACE FUNCTION @schema@.ledger_apply_observability(
    p_run_ids text[], p_first integer[], p_through integer[], p_now timestamptz DEFAULT @schema@.clock()
) RETURNS TABLE (run_ids text[], through integer[], lag_types text[], lags_s double precision[])
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
BEGIN
    RETURN QUERY
    WITH ready AS MATERIALIZED (
        SELECT i.run_id, i.first, i.through
          FROM unnest(p_run_ids, p_first, p_through) AS i (run_id, first, through)
         CROSS JOIN LATERAL (
                SELECT coalesce((SELECT g.seq FROM ledger_logs g WHERE g.run_id = i.run_id
                                  ORDER BY g.run_id DESC, g.seq DESC LIMIT 1), 0) AS seq) applied
         WHERE CASE WHEN applied.seq < i.first - 1 THEN gap_is_meant(i.run_id, 1::smallint, applied.seq, i.first)
                    ELSE true END
    ), written AS (
        INSERT INTO ledger_logs (run_id, seq, created_at, payload)
        SELECT i.run_id, f.seq, f.created_at, f.payload
          FROM ready i
         CROSS JOIN LATERAL (  -- a seek per run, as above
                SELECT g.seq, g.created_at, g.payload FROM facts g
                 WHERE g.run_id = i.run_id AND g.lane = 1 AND g.seq >= i.first AND g.seq <= i.through
                OFFSET 0) f
        ON CONFLICT DO NOTHING
        RETURNING created_at
    )
    SELECT (SELECT array_agg(run_id ORDER BY run_id) FROM ready),
           (SELECT array_agg(through ORDER BY run_id) FROM ready),
           (SELECT array_agg('run.log'::text) FROM written),
           (SELECT array_agg(greatest(extract(epoch FROM p_now - created_at), 0)::double precision) FROM written);
END
$$;
