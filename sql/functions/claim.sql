-- claim: due runs become attempts of one host, in sets.
--
-- Lock order: locks of limits, tried; then run rows, SKIP LOCKED: nothing is ever waited for.
-- Fence: a claimed row is queued, or waiting and due; only a row that this statement changed is permission
-- to execute. The token is made by the client, so that a claim whose answer was lost can be read back.
--
-- Runs with an organisation or a concurrency key take turns within their bucket: one turn per organisation, and one
-- more for all runs that have neither. A turn is a seek away from the next one, so neither a long queue nor a full
-- limit is walked to see who is behind it.

-- Claims up to p_limit runs from p_buckets.
--
--   p_priorities  of the buckets, same positions: higher first, equal ones share the limit evenly
--   p_plays       of the buckets, same positions
--   p_oldest      this turn goes by who has waited longest, whatever the priority
--   p_from        low-water mark: entries due earlier are not looked at. NULL starts at the front. Behind a
--                 held snapshot the front of the index is full of entries that no longer lead anywhere.
--   p_cursors     two for each bucket: where the walk of its turns stands, as the claim before answered; or none
--
-- Answers one row per claimed run, then always one row with run_id NULL, whose next_due_s is the number of
-- seconds until the next due time in these buckets (NULL: nothing there; zero or less: due rows are left,
-- because of the limit or because somebody holds them; runs that a full limit holds back are not counted: who ends an
-- attempt that was `limited` tells everybody), was_due_at the next p_from and cursors the next p_cursors.
CREATE OR REPLACE FUNCTION @schema@.claim_runs(
    p_owner bigint, p_token bigint, p_buckets bigint[], p_priorities smallint[], p_plays text[], p_limit integer,
    p_lease_s double precision, p_oldest boolean, p_from timestamptz, p_cursors bigint[]
) RETURNS TABLE (
    run_id text, attempt integer, play text, input jsonb, failures integer, waits jsonb, org_id text,
    labels jsonb, limited boolean, was_due_at timestamptz, lag_s double precision, next_due_s double precision,
    cursors bigint[]
)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now      timestamptz;
    v_from     CONSTANT timestamptz := coalesce(p_from, '-infinity');
    v_left     integer := p_limit;
    v_quota    integer;
    v_room     integer;
    v_before   integer;
    v_taken    integer;
    v_cut      boolean;          -- a limit leaves less room than there was quota
    v_ids      text[] := '{}';    -- what is picked: runs,
    v_dues     timestamptz[] := '{}';
    v_orgs     text[] := '{}';    -- and the limits that each counts against
    v_keys     text[] := '{}';
    v_plays    text[] := '{}';   -- (of the play only where it has one)
    v_parked   boolean := false;
    v_again    boolean := false;  -- somebody is due who may be had in a moment
    v_more     bigint[] := '{}';  -- buckets that filled their share
    v_full     bigint[] := '{}';  -- buckets of plays whose limit is full
    v_cursors  bigint[] := array_fill(NULL::bigint, ARRAY[2 * cardinality(p_buckets)]);
    v_locked   text[] := '{}';    -- plays whose limit is ours until the end
    v_limits   CONSTANT text[] := (SELECT array_agg(name) FROM limits WHERE kind = 'play' AND name = ANY (p_plays));
    v_pos      bigint;
    v_stop     bigint;
    v_bucket   record;
    v_head     timestamptz;
    v_next     timestamptz;
