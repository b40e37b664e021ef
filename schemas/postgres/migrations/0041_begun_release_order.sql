-- As 0040, for tasks whose capacity is counted already.
CREATE INDEX CONCURRENTLY IF NOT EXISTS task_release_begun
    ON penstock.task (type, coalesce(flow_priority, priority), coalesce(flow_root_id, id), priority, id)
    INCLUDE (flow_priority, flow_root_id) WHERE state = 'ready' AND step > 0 AND tracked;
