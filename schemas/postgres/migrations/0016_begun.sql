-- What has begun counts as such from the moment its type finishes first what has begun, also what is delayed or paused then.
-- The index holds only what is in a later stage and was never released under a limit.
CREATE INDEX task_begun_later ON penstock.task (type, id) WHERE state IN ('scheduled', 'paused') AND step > 0 AND NOT tracked;
