-- 0002: the operators' journal: what somebody did to lanes by hand, and why.
--
-- A skip is also what tells a ledger in this database that a gap in its facts is meant.

CREATE TABLE @schema@.journal (
    id       bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL,
    first    integer     NOT NULL,           -- of the prefix that was retried or skipped
    through  integer     NOT NULL,
    lane     smallint    NOT NULL,
    run_id   text COLLATE "C" NOT NULL,
    verb     text        NOT NULL,           -- retry, skip
    because  text,
    by       text
);

CREATE INDEX journal_run_idx ON @schema@.journal (run_id, lane, first);
