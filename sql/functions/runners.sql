-- runners: attempts that go on in a sandbox, and how their end is judged.
--
-- Lock order: run rows, then runner rows, then sandboxes, all SKIP LOCKED.
-- Fences: attempt and token on the run's row, which a detached attempt keeps (lease_owner 0, lease without end), and
-- the row in runners, which lives exactly as long. A verdict from outside also repeats the exact heartbeat it judged,
-- that no result is there and that nobody has asked to cancel: whatever moved while the provider was asked wins.

-- Hands live attempts from their host to the runners in their sandboxes. Heartbeats are due every p_timeouts_s seconds
-- from now; past p_ceilings_s (NULL: none) the run fails.
-- answer: done (also when asked again) | busy | lost, with the run's status as it stands now.
CREATE OR REPLACE FUNCTION @schema@.detach_attempts(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_sandboxes text[], p_timeouts_s double precision[],
    p_ceilings_s double precision[]
) RETURNS TABLE (ord integer, answer text, status text)
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
      FROM (SELECT r.run_id
              FROM unnest(p_run_ids, p_attempts, p_tokens, p_sandboxes) AS i (run_id, attempt, token, sandbox)
              JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
              JOIN sandboxes s ON s.sandbox = ANY (ARRAY[i.sandbox])
             WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
               AND r.lease_owner <> 0 AND s.wanted_at IS NULL AND s.run_id = ANY (ARRAY[i.run_id])
               AND s.attempt = i.attempt
               FOR NO KEY UPDATE OF r, s SKIP LOCKED) t;
    v_now := clock();

    WITH detached AS (
        UPDATE runs r
           SET lease_owner = 0, lease_expires_at = 'infinity', due_at = 'infinity',
               last_seq = r.last_seq + 1, quiet_seq = r.last_seq + 1,
               lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_sandboxes, p_timeouts_s, p_ceilings_s)
               AS i (run_id, attempt, token, sandbox, timeout_s, ceiling_s)
         WHERE i.run_id = ANY (v_free) AND r.run_id = ANY (ARRAY[i.run_id])
           AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
        RETURNING r.run_id, r.attempt, r.lease_token, r.last_seq, i.sandbox, i.timeout_s,
                  coalesce(v_now + make_interval(secs => i.ceiling_s), 'infinity') AS ceiling_at
    ), kept AS (
        UPDATE sandboxes s SET due_at = 'infinity', ceiling_at = d.ceiling_at FROM detached d WHERE s.sandbox = ANY (ARRAY[d.sandbox])
        RETURNING s.sandbox, s.provider
    ), told AS (
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT run_id, 0, last_seq, 'run.waiting', v_now,
               jsonb_build_object('kind', 'detached_runner', 'key', sandbox, 'attempt', attempt)
          FROM detached
    )
    INSERT INTO runners (run_id, attempt, token, provider, sandbox, started_at, heartbeat_timeout_s, ceiling_at, due_at)
    SELECT d.run_id, d.attempt, d.lease_token, k.provider, d.sandbox, v_now, d.timeout_s, d.ceiling_at,
           least(v_now + make_interval(secs => d.timeout_s), d.ceiling_at)
      FROM detached d
      JOIN kept k ON k.sandbox = d.sandbox;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN n.run_id IS NOT NULL OR a.run_id IS NOT NULL THEN 'done'  -- just now, or before, even if over already
                WHEN r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
                     AND s.wanted_at IS NULL THEN 'busy'
                ELSE 'lost' END,
           r.status
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_sandboxes) WITH ORDINALITY AS i (run_id, attempt, token, sandbox, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN sandboxes s ON s.sandbox = ANY (ARRAY[i.sandbox])
      LEFT JOIN runners n ON n.run_id = ANY (ARRAY[i.run_id]) AND n.attempt = i.attempt AND n.token = i.token
      LEFT JOIN attempts a ON a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt AND a.token = i.token AND a.owner = 0;
END
$$;

-- Runners say that they live. Never waits and touches no row of a run. Its commit does not wait for the disk: a crash of
-- the server may forget the last heartbeats, and the next ones come within seconds.
--
-- answer: ok | cancelled (asked for, or done) | ended | superseded (a newer attempt has the run) | early (the host has
-- not let go yet: ask again in a moment) | unknown (no such attempt, or another token) | busy.
CREATE OR REPLACE FUNCTION @schema@.beat_runners(p_run_ids text[], p_attempts integer[], p_tokens bigint[])
RETURNS TABLE (ord integer, answer text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now  timestamptz;
    v_done text[];
BEGIN
    PERFORM require_read_committed();
    PERFORM set_config('synchronous_commit', 'off', true);
    v_now := clock();

    WITH free AS (
        SELECT n.run_id
          FROM unnest(p_run_ids, p_attempts, p_tokens) AS i (run_id, attempt, token)
          JOIN runners n ON n.run_id = ANY (ARRAY[i.run_id])
         WHERE n.attempt = i.attempt AND n.token = i.token
           FOR NO KEY UPDATE OF n SKIP LOCKED
    ), beaten AS (
        UPDATE runners n SET heartbeat_at = greatest(v_now, n.heartbeat_at + interval '1 microsecond')
          FROM free f WHERE n.run_id = ANY (ARRAY[f.run_id])
        RETURNING n.run_id
    )
    SELECT array_agg(run_id) INTO v_done FROM beaten;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN r.run_id IS NULL THEN 'unknown'
                WHEN r.attempt > i.attempt THEN
                     CASE WHEN a.token = i.token THEN 'superseded' ELSE 'unknown' END
                WHEN r.attempt < i.attempt OR r.lease_token <> i.token THEN 'unknown'
                WHEN r.status = 'cancelled' THEN 'cancelled'
                WHEN r.lease_expires_at IS NULL THEN 'ended'
                WHEN EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[i.run_id])) THEN 'cancelled'
                WHEN r.lease_owner <> 0 THEN 'early'
                WHEN i.run_id = ANY (v_done) THEN 'ok'
                ELSE 'busy' END
      FROM unnest(p_run_ids, p_attempts, p_tokens) WITH ORDINALITY AS i (run_id, attempt, token, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN attempts a ON a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt;
END
$$;

-- What a runner needs to begin, as a claim tells a host. No row: the attempt is not live.
CREATE OR REPLACE FUNCTION @schema@.read_attempt(p_run_id text, p_attempt integer, p_token bigint)
RETURNS TABLE (
    run_id text, attempt integer, play text, input jsonb, failures integer, waits jsonb, org_id text, labels jsonb,
    limited boolean
)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT r.run_id, r.attempt, r.play, f.payload -> 'input', r.failures,
           CASE WHEN r.attempt > 1 THEN run_waits(r.run_id, clock()) END,
           r.org_id, r.labels, r.limited
      FROM runs r
      JOIN facts f ON f.run_id = ANY (ARRAY[r.run_id]) AND f.lane = 0 AND f.seq = 1
     WHERE r.run_id = ANY (ARRAY[p_run_id]) AND r.lease_expires_at IS NOT NULL AND r.attempt = p_attempt
       AND r.lease_token = p_token
$$;

-- The runner of one attempt: how the attempt stands (running, or how it ended), when anything of it was last heard, and,
-- while it runs, the exact heartbeat, as text for people and for the fence of a verdict (NULL: none yet). No row: the
-- attempt was never in a sandbox. It decides nothing.
CREATE OR REPLACE FUNCTION @schema@.read_runner(p_run_id text, p_attempt integer)
RETURNS TABLE (
    status text, sandbox text, provider text, heartbeat_at timestamptz, heartbeat text, updated_at timestamptz,
    heartbeat_timeout_s double precision, ceiling_at timestamptz, silent_s double precision
)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT 'running', n.sandbox, n.provider, n.heartbeat_at,
           to_char(n.heartbeat_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
           greatest(n.started_at, n.heartbeat_at), n.heartbeat_timeout_s, nullif(n.ceiling_at, 'infinity'),
           extract(epoch FROM clock() - greatest(n.started_at, n.heartbeat_at))::double precision
      FROM runners n
     WHERE n.run_id = ANY (ARRAY[p_run_id]) AND n.attempt = p_attempt
    UNION ALL
    SELECT a.outcome, s.sandbox, s.provider, NULL, NULL, a.ended_at, NULL, NULL, NULL
      FROM attempts a
      JOIN sandboxes s ON s.run_id = ANY (ARRAY[a.run_id]) AND s.attempt = a.attempt
     WHERE a.run_id = ANY (ARRAY[p_run_id]) AND a.attempt = p_attempt AND a.owner = 0
$$;

-- Runners push their results. The first word of an attempt is kept, whatever comes of it; if the attempt is still
-- live, its run moves on in the same call.
--
-- answer: settled (the run has moved on by what is kept) | recorded (kept; its row is locked, the sweep goes on) |
-- late (kept, but the run had moved on without it) | unknown (no such attempt, or another token).
-- first: what is kept is what this call said.
CREATE OR REPLACE FUNCTION @schema@.push_results(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_outcomes text[], p_payloads jsonb[],
    p_delays double precision[], p_waits jsonb[], p_outages_s double precision[], p_overdue jsonb[]
) RETURNS TABLE (ord integer, answer text, first boolean)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
BEGIN
    PERFORM require_read_committed();

    INSERT INTO runner_results (
        run_id, attempt, token, received_at, outcome, payload, delay_s, waits, outage_max_s, overdue)
    SELECT i.run_id, i.attempt, i.token, clock(), i.outcome, i.payload, coalesce(i.delay_s, 0), i.waits, i.outage_s,
           i.overdue
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_outcomes, p_payloads, p_delays, p_waits, p_outages_s, p_overdue)
           AS i (run_id, attempt, token, outcome, payload, delay_s, waits, outage_s, overdue)
     WHERE (EXISTS (SELECT 1 FROM runs r WHERE r.run_id = ANY (ARRAY[i.run_id]) AND r.attempt = i.attempt
                       AND r.lease_token = i.token AND r.lease_owner = 0)
            OR EXISTS (SELECT 1 FROM attempts a WHERE a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt
                          AND a.token = i.token AND a.owner = 0))
       -- What is kept is not inserted: that would wait for whoever settles it.
       AND NOT EXISTS (SELECT 1 FROM runner_results q
                        WHERE q.run_id = ANY (ARRAY[i.run_id]) AND q.attempt = i.attempt OFFSET 0)
     ORDER BY i.run_id
    ON CONFLICT DO NOTHING;

    PERFORM settle_results(p_run_ids, p_attempts);

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN n.run_id IS NULL THEN 'unknown'
                WHEN n.settled_at IS NULL THEN 'recorded'
                WHEN a.outcome = n.outcome OR n.outage_max_s IS NOT NULL AND a.outcome = 'failed' THEN 'settled'
                ELSE 'late' END,
           coalesce(n.outcome = i.outcome AND n.payload = i.payload AND n.waits = i.waits, false)
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_outcomes, p_payloads, p_waits) WITH ORDINALITY
           AS i (run_id, attempt, token, outcome, payload, waits, ord)
      LEFT JOIN runner_results n ON n.run_id = ANY (ARRAY[i.run_id]) AND n.attempt = i.attempt AND n.token = i.token
      LEFT JOIN attempts a ON a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt;
