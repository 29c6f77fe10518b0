-- limits: how many attempts of a play, of an organisation or of a concurrency key may run at once, on all hosts.
--
-- What runs is counted, over indexes of running runs, and the count holds until the claim commits because the claim
-- has the limit's lock: an advisory lock that is only ever tried, before any run's row is locked. Whoever does not get
-- it leaves that limit's runs to whoever has it. The end of an attempt takes no lock and changes no count.

-- Whose turn a run is: its organisation's, as a number. (No generated columns: those cost every update of a run.)
CREATE OR REPLACE FUNCTION @schema@.turn_of(p_org text, p_key text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN p_org IS NOT NULL OR p_key IS NOT NULL
                THEN hashtextextended(coalesce(p_org, ''), 0) & 9223372036854775807 END
$$;

-- The place of its concurrency key within the turn; runs without a key have the last one.
CREATE OR REPLACE FUNCTION @schema@.subturn_of(p_org text, p_key text) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN p_key IS NOT NULL THEN hashtextextended(p_key, 0) & 9223372036854775806
                WHEN p_org IS NOT NULL THEN 9223372036854775807 END
$$;

-- The advisory lock of a limit.
CREATE OR REPLACE FUNCTION @schema@.limit_lock(p_kind text, p_name text) RETURNS bigint
LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT hashtextextended(concat_ws(E'\x1f', '@schema@', p_kind, p_name), 4) $$;

-- How many more attempts a limit leaves room for, at most p_most; p_most where there is no limit, zero or less where it
-- is full. PL/pgSQL, because its plans are kept; without planner settings, because their callers have them.
CREATE OR REPLACE FUNCTION @schema@.play_room(p_play text, p_most integer) RETURNS integer
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    v_limit CONSTANT integer := (SELECT max_running FROM limits WHERE kind = 'play' AND name = p_play);
BEGIN
    IF v_limit IS NULL THEN
        RETURN p_most;
    END IF;
    RETURN least(p_most, v_limit - (SELECT count(*) FROM (
               SELECT 1 FROM runs r WHERE r.play = p_play AND r.status = 'running' AND r.limited LIMIT v_limit) t));
END
$$;

CREATE OR REPLACE FUNCTION @schema@.org_room(p_org text, p_most integer) RETURNS integer
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    v_limit CONSTANT integer := (SELECT max_running FROM limits WHERE kind = 'org' AND name = p_org);
BEGIN
    IF v_limit IS NULL THEN
        RETURN p_most;
    END IF;
    RETURN least(p_most, v_limit - (SELECT count(*) FROM (
               SELECT 1 FROM runs r WHERE r.org_id = p_org AND r.status = 'running' LIMIT v_limit) t));
END
$$;

-- A key without a limit of its own play runs one at a time.
CREATE OR REPLACE FUNCTION @schema@.key_room(p_play text, p_key text, p_most integer) RETURNS integer
LANGUAGE plpgsql STABLE
AS $$
DECLARE
    v_limit CONSTANT integer := coalesce((SELECT max_running FROM limits WHERE kind = 'key' AND name = p_play), 1);
BEGIN
    RETURN least(p_most, v_limit - (SELECT count(*) FROM (
               SELECT 1 FROM runs r
                WHERE r.play = p_play AND r.concurrency_key = p_key AND r.status = 'running' AND r.limited
                LIMIT v_limit) t));
END
$$;

-- Sets the limits that plays bring with them, and lifts those that they no longer have. What already runs of a play
-- that had no limit before is counted from now on; an attempt that is being claimed at this very moment is not.
CREATE OR REPLACE FUNCTION @schema@.register_limits(p_plays text[], p_max_running integer[], p_max_per_key integer[])
RETURNS void
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_fresh text[];
BEGIN
    PERFORM pg_advisory_xact_lock(limit_lock('', ''));  -- hosts that start at once, one after the other
    WITH wanted AS (
        SELECT k.kind, i.name, k.max_running
          FROM unnest(p_plays, p_max_running, p_max_per_key) AS i (name, max_running, max_per_key)
         CROSS JOIN LATERAL (VALUES ('play', i.max_running), ('key', i.max_per_key)) AS k (kind, max_running)
    ), lifted AS (
        DELETE FROM limits l USING wanted w
         WHERE w.max_running IS NULL AND l.kind = w.kind AND l.name = ANY (ARRAY[w.name])
    ), made AS (
        INSERT INTO limits AS l (kind, name, max_running)
        SELECT kind, name, max_running FROM wanted WHERE max_running IS NOT NULL
        ON CONFLICT (kind, name) DO UPDATE SET max_running = excluded.max_running
         WHERE l.max_running <> excluded.max_running
        RETURNING l.kind, l.name, (xmax = 0) AS fresh
    )
    SELECT array_agg(name) INTO v_fresh FROM made WHERE fresh AND kind = 'play';

    IF v_fresh IS NOT NULL THEN
        UPDATE runs r SET limited = true
          FROM (SELECT s.run_id FROM runs s
                 WHERE s.status = 'running' AND s.due_at > '-infinity' AND s.play = ANY (v_fresh) AND NOT s.limited
                   FOR NO KEY UPDATE SKIP LOCKED) t
         WHERE r.run_id = ANY (ARRAY[t.run_id]) AND r.status = 'running';
    END IF;
END
$$;

-- An operator's verb, and the public SQL door: how many runs of an organisation ('org'), or sandboxes of a provider
-- ('sandbox'; '' for all together) or of an organisation ('sandbox_org') there may be at once.
--
--   SELECT runlane.set_limit('org', 'acme', 10);
--   SELECT runlane.set_limit('sandbox', '', 50);
--
-- NULL lifts the limit, 0 holds everything back. A lower limit ends nothing that runs. (The limits of plays and keys
-- are options of the play, set by its hosts when they start.) True if that changed anything.
CREATE OR REPLACE FUNCTION @schema@.set_limit(p_kind text, p_name text, p_max_running integer) RETURNS boolean
LANGUAGE plpgsql
SET search_path = @schema@, pg_temp
AS $$
BEGIN
    IF coalesce(p_kind, '') NOT IN ('org', 'sandbox', 'sandbox_org') THEN
        PERFORM refuse('kind', 'must be ''org'', ''sandbox'' or ''sandbox_org''; limits of plays and keys are options of the play');
    ELSIF p_name = '' AND p_kind = 'sandbox' THEN
        NULL;  -- all of them
    ELSIF coalesce(length(p_name), 0) NOT BETWEEN 1 AND 255 THEN
        PERFORM refuse('name', 'must be a string of 1 to 255 characters');
    ELSIF p_max_running NOT BETWEEN 0 AND 1000000 THEN
        PERFORM refuse('max_running', 'must be from 0 to 1000000, or null for no limit');
    END IF;
    IF p_max_running IS NULL THEN
        DELETE FROM limits WHERE kind = p_kind AND name = p_name;
    ELSE
        INSERT INTO limits AS l (kind, name, max_running) VALUES (p_kind, p_name, p_max_running)
        ON CONFLICT (kind, name) DO UPDATE SET max_running = excluded.max_running
         WHERE l.max_running <> excluded.max_running;
    END IF;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM pg_notify(channel('runs'), '');
    RETURN true;
END
$$;

-- One page of limits in the order of kind and name, with what runs under each now; NULL for a limit per key.
CREATE OR REPLACE FUNCTION @schema@.read_limits(p_limit integer, p_after_kind text, p_after_name text)
RETURNS TABLE (kind text, name text, max_running integer, running integer)
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT l.kind, l.name, l.max_running,
           CASE l.kind
               WHEN 'play' THEN (SELECT count(*) FROM runs r WHERE r.play = l.name AND r.status = 'running' AND r.limited)
               WHEN 'org' THEN (SELECT count(*) FROM runs r WHERE r.org_id = l.name AND r.status = 'running')
               WHEN 'sandbox' THEN sandboxes_open(nullif(l.name, ''), NULL, NULL)
               WHEN 'sandbox_org' THEN sandboxes_open(NULL, l.name, NULL)
           END::integer
      FROM limits l
     WHERE (l.kind, l.name) > (p_after_kind, p_after_name)
     ORDER BY l.kind, l.name LIMIT p_limit
$$;
