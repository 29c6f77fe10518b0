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
    v_dead    text[];
    v_expired integer := 0;
    v_failed  integer := 0;
    v_pushed  integer;
    v_next    timestamptz;
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    WITH due AS (
        SELECT r.run_id, r.lease_expires_at <= v_now AS dead
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
    )
    SELECT (SELECT array_agg(run_id) FROM due WHERE dead), (SELECT count(*) FROM pushed) INTO v_dead, v_pushed;

    IF v_dead IS NOT NULL THEN
        SELECT c.ended, c.failed INTO v_expired, v_failed
          FROM crash_attempts(v_dead, array_fill('expired'::text, ARRAY[cardinality(v_dead)]),
                              array_fill(NULL::jsonb, ARRAY[cardinality(v_dead)]), p_crash_cap, v_now) c;
    END IF;

    SELECT r.due_at INTO v_next FROM runs r WHERE r.status = 'running' ORDER BY r.due_at LIMIT 1;
    RETURN QUERY SELECT v_expired, v_failed, v_pushed, seconds_until(v_next, v_now);
END
$$;

-- Ends attempts that crashed, of runs whose rows the caller has locked and judged. p_outcomes, per item:
--
--   expired  its lease ran out  | lost  its runner is gone
--            one crash is charged: the run is queued again, or fails once it has crashed more often than its play allows
--   ceiling  it ran too long: the run fails
--
-- p_errors: what the facts say of it; NULL says what an expired lease means.
CREATE OR REPLACE FUNCTION @schema@.crash_attempts(
    p_run_ids text[], p_outcomes text[], p_errors jsonb[], p_crash_cap integer, p_now timestamptz
) RETURNS TABLE (ended integer, failed integer)
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_ended  integer;
    v_failed integer;
BEGIN
    WITH crashed AS (
        SELECT i.run_id, i.outcome, i.error,
               i.outcome = 'ceiling'
                 OR r.crashes + 1 > coalesce((SELECT p.crash_cap FROM plays p WHERE p.name = ANY (ARRAY[r.play])),
                                             p_crash_cap) AS final
          FROM unnest(p_run_ids, p_outcomes, p_errors) AS i (run_id, outcome, error)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
    ), gone AS (
        UPDATE runs r
           SET status = CASE WHEN c.final THEN 'failed' ELSE 'queued' END,
               due_at = CASE WHEN c.final THEN 'infinity'::timestamptz ELSE p_now END,
               finished_at = CASE WHEN c.final THEN p_now END,
               terminal_seq = CASE WHEN c.final THEN r.last_seq + 1 END,
               crashes = r.crashes + (c.outcome <> 'ceiling')::integer,
               lease_expires_at = NULL,
               last_seq = r.last_seq + 1,
               lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE p_now END
          FROM crashed c
         WHERE r.run_id = ANY (ARRAY[c.run_id]) AND r.lease_expires_at IS NOT NULL
        RETURNING r.run_id, r.attempt, r.lease_token, r.lease_owner, r.attempt_at, r.last_seq, r.crashes, r.failures,
                  r.parent_id, r.created_at, r.started_at, r.performance, c.outcome, c.error, c.final
    ), woken AS (
        INSERT INTO wakes (created_at, run_id)
        SELECT DISTINCT p_now, parent_id FROM gone WHERE final AND parent_id IS NOT NULL
    ), tried AS (
        INSERT INTO attempts (run_id, attempt, token, owner, started_at, ended_at, outcome, error)
        SELECT run_id, attempt, lease_token, lease_owner, attempt_at, p_now, outcome, error FROM gone
    ), told AS (
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT run_id, 0, last_seq,
               CASE WHEN final THEN 'run.failed' ELSE 'run.requeued' END,
               p_now,
               CASE WHEN final THEN jsonb_build_object('attempt', attempt, 'failures', failures, 'error',
                        CASE WHEN error IS NULL OR outcome <> 'ceiling' AND crashes > 1
                             THEN jsonb_build_object('error_type', 'LeaseExpired', 'message',
                                  format('%s attempts ended without a word: their host or sandbox died, or lost its database',
                                         crashes))
                             ELSE error END)
                        || CASE WHEN performance IS NOT NULL
                                THEN performance_keys(run_id, performance, attempt, created_at, started_at, lease_owner,
                                                      attempt_at, NULL, p_now)
                                ELSE '{}' END
                    ELSE jsonb_strip_nulls(jsonb_build_object(
                        'attempt', attempt, 'reason', outcome, 'due_at', p_now, 'error', error)) END
          FROM gone
    )
    SELECT count(*), count(*) FILTER (WHERE final) INTO v_ended, v_failed FROM gone;
    RETURN QUERY SELECT v_ended, v_failed;
END
$$;
