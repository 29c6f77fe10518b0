-- timers: leases that have run out.
--
-- Lock order: run rows, SKIP LOCKED. Fence: running, and the lease expired, both judged on the locked row.

-- Looks at running runs whose due time has passed. One whose lease was renewed meanwhile gets its due time
-- moved to the lease's end; one whose lease has expired loses its attempt and is queued again, or fails once it
-- has crashed more often than its play allows. Crashes have a cap of their own; retries are not touched.
--
-- Answers {expired, failed, pushed, next_due_s}; next_due_s as in claim_runs.
CREATE OR REPLACE FUNCTION @schema@.expire_leases(p_limit integer, p_crash_cap integer)
RETURNS TABLE (expired integer, failed integer, pushed integer, next_due_s double precision)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now     timestamptz;
    v_expired integer;
    v_failed  integer;
    v_pushed  integer;
    v_next    timestamptz;
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    WITH due AS (
        SELECT r.run_id, r.lease_expires_at <= v_now AS dead,
               r.crashes + 1 > coalesce((SELECT p.crash_cap FROM plays p WHERE p.name = ANY (ARRAY[r.play])), p_crash_cap) AS over
          FROM runs r
         WHERE r.status = 'running' AND r.due_at <= v_now
         ORDER BY r.due_at
         LIMIT p_limit
           FOR NO KEY UPDATE SKIP LOCKED
    ), pushed AS (
        UPDATE runs r SET due_at = r.lease_expires_at
          FROM due d
         WHERE r.run_id = ANY (ARRAY[d.run_id]) AND NOT d.dead AND r.lease_expires_at > v_now
        RETURNING 1
    ), expired AS (
        UPDATE runs r
           SET status = CASE WHEN d.over THEN 'failed' ELSE 'queued' END,
               due_at = CASE WHEN d.over THEN 'infinity'::timestamptz ELSE v_now END,
               finished_at = CASE WHEN d.over THEN v_now END,
               terminal_seq = CASE WHEN d.over THEN r.last_seq + 1 END,
               crashes = r.crashes + 1,
               lease_expires_at = NULL,
               last_seq = r.last_seq + 1,
               lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
          FROM due d
         WHERE r.run_id = ANY (ARRAY[d.run_id]) AND d.dead AND r.lease_expires_at <= v_now
        RETURNING r.run_id, r.attempt, r.lease_token, r.lease_owner, r.attempt_at, r.last_seq, r.crashes, r.failures,
                  r.parent_id, d.over
    ), woken AS (
        INSERT INTO wakes (created_at, run_id)
        SELECT DISTINCT v_now, parent_id FROM expired WHERE over AND parent_id IS NOT NULL
    ), tried AS (
        INSERT INTO attempts (run_id, attempt, token, owner, started_at, ended_at, outcome)
        SELECT run_id, attempt, lease_token, lease_owner, attempt_at, v_now, 'expired' FROM expired
    ), told AS (
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT run_id, 0, last_seq,
               CASE WHEN over THEN 'run.failed' ELSE 'run.requeued' END,
               v_now,
               CASE WHEN over THEN jsonb_build_object('attempt', attempt, 'failures', failures, 'error',
                        jsonb_build_object('error_type', 'LeaseExpired', 'message',
                            format('%s attempts ended without a word: their host died or lost its database', crashes)))
                    ELSE jsonb_build_object('attempt', attempt, 'reason', 'expired', 'due_at', v_now) END
          FROM expired
    )
    SELECT (SELECT count(*) FROM expired), (SELECT count(*) FROM expired WHERE over), (SELECT count(*) FROM pushed)
      INTO v_expired, v_failed, v_pushed;

    SELECT r.due_at INTO v_next FROM runs r WHERE r.status = 'running' ORDER BY r.due_at LIMIT 1;
    RETURN QUERY SELECT v_expired, v_failed, v_pushed, seconds_until(v_next, v_now);
END
$$;
