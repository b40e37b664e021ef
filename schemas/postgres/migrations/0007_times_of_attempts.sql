-- A task knows when its present attempt was queued and claimed, and which task it repeats.

ALTER TABLE penstock.task
    ADD COLUMN queued_at timestamp with time zone,
    ADD COLUMN started_at timestamp with time zone,
    ADD COLUMN rerun_of bigint;

COMMENT ON COLUMN penstock.task.queued_at IS 'while queued or running: the release of the attempt';

COMMENT ON COLUMN penstock.task.started_at IS 'while running: the time at which the claim was written';

COMMENT ON COLUMN penstock.task.rerun_of IS 'task that this one runs again';
