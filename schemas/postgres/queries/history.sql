-- History: what ended a while ago. Only whoever holds the lock moves, seals and drops, through the session that holds it.

-- name: own
-- The right to move tasks to history and to retire days, held by this session for as long as it lives; and the time.
SELECT pg_try_advisory_lock(hashtextextended('penstock.history', 0)) AS owned, now() AS now;

-- name: now
SELECT now() AS now;

-- name: look
-- The next tasks in the order in which they ended, behind this one and before a moment. From the index alone.
SELECT finished_at, id FROM task
WHERE finished_at IS NOT NULL AND (finished_at, id) > ($1, $2) AND finished_at < $3
ORDER BY finished_at, id LIMIT $4;

-- name: movable
-- How many that are, and the first and the last day of the first `limit`.
SELECT count(*) AS tasks, min(finished_at) AS first, max(finished_at) AS last
FROM (SELECT finished_at FROM task WHERE finished_at IS NOT NULL AND finished_at < $1 ORDER BY finished_at LIMIT $2) t;

-- name: open
-- A partition for each of some days that has none; how many were made.
SELECT count(*) FILTER (WHERE penstock.history_open(day)) AS opened FROM unnest($1::date[]) AS i (day);

-- name: move
-- Moves those of some tasks that ended before a moment, owe nobody a callback and whose day takes tasks; returns how many,
-- and the days that have no partition, of others that could be moved.
-- It waits for nobody: what another holds is left for the next time. Locked, a task can neither be recovered nor its callbacks
-- replayed; had that happened since the statement began, the row would not qualify any more, or not all callbacks be had.
WITH ended AS MATERIALIZED (
    -- A lock is written: not for what is seen to wait for a target, perhaps in every round for days.
    SELECT id, finished_at FROM task
    WHERE id = ANY ($1::bigint[]) AND finished_at < $2
      AND id <> ALL (ARRAY(SELECT task_id FROM callback WHERE task_id = ANY ($1::bigint[]) AND finished_at IS NULL))
    FOR UPDATE SKIP LOCKED
), settled AS MATERIALIZED (
    SELECT id, task_id FROM callback
    WHERE task_id = ANY (ARRAY(SELECT id FROM ended)) AND finished_at IS NOT NULL FOR UPDATE SKIP LOCKED
), free AS MATERIALIZED (
    SELECT e.id, (e.finished_at AT TIME ZONE 'UTC')::date AS day
    FROM ended e
    LEFT JOIN (SELECT task_id, count(*) AS callbacks FROM callback WHERE task_id = ANY ($1::bigint[]) GROUP BY task_id) o
      ON o.task_id = e.id
    LEFT JOIN (SELECT task_id, count(*) AS callbacks FROM settled GROUP BY task_id) s ON s.task_id = e.id
    WHERE o.callbacks IS NOT DISTINCT FROM s.callbacks
), placed AS MATERIALIZED (
    SELECT f.id, f.day, p.day IS NULL AS nowhere, p.sealed_at IS NULL AS unsealed
    FROM free f LEFT JOIN history_part p ON p.day = f.day AND p.dropped_at IS NULL
), chosen AS MATERIALIZED (
    SELECT id FROM placed WHERE NOT nowhere AND unsealed
), attempts AS (
    DELETE FROM attempt WHERE task_id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING *
), called AS (
    DELETE FROM callback
    WHERE id = ANY (ARRAY(SELECT s.id FROM settled s JOIN chosen c ON c.id = s.task_id)) RETURNING *
), gone AS (
    DELETE FROM task WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING *
), kept AS (
    INSERT INTO history (id, type, state, stage, step, attempt, failures, losses, priority, content_type, context, context_ref,
                         result_type, result, result_ref, error, idempotency_key, events, callbacks, labels, worker, key,
                         created_at, updated_at, finished_at, attempts, callbacks_owed)
    SELECT g.id, g.type, g.state, g.stage, g.step, g.attempt, g.failures, g.losses, g.priority, g.content_type, g.context,
           g.context_ref, g.result_type, g.result, g.result_ref, g.error, g.idempotency_key, g.events, g.callbacks, g.labels,
           g.worker, g.key, g.created_at, g.updated_at, g.finished_at, coalesce(a.attempts, '[]'), coalesce(c.callbacks, '[]')
    FROM gone g
    LEFT JOIN (SELECT task_id, jsonb_agg(to_jsonb(attempts) - 'task_id' ORDER BY step, attempt) AS attempts
               FROM attempts GROUP BY task_id) a ON a.task_id = g.id
    LEFT JOIN (SELECT task_id,
                      jsonb_agg(to_jsonb(called) - ARRAY['task_id', 'headers', 'published', 'published_at', 'waits_since', 'spent']
                                ORDER BY seq) AS callbacks
               FROM called GROUP BY task_id) c ON c.task_id = g.id
    RETURNING finished_at
), counted AS (
    UPDATE history_part p SET tasks = p.tasks + k.tasks
    FROM (SELECT (finished_at AT TIME ZONE 'UTC')::date AS day, count(*) AS tasks FROM kept GROUP BY 1) k
    WHERE p.day = k.day AND p.dropped_at IS NULL
    RETURNING k.tasks
)
SELECT (SELECT coalesce(sum(tasks), 0)::bigint FROM counted) AS moved,
       ARRAY(SELECT DISTINCT day FROM placed WHERE nowhere) AS missing;

