-- settle: attempts end, in sets. The first terminal wins and is never rewritten.
--
-- Lock order: run rows, SKIP LOCKED, then the attempt's row and the fact, which nobody else can be writing.
-- Fence: a lease, attempt and token, repeated in the write. (A row has a lease exactly while it runs; asking for
-- the lease rather than the status keeps the planner on the primary key instead of the index of running rows.) The
-- row keeps attempt and token after the end, so that a call whose answer was lost is asked again and answered alike.

-- Ends attempts. p_outcomes, per item:
--
--   completed   the run ends; payload {"output": …}
--   failed      the run ends; payload {"error": {…}}
--   retried     the attempt failed, the run is queued again after p_delays seconds; one failure is charged
--   released    the run goes back at once; nothing is charged
--   deferred    the run goes back after p_delays seconds; nothing is charged, however long that goes on; payload
--               {"error": {"kind": …}} says why (an outage, which is bounded, goes through defer_attempts)
--
-- answer: done | busy (the row is locked: ask again) | lost, with the run's status as it stands now
-- (NULL: there is no such run). woke: runs that wait for the end of one of these have a wake now.
CREATE OR REPLACE FUNCTION @schema@.settle_attempts(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_outcomes text[], p_payloads jsonb[],
    p_delays double precision[]
) RETURNS TABLE (ord integer, answer text, status text, woke boolean)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now  timestamptz;
    v_done text[];
    v_woke boolean;
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    WITH free AS (
        SELECT i.*, i.outcome IN ('completed', 'failed') AS terminal
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_outcomes, p_payloads, p_delays)
               AS i (run_id, attempt, token, outcome, payload, delay_s)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
         WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
           FOR NO KEY UPDATE OF r SKIP LOCKED
    ), ended AS (
        UPDATE runs r
           SET status = CASE WHEN i.terminal THEN i.outcome ELSE 'queued' END,
               due_at = CASE WHEN i.terminal THEN 'infinity'
                             ELSE v_now + make_interval(secs => coalesce(i.delay_s, 0)) END,
               finished_at = CASE WHEN i.terminal THEN v_now END,
               terminal_seq = CASE WHEN i.terminal THEN r.last_seq + 1 END,
               failures = r.failures + (i.outcome IN ('failed', 'retried'))::integer,
               lease_expires_at = NULL,
               last_seq = r.last_seq + 1,
               lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
          FROM free i
         WHERE r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
        RETURNING r.run_id, r.attempt, r.last_seq, r.attempt_at, r.lease_owner, r.lease_token, r.due_at, r.failures,
                  r.parent_id, r.created_at, r.started_at, r.performance, i.terminal, i.outcome,
                  -- What a runner has used is no part of what has happened: see performance.sql.
                  CASE WHEN r.lease_owner = 0 THEN i.payload - 'usage' ELSE i.payload END AS payload,
                  CASE WHEN r.lease_owner = 0 THEN i.payload -> 'usage' END AS usage
    ), woken AS (
        INSERT INTO wakes (created_at, run_id)
        SELECT DISTINCT v_now, parent_id FROM ended WHERE terminal AND parent_id IS NOT NULL
        RETURNING 1
    ), tried AS (
        INSERT INTO attempts (run_id, attempt, token, owner, started_at, ended_at, outcome, error)
        SELECT run_id, attempt, lease_token, lease_owner, attempt_at, v_now, outcome,
               CASE WHEN outcome <> 'completed' THEN payload -> 'error' END
          FROM ended
    ), told AS (
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT run_id, 0, last_seq,
               CASE WHEN terminal THEN 'run.' || outcome ELSE 'run.requeued' END,
               v_now,
               payload || CASE WHEN outcome = 'completed' THEN jsonb_build_object('attempt', attempt)
                               WHEN terminal THEN jsonb_build_object('attempt', attempt, 'failures', failures)
                               ELSE jsonb_build_object('attempt', attempt, 'reason', outcome, 'due_at', due_at) END
                       || CASE WHEN terminal AND performance IS NOT NULL
                               THEN performance_keys(run_id, performance, attempt, created_at, started_at, lease_owner,
                                                     attempt_at, usage, v_now)
                               ELSE '{}' END
          FROM ended
    )
    SELECT array_agg(run_id), EXISTS (SELECT 1 FROM woken) INTO v_done, v_woke FROM ended;

    IF cardinality(v_done) = cardinality(p_run_ids) THEN
        RETURN QUERY SELECT i::integer, 'done'::text, NULL::text, v_woke FROM generate_series(1, cardinality(v_done)) AS i;
        RETURN;
    END IF;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN a.outcome = i.outcome THEN 'done'   -- just now, or asked again after a lost answer
                WHEN r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token THEN 'busy'
                ELSE 'lost' END,
           r.status, coalesce(r.parent_id IS NOT NULL AND r.finished_at IS NOT NULL, false)
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_outcomes) WITH ORDINALITY
           AS i (run_id, attempt, token, outcome, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN attempts a ON a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt AND a.token = i.token;
END
$$;

-- Defers attempts because something that they depend on is out: as deferred above, but only for p_max_s seconds of
-- wall clock, for unlike capacity it may never come back. p_payloads, per item: {"error": {"kind": …, …}}.
--
-- The outage began at the start of this attempt, or of the earliest one in the unbroken tail of attempts directly
-- before it that were deferred by an outage of the same kind. Each of them has that moment in its row, so the one
-- before tells all of them.
--
-- answer: done | over (the outage has lasted p_max_s: nothing was written; end the run through settle_attempts) | busy
-- | lost. outage_at: when the outage began; NULL where the caller's fence is gone, so that it proves ownership.
CREATE OR REPLACE FUNCTION @schema@.defer_attempts(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_payloads jsonb[], p_delays double precision[],
    p_max_s double precision[]
) RETURNS TABLE (ord integer, answer text, status text, outage_at timestamptz)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz;
    v_free  text[];
    v_since timestamptz[];
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    WITH free AS (
        SELECT i.*, least(r.attempt_at, a.outage_at) AS outage_at
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_payloads, p_delays, p_max_s)
               AS i (run_id, attempt, token, payload, delay_s, max_s)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
          LEFT JOIN attempts a ON a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt - 1
                              AND a.error ->> 'kind' = i.payload #>> '{error,kind}'
         WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
           FOR NO KEY UPDATE OF r SKIP LOCKED
    ), deferred AS (
        UPDATE runs r
           SET status = 'queued', due_at = v_now + make_interval(secs => i.delay_s), lease_expires_at = NULL,
               last_seq = r.last_seq + 1,
               lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
          FROM free i
         WHERE r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
           AND i.outage_at > v_now - make_interval(secs => i.max_s)
        RETURNING r.run_id, r.attempt, r.last_seq, r.attempt_at, r.lease_owner, r.lease_token, r.due_at, i.payload,
                  i.outage_at
    ), tried AS (
        INSERT INTO attempts (run_id, attempt, token, owner, started_at, ended_at, outcome, error, outage_at)
        SELECT run_id, attempt, lease_token, lease_owner, attempt_at, v_now, 'deferred', payload -> 'error', outage_at
          FROM deferred
    ), told AS (
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT run_id, 0, last_seq, 'run.requeued', v_now,
               payload || jsonb_build_object('attempt', attempt, 'reason', 'deferred', 'due_at', due_at,
                                             'outage_at', outage_at)
          FROM deferred
    )
    SELECT array_agg(run_id), array_agg(outage_at) INTO v_free, v_since FROM free;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN a.outcome = 'deferred' THEN 'done'  -- just now, or asked again after a lost answer
                WHEN r.lease_expires_at IS NULL OR r.attempt <> i.attempt OR r.lease_token <> i.token THEN 'lost'
                WHEN f.run_id IS NOT NULL THEN 'over'
                WHEN r.run_id IS NOT NULL THEN 'busy'
                ELSE 'lost' END,
           r.status, coalesce(a.outage_at, f.outage_at)
      FROM unnest(p_run_ids, p_attempts, p_tokens) WITH ORDINALITY AS i (run_id, attempt, token, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN attempts a ON a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt AND a.token = i.token
      LEFT JOIN unnest(v_free, v_since) AS f (run_id, outage_at) ON f.run_id = i.run_id;
END
$$;

-- Parks attempts on durable waits. p_waits, per item, as for register_waits: [{"key": …, "kind": …, …}, …].
--
-- A wait that an earlier attempt registered keeps its first due time. The run is due when the first of these
-- waits is, at once if one of them is over already: an event may have come before its wait, and this park may have
-- been on its way when its child ended. Answers as settle_attempts does; an item without waits is refused, for
-- nothing would ever wake it.
CREATE OR REPLACE FUNCTION @schema@.park_attempts(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_waits jsonb[]
) RETURNS TABLE (ord integer, answer text, status text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now    timestamptz;
    v_free   text[];
    v_seqs   integer[];
    v_waits  jsonb[];
    v_ids    text[];
    v_keys   text[];
    v_parked integer;
BEGIN
    PERFORM require_read_committed();
    IF '[]' = ANY (p_waits) THEN
        PERFORM refuse('waits', 'an attempt parks on at least one wait');
    END IF;

    SELECT array_agg(t.run_id), array_agg(t.seq), array_agg(t.waits) INTO v_free, v_seqs, v_waits
      FROM (SELECT r.run_id, r.last_seq + 1 AS seq, i.waits
              FROM unnest(p_run_ids, p_attempts, p_tokens, p_waits) AS i (run_id, attempt, token, waits)
              JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
             WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
               FOR NO KEY UPDATE OF r SKIP LOCKED) t;
    v_now := clock();

    PERFORM register_waits(v_free, v_waits, v_seqs, v_now);
    SELECT array_agg(i.run_id), array_agg(w.key) INTO v_ids, v_keys
      FROM unnest(v_free, v_waits) AS i (run_id, waits)
     CROSS JOIN LATERAL jsonb_to_recordset(i.waits) AS w (key text, kind text)
     WHERE w.kind <> 'sleep';
    IF v_ids IS NOT NULL THEN
        PERFORM pass_waits(v_ids, v_keys, v_now);
    END IF;

    WITH first AS (
        SELECT i.run_id, i.attempt, i.token, c.key, c.kind, c.name, c.due_at, c.wakes_at
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_waits) AS i (run_id, attempt, token, waits)
         CROSS JOIN LATERAL (
                SELECT c.key, c.kind, c.name, c.due_at,
                       CASE WHEN c.done_at IS NULL THEN coalesce(c.due_at, 'infinity') ELSE v_now END AS wakes_at
                  FROM jsonb_to_recordset(i.waits) AS w (key text)
                 CROSS JOIN LATERAL (SELECT * FROM waits WHERE run_id = i.run_id AND key = w.key OFFSET 0) c
                 ORDER BY wakes_at, c.key LIMIT 1) c
         WHERE i.run_id = ANY (v_free)
    ), parked AS (
        UPDATE runs r
           SET status = 'waiting', due_at = f.wakes_at, wait_kind = f.kind, wait_key = f.key,
               -- Of sleeps only: people must not take a deadline for the moment at which it goes on.
               wait_until = CASE WHEN f.kind = 'sleep' THEN f.due_at END,
               wait_seq = r.last_seq + 1, lease_expires_at = NULL,
               last_seq = r.last_seq + 1,
               lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
          FROM first f
         WHERE r.run_id = ANY (ARRAY[f.run_id]) AND r.lease_expires_at IS NOT NULL AND r.attempt = f.attempt AND r.lease_token = f.token
        RETURNING r.run_id, r.attempt, r.lease_token, r.lease_owner, r.attempt_at, r.last_seq, r.wait_kind, r.wait_key,
                  r.wait_until, f.name
    ), tried AS (
        INSERT INTO attempts (run_id, attempt, token, owner, started_at, ended_at, outcome)
        SELECT run_id, attempt, lease_token, lease_owner, attempt_at, v_now, 'parked' FROM parked
    ), told AS (
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT run_id, 0, last_seq, 'run.waiting', v_now,
               jsonb_strip_nulls(jsonb_build_object(
                   'kind', wait_kind, 'key', wait_key, 'name', name,
                   'wait_until', floor(extract(epoch FROM wait_until) * 1000)::bigint))
          FROM parked
    )
    SELECT count(*) INTO v_parked FROM parked;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN a.outcome = 'parked' THEN 'done'    -- just now, or asked again after a lost answer
                WHEN r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token THEN 'busy'
                ELSE 'lost' END,
           r.status
      FROM unnest(p_run_ids, p_attempts, p_tokens) WITH ORDINALITY AS i (run_id, attempt, token, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN attempts a ON a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt AND a.token = i.token;
END
$$;
