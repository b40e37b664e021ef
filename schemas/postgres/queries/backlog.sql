-- Backlog counters: triggers record each change, and task-sync folds the changes.

-- name: fold
-- Adds at most `limit` ($2) recorded changes of types to their counters; returns how many, and
-- whether any task is in flight. Changes that are not committed yet are left for the next time.
WITH deleted AS (
    DELETE FROM backlog_change
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM backlog_change WHERE type = ANY ($1::text[]) LIMIT $2 FOR UPDATE SKIP LOCKED))
    RETURNING type, stage, priority, state, tasks
), folded AS (
    INSERT INTO backlog AS b (type, stage, priority, state, tasks)
    SELECT type, stage, priority, state, sum(tasks) FROM deleted
    GROUP BY type, stage, priority, state HAVING sum(tasks) <> 0
    -- Locks rows in one order, so that two processes cannot deadlock.
    ORDER BY type, stage, priority, state
    ON CONFLICT (type, priority, stage, state) DO UPDATE SET tasks = b.tasks + excluded.tasks
)
SELECT (SELECT count(*) FROM deleted) AS changes,
       (SELECT coalesce(sum(tasks), 0) FROM (
            SELECT tasks FROM backlog WHERE type = ANY ($1::text[]) AND state = 'in_flight'
            UNION ALL
            SELECT tasks FROM deleted WHERE state = 'in_flight') AS f) > 0 AS in_flight;

-- name: delete_empty
-- Leaves counters that another transaction locks for the next time.
DELETE FROM backlog
WHERE ctid = ANY (ARRAY(SELECT ctid FROM backlog WHERE type = ANY ($1::text[]) AND tasks = 0 LIMIT $2 FOR UPDATE SKIP LOCKED));

-- name: entries
-- The number of tasks by type, priority, stage and state, and the age of the oldest ready task. The
-- first `limit` entries of one type (NULL is all) or of several (`among`), after a position
-- (`behind_type`, `behind_priority`, `behind_stage`; NULL is the first).
WITH counted AS MATERIALIZED (
    SELECT type, priority, stage, state, sum(tasks)::bigint AS tasks
    FROM (SELECT type, priority, stage, state, tasks FROM backlog
          UNION ALL
          SELECT type, priority, stage, state, tasks FROM backlog_change) AS c
    WHERE ($type::text IS NULL OR type = $type) AND ($among::text[] IS NULL OR type = ANY ($among))
      AND ($behind_type::text IS NULL OR (type, priority, stage) > ($behind_type, $behind_priority::smallint, $behind_stage::text))
    GROUP BY type, priority, stage, state HAVING sum(tasks) <> 0
), entry AS MATERIALIZED (
    SELECT type, priority, stage,
           coalesce(max(tasks) FILTER (WHERE state = 'ready'), 0) AS ready,
           coalesce(max(tasks) FILTER (WHERE state = 'scheduled'), 0) AS scheduled,
           coalesce(max(tasks) FILTER (WHERE state = 'paused'), 0) AS paused,
           coalesce(max(tasks) FILTER (WHERE state = 'waiting'), 0) AS waiting,
           coalesce(max(tasks) FILTER (WHERE state = 'in_flight'), 0) AS in_flight
    FROM counted GROUP BY type, priority, stage ORDER BY type, priority, stage LIMIT $limit
)
SELECT l.*, o.oldest_s
FROM entry l
LEFT JOIN LATERAL (
    SELECT extract(epoch FROM greatest(interval '0', now() - t.updated_at))::double precision AS oldest_s FROM task t
    WHERE t.type = l.type AND t.stage = l.stage AND {{t.release_level}} = l.priority
      AND backlog_state(t.state) = 'ready' AND l.ready > 0
    ORDER BY t.type, t.stage, {{t.release_level}}, t.updated_at LIMIT 1
) o ON true
ORDER BY l.type, l.priority, l.stage;

-- name: lock_recount
-- Lets one process at a time correct the counters. An advisory lock would take a snapshot before it
-- waits. LOCK takes none, so the snapshot of the transaction has the corrections of the process
-- before. Writers do not wait for it, only VACUUM of this table does.
LOCK TABLE backlog IN SHARE UPDATE EXCLUSIVE MODE;

-- name: counted
-- The counters and their recorded changes; read by cursor.
SELECT type, stage, priority, state, tasks FROM backlog
UNION ALL
SELECT type, stage, priority, state, tasks FROM backlog_change;

-- name: count_tasks
-- Counts the next `limit` ($2) tasks after an id ($1), with the last id of each group. The state is
-- NULL of those that the backlog does not count.
SELECT type, stage, priority, backlog_state(state) AS state, count(*) AS tasks, max(id) AS last_id
FROM (SELECT id, type, stage, {{release_level}} AS priority, state
      FROM task WHERE id > $1 ORDER BY id LIMIT $2) AS t
GROUP BY type, stage, priority, backlog_state(state);

-- name: correct
-- Records a correction as one more change.
INSERT INTO backlog_change (type, stage, priority, state, tasks) VALUES ($type, $stage, $priority, $state, $tasks);