END
$$;

-- Moves runs on by results that are kept and not settled: of these attempts, or (NULL) the oldest there are.
-- Answers how many were settled and how many of those looked at are left.
CREATE OR REPLACE FUNCTION @schema@.settle_results(
    p_run_ids text[], p_attempts integer[], p_limit integer DEFAULT 500
) RETURNS TABLE (settled integer, remaining integer)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_ids     text[];
    v_atts    integer[];
    v_over    text[];
    v_settled integer;
BEGIN
    PERFORM require_read_committed();

    IF p_run_ids IS NULL THEN
        SELECT array_agg(t.run_id), array_agg(t.attempt) INTO v_ids, v_atts
          FROM (SELECT n.run_id, n.attempt FROM runner_results n WHERE n.settled_at IS NULL
                 ORDER BY n.received_at LIMIT p_limit) t;
    ELSE
        SELECT array_agg(i.run_id), array_agg(i.attempt) INTO v_ids, v_atts
          FROM unnest(p_run_ids, p_attempts) AS i (run_id, attempt)
         CROSS JOIN LATERAL (
                SELECT q.settled_at FROM runner_results q
                 WHERE q.run_id = ANY (ARRAY[i.run_id]) AND q.attempt = i.attempt
                OFFSET 0) n
         WHERE n.settled_at IS NULL;
    END IF;
    IF v_ids IS NULL THEN
        RETURN QUERY SELECT 0, 0;
        RETURN;
    END IF;

    -- An outage that has lasted too long ends its run with the payload that was given for that.
    SELECT array_agg(n.run_id) FILTER (WHERE d.answer = 'over') INTO v_over
      FROM (SELECT array_agg(n.run_id) AS ids, array_agg(n.attempt) AS attempts, array_agg(n.token) AS tokens,
                   array_agg(n.payload) AS payloads, array_agg(n.delay_s) AS delays, array_agg(n.outage_max_s) AS most
              FROM unnest(v_ids, v_atts) AS i (run_id, attempt)
              JOIN runner_results n ON n.run_id = ANY (ARRAY[i.run_id]) AND n.attempt = i.attempt
             WHERE n.outage_max_s IS NOT NULL) o
     CROSS JOIN LATERAL defer_attempts(o.ids, o.attempts, o.tokens, o.payloads, o.delays, o.most) d
      JOIN LATERAL (SELECT o.ids[d.ord] AS run_id) n ON true
     WHERE o.ids IS NOT NULL;
    PERFORM settle_attempts(
                array_agg(n.run_id), array_agg(n.attempt), array_agg(n.token),
                array_agg(CASE WHEN n.run_id = ANY (v_over) THEN 'failed' ELSE n.outcome END),
                array_agg(CASE WHEN n.run_id = ANY (v_over) THEN n.overdue ELSE n.payload END), array_agg(n.delay_s))
       FROM unnest(v_ids, v_atts) AS i (run_id, attempt)
       JOIN runner_results n ON n.run_id = ANY (ARRAY[i.run_id]) AND n.attempt = i.attempt
      WHERE n.outcome <> 'parked' AND (n.outage_max_s IS NULL OR array_position(v_over, n.run_id) > 0) HAVING count(*) > 0;
    PERFORM park_attempts(array_agg(n.run_id), array_agg(n.attempt), array_agg(n.token), array_agg(n.waits))
       FROM unnest(v_ids, v_atts) AS i (run_id, attempt)
       JOIN runner_results n ON n.run_id = ANY (ARRAY[i.run_id]) AND n.attempt = i.attempt
      WHERE n.outcome = 'parked' HAVING count(*) > 0;

    -- Settled, or past it: the attempt is not live any more.
    -- (Asking for settled_at here would let the planner take the index of the unsettled ones.)
    UPDATE runner_results n SET settled_at = coalesce(n.settled_at, clock())
      FROM unnest(v_ids, v_atts) AS i (run_id, attempt)
     CROSS JOIN LATERAL (
            SELECT a.token FROM attempts a WHERE a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt OFFSET 0) ended
     WHERE n.run_id = ANY (ARRAY[i.run_id]) AND n.attempt = i.attempt AND n.token = ended.token;
    GET DIAGNOSTICS v_settled = ROW_COUNT;
    RETURN QUERY SELECT v_settled, cardinality(v_ids) - v_settled;