BEGIN
    PERFORM require_read_committed();
    v_now := clock();

    FOR v_bucket IN
        SELECT b.bucket, b.play, b.ord, k.round, h.plain_at, h.turns_at,
               count(*) OVER (PARTITION BY k.round, CASE WHEN p_oldest THEN 0 ELSE b.priority END)
                 - row_number() OVER (PARTITION BY k.round, CASE WHEN p_oldest THEN 0 ELSE b.priority END
                                      ORDER BY h.due_at, b.bucket) + 1 AS sharers
          FROM unnest(p_buckets, p_priorities, p_plays) WITH ORDINALITY AS b (bucket, priority, play, ord)
          LEFT JOIN LATERAL (
                SELECT r.due_at AS plain_at FROM runs r
                 WHERE r.bucket = b.bucket AND r.status IN ('queued', 'waiting') AND r.turn IS NULL
                   AND r.due_at >= v_from AND r.due_at <= v_now
                   AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[r.run_id]) OFFSET 0)
                 ORDER BY r.due_at LIMIT 1) p ON true
          LEFT JOIN LATERAL (
                SELECT r.due_at AS turns_at FROM runs r
                 WHERE r.bucket = b.bucket AND r.status IN ('queued', 'waiting') AND r.turn >= 0
                   AND r.due_at >= v_from AND r.due_at <= v_now
                   AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[r.run_id]) OFFSET 0)
                 ORDER BY r.due_at LIMIT 1) t ON true
         CROSS JOIN LATERAL (
                SELECT p.plain_at, t.turns_at,
                       least(p.plain_at, CASE WHEN NOT p_oldest THEN t.turns_at
                                              WHEN t.turns_at IS NOT NULL
                                              -- Held back, all of the oldest few: it must neither hide nor be hidden.
                                              THEN coalesce((SELECT o.due_at FROM oldest_group(b.bucket, b.play, v_from, v_now) o),
                                                            CASE WHEN random() < 0.5 THEN t.turns_at ELSE 'infinity' END)
                                         END) AS due_at
                 WHERE p.plain_at IS NOT NULL OR t.turns_at IS NOT NULL) h
         CROSS JOIN generate_series(1, CASE WHEN p_oldest THEN 1 ELSE 2 END) AS k (round)
         ORDER BY CASE WHEN p_oldest THEN 0 ELSE -b.priority END, k.round, h.due_at, b.bucket
    LOOP
        IF v_bucket.round = 1 AND v_bucket.turns_at IS NOT NULL THEN
            v_cursors[2 * v_bucket.ord - 1] := p_cursors[2 * v_bucket.ord - 1];
            v_cursors[2 * v_bucket.ord] := p_cursors[2 * v_bucket.ord];
        END IF;
        v_head := least(v_head, v_bucket.plain_at, v_bucket.turns_at);
        CONTINUE WHEN v_left <= 0;
        -- First an even share of what is left, then what others of the same priority left over. On an oldest-first
        -- turn the first bucket may take everything.
        CONTINUE WHEN v_bucket.round = 2 AND NOT (v_bucket.bucket = ANY (v_more));
        v_quota := CASE WHEN p_oldest OR v_bucket.round = 2 THEN v_left
                        ELSE ceil(v_left::numeric / v_bucket.sharers) END;

        v_cut := false;
        IF v_bucket.play = ANY (v_limits) THEN
            -- Counted without the lock first: a full limit is left alone.
            v_before := cardinality(array_positions(v_plays, v_bucket.play));
            v_room := play_room(v_bucket.play, v_quota + v_before) - v_before;
            IF v_room > 0 AND NOT v_bucket.play = ANY (v_locked) THEN
                IF pg_try_advisory_xact_lock(limit_lock('play', v_bucket.play)) THEN
                    v_locked := v_locked || v_bucket.play;
                    v_room := play_room(v_bucket.play, v_quota + v_before) - v_before;
                ELSE
                    v_room := 0;
                    v_again := true;
                END IF;
            END IF;
            v_cut := v_room < v_quota;
            v_quota := least(v_quota, v_room);
            IF v_quota <= 0 THEN
                v_full := v_full || v_bucket.bucket;
                CONTINUE;
            END IF;
        END IF;

        v_before := cardinality(v_ids);
        IF v_bucket.turns_at IS NULL THEN
            SELECT * INTO v_ids, v_dues, v_orgs, v_keys, v_parked
              FROM take_plain(v_bucket.bucket, v_quota, v_from, v_now, v_ids, v_dues, v_orgs, v_keys, v_parked);
        ELSE
            SELECT * INTO v_pos, v_stop, v_ids, v_dues, v_orgs, v_keys, v_parked, v_again
              FROM take_turns(v_bucket.bucket, v_bucket.play, v_quota, v_bucket.plain_at, p_oldest,
                              v_cursors[2 * v_bucket.ord - 1], v_cursors[2 * v_bucket.ord], v_from, v_now,
                              v_ids, v_dues, v_orgs, v_keys, v_parked, v_again);
            v_cursors[2 * v_bucket.ord - 1] := v_pos;
            v_cursors[2 * v_bucket.ord] := v_stop;
        END IF;
        v_taken := cardinality(v_ids) - v_before;
        CONTINUE WHEN v_taken = 0;
        v_plays := v_plays || array_fill(CASE WHEN v_bucket.play = ANY (v_limits) THEN v_bucket.play END, ARRAY[v_taken]);
        v_left := v_left - v_taken;
        IF v_taken = v_quota AND v_cut THEN
            v_full := v_full || v_bucket.bucket;
        ELSIF v_taken = v_quota THEN
            v_more := v_more || v_bucket.bucket;
        END IF;
    END LOOP;

    IF v_parked THEN
        -- What it stands at beside sleeps: a deadline may have come, or what it waits for just before.
        PERFORM pass_standing_waits(v_ids, v_now);
        WITH resumed AS (
            UPDATE runs r
               SET last_seq = r.last_seq + 1,
                   lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
             WHERE r.run_id = ANY (v_ids) AND r.wait_kind IS NOT NULL
            RETURNING r.run_id, r.last_seq, r.wait_kind, r.wait_key
        ), passed AS (
            UPDATE waits c SET done_at = v_now
              FROM resumed
             WHERE c.run_id = ANY (ARRAY[resumed.run_id]) AND c.kind = 'sleep' AND c.done_at IS NULL AND c.due_at <= v_now
        )
        INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
        SELECT run_id, 0, last_seq, 'run.resumed', v_now, jsonb_build_object('kind', wait_kind, 'key', wait_key)
          FROM resumed;
    END IF;

    IF cardinality(v_ids) > 0 THEN
        RETURN QUERY
        WITH claimed AS (
            UPDATE runs r
               SET status = 'running', attempt = r.attempt + 1, appended = 0,
                   limited = num_nonnulls(p.org, p.key, p.play) > 0,
                   lease_owner = p_owner, lease_token = p_token,
                   lease_expires_at = v_now + make_interval(secs => p_lease_s),
                   due_at = v_now + make_interval(secs => p_lease_s),
                   attempt_at = v_now, started_at = coalesce(r.started_at, v_now),
                   wait_kind = NULL, wait_key = NULL, wait_until = NULL,
                   last_seq = r.last_seq + 1,
                   lane_due_at = CASE WHEN r.lane_pending THEN r.lane_due_at ELSE v_now END
              FROM unnest(v_ids, v_dues, v_orgs, v_keys, v_plays) AS p (run_id, due_at, org, key, play)
             WHERE r.run_id = ANY (ARRAY[p.run_id]) AND r.finished_at IS NULL AND r.lease_expires_at IS NULL
            RETURNING r.run_id, r.attempt, r.play, r.failures, r.org_id, r.labels, r.limited, r.last_seq,
                      p.due_at AS was_due_at
        ), started AS (
            INSERT INTO facts (run_id, lane, seq, type, created_at, payload)
            SELECT c.run_id, 0, c.last_seq, 'run.started', v_now,
                   jsonb_build_object('attempt', c.attempt, 'host', p_owner::text)
              FROM claimed c
        )
        SELECT c.run_id, c.attempt, c.play, f.payload -> 'input', c.failures,
               CASE WHEN c.attempt > 1 THEN run_waits(c.run_id, v_now) END,
               c.org_id, c.labels, c.limited, c.was_due_at,
               extract(epoch FROM v_now - c.was_due_at)::double precision,
               NULL::double precision, NULL::bigint[]
          FROM claimed c
          JOIN facts f ON f.run_id = ANY (ARRAY[c.run_id]) AND f.lane = 0 AND f.seq = 1;
    END IF;

    IF v_left <= 0 OR v_again THEN
        v_next := v_now;
    ELSE
        v_next := next_run_due(p_buckets, p_from, v_now + interval '1 microsecond', v_full);
    END IF;
    was_due_at := v_head;
    next_due_s := seconds_until(v_next, v_now);
    cursors := v_cursors;
    RETURN NEXT;
