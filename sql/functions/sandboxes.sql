-- sandboxes: capacity, and the obligation to delete everything that was ever asked for.
--
-- Lock order: run rows, then sandbox rows, SKIP LOCKED; what only writes down what is known of a sandbox waits for its
-- row, alone. Capacity takes one advisory lock per schema, tried, so that two hosts cannot both count the last place as
-- free.
-- Fences: the primary key (our own name of the sandbox, derived from run, attempt and token), and lease_token for
-- cleanup. A confirmed row is final and stays until its run goes: it is the proof that nothing was left behind.

-- Reserves capacity for sandboxes of live attempts, with the obligation to delete each. Until the attempt is detached the
-- obligation is due in p_due_s seconds: if the host dies in between, cleanup finds whatever there is. The run's row is
-- locked, so that no run ends, and has its bill made, beside a reservation.
--
-- Limits are rows of limits: kind 'sandbox' by provider ('' for all together), 'sandbox_org' by organisation.
-- answer: reserved (also when asked again) | full | busy | lost (the attempt is not live, or nobody wants that sandbox).
CREATE OR REPLACE FUNCTION @schema@.reserve_sandboxes(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_sandboxes text[], p_providers text[],
    p_due_s double precision
) RETURNS TABLE (ord integer, answer text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz;
    v_free  text[];
    v_item  record;
    v_limit record;
    v_full  boolean;
BEGIN
    PERFORM require_read_committed();
    SELECT array_agg(t.run_id) INTO v_free
      FROM (SELECT r.run_id
              FROM unnest(p_run_ids, p_attempts, p_tokens) AS i (run_id, attempt, token)
              JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
             WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
               AND r.lease_owner <> 0
               FOR NO KEY UPDATE OF r SKIP LOCKED) t;
    v_now := clock();

    FOR v_item IN
        SELECT i.ord::integer AS ord, i.run_id, i.attempt, i.sandbox, i.provider, r.org_id, r.environment,
               r.run_id IS NOT NULL AS live, s.sandbox IS NOT NULL AS known, s.wanted_at IS NOT NULL AS unwanted
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_sandboxes, p_providers) WITH ORDINALITY
               AS i (run_id, attempt, token, sandbox, provider, ord)
          LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                          AND r.attempt = i.attempt AND r.lease_token = i.token AND r.lease_owner <> 0
          -- What is known to exist is not inserted: that would wait for whoever is changing that row.
          LEFT JOIN sandboxes s ON s.sandbox = ANY (ARRAY[i.sandbox])
    LOOP
        ord := v_item.ord;
        answer := CASE WHEN NOT v_item.live OR v_item.unwanted THEN 'lost'
                       WHEN v_item.known THEN 'reserved'
                       WHEN v_item.run_id = ANY (v_free) THEN NULL
                       ELSE 'busy' END;
        IF answer IS NULL THEN
            v_full := false;
            FOR v_limit IN
                SELECT l.kind, l.name, l.max_running
                  FROM limits l
                 WHERE (l.kind, l.name) IN (('sandbox', ''), ('sandbox', v_item.provider),
                                            ('sandbox_org', coalesce(v_item.org_id, '')))
            LOOP
                IF NOT pg_try_advisory_xact_lock(hashtextextended('@schema@' || E'\x1f' || 'sandboxes', 3)) THEN
                    answer := 'busy';
                    EXIT;
                END IF;
                v_full := v_full OR sandboxes_open(
                    CASE WHEN v_limit.kind = 'sandbox' THEN nullif(v_limit.name, '') END,
                    CASE WHEN v_limit.kind = 'sandbox_org' THEN v_item.org_id END, v_limit.max_running) >= v_limit.max_running;
            END LOOP;
            IF answer IS NULL AND v_full THEN
                answer := 'full';
            ELSIF answer IS NULL THEN
                IF NOT EXISTS (SELECT 1 FROM billing_jobs b WHERE b.run_id = ANY (ARRAY[v_item.run_id])) THEN
                    INSERT INTO billing_jobs (run_id, created_at, due_at)
                    VALUES (v_item.run_id, v_now, v_now + interval '1 minute')
                    ON CONFLICT DO NOTHING;
                END IF;
                INSERT INTO sandboxes (sandbox, provider, run_id, attempt, org_id, environment, created_at, due_at, certain_at)
                VALUES (v_item.sandbox, v_item.provider, v_item.run_id, v_item.attempt, v_item.org_id, v_item.environment,
                        v_now, v_now + make_interval(secs => p_due_s), v_now + make_interval(secs => p_due_s))
                ON CONFLICT DO NOTHING;
                answer := CASE WHEN FOUND THEN 'reserved' ELSE 'lost' END;
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
END
$$;

