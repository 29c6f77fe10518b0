-- journal: what operators do to lanes, and the record of it.
--
-- Lock order: one lane row, which these verbs wait for, shortly: they are for people. Fences, judged on the locked row:
-- to retry or to skip, that the lane is blocked, and with which prefix; to deliver again, the cursor itself.

-- Lanes with something to deliver, the blocked ones first, then by run id and lane. Their cost is one pass over what is
-- pending, whatever was delivered before.
--
--   p_blocked  only those that wait for an operator
--   p_after_…  the last lane of the page before, or NULL
CREATE OR REPLACE FUNCTION @schema@.lane_list(
    p_blocked boolean, p_limit integer, p_after_blocked boolean, p_after_run text, p_after_lane smallint
) RETURNS TABLE (
    run_id text, lane smallint, receiver text, rank smallint, blocked boolean, reason text, attempts integer,
    generation integer, first integer, through integer, last integer, oldest_at timestamptz, age_s double precision,
    due_in_s double precision, leased boolean
)
LANGUAGE plpgsql STABLE
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now CONSTANT timestamptz := clock();
BEGIN
    RETURN QUERY
    SELECT t.run_id, t.lane, t.lane_receiver, t.lane_rank, t.blocked, coalesce(t.lane_error, t.lane_failure), t.lane_attempts,
           t.lane_skips::integer, t.acked_seq + 1, t.frozen_seq, t.last_seq, f.created_at,
           extract(epoch FROM v_now - f.created_at)::double precision,
           CASE WHEN NOT t.blocked THEN seconds_until(t.lane_due_at, v_now) END,
           coalesce(t.lane_expires_at > v_now, false)
      FROM (SELECT a.*
              FROM (SELECT s.* FROM (
                        SELECT r.run_id, 0::smallint AS lane, r.lane_receiver, r.lane_rank,
                               r.lane_error IS NOT NULL AS blocked, r.lane_error, r.lane_failure, r.lane_attempts, r.lane_skips,
                               r.acked_seq, r.frozen_seq, r.last_seq, r.lane_due_at, r.lane_expires_at
                          FROM runs r WHERE r.lane_pending OFFSET 0) s
                     UNION ALL
                    SELECT s.* FROM (
                        SELECT l.run_id, 1::smallint, l.lane_receiver, l.lane_rank,
                               l.lane_error IS NOT NULL, l.lane_error, l.lane_failure, l.lane_attempts, l.lane_skips,
                               l.acked_seq, l.frozen_seq, l.last_seq, l.lane_due_at, l.lane_expires_at
                          FROM lanes l WHERE l.lane_pending OFFSET 0) s) a
             WHERE (a.blocked OR NOT p_blocked)
               AND (p_after_run IS NULL
                    OR (NOT a.blocked, a.run_id, a.lane) > (NOT p_after_blocked, p_after_run COLLATE "C", p_after_lane))
             ORDER BY NOT a.blocked, a.run_id, a.lane
             LIMIT p_limit) t
      LEFT JOIN LATERAL (
            SELECT facts.created_at FROM facts
             WHERE facts.run_id = t.run_id AND facts.lane = t.lane AND facts.seq = t.acked_seq + 1) f ON true
     ORDER BY NOT t.blocked, t.run_id, t.lane;
END
$$;

-- Entries of the journal, newest first; of one run, or of all.
CREATE OR REPLACE FUNCTION @schema@.read_journal(p_run_id text, p_limit integer, p_before bigint)
RETURNS TABLE (
    id bigint, at timestamptz, run_id text, lane smallint, verb text, first integer, through integer, because text,
    by text
)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT j.id, j.at, j.run_id, j.lane, j.verb, j.first, j.through, j.because, j.by
      FROM journal j
     WHERE (p_run_id IS NULL OR j.run_id = p_run_id) AND j.id < coalesce(p_before, 9223372036854775807)
     ORDER BY j.id DESC LIMIT p_limit
$$;

-- Lets a run's blocked lanes be delivered again, from the same prefix under the same key.
--
--   SELECT runlane.retry_lane('01939c…');
--
-- True if a lane was blocked. Options: because, by, notify.
CREATE OR REPLACE FUNCTION @schema@.retry_lane(p_run_id text, p_options jsonb DEFAULT '{}') RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '2s'
AS $$
DECLARE
    v_because text;
    v_by      text;
    v_done    integer;
BEGIN
    PERFORM check_options(p_options, '{because, by, notify}');
    v_because := text_option(p_options, 'because', 2000);
    v_by := text_option(p_options, 'by', 255);

    INSERT INTO journal (at, run_id, lane, verb, first, through, because, by)
    SELECT clock(), p_run_id, u.lane, 'retry', u.first, u.through, v_because, v_by
      FROM (SELECT 0::smallint AS lane, l.* FROM lifecycle_unblock(p_run_id, NULL) l
             UNION ALL
            SELECT 1::smallint, o.* FROM observability_unblock(p_run_id, NULL) o) u
     WHERE u.first IS NOT NULL;
    GET DIAGNOSTICS v_done = ROW_COUNT;

    IF v_done > 0 AND coalesce((p_options ->> 'notify')::boolean, true) THEN
        PERFORM pg_notify(channel('lanes'), '');
    END IF;
    RETURN v_done > 0;
END
$$;