END
$$;

-- What the functions below pick is added to the arrays and flags that they are given: the runs, when they were due, the
-- organisation and the key whose limit each counts against, and whether one was parked. They are parts of a claim, and
-- leave the planner settings to it.

-- Picks the oldest due runs of a bucket that have neither organisation nor key.
CREATE OR REPLACE FUNCTION @schema@.take_plain(
    p_bucket bigint, p_most integer, p_from timestamptz, p_now timestamptz,
    INOUT p_ids text[], INOUT p_dues timestamptz[], INOUT p_orgs text[], INOUT p_keys text[], INOUT p_parked boolean
)
LANGUAGE plpgsql
AS $$
DECLARE
    v_picked record;
BEGIN
    SELECT array_agg(t.run_id) AS ids, array_agg(t.due_at) AS dues, bool_or(t.status = 'waiting') AS parked
      INTO v_picked
      FROM (SELECT r.run_id, r.due_at, r.status FROM runs r
             WHERE r.bucket = p_bucket AND r.status IN ('queued', 'waiting') AND r.turn IS NULL
               AND r.due_at >= p_from AND r.due_at <= p_now
               AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[r.run_id]) OFFSET 0)
               AND r.run_id <> ALL (p_ids)
             ORDER BY r.due_at
             LIMIT p_most
               FOR NO KEY UPDATE SKIP LOCKED) t;
    IF v_picked.ids IS NOT NULL THEN
        p_ids := p_ids || v_picked.ids;
        p_dues := p_dues || v_picked.dues;
        p_orgs := p_orgs || array_fill(NULL::text, ARRAY[cardinality(v_picked.ids)]);
        p_keys := p_keys || array_fill(NULL::text, ARRAY[cardinality(v_picked.ids)]);
        p_parked := p_parked OR v_picked.parked;
    END IF;
END
$$;

-- Picks due runs of groups: a group is what shares turn and key. Each gives up to p_wants runs, oldest first, as far as
-- its limits leave room. p_gots answers how many each gave, NULL for one that a limit cut short.
CREATE OR REPLACE FUNCTION @schema@.take_groups(
    p_bucket bigint, p_play text, p_turns bigint[], p_subturns bigint[], p_group_orgs text[], p_group_keys text[],
    p_wants integer[], p_from timestamptz, p_now timestamptz,
    INOUT p_ids text[], INOUT p_dues timestamptz[], INOUT p_orgs text[], INOUT p_keys text[], INOUT p_parked boolean,
    INOUT p_again boolean, OUT p_gots integer[]
)
LANGUAGE plpgsql
AS $$
DECLARE
    v_limits CONSTANT text[] := (SELECT array_agg(name) FROM limits WHERE kind = 'org' AND name = ANY (p_group_orgs));
    v_keys   text[] := p_group_keys;
    v_orgs   text[] := array_fill(NULL::text, ARRAY[cardinality(p_turns)]);
    v_wants  integer[] := p_wants;
    v_held   boolean[];
    v_cut    boolean;
    v_picked record;
