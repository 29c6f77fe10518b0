-- performance: what the end of a run says of how it went, where the launch says that its receiver takes that.
--
-- A launch that says nothing gets nothing: a receiver that is older than these keys must not be sent them. What is
-- measured is what this database has seen by its own clock. What a runner has measured of its process comes with its
-- result, beside the output and never out of it, so that no output can pass for it.

-- The keys that a completed or failed terminal has on top: none for a launch that has not asked, else both of
-- "performance" and "performance_unavailable" (null, or which part is not there and why: invalid_usage).
--
--   p_level    how much the launch asks for: basic, or full, which is with usage; one that is not known is nothing
--   p_owner, p_began  the attempt that ends with the run, which is not among the ended ones yet; NULL: none does
--   p_usage    what that attempt's runner says to have used: {"cpu_s", "peak_memory_bytes"}; NULL: nothing
CREATE OR REPLACE FUNCTION @schema@.performance_keys(
    p_run_id text, p_level text, p_attempts integer, p_created_at timestamptz, p_started_at timestamptz,
    p_owner bigint, p_began timestamptz, p_usage jsonb, p_now timestamptz
) RETURNS jsonb
LANGUAGE sql STABLE
@seek@
AS $$
    SELECT CASE WHEN p_level IN ('basic', 'full') THEN jsonb_build_object(
               'performance', jsonb_strip_nulls(jsonb_build_object(
                   'total_s', span_s(p_created_at, p_now), 'queued_s', span_s(p_created_at, p_started_at),
                   'host_s', t.host_s, 'sandbox_s', t.sandbox_s, 'attempts', p_attempts, 'usage', u.usage)),
               'performance_unavailable',
               CASE WHEN p_level = 'full' AND p_usage IS NOT NULL AND u.usage IS NULL THEN 'invalid_usage' END)
           ELSE '{}' END
      FROM (SELECT coalesce(sum(span_s(a.began, a.ended)) FILTER (WHERE a.owner <> 0), 0) AS host_s,
                   coalesce(sum(span_s(a.began, a.ended)) FILTER (WHERE a.owner = 0), 0) AS sandbox_s
              FROM (SELECT e.owner, e.started_at, e.ended_at FROM attempts e WHERE e.run_id = ANY (ARRAY[p_run_id])
                     UNION ALL
                    SELECT p_owner, p_began, p_now WHERE p_began IS NOT NULL) AS a (owner, began, ended)) t,
           (SELECT CASE WHEN p_level = 'full' AND jsonb_typeof(p_usage) = 'object'
                         AND as_double(p_usage -> 'cpu_s') >= 0 AND as_double(p_usage -> 'peak_memory_bytes') >= 0
                        THEN jsonb_build_object('cpu_s', p_usage -> 'cpu_s',
                                                'peak_memory_bytes', p_usage -> 'peak_memory_bytes') END AS usage) u
$$;

-- Seconds between two moments, to the microsecond; never below 0.
CREATE OR REPLACE FUNCTION @schema@.span_s(p_from timestamptz, p_to timestamptz) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
    SELECT round(greatest(extract(epoch FROM p_to - p_from), 0), 6)
$$;
