-- schedules: what fires when, and one run per fire.
--
-- Lock order: schedule, fire, then what admission does. Rows that somebody holds are answered busy, never waited for.
-- Fence of a fire: the schedule has the next_fire_at and the revision from which the host computed what fires, a pause
-- being a revision of its own; moving next_fire_at, the row in fires and the run come in one transaction. Hosts compute times (time
-- zones and cron lines need a library), the clock is the database's.

-- Creates a schedule or changes it, by name. Its next fire is p_next where it is new or fires at other times than before;
-- otherwise it stays, also where it is overdue. A pause stays.
--
-- answer: created | changed | unchanged | busy | environment (the name is taken in another one) | unknown_play.
CREATE OR REPLACE FUNCTION @schema@.put_schedule(
    p_name text, p_play text, p_input jsonb, p_cron text, p_every_s integer, p_timezone text, p_missed text,
    p_priority smallint, p_org text, p_labels jsonb, p_extras jsonb, p_release text, p_environment text,
    p_next timestamptz
) RETURNS text
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_now timestamptz;
    v_was schedules;
BEGIN
    PERFORM require_read_committed();
    IF NOT EXISTS (SELECT 1 FROM plays WHERE name = ANY (ARRAY[p_play])) THEN
        RETURN 'unknown_play';
    END IF;
    SELECT * INTO v_was FROM schedules s WHERE s.name = ANY (ARRAY[p_name]) FOR NO KEY UPDATE SKIP LOCKED;
    v_now := clock();

    IF NOT FOUND THEN
        INSERT INTO schedules (name, play, input, cron, every_s, timezone, missed, priority, org_id, labels, extras,
                               release_id, environment, created_at, updated_at, next_fire_at)
        VALUES (p_name, p_play, p_input, p_cron, p_every_s, p_timezone, p_missed, p_priority, p_org, p_labels, p_extras,
                p_release, p_environment, v_now, v_now, p_next)
        ON CONFLICT (name) DO NOTHING;
        RETURN CASE WHEN FOUND THEN 'created' ELSE 'busy' END;  -- held by somebody, or made in this moment
    ELSIF v_was.environment IS DISTINCT FROM p_environment THEN
        RETURN 'environment';
    ELSIF same_payload(v_was.input, p_input) AND
          (v_was.play, v_was.cron, v_was.every_s, v_was.timezone, v_was.missed, v_was.priority, v_was.org_id,
           v_was.labels, v_was.extras, v_was.release_id)
          IS NOT DISTINCT FROM
          (p_play, p_cron, p_every_s, p_timezone, p_missed, p_priority, p_org, p_labels, p_extras,
           p_release)
    THEN
        RETURN 'unchanged';
    END IF;

    UPDATE schedules s
       SET play = p_play, input = p_input, cron = p_cron, every_s = p_every_s, timezone = p_timezone, missed = p_missed,
           priority = p_priority, org_id = p_org, labels = p_labels, extras = p_extras, release_id = p_release,
           updated_at = v_now, revision = s.revision + 1,
           next_fire_at = CASE WHEN (s.cron, s.every_s, s.timezone) IS NOT DISTINCT FROM (p_cron, p_every_s, p_timezone)
                               THEN s.next_fire_at ELSE p_next END
     WHERE s.name = ANY (ARRAY[p_name]);
    RETURN 'changed';
END
$$;

-- Schedules of these plays belong to the release whose host started last: their runs must find a host after a deployment.
-- Answers how many somebody holds and have to be asked for again.
CREATE OR REPLACE FUNCTION @schema@.adopt_schedules(p_plays text[], p_release text, p_environment text) RETURNS integer
LANGUAGE plpgsql
@lookup@
AS $$
BEGIN
    PERFORM require_read_committed();
    WITH free AS (
        SELECT s.name FROM schedules s
         WHERE s.play = ANY (p_plays) AND s.environment IS NOT DISTINCT FROM p_environment
           AND s.release_id IS DISTINCT FROM p_release
           FOR NO KEY UPDATE SKIP LOCKED
    )
    UPDATE schedules s SET release_id = p_release
      FROM free
     WHERE s.name = ANY (ARRAY[free.name]) AND s.play = ANY (p_plays);
    RETURN (SELECT count(*) FROM schedules s
             WHERE s.play = ANY (p_plays) AND s.environment IS NOT DISTINCT FROM p_environment
               AND s.release_id IS DISTINCT FROM p_release);
