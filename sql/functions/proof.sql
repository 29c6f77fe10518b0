-- proof: whether a delivery's sender holds its lane now, for whoever receives it.
--
-- Locks nothing and changes nothing. It holds at the moment of the answer only: that a lease may end a moment later is
-- why a receiver orders by its own cursor and knows repetitions by their key.

-- Per item: is the lane leased under this token, unexpired, with exactly p_firsts … p_throughs as its frozen prefix?
CREATE OR REPLACE FUNCTION @schema@.prove_lanes(
    p_run_ids text[], p_lanes smallint[], p_tokens bigint[], p_firsts integer[], p_throughs integer[]
) RETURNS TABLE (ord integer, proven boolean)
LANGUAGE plpgsql STABLE
@seek@
AS $$
DECLARE
    v_now CONSTANT timestamptz := clock();
BEGIN
    RETURN QUERY
    SELECT i.ord::integer, CASE i.lane WHEN 0 THEN r.live ELSE l.live END IS NOT NULL
      FROM unnest(p_run_ids, p_lanes, p_tokens, p_firsts, p_throughs)
           WITH ORDINALITY AS i (run_id, lane, token, first, through, ord)
      LEFT JOIN LATERAL (
            SELECT true AS live FROM runs a
             WHERE i.lane = 0 AND a.run_id = ANY (ARRAY[i.run_id]) AND a.lane_token = i.token
               AND a.lane_expires_at > v_now AND a.acked_seq = i.first - 1 AND a.frozen_seq = i.through) r ON true
      LEFT JOIN LATERAL (
            SELECT true AS live FROM lanes a
             WHERE i.lane = 1 AND a.run_id = ANY (ARRAY[i.run_id]) AND a.lane_token = i.token
               AND a.lane_expires_at > v_now AND a.acked_seq = i.first - 1 AND a.frozen_seq = i.through) l ON true
     ORDER BY i.ord;
END
$$;