-- Sandboxes that take up room, counted up to p_most (NULL: all). With providers and organisations left open it counts all.
CREATE OR REPLACE FUNCTION @schema@.sandboxes_open(p_provider text, p_org text, p_most integer) RETURNS integer
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT count(*)::integer
      FROM (SELECT 1 FROM sandboxes s
             WHERE s.accepted_at IS NULL AND (p_provider IS NULL OR s.provider = p_provider)
               AND (p_org IS NULL OR s.org_id = p_org)
             LIMIT p_most) t
$$;

-- What the provider said of sandboxes it has made. Known values are kept: they are filled in, never replaced.
CREATE OR REPLACE FUNCTION @schema@.record_custody(
    p_sandboxes text[], p_provider_ids text[], p_routing_domains text[]
) RETURNS void
LANGUAGE sql
@seek@
AS $$
    UPDATE sandboxes s
       SET custody_at = coalesce(s.custody_at, clock()), provider_id = coalesce(s.provider_id, i.provider_id),
           routing_domain = coalesce(s.routing_domain, nullif(i.routing_domain, ''))
      FROM unnest(p_sandboxes, p_provider_ids, p_routing_domains) AS i (sandbox, provider_id, routing_domain)
     WHERE s.sandbox = ANY (ARRAY[i.sandbox])
$$;

-- What is known of a sandbox's end, for whoever asks why. The last word stands.
CREATE OR REPLACE FUNCTION @schema@.record_diagnostics(p_sandbox text, p_diagnostics jsonb) RETURNS void
LANGUAGE sql
@seek@
AS $$
    UPDATE sandboxes s SET diagnostics = p_diagnostics WHERE s.sandbox = ANY (ARRAY[p_sandbox])
$$;

-- Nobody needs these any more (an attempt that ended before it was detached): they are due for deletion now.
CREATE OR REPLACE FUNCTION @schema@.give_up_sandboxes(p_sandboxes text[]) RETURNS void
LANGUAGE sql
@seek@
AS $$
    UPDATE sandboxes s SET wanted_at = clock(), due_at = clock()
     WHERE s.sandbox = ANY (p_sandboxes) AND s.wanted_at IS NULL
       AND NOT EXISTS (SELECT 1 FROM runners n WHERE n.run_id = ANY (ARRAY[s.run_id]) AND n.sandbox = s.sandbox)
$$;

-- Claims obligations that are due, up to p_limit per provider, the longest due first. Taking one says that it is wanted
-- back: an attempt that has not been detached by now never will be. `certain`: that it is not there proves that it never
-- will be, because it was seen before, or because whoever asked for it has given up long since.
-- Always ends with one row with sandbox NULL that carries next_due_s, as claim_runs does.
CREATE OR REPLACE FUNCTION @schema@.claim_cleanup(
    p_providers text[], p_token bigint, p_limit integer, p_lease_s double precision
) RETURNS TABLE (
    sandbox text, provider text, provider_id text, routing_domain text, run_id text, attempt integer, tries integer,
    failures integer, accepted_at timestamptz, certain boolean, next_due_s double precision
)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now      CONSTANT timestamptz := clock();
    v_provider text;
    v_full     boolean := false;
    v_seen     integer;
