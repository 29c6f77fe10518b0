-- lanes: the outbox. A lane is a cursor with a lease over one run's log.
--
-- This text is loaded twice: once for the lifecycle lane, whose columns are on runs, once for the observability
-- lane, whose rows are in lanes. @lane@, @table@ and @number@ stand for what differs, and @bound@ for the last fact
-- that may travel with those before it, NULL for no such bound: a terminal that has a receiver of its own travels alone.
--
-- Whose turn it is, lane_receiver, follows from the cursor: it changes by itself when the cursor stands right before
-- such a terminal, so no transition has to hand a lane over.
--
-- Lock order: lane rows, SKIP LOCKED. A due time is an accelerator: a lane is taken only if it is pending, not
-- blocked and under no live lease, judged on the locked row. Fence of everything after the claim: lane_token.

-- Locks due lanes of these receivers up to a rank, the most urgent rank first, and answers their run ids. (p_except:
-- not these, although they are due.) On an
-- oldest-first turn ranks are visited by their longest waiter, so that no stream of urgent facts starves the rest.
-- quiet: some of them may begin with facts that have no effect.
CREATE OR REPLACE FUNCTION @schema@.@lane@_pick(
    p_receivers text[], p_limit integer, p_most_rank smallint, p_oldest boolean, p_except text[], p_now timestamptz,
    OUT ids text[], OUT quiet boolean
)
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_more record;
    v_head record;
BEGIN
    ids := '{}';
    quiet := false;
    FOR v_head IN
        SELECT e.receiver, k.rank
          FROM unnest(p_receivers) AS e (receiver)
         CROSS JOIN (VALUES (0::smallint), (1::smallint), (2::smallint), (3::smallint)) AS k (rank)
         CROSS JOIN LATERAL (
                SELECT l.lane_due_at FROM @table@ l
                 WHERE l.lane_receiver = e.receiver AND l.lane_rank = k.rank AND l.lane_pending AND l.lane_due_at <= p_now
                 ORDER BY l.lane_due_at LIMIT 1) h
         WHERE k.rank <= p_most_rank
         ORDER BY CASE WHEN p_oldest THEN 0 ELSE k.rank END, h.lane_due_at
    LOOP
        EXIT WHEN cardinality(ids) >= p_limit;
        SELECT array_agg(t.run_id) AS ids, bool_or(t.quiet) AS quiet INTO v_more
          FROM (SELECT l.run_id, l.quiet_seq > l.acked_seq AND l.frozen_seq IS NULL AS quiet FROM @table@ l
                 WHERE l.lane_receiver = v_head.receiver AND l.lane_rank = v_head.rank AND l.lane_pending
                   AND l.lane_due_at <= p_now
                   AND l.lane_error IS NULL AND (l.lane_expires_at IS NULL OR l.lane_expires_at <= p_now)
                   AND l.run_id <> ALL (p_except)
                 ORDER BY l.lane_due_at
                 LIMIT p_limit - cardinality(ids)
                   FOR NO KEY UPDATE SKIP LOCKED) t;
        ids := ids || coalesce(v_more.ids, '{}');
        quiet := quiet OR coalesce(v_more.quiet, false);
    END LOOP;
END
$$;

-- Moves the cursors of lanes that the caller has locked over leading facts without effect, which need no delivery.
-- Never inside a frozen prefix: that has been out, and comes back as it was. Answers those of the lanes that still
-- have something for these receivers. Facts passed so are in no report of lags: nobody received them.
CREATE OR REPLACE FUNCTION @schema@.@lane@_pass(p_ids text[], p_receivers text[]) RETURNS text[]
LANGUAGE plpgsql
@seek@
AS $$
BEGIN
    UPDATE @table@ l
       SET acked_seq = quiet_until(l.run_id, @number@::smallint, l.acked_seq, l.quiet_seq)
     WHERE l.run_id = ANY (p_ids) AND l.quiet_seq > l.acked_seq AND l.frozen_seq IS NULL
       AND quiet_until(l.run_id, @number@::smallint, l.acked_seq, l.quiet_seq) > l.acked_seq;
    RETURN ARRAY(SELECT l.run_id FROM @table@ l
                  WHERE l.run_id = ANY (p_ids) AND l.lane_pending AND l.lane_receiver = ANY (p_receivers));