END
$$;

-- A detached attempt has ended: its runner goes, its sandboxes are wanted back, its run's bill is due. A trigger, so that
-- no transition that ends attempts can forget it; for attempts of hosts its condition is all that it costs.
CREATE OR REPLACE FUNCTION @schema@.end_runner() RETURNS trigger
LANGUAGE plpgsql
@seek@
AS $$
BEGIN
    DELETE FROM runners n WHERE n.run_id = ANY (ARRAY[NEW.run_id]);
    UPDATE sandboxes s SET wanted_at = NEW.ended_at, due_at = NEW.ended_at
     WHERE s.run_id = ANY (ARRAY[NEW.run_id]) AND s.wanted_at IS NULL;
    UPDATE billing_jobs b SET due_at = NEW.ended_at WHERE b.run_id = ANY (ARRAY[NEW.run_id]);
    RETURN NULL;
END
$$;

CREATE OR REPLACE TRIGGER end_runner AFTER INSERT ON @schema@.attempts
    FOR EACH ROW WHEN (NEW.owner = 0) EXECUTE FUNCTION @schema@.end_runner();

-- Looks at runners whose due time has passed and answers those that somebody has to ask the provider about ('stale')
-- or that have reached their ceiling ('ceiling'), of up to p_limit (1 to 100) that are due per provider, so that one
-- provider's backlog hides nobody else's. They are not due again for p_look_s seconds, which is the time the caller has.
-- Runners that were heard of meanwhile get their next due time. The heartbeat is answered exactly.
-- Always ends with one row with run_id NULL that carries next_due_s, as claim_runs does: exactly 0 says that there may be
-- more that are due, less than 0 that others hold them.
CREATE OR REPLACE FUNCTION @schema@.sweep_runners(p_providers text[], p_limit integer, p_look_s double precision)
RETURNS TABLE (
    run_id text, attempt integer, token bigint, provider text, sandbox text, provider_id text, routing_domain text,
    heartbeat_at timestamptz, silent_s double precision, heartbeat_timeout_s double precision, finding text, over_s double precision,
    next_due_s double precision
)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now      CONSTANT timestamptz := clock();
    v_limit    CONSTANT integer := least(greatest(p_limit, 1), 100);
    v_provider text;
    v_full     boolean := false;
    v_ids      text[];
