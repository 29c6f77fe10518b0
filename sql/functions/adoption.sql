-- adoption: obligations that an older generation of workers keeps in a table of its own, which knows no provider.
--
-- Each open one is copied here, once, or marked as deleted there if it is proven that its sandbox is gone. Those workers
-- may still write that table, and work on what is in it: nothing is created or deleted there, and a row is touched only
-- to end it. A copy and its original may both be tried; a deletion may be asked for twice.
--
-- Lock order: our sandbox rows, then rows of the older table, all SKIP LOCKED: what an older worker holds waits for the
-- next pass. Nothing in here waits for one of its rows, so neither can be part of a deadlock.
-- Fences: the name of a copy, derived from everything that the obligation was filed under, so that it is made once,
-- whatever is learned about it later; and the place (ctid) of the older row, which is another one after any change.
--
-- Table names come from an operator. They become a regclass before they get into a statement. One without a schema is
-- looked for in ours.

-- The older table; NULL: there is none. Asked each time, because it may come and go.
CREATE OR REPLACE FUNCTION @schema@.old_table(p_table text) RETURNS regclass
LANGUAGE plpgsql STABLE
@lookup@
AS $$
DECLARE
    v_table CONSTANT regclass := to_regclass(p_table);
BEGIN
    IF (SELECT c.relkind FROM pg_class c WHERE c.oid = v_table) <> 'r' THEN
        RAISE EXCEPTION '% is no ordinary table', p_table USING ERRCODE = '42809';  -- its rows have no place
    END IF;
    RETURN v_table;
END
$$;

-- Whether anything is open there: two seeks in an index that begins with the status, or in one of the open rows only.
CREATE OR REPLACE FUNCTION @schema@.old_table_open(p_table regclass) RETURNS boolean
LANGUAGE plpgsql STABLE
@lookup@
AS $$
DECLARE
    v_open boolean;
BEGIN
    EXECUTE format($old$
        SELECT EXISTS (SELECT 1 FROM %1$s l WHERE l.status < 'deleted') OR EXISTS (SELECT 1 FROM %1$s l WHERE l.status > 'deleted')
    $old$, p_table) INTO v_open;
    RETURN v_open;
END
$$;

-- Our name of a copy. What tells two obligations apart is in it, absent values too.
CREATE OR REPLACE FUNCTION @schema@.adopted_name(
    p_provider text, p_sandbox_id text, p_run_id text, p_attempt integer, p_environment text, p_routing_domain text
) RETURNS text
LANGUAGE sql IMMUTABLE
AS $$
    SELECT 'adopted:' || p_provider || ':' || left(p_sandbox_id, 128) || ':' || left(md5(
               quote_literal(p_provider) || ',' || quote_literal(p_sandbox_id) || ',' || quote_literal(p_run_id) || ','
               || p_attempt || ',' || quote_nullable(p_environment) || ',' || quote_nullable(p_routing_domain)), 16)
$$;

