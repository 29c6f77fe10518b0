-- submit: the public SQL door for programs that are not hosts.
--
--   SELECT * FROM runlane.submit_run('audit', '{"path": "…"}', '{"delay": 60}');
--
-- It may be called inside the caller's own transaction: rolled back means never seen. Everything is checked
-- here that a host checks at its own door; a refusal raises SQLSTATE RL001 and names the field. A run id or
-- idempotency key of another run raises RL003, a unique key that another run holds RL004; DETAIL is that run's id.
-- Options: run_id, idempotency_key, org_id, priority, delay (seconds), at (a timestamp with its zone), labels, release_id,
-- environment, concurrency_key (required, but may be null, where the play has a limit per key), receiver (as runs carry
-- it), unique_key, unique_for_s (seconds; absent: until the run has ended), on_conflict (reject, existing or replace; of
-- the unique key), surface, trigger, scope, terminal_receiver, array_input_receiver, terminal_performance (basic or
-- full), notify (default true).

CREATE OR REPLACE FUNCTION @schema@.refuse(p_field text, p_reason text) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    RAISE EXCEPTION '%: %', p_field, p_reason USING ERRCODE = 'RL001', DETAIL = p_field;
END
$$;

-- Refuses options that are no object, an option that is not one of p_known, and a bad notify, which all have.
CREATE OR REPLACE FUNCTION @schema@.check_options(p_options jsonb, p_known text[]) RETURNS void
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
DECLARE
    v_field text;
BEGIN
    IF jsonb_typeof(p_options) <> 'object' THEN
        PERFORM refuse('options', 'must be an object');
    END IF;
    SELECT key INTO v_field FROM jsonb_object_keys(p_options) AS key WHERE key <> ALL (p_known) ORDER BY key LIMIT 1;
    IF FOUND THEN
        PERFORM refuse('options.' || v_field, 'unknown option; known are ' || array_to_string(p_known, ', '));
    END IF;
    IF jsonb_typeof(p_options -> 'notify') NOT IN ('boolean', 'null') THEN
        PERFORM refuse('options.notify', 'must be true or false');
    END IF;
END
$$;

-- A text option, or NULL where it is absent or null.
CREATE OR REPLACE FUNCTION @schema@.text_option(p_options jsonb, p_name text, p_most integer) RETURNS text
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF jsonb_typeof(p_options -> p_name) NOT IN ('string', 'null')
       OR length(p_options ->> p_name) NOT BETWEEN 1 AND p_most
    THEN
        PERFORM refuse('options.' || p_name, format('must be a string of 1 to %s characters', p_most));
    END IF;
    RETURN p_options ->> p_name;
END
$$;

-- A number option, or NULL where it is absent or null. Numeric, because a JSON number may be too large for a double.
CREATE OR REPLACE FUNCTION @schema@.number_option(p_options jsonb, p_name text) RETURNS numeric
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF jsonb_typeof(p_options -> p_name) NOT IN ('number', 'null') THEN
        PERFORM refuse('options.' || p_name, 'must be a number');
    END IF;
    RETURN (p_options ->> p_name)::numeric;
END
$$;