BEGIN
    IF v_limits IS NOT NULL OR num_nonnulls(VARIADIC p_group_keys) > 0 THEN
        -- Of a key one lock in 64, so that a claim of many keys does not fill the server's table of locks.
        SELECT array_agg((NOT i.limited OR pg_try_advisory_xact_lock(limit_lock('org', i.org)))
                     AND (i.key IS NULL OR pg_try_advisory_xact_lock(
                              limit_lock('key', concat_ws(E'\x1f', p_play, (i.subturn >> 1) & 63)))) ORDER BY i.ord),
               array_agg(CASE WHEN i.limited THEN i.org END ORDER BY i.ord),
               array_agg(p_play || E'\x1f' || i.key ORDER BY i.ord)
          INTO v_held, v_orgs, v_keys
          FROM (SELECT g.*, coalesce(g.org = ANY (v_limits), false) AS limited
                  FROM unnest(p_group_orgs, p_group_keys, p_subturns) WITH ORDINALITY AS g (org, key, subturn, ord)) i;

        -- A new statement: it sees what whoever had a lock before has committed.
        SELECT array_agg(greatest(0, least(i.want, i.org_room - i.others)) ORDER BY i.ord)
          INTO v_wants
          FROM (SELECT k.ord, k.want, o.room - cardinality(array_positions(p_orgs, o.org)) AS org_room,
                       coalesce(sum(k.want) OVER (PARTITION BY o.org ORDER BY k.ord
                                                  ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING), 0) AS others
                  FROM (SELECT g.ord, g.org,
                               CASE WHEN NOT g.held THEN 0
                                    WHEN g.key IS NULL THEN g.want
                                    ELSE greatest(0, key_room(p_play, g.bare, g.want + cardinality(array_positions(p_keys, g.key)))
                                                     - cardinality(array_positions(p_keys, g.key))) END AS want
                          FROM unnest(v_orgs, v_keys, p_group_keys, p_wants, v_held) WITH ORDINALITY
                               AS g (org, key, bare, want, held, ord)) k
                  LEFT JOIN LATERAL (
                        SELECT u.org, org_room(u.org, 1000000) AS room
                          FROM unnest(v_limits) AS u (org) WHERE u.org = k.org) o ON true) i;
        p_again := p_again OR false = ANY (v_held);
        IF (SELECT count(k) > count(DISTINCT k) FROM unnest(v_keys) AS k) THEN
            SELECT * INTO v_wants, v_cut FROM share_keys(p_play, p_group_keys, p_wants, v_held, v_orgs, v_keys, p_orgs, p_keys);
            p_again := p_again OR v_cut;
        END IF;
    END IF;

    SELECT array_agg(t.run_id) AS ids, array_agg(t.due_at) AS dues, array_agg(g.org) AS orgs, array_agg(g.key) AS keys,
           array_agg(g.ord::integer) AS groups, bool_or(t.status = 'waiting') AS parked
      INTO v_picked
      FROM unnest(p_turns, p_subturns, v_orgs, v_keys, v_wants) WITH ORDINALITY AS g (turn, subturn, org, key, want, ord)
     CROSS JOIN LATERAL (
            SELECT r.run_id, r.due_at, r.status FROM runs r
             WHERE r.bucket = p_bucket AND r.status IN ('queued', 'waiting')
               AND r.turn = g.turn AND r.subturn = g.subturn
               AND r.due_at >= p_from AND r.due_at <= p_now
               AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[r.run_id]) OFFSET 0)
               AND r.run_id <> ALL (p_ids)
             ORDER BY r.due_at
             LIMIT g.want
               FOR NO KEY UPDATE SKIP LOCKED) t
     WHERE g.want > 0;

    p_gots := array_fill(0, ARRAY[cardinality(p_turns)]);
    IF v_picked.ids IS NOT NULL THEN
        p_ids := p_ids || v_picked.ids;
        p_dues := p_dues || v_picked.dues;
        p_orgs := p_orgs || v_picked.orgs;
        p_keys := p_keys || v_picked.keys;
        p_parked := p_parked OR v_picked.parked;
        FOR i IN 1 .. cardinality(v_picked.groups) LOOP
            p_gots[v_picked.groups[i]] := p_gots[v_picked.groups[i]] + 1;
        END LOOP;
    END IF;

    -- Who gave less than was wanted and still has somebody due: that row is held by somebody else at this moment.
    IF NOT p_again THEN
        p_again := EXISTS (
            SELECT 1 FROM unnest(p_turns, p_subturns, v_wants, p_gots) AS g (turn, subturn, want, got)
             CROSS JOIN LATERAL (
                    SELECT 1 FROM runs r
                     WHERE r.bucket = p_bucket AND r.status IN ('queued', 'waiting')
                       AND r.turn = g.turn AND r.subturn = g.subturn
                       AND r.due_at >= p_from AND r.due_at <= p_now
                       AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[r.run_id]) OFFSET 0)
                       AND r.run_id <> ALL (p_ids)
                     ORDER BY r.due_at LIMIT 1) t
             WHERE g.got < g.want);
    END IF;
    FOR i IN 1 .. cardinality(p_gots) LOOP
        IF v_wants[i] < p_wants[i] THEN
            p_gots[i] := NULL;
        END IF;
    END LOOP;
