-- 0006: what plays share across hosts beyond the runs themselves: the rates of providers and the circuits of
-- dependencies. Both are few rows that are written often: they have room for HOT updates.

-- Rate scopes. The bucket is GCRA's: one moment says how much has been spent. It stands on the scope's own clock,
-- which is the database's less lag, and stands still while the scope is paused: after a provider's refusal nobody
-- has gained credit, and whoever had a slot keeps it, later by the length of the pause.
CREATE TABLE @schema@.rate_scopes (
    set_at         timestamptz NOT NULL,
    spent_to       timestamptz NOT NULL,     -- scope's clock: the bucket is full again then, of all that is reserved
    started_to     timestamptz NOT NULL,     -- the same of what has started: who starts late pushes nobody together
    lag            interval    NOT NULL DEFAULT '0',
    measured_at    timestamptz NOT NULL,     -- since when the present rate is measured …
    measured_from  double precision NOT NULL DEFAULT 0,  -- … and what had been used by then
    used           double precision NOT NULL DEFAULT 0,  -- units granted, ever
    burst          double precision NOT NULL,
    max_in_flight  integer,
    per_s          double precision,         -- units per second; NULL: only the number in flight is limited
    refused_per_s  double precision,         -- the rate measured up to the latest refusal
    refused_at     timestamptz,
    paused_at      timestamptz,              -- set: paused, by a refusal, until a probe succeeds
    blocked_until  timestamptz,              -- while paused: no probe before then
    probe_until    timestamptz,              -- when a probe that has not come back is given up
    probe_token    bigint,                   -- the hold that probes
    name           text COLLATE "C" NOT NULL PRIMARY KEY
) WITH (fillfactor = 50);

-- Who has, or waits for, a slot of a scope. A row counts while its attempt lives: the attempt's lease is the hold's.
CREATE TABLE @schema@.rate_holds (
    number      bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,  -- who came first
    slot        timestamptz NOT NULL,        -- scope's clock: not to start before
    spent_to    timestamptz NOT NULL,        -- scope's clock: the bucket's moment after this one
    token       bigint      NOT NULL,
    cost        double precision NOT NULL,
    attempt     integer     NOT NULL,
    started_at  timestamptz,                 -- granted; NULL while it waits
    run_id      text COLLATE "C" NOT NULL,
    scope       text COLLATE "C" NOT NULL,
    PRIMARY KEY (token)
) WITH (fillfactor = 70);

CREATE INDEX rate_holds_waiting_idx ON @schema@.rate_holds (scope, slot, number)
    WHERE started_at IS NULL;

CREATE INDEX rate_holds_started_idx ON @schema@.rate_holds (scope, started_at)
    WHERE started_at IS NOT NULL;

-- Circuits of dependencies, one row for each that has ever failed or been declared.
CREATE TABLE @schema@.circuits (
    updated_at     timestamptz NOT NULL,
    open_s         double precision NOT NULL DEFAULT 10,   -- how long the first opening lasts; each further one doubles
    open_max_s     double precision NOT NULL DEFAULT 300,
    threshold      integer     NOT NULL DEFAULT 5,         -- failures in a row that open it
    openings       integer     NOT NULL DEFAULT 0,         -- in a row
    open_until     timestamptz,
    probe_until    timestamptz,              -- when a probe that has not come back is given up
    probe_token    bigint,
    probe_attempt  integer,
    name           text COLLATE "C" NOT NULL PRIMARY KEY,
    state          text        NOT NULL DEFAULT 'closed',
    failures       bigint[]    NOT NULL DEFAULT '{}',      -- tokens of those in a row: a report made again counts once
    probe_run_id   text COLLATE "C",
    error          text,                     -- the latest failure's
    CONSTRAINT circuits_state_check CHECK (
        CASE state
            WHEN 'closed'    THEN open_until IS NULL AND probe_token IS NULL
            WHEN 'open'      THEN open_until IS NOT NULL AND probe_token IS NULL
            WHEN 'half_open' THEN open_until IS NOT NULL
            ELSE false
        END)
) WITH (fillfactor = 50);

CREATE INDEX circuits_state_idx ON @schema@.circuits (state, updated_at);