BEGIN
    PERFORM require_read_committed();
    FOREACH v_provider IN ARRAY p_providers LOOP
        RETURN QUERY
        WITH due AS (
            SELECT s.sandbox FROM sandboxes s
             WHERE s.provider = v_provider AND s.confirmed_at IS NULL AND s.due_at <= v_now
               AND s.block_reason IS NULL AND (s.lease_expires_at IS NULL OR s.lease_expires_at <= v_now)
             ORDER BY s.due_at LIMIT p_limit
               FOR NO KEY UPDATE SKIP LOCKED
        )
        UPDATE sandboxes s
           SET lease_token = p_token, lease_expires_at = v_now + make_interval(secs => p_lease_s),
               due_at = v_now + make_interval(secs => p_lease_s), tries = s.tries + 1,
               wanted_at = coalesce(s.wanted_at, v_now)
          FROM due d WHERE s.sandbox = ANY (ARRAY[d.sandbox])
        RETURNING s.sandbox, s.provider, s.provider_id, s.routing_domain, s.run_id, s.attempt, s.tries, s.failures,
                  s.accepted_at, s.custody_at IS NOT NULL OR s.certain_at <= v_now, NULL::double precision;
        GET DIAGNOSTICS v_seen = ROW_COUNT;
        v_full := v_full OR v_seen = p_limit;
    END LOOP;

    RETURN QUERY
    SELECT NULL::text, NULL::text, NULL::text, NULL::text, NULL::text, NULL::integer, NULL::integer, NULL::integer,
           NULL::timestamptz, NULL::boolean,
           seconds_until(CASE WHEN v_full THEN v_now ELSE sandboxes_next_due(p_providers) END, v_now);
END
$$;

CREATE OR REPLACE FUNCTION @schema@.sandboxes_next_due(p_providers text[]) RETURNS timestamptz
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT min(h.due_at)
      FROM unnest(p_providers) AS e (provider)
     CROSS JOIN LATERAL (
            SELECT s.due_at FROM sandboxes s WHERE s.provider = e.provider AND s.confirmed_at IS NULL
             ORDER BY s.due_at LIMIT 1) h
$$;

-- An event of a sandbox, once. The column has the routing domain that the obligation was filed under, the details the one
-- that was observed.
CREATE OR REPLACE FUNCTION @schema@.tell_sandbox_event(
    p_row @schema@.sandboxes, p_type text, p_outcome text, p_observed text, p_now timestamptz
) RETURNS void
LANGUAGE sql
@seek@
AS $$
    INSERT INTO sandbox_events (happened_at, event_id, sandbox, type, routing_domain, details)
    VALUES (p_now, p_row.sandbox || ':' || p_type, p_row.sandbox, p_type, p_row.routing_domain,
            jsonb_strip_nulls(jsonb_build_object('outcome', p_outcome, 'routing_domain', p_observed)))
    ON CONFLICT DO NOTHING
$$;

-- The provider took a deletion (p_outcome: deleted | already_absent): from here the sandbox costs nothing and takes up
-- no room. The first moment stands. answer: accepted (also when asked again) | lease_lost | missing_obligation | busy.
CREATE OR REPLACE FUNCTION @schema@.accept_deletion(
    p_sandbox text, p_token bigint, p_outcome text, p_routing_domain text
) RETURNS text
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_row sandboxes%ROWTYPE;
    v_now timestamptz;
BEGIN
    PERFORM require_read_committed();
    SELECT * INTO v_row FROM sandboxes s WHERE s.sandbox = ANY (ARRAY[p_sandbox]) FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN CASE WHEN EXISTS (SELECT 1 FROM sandboxes s WHERE s.sandbox = ANY (ARRAY[p_sandbox]))
                    THEN 'busy' ELSE 'missing_obligation' END;
    ELSIF v_row.accepted_at IS NOT NULL THEN
        RETURN 'accepted';
    ELSIF v_row.lease_token IS DISTINCT FROM p_token THEN
        RETURN 'lease_lost';
    END IF;
    v_now := clock();
    UPDATE sandboxes s SET accepted_at = v_now WHERE s.sandbox = ANY (ARRAY[p_sandbox]);
    PERFORM tell_sandbox_event(v_row, 'delete_accepted', p_outcome, p_routing_domain, v_now);
    RETURN 'accepted';
END
$$;

-- Read back: the sandbox is gone. Final. A sandbox that nobody ever deleted and that is not there counts as accepted now.
-- answer: completed | already_completed | lease_lost | wrong_routing_domain (the obligation knows another one: what was
-- looked at is not it) | missing_obligation | busy.
CREATE OR REPLACE FUNCTION @schema@.confirm_deletion(
    p_sandbox text, p_token bigint, p_outcome text, p_routing_domain text
) RETURNS text
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_row sandboxes%ROWTYPE;
    v_now timestamptz;