BEGIN
    PERFORM require_read_committed();
    FOREACH v_provider IN ARRAY p_providers LOOP
        SELECT array_agg(t.run_id) INTO v_ids
          FROM (SELECT n.run_id FROM runners n
                 WHERE n.provider = v_provider AND n.due_at <= v_now
                 ORDER BY n.due_at LIMIT v_limit
                   FOR NO KEY UPDATE SKIP LOCKED) t;
        v_full := v_full OR cardinality(v_ids) = v_limit;

        RETURN QUERY
        WITH due AS MATERIALIZED (
            SELECT n.run_id, n.attempt, n.token, n.heartbeat_at, n.ceiling_at, n.started_at, n.heartbeat_timeout_s, n.sandbox,
                   least(coalesce(n.heartbeat_at, n.started_at) + make_interval(secs => n.heartbeat_timeout_s),
                         n.ceiling_at) AS overdue_at
              FROM runners n WHERE n.run_id = ANY (v_ids)
        ), pushed AS (
            UPDATE runners n
               SET due_at = CASE WHEN d.overdue_at > v_now THEN d.overdue_at
                                 ELSE v_now + make_interval(secs => p_look_s) END
              FROM due d WHERE n.run_id = ANY (ARRAY[d.run_id])
        )
        SELECT d.run_id, d.attempt, d.token, v_provider, d.sandbox, s.provider_id, s.routing_domain, d.heartbeat_at,
               extract(epoch FROM v_now - coalesce(d.heartbeat_at, d.started_at))::double precision,
               d.heartbeat_timeout_s, CASE WHEN d.ceiling_at <= v_now THEN 'ceiling' ELSE 'stale' END,
               CASE WHEN d.ceiling_at <= v_now THEN extract(epoch FROM v_now - d.ceiling_at)::double precision ELSE 0 END,
               NULL::double precision
          FROM due d
          JOIN sandboxes s ON s.sandbox = ANY (ARRAY[d.sandbox])
         WHERE d.overdue_at <= v_now
           AND NOT EXISTS (SELECT 1 FROM runner_results q
                            WHERE q.run_id = ANY (ARRAY[d.run_id]) AND q.attempt = d.attempt OFFSET 0)
           AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[d.run_id]) OFFSET 0);
    END LOOP;

    RETURN QUERY
    SELECT NULL::text, NULL::integer, NULL::bigint, NULL::text, NULL::text, NULL::text, NULL::text, NULL::timestamptz,
           NULL::double precision, NULL::double precision, NULL::text, NULL::double precision,
           seconds_until(CASE WHEN v_full THEN v_now ELSE runners_next_due(p_providers) END, v_now);
