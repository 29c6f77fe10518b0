-- 0003: receipts of steps.
--
-- A receipt is inserted when its step is claimed and updated when the step ends, on the same page: that is what the
-- room in the pages is for, since no indexed column ever changes.

CREATE TABLE @schema@.receipts (
    created_at        timestamptz NOT NULL,  -- when it was first claimed
    lease             bigint      NOT NULL,  -- of whoever holds it, or last did: the attempt's token unless chosen
    attempt           integer     NOT NULL,  -- the same: of the run
    tries             integer     NOT NULL,  -- calls of the function that are known of, over all attempts
    run_failures      integer     NOT NULL,  -- the run's failures when this one was recorded
    final             boolean     NOT NULL,  -- never changes again
    claimed_at        timestamptz NOT NULL,
    finished_at       timestamptz,
    heartbeat_at      timestamptz,
    lease_expires_at  timestamptz,           -- NULL: held for as long as its attempt lives
    run_id            text COLLATE "C" NOT NULL,
    key               text COLLATE "C" NOT NULL,
    state             text        NOT NULL,
    function          text        NOT NULL,  -- what it was recorded for
    output            jsonb,
    error             jsonb,
    PRIMARY KEY (run_id, key),
    CONSTRAINT receipts_key_check CHECK (length(key) BETWEEN 1 AND 255),
    CONSTRAINT receipts_state_check CHECK (
        CASE WHEN state IN ('claimed', 'queued', 'running', 'released')
             THEN NOT final AND finished_at IS NULL AND output IS NULL AND error IS NULL
             WHEN state = 'failed' THEN finished_at IS NOT NULL AND output IS NULL AND error IS NOT NULL
             ELSE state IN ('completed', 'skipped') AND final AND finished_at IS NOT NULL AND error IS NULL
        END)
) WITH (fillfactor = 70);