-- The open obligations of the older table, and where each stands:
--   place      where its row is, in this version
--   leased     an older worker is at it
--   known      there is an obligation of ours for it, filed alike
--   gone_at    proven: its sandbox is gone, since then
--   fault      what is wrong with the row: nothing can be made of it
--
-- The proof is a confirmed obligation of ours of the same provider, sandbox, run, attempt and environment, that also
--   is the copy of this very row, or
--   has the same routing domain, or none like it, or
--   was filed without one, as the row is, and its event says that it was deleted (not: that it was absent, which only
--   tells of the place that was looked at) in the domain that is known now.
-- The event alone proves nothing.
CREATE OR REPLACE FUNCTION @schema@.old_obligations(p_table regclass, p_provider text)
RETURNS TABLE (
    place tid, sandbox text, sandbox_id text, run_id text, attempt integer, environment text, routing_domain text,
    tries integer, failures integer, created_at timestamptz, due_at timestamptz, last_error text, block_reason text,
    leased boolean, known boolean, gone_at timestamptz, fault text
)
LANGUAGE plpgsql STABLE
@lookup@
AS $$
BEGIN
    RETURN QUERY EXECUTE format($old$
        SELECT o.place, o.sandbox, o.sandbox_id, o.run_id, o.attempt, o.environment, o.routing_domain, o.tries, o.failures,
               o.created_at, o.due_at, o.last_error, o.block_reason, o.leased, coalesce(f.known, false), f.gone_at, o.fault
          FROM (SELECT i.*, adopted_name($1, i.sandbox_id, i.run_id, i.attempt, i.environment, i.routing_domain) AS sandbox,
                       CASE WHEN coalesce(i.sandbox_id, '') = '' THEN 'no sandbox id'
                            WHEN coalesce(i.run_id, '') = '' THEN 'no run id'
                            WHEN length(i.run_id) > 255 THEN 'a run id of more than 255 characters'
                            WHEN i.attempt IS NULL THEN 'no attempt, or one out of range' END AS fault
                  FROM (SELECT l.ctid AS place, l.sandbox_id::text COLLATE "C" AS sandbox_id,
                               l.run_id::text COLLATE "C" AS run_id,
                               CASE WHEN l.attempt BETWEEN 0 AND 2147483647 THEN l.attempt::integer END AS attempt,
                               l.environment::text AS environment, nullif(l.routing_domain::text, '') AS routing_domain,
                               least(greatest(l.attempt_count, 0), 2147483647)::integer AS tries,
                               least(greatest(l.failure_count, 0), 2147483647)::integer AS failures,
                               coalesce(l.created_at, $2)::timestamptz AS created_at,
                               CASE WHEN l.status::text = 'blocked' OR l.blocked_at IS NOT NULL THEN 'infinity'
                                    WHEN isfinite(l.available_at) THEN l.available_at ELSE $2 END::timestamptz AS due_at,
                               l.last_error::text AS last_error,
                               CASE WHEN l.status::text = 'blocked' OR l.blocked_at IS NOT NULL
                                    THEN coalesce(l.block_reason::text, 'an older worker blocked it') END AS block_reason,
                               coalesce(l.lease_expires_at > $2, false) AS leased
                          FROM %s l
                         WHERE l.status < 'deleted' OR l.status > 'deleted') i) o
          LEFT JOIN LATERAL (
                SELECT bool_or(s.confirmed_at IS NULL AND s.routing_domain IS NOT DISTINCT FROM o.routing_domain) AS known,
                       coalesce(min(s.accepted_at) FILTER (
                                    WHERE s.confirmed_at IS NOT NULL
                                      AND (s.sandbox = o.sandbox OR s.routing_domain IS NOT DISTINCT FROM o.routing_domain)),
                                min(s.accepted_at) FILTER (
                                    WHERE s.confirmed_at IS NOT NULL AND o.routing_domain IS NULL
                                      AND EXISTS (SELECT 1 FROM sandbox_events e
                                                   WHERE e.event_id = ANY (ARRAY[s.sandbox || ':delete_confirmed'])
                                                     AND e.routing_domain IS NULL AND e.details ->> 'outcome' = 'deleted'
                                                     AND e.details ->> 'routing_domain' = s.routing_domain))) AS gone_at
                  FROM sandboxes s
                 WHERE s.run_id = ANY (ARRAY[o.run_id]) AND s.attempt = o.attempt AND s.provider = $1
                   AND s.provider_id = o.sandbox_id AND s.environment IS NOT DISTINCT FROM o.environment) f
            ON o.fault IS NULL
    $old$, p_table) USING p_provider, clock();
END
$$;

-- One pass: ends what is proven to be gone, there and in our copy, and copies the rest, up to p_limit rows. A row under a
-- live lease is left to the worker that has it, unless it is proven to be gone. What was blocked is copied as blocked.
-- There was no sandbox of ours: a copy has no custody, so nothing is ever billed for it.
-- found: there is such a table. malformed: open rows of which nothing can be made. Safe to repeat.
CREATE OR REPLACE FUNCTION @schema@.adopt_obligations(p_table text, p_provider text, p_limit integer)
RETURNS TABLE (found boolean, settled integer, copied integer, malformed integer)
LANGUAGE plpgsql
@lookup@
SET lock_timeout = '2s'
AS $$
#variable_conflict use_column
DECLARE
    v_table regclass;
    v_open  boolean := false;
