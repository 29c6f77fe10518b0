-- facts: what a live attempt has to say (progress, logs), and reading a run's log.
--
-- Lock order: run rows and observability lanes, both SKIP LOCKED, so the order between them does not matter.
-- Fence: a lease (a row has one exactly while it runs), attempt and token. Items are numbered by the attempt from 1
-- and the row remembers how many it has, so a call whose answer was lost appends nothing twice.

-- Appends facts. Items of one attempt must come in the order of their ordinals and be complete up to the last.
-- p_lanes: 0 lifecycle, 1 observability.
-- answer: done | busy (the run's row or its lane of logs is locked: ask again) | lost.
CREATE OR REPLACE FUNCTION @schema@.append_facts(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_ordinals integer[], p_lanes smallint[],
    p_types text[], p_payloads jsonb[]
) RETURNS TABLE (ord integer, answer text)
LANGUAGE plpgsql
@lookup@
AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz;
    v_logs  text[];             -- runs that have something for their lane of logs
    v_held  text[] := '{}';     -- of these, the ones whose lane somebody holds
    v_moved integer;
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    IF 1 = ANY (p_lanes) THEN
        SELECT array_agg(DISTINCT i.run_id) INTO v_logs
          FROM unnest(p_run_ids, p_lanes) AS i (run_id, lane) WHERE i.lane = 1;
        WITH free AS (
            SELECT l.run_id FROM lanes l WHERE l.run_id = ANY (v_logs) FOR NO KEY UPDATE SKIP LOCKED
        )
        SELECT coalesce(array_agg(l.run_id), '{}') INTO v_held
          FROM lanes l
         WHERE l.run_id = ANY (v_logs) AND NOT EXISTS (SELECT 1 FROM free WHERE free.run_id = l.run_id);
    END IF;

    WITH told AS (
        SELECT DISTINCT i.run_id, i.attempt, i.token
          FROM unnest(p_run_ids, p_attempts, p_tokens) AS i (run_id, attempt, token)
         WHERE i.run_id <> ALL (v_held)
    ), free AS (
        SELECT r.run_id, r.attempt, r.lease_token, r.appended, r.last_seq, r.receiver
          FROM told i
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
         WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
           FOR NO KEY UPDATE OF r SKIP LOCKED
    ), fresh AS (
        SELECT DISTINCT ON (free.run_id, i.ordinal)
               free.run_id, free.attempt, free.lease_token, free.receiver, free.last_seq,
               i.ordinal, i.lane, i.type, i.payload
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_ordinals, p_lanes, p_types, p_payloads)
               AS i (run_id, attempt, token, ordinal, lane, type, payload)
          JOIN free ON free.run_id = i.run_id AND free.attempt = i.attempt AND free.lease_token = i.token
         WHERE i.ordinal > free.appended
         ORDER BY free.run_id, i.ordinal
    ), counted AS (
        SELECT run_id, attempt, lease_token, receiver, max(ordinal) AS ordinal,
               count(*) FILTER (WHERE lane = 0)::integer AS lifecycle,
               count(*) FILTER (WHERE lane = 1)::integer AS observability
          FROM fresh GROUP BY run_id, attempt, lease_token, receiver
    ), moved AS (
        UPDATE runs r
           SET appended = c.ordinal, last_seq = r.last_seq + c.lifecycle,
               lane_due_at = CASE WHEN r.lane_pending OR c.lifecycle = 0 THEN r.lane_due_at ELSE v_now END
          FROM counted c
         WHERE r.run_id = ANY (ARRAY[c.run_id]) AND r.lease_expires_at IS NOT NULL AND r.attempt = c.attempt AND r.lease_token = c.lease_token
        RETURNING 1
    ), observed AS (
        INSERT INTO lanes AS l (run_id, lane_receiver, last_seq, lane_due_at)
        SELECT run_id, receiver, observability, v_now FROM counted WHERE observability > 0
        ON CONFLICT (run_id) DO UPDATE
           SET last_seq = l.last_seq + excluded.last_seq,
               lane_due_at = CASE WHEN l.lane_pending THEN l.lane_due_at ELSE excluded.lane_due_at END
        RETURNING l.run_id, l.last_seq
    ), written AS (
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT f.run_id, f.lane,
               row_number() OVER (PARTITION BY f.run_id, f.lane ORDER BY f.ordinal)
                 + CASE WHEN f.lane = 0 THEN f.last_seq ELSE o.last_seq - c.observability END,
               f.type, v_now, f.payload
          FROM fresh f
          JOIN counted c ON c.run_id = f.run_id
          LEFT JOIN observed o ON o.run_id = f.run_id
    )
    SELECT count(*) INTO v_moved FROM moved;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN r.run_id IS NULL THEN 'lost' WHEN r.appended >= i.ordinal THEN 'done' ELSE 'busy' END
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_ordinals) WITH ORDINALITY
           AS i (run_id, attempt, token, ordinal, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt
                      AND r.lease_token = i.token;
END
$$;

-- One page of a run's log, per lane in order of seq, lifecycle first.
CREATE OR REPLACE FUNCTION @schema@.read_facts(
    p_run_id text, p_after_lane smallint, p_after_seq integer, p_limit integer
) RETURNS TABLE (lane smallint, seq integer, type text, payload jsonb, created_at timestamptz)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT f.lane, f.seq, f.type, f.payload, f.created_at FROM facts f
     WHERE f.run_id = p_run_id AND (f.lane, f.seq) > (p_after_lane, p_after_seq)
     ORDER BY f.lane, f.seq LIMIT p_limit
$$;
