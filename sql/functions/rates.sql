-- rates: slots of rate scopes, granted in sets, in the order in which they were asked for, whichever host asks.
--
-- Lock order: scope rows, SKIP LOCKED, then their holds; no transition of a run is ever inside. Fence: a hold's token,
-- made by the client, which is also the natural key of every call: asking again finds the hold. A hold counts while
-- its attempt has a lease.

-- Asks for slots, or asks again for those that had to wait. One hold per item (scope and token).
--
-- A scope's first sight of a token reserves a slot: the bucket is charged at once, so each item of a batch has a moment
-- of its own and nobody has to be told when it has come. A slot that comes within p_ahead_s seconds is granted, for its
-- moment; the holder of a later one asks again shortly before, and gets it if meanwhile the provider has refused nobody
-- and not too many are in flight. (Asking ahead is what lets one call start many: else it would be one per round trip.)
--
-- Of a paused scope whose block is over one item starts, as the probe; the others wait for what becomes of it.
--
-- answer: granted (for started_at, in wait_s seconds) | wait (its slot comes in wait_s seconds: ask again) | held (its turn depends on
-- others: on the end of a block in wait_s seconds, or for NULL on who is in flight or probes) | busy (the scope's row is
-- locked: ask again) | unknown (there is no such scope).
CREATE OR REPLACE FUNCTION @schema@.acquire_rates(
    p_scopes text[], p_tokens bigint[], p_costs double precision[], p_run_ids text[], p_attempts integer[],
    p_ahead_s double precision, p_probe_s double precision
) RETURNS TABLE (ord integer, answer text, wait_s double precision, started_at timestamptz)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_scope   record;
    v_now     timestamptz;
    v_clock   timestamptz;   -- the scope's
    v_unit    double precision;
    v_spent   timestamptz;
    v_free    bigint;        -- how many may start; NULL: as many as are due
    v_until   timestamptz;   -- who starts by then may be told now
    v_line    bigint[];      -- who is next, in order: token, slot, cost
    v_slots   timestamptz[];
    v_costs   double precision[];
    v_ready   timestamptz[]; -- when each of them may start
    v_start   timestamptz;
    v_over    interval;
    v_next_to timestamptz;   -- started_to, if the whole line starts
    v_started bigint[];
    v_starts  timestamptz[];
    v_cost    double precision;
    v_seen    text[] := '{}';
