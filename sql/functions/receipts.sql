-- receipts: what became of the steps of a run, by key, in sets over many runs.
--
-- claimed, queued, running: somebody holds it. completed, skipped: final. failed: recorded, and final if it was
-- declared so; else it stands until the run itself is retried, which gives the step another chance. released: nobody
-- holds it. A claim takes what is absent, released, failed and due for another chance, or held by a dead holder.
--
-- Lock order: receipt rows, SKIP LOCKED. Run rows are read and never locked: a lock that kept off the next attempt
-- would keep off renewals, too. Whoever inserts takes a transaction-level advisory lock of the run, *tried*: an insert
-- would otherwise wait for another one of the same key that is not committed yet. What is known is not inserted.
--
-- Fence: the run's live lease (attempt, token), and on the receipt its holder (attempt, lease). Why no stale
-- completion lands after a newer attempt has claimed a receipt, although the run's row is not locked:
--
--   * A write to a receipt asks that its holder be the caller, on the locked row. A claim by a newer attempt changes
--     the holder. Whichever of the two comes second finds the row locked (busy, and on asking again the result of the
--     first) or changed (lost). A receipt's attempt never goes down.
--   * A statement that saw the run's lease alive may commit after a newer attempt has claimed the run, but not after
--     that attempt has claimed this receipt. Nobody can tell the difference from its having committed before.
--   * A key that is not there yet is inserted under the advisory lock; a newer attempt's claim finds it and takes it
--     over, or was there first.
--
-- Plans: lookups of a key carry OFFSET 0 where a join could be made of them.
--
-- Lost answers: the holder (attempt, lease) is the natural key of a claim, together with the outcome that of an end.

-- Claims receipts. Positions answer in `ord`, from 1.
--
--   p_leases    who claims, within the attempt: its token, or another number where several share an attempt
--   p_leases_s  seconds after which another holder of the same attempt may take it; NULL: while the attempt lives
--
-- answer: claimed (run the function) | completed, skipped, failed (recorded: output, error) | conflict (recorded for
-- another function) | held (by another holder of this attempt) | busy (ask again) | lost (the fence is gone) | rest
-- (recorded, but more than 8 MiB of outputs come before it in this answer: ask again).
CREATE OR REPLACE FUNCTION @schema@.claim_receipts(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_keys text[], p_functions text[], p_leases bigint[],
    p_leases_s double precision[]
) RETURNS TABLE (ord integer, answer text, function text, tries integer, output jsonb, error jsonb)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now  timestamptz;
    v_free boolean[];  -- per item: the fence holds, and nobody else inserts for this run
    v_made integer;
