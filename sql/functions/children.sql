-- children: runs that a run starts, and what the two owe each other.
--
-- Lock order: the parent's row, FOR SHARE SKIP LOCKED, then as for admission; the child's row is inserted. A child's
-- end only inserts a wake for its parent (settle, control, timers, waits), a parent's cancellation only requests to
-- cancel for its open children (control): no transition locks two related runs.
-- Fence: the parent's live attempt (a lease, attempt and token), held until the child is committed.
--
-- A parent that is cancelled meanwhile still cancels the child. Cancelling takes the parent's row exclusively and looks
-- for children in a later statement. Either this share comes first: then the cancellation finds the row locked, and
-- when it gets it the child is committed and found. Or the cancellation comes first: then this share is skipped until
-- it has committed, and then finds the fence gone.

-- Starts children. The child's id is made of its parent's and p_keys, so that starting it again finds it; p_extras and
-- the rest are as for admit_runs. The child is registered as a wait of its parent, at which nobody stands yet.
--
-- answer: started | conflict (that key has started another play, or the same with another input) | busy (a row or a
-- key is locked: ask again) | lost. created: this request made it.
CREATE OR REPLACE FUNCTION @schema@.start_children(
    p_parents text[], p_attempts integer[], p_tokens bigint[], p_keys text[], p_run_ids text[], p_plays text[],
    p_buckets bigint[], p_priorities smallint[], p_orgs text[], p_delays double precision[], p_labels jsonb[],
    p_inputs jsonb[], p_extras jsonb[], p_requests bigint[], p_release text, p_environment text
) RETURNS TABLE (ord integer, answer text, created boolean)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_free     integer[];  -- positions whose parent is ours
    v_extras   jsonb[];
    v_outcomes text[];
    v_created  boolean[];
BEGIN
    PERFORM require_read_committed();
    SELECT array_agg(t.ord::integer), array_agg(t.extras) INTO v_free, v_extras
      FROM (SELECT i.ord, coalesce(i.extras, '{}')
                   || jsonb_build_object('parent_id', r.run_id, 'root_id', coalesce(r.root_id, r.run_id)) AS extras
              FROM unnest(p_parents, p_attempts, p_tokens, p_extras) WITH ORDINALITY
                   AS i (parent, attempt, token, extras, ord)
              JOIN runs r ON r.run_id = ANY (ARRAY[i.parent])
             WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
               FOR SHARE OF r SKIP LOCKED) t;

    IF v_free IS NOT NULL THEN
        SELECT array_agg(a.outcome ORDER BY a.ord), array_agg(a.created ORDER BY a.ord) INTO v_outcomes, v_created
          FROM (SELECT array_agg(p_run_ids[n] ORDER BY o) AS run_ids, array_agg(p_plays[n] ORDER BY o) AS plays,
                       array_agg(p_buckets[n] ORDER BY o) AS buckets, array_agg(p_priorities[n] ORDER BY o) AS priorities,
                       array_agg(p_orgs[n] ORDER BY o) AS orgs, array_agg(p_delays[n] ORDER BY o) AS delays,
                       array_agg(p_labels[n] ORDER BY o) AS labels, array_agg(p_inputs[n] ORDER BY o) AS inputs,
                       array_agg(p_requests[n] ORDER BY o) AS requests,
                       array_fill(true, ARRAY[cardinality(v_free)]) AS named,
                       array_fill(false, ARRAY[cardinality(v_free)]) AS claim,
                       array_fill(NULL::text, ARRAY[cardinality(v_free)]) AS keys,
                       array_fill(NULL::timestamptz, ARRAY[cardinality(v_free)]) AS ats
                  FROM unnest(v_free) WITH ORDINALITY AS f (n, o)) i
         CROSS JOIN LATERAL admit_runs(
                   i.run_ids, i.named, i.plays, i.buckets, i.priorities, i.orgs, i.keys, i.delays, i.ats, i.labels,
                   i.inputs, v_extras, i.requests, i.claim, NULL, NULL, p_release, p_environment, false) a;
        INSERT INTO waits (run_id, key, kind, name, created_at)
        SELECT p_parents[f.n], p_keys[f.n], 'child', p_run_ids[f.n], clock()
          FROM unnest(v_free, v_outcomes) AS f (n, outcome)
         WHERE f.outcome IN ('created', 'existing')
        ON CONFLICT DO NOTHING;
    END IF;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN f.outcome IN ('created', 'existing') THEN 'started'
                WHEN f.outcome = 'busy' THEN 'busy'
                WHEN f.n IS NOT NULL THEN 'conflict'
                WHEN r.run_id IS NOT NULL THEN 'busy'
                ELSE 'lost' END,
           coalesce(f.created, false)
      FROM unnest(p_parents, p_attempts, p_tokens) WITH ORDINALITY AS i (parent, attempt, token, ord)
      LEFT JOIN unnest(v_free, v_outcomes, v_created) AS f (n, outcome, created) ON f.n = i.ord
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.parent]) AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt
                      AND r.lease_token = i.token;
END
$$;

-- Asks the open children of these runs, which the caller has ended as cancelled, to end as well. Answers the parents of
-- those that were asked.
CREATE OR REPLACE FUNCTION @schema@.cancel_children(p_run_ids text[], p_reasons text[], p_by text[], p_now timestamptz)
RETURNS SETOF text
LANGUAGE sql
@seek@
AS $$
    WITH asked AS (
        INSERT INTO cancellations (requested_at, run_id, request_id, reason, requested_by)
        SELECT p_now, c.run_id, 'parent:' || i.run_id,
               CASE WHEN starts_with(i.reason, 'its parent was cancelled') THEN i.reason
                    ELSE concat_ws(': ', 'its parent was cancelled', i.reason) END,
               i.by
          FROM unnest(p_run_ids, p_reasons, p_by) AS i (run_id, reason, by)
         CROSS JOIN LATERAL (
                SELECT k.run_id FROM runs k WHERE k.parent_id = i.run_id AND k.finished_at IS NULL OFFSET 0) c
        ON CONFLICT DO NOTHING
        RETURNING request_id
    )
    SELECT DISTINCT substr(request_id, 8) FROM asked
$$;