END
$$;

-- The earliest due time of these receivers' lanes. One seek per receiver and rank.
CREATE OR REPLACE FUNCTION @schema@.@lane@_next_due(p_receivers text[]) RETURNS timestamptz
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT min(h.lane_due_at)
      FROM unnest(p_receivers) AS e (receiver)
     CROSS JOIN (VALUES (0::smallint), (1::smallint), (2::smallint), (3::smallint)) AS k (rank)
     CROSS JOIN LATERAL (
            SELECT l.lane_due_at FROM @table@ l
             WHERE l.lane_receiver = e.receiver AND l.lane_rank = k.rank AND l.lane_pending
             ORDER BY l.lane_due_at LIMIT 1) h
$$;

-- Claims lanes for one delivery turn and answers each one's prefix, facts in order. A prefix, once out, is
-- frozen: it comes back with the same members. Per prefix: `attempt` counts its deliveries, `generation` the skips of
-- its lane before it, `passed` the facts right before it which its receiver may not have: those without effect or, before
-- a terminal that goes elsewhere, all.
-- Always ends with one row with run_id NULL that carries next_due_s, of all ranks, as claim_runs does.
CREATE OR REPLACE FUNCTION @schema@.@lane@_claim(
    p_receivers text[], p_token bigint, p_limit integer, p_prefix integer, p_lease_s double precision,
    p_most_rank smallint, p_oldest boolean, p_except text[]
) RETURNS TABLE (
    run_id text, receiver text, attempt integer, generation integer, passed integer, seqs integer[], types text[],
    payloads jsonb[], created_ats timestamptz[], next_due_s double precision
)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now  CONSTANT timestamptz := clock();
    v_pick record;
    v_ids  text[];
BEGIN
    PERFORM require_read_committed();
    v_pick := @lane@_pick(p_receivers, p_limit, p_most_rank, p_oldest, p_except, v_now);
    v_ids := CASE WHEN v_pick.quiet THEN @lane@_pass(v_pick.ids, p_receivers) ELSE v_pick.ids END;

    RETURN QUERY
    WITH claimed AS (
        UPDATE @table@ l
           SET lane_token = p_token, lane_expires_at = v_now + make_interval(secs => p_lease_s),
               lane_due_at = v_now + make_interval(secs => p_lease_s),
               lane_attempts = l.lane_attempts + 1,
               frozen_seq = coalesce(l.frozen_seq, least(l.last_seq, l.acked_seq + p_prefix, nullif(@bound@, l.acked_seq)))
         WHERE l.run_id = ANY (v_ids)
        RETURNING l.run_id, l.lane_receiver, l.lane_attempts, l.lane_skips, l.acked_seq, l.frozen_seq, l.quiet_seq,
                  (@bound@) = l.acked_seq AS elsewhere
    )
    SELECT c.run_id, c.lane_receiver, c.lane_attempts, c.lane_skips::integer,
           CASE WHEN c.elsewhere THEN c.acked_seq
                WHEN c.quiet_seq >= c.acked_seq THEN quiet_before(c.run_id, @number@::smallint, c.acked_seq) ELSE 0 END,
           p.seqs, p.types, p.payloads, p.created_ats, NULL::double precision
      FROM claimed c
     CROSS JOIN LATERAL prefix_of(c.run_id, @number@::smallint, c.acked_seq, c.frozen_seq) p;

    RETURN QUERY
    SELECT NULL::text, NULL::text, NULL::integer, NULL::integer, NULL::integer, NULL::integer[], NULL::text[],
           NULL::jsonb[], NULL::timestamptz[],
           seconds_until(CASE WHEN cardinality(v_pick.ids) >= p_limit THEN v_now
                              ELSE @lane@_next_due(p_receivers) END, v_now);
END
$$;

