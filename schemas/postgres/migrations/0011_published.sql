-- Counts publications of a callback without a claim, for `penstock check`: a stuck callback is
-- published repeatedly and looks like a scheduled one. The requeuer increments it; a claim, a
-- postponement or a hold resets it.
ALTER TABLE penstock.callback
    ADD COLUMN published integer NOT NULL DEFAULT 0,
    ADD COLUMN published_at timestamptz,
    ADD COLUMN waits_since timestamptz;
COMMENT ON COLUMN penstock.callback.published IS 'records written again on end of which nothing has come: neither begun, put back nor held';
COMMENT ON COLUMN penstock.callback.published_at IS 'when the last of them was written';
COMMENT ON COLUMN penstock.callback.waits_since IS 'while pending: since when its records are written again and it is not begun; null while that is as it should be';