END
$$;

-- How many each group may give where several have the same key, because it is of more than one organisation: one after
-- the other, for what one of them takes is not there for the next. cut: somebody got less because of another of these;
-- its turn may have other work.
CREATE OR REPLACE FUNCTION @schema@.share_keys(
    p_play text, p_bare text[], p_wants integer[], p_held boolean[], p_group_orgs text[], p_group_keys text[], p_orgs text[],
    p_keys text[], OUT wants integer[], OUT cut boolean
)
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    v_want  integer;
    v_taken integer;
    v_room  integer;
BEGIN
    wants := array_fill(0, ARRAY[cardinality(p_wants)]);
    cut := false;
    FOR i IN 1 .. cardinality(p_wants) LOOP
        CONTINUE WHEN NOT p_held[i];
        v_want := p_wants[i];
        IF p_group_keys[i] IS NOT NULL THEN
            v_taken := coalesce((SELECT sum(w.want) FROM unnest(wants, p_group_keys) AS w (want, key)
                                  WHERE w.key = p_group_keys[i]), 0);
            v_room := key_room(p_play, p_bare[i], 1000000) - cardinality(array_positions(p_keys, p_group_keys[i]));
            cut := cut OR (v_taken > 0 AND v_room - v_taken < v_want);
            v_want := greatest(0, least(v_want, v_room - v_taken));
        END IF;
        IF p_group_orgs[i] IS NOT NULL THEN
            v_taken := coalesce((SELECT sum(w.want) FROM unnest(wants, p_group_orgs) AS w (want, org)
                                  WHERE w.org = p_group_orgs[i]), 0);
            v_room := org_room(p_group_orgs[i], 1000000) - cardinality(array_positions(p_orgs, p_group_orgs[i]));
            v_want := greatest(0, least(v_want, v_room - v_taken));
        END IF;
        wants[i] := v_want;
    END LOOP;
END
$$;

-- The oldest due group of a bucket whose limits leave room; nobody when all of the oldest few are held back.
CREATE OR REPLACE FUNCTION @schema@.oldest_group(p_bucket bigint, p_play text, p_from timestamptz, p_now timestamptz)
RETURNS TABLE (turn bigint, subturn bigint, org_id text, concurrency_key text, due_at timestamptz)
LANGUAGE plpgsql STABLE
AS $$
#variable_conflict use_column
DECLARE
    v_full text[] := '{}';  -- organisations
BEGIN
    FOR turn, subturn, org_id, concurrency_key, due_at IN
        SELECT r.turn, r.subturn, r.org_id, r.concurrency_key, r.due_at FROM runs r
         WHERE r.bucket = p_bucket AND r.status IN ('queued', 'waiting') AND r.turn >= 0
           AND r.due_at >= p_from AND r.due_at <= p_now
           AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[r.run_id]) OFFSET 0)
         ORDER BY r.due_at LIMIT 32
    LOOP
        CONTINUE WHEN org_id = ANY (v_full);
        IF org_room(org_id, 1) <= 0 THEN
            v_full := v_full || org_id;
            CONTINUE;
        END IF;
        CONTINUE WHEN concurrency_key IS NOT NULL AND key_room(p_play, concurrency_key, 1) <= 0;
        RETURN NEXT;
        RETURN;
    END LOOP;
END
$$;

