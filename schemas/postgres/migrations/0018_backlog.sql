-- How many tasks of each type, stage and priority wait, known without counting them. Every statement that changes tasks adds
-- what it changed, a row for each line concerned, by the triggers below: so whoever writes, by whatever version, is counted.
-- Nothing is ever updated on their way, so no statement waits for another's counter. `backlog` is what was folded out of these
-- rows; both together are exact in any snapshot.
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

-- The triggers' lock keeps writers out until this is committed: what they will count is what is not counted here.
INSERT INTO penstock.backlog (type, stage, priority, state, tasks)
SELECT type, stage, priority, penstock.backlog_state(state), count(*) FROM penstock.task
WHERE penstock.backlog_state(state) IS NOT NULL
GROUP BY type, stage, priority, penstock.backlog_state(state);

-- Since when the oldest of a line is ready: one probe for each. By the function, so that no other statement takes this index for a
-- way to what is ready.
CREATE INDEX task_ready_since ON penstock.task (type, stage, priority, updated_at) WHERE penstock.backlog_state(state) = 'ready';
