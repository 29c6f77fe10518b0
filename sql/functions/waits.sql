-- waits: what runs wait for (time, events, approvals, children), and what wakes them.
--
-- Lock order: run rows, SKIP LOCKED; waits, events and wakes only under the lock of their run, so nobody waits for
-- them. A child's row is read, never locked: no transition locks two related runs.
-- Fence: for live attempts a lease, attempt and token; for parked ones the park they stand in, which is the number of
-- their run.waiting fact: a wait is standing while its wait_seq is its run's. A wait that a play has abandoned (another
-- one was quicker) is not, and takes nothing.
--
-- No wake is lost. Whoever has something for a run (an event, a child's end) inserts it and a row into wakes in one
-- transaction, without looking at the run's row. The run's own transitions look for it under the run's lock, with a
-- snapshot taken after the lock. So either the sender commits before that snapshot: then it is found here. Or it
-- commits later: then its wake is still in the table for a sweep that begins after the commit, and the sweep takes the
-- run's lock too, so it comes after the park whose look missed it. A sweep that finds the row locked leaves the wake.

-- Registers waits of runs whose rows the caller has locked. p_waits, per run: [{"key", "kind", "name", "delay_s",
-- "until"}, …]. One that an earlier attempt registered keeps its first due time. p_seqs: the park that stands at
-- them; NULL for none.
CREATE OR REPLACE FUNCTION @schema@.register_waits(
    p_run_ids text[], p_waits jsonb[], p_seqs integer[], p_now timestamptz
) RETURNS void
LANGUAGE sql
@seek@
AS $$
    INSERT INTO waits (run_id, key, kind, name, created_at, due_at, wait_seq)
    SELECT i.run_id, w.key, w.kind, w.name, p_now, coalesce(w.until, p_now + make_interval(secs => w.delay_s)), i.seq
      FROM unnest(p_run_ids, p_waits, p_seqs) AS i (run_id, waits, seq)
     CROSS JOIN LATERAL jsonb_to_recordset(i.waits)
                AS w (key text, kind text, name text, delay_s double precision, until timestamptz)
    ON CONFLICT (run_id, key) DO UPDATE SET wait_seq = excluded.wait_seq
     WHERE excluded.wait_seq IS NOT NULL
$$;

-- Passes those of these waits that can pass, and answers all of them that are over. The caller has locked the runs.
--
-- An event goes to one wait: the oldest untaken one of a name to the wait that was registered first. An approval takes
-- only what says yes or no. What has come goes before time that has passed.
CREATE OR REPLACE FUNCTION @schema@.pass_waits(p_run_ids text[], p_keys text[], p_now timestamptz)
RETURNS TABLE (run_id text, key text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_wait    record;
    v_payload jsonb;
BEGIN
    FOR v_wait IN
        SELECT c.run_id, c.key, c.kind, c.name, c.due_at <= p_now AS over,
               CASE WHEN c.kind = 'child' THEN child_status(c.name) END AS status
          FROM unnest(p_run_ids, p_keys) AS i (run_id, key)
         CROSS JOIN LATERAL (  -- OFFSET 0 keeps it a lookup per wait
                SELECT * FROM waits w WHERE w.run_id = i.run_id AND w.key = i.key AND w.done_at IS NULL OFFSET 0) c
         WHERE may_pass(c.run_id, c.kind, c.name, c.due_at, p_now)
         ORDER BY c.run_id, c.created_at, c.key
    LOOP
        v_payload := NULL;
        IF v_wait.status IS NOT NULL THEN
            v_payload := jsonb_build_object('status', nullif(v_wait.status, 'missing'), 'payload',
                                            (SELECT f.payload FROM facts f
                                              WHERE f.run_id = v_wait.name AND f.lane = 0
                                                AND f.seq = (SELECT r.terminal_seq FROM runs r WHERE r.run_id = v_wait.name)));
        ELSIF v_wait.kind <> 'child' AND v_wait.kind <> 'sleep' THEN
            UPDATE events e SET wait_key = v_wait.key
             WHERE e.run_id = v_wait.run_id AND e.wait_key IS NULL
               AND e.event_id = (SELECT o.event_id FROM events o
                                  WHERE o.run_id = v_wait.run_id AND o.name = v_wait.name AND o.wait_key IS NULL
                                    AND (v_wait.kind = 'event' OR is_decision(o.payload))
                                  ORDER BY o.seq LIMIT 1)
            RETURNING e.payload INTO v_payload;
        END IF;
        IF v_payload IS NOT NULL OR v_wait.over THEN
            UPDATE waits SET done_at = p_now, payload = v_payload
             WHERE run_id = v_wait.run_id AND key = v_wait.key AND done_at IS NULL;
        END IF;
    END LOOP;

    RETURN QUERY
    SELECT c.run_id, c.key
      FROM unnest(p_run_ids, p_keys) AS i (run_id, key)
     CROSS JOIN LATERAL (
            SELECT w.run_id, w.key FROM waits w
             WHERE w.run_id = i.run_id AND w.key = i.key AND w.done_at IS NOT NULL
            OFFSET 0) c;
END
$$;

-- Whether there is anything for an open wait: its time has come, or an event of its name, or its child's end.
CREATE OR REPLACE FUNCTION @schema@.may_pass(
    p_run_id text, p_kind text, p_name text, p_due timestamptz, p_now timestamptz
) RETURNS boolean
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT CASE WHEN p_due <= p_now THEN true
                WHEN p_kind = 'sleep' THEN false
                WHEN p_kind = 'child' THEN child_status(p_name) IS NOT NULL
                ELSE EXISTS (SELECT 1 FROM events e
                              WHERE e.run_id = p_run_id AND e.name = p_name AND e.wait_key IS NULL
                                AND (p_kind = 'event' OR is_decision(e.payload)))
           END
$$;

-- How a run that another one waits for has ended: NULL while it is open, missing if it is gone.
CREATE OR REPLACE FUNCTION @schema@.child_status(p_run_id text) RETURNS text
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT CASE WHEN r.run_id IS NULL THEN 'missing' WHEN r.finished_at IS NOT NULL THEN r.status END
      FROM (SELECT p_run_id AS run_id) i LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
$$;

-- Passes what can pass of the waits that those of these locked runs stand at which are parked, sleeps apart: only the clock wakes
-- those. Answers the runs of which one is over.
CREATE OR REPLACE FUNCTION @schema@.pass_standing_waits(p_run_ids text[], p_now timestamptz) RETURNS SETOF text
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_run_ids text[];
    v_keys    text[];
BEGIN
    SELECT array_agg(c.run_id), array_agg(c.key) INTO v_run_ids, v_keys
      FROM unnest(p_run_ids) AS i (run_id)
     CROSS JOIN LATERAL (
            SELECT w.run_id, w.key FROM runs r JOIN waits w ON w.run_id = r.run_id AND w.wait_seq = r.wait_seq
             WHERE r.run_id = i.run_id AND r.wait_kind IS NOT NULL AND w.kind <> 'sleep'
            OFFSET 0) c;
    IF v_run_ids IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY SELECT DISTINCT p.run_id FROM pass_waits(v_run_ids, v_keys, p_now) p;
END
$$;

-- A wait as its play has to know it: for a sleep the seconds that are left, or null once they have passed; for others
-- {"kind", "name", "done", "left_s", "payload"}, the payload as text and only where p_inline, else "stored": true.
CREATE OR REPLACE FUNCTION @schema@.wait_state(
    p_kind text, p_name text, p_due timestamptz, p_done timestamptz, p_payload jsonb, p_inline boolean, p_now timestamptz
) RETURNS jsonb
LANGUAGE sql STABLE
AS $$
    SELECT CASE
        WHEN p_kind = 'sleep'
        THEN coalesce(to_jsonb(CASE WHEN p_done IS NULL THEN extract(epoch FROM p_due - p_now) END), 'null')
        ELSE jsonb_strip_nulls(jsonb_build_object(
                 'kind', p_kind, 'name', p_name, 'done', p_done IS NOT NULL,
                 'left_s', CASE WHEN p_done IS NULL THEN extract(epoch FROM p_due - p_now) END,
                 'payload', CASE WHEN p_inline THEN p_payload::text END,
                 'stored', CASE WHEN NOT p_inline AND p_payload IS NOT NULL THEN true END))
        END
$$;

-- All waits of a run by key, as wait_state. The payloads of the first that passed come along, up to 64 kB of them as
-- stored: the others are read when their play comes to them.
CREATE OR REPLACE FUNCTION @schema@.run_waits(p_run_id text, p_now timestamptz) RETURNS jsonb
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT jsonb_object_agg(w.key, wait_state(w.kind, w.name, w.due_at, w.done_at, w.payload, w.bytes <= 65536, p_now))
      FROM (SELECT c.*, sum(coalesce(pg_column_size(c.payload), 0)) OVER (ORDER BY c.done_at, c.key) AS bytes
              FROM waits c WHERE c.run_id = p_run_id) w
$$;

-- What a wait was given, as text.
CREATE OR REPLACE FUNCTION @schema@.read_wait_payload(p_run_id text, p_key text) RETURNS text
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT payload::text FROM waits WHERE run_id = p_run_id AND key = p_key
$$;

-- Waits that live attempts stand at in memory: registers them and passes those that can pass. Nothing of the run's row
-- changes, and it is not even locked where there is nothing new: attempts ask again with every wake of anybody. p_waits
-- as for register_waits.
-- answer: done, with {key: wait_state} of the waits asked for | busy (the row is locked: ask again) | lost.
CREATE OR REPLACE FUNCTION @schema@.try_waits(
    p_run_ids text[], p_attempts integer[], p_tokens bigint[], p_waits jsonb[]
) RETURNS TABLE (ord integer, answer text, states jsonb)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz;
    v_news  text[];  -- runs that have something to write
    v_free  text[];
    v_waits jsonb[];
    v_ids   text[];
    v_keys  text[];
BEGIN
    PERFORM require_read_committed();
    v_now := clock();
    SELECT array_agg(DISTINCT i.run_id) INTO v_news
      FROM unnest(p_run_ids, p_waits) AS i (run_id, waits)
     CROSS JOIN LATERAL jsonb_to_recordset(i.waits) AS w (key text)
      LEFT JOIN LATERAL (SELECT * FROM waits WHERE run_id = i.run_id AND key = w.key OFFSET 0) c ON true
     WHERE c.run_id IS NULL
        OR (c.done_at IS NULL AND may_pass(c.run_id, c.kind, c.name, c.due_at, v_now));
    SELECT array_agg(t.run_id), array_agg(t.waits) INTO v_free, v_waits
      FROM (SELECT r.run_id, i.waits
              FROM unnest(p_run_ids, p_attempts, p_tokens, p_waits) AS i (run_id, attempt, token, waits)
              JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
             WHERE i.run_id = ANY (v_news) AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
               FOR NO KEY UPDATE OF r SKIP LOCKED) t;
    v_now := clock();

    PERFORM register_waits(v_free, v_waits, NULL, v_now);
    SELECT array_agg(i.run_id), array_agg(w.key) INTO v_ids, v_keys
      FROM unnest(v_free, v_waits) AS i (run_id, waits)
     CROSS JOIN LATERAL jsonb_to_recordset(i.waits) AS w (key text);
    PERFORM pass_waits(v_ids, v_keys, v_now);

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN r.run_id IS NULL THEN 'lost'
                WHEN i.run_id = ANY (v_news) AND i.run_id = ANY (v_free) IS NOT TRUE THEN 'busy'
                ELSE 'done' END,
           CASE WHEN r.run_id IS NOT NULL AND (i.run_id = ANY (v_free) OR i.run_id = ANY (v_news) IS NOT TRUE)
                THEN s.states END
      FROM unnest(p_run_ids, p_attempts, p_tokens, p_waits) WITH ORDINALITY
           AS i (run_id, attempt, token, waits, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt
                      AND r.lease_token = i.token
      LEFT JOIN LATERAL (
            SELECT jsonb_object_agg(c.key, wait_state(c.kind, c.name, c.due_at, c.done_at, c.payload, true, v_now)) AS states
              FROM jsonb_to_recordset(i.waits) AS w (key text)
             CROSS JOIN LATERAL (SELECT * FROM waits WHERE run_id = i.run_id AND key = w.key OFFSET 0) c) s ON true;
END
$$;

-- Looks at the runs that somebody has something for. A parked one that stands at a wait which is over now is due at
-- once; a running one finds out by itself: its host hears of the same wake, and its next park looks. Locked runs keep
-- their wakes and do not count against p_limit, so they hide nobody behind them.
-- Answers how many runs are due now because of it, and whether wakes are left.
CREATE OR REPLACE FUNCTION @schema@.sweep_wakes(p_limit integer) RETURNS TABLE (woken integer, remaining boolean)
LANGUAGE plpgsql
@lookup@
AS $$
DECLARE
    v_now    timestamptz;
    v_wakes  bigint[];
    v_parked text[];
    v_woken  integer := 0;
BEGIN
    PERFORM require_read_committed();

    SELECT array_agg(t.id), array_agg(DISTINCT t.run_id) FILTER (WHERE t.wait_kind IS NOT NULL)
      INTO v_wakes, v_parked
      FROM (SELECT w.id, r.run_id, r.wait_kind FROM wakes w
              JOIN runs r ON r.run_id = ANY (ARRAY[w.run_id])
             ORDER BY w.id
             LIMIT p_limit
               FOR NO KEY UPDATE OF r SKIP LOCKED
               FOR UPDATE OF w SKIP LOCKED) t;
    v_now := clock();

    IF v_parked IS NOT NULL THEN
        UPDATE runs r SET due_at = v_now
          FROM pass_standing_waits(v_parked, v_now) AS p (run_id)
         WHERE r.run_id = ANY (ARRAY[p.run_id]) AND r.wait_kind IS NOT NULL AND r.due_at > v_now;
        GET DIAGNOSTICS v_woken = ROW_COUNT;
    END IF;
    DELETE FROM wakes WHERE id = ANY (v_wakes);
    IF cardinality(v_wakes) = p_limit THEN
        RETURN QUERY SELECT v_woken, true;
        RETURN;
    END IF;
    DELETE FROM wakes
     WHERE id IN (SELECT w.id FROM wakes w
                   WHERE NOT EXISTS (SELECT 1 FROM runs r WHERE r.run_id = ANY (ARRAY[w.run_id]))
                   LIMIT p_limit FOR UPDATE SKIP LOCKED);

    RETURN QUERY SELECT v_woken, EXISTS (SELECT 1 FROM wakes);
END
$$;