BEGIN
    PERFORM require_read_committed();

    SELECT array_agg(CASE WHEN r.run_id IS NOT NULL
                          THEN pg_try_advisory_xact_lock(hashtextextended('@schema@' || E'\x1f' || r.run_id, 3))
                          ELSE false END ORDER BY i.ord)
      INTO v_free
      FROM unnest(p_run_ids, p_attempts, p_tokens) WITH ORDINALITY AS i (run_id, attempt, token, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                      AND r.attempt = i.attempt AND r.lease_token = i.token;
    v_now := clock();

    WITH made AS (
        INSERT INTO receipts (created_at, lease, attempt, tries, run_failures, final, claimed_at, lease_expires_at,
                              run_id, key, state, function)
        SELECT v_now, i.lease, i.attempt, 1, 0, false, v_now, v_now + make_interval(secs => i.lease_s),
               i.run_id, i.key, 'claimed', i.function
          FROM unnest(p_run_ids, p_attempts, p_keys, p_functions, p_leases, p_leases_s, v_free)
               AS i (run_id, attempt, key, function, lease, lease_s, free)
         WHERE i.free AND NOT EXISTS (SELECT 1 FROM receipts c
                                       WHERE c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key OFFSET 0)
        ON CONFLICT DO NOTHING
        RETURNING 1
    )
    SELECT count(*) INTO v_made FROM made;

    IF v_made = cardinality(p_run_ids) THEN
        RETURN QUERY SELECT i.ord::integer, 'claimed'::text, i.function, 1, NULL::jsonb, NULL::jsonb
                       FROM unnest(p_functions) WITH ORDINALITY AS i (function, ord);
        RETURN;
    END IF;

    WITH free AS (
        SELECT i.*, r.failures
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_keys, p_functions, p_leases, p_leases_s)
               AS i (run_id, attempt, token, key, function, lease, lease_s)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                     AND r.attempt = i.attempt AND r.lease_token = i.token
          JOIN receipts c ON c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key
         WHERE receipt_claimable(c, i.attempt, i.lease, r.failures, v_now)
           FOR NO KEY UPDATE OF c SKIP LOCKED
    )
    UPDATE receipts c
       SET lease = i.lease, attempt = i.attempt, tries = c.tries + 1, claimed_at = v_now, finished_at = NULL,
           heartbeat_at = NULL, lease_expires_at = v_now + make_interval(secs => i.lease_s),
           state = 'claimed', function = i.function, error = NULL
      FROM free i
     WHERE c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key
       AND receipt_claimable(c, i.attempt, i.lease, i.failures, v_now);

    RETURN QUERY
    WITH found AS (
        SELECT i.ord::integer AS ord,
               CASE WHEN r.run_id IS NULL THEN 'lost'
                    WHEN c.run_id IS NULL OR receipt_claimable(c, i.attempt, i.lease, r.failures, v_now) THEN 'busy'
                    WHEN c.finished_at IS NOT NULL
                    THEN CASE c.function WHEN i.function THEN c.state ELSE 'conflict' END
                    WHEN c.lease = i.lease THEN 'claimed'
                    ELSE 'held' END AS answer,
               c.function, c.tries, c.output, c.error,
               sum(pg_column_size(c.output)) OVER (
                   ORDER BY i.ord ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_keys, p_functions, p_leases) WITH ORDINALITY
               AS i (run_id, attempt, token, key, function, lease, ord)
          LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                          AND r.attempt = i.attempt AND r.lease_token = i.token
          LEFT JOIN receipts c ON r.run_id IS NOT NULL AND c.run_id = ANY (ARRAY[i.run_id])
                              AND c.key = i.key
    )
    SELECT f.ord, CASE WHEN f.before > 8388608 AND f.output IS NOT NULL THEN 'rest' ELSE f.answer END,
           f.function, f.tries, CASE WHEN f.before > 8388608 THEN NULL ELSE f.output END, f.error
      FROM found f;
END
$$;

