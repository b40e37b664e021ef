-- A target that answered 410 kept its row without end, and a callback of a disabled target was held
-- without end.
ALTER TABLE penstock.callback_target ADD COLUMN gone_at timestamptz;
COMMENT ON COLUMN penstock.callback_target.gone_at IS 'while disabled: when the target answered 410; NULL: an operator disabled it';
-- Short: one row for each URL that has answered 410, found by the partial index.
UPDATE penstock.callback_target SET gone_at = changed_at
WHERE state <> 'normal' AND state = 'disabled' AND why LIKE 'it answered 410 to %';

ALTER TABLE penstock.callback ADD COLUMN held_since timestamptz;
COMMENT ON COLUMN penstock.callback.held_since IS 'since when it is held, or was before it was drained; cleared by a claim';