END
$$;

-- answer: done (also when it was so already) | busy | missing.
CREATE OR REPLACE FUNCTION @schema@.pause_schedule(p_name text, p_paused boolean) RETURNS text
LANGUAGE plpgsql
@seek@
AS $$
BEGIN
    PERFORM require_read_committed();
    PERFORM 1 FROM schedules s WHERE s.name = ANY (ARRAY[p_name]) FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        UPDATE schedules s SET paused_at = CASE WHEN p_paused THEN clock() END, revision = s.revision + 1
         WHERE s.name = ANY (ARRAY[p_name]) AND (s.paused_at IS NOT NULL) <> p_paused;
        RETURN 'done';
    END IF;
    RETURN CASE WHEN EXISTS (SELECT 1 FROM schedules s WHERE s.name = ANY (ARRAY[p_name])) THEN 'busy' ELSE 'missing' END;
END
$$;

-- What it has fired stays until retention takes it. answer: done | busy | missing (also when it was deleted before).
CREATE OR REPLACE FUNCTION @schema@.delete_schedule(p_name text) RETURNS text
LANGUAGE plpgsql
@seek@
AS $$
BEGIN
    PERFORM require_read_committed();
    PERFORM 1 FROM schedules s WHERE s.name = ANY (ARRAY[p_name]) FOR UPDATE SKIP LOCKED;
    IF FOUND THEN
        DELETE FROM schedules s WHERE s.name = ANY (ARRAY[p_name]);
        RETURN 'done';
    END IF;
    RETURN CASE WHEN EXISTS (SELECT 1 FROM schedules s WHERE s.name = ANY (ARRAY[p_name])) THEN 'busy' ELSE 'missing' END;
END
$$;

-- Schedules whose next fire has come, longest due first, with the database's time. Always ends with one row with name
-- NULL, whose next_due_s is the number of seconds until the first that is not due yet (NULL: there is none).
CREATE OR REPLACE FUNCTION @schema@.due_schedules(p_limit integer)
RETURNS TABLE (
    name text, next_fire_at timestamptz, revision integer, cron text, every_s integer, timezone text, missed text,
    now timestamptz, next_due_s double precision
)
LANGUAGE plpgsql STABLE
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now CONSTANT timestamptz := clock();
BEGIN
    RETURN QUERY
    SELECT s.name, s.next_fire_at, s.revision, s.cron, s.every_s, s.timezone, s.missed, v_now, NULL::double precision
      FROM schedules s
     WHERE s.paused_at IS NULL AND s.next_fire_at <= v_now
     ORDER BY s.next_fire_at LIMIT p_limit;
    RETURN QUERY
    SELECT NULL::text, NULL::timestamptz, NULL::integer, NULL::text, NULL::integer, NULL::text, NULL::text, v_now,
           seconds_until((SELECT s.next_fire_at FROM schedules s
                           WHERE s.paused_at IS NULL AND s.next_fire_at > v_now
                           ORDER BY s.next_fire_at LIMIT 1), v_now);
END
$$;

-- Fires. Per schedule: its name, the next_fire_at and revision it was read with, and what comes next; beside that, the
-- fires of all of them (none where all were missed and are skipped).
--
-- answer: done | lost (somebody fired, changed or paused it, or is about to). A fire that is recorded already, because
-- the clock went back, makes no second run. lags_s: seconds from each fire's time to its run, of the runs made.
CREATE OR REPLACE FUNCTION @schema@.fire_schedules(
    p_names text[], p_expected timestamptz[], p_revisions integer[], p_nexts timestamptz[],
    p_fire_names text[], p_fire_ats timestamptz[]
) RETURNS TABLE (ord integer, answer text, lags_s double precision[])
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_now   timestamptz;
    v_moved text[];
    v_names text[];
    v_ats   timestamptz[];
    v_runs  text[];