-- Whether a live attempt, whose run has failed p_failures times, may take this receipt.
CREATE OR REPLACE FUNCTION @schema@.receipt_claimable(
    p_receipt @schema@.receipts, p_attempt integer, p_lease bigint, p_failures integer, p_now timestamptz
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT NOT p_receipt.final
       AND CASE WHEN p_receipt.state = 'failed' THEN p_receipt.run_failures < p_failures
                WHEN p_receipt.state = 'released' OR p_receipt.attempt < p_attempt THEN true
                ELSE p_receipt.lease <> p_lease AND coalesce(p_receipt.lease_expires_at <= p_now, false) END
$$;

-- Ends what is held. p_outcomes, per item:
--
--   completed   payload is the output
--   skipped     the same, without the function having run
--   failed      payload is the error; stands until the run is retried
--   fatal       payload is the error; final
--   released    claimable at once
--
--   p_tries     calls of the function beyond the first since the claim
--   p_functions NULL for what was claimed. Else the receipt need not be there: it is inserted as ended, for this
--               function ("cache insert"), or taken over from a dead attempt
--   p_outputs   answer with what is stored now
--
-- answer: done | busy (ask again) | lost (the fence is gone, or somebody else holds or held it).
--
-- A live attempt that would change a final receipt, other than by asking again what made it final, is refused with
-- the whole call: nothing of it is written (SQLSTATE RL006, with the key as detail).
CREATE OR REPLACE FUNCTION @schema@.settle_receipts(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_keys text[], p_leases bigint[], p_outcomes text[],
    p_payloads jsonb[], p_tries integer[], p_functions text[], p_outputs boolean
) RETURNS TABLE (ord integer, answer text, output jsonb)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz;
    v_free  boolean[];
    v_made  integer := 0;
    v_ended integer;
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    IF num_nonnulls(VARIADIC p_functions) > 0 THEN
        SELECT array_agg(CASE WHEN r.run_id IS NOT NULL
                              THEN pg_try_advisory_xact_lock(hashtextextended('@schema@' || E'\x1f' || r.run_id, 3))
                              ELSE false END ORDER BY i.ord)
          INTO v_free
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_functions) WITH ORDINALITY
               AS i (run_id, attempt, token, function, ord)
          LEFT JOIN runs r ON i.function IS NOT NULL AND r.run_id = ANY (ARRAY[i.run_id])
                          AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token;

        WITH made AS (
            INSERT INTO receipts (created_at, lease, attempt, tries, run_failures, final, claimed_at, finished_at,
                                  run_id, key, state, function, output, error)
            SELECT v_now, i.lease, i.attempt, 0, r.failures, i.outcome IN ('completed', 'skipped', 'fatal'), v_now,
                   CASE WHEN i.outcome <> 'released' THEN v_now END,
                   i.run_id, i.key, CASE i.outcome WHEN 'fatal' THEN 'failed' ELSE i.outcome END, i.function,
                   CASE WHEN i.outcome IN ('completed', 'skipped') THEN i.payload END,
                   CASE WHEN i.outcome IN ('failed', 'fatal') THEN i.payload END
              FROM unnest(p_run_ids, p_attempts, p_tokens, p_keys, p_leases, p_outcomes, p_payloads, p_functions, v_free)
                   AS i (run_id, attempt, token, key, lease, outcome, payload, function, free)
              JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                         AND r.attempt = i.attempt AND r.lease_token = i.token
             WHERE i.free AND NOT EXISTS (SELECT 1 FROM receipts c
                                           WHERE c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key OFFSET 0)
            ON CONFLICT DO NOTHING
            RETURNING 1
        )
        SELECT count(*) INTO v_made FROM made;
    END IF;

    WITH free AS (
        SELECT i.*, r.failures
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_keys, p_leases, p_outcomes, p_payloads, p_tries, p_functions)
               AS i (run_id, attempt, token, key, lease, outcome, payload, tries, function)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                     AND r.attempt = i.attempt AND r.lease_token = i.token
          JOIN receipts c ON c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key
         WHERE c.state IN ('claimed', 'queued', 'running')
           AND (c.attempt = i.attempt AND c.lease = i.lease OR i.function IS NOT NULL AND c.attempt < i.attempt)
           FOR NO KEY UPDATE OF c SKIP LOCKED
    ), ended AS (
        UPDATE receipts c
           SET lease = i.lease, attempt = i.attempt, tries = c.tries + i.tries, run_failures = i.failures,
               final = i.outcome IN ('completed', 'skipped', 'fatal'),
               finished_at = CASE WHEN i.outcome <> 'released' THEN v_now END,
               lease_expires_at = NULL,
               state = CASE i.outcome WHEN 'fatal' THEN 'failed' ELSE i.outcome END,
               function = coalesce(i.function, c.function),
               output = CASE WHEN i.outcome IN ('completed', 'skipped') THEN i.payload END,
               error = CASE WHEN i.outcome IN ('failed', 'fatal') THEN i.payload END
          FROM free i
         WHERE c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key
           AND c.state IN ('claimed', 'queued', 'running')
           AND (c.attempt = i.attempt AND c.lease = i.lease OR i.function IS NOT NULL AND c.attempt < i.attempt)
        RETURNING 1
    )
    SELECT count(*) INTO v_ended FROM ended;

    IF v_made + v_ended = cardinality(p_run_ids) AND NOT p_outputs THEN
        RETURN QUERY SELECT i::integer, 'done'::text, NULL::jsonb FROM generate_series(1, v_made + v_ended) AS i;
        RETURN;
    END IF;

    PERFORM refuse_final_receipts(p_run_ids, p_attempts, p_tokens, p_keys, p_leases, p_outcomes);

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN receipt_ended_by(c, i.attempt, i.lease, i.outcome) THEN 'done'
                WHEN r.run_id IS NULL THEN 'lost'
                WHEN c.run_id IS NULL AND i.function IS NOT NULL THEN 'busy'
                WHEN c.state IN ('claimed', 'queued', 'running')
                 AND (c.attempt = i.attempt AND c.lease = i.lease OR i.function IS NOT NULL AND c.attempt < i.attempt)
                THEN 'busy'
                ELSE 'lost' END,
           CASE WHEN p_outputs THEN c.output END
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_keys, p_leases, p_outcomes, p_functions) WITH ORDINALITY
           AS i (run_id, attempt, token, key, lease, outcome, function, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                      AND r.attempt = i.attempt AND r.lease_token = i.token
      LEFT JOIN receipts c ON c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key;
END
$$;

-- Says of what is held that it is queued or running (p_states; NULL: only that somebody is at it). Each is a
-- heartbeat, and extends a lease of its own by p_leases_s.
--
-- Answers, and refuses, as settle_receipts.
CREATE OR REPLACE FUNCTION @schema@.mark_receipts(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_keys text[], p_leases bigint[], p_states text[],
    p_leases_s double precision[]
) RETURNS TABLE (ord integer, answer text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now    timestamptz;
    v_marked bigint[];
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    WITH free AS (
        SELECT i.*
          FROM unnest(p_run_ids, p_attempts, p_tokens, p_keys, p_leases, p_states, p_leases_s) WITH ORDINALITY
               AS i (run_id, attempt, token, key, lease, state, lease_s, ord)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                     AND r.attempt = i.attempt AND r.lease_token = i.token
          JOIN receipts c ON c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key
         WHERE c.state IN ('claimed', 'queued', 'running') AND c.attempt = i.attempt AND c.lease = i.lease
           FOR NO KEY UPDATE OF c SKIP LOCKED
    ), marked AS (
        UPDATE receipts c
           SET state = coalesce(i.state, c.state),
               heartbeat_at = greatest(v_now, c.heartbeat_at + interval '1 microsecond'),
               lease_expires_at = greatest(c.lease_expires_at, v_now + make_interval(secs => i.lease_s))
          FROM free i
         WHERE c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key
           AND c.state IN ('claimed', 'queued', 'running') AND c.attempt = i.attempt AND c.lease = i.lease
        RETURNING i.ord
    )
    SELECT coalesce(array_agg(ord), '{}') INTO v_marked FROM marked;

    IF cardinality(v_marked) < cardinality(p_run_ids) THEN
        PERFORM refuse_final_receipts(p_run_ids, p_attempts, p_tokens, p_keys, p_leases, p_states);
    END IF;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN i.ord = ANY (v_marked) THEN 'done'
                WHEN r.run_id IS NOT NULL AND c.state IN ('claimed', 'queued', 'running')
                 AND c.attempt = i.attempt AND c.lease = i.lease THEN 'busy'
                ELSE 'lost' END
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_keys, p_leases) WITH ORDINALITY
           AS i (run_id, attempt, token, key, lease, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                      AND r.attempt = i.attempt AND r.lease_token = i.token
      LEFT JOIN receipts c ON c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key;
END
$$;

-- Whether this very call has ended the receipt before.
CREATE OR REPLACE FUNCTION @schema@.receipt_ended_by(
    p_receipt @schema@.receipts, p_attempt integer, p_lease bigint, p_outcome text
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT p_receipt.attempt = p_attempt AND p_receipt.lease = p_lease
       AND p_receipt.state = CASE p_outcome WHEN 'fatal' THEN 'failed' ELSE p_outcome END
       AND p_receipt.final = (p_outcome IN ('completed', 'skipped', 'fatal'))
$$;

-- Refuses the whole call of a live attempt that would change a final receipt.
CREATE OR REPLACE FUNCTION @schema@.refuse_final_receipts(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_keys text[], p_leases bigint[], p_outcomes text[]
) RETURNS void
LANGUAGE plpgsql STABLE
@seek@
AS $$
DECLARE
    v_final record;
BEGIN
    SELECT c.run_id, c.key, c.state INTO v_final
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_keys, p_leases, p_outcomes)
           AS i (run_id, attempt, token, key, lease, outcome)
      JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                 AND r.attempt = i.attempt AND r.lease_token = i.token
      JOIN receipts c ON c.run_id = ANY (ARRAY[i.run_id]) AND c.key = i.key
     WHERE c.final AND receipt_ended_by(c, i.attempt, i.lease, i.outcome) IS NOT TRUE
     LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'step % of run % is % for good and cannot be changed',
            to_json(v_final.key), v_final.run_id, v_final.state USING ERRCODE = 'RL006', DETAIL = v_final.key;
    END IF;
END
$$;

-- One page of a run's receipts, by key.
CREATE OR REPLACE FUNCTION @schema@.read_receipts(
    p_run_id text, p_after text, p_limit integer, p_outputs boolean
) RETURNS TABLE (
    key text, function text, state text, final boolean, attempt integer, tries integer, created_at timestamptz,
    claimed_at timestamptz, heartbeat_at timestamptz, lease_expires_at timestamptz, finished_at timestamptz,
    output jsonb, error jsonb
)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT c.key, c.function, c.state, c.final, c.attempt, c.tries, c.created_at, c.claimed_at, c.heartbeat_at,
           c.lease_expires_at, c.finished_at, CASE WHEN p_outputs THEN c.output END, c.error
      FROM receipts c
     WHERE c.run_id = p_run_id AND c.key > p_after
     ORDER BY c.key LIMIT p_limit
$$;