-- Picks due runs of a bucket in which runs take turns.
--
-- While everything that is due fits into p_most it is simply taken. Otherwise the turns are walked, round and round, by
-- seeks, a bounded number per call: each that has due work gets an even share, and what is left goes in even shares to
-- those that have more. p_again answers true when the walk has to go on, or somebody could not be had at this moment.
--
--   p_pos       where the walk stands: the last turn that was visited; NULL for a new one
--   p_stop      where it ends when it has found nothing until then; NULL: where it stands
--   p_plain_at  the oldest due run without organisation and key, all of which share one turn; NULL for none
--   p_oldest    one place goes to whoever has waited longest
CREATE OR REPLACE FUNCTION @schema@.take_turns(
    p_bucket bigint, p_play text, p_most integer, p_plain_at timestamptz, p_oldest boolean,
    INOUT p_pos bigint, INOUT p_stop bigint, p_from timestamptz, p_now timestamptz,
    INOUT p_ids text[], INOUT p_dues timestamptz[], INOUT p_orgs text[], INOUT p_keys text[], INOUT p_parked boolean,
    INOUT p_again boolean
)
LANGUAGE plpgsql
AS $$
DECLARE
    c_seeks   CONSTANT integer := 256;   -- the most turns visited, and about as many keys
    c_start   CONSTANT bigint := -2;     -- positions of the walk: before all turns,
    c_plain   CONSTANT bigint := -1;     -- at the turn of those without organisation and key,
    c_keyless CONSTANT bigint := 9223372036854775807;  -- and, within a turn, of those without a key
    v_before  CONSTANT integer := cardinality(p_ids);
    v_limited CONSTANT boolean := EXISTS (SELECT 1 FROM limits WHERE kind = 'org');
    v_left    integer := p_most;
    v_seeks   integer := 0;
    v_most    integer;
    v_pos     bigint := coalesce(p_pos, c_start);
    v_stop    CONSTANT bigint := CASE WHEN v_pos = c_start THEN c_keyless ELSE coalesce(p_stop, v_pos) END;
    v_around  boolean := v_pos < v_stop;  -- the end of the turns was passed, or the walk began at the start
    v_through boolean := coalesce(p_stop = v_pos, false);  -- everybody was visited
    v_passes  integer := 0;
    v_total   integer;
    v_plain   integer;
    v_want    integer;
    v_room    integer;
    v_others  integer;
    v_cut     boolean := false;  -- somebody was left out because of another in the same pass,
    v_short   boolean := false;  -- or has keys that were not visited, because those that were had less than was asked of them
    v_first   bigint;
    v_sub     bigint;
    v_wrapped boolean;
    v_count   integer;
    v_head    record;
    v_gots    integer[];
    s_turns   bigint[];   -- who shares this pass: turns, their organisations, whether they have keys, their shares
    s_orgs    text[];
    s_keyed   boolean[];
    s_wants   integer[];
    s_spread  boolean[];  -- the share went to the first keys that were visited
    s_gots    integer[];
    m_turns   bigint[] := '{}';  -- who used up a share
    m_orgs    text[] := '{}';
    m_keyed   boolean[] := '{}';
    g_turns   bigint[];   -- the groups of the pass
    g_subs    bigint[];
    g_orgs    text[];
    g_keys    text[];
    g_wants   integer[];
    g_sharers integer[];
