-- A lease lasts as long as its claim said, also for a processor that restores it, whatever its type says by then.
-- What runs since before has none: its type's counts.
ALTER TABLE penstock.task ADD COLUMN lease_ms integer;
COMMENT ON COLUMN penstock.task.lease_ms IS 'while running: milliseconds without a sign of life after which its lease expires, as claimed';
