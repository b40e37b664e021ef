-- Lists of tasks in states that few tasks are in; other tasks pay nothing for it.
CREATE INDEX CONCURRENTLY IF NOT EXISTS task_set_aside
    ON penstock.task (state, id) WHERE state IN ('waiting', 'paused', 'cancelled');
