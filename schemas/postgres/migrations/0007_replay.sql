-- Replayed callbacks: the numbering of attempts continues, and the schedule restarts.
ALTER TABLE penstock.callback ADD COLUMN replayed_after integer;
COMMENT ON COLUMN penstock.callback.replayed_after IS 'attempts made before it was replayed last: its schedule began anew after them';

-- Dead letters by target. Delivered callbacks are not in the index.
CREATE INDEX callback_dead ON penstock.callback (target, seq) WHERE state = 'dead';