BEGIN
    PERFORM require_read_committed();

    FOR v_scope IN
        SELECT s.* FROM unnest(ARRAY(SELECT DISTINCT i FROM unnest(p_scopes) AS i)) AS n (name)
          JOIN rate_scopes s ON s.name = ANY (ARRAY[n.name])
           FOR NO KEY UPDATE OF s SKIP LOCKED
    LOOP
        v_seen := v_seen || v_scope.name;
        v_now := clock();
        v_clock := coalesce(v_scope.paused_at, v_now) - v_scope.lag;
        v_unit := coalesce(1.0 / v_scope.per_s, 0.0);

        WITH fresh AS (
            SELECT i.*, sum(i.cost) OVER (ORDER BY i.ord) AS upto
              FROM unnest(p_scopes, p_tokens, p_costs, p_run_ids, p_attempts) WITH ORDINALITY
                   AS i (scope, token, cost, run_id, attempt, ord)
              LEFT JOIN LATERAL (SELECT h.token FROM rate_holds h WHERE h.token = i.token OFFSET 0) h ON true
             WHERE i.scope = v_scope.name AND h.token IS NULL
        ), held AS (
            INSERT INTO rate_holds (scope, token, cost, run_id, attempt, slot, spent_to)
            SELECT v_scope.name, token, cost, run_id, attempt,
                   greatest(v_clock, greatest(v_scope.spent_to, v_clock) + make_interval(secs => (upto - v_scope.burst) * v_unit)),
                   greatest(v_scope.spent_to, v_clock) + make_interval(secs => upto * v_unit)
              FROM fresh ORDER BY ord
            RETURNING spent_to
        )
        SELECT max(spent_to) INTO v_spent FROM held;

        v_free := NULL;
        IF v_scope.max_in_flight IS NOT NULL THEN
            SELECT v_scope.max_in_flight - count(*) INTO v_free
              FROM rate_holds h
              JOIN runs r ON r.run_id = ANY (ARRAY[h.run_id]) AND r.attempt = h.attempt AND r.lease_expires_at > v_now
             WHERE h.scope = v_scope.name AND h.started_at IS NOT NULL;
        END IF;
        IF v_scope.paused_at IS NOT NULL THEN
            IF v_scope.probe_until <= v_now OR NOT EXISTS (
                SELECT 1 FROM rate_holds h
                  JOIN runs r ON r.run_id = ANY (ARRAY[h.run_id]) AND r.attempt = h.attempt AND r.lease_expires_at > v_now
                 WHERE h.token = ANY (ARRAY[v_scope.probe_token]))
            THEN
                v_scope.probe_token := NULL;  -- it came back without a verdict, hangs, or died
            END IF;
            v_free := CASE WHEN v_scope.probe_token IS NOT NULL OR v_now < v_scope.blocked_until THEN 0
                           ELSE least(1, v_free) END;
        END IF;

        -- Who is next, in order. Where only so many may be in flight, of all hosts: nobody passes others because they
        -- happened to ask now.
        v_until := v_clock + make_interval(secs => CASE WHEN v_scope.paused_at IS NULL THEN p_ahead_s ELSE 0.0 END);
        IF v_scope.max_in_flight IS NULL OR v_scope.paused_at IS NOT NULL THEN
            SELECT array_agg(t.token ORDER BY t.slot, t.number), array_agg(t.slot ORDER BY t.slot, t.number),
                   array_agg(t.cost ORDER BY t.slot, t.number)
              INTO v_line, v_slots, v_costs
              FROM (SELECT h.* FROM unnest(p_tokens) AS i (token)
                      JOIN rate_holds h ON h.token = ANY (ARRAY[i.token])
                     WHERE h.scope = v_scope.name AND coalesce(h.started_at, 'infinity') = 'infinity'
                       AND (h.slot <= v_until OR v_scope.paused_at IS NOT NULL)
                     ORDER BY h.slot, h.number LIMIT v_free) t;
        ELSE
            SELECT array_agg(t.token ORDER BY t.slot, t.number), array_agg(t.slot ORDER BY t.slot, t.number),
                   array_agg(t.cost ORDER BY t.slot, t.number)
              INTO v_line, v_slots, v_costs
              FROM (SELECT h.* FROM rate_holds h
                     WHERE h.scope = v_scope.name AND h.started_at IS NULL AND h.slot <= v_until
                       AND EXISTS (SELECT 1 FROM runs r
                                    WHERE r.run_id = ANY (ARRAY[h.run_id]) AND r.attempt = h.attempt
                                      AND r.lease_expires_at > v_now)
                     ORDER BY h.slot, h.number LIMIT greatest(v_free, 0)) t;
        END IF;

        -- At its slot each of them starts, unless what has started before, late, leaves no room in the bucket yet.
        v_ready := '{}';
        v_started := '{}';
        v_starts := '{}';
        v_cost := 0.0;
        v_start := v_clock;
        v_next_to := v_scope.started_to;
        FOR v_place IN 1 .. coalesce(cardinality(v_line), 0) LOOP
            IF v_scope.paused_at IS NULL THEN
                v_start := greatest(v_start, v_slots[v_place],
                                    v_next_to + make_interval(secs => (v_costs[v_place] - v_scope.burst) * v_unit));
            END IF;
            v_ready := v_ready || v_start;
            -- What costs more than the burst starts when what is missing has come in, so its part of the bucket began before.
            v_over := make_interval(secs => greatest(v_costs[v_place] - v_scope.burst, 0.0) * v_unit);
            v_next_to := greatest(v_next_to, v_start - v_over) + make_interval(secs => v_costs[v_place] * v_unit);
            IF v_start <= v_until AND v_line[v_place] = ANY (p_tokens) THEN
                v_started := v_started || v_line[v_place];
                v_starts := v_starts || v_start;
                v_cost := v_cost + v_costs[v_place];
                v_scope.started_to := greatest(v_scope.started_to, v_start - v_over)
                                      + make_interval(secs => v_costs[v_place] * v_unit);
            END IF;
        END LOOP;

        IF cardinality(v_started) > 0 THEN
            UPDATE rate_holds h SET started_at = v_now + (i.start - v_clock)
              FROM unnest(v_started, v_starts) AS i (token, start)
             WHERE h.token = ANY (ARRAY[i.token]) AND h.scope = v_scope.name
               AND coalesce(h.started_at, 'infinity') = 'infinity';
            IF v_scope.paused_at IS NOT NULL THEN
                v_scope.probe_token := v_started[1];
            END IF;
        END IF;
        IF cardinality(v_started) > 0 OR v_spent IS NOT NULL THEN
            UPDATE rate_scopes s
               SET spent_to = coalesce(v_spent, s.spent_to), started_to = v_scope.started_to,
                   used = s.used + v_cost,
                   measured_from = CASE WHEN s.measured_at < v_now - interval '1 minute' THEN s.used ELSE s.measured_from END,
                   measured_at = CASE WHEN s.measured_at < v_now - interval '1 minute' THEN v_now ELSE s.measured_at END,
                   probe_token = v_scope.probe_token,
                   probe_until = CASE WHEN v_scope.probe_token = ANY (v_started) THEN v_now + make_interval(secs => p_probe_s)
                                      ELSE s.probe_until END
             WHERE s.name = ANY (ARRAY[v_scope.name]);
        END IF;

        RETURN QUERY
        SELECT a.ord::integer,
               CASE WHEN a.started_at IS NOT NULL THEN 'granted'
                    WHEN v_scope.paused_at IS NULL AND a.ready_at > v_until THEN 'wait'
                    ELSE 'held' END,
               CASE WHEN a.started_at IS NOT NULL THEN greatest(extract(epoch FROM a.started_at - v_now), 0)
                    WHEN v_now < v_scope.blocked_until THEN extract(epoch FROM v_scope.blocked_until - v_now)
                    WHEN v_scope.paused_at IS NULL AND a.ready_at > v_until THEN extract(epoch FROM a.ready_at - v_clock)
               END::double precision,
               a.started_at
          FROM (SELECT i.ord, h.started_at, greatest(h.slot, l.ready_at) AS ready_at
                  FROM unnest(p_scopes, p_tokens) WITH ORDINALITY AS i (scope, token, ord)
                  JOIN rate_holds h ON h.token = ANY (ARRAY[i.token])
                  LEFT JOIN unnest(v_line, v_ready) AS l (token, ready_at) ON l.token = i.token
                 WHERE i.scope = v_scope.name) a;
    END LOOP;

    RETURN QUERY
    SELECT i.ord::integer, CASE WHEN s.name IS NULL THEN 'unknown' ELSE 'busy' END, NULL::double precision, NULL::timestamptz
      FROM unnest(p_scopes) WITH ORDINALITY AS i (scope, ord)
      LEFT JOIN rate_scopes s ON s.name = ANY (ARRAY[i.scope])
     WHERE i.scope <> ALL (v_seen);
