-- Attempts keep when they were queued and what their stage got, so that a task can be run again
-- from an earlier stage. Services of the version before leave the new columns empty.

ALTER TABLE penstock.attempt
    ADD COLUMN queued_at timestamp with time zone,
    ADD COLUMN input_type text,
    ADD COLUMN input bytea,
    ADD COLUMN input_ref text;

COMMENT ON COLUMN penstock.attempt.input_type IS 'of the attempt that ended its stage: kind of the stage''s input; `same`: the next stage got the same input; NULL: the input was not kept';

COMMENT ON COLUMN penstock.attempt.input_ref IS 'as task.context_ref';
