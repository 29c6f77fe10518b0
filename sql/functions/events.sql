-- events: what somebody has to tell a run.
--
-- Lock order: none. Senders insert an event and a wake, and read; they touch nothing of a run, so they fit into any
-- transaction at any isolation level. The key (run, event id) is guarded by a transaction-level advisory lock where
-- the caller chose the id, which is *tried* for hosts: an id in somebody's open transaction makes one item busy.
-- Fence: the primary key of events.

-- Whether an approval takes the payload of an event: it says yes or no.
CREATE OR REPLACE FUNCTION @schema@.is_decision(p_payload jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE
AS $$
    SELECT coalesce(jsonb_typeof(p_payload -> 'approved') = 'boolean', false)
$$;

-- The open waits of a run for events of a name: those it stands at, or may stand at while an attempt of it lives.
CREATE OR REPLACE FUNCTION @schema@.waits_for(p_run_id text, p_name text) RETURNS TABLE (kind text)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT c.kind FROM runs r JOIN waits c ON c.run_id = r.run_id
     WHERE r.run_id = p_run_id AND c.name = p_name AND c.done_at IS NULL AND c.kind IN ('event', 'approval')
       AND (c.wait_seq = r.wait_seq OR r.lease_expires_at IS NOT NULL)
$$;

-- Sends events. p_named: the caller chose the event id, so somebody else might too. p_requests: random per item, kept
-- with the event, by which an item that is asked again after a lost answer recognises its own event.
-- p_wait: wait for an id in an open transaction instead of answering busy.
--
-- answer: delivered (the run waits for it, or has taken it) | kept (for a wait that is still to come) | duplicate (an
-- equal event with this id was sent before) | conflict (another one was) | ended (the run has) | missing | busy |
-- undecided (nothing was sent: only approvals of that name are waited for, and the payload says neither yes nor no).
-- What the run does at this very moment can make the first two change places; either way the event counts once.
CREATE OR REPLACE FUNCTION @schema@.send_events(
    p_run_ids text[], p_names text[], p_event_ids text[], p_named boolean[], p_payloads jsonb[], p_requests bigint[],
    p_wait boolean
) RETURNS TABLE (ord integer, answer text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now    CONSTANT timestamptz := clock();
    v_busy   boolean[] := array_fill(false, ARRAY[cardinality(p_run_ids)]);
    v_refuse boolean[];
    v_lock   bigint;
BEGIN
    FOR i IN 1 .. cardinality(p_run_ids) LOOP
        CONTINUE WHEN NOT p_named[i];
        v_lock := hashtextextended(concat_ws(E'\x1f', '@schema@', p_run_ids[i], p_event_ids[i]), 3);
        IF p_wait THEN
            PERFORM pg_advisory_xact_lock(v_lock);
        ELSIF NOT pg_try_advisory_xact_lock(v_lock) THEN
            v_busy[i] := true;
        END IF;
    END LOOP;

    SELECT array_agg(NOT is_decision(i.payload) AND coalesce(w.decides, false) ORDER BY i.ord) INTO v_refuse
      FROM unnest(p_run_ids, p_names, p_payloads) WITH ORDINALITY AS i (run_id, name, payload, ord)
      LEFT JOIN LATERAL (SELECT bool_and(s.kind = 'approval') AS decides FROM waits_for(i.run_id, i.name) s) w ON true;

    WITH made AS (
        INSERT INTO events (created_at, request, run_id, event_id, name, payload)
        SELECT v_now, i.request, i.run_id, i.event_id, i.name, i.payload
          FROM unnest(p_run_ids, p_names, p_event_ids, p_payloads, p_requests, v_busy, v_refuse) WITH ORDINALITY
               AS i (run_id, name, event_id, payload, request, busy, refuse, ord)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.finished_at IS NULL
         WHERE NOT i.busy AND NOT i.refuse
         ORDER BY i.ord
        ON CONFLICT DO NOTHING
        RETURNING run_id
    )
    INSERT INTO wakes (created_at, run_id) SELECT DISTINCT v_now, run_id FROM made;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN i.busy THEN 'busy'
                WHEN r.run_id IS NULL THEN 'missing'
                WHEN e.run_id IS NULL AND i.refuse AND r.finished_at IS NULL THEN 'undecided'
                WHEN e.run_id IS NULL THEN 'ended'
                WHEN e.request = i.request THEN
                     CASE WHEN e.wait_key IS NOT NULL OR EXISTS (
                                   SELECT 1 FROM waits_for(e.run_id, e.name) s
                                    WHERE s.kind = 'event' OR is_decision(e.payload))
                          THEN 'delivered' ELSE 'kept' END
                WHEN e.name = i.name AND same_payload(e.payload, i.payload) THEN 'duplicate'
                ELSE 'conflict' END
      FROM unnest(p_run_ids, p_names, p_event_ids, p_payloads, p_requests, v_busy, v_refuse) WITH ORDINALITY
           AS i (run_id, name, event_id, payload, request, busy, refuse, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
      LEFT JOIN LATERAL (SELECT * FROM events WHERE run_id = i.run_id AND event_id = i.event_id OFFSET 0) e ON true;
END
$$;

-- The public SQL door:
--
--   SELECT runlane.send_event('01939c…', '{"approved": true, "by": "ada"}', '{"name": "deploy"}');
--
-- It only inserts, and so locks nothing of the run, however long the caller's transaction stays open; hosts wake the
-- run once it is committed. Options: name (of the event, required), event_id (the same one counts once), notify.
-- Answers as send_events; an event id that was used for another event raises SQLSTATE RL003, an approval that says
-- neither yes nor no RL001.
CREATE OR REPLACE FUNCTION @schema@.send_event(p_run_id text, p_payload jsonb, p_options jsonb DEFAULT '{}')
RETURNS text
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
DECLARE
    v_name   text;
    v_id     text;
    v_answer text;
BEGIN
    PERFORM check_options(p_options, '{name, event_id, notify}');
    PERFORM check_payload('payload', p_payload);
    v_name := text_option(p_options, 'name', 255);
    IF v_name IS NULL THEN
        PERFORM refuse('options.name', 'is required: the name of the event');
    END IF;
    v_id := text_option(p_options, 'event_id', 255);

    SELECT a.answer INTO v_answer
      FROM send_events(ARRAY[p_run_id], ARRAY[v_name], ARRAY[coalesce(v_id, gen_random_uuid()::text)],
                       ARRAY[v_id IS NOT NULL], ARRAY[p_payload],
                       ARRAY[('x' || left(md5(gen_random_uuid()::text), 15))::bit(60)::bigint], true) a;
    IF v_answer = 'undecided' THEN
        PERFORM refuse('payload', format('run %s waits for an approval %L: say {"approved": true} or false', p_run_id, v_name));
    END IF;
    IF v_answer = 'conflict' THEN
        RAISE EXCEPTION 'event id % was used for another event of run %', v_id, p_run_id
            USING ERRCODE = 'RL003', DETAIL = p_run_id;
    END IF;
    IF v_answer IN ('delivered', 'kept') AND coalesce((p_options ->> 'notify')::boolean, true) THEN
        PERFORM pg_notify(channel('wakes'), '');
    END IF;
    RETURN v_answer;
END
$$;

-- One page of a run's events, in the order of their arrival.
CREATE OR REPLACE FUNCTION @schema@.read_events(p_run_id text, p_after bigint, p_limit integer)
RETURNS TABLE (seq bigint, event_id text, name text, payload jsonb, created_at timestamptz, wait_key text)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT e.seq, e.event_id, e.name, e.payload, e.created_at, e.wait_key FROM events e
     WHERE e.run_id = p_run_id AND e.seq > p_after ORDER BY e.seq LIMIT p_limit
$$;