BEGIN
    PERFORM require_read_committed();

    WITH free AS (
        SELECT i.*
          FROM unnest(p_names, p_expected, p_revisions, p_nexts) AS i (name, expected, revision, next)
          JOIN schedules s ON s.name = ANY (ARRAY[i.name])
         WHERE s.next_fire_at = i.expected AND s.revision = i.revision
           FOR NO KEY UPDATE OF s SKIP LOCKED
    ), moved AS (
        UPDATE schedules s SET next_fire_at = i.next
          FROM free i
         WHERE s.name = ANY (ARRAY[i.name]) AND s.next_fire_at = i.expected AND s.revision = i.revision
        RETURNING s.name
    )
    SELECT coalesce(array_agg(name), '{}') INTO v_moved FROM moved;
    v_now := clock();

    WITH fresh AS (
        INSERT INTO fires (schedule, fire_at, fired_at, run_id)
        SELECT f.name, f.fire_at, v_now, new_run_id()
          FROM unnest(p_fire_names, p_fire_ats) AS f (name, fire_at)
         WHERE f.name = ANY (v_moved)
        ON CONFLICT (schedule, fire_at) DO NOTHING
        RETURNING schedule, fire_at, run_id
    )
    SELECT array_agg(schedule), array_agg(fire_at), array_agg(run_id) INTO v_names, v_ats, v_runs FROM fresh;
    PERFORM admit_fires(v_names, v_ats, v_runs);

    RETURN QUERY
    SELECT i.ord::integer, CASE WHEN i.name = ANY (v_moved) THEN 'done' ELSE 'lost' END,
           (SELECT array_agg(extract(epoch FROM v_now - f.fire_at)::double precision)
              FROM unnest(v_names, v_ats) AS f (name, fire_at) WHERE f.name = i.name)
      FROM unnest(p_names) WITH ORDINALITY AS i (name, ord);
END
$$;

-- Admits the runs of fires, as their schedules say now. Every run tells its schedule and fire in its labels.
CREATE OR REPLACE FUNCTION @schema@.admit_fires(p_names text[], p_fire_ats timestamptz[], p_run_ids text[]) RETURNS void
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_group record;
BEGIN
    FOR v_group IN
        SELECT s.release_id, s.environment, count(*)::integer AS n,
               array_agg(f.run_id) AS run_ids, array_agg(s.play) AS plays, array_agg(s.priority) AS priorities,
               array_agg(bucket_of(s.play, s.release_id, s.environment, s.priority)) AS buckets,
               array_agg(s.org_id) AS orgs, array_agg(s.input) AS inputs, array_agg(s.extras) AS extras,
               array_agg(coalesce(s.labels, '{}') || jsonb_build_object('schedule', s.name, 'fire_at',
                   to_char(f.fire_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))) AS labels,
               array_agg(('x' || left(md5(gen_random_uuid()::text), 15))::bit(60)::bigint) AS requests
          FROM unnest(p_names, p_fire_ats, p_run_ids) AS f (name, fire_at, run_id)
         CROSS JOIN LATERAL (SELECT * FROM schedules g WHERE g.name = f.name OFFSET 0) s
         GROUP BY s.release_id, s.environment
    LOOP
        IF EXISTS (
            SELECT 1 FROM admit_runs(
                v_group.run_ids, array_fill(false, ARRAY[v_group.n]), v_group.plays, v_group.buckets, v_group.priorities,
                v_group.orgs, array_fill(NULL::text, ARRAY[v_group.n]), array_fill(NULL::double precision, ARRAY[v_group.n]),
                array_fill(NULL::timestamptz, ARRAY[v_group.n]), v_group.labels, v_group.inputs,
                v_group.extras, v_group.requests, array_fill(false, ARRAY[v_group.n]),
                NULL, NULL, v_group.release_id, v_group.environment, false) a
             WHERE NOT a.created)
        THEN
            RAISE EXCEPTION 'a new run id was taken already' USING ERRCODE = 'serialization_failure';
        END IF;
    END LOOP;