BEGIN
    SELECT array_agg(g.turn), array_agg(g.subturn), array_agg(g.org_id), array_agg(g.concurrency_key),
           array_agg(g.n), sum(g.n)
      INTO g_turns, g_subs, g_orgs, g_keys, g_wants, v_total
      FROM (SELECT d.turn, d.subturn, min(d.org_id) AS org_id, min(d.concurrency_key) AS concurrency_key,
                   count(*)::integer AS n
              FROM (SELECT r.turn, r.subturn, r.org_id, r.concurrency_key FROM runs r
                     WHERE r.bucket = p_bucket AND r.status IN ('queued', 'waiting') AND r.turn >= 0
                       AND r.due_at >= p_from AND r.due_at <= p_now
                       AND NOT EXISTS (SELECT 1 FROM cancellations c WHERE c.run_id = ANY (ARRAY[r.run_id]) OFFSET 0)
                       AND r.run_id <> ALL (p_ids)
                     ORDER BY r.due_at LIMIT p_most + 1) d
             GROUP BY d.turn, d.subturn) g;
    IF v_total IS NULL THEN
        IF p_plain_at IS NOT NULL THEN  -- the first round has taken all others
            SELECT * INTO p_ids, p_dues, p_orgs, p_keys, p_parked
              FROM take_plain(p_bucket, p_most, p_from, p_now, p_ids, p_dues, p_orgs, p_keys, p_parked);
        END IF;
        p_pos := NULL;
        p_stop := NULL;
        RETURN;
    ELSIF v_total + (p_plain_at IS NOT NULL)::integer <= p_most THEN
        SELECT * INTO p_ids, p_dues, p_orgs, p_keys, p_parked, p_again, v_gots
          FROM take_groups(p_bucket, p_play, g_turns, g_subs, g_orgs, g_keys, g_wants, p_from, p_now,
                           p_ids, p_dues, p_orgs, p_keys, p_parked, p_again);
        IF p_plain_at IS NOT NULL THEN
            SELECT * INTO p_ids, p_dues, p_orgs, p_keys, p_parked
              FROM take_plain(p_bucket, p_most - cardinality(p_ids) + v_before, p_from, p_now,
                              p_ids, p_dues, p_orgs, p_keys, p_parked);
        END IF;
        p_pos := NULL;
        p_stop := NULL;
        RETURN;
    END IF;

    IF p_oldest THEN
        SELECT o.* INTO v_head FROM oldest_group(p_bucket, p_play, p_from, p_now) o;
        IF v_head.due_at < p_plain_at OR (p_plain_at IS NULL AND v_head.due_at IS NOT NULL) THEN
            SELECT * INTO p_ids, p_dues, p_orgs, p_keys, p_parked, p_again, v_gots
              FROM take_groups(p_bucket, p_play, ARRAY[v_head.turn], ARRAY[v_head.subturn], ARRAY[v_head.org_id],
                               ARRAY[v_head.concurrency_key], ARRAY[1], p_from, p_now,
                               p_ids, p_dues, p_orgs, p_keys, p_parked, p_again);
        ELSIF p_plain_at IS NOT NULL THEN
            SELECT * INTO p_ids, p_dues, p_orgs, p_keys, p_parked
              FROM take_plain(p_bucket, 1, p_from, p_now, p_ids, p_dues, p_orgs, p_keys, p_parked);
        END IF;
    END IF;

    LOOP
        v_left := p_most - cardinality(p_ids) + v_before;
        EXIT WHEN v_left <= 0;
        s_turns := '{}';
        s_orgs := '{}';
        s_keyed := '{}';
        IF NOT v_through AND v_seeks < c_seeks THEN
            -- The next turns, as many as there are places.
            WHILE cardinality(s_turns) < v_left AND v_seeks < c_seeks LOOP
                IF v_pos = c_start THEN
                    v_pos := c_plain;
                    IF p_plain_at IS NOT NULL THEN
                        s_turns := s_turns || c_plain;
                        s_orgs := s_orgs || NULL::text;
                        s_keyed := s_keyed || false;
                    END IF;
                    IF v_around AND v_stop = c_plain THEN
                        v_through := true;
                        EXIT;
                    END IF;
                    CONTINUE;
                END IF;
                SELECT r.turn, r.subturn, r.org_id, r.due_at INTO v_head FROM runs r
                 WHERE r.bucket = p_bucket AND r.status IN ('queued', 'waiting') AND r.turn > v_pos
                 ORDER BY r.turn, r.subturn, r.due_at LIMIT 1;
                v_seeks := v_seeks + 1;
                IF v_around AND (v_head.turn IS NULL OR v_head.turn > v_stop) THEN
                    v_through := true;
                    EXIT;
                ELSIF v_head.turn IS NULL THEN
                    v_pos := c_start;  -- what is left is from the start up to where the walk began
                    v_around := true;
                    CONTINUE;
                END IF;
                v_pos := v_head.turn;
                CONTINUE WHEN v_head.subturn = c_keyless AND v_head.due_at > p_now;
                CONTINUE WHEN v_limited AND org_room(v_head.org_id, 1000000)
                                            <= cardinality(array_positions(p_orgs, v_head.org_id));
                s_turns := s_turns || v_head.turn;
                s_orgs := s_orgs || v_head.org_id;
                s_keyed := s_keyed || (v_head.subturn < c_keyless);
            END LOOP;
        ELSE
            -- What is left goes to those that have more, a few times over: then there is another claim.
            EXIT WHEN cardinality(m_turns) = 0 OR v_passes = 3;
            v_passes := v_passes + 1;
            s_turns := m_turns[:v_left];
            s_orgs := m_orgs[:v_left];
            s_keyed := m_keyed[:v_left];
            m_turns := m_turns[v_left + 1:];
            m_orgs := m_orgs[v_left + 1:];
            m_keyed := m_keyed[v_left + 1:];
        END IF;

        v_count := cardinality(s_turns);
        CONTINUE WHEN v_count = 0;
        v_plain := NULL;
        s_wants := '{}';
        s_spread := array_fill(false, ARRAY[v_count]);
        g_turns := '{}';
        g_subs := '{}';
        g_orgs := '{}';
        g_keys := '{}';
        g_wants := '{}';
        g_sharers := '{}';
        FOR i IN 1 .. v_count LOOP
            v_want := v_left * i / v_count - v_left * (i - 1) / v_count;
            s_wants := s_wants || v_want;
            IF s_turns[i] = c_plain THEN
                v_plain := i;
            ELSIF NOT s_keyed[i] THEN
                g_turns := g_turns || s_turns[i];
                g_subs := g_subs || c_keyless;
                g_orgs := g_orgs || s_orgs[i];
                g_keys := g_keys || NULL::text;
                g_wants := g_wants || v_want;
                g_sharers := g_sharers || i;
            ELSE
                -- Keys of one organisation are in no order that anybody could wait for: the walk begins anywhere.
                v_first := (random() * 9e18)::bigint;
                v_sub := v_first;
                v_wrapped := false;
                v_most := v_seeks + greatest(4, (2 * c_seeks - v_seeks) / (v_count - i + 1));
                WHILE v_want > 0 AND v_seeks < v_most LOOP
                    SELECT r.subturn, r.concurrency_key, r.due_at INTO v_head FROM runs r
                     WHERE r.bucket = p_bucket AND r.status IN ('queued', 'waiting')
                       AND r.turn = s_turns[i] AND r.subturn > v_sub
                     ORDER BY r.subturn, r.due_at LIMIT 1;
                    v_seeks := v_seeks + 1;
                    EXIT WHEN v_wrapped AND (v_head.subturn IS NULL OR v_head.subturn > v_first);
                    IF v_head.subturn IS NULL THEN
                        v_wrapped := true;
                        v_sub := -1;
                        CONTINUE;
                    END IF;
                    v_sub := v_head.subturn;
                    CONTINUE WHEN v_head.due_at > p_now;
                    v_room := v_want;
                    IF v_head.concurrency_key IS NOT NULL THEN
                        -- Another organisation's turn may have the same key in this pass.
                        v_others := coalesce((SELECT sum(g.want) FROM unnest(g_keys, g_wants) AS g (key, want)
                                               WHERE g.key = v_head.concurrency_key), 0);
                        v_room := cardinality(array_positions(p_keys, p_play || E'\x1f' || v_head.concurrency_key)) + v_others;
                        v_room := key_room(p_play, v_head.concurrency_key, v_want + v_room) - v_room;
                        v_cut := v_cut OR (v_others > 0 AND v_room < v_want);
                        CONTINUE WHEN v_room <= 0;
                    END IF;
                    g_turns := g_turns || s_turns[i];
                    g_subs := g_subs || v_sub;
                    g_orgs := g_orgs || s_orgs[i];
                    g_keys := g_keys || v_head.concurrency_key;
                    g_wants := g_wants || v_room;
                    g_sharers := g_sharers || i;
                    v_want := v_want - v_room;
                END LOOP;
                s_spread[i] := v_want = 0;
            END IF;
        END LOOP;

        s_gots := array_fill(0, ARRAY[v_count]);
        IF v_plain IS NOT NULL THEN
            v_room := cardinality(p_ids);
            SELECT * INTO p_ids, p_dues, p_orgs, p_keys, p_parked
              FROM take_plain(p_bucket, s_wants[v_plain], p_from, p_now, p_ids, p_dues, p_orgs, p_keys, p_parked);
            s_gots[v_plain] := cardinality(p_ids) - v_room;
        END IF;
        IF cardinality(g_turns) > 0 THEN
            SELECT * INTO p_ids, p_dues, p_orgs, p_keys, p_parked, p_again, v_gots
              FROM take_groups(p_bucket, p_play, g_turns, g_subs, g_orgs, g_keys, g_wants, p_from, p_now,
                               p_ids, p_dues, p_orgs, p_keys, p_parked, p_again);
            FOR i IN 1 .. cardinality(v_gots) LOOP
                s_gots[g_sharers[i]] := s_gots[g_sharers[i]] + v_gots[i];
            END LOOP;
        END IF;
        FOR i IN 1 .. v_count LOOP
            IF s_gots[i] = s_wants[i] THEN
                m_turns := m_turns || s_turns[i];
                m_orgs := m_orgs || s_orgs[i];
                m_keyed := m_keyed || s_keyed[i];
            ELSIF s_spread[i] AND s_gots[i] < s_wants[i] THEN
                v_short := true;
            END IF;
        END LOOP;
    END LOOP;

    p_again := p_again OR (v_left > 0 AND (NOT v_through OR v_cut OR v_short OR cardinality(m_turns) > 0));
    IF v_left > 0 AND v_through THEN
        p_pos := NULL;
        p_stop := NULL;
    ELSE
        p_pos := v_pos;
        p_stop := CASE WHEN cardinality(p_ids) = v_before THEN v_stop END;
    END IF;
