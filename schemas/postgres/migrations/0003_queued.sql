-- For task-sync and `penstock check`, which list the queued tasks by age. Without the index they
-- would read the whole table.
CREATE INDEX task_queued ON penstock.task (type, updated_at) WHERE state = 'queued';