BEGIN
    PERFORM require_read_committed();
    SELECT * INTO v_row FROM sandboxes s WHERE s.sandbox = ANY (ARRAY[p_sandbox]) FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN CASE WHEN EXISTS (SELECT 1 FROM sandboxes s WHERE s.sandbox = ANY (ARRAY[p_sandbox]))
                    THEN 'busy' ELSE 'missing_obligation' END;
    ELSIF v_row.confirmed_at IS NOT NULL THEN
        RETURN 'already_completed';
    ELSIF v_row.lease_token IS DISTINCT FROM p_token THEN
        RETURN 'lease_lost';
    ELSIF v_row.routing_domain <> nullif(p_routing_domain, '') THEN
        RETURN 'wrong_routing_domain';
    END IF;
    v_now := clock();
    UPDATE sandboxes s
       SET confirmed_at = v_now, accepted_at = coalesce(s.accepted_at, v_now), due_at = 'infinity',
           lease_expires_at = NULL, last_error = NULL,
           routing_domain = coalesce(s.routing_domain, nullif(p_routing_domain, ''))
     WHERE s.sandbox = ANY (ARRAY[p_sandbox]);
    PERFORM tell_sandbox_event(v_row, 'delete_confirmed', p_outcome, p_routing_domain, v_now);
    UPDATE billing_jobs b SET due_at = v_now WHERE b.run_id = ANY (ARRAY[v_row.run_id]);
    RETURN 'completed';
END
$$;

-- Hands obligations back: due again in p_delay_s, or blocked (p_block_reason not NULL) until an operator decides. An
-- error is counted; none (p_error NULL) says that the provider needs more time. Not ours any more: nothing happens.
CREATE OR REPLACE FUNCTION @schema@.postpone_cleanup(
    p_sandbox text, p_token bigint, p_delay_s double precision, p_error text, p_block_reason text
) RETURNS void
LANGUAGE sql
@seek@
AS $$
    UPDATE sandboxes s
       SET lease_expires_at = NULL,
           due_at = CASE WHEN p_block_reason IS NULL THEN clock() + make_interval(secs => p_delay_s) ELSE 'infinity' END,
           failures = s.failures + (p_error IS NOT NULL)::integer,
           last_error = coalesce(p_error, s.last_error), block_reason = p_block_reason
     WHERE s.sandbox = ANY (ARRAY[p_sandbox]) AND s.lease_token = p_token AND s.confirmed_at IS NULL
$$;

-- An operator's verb: lets a blocked obligation be tried again. True if it was blocked.
CREATE OR REPLACE FUNCTION @schema@.retry_cleanup(p_sandbox text) RETURNS boolean
LANGUAGE plpgsql
@seek@
AS $$
BEGIN
    UPDATE sandboxes s SET block_reason = NULL, due_at = clock(), tries = 0, failures = 0
     WHERE s.sandbox = ANY (ARRAY[p_sandbox]) AND s.block_reason IS NOT NULL AND s.confirmed_at IS NULL;
    RETURN FOUND;
END
$$;

-- Which of these names have no obligation here: sandboxes at a provider that nobody answers for.
CREATE OR REPLACE FUNCTION @schema@.unknown_sandboxes(p_sandboxes text[]) RETURNS SETOF text
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT i.sandbox FROM unnest(p_sandboxes) AS i (sandbox)
     WHERE NOT EXISTS (SELECT 1 FROM sandboxes s WHERE s.sandbox = ANY (ARRAY[i.sandbox]) AND s.confirmed_at IS NULL)
$$;

-- One page of sandboxes, newest name first: of a run, or of everybody; open ones only, or all.
CREATE OR REPLACE FUNCTION @schema@.list_sandboxes(p_run_id text, p_open boolean, p_limit integer, p_after text)
RETURNS SETOF @schema@.sandboxes
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT s.* FROM sandboxes s
     WHERE s.sandbox < coalesce(p_after, '~') AND (p_run_id IS NULL OR s.run_id = p_run_id)
       AND (NOT p_open OR s.confirmed_at IS NULL)
     ORDER BY s.sandbox DESC LIMIT p_limit
$$;