-- The prefixes of lanes that are leased under these tokens, as a claim answers them. A lane that is not is left out.
CREATE OR REPLACE FUNCTION @schema@.@lane@_held(p_run_ids text[], p_tokens bigint[])
RETURNS TABLE (
    run_id text, receiver text, attempt integer, generation integer, passed integer, seqs integer[], types text[],
    payloads jsonb[], created_ats timestamptz[]
)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT l.run_id, l.lane_receiver, l.lane_attempts, l.lane_skips::integer,
           CASE WHEN (@bound@) = l.acked_seq THEN l.acked_seq
                WHEN l.quiet_seq >= l.acked_seq THEN quiet_before(l.run_id, @number@::smallint, l.acked_seq) ELSE 0 END,
           p.seqs, p.types, p.payloads, p.created_ats
      FROM unnest(p_run_ids, p_tokens) AS i (run_id, token)
      JOIN @table@ l ON l.run_id = ANY (ARRAY[i.run_id]) AND l.lane_token = i.token AND l.lane_expires_at IS NOT NULL
     CROSS JOIN LATERAL prefix_of(l.run_id, @number@::smallint, l.acked_seq, l.frozen_seq) p
$$;

-- Acknowledges prefixes and, where p_prefix is above zero, claims each lane's next one under the same token, unless
-- that is for another receiver. Facts without effect that come first are passed on the way.
--
-- The cursor only moves forward. A call that is asked again after a lost answer answers again, with the same
-- successor. answer: acked | busy (the row is locked: ask again) | lost (another turn holds the lane).
-- lag_types and lags_s report each fact acknowledged now: seconds from its creation to this moment, never negative.
CREATE OR REPLACE FUNCTION @schema@.@lane@_acknowledge(
    p_run_ids text[], p_tokens bigint[], p_through integer[], p_prefix integer, p_lease_s double precision
) RETURNS TABLE (
    ord integer, answer text, attempt integer, generation integer, passed integer, seqs integer[], types text[],
    payloads jsonb[], created_ats timestamptz[], lag_types text[], lags_s double precision[]
)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now  timestamptz;
    v_was  integer[];
    v_done text[];
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    WITH free AS (
        SELECT i.run_id, i.token, i.through, l.acked_seq AS was, h.head,
               p_prefix > 0 AND l.last_seq > h.head AND (@bound@) IS DISTINCT FROM h.head AS goes_on
          FROM unnest(p_run_ids, p_tokens, p_through) AS i (run_id, token, through)
          JOIN @table@ l ON l.run_id = ANY (ARRAY[i.run_id])
         CROSS JOIN LATERAL (
                SELECT CASE WHEN l.quiet_seq > i.through
                            THEN quiet_until(l.run_id, @number@::smallint, i.through, l.quiet_seq)
                            ELSE i.through END AS head) h
         WHERE l.lane_token = i.token AND l.lane_expires_at IS NOT NULL
           AND l.acked_seq < i.through AND l.frozen_seq = i.through
           FOR NO KEY UPDATE OF l SKIP LOCKED
    ), acked AS (
        UPDATE @table@ l
           SET acked_seq = i.head,
               frozen_seq = CASE WHEN i.goes_on
                                 THEN least(l.last_seq, i.head + p_prefix, nullif(@bound@, i.head)) END,
               lane_attempts = i.goes_on::integer,
               lane_failure = NULL,
               lane_expires_at = CASE WHEN i.goes_on THEN v_now + make_interval(secs => p_lease_s) END,
               lane_due_at = CASE WHEN i.goes_on THEN v_now + make_interval(secs => p_lease_s) ELSE v_now END
          FROM free i
         WHERE l.run_id = ANY (ARRAY[i.run_id]) AND l.lane_token = i.token AND l.acked_seq < i.through AND l.frozen_seq = i.through
        RETURNING l.run_id, i.was
    )
    SELECT array_agg(run_id), array_agg(was) INTO v_done, v_was FROM acked;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN l.acked_seq >= i.through THEN 'acked'
                WHEN l.lane_token = i.token AND l.lane_expires_at IS NOT NULL AND l.frozen_seq = i.through THEN 'busy'
                ELSE 'lost' END,
           p.attempt, p.generation, p.passed, p.seqs, p.types, p.payloads, p.created_ats, g.types, g.lags
      FROM unnest(p_run_ids, p_tokens, p_through) WITH ORDINALITY AS i (run_id, token, through, ord)
      LEFT JOIN @table@ l ON l.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN LATERAL (
            SELECT l.lane_attempts AS attempt, l.lane_skips::integer AS generation,
                   CASE WHEN l.quiet_seq >= l.acked_seq
                        THEN quiet_before(l.run_id, @number@::smallint, l.acked_seq) ELSE 0 END AS passed,
                   q.seqs, q.types, q.payloads, q.created_ats
              FROM prefix_of(l.run_id, @number@::smallint, l.acked_seq, l.frozen_seq) q
             WHERE l.lane_token = i.token AND l.lane_expires_at IS NOT NULL AND l.acked_seq >= i.through
               AND l.frozen_seq IS NOT NULL) p ON true
      LEFT JOIN unnest(v_done, v_was) AS d (run_id, was) ON d.run_id = i.run_id
      LEFT JOIN LATERAL (
            SELECT array_agg(f.type ORDER BY f.seq) AS types,
                   array_agg(greatest(extract(epoch FROM v_now - f.created_at), 0)::double precision ORDER BY f.seq) AS lags
              FROM facts f
             WHERE f.run_id = ANY (ARRAY[d.run_id]) AND f.lane = @number@ AND f.seq > d.was AND f.seq <= i.through) g ON true;
