-- The progress of attempts. Not in `task`: each report would rewrite a wide row, and fire the
-- triggers that count tasks. Without a foreign key, which would lock the row of the task: a row
-- that belongs to no current attempt is not shown, and heartbeats removes it later.

CREATE TABLE penstock.task_progress (
    task_id bigint PRIMARY KEY,
    step integer NOT NULL,
    attempt integer NOT NULL,
    fraction double precision,
    message text NOT NULL,
    reported_at timestamptz NOT NULL
) WITH (fillfactor = 50);

COMMENT ON TABLE penstock.task_progress IS 'how far current attempts are, by their handlers; at most one row a task';
COMMENT ON COLUMN penstock.task_progress.fraction IS 'from 0 to 1; NULL: the handler does not know it';