END
$$;

-- When the sweep has to look next: the first runner due, or a result that waits to be settled.
CREATE OR REPLACE FUNCTION @schema@.runners_next_due(p_providers text[]) RETURNS timestamptz
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT least(
        (SELECT min(h.due_at)
           FROM unnest(p_providers) AS e (provider)
          CROSS JOIN LATERAL (SELECT n.due_at FROM runners n WHERE n.provider = e.provider
                               ORDER BY n.due_at LIMIT 1) h),
        (SELECT q.received_at FROM runner_results q WHERE q.settled_at IS NULL ORDER BY q.received_at LIMIT 1))
$$;

-- Ends detached attempts from outside.
--
--   lost     nobody works on it any more: one crash is charged, the run is queued again, or fails over its crash cap.
--            Counts only if the heartbeat is still exactly p_heartbeats (NULL: there never was one)
--   ceiling  it ran too long: the run fails
--
-- Neither touches an attempt whose result is there, nor one that somebody has asked to cancel.
-- answer: done (also when asked again) | busy | moved (something of this changed: it is somebody else's now).
CREATE OR REPLACE FUNCTION @schema@.judge_runners(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_heartbeats timestamptz[], p_verdicts text[],
    p_errors jsonb[], p_crash_cap integer
) RETURNS TABLE (ord integer, answer text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_ids      text[];
    v_ceilings text[];
    v_now      timestamptz;
BEGIN
    PERFORM require_read_committed();

    -- The locks first; results and markers are written without them, so they are judged afterwards on a fresh snapshot.
    SELECT array_agg(t.run_id) INTO v_ids
      FROM (SELECT r.run_id
              FROM unnest(p_run_ids, p_attempts, p_tokens, p_heartbeats, p_verdicts)
                   AS i (run_id, attempt, token, heartbeat_at, verdict)
              JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
              JOIN runners n ON n.run_id = ANY (ARRAY[i.run_id])
             WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
               AND r.lease_owner = 0 AND n.attempt = i.attempt AND n.token = i.token
               AND (i.verdict = 'ceiling' OR n.heartbeat_at IS NOT DISTINCT FROM i.heartbeat_at)
               FOR NO KEY UPDATE OF r, n SKIP LOCKED) t;
    v_now := clock();
    SELECT array_agg(i.run_id), array_agg(i.run_id) FILTER (WHERE i.verdict = 'ceiling') INTO v_ids, v_ceilings
      FROM unnest(p_run_ids, p_attempts, p_verdicts) AS i (run_id, attempt, verdict)
      LEFT JOIN runners n ON n.run_id = ANY (ARRAY[i.run_id])
     WHERE i.run_id = ANY (v_ids)
       AND (i.verdict <> 'ceiling' OR n.ceiling_at <= v_now)
       AND NOT EXISTS (SELECT 1 FROM runner_results q
                        WHERE q.run_id = ANY (ARRAY[i.run_id]) AND q.attempt = i.attempt OFFSET 0)
       AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[i.run_id]) OFFSET 0);

    IF v_ids IS NOT NULL THEN
        PERFORM crash_attempts(array_agg(i.run_id), array_agg(i.verdict), array_agg(i.error), p_crash_cap, v_now)
           FROM unnest(p_run_ids, p_verdicts, p_errors) AS i (run_id, verdict, error)
          WHERE i.run_id = ANY (v_ids);
    END IF;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN a.outcome = i.verdict THEN 'done'
                WHEN n.run_id IS NOT NULL AND (i.verdict = 'ceiling' OR n.heartbeat_at IS NOT DISTINCT FROM i.heartbeat_at)
                     AND NOT EXISTS (SELECT 1 FROM runner_results q
                                      WHERE q.run_id = ANY (ARRAY[i.run_id]) AND q.attempt = i.attempt)
                     AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[i.run_id])) THEN 'busy'
                ELSE 'moved' END
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_heartbeats, p_verdicts) WITH ORDINALITY
           AS i (run_id, attempt, token, heartbeat_at, verdict, ord)
      LEFT JOIN runners n ON n.run_id = ANY (ARRAY[i.run_id]) AND n.attempt = i.attempt AND n.token = i.token
      LEFT JOIN attempts a ON a.run_id = ANY (ARRAY[i.run_id]) AND a.attempt = i.attempt AND a.token = i.token;
