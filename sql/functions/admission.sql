-- admission: runs come in, in sets, each with its first fact.
--
-- Lock order: none. Admission inserts rows and takes one transaction-level advisory lock per key that
-- somebody else might also be inserting (an idempotency key, a unique key, a run id of the caller's own). They are *tried*,
-- so that a key in a caller's open transaction makes that one item "busy" and holds up nobody. What is known to exist
-- is not inserted at all: that would wait for whoever is changing that row.
-- Fence: the primary key and the idempotency index.

CREATE OR REPLACE FUNCTION @schema@.created_payload(
    p_play text, p_input jsonb, p_org text, p_priority smallint, p_labels jsonb, p_release text,
    p_environment text, p_key text, p_request text, p_extras jsonb
) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
    SELECT jsonb_build_object('play', p_play, 'input', p_input, 'request', p_request)
        || CASE WHEN p_org IS NULL AND p_priority = 0 AND p_labels IS NULL AND p_release IS NULL
                     AND p_environment IS NULL AND p_key IS NULL
                THEN '{}'::jsonb
                ELSE jsonb_strip_nulls(jsonb_build_object(
                    'org_id', p_org, 'priority', p_priority, 'labels', p_labels, 'release_id', p_release,
                    'environment', p_environment, 'idempotency_key', p_key)) END
        || coalesce(p_extras - 'lane_lease_s', '{}')
$$;

-- Whether two payloads are equal, also where a codec has made them unreadable and says by "same" which are.
CREATE OR REPLACE FUNCTION @schema@.same_payload(p_one jsonb, p_other jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT coalesce(p_one = p_other
                    OR (p_one -> '$codec' = p_other -> '$codec' AND p_one -> 'same' = p_other -> 'same'), false)
$$;

-- Admits runs. One item per position of the arrays; positions answer in `ord`, from 1.
--
--   p_named     the caller chose the run id, so somebody else might too
--   p_delays    seconds from now, or NULL; p_ats a moment, or NULL; neither: due now
--   p_requests  random per item and kept in the first fact: an item that is asked again after a lost answer
--               recognises its own run; also the lease token of an item admitted as claimed
--   p_extras    what few runs have, or NULL: {"receiver", "terminal_receiver", "parent_id", "root_id",
--               "concurrency_key", "terminal_performance", "unique" (see unique.sql), …}; all of it is told in the
--               first fact, some of it has a column. But "lane_lease_s" is not told: admit with the first fact out
--               for delivery already, for so many seconds, with the request as the lane's token
--   p_claim     admit as already claimed by p_owner (only items that are due now; those that count against a limit
--               are queued: only a claim holds the limit's lock)
--   p_wait      wait for a key held by an open transaction instead of answering busy
--
-- outcome: created | existing (same play, organisation and input) | conflict (taken by another) | two_runs
-- (run id and key name different runs) | duplicate (another run holds the unique key) | busy (the key is in
-- somebody's open transaction)
CREATE OR REPLACE FUNCTION @schema@.admit_runs(
    p_run_ids text[], p_named boolean[], p_plays text[], p_buckets bigint[], p_priorities smallint[],
    p_orgs text[], p_keys text[], p_delays double precision[], p_ats timestamptz[], p_labels jsonb[],
    p_inputs jsonb[], p_extras jsonb[], p_requests bigint[], p_claim boolean[], p_owner bigint,
    p_lease_s double precision, p_release text, p_environment text, p_wait boolean
) RETURNS TABLE (ord integer, outcome text, run_id text, created boolean, claimed boolean)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_total  CONSTANT integer := cardinality(p_run_ids);
    v_busy   boolean[] := array_fill(false, ARRAY[v_total]);  -- dense: a gap in front would shift every item
    v_known  boolean[];  -- NULL: nobody but us can know any of these
    v_claim  boolean[] := p_claim;
    v_made   text[];
    v_held   text[];     -- NULL: nobody asks for a unique key; else by position the run that keeps it
    v_some   CONSTANT boolean := num_nonnulls(VARIADIC p_extras) > 0;
    v_shared CONSTANT boolean := v_some OR true = ANY (p_named) OR num_nonnulls(VARIADIC p_keys) > 0;
    v_now    timestamptz;
    v_lock   bigint;
BEGIN
    -- Plain runs alone have nothing that anybody else might be inserting.
    FOR i IN 1 .. CASE WHEN v_shared THEN v_total ELSE 0 END LOOP
        FOREACH v_lock IN ARRAY ARRAY[
            CASE WHEN p_named[i] THEN hashtextextended('@schema@' || E'\x1f' || p_run_ids[i], 1) END,
            CASE WHEN p_keys[i] IS NOT NULL THEN hashtextextended(
                concat_ws(E'\x1f', '@schema@', coalesce(p_orgs[i], ''), p_plays[i], p_keys[i]), 2) END,
            CASE WHEN v_some THEN unique_lock(p_orgs[i], p_plays[i], p_extras[i]) END]
        LOOP
            CONTINUE WHEN v_lock IS NULL;
            IF p_wait THEN
                PERFORM pg_advisory_xact_lock(v_lock);
            ELSIF NOT pg_try_advisory_xact_lock(v_lock) THEN
                v_busy[i] := true;
            END IF;
        END LOOP;
        -- The same id twice in one call: the second hears of the first when it asks again.
        IF p_named[i] AND array_position(p_run_ids, p_run_ids[i]) < i THEN
            v_busy[i] := true;
        END IF;
    END LOOP;

    IF v_shared THEN
        SELECT array_agg(EXISTS (SELECT 1 FROM runs
                                  WHERE (i.named OR i.extras ? 'unique') AND runs.run_id = ANY (ARRAY[i.run_id]))
                      OR EXISTS (SELECT 1 FROM runs
                                  WHERE i.key IS NOT NULL AND runs.idempotency_key IS NOT NULL
                                    AND coalesce(runs.org_id, '') = coalesce(i.org_id, '') AND runs.play = i.play
                                    AND runs.idempotency_key = i.key)
                         ORDER BY i.ord)
          INTO v_known
          FROM unnest(p_run_ids, p_named, p_plays, p_orgs, p_keys, p_extras) WITH ORDINALITY
               AS i (run_id, named, play, org_id, key, extras, ord);
    END IF;
    IF true = ANY (p_claim) AND (EXISTS (SELECT 1 FROM limits) OR v_some AND EXISTS (
           SELECT 1 FROM unnest(p_extras) AS e (extras) WHERE e.extras ? 'concurrency_key')) THEN
        v_claim := unlimited_claims(p_claim, p_plays, p_orgs, p_extras);
    END IF;
    v_now := clock();
    IF v_some AND EXISTS (SELECT 1 FROM unnest(p_extras) AS e (extras) WHERE e.extras ? 'unique') THEN
        v_held := take_unique_keys(p_run_ids, p_plays, p_orgs, p_extras,
                                   (SELECT array_agg(s.busy OR s.known ORDER BY s.ord)
                                      FROM unnest(v_busy, v_known) WITH ORDINALITY AS s (busy, known, ord)), v_now);
    END IF;

    WITH items AS (
        SELECT i.*, coalesce(i.due, v_now + make_interval(secs => i.delay_s), v_now) AS due_at,
               v_now + make_interval(secs => (i.extras ->> 'lane_lease_s')::double precision) AS lane_until
          FROM unnest(p_run_ids, p_plays, p_buckets, p_priorities, p_orgs, p_keys, p_delays, p_ats, p_labels,
                      p_extras, p_requests, v_claim, v_busy, v_known, v_held)
               AS i (run_id, play, bucket, priority, org_id, key, delay_s, due, labels, extras, request, claim, busy,
                     known, held)
    ), made AS (
        INSERT INTO runs (
            run_id, play, bucket, priority, org_id, idempotency_key, labels, release_id, environment,
            created_at, lane_due_at, status, due_at, last_seq, attempt, attempt_at, started_at,
            lease_owner, lease_token, lease_expires_at,
            receiver, terminal_receiver, parent_id, root_id, concurrency_key, turn, subturn,
            lane_token, lane_expires_at, frozen_seq, lane_attempts, performance)
        SELECT run_id, play, bucket, priority, org_id, key, labels, p_release, p_environment, v_now,
               coalesce(lane_until, v_now),
               CASE WHEN claim THEN 'running' ELSE 'queued' END,
               CASE WHEN claim THEN v_now + make_interval(secs => p_lease_s) ELSE due_at END,
               CASE WHEN claim THEN 2 ELSE 1 END,
               claim::integer,
               CASE WHEN claim THEN v_now END,
               CASE WHEN claim THEN v_now END,
               CASE WHEN claim THEN p_owner END,
               CASE WHEN claim THEN request END,
               CASE WHEN claim THEN v_now + make_interval(secs => p_lease_s) END,
               coalesce(extras ->> 'receiver', ''), extras ->> 'terminal_receiver', extras ->> 'parent_id',
               extras ->> 'root_id', extras ->> 'concurrency_key', turn_of(org_id, extras ->> 'concurrency_key'),
               subturn_of(org_id, extras ->> 'concurrency_key'),
               CASE WHEN lane_until IS NOT NULL THEN request END, lane_until,
               CASE WHEN lane_until IS NOT NULL THEN 1 END, (lane_until IS NOT NULL)::integer,
               extras ->> 'terminal_performance'
          FROM items
         WHERE busy IS NOT TRUE AND known IS NOT TRUE AND held IS NULL
        ON CONFLICT DO NOTHING
        RETURNING run_id
    )
    SELECT array_agg(run_id) INTO v_made FROM made;

    INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
    SELECT i.run_id, 0, 1, 'run.created', v_now,
           created_payload(i.play, i.input, i.org_id, i.priority, i.labels, p_release, p_environment, i.key,
                           to_hex(i.request), i.extras)
      FROM unnest(p_run_ids, p_plays, p_priorities, p_orgs, p_keys, p_labels, p_inputs, p_extras, p_requests, v_busy)
           AS i (run_id, play, priority, org_id, key, labels, input, extras, request, busy)
     WHERE cardinality(v_made) = v_total OR (i.run_id = ANY (v_made) AND i.busy IS NOT TRUE)
    UNION ALL
    SELECT i.run_id, 0, 2, 'run.started', v_now, jsonb_build_object('attempt', 1, 'host', p_owner::text)
      FROM unnest(p_run_ids, v_claim, v_busy) AS i (run_id, claim, busy)
     WHERE i.claim AND (cardinality(v_made) = v_total OR (i.run_id = ANY (v_made) AND i.busy IS NOT TRUE));

    IF v_held IS NOT NULL AND NOT p_wait THEN
        PERFORM forget_unique_keys(2 * v_total, v_now);
    END IF;
    IF cardinality(v_made) = v_total THEN
        RETURN QUERY SELECT i.ord::integer, 'created'::text, i.run_id, true, i.claim
                       FROM unnest(p_run_ids, v_claim) WITH ORDINALITY AS i (run_id, claim, ord);
        RETURN;
    END IF;

    -- Somebody was first, or holds the key right now: a fresh snapshot tells which run that is.
    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN i.busy THEN 'busy'
                WHEN i.run_id = ANY (v_made) THEN 'created'
                WHEN i.held IS NOT NULL
                THEN CASE i.extras #>> '{unique,on_conflict}' WHEN 'existing' THEN 'existing' ELSE 'duplicate' END
                WHEN k.run_id <> n.run_id
                  OR (i.named AND k.run_id <> i.run_id)
                  OR (n.run_id IS NOT NULL AND n.idempotency_key IS DISTINCT FROM coalesce(i.key, n.idempotency_key))
                THEN 'two_runs'
                WHEN f.payload IS NULL THEN 'busy'
                WHEN r.play = i.play AND r.org_id IS NOT DISTINCT FROM i.org_id AND same_payload(f.payload -> 'input', i.input)
                THEN 'existing'
                ELSE 'conflict' END,
           coalesce(i.held, r.run_id, i.run_id),
           coalesce(i.run_id = ANY (v_made) OR f.payload ->> 'request' = to_hex(i.request), false),
           coalesce(i.claim AND r.status = 'running' AND r.attempt = 1 AND r.lease_token = i.request
                    AND r.lease_owner = p_owner, false)
      FROM unnest(p_run_ids, p_named, p_plays, p_orgs, p_keys, p_inputs, p_extras, p_requests, p_claim, v_busy, v_held)
           WITH ORDINALITY AS i (run_id, named, play, org_id, key, input, extras, request, claim, busy, held, ord)
      LEFT JOIN LATERAL (SELECT * FROM runs WHERE runs.run_id = ANY (ARRAY[i.run_id])) n ON true
      LEFT JOIN LATERAL (SELECT * FROM runs
                          WHERE coalesce(runs.org_id, '') = coalesce(i.org_id, '')
                            AND runs.play = i.play
                            AND runs.idempotency_key = i.key
                            AND runs.idempotency_key IS NOT NULL
                          LIMIT 1) k ON true  -- the limit keeps it a lookup per item
      LEFT JOIN LATERAL (SELECT * FROM runs WHERE runs.run_id = ANY (ARRAY[coalesce(k.run_id, n.run_id)])) r ON true
      LEFT JOIN LATERAL (SELECT payload FROM facts
                          WHERE facts.run_id = ANY (ARRAY[r.run_id]) AND lane = 0 AND seq = 1 OFFSET 0) f ON true;
END
$$;

-- Which items may be admitted as claimed: those that count against no limit.
CREATE OR REPLACE FUNCTION @schema@.unlimited_claims(
    p_claim boolean[], p_plays text[], p_orgs text[], p_extras jsonb[]
) RETURNS boolean[]
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    v_plays CONSTANT text[] := (SELECT array_agg(name) FROM limits WHERE kind = 'play' AND name = ANY (p_plays));
    v_orgs  CONSTANT text[] := (SELECT array_agg(name) FROM limits WHERE kind = 'org' AND name = ANY (p_orgs));
BEGIN
    RETURN (SELECT array_agg(i.claim AND i.extras ->> 'concurrency_key' IS NULL
                             AND (i.play = ANY (v_plays)) IS NOT TRUE AND (i.org = ANY (v_orgs)) IS NOT TRUE ORDER BY i.ord)
              FROM unnest(p_claim, p_plays, p_orgs, p_extras) WITH ORDINALITY AS i (claim, play, org, extras, ord));
END
$$;

-- Buckets of plays for every priority, whether any host has ever registered the play, and whether it has a limit per
-- concurrency key.
CREATE OR REPLACE FUNCTION @schema@.play_buckets(p_plays text[], p_release text, p_environment text)
RETURNS TABLE (play text, priority smallint, bucket bigint, registered boolean, keyed boolean)
LANGUAGE sql STABLE
SET search_path = @schema@, pg_temp
AS $$
    SELECT p.play, v.priority::smallint, bucket_of(p.play, p_release, p_environment, v.priority),
           EXISTS (SELECT 1 FROM plays WHERE plays.name = ANY (ARRAY[p.play])),
           EXISTS (SELECT 1 FROM limits WHERE limits.kind = 'key' AND limits.name = ANY (ARRAY[p.play]))
      FROM unnest(p_plays) AS p (play)
     CROSS JOIN generate_series(-2, 2) AS v (priority)
$$;

-- Makes a host and its plays known. Called once per start of a host.
CREATE OR REPLACE FUNCTION @schema@.register_host(
    p_host bigint, p_name text, p_pid integer, p_version text, p_plays text[], p_crash_caps integer[],
    p_max_running integer[], p_max_per_key integer[]
) RETURNS void
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
DECLARE
    v_now CONSTANT timestamptz := clock();
BEGIN
    INSERT INTO hosts (host, started_at, seen_at, pid, name, version)
    VALUES (p_host, v_now, v_now, p_pid, p_name, p_version)
    ON CONFLICT (host) DO UPDATE SET seen_at = excluded.seen_at;

    -- Ordered, so that two hosts that start at once cannot deadlock.
    INSERT INTO plays AS p (registered_at, crash_cap, name)
    SELECT v_now, i.crash_cap, i.name
      FROM unnest(p_plays, p_crash_caps) AS i (name, crash_cap)
     ORDER BY i.name
    ON CONFLICT (name) DO UPDATE SET crash_cap = excluded.crash_cap
     WHERE p.crash_cap <> excluded.crash_cap;
    PERFORM register_limits(p_plays, p_max_running, p_max_per_key);
END
$$;
