-- 0001: the kernel's tables.
--
-- Row versions per run are the budget. A plain run costs three versions of its row (admitted, claimed,
-- ended) and one per delivery turn; a run that its own host admits into a free slot starts as claimed and
-- saves one. So the row holds only what is *now*: nothing wide, no log, no counters of others.
--
-- Columns stand in the order fixed and never null, fixed and nullable, variable: tuples are read from the
-- front, and the front is what every transition reads.
--
-- No foreign keys: on these tables they would lock rows of others inside every transition.

CREATE TABLE @schema@.runs (
    bucket            bigint      NOT NULL,  -- hash of play, release, environment, priority: bucket_of()
    due_at            timestamptz NOT NULL,  -- earliest moment somebody may take the row; an accelerator, no fence
    created_at        timestamptz NOT NULL,
    lane_due_at       timestamptz NOT NULL,  -- the same for the lifecycle lane
    attempt           integer     NOT NULL DEFAULT 0,  -- number of the latest attempt: a fence, not a budget
    appended          integer     NOT NULL DEFAULT 0,  -- logs and progress of the live attempt stored so far
    last_seq          integer     NOT NULL,  -- last lifecycle fact appended
    acked_seq         integer     NOT NULL DEFAULT 0,  -- last lifecycle fact the ledger has
    lane_attempts     integer     NOT NULL DEFAULT 0,  -- deliveries begun of the prefix at the head
    failures          integer     NOT NULL DEFAULT 0,
    crashes           integer     NOT NULL DEFAULT 0,
    priority          smallint    NOT NULL DEFAULT 0,
    lane_skips        smallint    NOT NULL DEFAULT 0,  -- prefixes an operator skipped: the generation of the keys
    limited           boolean     NOT NULL DEFAULT false,  -- the latest attempt counts against a limit
    lane_pending      boolean     NOT NULL GENERATED ALWAYS AS (acked_seq < last_seq) STORED,
    array_input       boolean     NOT NULL DEFAULT false,  -- input pages are staged: its terminal's delivery retires them
    lane_rank         smallint    NOT NULL GENERATED ALWAYS AS (
                          CASE WHEN acked_seq = 0 THEN 0             -- the admission itself
                               WHEN terminal_seq > acked_seq THEN 1  -- an end nobody has seen yet
                               WHEN wait_seq > acked_seq THEN 2      -- a wait people can see
                               ELSE 3 END) STORED,
    terminal_seq      integer,
    wait_seq          integer,
    frozen_seq        integer,               -- last fact of the prefix that is or was out for delivery
    quiet_seq         integer,               -- last fact without effect for a ledger; who appends one (quiet_fact()
                                             -- tells) sets it to that fact's seq in the same statement
    started_at        timestamptz,           -- first attempt
    finished_at       timestamptz,
    attempt_at        timestamptz,           -- start of the live attempt
    lease_expires_at  timestamptz,
    lease_token       bigint,                -- of the latest attempt; stays, to answer repeated calls
    lease_owner       bigint,                -- hosts.host
    lane_expires_at   timestamptz,
    lane_token        bigint,                -- of the latest delivery turn; stays, as above
    wait_until        timestamptz,
    turn              bigint,                -- whose turn it is when runs queue: turn_of(); NULL: nobody's in particular
    subturn           bigint,                -- of the concurrency key, within the turn: subturn_of()
    run_id            text COLLATE "C" NOT NULL PRIMARY KEY,
    status            text        NOT NULL,
    play              text        NOT NULL,
    receiver          text        NOT NULL DEFAULT '',  -- never changes; '' is the hosts' own ledger
    lane_receiver     text        NOT NULL GENERATED ALWAYS AS (
                          CASE WHEN terminal_seq = acked_seq + 1 AND terminal_receiver IS NOT NULL
                               THEN terminal_receiver ELSE receiver END) STORED,  -- whose turn it is
    org_id            text,
    release_id        text,
    environment       text,
    idempotency_key   text,
    wait_kind         text,
    wait_key          text,
    lane_error        text,                  -- set: the lane is blocked, and why
    terminal_receiver text,                  -- set: the terminal goes to this receiver instead, and alone
    parent_id         text COLLATE "C",      -- the run that started this one
    root_id           text COLLATE "C",      -- the run that started the whole family
    concurrency_key   text,
    labels            jsonb,
    CONSTRAINT runs_status_check CHECK (
        CASE status
            WHEN 'queued'  THEN lease_expires_at IS NULL AND finished_at IS NULL AND wait_kind IS NULL
            WHEN 'running' THEN lease_expires_at IS NOT NULL AND finished_at IS NULL AND wait_kind IS NULL
            WHEN 'waiting' THEN lease_expires_at IS NULL AND finished_at IS NULL AND wait_kind IS NOT NULL
            ELSE status IN ('completed', 'failed', 'cancelled')
                 AND lease_expires_at IS NULL AND finished_at IS NOT NULL AND terminal_seq = last_seq
        END)
) WITH (fillfactor = 70);

