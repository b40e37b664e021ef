-- Attempts during self-check mode do not count: an outage of the callbacks service would otherwise
-- exhaust the schedule. Services of the previous release count all attempts.
ALTER TABLE penstock.callback ADD COLUMN spent integer;
COMMENT ON COLUMN penstock.callback.spent IS 'attempts that its schedule does not count: made before it was replayed, or while the service suspected itself';