END
$$;

-- What a host that has sandboxes of these providers must look at next, beside next_due. Seeks only.
CREATE OR REPLACE FUNCTION @schema@.detached_next_due(p_providers text[])
RETURNS TABLE (runners_s double precision, sandboxes_s double precision, billing_s double precision)
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_now CONSTANT timestamptz := clock();
BEGIN
    RETURN QUERY
    SELECT seconds_until(runners_next_due(p_providers), v_now),
           seconds_until(sandboxes_next_due(p_providers), v_now),
           seconds_until((SELECT b.due_at FROM billing_jobs b WHERE b.finalised_at IS NULL ORDER BY b.due_at LIMIT 1), v_now);
END
$$;

-- Where runners reach this host.
CREATE OR REPLACE FUNCTION @schema@.set_gateway(p_host bigint, p_url text) RETURNS void
LANGUAGE sql
@seek@
AS $$
    UPDATE hosts SET gateway_url = p_url WHERE host = p_host
$$;

-- Where runners may go when their host is gone: the gateways of hosts seen lately, the latest first.
CREATE OR REPLACE FUNCTION @schema@.read_gateways(p_within_s double precision, p_limit integer) RETURNS SETOF text
LANGUAGE sql STABLE
SET search_path = @schema@, pg_temp
AS $$
    SELECT gateway_url FROM hosts
     WHERE gateway_url IS NOT NULL AND seen_at > clock() - make_interval(secs => p_within_s)
     ORDER BY seen_at DESC LIMIT p_limit
$$;
