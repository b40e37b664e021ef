-- Counts for the overview of the console.

-- name: ends
-- The ends of tasks from a moment ($1) until another ($3), by type, state and part of $2 seconds.
SELECT type, state, floor(extract(epoch FROM finished_at) / $2::float8)::bigint AS part, count(*) AS tasks
FROM task WHERE finished_at >= to_timestamp($1::float8) AND finished_at < to_timestamp($3::float8)
GROUP BY type, state, part;

-- name: now
-- The database's time in seconds.
SELECT extract(epoch FROM now())::float8 AS now;

-- name: counts
-- Counts of what may need an operator, up to $2 of each, in the visible namespaces ($1; NULL is
-- all). Flows are the latest 10,000 that ended in the last hour, and 10,000 of those that run.
WITH ended AS MATERIALIZED (
    SELECT name, status, parent_id, task_id FROM flow
    WHERE finished_at > now() - interval '1 hour' ORDER BY finished_at DESC, id DESC LIMIT 10000
), running AS MATERIALIZED (
    SELECT name, parent_id, task_id FROM flow WHERE status = 'running' LIMIT 10000
)
SELECT
    (SELECT count(*) FROM (SELECT FROM callback_target
        WHERE state <> 'normal' AND state = 'abnormal' AND ($1::text[] IS NULL OR namespace = ANY ($1)) LIMIT $2) AS t) AS abnormal,
    (SELECT count(*) FROM (SELECT FROM callback_target
        WHERE state <> 'normal' AND state = 'disabled' AND ($1::text[] IS NULL OR namespace = ANY ($1)) LIMIT $2) AS t) AS disabled,
    (SELECT count(*) FROM (SELECT FROM callback
        WHERE state = 'dead' AND ($1::text[] IS NULL OR namespace = ANY ($1)) LIMIT $2) AS t) AS dead,
    (SELECT count(*) FROM (SELECT FROM ended
        WHERE status = 'failed' AND parent_id IS NULL AND task_id IS NULL
          AND ($1::text[] IS NULL OR CASE WHEN strpos(name, '--') > 1 THEN split_part(name, '--', 1) ELSE 'default' END = ANY ($1))
        LIMIT $2) AS t) AS flows_failed,
    (SELECT count(*) FROM (SELECT FROM running
        WHERE parent_id IS NULL AND task_id IS NULL
          AND ($1::text[] IS NULL OR CASE WHEN strpos(name, '--') > 1 THEN split_part(name, '--', 1) ELSE 'default' END = ANY ($1))
        LIMIT $2) AS t) AS flows_running,
    (SELECT count(*) FROM (SELECT FROM audit
        WHERE state = 'running' AND ($1::text[] IS NULL OR namespaces <@ $1) LIMIT $2) AS t) AS operations_running;
