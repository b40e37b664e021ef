-- Begun tasks count from the moment that finish_first is set, including delayed and paused ones.
-- The index has only tasks in a later stage that were never released under a limit.
CREATE INDEX task_begun_later ON penstock.task (type, id) WHERE state IN ('scheduled', 'paused') AND step > 0 AND NOT tracked;
