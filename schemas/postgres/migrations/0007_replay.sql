-- Callbacks that are replayed: their attempts go on being numbered, their schedule begins anew.
ALTER TABLE penstock.callback ADD COLUMN replayed_after integer;
COMMENT ON COLUMN penstock.callback.replayed_after IS 'attempts made before it was replayed last: its schedule began anew after them';

-- Dead letters of one target, or of all by target. Nothing is paid for it by what is delivered.
CREATE INDEX callback_dead ON penstock.callback (target, seq) WHERE state = 'dead';
