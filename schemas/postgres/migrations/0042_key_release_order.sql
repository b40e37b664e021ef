-- As 0040, for tasks with a concurrency key.
CREATE INDEX CONCURRENTLY IF NOT EXISTS task_release_key
    ON penstock.task (type, coalesce(flow_priority, priority), key, coalesce(flow_root_id, id), priority, id)
    INCLUDE (flow_priority, flow_root_id) WHERE state = 'ready' AND key IS NOT NULL;