END
$$;

-- Reports what became of holds. p_results, per item:
--
--   done      it went well and is over; of a probe: the scope opens
--   failed    it is over, and says nothing of the rate; of a probe: somebody else has to try
--   unused    it was given up without being used; what it had reserved comes back if nobody reserved after it, and what
--             it had charged as far as it would still be missing
--   refused   the provider refused for p_retry_after_s seconds: the scope is paused; the hold stays
--
-- answer: done | busy (the scope's row is locked: ask again). waiting: others wait for what this may have set free.
CREATE OR REPLACE FUNCTION @schema@.release_rates(
    p_scopes text[], p_tokens bigint[], p_results text[], p_retry_after_s double precision[]
) RETURNS TABLE (ord integer, answer text, waiting boolean)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_scope   record;
    v_hold    record;
    v_now     timestamptz;
    v_until   timestamptz;
    v_cost    interval;
    v_over    interval;
    v_results text[];
    v_seen    text[] := '{}';
    v_opened  text[] := '{}';
    v_busy    bigint[];
BEGIN
    PERFORM require_read_committed();

    -- Most items only end: they need no more than their own row. Only what moves the scope takes the scope's.
    FOR v_scope IN
        SELECT s.* FROM unnest(ARRAY(
                   SELECT DISTINCT i.scope FROM unnest(p_scopes, p_tokens, p_results) AS i (scope, token, result)
                     LEFT JOIN rate_scopes s ON s.name = ANY (ARRAY[i.scope])
                    WHERE i.result IN ('unused', 'refused') OR s.probe_token = i.token)) AS n (name)
          JOIN rate_scopes s ON s.name = ANY (ARRAY[n.name])
           FOR NO KEY UPDATE OF s SKIP LOCKED
    LOOP
        v_seen := v_seen || v_scope.name;
        v_now := clock();

        FOR v_hold IN
            WITH gone AS (
                DELETE FROM rate_holds h
                 USING unnest(p_scopes, p_tokens, p_results) AS i (scope, token, result)
                 WHERE i.scope = v_scope.name AND i.result = 'unused'
                   AND h.token = ANY (ARRAY[i.token]) AND h.scope = v_scope.name
                RETURNING h.spent_to, h.cost, h.started_at
            )
            SELECT * FROM gone ORDER BY spent_to DESC
        LOOP
            IF v_hold.started_at IS NOT NULL THEN
                v_scope.used := v_scope.used - v_hold.cost;
                -- Only what time has not given back: who started since then may not have needed it.
                v_cost := make_interval(secs => v_hold.cost * coalesce(1.0 / v_scope.per_s, 0.0));
                v_over := make_interval(secs => greatest(v_hold.cost - v_scope.burst, 0.0) * coalesce(1.0 / v_scope.per_s, 0.0));
                v_scope.started_to := v_scope.started_to - least(v_cost, greatest(
                    '0', v_hold.started_at - v_over + v_cost - coalesce(v_scope.paused_at, v_now)));
            END IF;
            IF v_hold.spent_to >= v_scope.spent_to - interval '10 microseconds' THEN  -- but for rounding, the last
                v_scope.spent_to := v_scope.spent_to - make_interval(secs => v_hold.cost * coalesce(1.0 / v_scope.per_s, 0.0));
            END IF;
        END LOOP;

        SELECT max(v_now + make_interval(secs => i.retry_after_s)) INTO v_until
          FROM unnest(p_scopes, p_results, p_retry_after_s) AS i (scope, result, retry_after_s)
         WHERE i.scope = v_scope.name AND i.result = 'refused';
        SELECT array_agg(i.result) INTO v_results
          FROM unnest(p_scopes, p_tokens, p_results) AS i (scope, token, result)
         WHERE i.scope = v_scope.name AND i.token = v_scope.probe_token;

        IF v_until IS NOT NULL THEN
            v_scope.refused_per_s := (v_scope.used - v_scope.measured_from)
                / greatest(extract(epoch FROM v_now - v_scope.measured_at), 0.001);
            v_scope.refused_at := v_now;
            v_scope.measured_at := v_now;
            v_scope.measured_from := v_scope.used;
            v_scope.paused_at := coalesce(v_scope.paused_at, v_now);
            v_scope.blocked_until := greatest(v_scope.blocked_until, v_until);
        END IF;
        IF v_results IS NOT NULL THEN
            v_scope.probe_token := NULL;
            v_scope.probe_until := NULL;
            IF 'done' = ANY (v_results) AND v_scope.blocked_until <= v_now THEN
                v_scope.lag := v_scope.lag + (v_now - v_scope.paused_at);
                v_scope.paused_at := NULL;
                v_scope.blocked_until := NULL;
                v_scope.measured_at := v_now;
                v_scope.measured_from := v_scope.used;
                v_opened := v_opened || v_scope.name;
            END IF;
        END IF;

        UPDATE rate_scopes s
           SET spent_to = v_scope.spent_to, started_to = v_scope.started_to, used = v_scope.used, lag = v_scope.lag,
               measured_at = v_scope.measured_at, measured_from = v_scope.measured_from,
               refused_per_s = v_scope.refused_per_s, refused_at = v_scope.refused_at,
               paused_at = v_scope.paused_at, blocked_until = v_scope.blocked_until,
               probe_token = v_scope.probe_token, probe_until = v_scope.probe_until
         WHERE s.name = ANY (ARRAY[v_scope.name]);
    END LOOP;

    SELECT array_agg(i.token) INTO v_busy
      FROM unnest(p_scopes, p_tokens, p_results) AS i (scope, token, result)
      JOIN rate_scopes s ON s.name = ANY (ARRAY[i.scope])
     WHERE i.scope <> ALL (v_seen) AND (i.result IN ('unused', 'refused') OR s.probe_token = i.token);

    DELETE FROM rate_holds h
     USING unnest(p_scopes, p_tokens, p_results) AS i (scope, token, result)
     WHERE h.token = ANY (ARRAY[i.token]) AND h.scope = i.scope AND i.result <> 'refused'
       AND (v_busy IS NULL OR i.token <> ALL (v_busy));

    RETURN QUERY
    SELECT i.ord::integer, CASE WHEN i.token = ANY (v_busy) THEN 'busy' ELSE 'done' END,
           w.waiting IS NOT NULL
      FROM unnest(p_scopes, p_tokens) WITH ORDINALITY AS i (scope, token, ord)
      LEFT JOIN rate_scopes s ON s.name = ANY (ARRAY[i.scope])
      LEFT JOIN LATERAL (
            SELECT true AS waiting FROM rate_holds h
             WHERE (s.max_in_flight IS NOT NULL OR i.scope = ANY (v_opened))
               AND h.scope = i.scope AND h.started_at IS NULL ORDER BY h.slot, h.number LIMIT 1) w ON true;
END
$$;

-- Forgets holds whose attempt is gone, which no longer count. Answers how many.
CREATE OR REPLACE FUNCTION @schema@.sweep_rates(p_limit integer) RETURNS integer
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_now  CONSTANT timestamptz := clock();
    v_gone integer;
BEGIN
    PERFORM require_read_committed();
    DELETE FROM rate_holds h
     USING (SELECT d.token FROM rate_holds d
             WHERE NOT EXISTS (SELECT 1 FROM runs r
                                WHERE r.run_id = ANY (ARRAY[d.run_id]) AND r.attempt = d.attempt
                                  AND r.lease_expires_at > v_now)
             LIMIT p_limit
               FOR UPDATE SKIP LOCKED) d
     WHERE h.token = ANY (ARRAY[d.token]);
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END
$$;

-- Scopes as they stand, by name.
CREATE OR REPLACE FUNCTION @schema@.read_rates()
RETURNS TABLE (
    name text, per_s double precision, burst double precision, max_in_flight integer, state text,
    blocked_s double precision, in_flight bigint, waiting bigint, used double precision,
    measured_per_s double precision, refused_per_s double precision, refused_at timestamptz
)
LANGUAGE sql STABLE
@lookup@
AS $$
    SELECT s.name, s.per_s, s.burst, s.max_in_flight,
           CASE WHEN s.paused_at IS NULL THEN 'open' WHEN s.blocked_until > c.now THEN 'blocked' ELSE 'probing' END,
           CASE WHEN s.blocked_until > c.now THEN extract(epoch FROM s.blocked_until - c.now)::double precision END,
           h.in_flight, h.waiting, s.used,
           ((s.used - s.measured_from) / greatest(extract(epoch FROM c.now - s.measured_at), 0.001))::double precision,
           s.refused_per_s, s.refused_at
      FROM (SELECT clock() AS now) c
     CROSS JOIN rate_scopes s
     CROSS JOIN LATERAL (
            SELECT count(*) FILTER (WHERE h.started_at IS NOT NULL) AS in_flight,
                   count(*) FILTER (WHERE h.started_at IS NULL) AS waiting
              FROM rate_holds h
              JOIN runs r ON r.run_id = ANY (ARRAY[h.run_id]) AND r.attempt = h.attempt AND r.lease_expires_at > c.now
             WHERE h.scope = ANY (ARRAY[s.name])) h
     ORDER BY s.name
$$;

-- The public SQL door:
--
--   SELECT runlane.set_rate('provider', '{"per_s": 5, "burst": 10, "max_in_flight": 20}');
--
-- Declares a scope or changes one; what is reserved already keeps its slot. Options: per_s (units per second; null: not
-- limited), burst (units that may go at once, default 1), max_in_flight (null: not limited). True if anything changed.
-- While the caller's transaction is open, the scope grants nothing.
CREATE OR REPLACE FUNCTION @schema@.set_rate(p_name text, p_options jsonb) RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now     CONSTANT timestamptz := clock();
    v_per_s   numeric;
    v_burst   numeric;
    v_most    numeric;
    v_changed integer;
BEGIN
    PERFORM check_options(p_options, '{per_s, burst, max_in_flight}');
    IF p_name IS NULL OR p_name !~ '^[A-Za-z0-9._:-]{1,128}$' THEN
        PERFORM refuse('name', 'must be 1 to 128 of A-Z a-z 0-9 . _ : -');
    END IF;
    v_per_s := number_option(p_options, 'per_s');
    IF v_per_s NOT BETWEEN 0.00001 AND 100000 THEN
        PERFORM refuse('options.per_s', 'must be from 0.00001 to 100000 units per second');
    END IF;
    v_burst := coalesce(number_option(p_options, 'burst'), 1);
    IF v_burst NOT BETWEEN 1 AND 1000000 THEN
        PERFORM refuse('options.burst', 'must be from 1 to 1000000 units');
    END IF;
    v_most := number_option(p_options, 'max_in_flight');
    IF v_most NOT BETWEEN 1 AND 100000 OR v_most <> trunc(v_most) THEN
        PERFORM refuse('options.max_in_flight', 'must be a whole number from 1 to 100000');
    END IF;
    IF v_per_s IS NULL AND v_most IS NULL THEN
        PERFORM refuse('options', 'give per_s or max_in_flight: a scope limits something');
    END IF;

    INSERT INTO rate_scopes AS s (name, set_at, spent_to, started_to, measured_at, per_s, burst, max_in_flight)
    VALUES (p_name, v_now, v_now, v_now, v_now, v_per_s, v_burst, v_most)
    ON CONFLICT (name) DO UPDATE
       SET set_at = excluded.set_at, per_s = excluded.per_s, burst = excluded.burst, max_in_flight = excluded.max_in_flight
     WHERE (s.per_s, s.burst, s.max_in_flight) IS DISTINCT FROM (excluded.per_s, excluded.burst, excluded.max_in_flight);
    GET DIAGNOSTICS v_changed = ROW_COUNT;
    RETURN v_changed > 0;
END
$$;