-- What a claim seeks: per bucket, by due time. Runs with an organisation or a concurrency key take turns: they have
-- an index by turn beside one by due time. (Its condition is `turn >= 0`, which no seek by turn implies: the planner
-- cannot mistake one for the other.)
CREATE INDEX runs_claim_idx ON @schema@.runs (bucket, due_at)
    WHERE status IN ('queued', 'waiting') AND turn IS NULL;
CREATE INDEX runs_due_idx ON @schema@.runs (bucket, due_at)
    WHERE status IN ('queued', 'waiting') AND turn >= 0;
CREATE INDEX runs_turn_idx ON @schema@.runs (bucket, turn, subturn, due_at)
    WHERE status IN ('queued', 'waiting') AND turn IS NOT NULL;

-- What a limit counts: attempts that live, of an organisation, of a play that has a limit, and of a concurrency key.
CREATE INDEX runs_org_idx ON @schema@.runs (org_id)
    WHERE status = 'running' AND org_id IS NOT NULL;
CREATE INDEX runs_limited_idx ON @schema@.runs (play, concurrency_key)
    WHERE status = 'running' AND limited;

-- What lease expiry seeks.
CREATE INDEX runs_lease_idx ON @schema@.runs (due_at)
    WHERE status = 'running';

-- What the outbox seeks: per receiver and rank, by due time.
CREATE INDEX runs_lane_idx ON @schema@.runs (lane_receiver, lane_rank, lane_due_at)
    WHERE lane_pending;

CREATE UNIQUE INDEX runs_idempotency_idx ON @schema@.runs (coalesce(org_id, ''), play, idempotency_key)
    WHERE idempotency_key IS NOT NULL;

-- What happened, per run and lane, in the order of the run's own row lock. Append-only.
CREATE TABLE @schema@.facts (
    created_at  timestamptz NOT NULL,
    seq         integer     NOT NULL,
    lane        smallint    NOT NULL,        -- 0 lifecycle, 1 observability
    run_id      text COLLATE "C" NOT NULL,
    type        text        NOT NULL,
    payload     jsonb       NOT NULL,
    PRIMARY KEY (run_id, lane, seq)
);

-- Who tried: one row per attempt, written when the attempt ends, for whatever reason.
CREATE TABLE @schema@.attempts (
    started_at  timestamptz NOT NULL,
    ended_at    timestamptz NOT NULL,
    token       bigint      NOT NULL,
    owner       bigint      NOT NULL,
    attempt     integer     NOT NULL,
    outage_at   timestamptz,                 -- of a deferral by an outage: when that outage began for the run
    run_id      text COLLATE "C" NOT NULL,
    outcome     text        NOT NULL,        -- completed, failed, cancelled, retried, parked, released, deferred, expired
    error       jsonb,
    PRIMARY KEY (run_id, attempt)
);

