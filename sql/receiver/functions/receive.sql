-- receive: deliveries into the ledger, in order and once.
--
-- Lock order: cursors by (run, lane), SKIP LOCKED; the run's row under its lifecycle cursor. Fences: a prefix begins
-- right after what was applied, but for facts that the sender says it passed, or where its generation rose; a receipt by
-- delivery key answers repetitions.

-- A JSON number as a double, and as a moment where it is milliseconds since 1970; NULL for anything else. What a play
-- reports must not be able to stop a batch.
CREATE OR REPLACE FUNCTION @schema@.as_double(p_value jsonb) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN jsonb_typeof(p_value) = 'number' AND abs(p_value::numeric) < 1e308
                THEN p_value::double precision END
$$;

CREATE OR REPLACE FUNCTION @schema@.as_moment(p_value jsonb) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN jsonb_typeof(p_value) = 'number' AND abs(p_value::numeric) < 1e14
                THEN to_timestamp(p_value::double precision / 1000) END
$$;

-- A fact that means nothing to a ledger, whether it comes or is passed: the park or the return of a run whose runner lives
-- on in a sandbox.
CREATE OR REPLACE FUNCTION @schema@.quiet_fact(p_type text, p_payload jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT p_type IN ('run.waiting', 'run.resumed') AND coalesce(p_payload ->> 'kind' = 'detached_runner', false)
$$;

-- Applies deliveries of different lanes: one per run and lane in a call. p_of says, per fact, to which delivery (from 1)
-- it belongs; the facts of a delivery are all of p_firsts … p_throughs, which the caller has checked.
--
-- outcome: applied | duplicate | rejected (it contradicts what is here) | gap (earlier facts are missing) |
-- not_current (the sender's lane has been through a skip since) | retry (somebody is applying to this lane).
CREATE OR REPLACE FUNCTION @schema@.receive(
    p_run_ids text[], p_lanes smallint[], p_keys text[], p_digests text[], p_generations integer[],
    p_passed integer[], p_firsts integer[], p_throughs integer[],
    p_of integer[], p_seqs integer[], p_types text[], p_created_ats timestamptz[], p_payloads jsonb[]
) RETURNS TABLE (ord integer, outcome text, reason text)
LANGUAGE plpgsql
@lookup@
AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz;
    v_at       integer[];   -- per delivery: its lane's cursor; NULL where somebody else holds it
    v_gen      integer[];   --               its lane's generation
    v_outcomes text[];
    v_reasons  text[];
BEGIN
    PERFORM require_read_committed();

    INSERT INTO cursors (run_id, lane, updated_at)
    SELECT i.run_id, i.lane, clock()
      FROM unnest(p_run_ids, p_lanes) AS i (run_id, lane)
     ORDER BY i.run_id, i.lane
        ON CONFLICT DO NOTHING;

    WITH held AS (
        SELECT i.ord, c.applied_seq, c.generation
          FROM unnest(p_run_ids, p_lanes) WITH ORDINALITY AS i (run_id, lane, ord)
          JOIN cursors c ON c.run_id = ANY (ARRAY[i.run_id]) AND c.lane = i.lane
         ORDER BY i.run_id, i.lane
           FOR NO KEY UPDATE OF c SKIP LOCKED
    )
    SELECT array_agg(h.applied_seq ORDER BY n.ord), array_agg(h.generation ORDER BY n.ord)
      INTO v_at, v_gen
      FROM generate_subscripts(p_run_ids, 1) AS n (ord)
      LEFT JOIN held h ON h.ord = n.ord;

    v_now := clock();

    WITH judged AS (
        SELECT i.*, v_at[i.ord] AS at, v_gen[i.ord] AS gen, r.digest AS known,
               i.first <= v_at[i.ord] AND EXISTS (
                   SELECT FROM unnest(p_of, p_seqs, p_types, p_created_ats, p_payloads)
                                AS f (of, seq, type, created_at, payload)
                     LEFT JOIN facts g ON g.run_id = ANY (ARRAY[i.run_id]) AND g.lane = i.lane AND g.seq = f.seq
                    WHERE f.of = i.ord AND f.seq <= v_at[i.ord]
                      AND (g.type, g.created_at, g.payload) IS DISTINCT FROM (f.type, f.created_at, f.payload)) AS differs
          FROM unnest(p_run_ids, p_lanes, p_keys, p_digests, p_generations, p_passed, p_firsts, p_throughs)
               WITH ORDINALITY AS i (run_id, lane, key, digest, generation, passed, first, through, ord)
          LEFT JOIN receipts r ON r.delivery_key = ANY (ARRAY[i.key])
    ), decided AS (
        SELECT j.ord, j.at, j.first, j.through, j.gen, j.generation,
               CASE WHEN j.at IS NULL THEN 'retry'
                    WHEN j.known = j.digest THEN 'duplicate'
                    WHEN j.known IS NOT NULL OR j.differs THEN 'rejected'
                    WHEN j.generation < j.gen THEN 'not_current'
                    WHEN j.through <= j.at THEN 'duplicate'
                    WHEN j.first - j.passed <= j.at + 1 OR j.generation > j.gen THEN 'applied'
                    ELSE 'gap' END AS outcome,
               j.known IS NOT NULL AS known
          FROM judged j
    )
    SELECT array_agg(d.outcome ORDER BY d.ord),
           array_agg(CASE d.outcome
                     WHEN 'retry' THEN 'another delivery of this lane is being applied'
                     WHEN 'rejected' THEN CASE WHEN d.known THEN 'the same delivery key came with another digest'
                                               ELSE 'its facts differ from those already here' END
                     WHEN 'not_current' THEN format('this lane is at generation %s, the delivery at %s', d.gen, d.generation)
                     WHEN 'gap' THEN format('expected seq %s, got %s', d.at + 1, d.first) END ORDER BY d.ord)
      INTO v_outcomes, v_reasons
      FROM decided d;

    IF 'applied' = ANY (v_outcomes) OR 'duplicate' = ANY (v_outcomes) THEN
        INSERT INTO receipts (delivery_key, digest, received_at)
        SELECT i.key, i.digest, v_now
          FROM unnest(p_keys, p_digests) WITH ORDINALITY AS i (key, digest, ord)
         WHERE v_outcomes[i.ord] IN ('applied', 'duplicate')
            ON CONFLICT DO NOTHING;
    END IF;

    IF 'rejected' = ANY (v_outcomes) THEN
        UPDATE cursors c
           SET conflicts = c.conflicts + 1, conflict = i.key || ': ' || v_reasons[i.ord], updated_at = v_now
          FROM unnest(p_run_ids, p_lanes, p_keys) WITH ORDINALITY AS i (run_id, lane, key, ord)
         WHERE c.run_id = ANY (ARRAY[i.run_id]) AND c.lane = i.lane AND v_outcomes[i.ord] = 'rejected';
    END IF;

    IF 'applied' = ANY (v_outcomes) THEN
        INSERT INTO facts (run_id, lane, seq, type, created_at, received_at, payload)
        SELECT p_run_ids[f.of], p_lanes[f.of], f.seq, f.type, f.created_at, v_now, f.payload
          FROM unnest(p_of, p_seqs, p_types, p_created_ats, p_payloads) AS f (of, seq, type, created_at, payload)
         WHERE v_outcomes[f.of] = 'applied' AND f.seq > v_at[f.of];

        UPDATE cursors c
           SET applied_seq = i.through, skipped = c.skipped + greatest(i.first - c.applied_seq - 1, 0),
               generation = i.generation, updated_at = v_now
          FROM unnest(p_run_ids, p_lanes, p_generations, p_firsts, p_throughs)
               WITH ORDINALITY AS i (run_id, lane, generation, first, through, ord)
         WHERE c.run_id = ANY (ARRAY[i.run_id]) AND c.lane = i.lane AND v_outcomes[i.ord] = 'applied';

        WITH told AS (
            SELECT p_run_ids[f.of] AS run_id, min(f.created_at) AS accepted_at, max(f.created_at) AS updated_at,
                   min(f.created_at) FILTER (WHERE f.type = 'run.started') AS started_at,
                   count(*) FILTER (WHERE f.type = 'run.started')::integer AS attempts,
                   (array_agg(f.payload) FILTER (WHERE f.type = 'run.created'))[1] AS created,
                   (array_agg(f.payload) FILTER (WHERE f.type IN ('run.completed', 'run.failed', 'run.cancelled')))[1]
                       AS ended,
                   (array_agg(f.payload ORDER BY f.seq DESC) FILTER (WHERE f.type = 'run.waiting'))[1] AS wait,
                   (array_agg(f.payload ORDER BY f.seq DESC) FILTER (WHERE f.type = 'run.progress'))[1] AS progress,
                   -- The latest fact that says where the run stands.
                   (array_agg(CASE f.type WHEN 'run.started' THEN 'running' WHEN 'run.waiting' THEN 'waiting'
                                          WHEN 'run.completed' THEN 'completed' WHEN 'run.failed' THEN 'failed'
                                          WHEN 'run.cancelled' THEN 'cancelled' ELSE 'queued' END ORDER BY f.seq DESC)
                       FILTER (WHERE f.type IN ('run.created', 'run.requeued', 'run.resumed', 'run.started', 'run.waiting',
                                                'run.completed', 'run.failed', 'run.cancelled')))[1] AS status
              FROM unnest(p_of, p_seqs, p_types, p_created_ats, p_payloads) AS f (of, seq, type, created_at, payload)
             WHERE v_outcomes[f.of] = 'applied' AND f.seq > v_at[f.of] AND p_lanes[f.of] = 0
               AND NOT quiet_fact(f.type, f.payload)
             GROUP BY f.of
        )
        INSERT INTO runs AS r (
            run_id, accepted_at, updated_at, attempts, started_at, finished_at, wait_until, progress_done, progress_total,
            status, play, org_id, wait_kind, labels, output, error)
        SELECT t.run_id, t.accepted_at, t.updated_at, t.attempts, t.started_at,
               CASE WHEN t.status IN ('completed', 'failed', 'cancelled') THEN t.updated_at END,
               CASE WHEN t.status = 'waiting' THEN as_moment(t.wait -> 'wait_until') END,
               as_double(t.progress -> 'done'), as_double(t.progress -> 'total'),
               t.status, t.created ->> 'play', t.created ->> 'org_id',
               CASE WHEN t.status = 'waiting' THEN t.wait ->> 'kind' END,
               t.created -> 'labels', t.ended -> 'output', t.ended -> 'error'
          FROM told t
        ON CONFLICT (run_id) DO UPDATE
           SET updated_at = excluded.updated_at,
               attempts = r.attempts + excluded.attempts,
               started_at = coalesce(r.started_at, excluded.started_at),
               finished_at = coalesce(excluded.finished_at, r.finished_at),
               wait_until = CASE WHEN excluded.status IS NULL THEN r.wait_until ELSE excluded.wait_until END,
               wait_kind = CASE WHEN excluded.status IS NULL THEN r.wait_kind ELSE excluded.wait_kind END,
               progress_done = coalesce(excluded.progress_done, r.progress_done),
               progress_total = coalesce(excluded.progress_total, r.progress_total),
               status = coalesce(excluded.status, r.status),
               play = coalesce(r.play, excluded.play),
               org_id = coalesce(r.org_id, excluded.org_id),
               labels = coalesce(r.labels, excluded.labels),
               output = coalesce(excluded.output, r.output),
               error = coalesce(excluded.error, r.error);
    END IF;

    RETURN QUERY
    SELECT n.ord, v_outcomes[n.ord], v_reasons[n.ord] FROM generate_subscripts(p_run_ids, 1) AS n (ord) ORDER BY n.ord;
END
$$;

-- A run as the ledger has it: the read model, and how far each lane is. No row for one that it has never heard of.
CREATE OR REPLACE FUNCTION @schema@.read_received(p_run_id text) RETURNS TABLE (run jsonb, lanes jsonb)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT (SELECT to_jsonb(r) FROM runs r WHERE r.run_id = p_run_id),
           (SELECT jsonb_object_agg(CASE c.lane WHEN 0 THEN 'lifecycle' ELSE 'observability' END,
                                    to_jsonb(c) - 'run_id' - 'lane')
              FROM cursors c WHERE c.run_id = p_run_id)
     WHERE EXISTS (SELECT FROM cursors c WHERE c.run_id = p_run_id)
$$;
