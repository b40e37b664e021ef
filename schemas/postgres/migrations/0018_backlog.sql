-- Maintained counters of tasks by type, stage and priority. Triggers on every statement that
-- changes tasks insert rows with the differences, so writes of any version are counted. Rows are
-- only inserted, so no statement waits for another one's counter. Task-sync folds the rows into
-- `backlog`; the sum of both is exact in any snapshot.
CREATE TABLE penstock.backlog (
    type text NOT NULL,
    stage text NOT NULL,
    priority smallint NOT NULL,
    state text NOT NULL,
    tasks bigint NOT NULL,
    PRIMARY KEY (type, priority, stage, state)
) WITH (fillfactor = 50);
COMMENT ON TABLE penstock.backlog IS 'tasks that have not ended, as of the changes that were folded in; `backlog_change` has the others';
COMMENT ON COLUMN penstock.backlog.state IS 'of the tasks; in_flight is queued or running';

CREATE TABLE penstock.backlog_change (
    type text NOT NULL,
    stage text NOT NULL,
    priority smallint NOT NULL,
    state text NOT NULL,
    tasks bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);
COMMENT ON TABLE penstock.backlog_change IS 'changes of `backlog` that task-sync has not folded in yet';

CREATE FUNCTION penstock.backlog_state(state text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN state IN ('queued', 'running') THEN 'in_flight'
                WHEN state IN ('succeeded', 'failed', 'cancelled', 'quarantined') THEN NULL
                ELSE state END
$$;
COMMENT ON FUNCTION penstock.backlog_state IS 'under which state a task is counted; null is not at all';

CREATE FUNCTION penstock.count_inserted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, priority, penstock.backlog_state(state), count(*) FROM new_tasks
    WHERE penstock.backlog_state(state) IS NOT NULL
    GROUP BY type, stage, priority, penstock.backlog_state(state);
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.count_updated() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, priority, counted, sum(tasks)
    FROM (
        SELECT type, stage, priority, penstock.backlog_state(state) AS counted, 1 AS tasks FROM new_tasks
        UNION ALL
        SELECT type, stage, priority, penstock.backlog_state(state), -1 FROM old_tasks
    ) AS c
    WHERE counted IS NOT NULL
    GROUP BY type, stage, priority, counted HAVING sum(tasks) <> 0;
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.count_deleted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, priority, penstock.backlog_state(state), -count(*) FROM old_tasks
    WHERE penstock.backlog_state(state) IS NOT NULL
    GROUP BY type, stage, priority, penstock.backlog_state(state);
    RETURN NULL;
END $$;

CREATE TRIGGER task_inserted AFTER INSERT ON penstock.task
    REFERENCING NEW TABLE AS new_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.count_inserted();
CREATE TRIGGER task_updated AFTER UPDATE ON penstock.task
    REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.count_updated();
CREATE TRIGGER task_deleted AFTER DELETE ON penstock.task
    REFERENCING OLD TABLE AS old_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.count_deleted();

-- The lock of CREATE TRIGGER blocks writers until the commit, so no change is counted twice or
-- missed.
INSERT INTO penstock.backlog (type, stage, priority, state, tasks)
SELECT type, stage, priority, penstock.backlog_state(state), count(*) FROM penstock.task
WHERE penstock.backlog_state(state) IS NOT NULL
GROUP BY type, stage, priority, penstock.backlog_state(state);

-- Finds the oldest ready task of a line with one probe. It indexes the function, so that the
-- planner does not use it for other queries of ready tasks.
CREATE INDEX task_ready_since ON penstock.task (type, stage, priority, updated_at) WHERE penstock.backlog_state(state) = 'ready';
