-- 0010: detached attempts, the sandboxes they work in, and what those cost.
--
-- A detached attempt is a live attempt whose lease is held by a runner in a sandbox instead of by a host: the run
-- keeps its attempt, token and a lease without end (lease_owner 0), so every fence that counts for a play on a host
-- counts for a runner too. What may end it from outside is the verdict of the liveness sweep, never a clock alone.

-- Live detached attempts; the row goes in the transaction that ends the attempt.
CREATE TABLE @schema@.runners (
    due_at               timestamptz NOT NULL,  -- earliest moment at which somebody may have to look; an accelerator
    started_at           timestamptz NOT NULL,
    ceiling_at           timestamptz NOT NULL,  -- past it the run fails, alive or not; 'infinity' for none
    token                bigint      NOT NULL,
    heartbeat_timeout_s  double precision NOT NULL,
    attempt              integer     NOT NULL,
    heartbeat_at         timestamptz,           -- exact, and never the same twice: the fence of every verdict
    run_id               text COLLATE "C" NOT NULL PRIMARY KEY,
    provider             text        NOT NULL,
    sandbox              text        NOT NULL
) WITH (fillfactor = 70);

-- What the liveness sweep seeks: per provider, by due time. A heartbeat does not touch it.
CREATE INDEX runners_due_idx ON @schema@.runners (provider, due_at);

-- What runners said at their end. The first word of an attempt stands.
CREATE TABLE @schema@.runner_results (
    received_at  timestamptz NOT NULL,
    token        bigint      NOT NULL,
    delay_s      double precision NOT NULL,
    attempt      integer     NOT NULL,
    settled_at   timestamptz,                   -- set: the run has moved on, by this result or past it
    outage_max_s double precision,              -- of a deferral by an outage
    run_id       text COLLATE "C" NOT NULL,
    outcome      text        NOT NULL,
    payload      jsonb       NOT NULL,
    waits        jsonb       NOT NULL,
    overdue      jsonb       NOT NULL,
    PRIMARY KEY (run_id, attempt)
);

CREATE INDEX runner_results_unsettled_idx ON @schema@.runner_results (received_at)
    WHERE settled_at IS NULL;

-- Every sandbox that was ever asked for, written before the provider hears of it: the obligation to delete it.
CREATE TABLE @schema@.sandboxes (
    created_at        timestamptz NOT NULL,
    due_at            timestamptz NOT NULL,     -- earliest moment at which somebody may delete it; an accelerator
    certain_at        timestamptz NOT NULL,     -- until then one that nobody has seen may still be in the making
    attempt           integer     NOT NULL,
    tries             integer     NOT NULL DEFAULT 0,
    failures          integer     NOT NULL DEFAULT 0,
    custody_at        timestamptz,              -- the provider said that it exists
    ceiling_at        timestamptz,              -- of its runner, once it has one; 'infinity' for none
    wanted_at         timestamptz,              -- nobody needs it any more
    accepted_at       timestamptz,              -- the provider took the deletion: billing ends here
    confirmed_at      timestamptz,              -- read back: it is gone. Final
    lease_expires_at  timestamptz,
    lease_token       bigint,
    sandbox           text COLLATE "C" NOT NULL PRIMARY KEY,  -- our own name for it, given to the provider
    provider          text        NOT NULL,
    run_id            text COLLATE "C" NOT NULL,
    org_id            text,
    environment       text,
    provider_id       text,                     -- the provider's name for it, once known
    routing_domain    text,                     -- where the provider has it, once known; filled, never replaced
    last_error        text,
    block_reason      text,                     -- set: an operator has to decide
    diagnostics       jsonb                     -- what the provider said of its end
) WITH (fillfactor = 70);

-- What cleanup seeks.
CREATE INDEX sandboxes_due_idx ON @schema@.sandboxes (provider, due_at)
    WHERE confirmed_at IS NULL;

-- What capacity counts: sandboxes that still take up room.
CREATE INDEX sandboxes_open_idx ON @schema@.sandboxes (provider, org_id)
    WHERE accepted_at IS NULL;

CREATE INDEX sandboxes_run_idx ON @schema@.sandboxes (run_id);

-- What happened to sandboxes. Append-only, each event once.
CREATE TABLE @schema@.sandbox_events (
    happened_at     timestamptz NOT NULL,
    event_id        text COLLATE "C" NOT NULL PRIMARY KEY,  -- sandbox and type: derived, so nothing is told twice
    sandbox         text COLLATE "C" NOT NULL,
    type            text        NOT NULL,       -- delete_accepted, delete_confirmed
    routing_domain  text,                       -- the one the obligation was filed under; the observed one is a detail
    details         jsonb       NOT NULL
);

-- One job per run that ever asked for a sandbox, written with the first one.
CREATE TABLE @schema@.billing_jobs (
    created_at    timestamptz NOT NULL,
    due_at        timestamptz NOT NULL,
    finalised_at  timestamptz,
    run_id        text COLLATE "C" NOT NULL PRIMARY KEY
);

CREATE INDEX billing_jobs_due_idx ON @schema@.billing_jobs (due_at)
    WHERE finalised_at IS NULL;

-- What a run's compute was, for whoever bills it. Append-only; the id makes each item count once.
CREATE TABLE @schema@.compute_records (
    started_at   timestamptz NOT NULL,
    ended_at     timestamptz NOT NULL,
    recorded_at  timestamptz NOT NULL,
    attempt      integer     NOT NULL,
    record_id    text COLLATE "C" NOT NULL PRIMARY KEY,
    run_id       text COLLATE "C" NOT NULL,
    kind         text        NOT NULL,          -- runner, sandbox, late_sandbox
    provider     text        NOT NULL,
    org_id       text
);

CREATE INDEX compute_records_idx ON @schema@.compute_records (recorded_at, record_id);
