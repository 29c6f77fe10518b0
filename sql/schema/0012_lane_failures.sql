-- 0012: why facts are not where they should be.

-- Why the latest delivery of a lane that comes again has failed. It is written with the hand-back and the
-- acknowledgement, which change the row anyway.
ALTER TABLE @schema@.runs ADD COLUMN lane_failure text;
ALTER TABLE @schema@.lanes ADD COLUMN lane_failure text;

-- The receivers that a host delivers to.
ALTER TABLE @schema@.hosts ADD COLUMN receivers text[] NOT NULL DEFAULT '{}';