BEGIN
    PERFORM require_read_committed();
    v_table := old_table(p_table);
    IF v_table IS NOT NULL THEN
        v_open := old_table_open(v_table);
        IF v_open IS NULL THEN
            RAISE EXCEPTION 'whether anything is open in % was not answered', p_table;
        END IF;
    END IF;
    IF NOT v_open THEN
        RETURN QUERY SELECT v_table IS NOT NULL, 0, 0, 0;
        RETURN;
    END IF;

    RETURN QUERY EXECUTE format($old$
        WITH old AS MATERIALIZED (
            SELECT * FROM old_obligations($1, $2)
        ), todo AS MATERIALIZED (
            SELECT * FROM old o
             WHERE o.fault IS NULL AND (o.gone_at IS NOT NULL OR NOT (o.known OR o.leased))
             LIMIT $3
        ), ended AS (
            UPDATE sandboxes s
               SET confirmed_at = $4, accepted_at = coalesce(s.accepted_at, d.gone_at), due_at = 'infinity',
                   lease_expires_at = NULL, last_error = NULL
              FROM (SELECT x.sandbox, t.gone_at
                      FROM todo t JOIN sandboxes x ON x.sandbox = ANY (ARRAY[t.sandbox])
                     WHERE t.gone_at IS NOT NULL AND x.confirmed_at IS NULL
                       FOR NO KEY UPDATE OF x SKIP LOCKED) d
             WHERE s.sandbox = ANY (ARRAY[d.sandbox])
            RETURNING s.sandbox
        ), held AS MATERIALIZED (
            -- The count is read first: ours are locked before theirs.
            SELECT t.*
              FROM (SELECT count(*) AS n FROM ended) ours, todo t JOIN %1$s l ON l.ctid = t.place
             WHERE ours.n >= 0
               FOR NO KEY UPDATE OF l SKIP LOCKED
        ), settled AS (
            UPDATE %1$s l
               SET status = 'deleted', deleted_at = h.gone_at, lease_owner = NULL, lease_expires_at = NULL,
                   last_error = NULL, updated_at = $4
              FROM held h WHERE l.ctid = h.place AND h.gone_at IS NOT NULL
            RETURNING 1
        ), copied AS (
            INSERT INTO sandboxes (sandbox, provider, provider_id, run_id, attempt, environment, routing_domain, created_at,
                                   certain_at, wanted_at, due_at, tries, failures, last_error, block_reason)
            -- It has an id, so it has come into being: that it is absent is certain from now on.
            SELECT h.sandbox, $2, h.sandbox_id, h.run_id, h.attempt, h.environment, h.routing_domain, h.created_at,
                   $4, h.created_at, h.due_at, h.tries, h.failures, h.last_error, h.block_reason
              FROM held h WHERE h.gone_at IS NULL
             ORDER BY h.sandbox
            ON CONFLICT DO NOTHING
            RETURNING 1
        )
        SELECT true, (SELECT count(*) FROM settled)::integer, (SELECT count(*) FROM copied)::integer,
               (SELECT count(*) FROM old o WHERE o.fault IS NOT NULL)::integer
    $old$, v_table) USING v_table, p_provider, p_limit, clock();
END
$$;

-- confirm_deletion, and in the same transaction the end of the older row that was filed alike. If that cannot be had now
-- (locked, or the older table refuses), ours is confirmed all the same: it is the proof for the next pass, which also
-- reports what is wrong with the table.
CREATE OR REPLACE FUNCTION @schema@.confirm_adopted(
    p_table text, p_sandbox text, p_token bigint, p_outcome text, p_routing_domain text
) RETURNS text
LANGUAGE plpgsql
@lookup@
SET lock_timeout = '2s'
AS $$
DECLARE
    v_answer text;
    v_row    sandboxes%ROWTYPE;
    v_filed  text;