END
$$;

-- The earliest due time of these buckets: of runs that take turns from p_turns_from on, of the others from p_from on;
-- of both from p_turns_from on in p_full. Two seeks per bucket.
CREATE OR REPLACE FUNCTION @schema@.next_run_due(
    p_buckets bigint[], p_from timestamptz, p_turns_from timestamptz, p_full bigint[]
) RETURNS timestamptz
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    RETURN (
        SELECT least(min(p.due_at), min(t.due_at))
          FROM unnest(p_buckets) AS b (bucket)
          LEFT JOIN LATERAL (
                SELECT r.due_at FROM runs r
                 WHERE r.bucket = b.bucket AND r.status IN ('queued', 'waiting') AND r.turn IS NULL
                   AND r.due_at >= CASE WHEN b.bucket = ANY (p_full) THEN p_turns_from ELSE coalesce(p_from, '-infinity') END
                 ORDER BY r.due_at LIMIT 1) p ON true
          LEFT JOIN LATERAL (
                SELECT r.due_at FROM runs r
                 WHERE r.bucket = b.bucket AND r.status IN ('queued', 'waiting') AND r.turn >= 0
                   AND r.due_at >= coalesce(p_turns_from, '-infinity')
                 ORDER BY r.due_at LIMIT 1) t ON true);
END
$$;

-- What a claim with this owner and token took, when its answer was lost. Walks the running runs, whose
-- number is bounded by the hosts' slots.
CREATE OR REPLACE FUNCTION @schema@.read_claim(p_owner bigint, p_token bigint)
RETURNS TABLE (
    run_id text, attempt integer, play text, input jsonb, failures integer, waits jsonb, org_id text,
    labels jsonb, limited boolean
)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT r.run_id, r.attempt, r.play, f.payload -> 'input', r.failures,
           CASE WHEN r.attempt > 1 THEN run_waits(r.run_id, clock()) END,
           r.org_id, r.labels, r.limited
      FROM runs r
      JOIN facts f ON f.run_id = ANY (ARRAY[r.run_id]) AND f.lane = 0 AND f.seq = 1
     WHERE r.status = 'running' AND r.due_at > '-infinity' AND r.lease_owner = p_owner AND r.lease_token = p_token
$$;
