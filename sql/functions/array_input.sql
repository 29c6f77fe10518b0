-- array_input: a live attempt registers that it is about to stage input pages of its own outside of the database.
--
-- Once registered, whoever delivers the run's terminal has the duty to retire those pages before it acknowledges, so
-- the terminal must have a receiver that can: the one that the launch named.
--
-- Lock order: run rows, SKIP LOCKED. Fence: organisation, lease, attempt and token, repeated in the write. Because the
-- run's row is written, either a terminal wins and the registration is lost, or its delivery sees the intent.

-- answer: done (registered, now or before) | busy (the row is locked: ask again) | lost |
-- no_receiver (the launch names nobody who could retire the pages: nothing may be staged).
CREATE OR REPLACE FUNCTION @schema@.register_array_input(
    p_run_ids text[], p_orgs text[], p_attempts integer[], p_tokens bigint[]
) RETURNS TABLE (ord integer, answer text)
LANGUAGE plpgsql
@seek@
AS $$
#variable_conflict use_column
BEGIN
    PERFORM require_read_committed();

    WITH free AS (
        SELECT r.run_id, r.attempt, r.lease_token,
               coalesce(r.terminal_receiver, f.payload ->> 'array_input_receiver') AS receiver
          FROM unnest(p_run_ids, p_orgs, p_attempts, p_tokens) AS i (run_id, org_id, attempt, token)
          JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id])
          JOIN facts f ON f.run_id = ANY (ARRAY[r.run_id]) AND f.lane = 0 AND f.seq = 1
         WHERE r.lease_expires_at IS NOT NULL AND r.attempt = i.attempt AND r.lease_token = i.token
           AND r.org_id IS NOT DISTINCT FROM i.org_id
           AND NOT r.array_input
           FOR NO KEY UPDATE OF r SKIP LOCKED
    )
    UPDATE runs r SET array_input = true, terminal_receiver = free.receiver
      FROM free
     WHERE r.run_id = ANY (ARRAY[free.run_id]) AND free.receiver IS NOT NULL
       AND r.lease_expires_at IS NOT NULL AND r.attempt = free.attempt AND r.lease_token = free.lease_token;

    RETURN QUERY
    SELECT i.ord::integer,
           CASE WHEN r.run_id IS NULL THEN 'lost'
                WHEN r.array_input THEN 'done'
                WHEN r.terminal_receiver IS NULL AND f.payload ->> 'array_input_receiver' IS NULL THEN 'no_receiver'
                ELSE 'busy' END
      FROM unnest(p_run_ids, p_orgs, p_attempts, p_tokens) WITH ORDINALITY
           AS i (run_id, org_id, attempt, token, ord)
      LEFT JOIN runs r ON r.run_id = ANY (ARRAY[i.run_id]) AND r.lease_expires_at IS NOT NULL
                      AND r.attempt = i.attempt AND r.lease_token = i.token AND r.org_id IS NOT DISTINCT FROM i.org_id
      LEFT JOIN LATERAL (SELECT g.payload FROM facts g
                          WHERE g.run_id = r.run_id AND g.lane = 0 AND g.seq = 1 OFFSET 0) f ON true;
END
$$;
