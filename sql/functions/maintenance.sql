-- maintenance: what grows is kept small. Retention of ended runs, log bodies, counts, hosts that are long gone.
--
-- Lock order: run, lane, ledger row, SKIP LOCKED: what somebody holds stays until the next round.
-- Fence: a run goes only if it has ended, on its locked row, and every fact of both its lanes is delivered; a log body
-- only if its fact is. A chore is claimed by moving its due time, which no pass depends on: two hosts that do the same
-- pass at once do no harm.
--
-- Passes are bounded. Each looks at up to p_limit rows in the order of time, from p_from on, and answers where the next
-- one begins (NULL: the round is done): rows that have to stay are passed over, and seen again in the next round.

-- Takes the one of these chores that has been due longest, for p_lease_s seconds. Always one row; name NULL: none is due.
-- (A chore of a newer host's is none of ours.)
CREATE OR REPLACE FUNCTION @schema@.claim_chore(p_names text[], p_lease_s double precision)
RETURNS TABLE (name text, state jsonb, claim timestamptz)
LANGUAGE plpgsql
@lookup@
AS $$
#variable_conflict use_column
DECLARE
    v_now  CONSTANT timestamptz := clock();
    v_name text;
BEGIN
    PERFORM require_read_committed();
    SELECT c.name INTO v_name FROM chores c
     WHERE c.name = ANY (p_names) AND c.due_at <= v_now
     ORDER BY c.due_at, c.name LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;
    RETURN QUERY
    UPDATE chores c SET due_at = v_now + make_interval(secs => p_lease_s)
     WHERE c.name = v_name AND c.due_at <= v_now
    RETURNING c.name, c.state, c.due_at;
    IF NOT FOUND THEN
        RETURN QUERY SELECT NULL::text, NULL::jsonb, NULL::timestamptz;
    END IF;
END
$$;

-- Hands a chore back, to be due again in p_next_s seconds. False: somebody else has claimed it since.
CREATE OR REPLACE FUNCTION @schema@.finish_chore(
    p_name text, p_claim timestamptz, p_next_s double precision, p_state jsonb
) RETURNS boolean
LANGUAGE plpgsql
@lookup@
AS $$
BEGIN
    PERFORM require_read_committed();
    PERFORM 1 FROM chores c WHERE c.name = p_name AND c.due_at = p_claim FOR NO KEY UPDATE SKIP LOCKED;
    UPDATE chores c SET due_at = clock() + make_interval(secs => p_next_s), state = p_state
     WHERE FOUND AND c.name = p_name AND c.due_at = p_claim;
    RETURN FOUND;
END
$$;

-- --- retention ------------------------------------------------------------------------------------------

-- Deletes everything that these runs have left. A table whose rows belong to a run has a line here, or a reason not to
-- in tests/kernel/test_maintenance.py. How many rows.
CREATE OR REPLACE FUNCTION @schema@.forget_runs(p_run_ids text[], p_ledger boolean) RETURNS bigint
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_rows  bigint;
    v_total bigint := 0;
BEGIN
    DELETE FROM facts         WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM attempts      WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM waits         WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM events        WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM receipts      WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM lanes         WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM journal       WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM runners       WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM runner_results WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM billing_jobs  WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    -- Events have no run of their own; their ids are made of the sandbox and what happened.
    DELETE FROM sandbox_events
     WHERE event_id = ANY (ARRAY(SELECT x.sandbox || k.suffix FROM sandboxes x
                                  CROSS JOIN (VALUES (':delete_accepted'), (':delete_confirmed')) AS k (suffix)
                                  WHERE x.run_id = ANY (p_run_ids)));
    GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM sandboxes     WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM cancellations WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    DELETE FROM fires         WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    IF p_ledger THEN
        DELETE FROM ledger_runs WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
        DELETE FROM ledger_logs WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT; v_total := v_total + v_rows;
    END IF;
    DELETE FROM runs          WHERE run_id = ANY (p_run_ids); GET DIAGNOSTICS v_rows = ROW_COUNT;
    RETURN v_total + v_rows;
END
$$;

-- Those of these ended runs that may go: nothing of them is undelivered or blocked, their sandboxes are gone and billed,
-- no run that is still open started them and may yet ask for their result, and nobody holds their lane of logs or their
-- row of the ledger.
CREATE OR REPLACE FUNCTION @schema@.forgettable_runs(p_run_ids text[], p_ledger boolean) RETURNS text[]
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_free text[];
    v_ids  text[];
BEGIN
    SELECT array_agg(l.run_id) INTO v_free
      FROM (SELECT l.run_id FROM lanes l WHERE l.run_id = ANY (p_run_ids) FOR UPDATE SKIP LOCKED) l;
    SELECT array_agg(i.run_id) INTO v_ids
      FROM unnest(p_run_ids) AS i (run_id)
      JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN LATERAL (SELECT * FROM lanes g WHERE g.run_id = i.run_id OFFSET 0) l ON true
     WHERE r.lane_error IS NULL
       AND (l.run_id IS NULL OR (l.run_id = ANY (v_free) AND NOT l.lane_pending AND l.lane_error IS NULL))
       AND NOT EXISTS (SELECT 1 FROM runs p WHERE p.run_id = ANY (ARRAY[r.parent_id]) AND p.finished_at IS NULL)
       -- Asked for as values, not as conditions: a condition would let a partial index of open rows be walked.
       AND (SELECT bool_and(x.confirmed_at IS NOT NULL) FROM sandboxes x WHERE x.run_id = ANY (ARRAY[i.run_id])) IS NOT FALSE
       AND (SELECT b.finalised_at IS NOT NULL FROM billing_jobs b WHERE b.run_id = ANY (ARRAY[i.run_id])) IS NOT FALSE;
    IF p_ledger THEN
        SELECT array_agg(l.run_id) INTO v_free
          FROM (SELECT l.run_id FROM ledger_runs l WHERE l.run_id = ANY (v_ids) FOR UPDATE SKIP LOCKED) l;
        SELECT array_agg(i.run_id) INTO v_ids
          FROM unnest(v_ids) AS i (run_id)
         WHERE i.run_id = ANY (v_free)
            OR NOT EXISTS (SELECT 1 FROM ledger_runs l WHERE l.run_id = ANY (ARRAY[i.run_id]));
    END IF;
    RETURN v_ids;
END
$$;

-- Deletes runs that ended more than p_age_s seconds ago, those that ended first first, with all that they have left.
-- runs, rows: deleted in this pass. next_from: see above.
CREATE OR REPLACE FUNCTION @schema@.purge_runs(
    p_age_s double precision, p_limit integer, p_ledger boolean, p_from timestamptz
) RETURNS TABLE (runs integer, rows bigint, next_from timestamptz)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_before timestamptz;
    v_found  record;
    v_ids    text[];
    v_rows   bigint := 0;
BEGIN
    PERFORM require_read_committed();
    v_before := clock() - make_interval(secs => p_age_s);

    SELECT array_agg(t.run_id) AS ids, min(t.finished_at) AS first, max(t.finished_at) AS last, count(*) AS n
      INTO v_found
      FROM (SELECT r.run_id, r.finished_at FROM runs r
             WHERE r.finished_at IS NOT NULL AND NOT r.lane_pending
               AND r.finished_at >= coalesce(p_from, '-infinity') AND r.finished_at <= v_before
             ORDER BY r.finished_at
             LIMIT p_limit
               FOR UPDATE SKIP LOCKED) t;
    v_ids := forgettable_runs(v_found.ids, p_ledger);
    IF v_ids IS NOT NULL THEN
        v_rows := forget_runs(v_ids, p_ledger);
    END IF;

    RETURN QUERY
    SELECT coalesce(cardinality(v_ids), 0), v_rows, pass_end(v_found.n < p_limit, v_ids IS NULL, v_found.first, v_found.last);
END
$$;

-- Where the next pass begins. Rows of one moment that all have to stay must not hold up what comes after them.
CREATE OR REPLACE FUNCTION @schema@.pass_end(
    p_done boolean, p_stuck boolean, p_first timestamptz, p_last timestamptz
) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN NOT p_done
                THEN p_last + CASE WHEN p_stuck AND p_first = p_last THEN interval '1 microsecond' ELSE interval '0' END END
$$;

-- Forgets hosts that nobody has seen for p_age_s seconds. How many.
CREATE OR REPLACE FUNCTION @schema@.forget_hosts(p_age_s double precision, p_limit integer) RETURNS integer
LANGUAGE plpgsql
@lookup@
AS $$
DECLARE
    v_gone integer;
BEGIN
    PERFORM require_read_committed();
    WITH gone AS (
        SELECT h.host FROM hosts h
         WHERE h.seen_at < clock() - make_interval(secs => p_age_s)
         LIMIT p_limit
           FOR UPDATE SKIP LOCKED
    )
    DELETE FROM hosts h USING gone WHERE h.host = ANY (ARRAY[gone.host]);
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END
$$;

-- --- log bodies -----------------------------------------------------------------------------------------

-- What is left of a log line: its place, its time, and that it was there.
CREATE OR REPLACE FUNCTION @schema@.scrubbed(p_payload jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT jsonb_strip_nulls(jsonb_build_object('attempt', p_payload -> 'attempt', '$scrubbed', true))
$$;

-- Takes the body from delivered log facts that are older than p_age_s seconds, oldest first.
CREATE OR REPLACE FUNCTION @schema@.scrub_logs(p_age_s double precision, p_limit integer, p_from timestamptz)
RETURNS TABLE (scrubbed integer, next_from timestamptz)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_before timestamptz;
    v_found  record;
    v_done   integer;
BEGIN
    PERFORM require_read_committed();
    v_before := clock() - make_interval(secs => p_age_s);

    SELECT array_agg(t.run_id) AS ids, array_agg(t.seq) AS seqs, min(t.created_at) AS first, max(t.created_at) AS last,
           count(*) AS n
      INTO v_found
      FROM (SELECT f.run_id, f.seq, f.created_at FROM facts f
             WHERE f.lane = 1 AND NOT f.payload ? '$scrubbed'
               AND f.created_at >= coalesce(p_from, '-infinity') AND f.created_at < v_before
             ORDER BY f.created_at
             LIMIT p_limit
               FOR NO KEY UPDATE SKIP LOCKED) t;
    UPDATE facts f SET payload = scrubbed(f.payload)
      FROM unnest(v_found.ids, v_found.seqs) AS i (run_id, seq)
     CROSS JOIN LATERAL (SELECT g.acked_seq FROM lanes g WHERE g.run_id = i.run_id OFFSET 0) l
     WHERE f.run_id = ANY (ARRAY[i.run_id]) AND f.lane = 1 AND f.seq = i.seq AND i.seq <= l.acked_seq;
    GET DIAGNOSTICS v_done = ROW_COUNT;

    RETURN QUERY
    SELECT v_done, pass_end(v_found.n < p_limit, v_done = 0, v_found.first, v_found.last);
END
$$;

-- The same for the read model, whose lines are delivered by being there.
CREATE OR REPLACE FUNCTION @schema@.scrub_ledger_logs(p_age_s double precision, p_limit integer, p_from timestamptz)
RETURNS TABLE (scrubbed integer, next_from timestamptz)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_before timestamptz;
    v_found  record;
    v_done   integer;
BEGIN
    PERFORM require_read_committed();
    v_before := clock() - make_interval(secs => p_age_s);

    SELECT array_agg(t.run_id) AS ids, array_agg(t.seq) AS seqs, min(t.created_at) AS first, max(t.created_at) AS last,
           count(*) AS n
      INTO v_found
      FROM (SELECT f.run_id, f.seq, f.created_at FROM ledger_logs f
             WHERE NOT f.payload ? '$scrubbed'
               AND f.created_at >= coalesce(p_from, '-infinity') AND f.created_at < v_before
             ORDER BY f.created_at
             LIMIT p_limit
               FOR NO KEY UPDATE SKIP LOCKED) t;
    UPDATE ledger_logs f SET payload = scrubbed(f.payload)
      FROM unnest(v_found.ids, v_found.seqs) AS i (run_id, seq)
     WHERE f.run_id = ANY (ARRAY[i.run_id]) AND f.seq = i.seq;
    GET DIAGNOSTICS v_done = ROW_COUNT;

    RETURN QUERY
    SELECT v_done, pass_end(v_found.n < p_limit, v_done = 0, v_found.first, v_found.last);
END
$$;

-- --- counts ---------------------------------------------------------------------------------------------

-- Counts the next p_limit runs by status and adds them to p_state, which is NULL at first. Answers the new state; NULL:
-- all are counted, and status_counts says so. What changes while the count goes on may be counted as before or as after.
CREATE OR REPLACE FUNCTION @schema@.count_runs(p_state jsonb, p_limit integer) RETURNS jsonb
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_state jsonb := coalesce(p_state, jsonb_build_object('since', clock(), 'after', '', 'counts', '{}'::jsonb));
    v_page  record;
BEGIN
    PERFORM require_read_committed();
    SELECT max(g.last) AS last, sum(g.n) AS n,
           jsonb_object_agg(g.status, g.n + coalesce((v_state -> 'counts' ->> g.status)::bigint, 0))
             FILTER (WHERE g.status IS NOT NULL) AS counts
      INTO v_page
      FROM (SELECT t.status, count(*) AS n, max(t.run_id) AS last
              FROM (SELECT r.run_id, r.status FROM runs r
                     WHERE r.run_id > v_state ->> 'after' ORDER BY r.run_id LIMIT p_limit) t
             GROUP BY t.status) g;
    v_state := jsonb_set(v_state, '{counts}', v_state -> 'counts' || coalesce(v_page.counts, '{}'));
    IF v_page.n = p_limit THEN
        RETURN jsonb_set(v_state, '{after}', to_jsonb(v_page.last));
    END IF;

    INSERT INTO status_counts AS s (status, runs, counted_at)
    SELECT k.status, coalesce((v_state -> 'counts' ->> k.status)::bigint, 0), (v_state ->> 'since')::timestamptz
      FROM unnest(ARRAY['cancelled', 'completed', 'failed', 'queued', 'running', 'waiting']) AS k (status)
    ON CONFLICT (status) DO UPDATE SET runs = excluded.runs, counted_at = excluded.counted_at;
    RETURN NULL;
END
$$;
