-- Order of release: priority of the flow, id of its root, priority of the task, id of the task. A
-- plain task takes the place of a flow of one task, so its order is that of before. The old indexes
-- stay for older services, until the step `post` drops them.
--
-- Ids of tasks and flows are moments of one clock (see `advance_ids`), so they can be compared. The
-- included columns let an index-only scan compute the expressions.
CREATE INDEX CONCURRENTLY IF NOT EXISTS task_release
    ON penstock.task (type, coalesce(flow_priority, priority), coalesce(flow_root_id, id), priority, id)
    INCLUDE (flow_priority, flow_root_id) WHERE state = 'ready';
