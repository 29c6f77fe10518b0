-- 0007: schedules and what they have fired; the chores of maintenance and what they seek.

-- What fires when. One row per schedule; nothing here is read by a transition of a run.
CREATE TABLE @schema@.schedules (
    created_at    timestamptz NOT NULL,
    updated_at    timestamptz NOT NULL,      -- of the definition
    next_fire_at  timestamptz NOT NULL,      -- whoever moves it, fenced by its value, has fired
    revision      integer     NOT NULL DEFAULT 1,  -- of definition and pause: what was computed from an older one is void
    priority      smallint    NOT NULL,
    paused_at     timestamptz,
    every_s       integer,
    name          text COLLATE "C" NOT NULL PRIMARY KEY,
    play          text        NOT NULL,
    timezone      text        NOT NULL,
    missed        text        NOT NULL CHECK (missed IN ('skip', 'last', 'all')),
    cron          text,
    org_id        text,
    release_id    text,                      -- of the runs: adopt_schedules() keeps it that of a host that serves the play
    environment   text,
    labels        jsonb,
    extras        jsonb,                     -- of the runs, as admit_runs() takes them
    input         jsonb       NOT NULL,
    CHECK ((cron IS NULL) <> (every_s IS NULL))
);

CREATE INDEX schedules_due_idx ON @schema@.schedules (next_fire_at)
    WHERE paused_at IS NULL;

-- What has fired: the key is what makes it one run per fire, whoever fires. Rows go with their run.
CREATE TABLE @schema@.fires (
    fire_at   timestamptz NOT NULL,
    fired_at  timestamptz NOT NULL,
    run_id    text COLLATE "C" NOT NULL,
    schedule  text COLLATE "C" NOT NULL,
    PRIMARY KEY (schedule, fire_at)
);

CREATE INDEX fires_run_idx ON @schema@.fires (run_id);

-- What is done from time to time by one host, whichever comes first. A claim pushes due_at, and is known by its value.
CREATE TABLE @schema@.chores (
    due_at  timestamptz NOT NULL,
    name    text COLLATE "C" NOT NULL PRIMARY KEY,
    state   jsonb                            -- where it stands; NULL: at the beginning of its round
);

INSERT INTO @schema@.chores (due_at, name) VALUES ('epoch', 'retention'), ('epoch', 'logs'), ('epoch', 'counts');

-- Runs by status, counted page by page.
CREATE TABLE @schema@.status_counts (
    counted_at  timestamptz NOT NULL,        -- when the count began
    runs        bigint      NOT NULL,
    status      text COLLATE "C" NOT NULL PRIMARY KEY
);

-- What retention seeks: runs that have ended and whose every lifecycle fact is delivered. A run enters it once.
CREATE INDEX runs_ended_idx ON @schema@.runs (finished_at)
    WHERE finished_at IS NOT NULL AND NOT lane_pending;

-- What the scrub of log bodies seeks: those that are still there.
CREATE INDEX facts_log_idx ON @schema@.facts (created_at)
    WHERE lane = 1 AND NOT payload ? '$scrubbed';

CREATE INDEX ledger_logs_log_idx ON @schema@.ledger_logs (created_at)
    WHERE NOT payload ? '$scrubbed';