BEGIN
    v_answer := confirm_deletion(p_sandbox, p_token, p_outcome, p_routing_domain);
    IF v_answer <> 'completed' THEN
        RETURN v_answer;
    END IF;
    SELECT * INTO v_row FROM sandboxes s WHERE s.sandbox = ANY (ARRAY[p_sandbox]);
    SELECT e.routing_domain INTO v_filed FROM sandbox_events e
     WHERE e.event_id = ANY (ARRAY[p_sandbox || ':delete_confirmed']);
    BEGIN
        IF old_table(p_table) IS NOT NULL THEN
            EXECUTE format($old$
                UPDATE %1$s l
                   SET status = 'deleted', deleted_at = coalesce(l.deleted_at, $6), lease_owner = NULL,
                       lease_expires_at = NULL, last_error = NULL, updated_at = $7
                  FROM (SELECT x.ctid AS place FROM %1$s x
                         WHERE x.sandbox_id = $1 AND x.run_id = $2 AND x.attempt = $3
                           AND x.environment IS NOT DISTINCT FROM $4 AND nullif(x.routing_domain, '') IS NOT DISTINCT FROM $5
                           AND (x.status < 'deleted' OR x.status > 'deleted')
                           FOR NO KEY UPDATE SKIP LOCKED) h
                 WHERE l.ctid = h.place
            $old$, old_table(p_table))
            USING v_row.provider_id, v_row.run_id, v_row.attempt, v_row.environment, v_filed, v_row.accepted_at, clock();
        END IF;
    EXCEPTION WHEN OTHERS THEN
        NULL;
    END;
    RETURN v_answer;
END
$$;

-- What a pass would find, for an operator. Changes nothing. `missing`: columns and rights without which nothing can be
-- done; then nothing is counted. `indexed`: whether asking if anything is open is a seek. One row.
CREATE OR REPLACE FUNCTION @schema@.preview_adoption(p_table text, p_provider text, p_most integer)
RETURNS TABLE (
    found boolean, missing text[], indexed boolean, open bigint, proven bigint, to_copy bigint, under_way bigint,
    leased bigint, malformed bigint, faults text[]
)
LANGUAGE plpgsql STABLE
@lookup@
AS $$
#variable_conflict use_column
DECLARE
    v_table   CONSTANT regclass := old_table(p_table);
    v_missing text[];
BEGIN
    SELECT array_agg('column ' || w.name) INTO v_missing
      FROM unnest(ARRAY['sandbox_id', 'run_id', 'attempt', 'environment', 'routing_domain', 'status', 'attempt_count',
                        'failure_count', 'available_at', 'last_error', 'created_at', 'updated_at', 'blocked_at',
                        'block_reason', 'lease_owner', 'lease_expires_at', 'deleted_at']) AS w (name)
     WHERE v_table IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM pg_attribute a
                        WHERE a.attrelid = v_table AND a.attname = w.name AND NOT a.attisdropped);
    SELECT v_missing || array_agg('right to ' || w.name) INTO v_missing
      FROM unnest(ARRAY['SELECT', 'UPDATE']) AS w (name)
     WHERE NOT has_table_privilege(v_table, w.name);
    IF v_table IS NULL OR v_missing IS NOT NULL THEN
        RETURN QUERY SELECT v_table IS NOT NULL, v_missing, NULL::boolean, NULL::bigint, NULL::bigint, NULL::bigint,
                            NULL::bigint, NULL::bigint, NULL::bigint, NULL::text[];
        RETURN;
    END IF;
    RETURN QUERY
    SELECT true, v_missing,
           EXISTS (SELECT 1 FROM pg_index i
                     JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
                    WHERE i.indrelid = v_table AND i.indisvalid
                      AND CASE WHEN i.indpred IS NULL THEN a.attname = 'status'
                               ELSE pg_get_expr(i.indpred, i.indrelid) LIKE '%status <> ''deleted''%' END),
           count(*),
           count(*) FILTER (WHERE o.gone_at IS NOT NULL),
           count(*) FILTER (WHERE o.fault IS NULL AND o.gone_at IS NULL AND NOT o.known AND NOT o.leased),
           count(*) FILTER (WHERE o.gone_at IS NULL AND o.known),
           count(*) FILTER (WHERE o.fault IS NULL AND o.gone_at IS NULL AND NOT o.known AND o.leased),
           count(*) FILTER (WHERE o.fault IS NOT NULL),
           (array_agg(format('ctid %s, sandbox %s, run %s: %s', o.place, quote_nullable(o.sandbox_id),
                             quote_nullable(o.run_id), o.fault)) FILTER (WHERE o.fault IS NOT NULL))[1:p_most]
      FROM old_obligations(v_table, p_provider) o;
END
$$;