END
$$;

-- Hands lanes back at the end of a turn that did not end in an acknowledgement. p_endings, per item:
--
--   failed    the delivery failed: it counts, and comes again after p_delays_s
--   blocked   it stays where it is until an operator decides
--   given_up  its sender gave it up, or learned that it may not send: it does not count, comes again after p_delays_s,
--             and stays frozen, for it may have arrived
--   unsent    it never left: it does not count and, if this turn froze it, it thaws; it comes again after p_delays_s
--
-- p_reasons say why, for people; NULL: nothing is known that was not before.
-- answer: done (also when the turn is over already: asked again after a lost answer) | busy | lost.
CREATE OR REPLACE FUNCTION @schema@.@lane@_hand_back(
    p_run_ids text[], p_tokens bigint[], p_endings text[], p_delays_s double precision[], p_reasons text[]
) RETURNS TABLE (ord integer, answer text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now  timestamptz;
    v_done integer;
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    WITH free AS (
        SELECT i.*
          FROM unnest(p_run_ids, p_tokens, p_endings, p_delays_s, p_reasons) AS i (run_id, token, ending, delay_s, reason)
          JOIN @table@ l ON l.run_id = ANY (ARRAY[i.run_id])
         WHERE l.lane_token = i.token AND l.lane_expires_at IS NOT NULL
           FOR NO KEY UPDATE OF l SKIP LOCKED
    ), done AS (
        UPDATE @table@ l
           SET lane_expires_at = NULL,
               lane_error = CASE WHEN i.ending = 'blocked' THEN coalesce(i.reason, 'blocked') END,
               lane_failure = CASE WHEN i.ending <> 'blocked' THEN coalesce(i.reason, l.lane_failure) END,
               lane_due_at = CASE WHEN i.ending = 'blocked' THEN 'infinity'
                                  ELSE v_now + make_interval(secs => i.delay_s) END,
               -- One delivery stays counted once a prefix has been out: that is what keeps it frozen.
               lane_attempts = CASE i.ending WHEN 'unsent' THEN l.lane_attempts - 1
                                             WHEN 'given_up' THEN greatest(l.lane_attempts - 1, 1)
                                             ELSE l.lane_attempts END,
               frozen_seq = CASE WHEN i.ending = 'unsent' AND l.lane_attempts = 1 THEN NULL ELSE l.frozen_seq END
          FROM free i
         WHERE l.run_id = ANY (ARRAY[i.run_id]) AND l.lane_token = i.token AND l.lane_expires_at IS NOT NULL
        RETURNING l.run_id
    )
    SELECT count(*) INTO v_done FROM done;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN l.run_id IS NULL THEN 'lost' WHEN l.lane_expires_at IS NULL THEN 'done' ELSE 'busy' END
      FROM unnest(p_run_ids, p_tokens) WITH ORDINALITY AS i (run_id, token, ord)
      LEFT JOIN @table@ l ON l.run_id = ANY (ARRAY[i.run_id]) AND l.lane_token = i.token;
END
$$;

-- Renews the leases of lanes that are being delivered. answer: renewed | busy | lost.
CREATE OR REPLACE FUNCTION @schema@.@lane@_renew(
    p_run_ids text[], p_tokens bigint[], p_lease_s double precision
) RETURNS TABLE (ord integer, answer text)
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
          FROM unnest(p_run_ids, p_tokens) AS i (run_id, token)
          JOIN @table@ l ON l.run_id = ANY (ARRAY[i.run_id])
         WHERE l.lane_token = i.token AND l.lane_expires_at IS NOT NULL
           FOR NO KEY UPDATE OF l SKIP LOCKED
    ), done AS (
        UPDATE @table@ l
           SET lane_expires_at = greatest(l.lane_expires_at, v_until),
               -- Not HOT, but rare: only a request that would outlast its lease renews.
               lane_due_at = greatest(l.lane_due_at, v_until)
          FROM free i
         WHERE l.run_id = ANY (ARRAY[i.run_id]) AND l.lane_token = i.token AND l.lane_expires_at IS NOT NULL
        RETURNING l.run_id
    )
    SELECT array_agg(run_id) INTO v_done FROM done;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN i.run_id = ANY (v_done) THEN 'renewed' WHEN l.run_id IS NOT NULL THEN 'busy' ELSE 'lost' END
      FROM unnest(p_run_ids, p_tokens) WITH ORDINALITY AS i (run_id, token, ord)
      LEFT JOIN @table@ l ON l.run_id = ANY (ARRAY[i.run_id]) AND l.lane_token = i.token AND l.lane_expires_at IS NOT NULL;
