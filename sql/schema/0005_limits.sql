-- 0005: how many attempts may run at once, over all hosts.
--
-- No counters: what runs is counted over the partial indexes of running runs, under a lock of the limit that is only
-- ever tried. So the end of an attempt touches nothing here, and a host that dies leaves nothing behind.

CREATE TABLE @schema@.limits (
    max_running  integer     NOT NULL CHECK (max_running >= 0),
    kind         text COLLATE "C" NOT NULL CHECK (kind IN ('play', 'org', 'key', 'sandbox', 'sandbox_org')),
    name         text COLLATE "C" NOT NULL,  -- of the play or organisation; 'key': of the play, for each of its keys;
                                           -- 'sandbox': of the provider, '' for all; 'sandbox_org': of the organisation
    PRIMARY KEY (kind, name)
);
