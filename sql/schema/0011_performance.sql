-- 0011: what the ends of runs say of how they went.

-- How much of that the launch's receiver takes: basic, full, or NULL for nothing.
ALTER TABLE @schema@.runs ADD COLUMN performance text;

ALTER TABLE @schema@.ledger_runs ADD COLUMN performance jsonb;