END
$$;

-- One whole turn for the ledger in this database: pick, apply, acknowledge, in one transaction. The row lock is
-- the lease, so nothing is claimed, frozen or released, and a lost answer has nothing to repair.
--
-- Answers the turn in one row: lanes and facts delivered, the acknowledged facts' types and lags as
-- *_acknowledge reports them, lanes blocked because the ledger has a gap, and next_due_s as claim_runs does.
CREATE OR REPLACE FUNCTION @schema@.@lane@_deliver(
    p_receivers text[], p_limit integer, p_prefix integer, p_oldest boolean
) RETURNS TABLE (
    lanes integer, blocked integer, lag_types text[], lags_s double precision[], next_due_s double precision
)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now     CONSTANT timestamptz := clock();
    v_pick    record;
    v_ids     text[];
    v_first   integer[];
    v_through integer[];
    v_turn    record;
    v_blocked integer := 0;
BEGIN
    PERFORM require_read_committed();
    v_pick := @lane@_pick(p_receivers, p_limit, 3::smallint, p_oldest, '{}', v_now);
    v_ids := CASE WHEN v_pick.quiet THEN @lane@_pass(v_pick.ids, p_receivers) ELSE v_pick.ids END;

    SELECT array_agg(l.run_id), array_agg(l.acked_seq + 1),
           array_agg(coalesce(l.frozen_seq, least(l.last_seq, l.acked_seq + p_prefix, nullif(@bound@, l.acked_seq))))
      INTO v_ids, v_first, v_through
      FROM @table@ l WHERE l.run_id = ANY (v_ids);

    IF v_ids IS NULL THEN
        RETURN QUERY SELECT 0, 0, NULL::text[], NULL::double precision[],
                            seconds_until(@lane@_next_due(p_receivers), v_now);
        RETURN;
    END IF;

    SELECT a.* INTO v_turn FROM ledger_apply_@lane@(v_ids, v_first, v_through, v_now) a;

    UPDATE @table@ l
       SET acked_seq = i.through, frozen_seq = NULL, lane_attempts = 0, lane_expires_at = NULL, lane_due_at = v_now,
           lane_failure = NULL
      FROM unnest(v_turn.run_ids, v_turn.through) AS i (run_id, through)
     WHERE l.run_id = ANY (ARRAY[i.run_id]);

    IF cardinality(v_turn.run_ids) IS DISTINCT FROM cardinality(v_ids) THEN
        UPDATE @table@ l
           SET lane_error = 'the ledger has not applied this run''s earlier facts', lane_due_at = 'infinity',
               lane_failure = NULL, lane_expires_at = NULL, frozen_seq = i.through,
               lane_attempts = greatest(l.lane_attempts, 1)
          FROM unnest(v_ids, v_through) AS i (run_id, through)
         WHERE l.run_id = ANY (ARRAY[i.run_id]) AND NOT (l.run_id = ANY (coalesce(v_turn.run_ids, '{}')));
        GET DIAGNOSTICS v_blocked = ROW_COUNT;
    END IF;

    RETURN QUERY
    SELECT cardinality(v_ids) - v_blocked, v_blocked, v_turn.lag_types, v_turn.lags_s,
           seconds_until(CASE WHEN cardinality(v_pick.ids) >= p_limit THEN v_now
                              ELSE @lane@_next_due(p_receivers) END, v_now);
