-- 0004: what wakes a run that waits.

-- What was sent to runs. Senders only insert; wait_key is set once, by the run's own transitions under its lock.
CREATE TABLE @schema@.events (
    seq         bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,  -- order of arrival
    created_at  timestamptz NOT NULL,
    request     bigint,                      -- of the host that sent it: knows its own again after a lost answer
    run_id      text COLLATE "C" NOT NULL,
    event_id    text COLLATE "C" NOT NULL,
    name        text COLLATE "C" NOT NULL,
    wait_key    text COLLATE "C",            -- the wait that took it
    payload     jsonb       NOT NULL,
    PRIMARY KEY (run_id, event_id)
);

CREATE INDEX events_open_idx ON @schema@.events (run_id, name, seq)
    WHERE wait_key IS NULL;

-- Runs that should look at what they wait for. Insert-only for whoever has something for them, so that nobody
-- touches the row of another run; swept by the hosts.
CREATE TABLE @schema@.wakes (
    id          bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    created_at  timestamptz NOT NULL,
    run_id      text COLLATE "C" NOT NULL
);

-- Whom the end of a parent reaches: open children.
CREATE INDEX runs_parent_idx ON @schema@.runs (parent_id)
    WHERE parent_id IS NOT NULL AND finished_at IS NULL;
