-- unique: at most one run per key and window, or per key and time.
--
-- A key is (organisation, play, unique_key). Its row names the run that holds it: until the end of its window, or
-- without one until that run has ended. Admission calls this inside its own transaction.
--
-- Lock order: the caller holds the key's advisory lock, so a key in a caller's open transaction is "busy" there and
-- never waited for here. Rows of keys come last, and those of other keys are skipped where somebody holds them.
-- Fence: the primary key, and the advisory lock around look and write.

-- The advisory lock that guards a unique key.
CREATE OR REPLACE FUNCTION @schema@.unique_lock(p_org text, p_play text, p_extras jsonb) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN p_extras ? 'unique' THEN hashtextextended(
        concat_ws(E'\x1f', '@schema@', coalesce(p_org, ''), p_play, p_extras #>> '{unique,key}'), 3) END
$$;

-- Gives each of these items its unique key, in order, or says which run holds it. Items with p_skip are left alone,
-- as is an item whose run holds the key already: it is asked again after a lost answer.
--
--   extras.unique  {"key", "for_s" (the window; absent: until the run has ended), "on_conflict"}
--   on_conflict    replace: the holder gets a request to cancel, as from cancel_run, and the item the key;
--                  reject or existing: the holder keeps it
--
-- Answers one run id per item: the run that keeps the key, or NULL for an item that may be admitted.
CREATE OR REPLACE FUNCTION @schema@.take_unique_keys(
    p_run_ids text[], p_plays text[], p_orgs text[], p_extras jsonb[], p_skip boolean[], p_now timestamptz
) RETURNS text[]
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_holders text[] := array_fill(NULL::text, ARRAY[cardinality(p_run_ids)]);
    v_unique  jsonb;
    v_holder  record;
BEGIN
    FOR i IN 1 .. cardinality(p_run_ids) LOOP
        v_unique := p_extras[i] -> 'unique';
        CONTINUE WHEN v_unique IS NULL OR p_skip[i];

        SELECT u.run_id INTO v_holder
          FROM unique_keys u
          LEFT JOIN LATERAL (SELECT r.run_id, r.finished_at FROM runs r
                              WHERE r.run_id = ANY (ARRAY[u.run_id]) OFFSET 0) r ON true
         WHERE u.org_id = coalesce(p_orgs[i], '') AND u.play = p_plays[i] AND u.key = v_unique ->> 'key'
           AND u.run_id <> p_run_ids[i]
           -- An item before this one in the same call has no row yet.
           AND coalesce(u.expires_at > p_now,
                        u.run_id = ANY (p_run_ids[:i]) OR (r.run_id IS NOT NULL AND r.finished_at IS NULL));
        IF FOUND AND v_unique ->> 'on_conflict' <> 'replace' THEN
            v_holders[i] := v_holder.run_id;
            CONTINUE;
        ELSIF FOUND THEN
            INSERT INTO cancellations (requested_at, run_id, request_id, reason, requested_by)
            VALUES (p_now, v_holder.run_id, 'replaced-by:' || p_run_ids[i],
                    format('replaced by run %s, which has the same unique key', p_run_ids[i]), 'unique_key')
            ON CONFLICT DO NOTHING;
        END IF;
        INSERT INTO unique_keys AS u (checked_at, expires_at, org_id, play, key, run_id)
        VALUES (p_now, p_now + make_interval(secs => (v_unique ->> 'for_s')::double precision),
                coalesce(p_orgs[i], ''), p_plays[i], v_unique ->> 'key', p_run_ids[i])
        ON CONFLICT (org_id, play, key) DO UPDATE
           SET checked_at = excluded.checked_at, expires_at = excluded.expires_at, run_id = excluded.run_id;
    END LOOP;
    RETURN v_holders;
END
$$;

-- Looks at the keys that nobody has looked at for longest and forgets those that are free again, so that keys which
-- are used once do not pile up. What is looked at is never what somebody takes at this moment: that was looked at now.
CREATE OR REPLACE FUNCTION @schema@.forget_unique_keys(p_limit integer, p_now timestamptz) RETURNS void
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_seen record;
BEGIN
    FOR v_seen IN
        SELECT u.org_id, u.play, u.key, u.run_id, u.expires_at FROM unique_keys u
         WHERE u.checked_at < p_now - interval '1 minute'
         ORDER BY u.checked_at LIMIT p_limit
           FOR UPDATE SKIP LOCKED
    LOOP
        IF coalesce(v_seen.expires_at > p_now,
                    EXISTS (SELECT 1 FROM runs r WHERE r.run_id = ANY (ARRAY[v_seen.run_id]) AND r.finished_at IS NULL))
        THEN
            UPDATE unique_keys u SET checked_at = p_now
             WHERE u.org_id = v_seen.org_id AND u.play = v_seen.play AND u.key = v_seen.key;
        ELSE
            DELETE FROM unique_keys u
             WHERE u.org_id = v_seen.org_id AND u.play = v_seen.play AND u.key = v_seen.key;
        END IF;
    END LOOP;
END
$$;
