-- Finds the due tasks of one type, so that types take turns when many tasks are due at once. Only
-- scheduled tasks are in it. It indexes the function, so that the planner does not use it for other
-- queries of scheduled tasks, nor another index in its place.
CREATE INDEX task_scheduled_type ON penstock.task (type, due_at) WHERE penstock.backlog_state(state) = 'scheduled';
