-- control: cancelling runs, and failing those that wait.
--
-- Lock order: run rows, SKIP LOCKED, then the request's row.
-- Fence: not finished, repeated in the write. The terminal keeps the request's id, so that a request asked
-- again after a lost answer hears that it won.

-- Ends runs as cancelled, whatever open status they are in. An attempt that is running loses its fence at once.
--
--   p_mark   leave a request behind for a run whose row is locked, to be swept as soon as it is free
--
-- answer: cancelled (this request won, now or before) | completed | failed | cancelled_before (another request
-- won) | pending (the request is recorded) | busy (locked and p_mark is false) | missing.
-- owner: the host whose live attempt lost its fence, for a hint. kin: its parent has a wake now, or its children have
-- requests to cancel.
CREATE OR REPLACE FUNCTION @schema@.cancel_runs(
    p_run_ids text[], p_requests text[], p_reasons text[], p_by text[], p_mark boolean
) RETURNS TABLE (ord integer, answer text, owner bigint, kin boolean)
LANGUAGE plpgsql
@lookup@
AS $$
#variable_conflict use_column
DECLARE
    v_now     timestamptz;
    v_done    text[];
    v_own     bigint[];
    v_reasons text[];
    v_by      text[];
    v_kin     text[];
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    WITH free AS (
        SELECT r.run_id, r.status AS was, r.wait_kind, i.request, i.reason, i.by
          FROM (SELECT DISTINCT ON (i.run_id) i.*
                  FROM unnest(p_run_ids, p_requests, p_reasons, p_by) WITH ORDINALITY AS i (run_id, request, reason, by, ord)
                 ORDER BY i.run_id, i.ord) i
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
         WHERE r.finished_at IS NULL
           FOR NO KEY UPDATE OF r SKIP LOCKED
    ), ended AS (
        UPDATE runs r
           SET status = 'cancelled', due_at = 'infinity', lease_expires_at = NULL,
               -- A claim may have begun after this call did and still have committed before the row was locked.
               finished_at = greatest(v_now, r.attempt_at),
               wait_kind = NULL, wait_key = NULL, wait_until = NULL,
               terminal_seq = r.last_seq + 1, last_seq = r.last_seq + 1,
               lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
          FROM free i
         WHERE r.run_id = ANY (ARRAY[i.run_id]) AND r.finished_at IS NULL
        RETURNING r.run_id, r.attempt, r.lease_token, r.lease_owner, r.attempt_at, r.finished_at, r.last_seq,
                  r.parent_id, i.was, i.request, i.reason, i.by
    ), woken AS (
        INSERT INTO wakes (created_at, run_id) SELECT DISTINCT v_now, parent_id FROM ended WHERE parent_id IS NOT NULL
    ), tried AS (
        INSERT INTO attempts (run_id, attempt, token, owner, started_at, ended_at, outcome)
        SELECT run_id, attempt, lease_token, lease_owner, attempt_at, finished_at, 'cancelled'
          FROM ended WHERE was = 'running'
    ), told AS (
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT run_id, 0, last_seq, 'run.cancelled', finished_at,
               jsonb_build_object('request_id', request, 'reason', reason, 'by', by)
          FROM ended
    ), unmarked AS (
        DELETE FROM cancellations c USING ended WHERE c.run_id = ANY (ARRAY[ended.run_id])
    )
    SELECT array_agg(run_id), array_agg(CASE WHEN was = 'running' THEN lease_owner END), array_agg(reason),
           array_agg(by), array_agg(run_id) FILTER (WHERE parent_id IS NOT NULL)
      INTO v_done, v_own, v_reasons, v_by, v_kin
      FROM ended;
    -- In a statement of its own: a child that was committed before the lock above was granted is seen now.
    v_kin := v_kin || (SELECT array_agg(p) FROM cancel_children(v_done, v_reasons, v_by, v_now) AS p);

    IF p_mark THEN
        INSERT INTO cancellations (requested_at, run_id, request_id, reason, requested_by)
        SELECT v_now, i.run_id, i.request, i.reason, i.by
          FROM unnest(p_run_ids, p_requests, p_reasons, p_by) AS i (run_id, request, reason, by)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.finished_at IS NULL
        ON CONFLICT DO NOTHING;
    END IF;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN r.run_id IS NULL THEN 'missing'
                WHEN r.status IN ('completed', 'failed') THEN r.status
                WHEN r.status = 'cancelled' AND f.payload ->> 'request_id' = i.request THEN 'cancelled'
                WHEN r.status = 'cancelled' THEN 'cancelled_before'
                WHEN p_mark THEN 'pending'
                ELSE 'busy' END,
           d.owner, coalesce(i.run_id = ANY (v_kin), false)
      FROM unnest(p_run_ids, p_requests) WITH ORDINALITY AS i (run_id, request, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN unnest(v_done, v_own) AS d (run_id, owner) ON d.run_id = i.run_id
      LEFT JOIN LATERAL (SELECT g.payload FROM facts g
                          WHERE g.run_id = r.run_id AND g.lane = 0 AND g.seq = r.terminal_seq OFFSET 0) f ON true;
END
$$;

-- Ends parked runs as failed without waking them: their owner, or an operator, knows that what they wait for will not
-- come. Fenced by the very wait that the caller has judged: its kind, its key and the attempt that parked on it. No
-- attempt is begun for it and no run.resumed is told: if the failure does not happen, the wait is as it was.
--
-- The guards are evaluated in a statement after the lock: requests to cancel are recorded without it, and one that was
-- committed while the lock was sought wins.
--
-- answer: failed (this request won, now or before) | fence_lost (the run waits, but not as judged: for something else,
-- since another attempt, for what has come meanwhile, or with a request to cancel) | not_applicable (it does not wait)
-- | busy (the row is locked: ask again) | missing. woke: its parent has a wake now.
CREATE OR REPLACE FUNCTION @schema@.fail_waiting(
    p_run_ids text[], p_attempts integer[], p_kinds text[], p_keys text[], p_requests text[], p_errors jsonb[],
    p_by text[]
) RETURNS TABLE (ord integer, answer text, status text, woke boolean)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now  timestamptz;
    v_free text[];
BEGIN
    PERFORM require_read_committed();
    SELECT array_agg(t.run_id) INTO v_free
      FROM (SELECT r.run_id FROM unnest(p_run_ids) AS i (run_id)
              JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
             WHERE r.wait_kind IS NOT NULL
               FOR NO KEY UPDATE OF r SKIP LOCKED) t;
    v_now := clock();

    WITH ended AS (
        UPDATE runs r
           SET status = 'failed', due_at = 'infinity', finished_at = v_now,
               wait_kind = NULL, wait_key = NULL, wait_until = NULL,
               terminal_seq = r.last_seq + 1, last_seq = r.last_seq + 1,
               lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
          FROM unnest(p_run_ids, p_attempts, p_kinds, p_keys, p_requests, p_errors, p_by)
               AS i (run_id, attempt, kind, key, request, error, by)
         WHERE i.run_id = ANY (v_free) AND r.run_id = ANY (ARRAY[i.run_id])
           AND r.attempt = i.attempt AND r.wait_kind = i.kind AND r.wait_key = i.key
           AND NOT EXISTS (SELECT 1 FROM waits c WHERE c.run_id = i.run_id AND c.key = i.key AND c.done_at IS NOT NULL OFFSET 0)
           AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = i.run_id OFFSET 0)
        RETURNING r.run_id, r.attempt, r.failures, r.last_seq, r.parent_id, r.created_at, r.started_at, r.performance,
                  i.request, i.error, i.by
    ), woken AS (
        INSERT INTO wakes (created_at, run_id) SELECT DISTINCT v_now, parent_id FROM ended WHERE parent_id IS NOT NULL
    )
    INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
    SELECT run_id, 0, last_seq, 'run.failed', v_now,
           jsonb_build_object('attempt', attempt, 'failures', failures, 'error', error, 'request_id', request, 'by', by)
               || CASE WHEN performance IS NOT NULL
                       THEN performance_keys(run_id, performance, attempt, created_at, started_at, NULL, NULL, NULL, v_now)
                       ELSE '{}' END
      FROM ended;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN r.run_id IS NULL THEN 'missing'
                WHEN r.status = 'failed' AND f.payload ->> 'request_id' = i.request THEN 'failed'
                WHEN r.wait_kind IS NULL THEN 'not_applicable'
                WHEN i.run_id = ANY (v_free) THEN 'fence_lost'
                ELSE 'busy' END,
           r.status, coalesce(r.parent_id IS NOT NULL AND r.status = 'failed', false)
      FROM unnest(p_run_ids, p_requests) WITH ORDINALITY AS i (run_id, request, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN LATERAL (SELECT g.payload FROM facts g
                          WHERE g.run_id = r.run_id AND g.lane = 0 AND g.seq = r.terminal_seq OFFSET 0) f ON true;
END
$$;

-- Carries out recorded requests whose run is free now, the oldest of each run, and forgets those whose run has
-- ended or is gone. Locked runs do not count against p_limit, so they hide nobody behind them.
-- Answers how many were carried out and how many requests are left, counted up to p_limit.
CREATE OR REPLACE FUNCTION @schema@.sweep_cancellations(p_limit integer)
RETURNS TABLE (cancelled integer, remaining integer)
LANGUAGE plpgsql
@lookup@
AS $$
DECLARE
    v_ids       text[];
    v_requests  text[];
    v_reasons   text[];
    v_by        text[];
    v_cancelled integer := 0;
BEGIN
    PERFORM require_read_committed();

    DELETE FROM cancellations c
     WHERE NOT EXISTS (SELECT 1 FROM runs r
                        WHERE r.run_id = ANY (ARRAY[c.run_id]) AND r.finished_at IS NULL);

    SELECT array_agg(t.run_id), array_agg(t.request_id), array_agg(t.reason), array_agg(t.requested_by)
      INTO v_ids, v_requests, v_reasons, v_by
      FROM (SELECT first.*
              FROM (SELECT DISTINCT ON (c.run_id) c.* FROM cancellations c
                     ORDER BY c.run_id, c.requested_at, c.request_id) first
              JOIN runs r ON r.run_id = ANY (ARRAY[first.run_id])
             WHERE r.finished_at IS NULL
             LIMIT p_limit
               FOR NO KEY UPDATE OF r SKIP LOCKED) t;

    IF v_ids IS NOT NULL THEN
        SELECT count(*) INTO v_cancelled
          FROM cancel_runs(v_ids, v_requests, v_reasons, v_by, false) a
         WHERE a.answer = 'cancelled';
    END IF;
    RETURN QUERY
    SELECT v_cancelled, count(*)::integer FROM (SELECT 1 FROM cancellations LIMIT p_limit) t;
END
$$;

-- The public SQL door:
--
--   SELECT runlane.cancel_run('01939c…', '{"reason": "duplicate"}');
--
-- It only inserts a request, and so locks nothing of the run, however long the caller's transaction stays
-- open; hosts carry the request out once it is committed. Options: reason, by, request_id, notify.
-- Answers pending, the terminal status if the run has ended, or missing.
CREATE OR REPLACE FUNCTION @schema@.cancel_run(p_run_id text, p_options jsonb DEFAULT '{}') RETURNS text
LANGUAGE plpgsql
@lookup@
AS $$
DECLARE
    v_status text;
BEGIN
    PERFORM check_options(p_options, '{reason, by, request_id, notify}');

    SELECT status INTO v_status FROM runs WHERE run_id = p_run_id;
    IF NOT FOUND THEN
        RETURN 'missing';
    ELSIF v_status IN ('completed', 'failed', 'cancelled') THEN
        RETURN v_status;
    END IF;

    INSERT INTO cancellations (requested_at, run_id, request_id, reason, requested_by)
    VALUES (clock(), p_run_id, coalesce(text_option(p_options, 'request_id', 255), gen_random_uuid()::text),
            text_option(p_options, 'reason', 10000), text_option(p_options, 'by', 255))
    ON CONFLICT DO NOTHING;

    IF coalesce((p_options ->> 'notify')::boolean, true) THEN
        PERFORM pg_notify(channel('control'), '');
    END IF;
    RETURN 'pending';
END
$$;
