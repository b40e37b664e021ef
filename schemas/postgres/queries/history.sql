-- History of finished tasks. Only the session that holds the lock moves, seals and drops.

-- name: lock
-- Locks history for as long as this session lives; returns whether it did, and the time.
SELECT pg_try_advisory_lock(hashtextextended('penstock.history', 0)) AS locked, now() AS now;

-- name: now
SELECT now() AS now;

-- name: next_ended
-- The next tasks in the order of their ends, behind a position and before a moment. An index-only
-- scan.
SELECT finished_at, id FROM task
WHERE finished_at IS NOT NULL AND (finished_at, id) > ($1, $2) AND finished_at < $3
ORDER BY finished_at, id LIMIT $4;

-- name: movable
-- How many tasks ended before a moment, up to `limit` ($2), and the first and the last end among
-- them.
SELECT count(*) AS tasks, min(finished_at) AS first, max(finished_at) AS last
FROM (SELECT finished_at FROM task WHERE finished_at IS NOT NULL AND finished_at < $1 ORDER BY finished_at LIMIT $2) t;

-- name: create_partitions
-- Creates the missing partitions of days; returns how many it created.
SELECT count(*) FILTER (WHERE penstock.history_open(day)) AS opened FROM unnest($1::date[]) AS i (day);

-- name: move
-- Moves tasks that ended before a moment, have no open callback, and whose day has an unsealed
-- partition. Returns how many, and the days without a partition. Rows that another transaction
-- locks are left for the next time. While this statement locks a task, the task cannot be recovered
-- and its callbacks cannot be replayed. If that happened since the statement began, the row no
-- longer qualifies, or some of its callbacks are not locked.
WITH ended AS MATERIALIZED (
    -- A row lock is a write. Tasks with an open callback, which can wait for days, are left out
    -- before it.
    SELECT id, finished_at FROM task
    WHERE id = ANY ($1::bigint[]) AND finished_at < $2
      AND id <> ALL (ARRAY(SELECT task_id FROM callback WHERE task_id = ANY ($1::bigint[]) AND finished_at IS NULL))
    FOR UPDATE SKIP LOCKED
), finished_callbacks AS MATERIALIZED (
    SELECT id, task_id FROM callback
    WHERE task_id = ANY (ARRAY(SELECT id FROM ended)) AND finished_at IS NOT NULL FOR UPDATE SKIP LOCKED
), free AS MATERIALIZED (
    SELECT e.id, (e.finished_at AT TIME ZONE 'UTC')::date AS day
    FROM ended e
    LEFT JOIN (SELECT task_id, count(*) AS callbacks FROM callback WHERE task_id = ANY ($1::bigint[]) GROUP BY task_id) o
      ON o.task_id = e.id
    LEFT JOIN (SELECT task_id, count(*) AS callbacks FROM finished_callbacks GROUP BY task_id) s
      ON s.task_id = e.id
    WHERE o.callbacks IS NOT DISTINCT FROM s.callbacks
), by_day AS MATERIALIZED (
    SELECT f.id, f.day, p.day IS NULL AS missing, p.sealed_at IS NULL AS unsealed
    FROM free f LEFT JOIN history_part p ON p.day = f.day AND p.dropped_at IS NULL
), chosen AS MATERIALIZED (
    SELECT id FROM by_day WHERE NOT missing AND unsealed
), attempts AS (
    DELETE FROM attempt WHERE task_id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING *
), called AS (
    DELETE FROM callback
    WHERE id = ANY (ARRAY(SELECT s.id FROM finished_callbacks s JOIN chosen c ON c.id = s.task_id)) RETURNING *
), deleted AS (
    DELETE FROM task WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING *
), moved AS (
    INSERT INTO history ({{history_columns}}, attempts, callbacks_owed)
    SELECT {{g.history_columns}}, coalesce(a.attempts, '[]'), coalesce(c.callbacks, '[]')
    FROM deleted g
    LEFT JOIN (SELECT task_id, jsonb_agg(to_jsonb(attempts) - 'task_id' ORDER BY step, attempt) AS attempts
               FROM attempts GROUP BY task_id) a ON a.task_id = g.id
    LEFT JOIN (SELECT task_id,
                      jsonb_agg(to_jsonb(called)
                                - ARRAY['task_id', 'headers', 'published', 'published_at', 'waits_since', 'spent']
                                ORDER BY seq) AS callbacks
               FROM called GROUP BY task_id) c ON c.task_id = g.id
    RETURNING finished_at
), counted AS (
    UPDATE history_part p SET tasks = p.tasks + k.tasks
    FROM (SELECT (finished_at AT TIME ZONE 'UTC')::date AS day, count(*) AS tasks FROM moved GROUP BY 1) k
    WHERE p.day = k.day AND p.dropped_at IS NULL
    RETURNING k.tasks
)
SELECT (SELECT coalesce(sum(tasks), 0)::bigint FROM counted) AS moved,
       ARRAY(SELECT DISTINCT day FROM by_day WHERE missing) AS missing;

-- name: parts
-- The latest `limit` ($2) partitions, latest day first; with $1 also dropped ones.
SELECT day, part, tasks, opened_at, sealed_at, object, bytes, sha256, archived_at, dropped_at
FROM history_part WHERE $1::boolean OR dropped_at IS NULL
ORDER BY day DESC, part DESC LIMIT $2;

-- name: seal
-- After this, no task moves into the partition.
UPDATE history_part SET sealed_at = now() WHERE day = $1 AND part = $2 AND sealed_at IS NULL AND dropped_at IS NULL;

-- name: page
-- The next tasks that ended in a span of time, ordered by id.
SELECT * FROM history WHERE finished_at >= $1 AND finished_at < $2 AND id > $3 ORDER BY id LIMIT $4;

-- name: count
SELECT count(*) AS tasks FROM history WHERE finished_at >= $1 AND finished_at < $2;

-- name: record_archived
-- The object of the partition was verified.
UPDATE history_part SET archived_at = now(), object = $3, tasks = $4, bytes = $5, sha256 = $6
WHERE day = $1 AND part = $2 AND sealed_at IS NOT NULL AND dropped_at IS NULL
RETURNING tasks;

-- name: drop
SELECT penstock.history_drop($1, $2, $3) AS dropped;

-- name: get
SELECT * FROM history WHERE id = $1;

-- name: own_tasks
-- The given ids that are in history, of tasks of the given types.
SELECT id FROM history WHERE id = ANY ($1::bigint[]) AND type = ANY ($2::text[]);

-- name: known
-- The given ids that are in history.
SELECT id FROM history WHERE id = ANY ($1::bigint[]);

-- name: states_of
-- The number of the given tasks by state, in one snapshot of both tables, because tasks move
-- between them.
SELECT state, count(*) AS tasks
FROM (SELECT state FROM task WHERE id = ANY ($1::bigint[])
      UNION ALL SELECT state FROM history WHERE id = ANY ($1::bigint[])) t
GROUP BY state;

-- name: by_idempotency_keys
SELECT h.id, h.type, h.idempotency_key
FROM history h JOIN unnest($1::text[], $2::text[]) AS k (type, key) ON h.type = k.type AND h.idempotency_key = k.key
WHERE h.type = ANY ($1::text[]) AND h.idempotency_key = ANY ($2::text[])
ORDER BY h.moved_at;
