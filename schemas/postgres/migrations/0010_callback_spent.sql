-- Attempts that were made while the callbacks service suspected itself do not count: an outage of its own would use up the
-- schedule. Services from before go on counting all of them.
ALTER TABLE penstock.callback ADD COLUMN spent integer;
COMMENT ON COLUMN penstock.callback.spent IS 'attempts that its schedule does not count: made before it was replayed, or while the service suspected itself';
