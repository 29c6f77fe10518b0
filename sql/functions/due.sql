-- due: one read that tells a host when each of its queues has something next.
--
-- It is the hosts' clock and, sent over the listening connection, that connection's probe. Seeks only.

CREATE OR REPLACE FUNCTION @schema@.next_due(p_host bigint, p_buckets bigint[], p_receivers text[])
RETURNS TABLE (
    runs_s double precision, lifecycle_s double precision, observability_s double precision,
    leases_s double precision, schedules_s double precision, chores_s double precision, cancellations boolean,
    wakes boolean
)
LANGUAGE plpgsql
@seek@
AS $$
DECLARE
    v_now CONSTANT timestamptz := clock();
BEGIN
    UPDATE hosts SET seen_at = v_now, buckets = p_buckets, receivers = p_receivers WHERE host = p_host;
    RETURN QUERY
    SELECT seconds_until(next_run_due(p_buckets, NULL, NULL, '{}'), v_now),
           seconds_until(lifecycle_next_due(p_receivers), v_now),
           seconds_until(observability_next_due(p_receivers), v_now),
           seconds_until((SELECT r.due_at FROM runs r WHERE r.status = 'running' ORDER BY r.due_at LIMIT 1), v_now),
           seconds_until((SELECT s.next_fire_at FROM schedules s
                           WHERE s.paused_at IS NULL ORDER BY s.next_fire_at LIMIT 1), v_now),
           seconds_until((SELECT min(c.due_at) FROM chores c), v_now),
           EXISTS (SELECT 1 FROM cancellations),
           EXISTS (SELECT 1 FROM wakes);
END
$$;
