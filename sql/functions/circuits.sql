-- circuits: whether a dependency is worth calling, known to all hosts.
--
-- closed until so many failures in a row, then open for a while, then half open: one probe goes, and its outcome closes
-- the circuit or opens it again, for twice as long.
--
-- Lock order: circuit rows, SKIP LOCKED; no transition of a run is ever inside. Fence: the probe's token, while its attempt
-- has a lease. Tokens are made by clients and are the natural key of entries and reports.

-- May these call their dependency now? One token per call.
--
-- answer: closed (go ahead; failures in a row so far) | probe (go ahead, and be sure to report) | open (not for
-- retry_after_s seconds) | busy (the circuit's row is locked: ask again).
CREATE OR REPLACE FUNCTION @schema@.enter_circuits(
    p_names text[], p_tokens bigint[], p_run_ids text[], p_attempts integer[], p_probe_s double precision
) RETURNS TABLE (ord integer, answer text, failures integer, retry_after_s double precision)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_circuit record;
    v_now     timestamptz;
    v_seen    text[] := '{}';
BEGIN
    PERFORM require_read_committed();

    FOR v_circuit IN
        SELECT c.* FROM unnest(ARRAY(SELECT DISTINCT i FROM unnest(p_names) AS i)) AS n (name)
          JOIN circuits c ON c.name = ANY (ARRAY[n.name])
         WHERE coalesce(c.state, '') <> 'closed'
           FOR NO KEY UPDATE OF c SKIP LOCKED
    LOOP
        v_seen := v_seen || v_circuit.name;
        v_now := clock();
        -- A probe that hangs, or whose attempt is gone, is followed by another.
        IF v_circuit.open_until <= v_now AND (
            v_circuit.probe_token IS NULL OR v_circuit.probe_until <= v_now OR NOT EXISTS (
                SELECT 1 FROM runs r
                 WHERE r.run_id = ANY (ARRAY[v_circuit.probe_run_id]) AND r.attempt = v_circuit.probe_attempt
                   AND r.lease_expires_at > v_now))
        THEN
            SELECT i.token, i.run_id, i.attempt
              INTO v_circuit.probe_token, v_circuit.probe_run_id, v_circuit.probe_attempt
              FROM unnest(p_names, p_tokens, p_run_ids, p_attempts) WITH ORDINALITY AS i (name, token, run_id, attempt, ord)
             WHERE i.name = v_circuit.name ORDER BY i.ord LIMIT 1;
            v_circuit.probe_until := v_now + make_interval(secs => p_probe_s);
            UPDATE circuits c
               SET state = 'half_open', updated_at = v_now, probe_token = v_circuit.probe_token,
                   probe_run_id = v_circuit.probe_run_id, probe_attempt = v_circuit.probe_attempt,
                   probe_until = v_circuit.probe_until
             WHERE c.name = ANY (ARRAY[v_circuit.name]);
        END IF;

        RETURN QUERY
        SELECT i.ord::integer, CASE WHEN i.token = v_circuit.probe_token THEN 'probe' ELSE 'open' END, 0,
               CASE WHEN i.token = v_circuit.probe_token THEN NULL
                    WHEN v_circuit.open_until > v_now THEN extract(epoch FROM v_circuit.open_until - v_now)
                    ELSE least(v_circuit.open_s, extract(epoch FROM v_circuit.probe_until - v_now)) END::double precision
          FROM unnest(p_names, p_tokens) WITH ORDINALITY AS i (name, token, ord)
         WHERE i.name = v_circuit.name;
    END LOOP;

    RETURN QUERY
    SELECT i.ord::integer, CASE WHEN coalesce(c.state, 'closed') = 'closed' THEN 'closed' ELSE 'busy' END,
           coalesce(cardinality(c.failures), 0), NULL::double precision
      FROM unnest(p_names) WITH ORDINALITY AS i (name, ord)
      LEFT JOIN circuits c ON c.name = ANY (ARRAY[i.name])
     WHERE i.name <> ALL (v_seen);
END
$$;

-- Reports how calls went, in the order in which they ended. p_results, per item: ok | failed | none (a probe that says
-- nothing: somebody else has to try). p_errors: what failed, for people.
--
-- A closed circuit counts failures in a row; a half-open one listens to its probe alone, an open one to nobody.
-- answer: done | busy (the circuit's row is locked: ask again). state, failures: as it stands now.
CREATE OR REPLACE FUNCTION @schema@.report_circuits(p_names text[], p_tokens bigint[], p_results text[], p_errors text[])
RETURNS TABLE (ord integer, answer text, state text, failures integer)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_circuit record;
    v_item    record;
    v_now     timestamptz;
    v_opens   boolean;
    v_seen    text[] := '{}';
BEGIN
    PERFORM require_read_committed();

    INSERT INTO circuits (name, updated_at)
    SELECT DISTINCT i.name, clock()
      FROM unnest(p_names, p_results) AS i (name, result)
      LEFT JOIN LATERAL (SELECT c.name FROM circuits c WHERE c.name = i.name OFFSET 0) c ON true
     WHERE i.result = 'failed' AND c.name IS NULL
    ON CONFLICT DO NOTHING;

    FOR v_circuit IN
        SELECT c.* FROM unnest(ARRAY(SELECT DISTINCT i FROM unnest(p_names) AS i)) AS n (name)
          JOIN circuits c ON c.name = ANY (ARRAY[n.name])
           FOR NO KEY UPDATE OF c SKIP LOCKED
    LOOP
        v_seen := v_seen || v_circuit.name;
        v_now := clock();
        FOR v_item IN
            SELECT i.token, i.result, i.error
              FROM unnest(p_names, p_tokens, p_results, p_errors) WITH ORDINALITY AS i (name, token, result, error, ord)
             WHERE i.name = v_circuit.name ORDER BY i.ord
        LOOP
            CONTINUE WHEN v_circuit.state = 'open'
                       OR (v_circuit.state = 'half_open' AND v_item.token IS DISTINCT FROM v_circuit.probe_token)
                       OR (v_circuit.state = 'closed' AND v_item.token = ANY (v_circuit.failures));
            v_opens := false;
            IF v_item.result = 'failed' THEN
                v_circuit.error := v_item.error;
                v_circuit.failures := v_circuit.failures || v_item.token;
                v_opens := v_circuit.state = 'half_open' OR cardinality(v_circuit.failures) >= v_circuit.threshold;
            ELSIF v_item.result = 'ok' THEN
                v_circuit.state := 'closed';
                v_circuit.openings := 0;
                v_circuit.open_until := NULL;
                v_circuit.failures := '{}';
            END IF;
            IF v_opens THEN
                v_circuit.state := 'open';
                v_circuit.open_until := v_now + make_interval(
                    secs => least(v_circuit.open_max_s, v_circuit.open_s * 2 ^ least(v_circuit.openings, 30)));
                v_circuit.openings := v_circuit.openings + 1;
                v_circuit.failures := '{}';
            END IF;
            v_circuit.probe_token := NULL;
            v_circuit.probe_run_id := NULL;
            v_circuit.probe_attempt := NULL;
            v_circuit.probe_until := NULL;
        END LOOP;

        UPDATE circuits c
           SET updated_at = v_now, state = v_circuit.state, openings = v_circuit.openings, open_until = v_circuit.open_until,
               failures = v_circuit.failures, error = v_circuit.error, probe_token = v_circuit.probe_token,
               probe_run_id = v_circuit.probe_run_id, probe_attempt = v_circuit.probe_attempt,
               probe_until = v_circuit.probe_until
         WHERE c.name = ANY (ARRAY[v_circuit.name])
           AND (c.state, c.failures, c.probe_token, c.openings)
               IS DISTINCT FROM (v_circuit.state, v_circuit.failures, v_circuit.probe_token, v_circuit.openings);
    END LOOP;

    RETURN QUERY
    SELECT i.ord::integer, CASE WHEN c.name IS NULL OR i.name = ANY (v_seen) THEN 'done' ELSE 'busy' END,
           coalesce(c.state, 'closed'), coalesce(cardinality(c.failures), 0)
      FROM unnest(p_names) WITH ORDINALITY AS i (name, ord)
      LEFT JOIN circuits c ON c.name = ANY (ARRAY[i.name]);
END
$$;

-- Circuits as they stand: open ones first, the latest change first.
CREATE OR REPLACE FUNCTION @schema@.read_circuits()
RETURNS TABLE (
    name text, state text, failures integer, threshold integer, openings integer, open_s double precision,
    open_max_s double precision, retry_after_s double precision, error text, updated_at timestamptz
)
LANGUAGE sql STABLE
@lookup@
AS $$
    SELECT c.name, c.state, cardinality(c.failures), c.threshold, c.openings, c.open_s, c.open_max_s,
           CASE WHEN c.open_until > t.now THEN extract(epoch FROM c.open_until - t.now) END::double precision,
           c.error, c.updated_at
      FROM (SELECT clock() AS now) t
     CROSS JOIN circuits c
     ORDER BY c.state = 'closed', c.updated_at DESC, c.name
$$;

-- How many circuits are open and half open, and how many rate scopes are paused: for metrics.
CREATE OR REPLACE FUNCTION @schema@.count_shared()
RETURNS TABLE (circuits_open bigint, circuits_half_open bigint, rates_paused bigint)
LANGUAGE sql STABLE
@lookup@
AS $$
    SELECT (SELECT count(*) FROM circuits WHERE state = 'open'),
           (SELECT count(*) FROM circuits WHERE state = 'half_open'),
           (SELECT count(*) FROM rate_scopes WHERE paused_at IS NOT NULL)
$$;

-- The public SQL door:
--
--   SELECT runlane.set_circuit('crm', '{"failures": 5, "open_s": 10, "open_max_s": 300}');
--
-- Declares a circuit or changes one; without it these are the values. Options: failures (in a row, which open it), open_s
-- and open_max_s (seconds), close (true: close it now). True if anything changed. While the caller's transaction is
-- open, nobody is let through that is not already.
CREATE OR REPLACE FUNCTION @schema@.set_circuit(p_name text, p_options jsonb DEFAULT '{}') RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_now     CONSTANT timestamptz := clock();
    v_most    numeric;
    v_open_s  numeric;
    v_max_s   numeric;
    v_old     record;
    v_changed integer;
BEGIN
    PERFORM check_options(p_options, '{failures, open_s, open_max_s, close}');
    IF p_name IS NULL OR p_name !~ '^[A-Za-z0-9._:-]{1,128}$' THEN
        PERFORM refuse('name', 'must be 1 to 128 of A-Z a-z 0-9 . _ : -');
    END IF;
    IF jsonb_typeof(p_options -> 'close') NOT IN ('boolean', 'null') THEN
        PERFORM refuse('options.close', 'must be true or false');
    END IF;
    SELECT c.* INTO v_old FROM circuits c WHERE c.name = p_name;
    v_most := coalesce(number_option(p_options, 'failures'), v_old.threshold, 5);
    IF v_most NOT BETWEEN 1 AND 100 OR v_most <> trunc(v_most) THEN
        PERFORM refuse('options.failures', 'must be a whole number from 1 to 100');
    END IF;
    v_open_s := coalesce(number_option(p_options, 'open_s'), v_old.open_s::numeric, 10);
    IF v_open_s NOT BETWEEN 0.1 AND 86400 THEN
        PERFORM refuse('options.open_s', 'must be seconds from 0.1 to 86400');
    END IF;
    v_max_s := coalesce(number_option(p_options, 'open_max_s'), v_old.open_max_s::numeric, greatest(300, v_open_s));
    IF v_max_s NOT BETWEEN v_open_s AND 86400 THEN
        PERFORM refuse('options.open_max_s', format('must be seconds from open_s (%s) to 86400', v_open_s));
    END IF;

    INSERT INTO circuits AS c (name, updated_at, threshold, open_s, open_max_s)
    VALUES (p_name, v_now, v_most, v_open_s, v_max_s)
    ON CONFLICT (name) DO UPDATE
       SET updated_at = excluded.updated_at, threshold = excluded.threshold, open_s = excluded.open_s,
           open_max_s = excluded.open_max_s
     WHERE (c.threshold, c.open_s, c.open_max_s) IS DISTINCT FROM (excluded.threshold, excluded.open_s, excluded.open_max_s);
    GET DIAGNOSTICS v_changed = ROW_COUNT;
    IF (p_options ->> 'close')::boolean THEN
        UPDATE circuits c
           SET state = 'closed', updated_at = v_now, openings = 0, open_until = NULL, failures = '{}', probe_token = NULL,
               probe_run_id = NULL, probe_attempt = NULL, probe_until = NULL
         WHERE c.name = p_name AND (c.state <> 'closed' OR c.failures <> '{}');
        v_changed := v_changed + FOUND::integer;
    END IF;
    RETURN v_changed > 0;
END
$$;
