-- billing: what a run's compute was, told once, when everything of it is settled.
--
-- Lock order: billing jobs, SKIP LOCKED. The job of a run is written with its first sandbox, so no terminal can be
-- without one. Fence: the record's derived id; a record is never changed.

-- Finalises jobs that are due: of runs that have ended and whose sandboxes have all been taken by their provider, or have
-- outlived their ceiling (without one: their attempt) by p_grace_s; those are billed up to that and told as late. What no
-- provider ever said to exist, and no deletion found, costs nothing. Others are looked at again in p_again_s. Runner time
-- ends when the result was first received, sandbox time when the provider took the deletion: both are moments of this
-- database, never a sandbox's own word. A lost runner's ends when its provider saw it end, or at its last heartbeat, at the
-- latest with the verdict: nobody pays for the silence that it took to find out.
CREATE OR REPLACE FUNCTION @schema@.finalise_billing(
    p_limit integer, p_grace_s double precision, p_again_s double precision
) RETURNS TABLE (finalised integer, postponed integer, next_due_s double precision)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now  timestamptz;
    v_ids  text[];
    v_done text[];
    v_next timestamptz;
BEGIN
    PERFORM require_read_committed();
    v_now := clock();
    SELECT array_agg(t.run_id) INTO v_ids
      FROM (SELECT b.run_id FROM billing_jobs b
             WHERE b.finalised_at IS NULL AND b.due_at <= v_now
             ORDER BY b.due_at LIMIT p_limit
               FOR NO KEY UPDATE SKIP LOCKED) t;

    IF v_ids IS NOT NULL THEN
        SELECT array_agg(i.run_id) INTO v_done
          FROM unnest(v_ids) AS i (run_id)
          LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
         WHERE (r.run_id IS NULL OR r.finished_at IS NOT NULL)
           AND NOT EXISTS (SELECT 1
                             FROM (SELECT s FROM sandboxes s WHERE s.run_id = ANY (ARRAY[i.run_id]) OFFSET 0) AS of_run (s)
                            WHERE (of_run.s).accepted_at IS NULL AND billed_until(of_run.s, p_grace_s) > v_now);

        INSERT INTO compute_records (record_id, run_id, attempt, kind, provider, org_id, started_at, ended_at, recorded_at)
        SELECT CASE WHEN s.accepted_at IS NULL
                    THEN s.run_id || ':late-resource:' || encode(sha256(convert_to(
                             concat_ws(E'\x1f', s.provider, s.sandbox, s.provider_id), 'UTF8')), 'hex')
                    ELSE s.run_id || ':sandbox:' || s.sandbox END,
               s.run_id, s.attempt, CASE WHEN s.accepted_at IS NULL THEN 'late_sandbox' ELSE 'sandbox' END,
               s.provider, s.org_id, coalesce(s.custody_at, s.created_at),
               coalesce(s.accepted_at, billed_until(s, p_grace_s)), v_now
          FROM sandboxes s
         WHERE s.run_id = ANY (v_done)
           AND (s.custody_at IS NOT NULL
                -- Its host died before it could write down that it was there.
                OR EXISTS (SELECT 1 FROM sandbox_events e
                            WHERE e.event_id = ANY (ARRAY[s.sandbox || ':delete_accepted'])
                              AND e.details ->> 'outcome' = 'deleted' OFFSET 0))
        UNION ALL
        SELECT a.run_id || ':runner:' || a.attempt, a.run_id, a.attempt, 'runner', s.provider, s.org_id,
               coalesce(s.custody_at, s.created_at),
               least(coalesce(q.received_at, lost_at(a.outcome, s), a.ended_at), a.ended_at), v_now
          FROM attempts a
          JOIN sandboxes s ON s.run_id = ANY (ARRAY[a.run_id]) AND s.attempt = a.attempt
                          AND s.sandbox NOT LIKE 'adopted:%'  -- of an older generation, and so was its attempt
          LEFT JOIN runner_results q ON q.run_id = ANY (ARRAY[a.run_id]) AND q.attempt = a.attempt
         WHERE a.run_id = ANY (v_done) AND a.owner = 0
        ON CONFLICT DO NOTHING;

        UPDATE billing_jobs b
           SET finalised_at = CASE WHEN b.run_id = ANY (v_done) THEN v_now END,
               due_at = CASE WHEN b.run_id = ANY (v_done) THEN b.due_at ELSE v_now + make_interval(secs => p_again_s) END
         WHERE b.run_id = ANY (v_ids);
    END IF;

    SELECT b.due_at INTO v_next FROM billing_jobs b WHERE b.finalised_at IS NULL ORDER BY b.due_at LIMIT 1;
    RETURN QUERY SELECT coalesce(cardinality(v_done), 0), coalesce(cardinality(v_ids), 0) - coalesce(cardinality(v_done), 0),
                        seconds_until(v_next, v_now);
END
$$;

-- The latest moment up to which a sandbox may be billed when its provider never took its deletion.
CREATE OR REPLACE FUNCTION @schema@.billed_until(p_sandbox @schema@.sandboxes, p_grace_s double precision) RETURNS timestamptz
LANGUAGE sql IMMUTABLE
@seek@
AS $$
    SELECT coalesce(nullif(p_sandbox.ceiling_at, 'infinity'), p_sandbox.wanted_at, p_sandbox.created_at)
           + make_interval(secs => p_grace_s)
$$;

-- When the runner of a lost attempt was over, as far as anybody knows; NULL: not known, or not lost.
CREATE OR REPLACE FUNCTION @schema@.lost_at(p_outcome text, p_sandbox @schema@.sandboxes) RETURNS timestamptz
LANGUAGE sql IMMUTABLE
@seek@
AS $$
    SELECT greatest(to_timestamp((p_sandbox.diagnostics -> 'ended_at')::double precision), p_sandbox.custody_at)
     WHERE p_outcome = 'lost' AND jsonb_typeof(p_sandbox.diagnostics -> 'ended_at') = 'number'
$$;

-- One page of records for export, in the order in which they were made.
CREATE OR REPLACE FUNCTION @schema@.read_compute_records(p_after_at timestamptz, p_after_id text, p_limit integer)
RETURNS SETOF @schema@.compute_records
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT c.* FROM compute_records c
     WHERE (c.recorded_at, c.record_id) > (coalesce(p_after_at, '-infinity'), coalesce(p_after_id, ''))
     ORDER BY c.recorded_at, c.record_id LIMIT p_limit
$$;
