-- The backlog counts tasks of a flow under the priority by which they are released.
CREATE INDEX CONCURRENTLY IF NOT EXISTS task_ready_oldest
    ON penstock.task (type, stage, coalesce(flow_priority, priority), updated_at)
    WHERE penstock.backlog_state(state) = 'ready';