-- Gives up the facts of a run's blocked prefix, from its first up to p_seq: the ledger never gets them. What follows is
-- delivered again, under keys of a new generation, which tell the ledger that the gap is meant.
--
--   SELECT * FROM runlane.skip_lane('01939c…', 7, '{"because": "the ledger lost its disk", "by": "ada"}');
--
-- Refused, by name: a lane that is not blocked, a seq outside of the blocked prefix, no reason. Options: because,
-- lane (lifecycle, the default, or observability), by, notify. Answers the facts skipped; asked again, the same.
CREATE OR REPLACE FUNCTION @schema@.skip_lane(p_run_id text, p_seq integer, p_options jsonb DEFAULT '{}')
RETURNS TABLE (first integer, through integer)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '2s'
AS $$
#variable_conflict use_column
DECLARE
    v_said record;
    v_was  record;
BEGIN
    v_said := lane_words(p_options, 'what is skipped never reaches the ledger');
    IF p_seq IS NULL THEN
        PERFORM refuse('seq', 'must be the last fact to skip');
    END IF;

    IF v_said.lane = 0 THEN
        SELECT u.* INTO v_was FROM lifecycle_unblock(p_run_id, p_seq) u;
    ELSE
        SELECT u.* INTO v_was FROM observability_unblock(p_run_id, p_seq) u;
    END IF;
    IF v_was.was_blocked IS NULL THEN
        PERFORM refuse('run_id', format('run %L does not exist, or has no such lane', p_run_id));
    ELSIF v_was.first IS NULL AND v_was.acked >= p_seq THEN
        -- Perhaps this very request was carried out, and its answer lost.
        RETURN QUERY SELECT j.first, j.through FROM journal j
                      WHERE j.run_id = p_run_id AND j.lane = v_said.lane AND j.verb = 'skip' AND j.through = p_seq;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    IF v_was.first IS NULL AND v_was.was_blocked THEN
        PERFORM refuse('seq', format('must be in the blocked prefix, %s to %s, not %s',
                                     v_was.acked + 1, v_was.through, p_seq));
    ELSIF v_was.first IS NULL THEN
        PERFORM refuse('run_id', format('the %s lane of run %L is not blocked',
                                        coalesce(p_options ->> 'lane', 'lifecycle'), p_run_id));
    END IF;

    INSERT INTO journal (at, run_id, lane, verb, first, through, because, by)
    VALUES (clock(), p_run_id, v_said.lane, 'skip', v_was.first, p_seq, v_said.because, v_said.said_by);
    IF coalesce((p_options ->> 'notify')::boolean, true) THEN
        PERFORM pg_notify(channel('lanes'), '');
    END IF;
    RETURN QUERY SELECT v_was.first, p_seq;
END
$$;

-- Delivers a lane's facts again from p_seq on, for a ledger that has lost what it had acknowledged (restored from a
-- backup, say). It must know facts that it still has: by their number, because prefixes and keys may differ.
--
--   SELECT * FROM runlane.redeliver_lane('01939c…', 3, '{"because": "the ledger was restored", "by": "ada"}');
--
-- Refused, by name: a seq beyond the first fact that is not delivered, no reason. Options: because, lane (lifecycle, the
-- default, or observability), by, notify. Answers the facts that had been delivered and are again: asked again, none are,
-- and through is before first.
CREATE OR REPLACE FUNCTION @schema@.redeliver_lane(p_run_id text, p_seq integer, p_options jsonb DEFAULT '{}')
RETURNS TABLE (first integer, through integer)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET lock_timeout = '2s'
AS $$
#variable_conflict use_column
DECLARE
    v_said  record;
    v_acked integer;
BEGIN
    v_said := lane_words(p_options, 'the ledger gets facts that it had before');
    IF p_seq IS NULL OR p_seq < 1 THEN
        PERFORM refuse('seq', 'must be the first fact to deliver again, from 1');
    END IF;

    v_acked := CASE v_said.lane WHEN 0 THEN lifecycle_set_back(p_run_id, p_seq - 1)
                           ELSE observability_set_back(p_run_id, p_seq - 1) END;
    IF v_acked IS NULL THEN
        PERFORM refuse('run_id', format('run %L does not exist, or has no such lane', p_run_id));
    ELSIF p_seq > v_acked + 1 THEN
        PERFORM refuse('seq', format('facts from %s on have not been delivered yet, so none can be again from %s',
                                     v_acked + 1, p_seq));
    END IF;

    IF p_seq <= v_acked THEN
        INSERT INTO journal (at, run_id, lane, verb, first, through, because, by)
        VALUES (clock(), p_run_id, v_said.lane, 'redeliver', p_seq, v_acked, v_said.because, v_said.said_by);
        IF coalesce((p_options ->> 'notify')::boolean, true) THEN
            PERFORM pg_notify(channel('lanes'), '');
        END IF;
    END IF;
    RETURN QUERY SELECT p_seq, v_acked;
END
$$;

-- What an operator says with a verb on facts: why, who, and of which lane. p_matter: what is done, so that a reason has to
-- be given.
CREATE OR REPLACE FUNCTION @schema@.lane_words(
    p_options jsonb, p_matter text, OUT because text, OUT said_by text, OUT lane smallint
)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    PERFORM check_options(p_options, '{because, lane, by, notify}');
    because := text_option(p_options, 'because', 2000);
    IF because IS NULL THEN
        PERFORM refuse('options.because', 'say why: ' || p_matter);
    END IF;
    said_by := text_option(p_options, 'by', 255);
    lane := CASE choice_option(p_options, 'lane', '{lifecycle, observability}') WHEN 'observability' THEN 1 ELSE 0 END;
END
$$;
