-- leases: live attempts are renewed, by an explicit list, never "all of mine".
--
-- Lock order: run rows, SKIP LOCKED. A row that somebody holds is answered busy and costs nobody else time.
-- Fence: a lease (a row has one exactly while it runs), attempt and token. Only lease_expires_at moves, which no
-- index covers: the renewal is HOT.

-- answer: renewed | busy (the row is locked; the lease stands as it was) | lost (the fence is gone).
-- cancel: a request to cancel this run is recorded, or it is why the fence is gone.
CREATE OR REPLACE FUNCTION @schema@.renew_leases(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_lease_s double precision
) RETURNS TABLE (ord integer, answer text, cancel boolean)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_until timestamptz;
    v_done  text[];
BEGIN
    PERFORM require_read_committed();
    v_until := clock() + make_interval(secs => p_lease_s);

    WITH free AS (
        SELECT i.*
          FROM unnest(p_run_ids, p_attempts, p_tokens) AS i (run_id, attempt, token)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
         WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
           FOR NO KEY UPDATE OF r SKIP LOCKED
    ), renewed AS (
        UPDATE runs r SET lease_expires_at = greatest(r.lease_expires_at, v_until)
          FROM free i
         WHERE r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
        RETURNING r.run_id
    )
    SELECT array_agg(run_id) INTO v_done FROM renewed;

    IF cardinality(v_done) = cardinality(p_run_ids) THEN
        RETURN QUERY
        SELECT i.ord::integer, 'renewed'::text, EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[i.run_id]))
          FROM unnest(p_run_ids) WITH ORDINALITY AS i (run_id, ord);
        RETURN;
    END IF;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN i.run_id = ANY (v_done) THEN 'renewed' WHEN r.run_id IS NOT NULL THEN 'busy' ELSE 'lost' END,
           EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[i.run_id]))
               OR EXISTS (SELECT 1 FROM runs x WHERE x.run_id = ANY (ARRAY[i.run_id]) AND x.status = 'cancelled')
      FROM unnest(p_run_ids, p_attempts, p_tokens) WITH ORDINALITY AS i (run_id, attempt, token, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt
                      AND r.lease_token = i.token;
END
$$;

-- Attempts that the database believes this owner to run, to be compared with the tasks that do.
CREATE OR REPLACE FUNCTION @schema@.held_leases(p_owner bigint)
RETURNS TABLE (run_id text, attempt integer, token bigint)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT r.run_id, r.attempt, r.lease_token FROM runs r
     WHERE r.status = 'running' AND r.due_at > '-infinity' AND r.lease_owner = p_owner
$$;
