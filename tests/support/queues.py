"""Long queues, made in one statement: for tests of what a claim does among many runs."""

from __future__ import annotations

from tests.support.kernel import Kernel

_QUEUE = """
WITH made AS (
    INSERT INTO @schema@.runs (run_id, play, bucket, created_at, lane_due_at, status, due_at, last_seq, acked_seq,
                               org_id, concurrency_key, turn, subturn)
    SELECT format('%s-%s-%s', $2::text, o, lpad(n::text, 6, '0')), $1, $3, t.now, t.now + interval '1 day', 'queued',
           t.now + make_interval(secs => $6::float8), 1, 1, org, key, @schema@.turn_of(org, key),
           @schema@.subturn_of(org, key)
      FROM generate_series(1, $5::integer) AS o, generate_series(1, $4::integer) AS n,
           LATERAL (SELECT @schema@.clock() AS now, CASE WHEN $2 <> '' THEN $2 || '-' || o END AS org,
                           CASE WHEN $7 > 0 THEN 'key-' || n % $7 END AS key) AS t
    RETURNING run_id, play, created_at
)
INSERT INTO @schema@.facts (run_id, lane, seq, type, created_at, payload)
SELECT run_id, 0, 1, 'run.created', created_at, jsonb_build_object('play', play, 'input', NULL) FROM made
"""


async def queue_many(
    kernel: Kernel,
    runs: int,
    *,
    orgs: int = 1,
    org: str = "org",
    keys: int = 0,
    play: str = "alpha",
    delay_s: float = 0.0,
) -> None:
    """Queued runs, ``runs`` of each of ``orgs`` organisations (``org`` empty: of none), over so many ``keys``.

    Their admission counts as delivered.
    """
    await kernel.session.execute(
        kernel.render(_QUEUE), play, org, kernel.bucket(play), runs, orgs, delay_s, keys, timeout_s=60.0
    )
