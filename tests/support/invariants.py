"""What must hold of the kernel's tables after every transition, whoever made it.

Owns the queries. Each answers the rows that break one rule; ``check_invariants`` runs all of them as one statement
and fails with everything it found.
"""

from __future__ import annotations

from sql import bundle
from sql.connection import Session

_RULES = {
    # --- runs and their log --------------------------------------------------------------------------
    "a run has its terminal fact exactly when its status is terminal, and it is the last lifecycle fact": """
        SELECT r.run_id FROM runs r
          LEFT JOIN facts f ON f.run_id = r.run_id AND f.lane = 0
                           AND f.type IN ('run.completed', 'run.failed', 'run.cancelled')
         GROUP BY r.run_id
        HAVING count(f.seq) <> (r.finished_at IS NOT NULL)::integer
            OR (r.finished_at IS NOT NULL) <> (r.status IN ('completed', 'failed', 'cancelled'))
            OR (r.finished_at IS NOT NULL AND (min(f.seq) <> r.last_seq OR r.terminal_seq <> r.last_seq
                                               OR min(f.type) <> 'run.' || r.status))
            OR (r.finished_at IS NULL AND r.terminal_seq IS NOT NULL)""",
    "facts are gapless per run and lane, up to the lane's last": """
        SELECT coalesce(f.run_id, l.run_id)
          FROM (SELECT run_id, lane, count(*) AS facts, min(seq) AS first, max(seq) AS last
                  FROM facts GROUP BY run_id, lane) f
          FULL JOIN (SELECT run_id, 0::smallint AS lane, last_seq FROM runs
                      UNION ALL SELECT run_id, 1::smallint, last_seq FROM lanes) l
            ON l.run_id = f.run_id AND l.lane = f.lane
         WHERE f.first IS DISTINCT FROM 1 OR f.facts IS DISTINCT FROM f.last OR f.last IS DISTINCT FROM l.last_seq""",
    "each lifecycle fact follows one that allows it": """
        SELECT run_id FROM (
            SELECT run_id, seq, type,
                   lag(type) OVER (PARTITION BY run_id ORDER BY seq) AS before
              FROM facts WHERE lane = 0 AND type <> 'run.progress'
                           AND payload ->> 'kind' IS DISTINCT FROM 'detached_runner') f
         WHERE NOT CASE type
               WHEN 'run.created'   THEN before IS NULL AND seq = 1
               WHEN 'run.started'   THEN before IN ('run.created', 'run.requeued', 'run.resumed')
               WHEN 'run.requeued'  THEN before = 'run.started'
               WHEN 'run.waiting'   THEN before = 'run.started'
               WHEN 'run.completed' THEN before = 'run.started'
               WHEN 'run.failed'    THEN before IN ('run.started', 'run.waiting')
               WHEN 'run.resumed'   THEN before = 'run.waiting'
               WHEN 'run.cancelled' THEN before IN ('run.created', 'run.started', 'run.requeued', 'run.waiting')
               ELSE false END""",
    # --- attempts and fences -------------------------------------------------------------------------
    "attempts are 1 to n, each once; all but a live one have ended": """
        SELECT r.run_id FROM runs r LEFT JOIN attempts a ON a.run_id = r.run_id
         GROUP BY r.run_id
        HAVING count(a.attempt) <> r.attempt - (r.status = 'running')::integer
            OR (count(a.attempt) > 0 AND (min(a.attempt) <> 1 OR max(a.attempt) <> count(a.attempt)))""",
    "each attempt has one run.started, in order": """
        SELECT r.run_id FROM runs r LEFT JOIN facts f
            ON f.run_id = r.run_id AND f.lane = 0 AND f.type = 'run.started'
         GROUP BY r.run_id
        HAVING coalesce(array_agg((f.payload ->> 'attempt')::integer ORDER BY f.seq) FILTER (WHERE f.seq > 0), '{}')
            <> coalesce((SELECT array_agg(n) FROM generate_series(1, r.attempt) AS n), '{}')""",
    "an attempt ends in what its run's log says": """
        SELECT a.run_id FROM attempts a
          JOIN (SELECT run_id, type, payload, lag(payload) OVER w AS start, lag(type) OVER w AS before
                  FROM facts WHERE lane = 0 AND type <> 'run.progress'
                           AND payload ->> 'kind' IS DISTINCT FROM 'detached_runner'
                WINDOW w AS (PARTITION BY run_id ORDER BY seq)) f
            ON f.run_id = a.run_id AND f.before = 'run.started' AND (f.start ->> 'attempt')::integer = a.attempt
         WHERE NOT CASE a.outcome
               WHEN 'completed' THEN f.type = 'run.completed'
               WHEN 'failed'    THEN f.type = 'run.failed'
               WHEN 'cancelled' THEN f.type = 'run.cancelled'
               WHEN 'parked'    THEN f.type = 'run.waiting'
               WHEN 'ceiling'   THEN f.type = 'run.failed'
               WHEN 'expired'   THEN f.type = 'run.failed'
                                  OR (f.type = 'run.requeued' AND f.payload ->> 'reason' = 'expired')
               WHEN 'lost'      THEN f.type = 'run.failed'
                                  OR (f.type = 'run.requeued' AND f.payload ->> 'reason' = 'lost')
               ELSE f.type = 'run.requeued' AND f.payload ->> 'reason' = a.outcome END
            OR a.ended_at < a.started_at""",
    "a run holds a live fence exactly while it runs, and never again one it has lost": """
        SELECT r.run_id FROM runs r
         WHERE (r.lease_expires_at IS NOT NULL) <> (r.status = 'running')
            OR (r.status = 'running' AND (r.lease_token IS NULL OR r.lease_owner IS NULL OR r.attempt_at IS NULL
                                          OR r.attempt = 0))
            OR (r.status = 'running' AND EXISTS (SELECT 1 FROM attempts a
                                                  WHERE a.run_id = r.run_id AND a.attempt = r.attempt))
            OR (r.attempt > 0) <> (r.started_at IS NOT NULL)""",
    "an outage has begun before the attempts that it deferred ended, and goes on in the next of its kind": """
        SELECT a.run_id FROM attempts a
          LEFT JOIN attempts b ON b.run_id = a.run_id AND b.attempt = a.attempt - 1 AND b.outage_at IS NOT NULL
                              AND b.error ->> 'kind' = a.error ->> 'kind'
         WHERE a.outage_at IS NOT NULL
           AND (a.outcome <> 'deferred' OR a.outage_at > a.started_at OR a.outage_at > b.outage_at
                OR (b.run_id IS NULL AND a.outage_at <> a.started_at))""",
    "charges are counted once": """
        SELECT r.run_id FROM runs r LEFT JOIN attempts a ON a.run_id = r.run_id
         GROUP BY r.run_id
        HAVING count(*) FILTER (WHERE a.outcome IN ('failed', 'retried')) <> r.failures
            OR count(*) FILTER (WHERE a.outcome IN ('expired', 'lost')) <> r.crashes""",
    "whose turn a run is follows from its organisation and key": """
        SELECT run_id FROM runs
         WHERE turn IS DISTINCT FROM @schema@.turn_of(org_id, concurrency_key)
            OR subturn IS DISTINCT FROM @schema@.subturn_of(org_id, concurrency_key)""",
    # --- due times and waits -------------------------------------------------------------------------
    "somebody will look at every open run, unless only somebody else can wake it, and at no ended one": """
        SELECT run_id FROM runs
         WHERE (due_at = 'infinity' AND (status = 'queued' OR (status = 'running' AND lease_owner <> 0)))
            OR (due_at <> 'infinity' AND finished_at IS NOT NULL)
            OR (status = 'running' AND due_at > lease_expires_at)""",
    "a parked run waits for a receipt that it has registered": """
        SELECT r.run_id FROM runs r LEFT JOIN waits c ON c.run_id = r.run_id AND c.key = r.wait_key
         WHERE (r.status = 'waiting') <> (r.wait_kind IS NOT NULL)
            OR (r.wait_kind IS NULL AND (r.wait_key IS NOT NULL OR r.wait_until IS NOT NULL))
            OR (r.status = 'waiting' AND ((c.kind, c.wait_seq) IS DISTINCT FROM (r.wait_kind, r.wait_seq)
                                          OR r.wait_until IS DISTINCT FROM CASE c.kind WHEN 'sleep' THEN c.due_at END))
        """,
    "a parked run is due when the first of the waits that it stands at is, or before if one is over": """
        SELECT r.run_id FROM runs r JOIN waits c ON c.run_id = r.run_id AND c.wait_seq = r.wait_seq
         WHERE r.status = 'waiting'
         GROUP BY r.run_id, r.due_at
        HAVING CASE WHEN bool_or(c.done_at IS NOT NULL) THEN r.due_at = 'infinity'
                    ELSE r.due_at <> coalesce(min(c.due_at), 'infinity') END""",
    "a wait is passed by time only after it was due, by what it got otherwise, and on a run that has registered it": """
        SELECT c.run_id FROM waits c LEFT JOIN runs r ON r.run_id = c.run_id
         WHERE r.run_id IS NULL
            OR (c.done_at IS NOT NULL AND c.payload IS NULL AND (c.due_at IS NULL OR c.done_at < c.due_at))
            OR (c.payload IS NOT NULL AND (c.done_at IS NULL OR c.kind = 'sleep'))
            OR (c.kind = 'sleep' AND c.due_at IS NULL)""",
    "an event is taken by one wait that has its name and its payload, and such a wait has one event": """
        SELECT coalesce(c.run_id, e.run_id)
          FROM (SELECT * FROM waits WHERE kind IN ('event', 'approval') AND payload IS NOT NULL) c
          FULL JOIN (SELECT * FROM events WHERE wait_key IS NOT NULL) e ON e.run_id = c.run_id AND e.wait_key = c.key
         WHERE (c.name, c.payload) IS DISTINCT FROM (e.name, e.payload)
            OR (SELECT count(*) FROM events o WHERE o.run_id = e.run_id AND o.wait_key = e.wait_key) > 1""",
    "nobody sleeps over what has come: a parked run that could go on stands at a wait that is over, or has a wake": """
        SELECT r.run_id FROM runs r
          JOIN waits c ON c.run_id = r.run_id AND c.wait_seq = r.wait_seq
          LEFT JOIN runs k ON k.run_id = c.name AND c.kind = 'child'
          LEFT JOIN events e ON e.run_id = r.run_id AND e.name = c.name AND e.wait_key IS NULL
                            AND (c.kind = 'event' OR jsonb_typeof(e.payload -> 'approved') = 'boolean')
         WHERE r.status = 'waiting' AND NOT EXISTS (SELECT 1 FROM wakes w WHERE w.run_id = r.run_id)
         GROUP BY r.run_id
        HAVING bool_and(c.done_at IS NULL) AND (count(e.run_id) > 0 OR count(k.finished_at) > 0)""",
    # --- steps ---------------------------------------------------------------------------------------
    "a receipt belongs to an attempt that there was, and what is held has no result": """
        SELECT c.run_id FROM receipts c LEFT JOIN runs r ON r.run_id = c.run_id
         WHERE r.run_id IS NULL OR c.attempt NOT BETWEEN 1 AND r.attempt OR c.run_failures > r.failures
            OR c.finished_at < c.created_at OR c.claimed_at < c.created_at
            OR (c.state IN ('completed', 'skipped') AND c.output IS NULL)""",
    # --- what there is one of ------------------------------------------------------------------------
    "one open run has a unique key until it ends, unless it was told to make place": """
        SELECT min(r.run_id) FROM runs r
          JOIN facts f ON f.run_id = r.run_id AND f.lane = 0 AND f.seq = 1
         WHERE r.finished_at IS NULL AND f.payload ? 'unique' AND f.payload #>> '{unique,for_s}' IS NULL
           AND NOT EXISTS (SELECT 1 FROM cancellations c
                            WHERE c.run_id = r.run_id AND starts_with(c.request_id, 'replaced-by:'))
         GROUP BY coalesce(r.org_id, ''), r.play, f.payload #>> '{unique,key}'
        HAVING count(*) > 1""",
    "a fire has the run that it says, and no other": """
        SELECT r.run_id FROM fires f
          JOIN runs r ON r.labels ->> 'schedule' = f.schedule AND (r.labels ->> 'fire_at')::timestamptz = f.fire_at
         WHERE r.run_id <> f.run_id""",
    # --- sandboxes -----------------------------------------------------------------------------------
    "a runner is of a live attempt that no host holds, and each of those has one": """
        SELECT coalesce(r.run_id, n.run_id)
          FROM (SELECT * FROM runs WHERE lease_owner = 0 AND lease_expires_at IS NOT NULL) r
          FULL JOIN runners n ON n.run_id = r.run_id AND n.attempt = r.attempt AND n.token = r.lease_token
         WHERE r.run_id IS NULL OR n.run_id IS NULL""",
    "a runner's sandbox is of its attempt and nobody wants it back": """
        SELECT n.run_id FROM runners n LEFT JOIN sandboxes s ON s.sandbox = n.sandbox
         WHERE (s.run_id, s.attempt, s.provider) IS DISTINCT FROM (n.run_id, n.attempt, n.provider)
            OR s.wanted_at IS NOT NULL OR s.ceiling_at IS DISTINCT FROM n.ceiling_at OR s.due_at <> 'infinity'""",
    "the sandboxes of an ended attempt are wanted back, or will be if no runner ever had them": """
        SELECT s.run_id FROM sandboxes s
          JOIN attempts a ON a.run_id = s.run_id AND a.attempt = s.attempt
         WHERE s.wanted_at IS NULL AND (a.owner = 0 OR s.due_at = 'infinity')""",
    "what has to be deleted is looked at until it is gone, or an operator has to": """
        SELECT run_id FROM sandboxes
         WHERE (wanted_at IS NOT NULL
                AND (due_at = 'infinity') <> (confirmed_at IS NOT NULL OR block_reason IS NOT NULL))
            OR (confirmed_at IS NOT NULL AND (accepted_at IS NULL OR accepted_at > confirmed_at
                                              OR lease_expires_at IS NOT NULL))""",
    "a run that ever asked for a sandbox has its bill made": """
        SELECT s.run_id FROM sandboxes s LEFT JOIN billing_jobs b ON b.run_id = s.run_id
          LEFT JOIN runs r ON r.run_id = s.run_id
         WHERE s.sandbox NOT LIKE 'adopted:%'
           AND (b.run_id IS NULL OR (b.finalised_at IS NOT NULL AND r.finished_at IS NULL))""",
    # --- lanes ---------------------------------------------------------------------------------------
    "a lane's cursor, frozen prefix and lease fit together, and somebody will look at it": """
        SELECT run_id FROM (
            SELECT run_id, acked_seq, last_seq, frozen_seq, lane_attempts, lane_token, lane_expires_at, lane_due_at,
                   lane_error, lane_failure, lane_pending FROM runs
             UNION ALL
            SELECT run_id, acked_seq, last_seq, frozen_seq, lane_attempts, lane_token, lane_expires_at, lane_due_at,
                   lane_error, lane_failure, lane_pending FROM lanes) l
         WHERE acked_seq NOT BETWEEN 0 AND last_seq
            OR frozen_seq NOT BETWEEN acked_seq + 1 AND last_seq
            OR lane_attempts < 0
            OR (frozen_seq IS NULL AND lane_attempts <> 0)
            OR (lane_expires_at IS NOT NULL AND (frozen_seq IS NULL OR lane_token IS NULL OR lane_error IS NOT NULL))
            OR lane_due_at > lane_expires_at
            OR (lane_error IS NOT NULL AND NOT lane_pending)
            OR (lane_failure IS NOT NULL AND (frozen_seq IS NULL OR lane_error IS NOT NULL))
            OR (lane_pending AND (lane_due_at = 'infinity') <> (lane_error IS NOT NULL))""",
    "only a live attempt can be logging, and a lane of logs belongs to a run": """
        SELECT l.run_id FROM lanes l LEFT JOIN runs r ON r.run_id = l.run_id
         WHERE r.run_id IS NULL OR r.attempt = 0 OR r.receiver <> l.lane_receiver""",
    # --- the ledger ----------------------------------------------------------------------------------
    "the ledger has applied each fact once, in order, and all that is acknowledged": """
        SELECT coalesce(r.run_id, l.run_id) FROM runs r FULL JOIN ledger_runs l ON l.run_id = r.run_id
         WHERE r.receiver = '' IS NOT FALSE
           AND (r.run_id IS NULL OR l.applied_seq <> l.applied_facts + l.passed_facts
                OR coalesce(l.applied_seq, 0) > r.last_seq
                OR EXISTS (SELECT f.seq FROM facts f
                            WHERE f.run_id = r.run_id AND f.lane = 0 AND f.seq > coalesce(l.applied_seq, 0)
                              AND f.seq <= r.acked_seq AND f.payload ->> 'kind' IS DISTINCT FROM 'detached_runner'
                              AND NOT EXISTS (SELECT j.id FROM journal j
                                               WHERE j.run_id = f.run_id AND j.lane = 0 AND j.verb = 'skip'
                                                 AND f.seq BETWEEN j.first AND j.through)))""",
    "a ledger that has everything says what the run says": """
        SELECT r.run_id FROM runs r JOIN ledger_runs l ON l.run_id = r.run_id AND l.applied_seq = r.last_seq
         WHERE NOT EXISTS (SELECT j.id FROM journal j WHERE j.run_id = r.run_id AND j.verb = 'skip')
           AND ((l.status, l.attempts, l.play) <> (r.status, r.attempt, r.play)
            OR l.wait_kind IS DISTINCT FROM CASE WHEN r.status = 'waiting' THEN r.wait_kind END
            OR (l.wait_until IS NULL) <> (r.wait_until IS NULL)
            OR abs(extract(epoch FROM l.wait_until - r.wait_until)) > 0.001
            OR (l.started_at, l.finished_at) IS DISTINCT FROM (r.started_at, r.finished_at)
            OR l.accepted_at <> r.created_at)""",
    "the ledger has each log line once, in order, and all that is acknowledged": """
        SELECT l.run_id FROM lanes l LEFT JOIN ledger_logs g ON g.run_id = l.run_id
         WHERE l.lane_receiver = ''
           AND NOT EXISTS (SELECT j.id FROM journal j WHERE j.run_id = l.run_id AND j.lane = 1 AND j.verb = 'skip')
         GROUP BY l.run_id
        HAVING count(g.seq) <> coalesce(max(g.seq), 0) OR count(g.seq) NOT BETWEEN l.acked_seq AND l.last_seq""",
}