END
$$;

-- Submits a recorded fire again, as its schedule says now, if its run is not there any more.
--
-- The new run has an id of its own: a ledger may know the lost one. answer: repaired | existing (nothing was lost, or it
-- was repaired before) | busy | no_schedule | no_fire.
CREATE OR REPLACE FUNCTION @schema@.repair_fire(p_name text, p_fire_at timestamptz)
RETURNS TABLE (answer text, run_id text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
DECLARE
    v_fire   fires;
    v_run_id text;
BEGIN
    PERFORM require_read_committed();
    PERFORM 1 FROM schedules s WHERE s.name = ANY (ARRAY[p_name]) FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN QUERY SELECT CASE WHEN EXISTS (SELECT 1 FROM schedules s WHERE s.name = ANY (ARRAY[p_name]))
                                 THEN 'busy' ELSE 'no_schedule' END, NULL::text;
        RETURN;
    END IF;
    -- Everybody who changes a fire holds its schedule, but for retention, which takes fires with their runs.
    SELECT * INTO v_fire FROM fires f
     WHERE f.schedule = ANY (ARRAY[p_name]) AND f.fire_at = p_fire_at FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 'no_fire'::text, NULL::text;
    ELSIF EXISTS (SELECT 1 FROM runs r WHERE r.run_id = ANY (ARRAY[v_fire.run_id])) THEN
        RETURN QUERY SELECT 'existing'::text, v_fire.run_id;
    ELSE
        v_run_id := new_run_id();
        UPDATE fires f SET run_id = v_run_id, fired_at = clock()
         WHERE f.schedule = ANY (ARRAY[p_name]) AND f.fire_at = p_fire_at;
        PERFORM admit_fires(ARRAY[p_name], ARRAY[p_fire_at], ARRAY[v_run_id]);
        RETURN QUERY SELECT 'repaired'::text, v_run_id;
    END IF;
END
$$;

-- Schedules by name, with the latest fire of each. p_names NULL: all of them.
CREATE OR REPLACE FUNCTION @schema@.read_schedules(p_names text[])
RETURNS TABLE (
    name text, play text, cron text, every_s integer, timezone text, missed text, priority smallint, org_id text,
    labels jsonb, input jsonb, release_id text, environment text, paused_at timestamptz, next_fire_at timestamptz,
    last_fire_at timestamptz, last_run_id text, created_at timestamptz, updated_at timestamptz
)
LANGUAGE sql STABLE
@lookup@
AS $$
    SELECT s.name, s.play, s.cron, s.every_s, s.timezone, s.missed, s.priority, s.org_id, s.labels, s.input,
           s.release_id, s.environment, s.paused_at, s.next_fire_at, f.fire_at, f.run_id, s.created_at, s.updated_at
      FROM schedules s
      LEFT JOIN LATERAL (SELECT * FROM fires g WHERE g.schedule = s.name ORDER BY g.fire_at DESC LIMIT 1) f ON true
     WHERE s.name = ANY (coalesce(p_names, (SELECT array_agg(g.name) FROM schedules g)))
     ORDER BY s.name
$$;

-- Fires of a schedule before p_before, latest first; status NULL: the run is not there any more.
CREATE OR REPLACE FUNCTION @schema@.read_fires(p_name text, p_before timestamptz, p_limit integer)
RETURNS TABLE (fire_at timestamptz, fired_at timestamptz, run_id text, status text)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT f.fire_at, f.fired_at, f.run_id, r.status
      FROM (SELECT * FROM fires g
             WHERE g.schedule = p_name AND g.fire_at < coalesce(p_before, 'infinity')
             ORDER BY g.fire_at DESC LIMIT p_limit) f
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[f.run_id])
     ORDER BY f.fire_at DESC
$$;
