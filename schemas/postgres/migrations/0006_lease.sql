-- The lease of a claim, so that a processor restores it unchanged when the type's lease was
-- changed. Attempts of the previous release have none and get that of their type.
ALTER TABLE penstock.task ADD COLUMN lease_ms integer;
COMMENT ON COLUMN penstock.task.lease_ms IS 'while running: milliseconds without a sign of life after which its lease expires, as claimed';
