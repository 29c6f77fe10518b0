-- 0008: which run holds a unique key.

CREATE TABLE @schema@.unique_keys (
    checked_at  timestamptz NOT NULL,        -- when somebody last saw that the key is held
    expires_at  timestamptz,                 -- end of its window; NULL: held until the run has ended
    org_id      text COLLATE "C" NOT NULL,   -- '' for none
    play        text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    run_id      text COLLATE "C" NOT NULL,
    PRIMARY KEY (org_id, play, key)
) WITH (fillfactor = 80);

-- What forgetting seeks: the keys that were looked at longest ago.
CREATE INDEX unique_keys_checked_idx ON @schema@.unique_keys (checked_at);
