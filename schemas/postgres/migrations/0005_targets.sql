-- Targets of callbacks: their health, their owner, and the settings of operators.
CREATE TABLE penstock.target (
    url text PRIMARY KEY,
    state text NOT NULL DEFAULT 'normal' CHECK (state IN ('normal', 'abnormal', 'disabled')),
    why text,
    count integer NOT NULL DEFAULT 0,
    slow_at timestamptz,
    called_at timestamptz,
    failures integer NOT NULL DEFAULT 0,
    rate double precision CHECK (rate > 0),
    attempts jsonb NOT NULL DEFAULT '[]',
    owner text,
    changed_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70);
COMMENT ON COLUMN penstock.target.why IS 'while disabled: what it answered, or what the operator said';
COMMENT ON COLUMN penstock.target.count IS 'slow calls it is charged with: penstock.core.health';
COMMENT ON COLUMN penstock.target.failures IS 'quick failures on end';
COMMENT ON COLUMN penstock.target.rate IS 'most calls a second; NULL is the setting of the callbacks service';
COMMENT ON COLUMN penstock.target.attempts IS 'the last few: at, callback, attempt, took_ms, status, message';
COMMENT ON COLUMN penstock.target.owner IS 'the process that judges it: nobody else''s snapshot is kept';

-- Held callbacks wait for their target and are on no topic.
ALTER TABLE penstock.callback
    DROP CONSTRAINT callback_state_check,
    ADD CONSTRAINT callback_state_check CHECK (state IN ('pending', 'held', 'delivered', 'dead')),
    ADD COLUMN diverted boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN penstock.callback.diverted IS 'it was held once: its records go to the diverted topic';
CREATE INDEX callback_held ON penstock.callback (target, seq) WHERE state = 'held';