-- What a run waits for, and that it need not wait for it again.
CREATE TABLE @schema@.waits (
    created_at  timestamptz NOT NULL,
    due_at      timestamptz,                 -- when it passes or is given up; NULL: not by itself
    done_at     timestamptz,                 -- set once: the wait is over for good
    wait_seq    integer,                     -- the run.waiting fact of the latest park that stood at it
    run_id      text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    kind        text        NOT NULL,        -- sleep, event, approval, child
    name        text COLLATE "C",            -- of the event; of a child its run id
    payload     jsonb,                       -- what it was given; NULL once it is over: only time passed
    PRIMARY KEY (run_id, key)
);

-- The observability lane of a run that has logged: the same columns as the lifecycle lane on runs, so that
-- one text of the lane functions serves both.
CREATE TABLE @schema@.lanes (
    lane_due_at       timestamptz NOT NULL,
    last_seq          integer     NOT NULL,
    acked_seq         integer     NOT NULL DEFAULT 0,
    lane_attempts     integer     NOT NULL DEFAULT 0,
    lane_skips        smallint    NOT NULL DEFAULT 0,
    lane_pending      boolean     NOT NULL GENERATED ALWAYS AS (acked_seq < last_seq) STORED,
    lane_rank         smallint    NOT NULL DEFAULT 3,
    frozen_seq        integer,
    quiet_seq         integer,
    lane_expires_at   timestamptz,
    lane_token        bigint,
    run_id            text COLLATE "C" NOT NULL PRIMARY KEY,
    lane_receiver     text        NOT NULL,
    lane_error        text
) WITH (fillfactor = 70);

CREATE INDEX lanes_lane_idx ON @schema@.lanes (lane_receiver, lane_rank, lane_due_at)
    WHERE lane_pending;

-- Requests to cancel that found the run's row taken, or that came inside a caller's transaction.
-- Insert-only for requesters, so that an open transaction holds up nobody; swept by the hosts.
CREATE TABLE @schema@.cancellations (
    requested_at  timestamptz NOT NULL,
    run_id        text COLLATE "C" NOT NULL,
    request_id    text COLLATE "C" NOT NULL,
    reason        text,
    requested_by  text,
    PRIMARY KEY (run_id, request_id)
);

-- Plays that some host has registered.
CREATE TABLE @schema@.plays (
    registered_at  timestamptz NOT NULL,
    crash_cap      integer     NOT NULL,     -- expired leases after which a run fails
    name           text COLLATE "C" NOT NULL PRIMARY KEY
);

-- Processes that have hosted plays. For people who look; no lease depends on it.
CREATE TABLE @schema@.hosts (
    host        bigint      NOT NULL PRIMARY KEY,
    started_at  timestamptz NOT NULL,
    seen_at     timestamptz NOT NULL,
    pid         integer     NOT NULL,
    name        text        NOT NULL,
    version     text        NOT NULL,
    gateway_url text,                       -- where runners in sandboxes reach it
    buckets     bigint[]    NOT NULL DEFAULT '{}'  -- what it claims from
) WITH (fillfactor = 50);

-- The default ledger: a read model of runs, applied in order and once.
CREATE TABLE @schema@.ledger_runs (
    accepted_at    timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL,
    applied_seq    integer     NOT NULL,     -- last lifecycle fact applied
    applied_facts  integer     NOT NULL,     -- how many were applied, and how many were passed over: together
    passed_facts   integer     NOT NULL DEFAULT 0,  -- applied_seq, or one was lost or doubled
    attempts       integer     NOT NULL DEFAULT 0,
    started_at     timestamptz,
    finished_at    timestamptz,
    wait_until     timestamptz,
    progress_done  double precision,
    progress_total double precision,
    run_id         text COLLATE "C" NOT NULL PRIMARY KEY,
    play           text        NOT NULL,
    status         text        NOT NULL,
    org_id         text,
    wait_kind      text,
    labels         jsonb,
    output         jsonb,
    error          jsonb
) WITH (fillfactor = 70);

CREATE TABLE @schema@.ledger_logs (
    created_at  timestamptz NOT NULL,
    seq         integer     NOT NULL,
    run_id      text COLLATE "C" NOT NULL,
    payload     jsonb       NOT NULL,
    PRIMARY KEY (run_id, seq)
);
