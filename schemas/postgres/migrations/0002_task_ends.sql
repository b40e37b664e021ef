-- One trigger has all effects of the ends of tasks, in place of a trigger for each effect. Services
-- of the version before notify types with limits themselves as well: PostgreSQL delivers equal
-- notifications of a transaction once.

CREATE FUNCTION penstock.apply_ends() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
DECLARE
    notified integer;
BEGIN
    -- Most statements end no task, and do not pay for the join.
    IF NOT EXISTS (SELECT FROM new_tasks WHERE state IN ('succeeded', 'failed', 'cancelled', 'quarantined')) THEN
        RETURN NULL;
    END IF;
    -- The tasks that ended in this statement. A late result may move a task from one final state to
    -- another, which is no second end. Not materialized: each effect then joins only the tasks that
    -- it needs, so that tasks without flows, limits and waiting requests cost no join.
    WITH ended AS NOT MATERIALIZED (
        SELECT n.*, o.state AS from_state
        FROM new_tasks n JOIN old_tasks o ON o.id = n.id
        WHERE n.state IN ('succeeded', 'failed', 'cancelled', 'quarantined')
          AND o.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
    ), inbox AS (
        INSERT INTO penstock.flow_inbox (root_id, flow_id, kind, node, generation, item, state, task_id)
        SELECT flow_root_id, flow_id, 'task', flow_node, flow_generation, flow_item, state, id
        FROM ended WHERE flow_id IS NOT NULL
        UNION ALL
        -- The children of a task that waits end with it. Not a join, which would read all flows:
        -- our sessions have no nested loops.
        SELECT f.root_id, f.id, 'cancel', NULL, NULL, NULL, NULL, NULL
        FROM ended e
        CROSS JOIN LATERAL (
            SELECT root_id, id, status FROM penstock.flow WHERE task_id = e.id OFFSET 0
        ) AS f
        WHERE e.from_state = 'waiting' AND f.status = 'running'
        RETURNING shard
    ), notification (channel, payload) AS (
        SELECT 'penstock_flows', shard::text FROM inbox
        UNION
        -- In a type with limits, a task that ended makes room for another.
        SELECT 'penstock_ready', type FROM ended WHERE tracked
        UNION
        -- A payload has at most 8,000 bytes.
        SELECT 'penstock_ended', string_agg(id::text, ' ')
        FROM (SELECT id, (row_number() OVER () - 1) / 350 AS part FROM ended) AS parts
        WHERE EXISTS (SELECT FROM penstock.end_listener WHERE until > clock_timestamp())
        GROUP BY part
    )
    SELECT count(pg_notify(channel, payload)) INTO notified FROM notification;
    RETURN NULL;
END $$;

-- First what needs the strongest lock: taken second, it would wait once more, and writers behind
-- it.
DROP TRIGGER task_end_announced ON penstock.task;
DROP TRIGGER task_flow_ended ON penstock.task;
CREATE TRIGGER task_ended AFTER UPDATE ON penstock.task REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks
    FOR EACH STATEMENT EXECUTE FUNCTION penstock.apply_ends();

DROP FUNCTION penstock.announce_ends();
DROP FUNCTION penstock.end_in_flow();
