-- The tasks of a flow. Migrations that create an index of a table with traffic do nothing else.
CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS task_flow
    ON penstock.task (flow_id, flow_node, coalesce(flow_item, -1), flow_generation) WHERE flow_id IS NOT NULL;
