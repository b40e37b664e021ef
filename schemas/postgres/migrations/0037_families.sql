-- Schedules give their flows events and callbacks, as a start does.
ALTER TABLE penstock.schedule
    ADD COLUMN events text CHECK (events IN ('final', 'all')),
    ADD COLUMN callbacks text[];

COMMENT ON COLUMN penstock.schedule.events IS 'of its flows; NULL: final';
COMMENT ON COLUMN penstock.schedule.callbacks IS 'of its flows, as in flow.callbacks';

-- The flows of a schedule, newest first.
CREATE INDEX flow_schedule ON penstock.flow (schedule, id) WHERE schedule IS NOT NULL;

-- The tasks of a flow in history. Tasks of earlier releases have no flow, so the index is empty.
CREATE INDEX history_flow ON penstock.history (flow_id, flow_node, coalesce(flow_item, -1), flow_generation)
    WHERE flow_id IS NOT NULL;

-- The child flows of a flow in history.
CREATE INDEX flow_history_parent ON penstock.flow_history
    (((flow ->> 'parent_id')::bigint), (flow ->> 'parent_node'), coalesce((flow ->> 'parent_item')::integer, -1),
     ((flow ->> 'parent_generation')::integer))
    WHERE flow ->> 'parent_id' IS NOT NULL;

-- The flow that a task waits for takes the place of the task: of its family, or of the task itself.
COMMENT ON COLUMN penstock.flow.root_id IS 'the flow at the top; its own id for a flow without a parent; of a flow that a task without a flow waits for: the task';
COMMENT ON COLUMN penstock.task.flow_root_id IS 'root_id of the flow, by which the task is released';
