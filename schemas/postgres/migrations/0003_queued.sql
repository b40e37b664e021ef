-- What task-sync and the check ask for from time to time: which tasks have been queued, and since when. Without it
-- each look would read the whole table.
CREATE INDEX task_queued ON penstock.task (type, updated_at) WHERE state = 'queued';