END
$$;

-- What an operator decides about one blocked lane (see journal.sql): with p_skip NULL its prefix is delivered again,
-- under the same key; else the cursor moves over the prefix's facts up to p_skip, and what follows goes out under keys
-- of a new generation. Answers the prefix that was blocked; first is NULL if the lane was not blocked, or if p_skip is
-- not in the prefix: then nothing has changed. Waits for the row as long as the caller's lock_timeout allows.
CREATE OR REPLACE FUNCTION @schema@.@lane@_unblock(
    p_run_id text, p_skip integer, OUT was_blocked boolean, OUT acked integer, OUT first integer, OUT through integer
)
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_now timestamptz;
BEGIN
    SELECT l.lane_error IS NOT NULL, l.acked_seq, l.acked_seq + 1, l.frozen_seq INTO was_blocked, acked, first, through
      FROM @table@ l WHERE l.run_id = ANY (ARRAY[p_run_id]) FOR NO KEY UPDATE;
    v_now := clock();

    IF NOT coalesce(was_blocked, false) OR NOT coalesce(p_skip BETWEEN first AND through, true) THEN
        first := NULL;
        RETURN;
    END IF;
    UPDATE @table@ l
       SET lane_error = NULL, lane_due_at = v_now, lane_expires_at = NULL,
           lane_failure = CASE WHEN p_skip IS NULL THEN l.lane_error END,
           acked_seq = coalesce(p_skip, l.acked_seq), lane_skips = l.lane_skips + (p_skip IS NOT NULL)::integer,
           frozen_seq = CASE WHEN p_skip IS NULL THEN l.frozen_seq END,
           -- One delivery stays counted: the prefix has been out, and never thaws.
           lane_attempts = (p_skip IS NULL)::integer
     WHERE l.run_id = ANY (ARRAY[p_run_id]) AND l.lane_error IS NOT NULL;
END
$$;

-- The ledger has lost facts that it had acknowledged: sets the cursor back, so that what follows p_acked is delivered
-- again, in prefixes of their own. Answers the cursor that was (NULL: no such lane), which is never moved forward. A
-- delivery that is out meanwhile finds its token gone. Waits for the row as long as lock_timeout allows.
CREATE OR REPLACE FUNCTION @schema@.@lane@_set_back(p_run_id text, p_acked integer, OUT acked integer)
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_now timestamptz;
BEGIN
    SELECT l.acked_seq INTO acked FROM @table@ l WHERE l.run_id = ANY (ARRAY[p_run_id]) FOR NO KEY UPDATE;
    v_now := clock();
    UPDATE @table@ l
       SET acked_seq = p_acked, frozen_seq = NULL, lane_error = NULL, lane_failure = NULL, lane_attempts = 0,
           lane_due_at = v_now, lane_token = NULL, lane_expires_at = NULL
     WHERE l.run_id = ANY (ARRAY[p_run_id]) AND l.acked_seq > p_acked;
END
$$;
