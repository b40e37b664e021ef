-- An attempt keeps when it was queued, and the input of the stage that it ended. So a task can be
-- run again from an earlier stage. Services of the version before leave the new columns empty.

ALTER TABLE penstock.task
    ADD COLUMN queued_at timestamp with time zone,
    ADD COLUMN started_at timestamp with time zone,
    ADD COLUMN rerun_of bigint;

ALTER TABLE penstock.attempt
    ADD COLUMN queued_at timestamp with time zone,
    ADD COLUMN input_type text,
    ADD COLUMN input bytea,
    ADD COLUMN input_ref text;

ALTER TABLE penstock.history ADD COLUMN rerun_of bigint;

COMMENT ON COLUMN penstock.task.queued_at IS 'while queued or running: the release of the attempt';

COMMENT ON COLUMN penstock.task.started_at IS 'while running: the time at which the claim was written';

COMMENT ON COLUMN penstock.task.rerun_of IS 'task that this one runs again';

COMMENT ON COLUMN penstock.attempt.input_type IS 'of the attempt that ended its stage: kind of the stage''s input; `same`: the next stage got the same input; NULL: the input was not kept';

COMMENT ON COLUMN penstock.attempt.input_ref IS 'as task.context_ref';