-- name: parts
-- The partitions there are, or with $1 those that were dropped, too, the latest `limit` days first.
SELECT day, part, tasks, opened_at, sealed_at, object, bytes, sha256, archived_at, dropped_at
FROM history_part WHERE $1::boolean OR dropped_at IS NULL
ORDER BY day DESC, part DESC LIMIT $2;

-- name: seal
-- From now on nothing is moved into it.
UPDATE history_part SET sealed_at = now() WHERE day = $1 AND part = $2 AND sealed_at IS NULL AND dropped_at IS NULL;

-- name: page
-- The next of the tasks that ended from one moment to another, in the order of their ids.
SELECT * FROM history WHERE finished_at >= $1 AND finished_at < $2 AND id > $3 ORDER BY id LIMIT $4;

-- name: count
SELECT count(*) AS tasks FROM history WHERE finished_at >= $1 AND finished_at < $2;

-- name: archived
-- Its object is there and whole.
UPDATE history_part SET archived_at = now(), object = $3, tasks = $4, bytes = $5, sha256 = $6
WHERE day = $1 AND part = $2 AND sealed_at IS NOT NULL AND dropped_at IS NULL
RETURNING tasks;

-- name: drop
SELECT penstock.history_drop($1, $2, $3) AS dropped;

-- name: get
SELECT * FROM history WHERE id = $1;

-- name: own_tasks
-- Which of some ids are in history, of tasks of these types.
SELECT id FROM history WHERE id = ANY ($1::bigint[]) AND type = ANY ($2::text[]);

-- name: known
-- Which of some ids are in history.
SELECT id FROM history WHERE id = ANY ($1::bigint[]);

-- name: states_of
-- How many of some tasks are in which state, wherever they are: as of one moment, since they move.
SELECT state, count(*) AS tasks
FROM (SELECT state FROM task WHERE id = ANY ($1::bigint[])
      UNION ALL SELECT state FROM history WHERE id = ANY ($1::bigint[])) t
GROUP BY state;

-- name: by_idempotency_keys
SELECT h.id, h.type, h.idempotency_key
FROM history h JOIN unnest($1::text[], $2::text[]) AS k (type, key) ON h.type = k.type AND h.idempotency_key = k.key
WHERE h.type = ANY ($1::text[]) AND h.idempotency_key = ANY ($2::text[])
ORDER BY h.moved_at;