-- A moment that a text option names, or NULL where it is absent or null. What it names must not depend on where it is
-- read: it is read in two time zones. (The function's own setting of the zone is undone at its end.)
CREATE OR REPLACE FUNCTION @schema@.moment_option(p_options jsonb, p_name text) RETURNS timestamptz
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
SET TimeZone = 'UTC'
AS $$
DECLARE
    v_text  CONSTANT text := text_option(p_options, p_name, 100);
    v_field CONSTANT text := 'options.' || p_name;
    v_at    timestamptz;
BEGIN
    IF v_text IS NULL THEN
        RETURN NULL;
    END IF;
    BEGIN
        v_at := v_text::timestamptz;
        PERFORM set_config('TimeZone', 'Etc/GMT+12', true);
        IF v_at <> v_text::timestamptz THEN
            PERFORM refuse(v_field, format('%L has no time zone: add Z or an offset', v_text));
        END IF;
    EXCEPTION WHEN data_exception THEN
        PERFORM refuse(v_field, format('%L is not a timestamp', v_text));
    END;
    IF NOT isfinite(v_at) THEN
        PERFORM refuse(v_field, 'must be a finite timestamp');
    END IF;
    RETURN v_at;
END
$$;

-- A text option that is one of p_allowed, or NULL where it is absent or null.
CREATE OR REPLACE FUNCTION @schema@.choice_option(p_options jsonb, p_name text, p_allowed text[]) RETURNS text
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF (p_options ->> p_name) <> ALL (p_allowed) OR jsonb_typeof(p_options -> p_name) NOT IN ('string', 'null') THEN
        PERFORM refuse('options.' || p_name, 'must be one of ' || array_to_string(p_allowed, ', '));
    END IF;
    RETURN p_options ->> p_name;
END
$$;

-- What few runs have, out of the options of submit_run, or NULL: the p_extras of admit_runs.
CREATE OR REPLACE FUNCTION @schema@.extra_options(p_options jsonb) RETURNS jsonb
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
DECLARE
    v_key    text := text_option(p_options, 'unique_key', 255);
    v_for_s  numeric := number_option(p_options, 'unique_for_s');
    v_choice text := choice_option(p_options, 'on_conflict', '{reject, existing, replace}');
BEGIN
    IF v_key IS NULL AND num_nonnulls(v_for_s, v_choice) > 0 THEN
        PERFORM refuse('options.unique_key', 'unique_for_s and on_conflict are of a unique key: give one');
    ELSIF v_for_s <= 0 OR v_for_s > 316224000 THEN
        PERFORM refuse('options.unique_for_s', 'must be seconds above 0, at most 316224000 (10 years)');
    END IF;
    RETURN nullif(jsonb_strip_nulls(jsonb_build_object(
        'unique', CASE WHEN v_key IS NOT NULL THEN jsonb_build_object(
            'key', v_key, 'for_s', v_for_s, 'on_conflict', coalesce(v_choice, 'reject')) END,
        'surface', choice_option(p_options, 'surface', '{api, app, chat, cli, sdk, sql}'),
        'trigger', choice_option(p_options, 'trigger',
            '{api, event, manual, parent, schedule, sql_listener, system, webhook}'),
        'scope', choice_option(p_options, 'scope', '{org, system}'),
        'receiver', text_option(p_options, 'receiver', 128),
        'terminal_receiver', text_option(p_options, 'terminal_receiver', 128),
        'array_input_receiver', text_option(p_options, 'array_input_receiver', 128),
        'terminal_performance', choice_option(p_options, 'terminal_performance', '{basic, full}'),
        'concurrency_key', text_option(p_options, 'concurrency_key', 255))), '{}');
END
$$;

-- Refuses what jsonb takes and a host could not read back or would not have sent.
CREATE OR REPLACE FUNCTION @schema@.check_payload(p_field text, p_payload jsonb) RETURNS void
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF p_payload IS NULL THEN
        PERFORM refuse(p_field, 'must be JSON; for none pass ''null''::jsonb');
    ELSIF octet_length(p_payload::text) > 1048576 THEN
        PERFORM refuse(p_field, format('%s bytes are more than the limit of 1048576', octet_length(p_payload::text)));
    ELSIF jsonb_path_exists(p_payload, 'strict $.**{64} ? (@.type() == "object" || @.type() == "array")') THEN
        PERFORM refuse(p_field, 'nested deeper than 64 levels');
    ELSIF jsonb_path_exists(p_payload, 'strict $.** ? (@ >= 1e640 || @ <= -1e640)') THEN
        PERFORM refuse(p_field, 'a number has more than 640 digits');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION @schema@.new_run_id() RETURNS text
LANGUAGE sql VOLATILE
AS $$
    -- UUIDv7 (RFC 9562): milliseconds in front, so that new runs land together in every index; the
    -- rest, variant bits included, is a random UUID's.
    SELECT (lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0')
            || '7' || substr(replace(gen_random_uuid()::text, '-', ''), 14))::uuid::text
$$;

CREATE OR REPLACE FUNCTION @schema@.submit_run(p_play text, p_input jsonb, p_options jsonb DEFAULT '{}')
RETURNS TABLE (run_id text, created boolean)
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    v_run_id      text;
    v_key         text;
    v_org         text;
    v_release     text;
    v_environment text;
    v_priority    numeric;
    v_delay       numeric;
    v_at          timestamptz;
    v_labels      jsonb;
    v_answer      record;
BEGIN
    PERFORM check_options(p_options, '{run_id, idempotency_key, org_id, priority, delay, at, labels, release_id,
        environment, concurrency_key, receiver, unique_key, unique_for_s, on_conflict, surface, trigger, scope,
        terminal_receiver, array_input_receiver, terminal_performance, notify}');
    PERFORM check_payload('input', p_input);
    IF NOT EXISTS (SELECT 1 FROM plays WHERE name = p_play) THEN
        PERFORM refuse('play', format('no host has ever registered a play named %L', coalesce(p_play, 'NULL')));
    END IF;

    v_run_id := text_option(p_options, 'run_id', 128);
    IF v_run_id !~ '^[A-Za-z0-9._:-]+$' THEN
        PERFORM refuse('options.run_id', 'must be 1 to 128 of A-Z a-z 0-9 . _ : -');
    END IF;
    v_key := text_option(p_options, 'idempotency_key', 255);
    v_org := text_option(p_options, 'org_id', 255);
    v_release := text_option(p_options, 'release_id', 255);
    v_environment := text_option(p_options, 'environment', 255);
    v_labels := nullif(p_options -> 'labels', 'null');
    IF jsonb_typeof(v_labels) <> 'object' THEN
        PERFORM refuse('options.labels', 'must be an object of strings');
    END IF;
    IF (SELECT count(*) > 32 OR NOT coalesce(bool_and(jsonb_typeof(l.value) = 'string' AND length(l.value #>> '{}') <= 256
                                             AND length(l.key) BETWEEN 1 AND 64), true)
          FROM jsonb_each(v_labels) l)
    THEN
        PERFORM refuse('options.labels', 'must be at most 32 strings of up to 256 characters, by keys of 1 to 64');
    END IF;
    v_priority := coalesce(number_option(p_options, 'priority'), 0);
    IF v_priority NOT IN (-2, -1, 0, 1, 2) THEN
        PERFORM refuse('options.priority', 'must be a whole number from -2 to 2');
    END IF;
    v_delay := number_option(p_options, 'delay');
    IF v_delay NOT BETWEEN 0 AND 316224000 THEN
        PERFORM refuse('options.delay', 'must be seconds from 0 to 316224000 (10 years)');
    END IF;
    v_at := moment_option(p_options, 'at');
    IF num_nonnulls(v_delay, v_at) = 2 THEN
        PERFORM refuse('options.at', 'give delay or at, not both');
    END IF;
    -- Only who has the play knows what key it makes of the input, or that it makes none.
    IF NOT p_options ? 'concurrency_key' AND EXISTS (SELECT 1 FROM limits WHERE kind = 'key' AND name = p_play) THEN
        PERFORM refuse('options.concurrency_key', format(
            'play %L limits how many runs of one key go at once: give the run''s key, or null if it has none', p_play));
    END IF;

    SELECT a.* INTO v_answer
      FROM admit_runs(
               ARRAY[coalesce(v_run_id, new_run_id())], ARRAY[v_run_id IS NOT NULL], ARRAY[p_play],
               ARRAY[bucket_of(p_play, v_release, v_environment, v_priority::integer)],
               ARRAY[v_priority::smallint], ARRAY[v_org], ARRAY[v_key], ARRAY[v_delay::double precision], ARRAY[v_at],
               ARRAY[v_labels], ARRAY[p_input], ARRAY[extra_options(p_options)],
               ARRAY[('x' || left(md5(gen_random_uuid()::text), 15))::bit(60)::bigint],
               ARRAY[false], NULL, NULL, v_release, v_environment, true) a;

    IF v_answer.outcome IN ('conflict', 'two_runs') THEN
        RAISE EXCEPTION 'run id or idempotency key is taken by run % with another play, key or input', v_answer.run_id
            USING ERRCODE = 'RL003', DETAIL = v_answer.run_id;
    ELSIF v_answer.outcome = 'duplicate' THEN
        RAISE EXCEPTION 'unique key is held by run %', v_answer.run_id USING ERRCODE = 'RL004', DETAIL = v_answer.run_id;
    ELSIF v_answer.outcome = 'busy' THEN
        RAISE EXCEPTION 'run id or idempotency key was taken by a transaction this one cannot see'
            USING ERRCODE = 'serialization_failure';
    END IF;

    IF coalesce((p_options ->> 'notify')::boolean, true) THEN
        PERFORM pg_notify(channel('runs'), '');
        IF p_options ->> 'on_conflict' = 'replace' THEN
            PERFORM pg_notify(channel('control'), '');
        END IF;
    END IF;
    RETURN QUERY SELECT v_answer.run_id, v_answer.created;
END
$$;

-- The notification channel of a concern: constant payload, at most 63 bytes whatever the schema is called.
CREATE OR REPLACE FUNCTION @schema@.channel(p_kind text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN octet_length('@schema_name@') <= 40 THEN '@schema_name@'
                ELSE md5('@schema_name@') END || '_' || p_kind
$$;
