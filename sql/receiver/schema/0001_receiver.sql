-- 0001: the tables of a receiver's ledger.
--
-- A schema of its own, in any database: it knows nothing of the runtime whose facts it keeps. One row version per
-- delivery of a cursor and, for the lifecycle, of the run; facts and receipts are insert-only.

-- How far each lane of a run has been applied: the order of everything. Whoever applies holds this row.
CREATE TABLE @schema@.cursors (
    updated_at   timestamptz NOT NULL,
    applied_seq  integer     NOT NULL DEFAULT 0,
    skipped      integer     NOT NULL DEFAULT 0,  -- facts that were left out: without effect, or skipped by an operator
    conflicts    integer     NOT NULL DEFAULT 0,  -- deliveries that contradicted what is here
    generation   integer     NOT NULL DEFAULT 0,  -- of the sender's lane: rises with each skip
    lane         smallint    NOT NULL,            -- 0 lifecycle, 1 observability
    run_id       text COLLATE "C" NOT NULL,
    conflict     text,                            -- the latest of them
    PRIMARY KEY (run_id, lane)
) WITH (fillfactor = 70);

-- What each run is now, as its lifecycle facts tell it. Null: nothing that was applied has said.
CREATE TABLE @schema@.runs (
    accepted_at     timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL,
    attempts        integer     NOT NULL DEFAULT 0,
    started_at      timestamptz,
    finished_at     timestamptz,
    wait_until      timestamptz,
    progress_done   double precision,
    progress_total  double precision,
    run_id          text COLLATE "C" NOT NULL PRIMARY KEY,
    status          text,
    play            text,
    org_id          text,
    wait_kind       text,
    labels          jsonb,
    output          jsonb,
    error           jsonb
) WITH (fillfactor = 70);

CREATE TABLE @schema@.facts (
    created_at   timestamptz NOT NULL,
    received_at  timestamptz NOT NULL,
    seq          integer     NOT NULL,
    lane         smallint    NOT NULL,
    run_id       text COLLATE "C" NOT NULL,
    type         text        NOT NULL,
    payload      jsonb       NOT NULL,
    PRIMARY KEY (run_id, lane, seq)
);

-- Which deliveries are here, by their key: a redelivery is known by it, and by its digest to be the same.
CREATE TABLE @schema@.receipts (
    received_at   timestamptz NOT NULL,
    delivery_key  text COLLATE "C" NOT NULL PRIMARY KEY,
    digest        text        NOT NULL
);
