-- clock: the only source of time, the bucket of a run, and what every transition asks of its session.

-- STABLE over clock_timestamp(): one reading per statement that calls it, and the wall clock rather than
-- the start of a caller's long transaction. Tests replace it in their own schema.
CREATE OR REPLACE FUNCTION @schema@.clock() RETURNS timestamptz
LANGUAGE sql STABLE PARALLEL SAFE
AS $$ SELECT pg_catalog.clock_timestamp() $$;

-- The equality key that leads the claim index. A hash rather than an interned number: an intern row that a
-- caller's open transaction has not committed yet would make every other submitter of that play wait.
CREATE OR REPLACE FUNCTION @schema@.bucket_of(p_play text, p_release text, p_environment text, p_priority integer)
RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT ('x' || left(md5(concat_ws(E'\x1f', p_play, coalesce(p_release, ''), coalesce(p_environment, ''),
                                      p_priority::text)), 16))::bit(64)::bigint
$$;

-- Transitions lock first and decide on a fresh snapshot, which only READ COMMITTED gives.
CREATE OR REPLACE FUNCTION @schema@.require_read_committed() RETURNS void
LANGUAGE plpgsql STABLE
AS $$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'runlane transitions need READ COMMITTED, this session runs at %',
            upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'RL002', HINT = 'ALTER ROLE … SET default_transaction_isolation = ''read committed''';
    END IF;
END
$$;

-- Seconds from now until a moment; NULL for never. Hosts sleep by durations, never by absolute times.
CREATE OR REPLACE FUNCTION @schema@.seconds_until(p_when timestamptz, p_now timestamptz) RETURNS double precision
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT CASE WHEN p_when < 'infinity' THEN extract(epoch FROM p_when - p_now)::double precision END
$$;