def _statement(rules: dict[str, str]) -> str:
    parts = [
        f"SELECT {number} AS rule, t.run_id::text AS run_id FROM ({query}) AS t (run_id)"
        for number, query in enumerate(rules.values())
    ]
    return "\nUNION ALL\n".join(parts)


async def check_invariants(session: Session, *, ledger: bool = True) -> None:
    """Fail with every rule that a row breaks. ``ledger`` False: facts go elsewhere than to the ledger here."""
    rules = {name: query for name, query in _RULES.items() if ledger or "the ledger" not in name}
    rows = await session.fetch(_in_schema(_statement(rules), session.options.schema))
    if rows:
        names = list(rules)
        broken: dict[str, list[str]] = {}
        for row in rows:
            broken.setdefault(names[row["rule"]], []).append(row["run_id"])
        raise AssertionError("\n".join(f"broken: {name}: {runs[:5]}" for name, runs in broken.items()))


_TABLES = (
    "runs",
    "facts",
    "attempts",
    "waits",
    "events",
    "wakes",
    "lanes",
    "receipts",
    "runners",
    "sandboxes",
    "billing_jobs",
    "ledger_runs",
    "ledger_logs",
    "journal",
    "cancellations",
    "fires",
)


def _in_schema(text: str, schema: str) -> str:
    for keyword in ("FROM", "JOIN"):
        for table in _TABLES:
            text = text.replace(f"{keyword} {table}", f"{keyword} {bundle.quote(schema)}.{table}")
    return bundle.render(text, schema)
