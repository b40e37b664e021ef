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
WHERE finished_at IS NOT NULL AND (finished_at, id) > ($finished_at, $id) AND finished_at < $before
ORDER BY finished_at, id LIMIT $limit;

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
-- partition. Tasks of a flow follow its root, because a recovery needs them until that has moved,
-- and the flow itself, whose root may be a task. Returns how many, and the days without a
-- partition. Rows that another transaction locks are left for the next time. While this statement
-- locks a task, the task cannot be recovered and its callbacks cannot be replayed. If that happened
-- since the statement began, the row no longer qualifies, or some of its callbacks are not locked.
WITH ended AS MATERIALIZED (
    -- A row lock is a write. Tasks with an open callback, which can wait for days, are left out
    -- before it.
    SELECT t.id, t.finished_at FROM task t
    WHERE t.id = ANY ($1::bigint[]) AND t.finished_at < $2
      AND t.id <> ALL (ARRAY(SELECT task_id FROM callback
                           WHERE task_id = ANY ($1::bigint[]) AND finished_at IS NULL))
      AND (t.flow_root_id IS NULL OR NOT EXISTS (SELECT FROM flow f WHERE f.id IN (t.flow_root_id, t.flow_id)))
    FOR UPDATE OF t SKIP LOCKED
), finished_callbacks AS MATERIALIZED (
    SELECT id, task_id FROM callback
    WHERE task_id = ANY (ARRAY(SELECT id FROM ended)) AND finished_at IS NOT NULL
    FOR UPDATE SKIP LOCKED
), free AS MATERIALIZED (
    SELECT e.id, (e.finished_at AT TIME ZONE 'UTC')::date AS day
    FROM ended e
    LEFT JOIN (SELECT task_id, count(*) AS callbacks FROM callback
               WHERE task_id = ANY ($1::bigint[]) GROUP BY task_id) o
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
                                - ARRAY['task_id', 'headers', 'published', 'published_at', 'waits_since', 'held_since', 'spent']
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
SELECT day, part, tasks, flows, opened_at, sealed_at, object, bytes, sha256, flow_bytes, flow_sha256, archived_at,
       dropped_at
FROM history_part WHERE $1::boolean OR dropped_at IS NULL
ORDER BY day DESC, part DESC LIMIT $2;

-- name: seal
-- After this, no task moves into the partition.
UPDATE history_part SET sealed_at = now() WHERE day = $1 AND part = $2 AND sealed_at IS NULL AND dropped_at IS NULL;

-- name: page
-- The next tasks that ended in a span of time, ordered by id.
SELECT * FROM history WHERE finished_at >= $since AND finished_at < $until AND id > $behind ORDER BY id LIMIT $limit;

-- name: count
SELECT count(*) AS tasks FROM history WHERE finished_at >= $1 AND finished_at < $2;

-- name: record_archived
-- The object of the partition was verified.
UPDATE history_part
SET archived_at = now(), object = $object, tasks = $tasks, bytes = $bytes, sha256 = $sha256, flows = $flows, flow_bytes = $flow_bytes, flow_sha256 = $flow_sha256
WHERE day = $day AND part = $part AND sealed_at IS NOT NULL AND dropped_at IS NULL
RETURNING tasks;

-- name: next_ended_flows
-- As `next_ended`, for flows.
SELECT finished_at, id FROM flow
WHERE finished_at IS NOT NULL AND (finished_at, id) > ($finished_at, $id) AND finished_at < $before
ORDER BY finished_at, id LIMIT $limit;

-- name: move_flows
-- As `move`, for flows, with their nodes and those of earlier generations. A root moves first. With
-- that it cannot be recovered any more, and its child flows and tasks move after it. It stays while
-- its inbox has a row, which may be a recovery. `task_id` of a callback is a task or a flow: their
-- ids are distinct.
WITH ended AS MATERIALIZED (
    SELECT f.id, f.finished_at FROM flow f
    WHERE f.id = ANY ($1::bigint[]) AND f.finished_at < $2
      AND f.id <> ALL (ARRAY(SELECT task_id FROM callback
                           WHERE task_id = ANY ($1::bigint[]) AND finished_at IS NULL))
      AND (f.root_id = f.id OR NOT EXISTS (SELECT FROM flow r WHERE r.id = f.root_id OFFSET 0))
      AND NOT EXISTS (SELECT FROM flow_inbox i WHERE i.shard = (f.root_id % 64)::smallint AND i.root_id = f.root_id OFFSET 0)
    FOR UPDATE OF f SKIP LOCKED
), finished_callbacks AS MATERIALIZED (
    SELECT id, task_id FROM callback
    WHERE task_id = ANY (ARRAY(SELECT id FROM ended)) AND finished_at IS NOT NULL
    FOR UPDATE SKIP LOCKED
), free AS MATERIALIZED (
    SELECT e.id, (e.finished_at AT TIME ZONE 'UTC')::date AS day
    FROM ended e
    LEFT JOIN (SELECT task_id, count(*) AS callbacks FROM callback
               WHERE task_id = ANY ($1::bigint[]) GROUP BY task_id) o
      ON o.task_id = e.id
    LEFT JOIN (SELECT task_id, count(*) AS callbacks FROM finished_callbacks GROUP BY task_id) s
      ON s.task_id = e.id
    WHERE o.callbacks IS NOT DISTINCT FROM s.callbacks
), by_day AS MATERIALIZED (
    SELECT f.id, f.day, p.day IS NULL AS missing, p.sealed_at IS NULL AS unsealed
    FROM free f LEFT JOIN history_part p ON p.day = f.day AND p.dropped_at IS NULL
), chosen AS MATERIALIZED (
    SELECT id FROM by_day WHERE NOT missing AND unsealed
), nodes AS (
    DELETE FROM flow_node WHERE flow_id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING *
), past_nodes AS (
    DELETE FROM flow_node_history WHERE flow_id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING *
), limits AS (
    DELETE FROM flow_limit WHERE flow_id = ANY (ARRAY(SELECT id FROM chosen))
), waits AS (
    DELETE FROM flow_wait WHERE flow_id = ANY (ARRAY(SELECT id FROM chosen))
), called AS (
    DELETE FROM callback
    WHERE id = ANY (ARRAY(SELECT s.id FROM finished_callbacks s JOIN chosen c ON c.id = s.task_id)) RETURNING *
), deleted AS (
    DELETE FROM flow WHERE id = ANY (ARRAY(SELECT id FROM chosen)) RETURNING *
), moved AS (
    INSERT INTO flow_history (id, root_id, finished_at, flow, callbacks, nodes, past_nodes, callbacks_owed, schedule, tick)
    SELECT g.id, g.root_id, g.finished_at, to_jsonb(g) - 'callbacks', g.callbacks, coalesce(n.nodes, '[]'),
           coalesce(p.nodes, '[]'), coalesce(c.callbacks, '[]'), g.schedule, g.tick
    FROM deleted g
    LEFT JOIN (SELECT flow_id, jsonb_agg(to_jsonb(nodes) - 'flow_id' ORDER BY started_at, name) AS nodes
               FROM nodes GROUP BY flow_id) n ON n.flow_id = g.id
    LEFT JOIN (SELECT flow_id, jsonb_agg(to_jsonb(past_nodes) - 'flow_id' ORDER BY flow_generation, started_at, name) AS nodes
               FROM past_nodes GROUP BY flow_id) p ON p.flow_id = g.id
    LEFT JOIN (SELECT task_id,
                      jsonb_agg(to_jsonb(called)
                                - ARRAY['task_id', 'headers', 'published', 'published_at', 'waits_since', 'held_since', 'spent']
                                ORDER BY seq) AS callbacks
               FROM called GROUP BY task_id) c ON c.task_id = g.id
    RETURNING finished_at
), counted AS (
    UPDATE history_part p SET flows = p.flows + k.flows
    FROM (SELECT (finished_at AT TIME ZONE 'UTC')::date AS day, count(*) AS flows FROM moved GROUP BY 1) k
    WHERE p.day = k.day AND p.dropped_at IS NULL
    RETURNING k.flows
)
SELECT (SELECT coalesce(sum(flows), 0)::bigint FROM counted) AS moved,
       ARRAY(SELECT DISTINCT day FROM by_day WHERE missing) AS missing;

-- name: flow_page
-- The next flows that ended in a span of time, ordered by id.
SELECT * FROM flow_history WHERE finished_at >= $since AND finished_at < $until AND id > $behind ORDER BY id LIMIT $limit;

-- name: count_flows
SELECT count(*) AS flows FROM flow_history WHERE finished_at >= $1 AND finished_at < $2;

-- name: flow
SELECT * FROM flow_history WHERE id = $1;

-- name: family_list
-- The flows of a family in history that match the filters of `flow_views.list`, newest first;
-- `before` is the last id of the page before.
SELECT h.* FROM flow_history h
WHERE h.root_id = $family
  AND ($name::text IS NULL OR h.flow ->> 'name' = $name)
  AND ($statuses::text[] IS NULL OR h.flow ->> 'status' = ANY ($statuses))
  AND ($labels::jsonb IS NULL OR h.flow -> 'labels' @> $labels)
  AND ($idempotency_key::text IS NULL OR h.flow ->> 'idempotency_key' = $idempotency_key)
  AND ($created_since::timestamptz IS NULL OR (h.flow ->> 'created_at')::timestamptz >= $created_since)
  AND ($visible::text[] IS NULL
       OR CASE WHEN strpos(h.flow ->> 'name', '--') <= 1 THEN 'default'
               ELSE split_part(h.flow ->> 'name', '--', 1) END = ANY ($visible))
  AND ($schedule::text IS NULL OR h.schedule = $schedule)
  AND ($before::bigint IS NULL OR h.id < $before)
ORDER BY h.id DESC LIMIT $limit;

-- name: children_of_nodes
-- The task, or the last child flow, of each of these nodes ($2) of a flow in its generation ($3).
-- The children of maps are not among these.
SELECT k.name, t.id AS task_id, t.type AS task_type, t.state AS task_state, c.id AS child_id, c.status AS child_status
FROM unnest($2::text[], $3::integer[]) AS k (name, generation)
LEFT JOIN LATERAL (
    SELECT id, type, state FROM history
    WHERE flow_id = $1 AND flow_node = k.name AND coalesce(flow_item, -1) = -1 AND flow_generation = k.generation
    UNION ALL
    -- The root of a family moves before its tasks and child flows.
    SELECT id, type, state FROM task
    WHERE flow_id = $1 AND flow_node = k.name AND coalesce(flow_item, -1) = -1 AND flow_generation = k.generation
    LIMIT 1
) t ON true
LEFT JOIN LATERAL (
    (SELECT id, flow ->> 'status' AS status, (flow ->> 'parent_generation')::integer AS generation FROM flow_history
     WHERE (flow ->> 'parent_id')::bigint = $1 AND flow ->> 'parent_node' = k.name
       AND coalesce((flow ->> 'parent_item')::integer, -1) = -1 AND flow ->> 'parent_id' IS NOT NULL
     ORDER BY (flow ->> 'parent_generation')::integer DESC LIMIT 1)
    UNION ALL
    (SELECT id, status, parent_generation FROM flow
     WHERE parent_id = $1 AND parent_node = k.name AND coalesce(parent_item, -1) = -1
     ORDER BY parent_generation DESC LIMIT 1)
    ORDER BY generation DESC LIMIT 1
) c ON true;

-- name: tasks_of_node
-- As `flow_views.tasks_of_node`, for tasks in history.
WITH examined AS (
    SELECT id, coalesce(flow_item, -1) AS item, flow_generation AS generation, state FROM history
    WHERE flow_id = $flow_id AND flow_node = $node
      AND (coalesce(flow_item, -1), flow_generation) > ($item::integer, $generation::integer)
    ORDER BY coalesce(flow_item, -1), flow_generation LIMIT $most_examined
), reached AS (
    SELECT item, generation, count(*) OVER () AS examined FROM examined ORDER BY item DESC, generation DESC LIMIT 1
), matching AS (
    SELECT id FROM examined WHERE $states::text[] IS NULL OR state = ANY ($states) ORDER BY item, generation LIMIT $limit
)
SELECT r.item AS reached_item, r.generation AS reached_generation, r.examined, t.*
FROM reached r LEFT JOIN history t ON t.id = ANY (ARRAY(SELECT id FROM matching))
ORDER BY coalesce(t.flow_item, -1), t.flow_generation;

-- name: flows_of_node
-- The same for child flows in history.
WITH examined AS (
    SELECT id, coalesce((flow ->> 'parent_item')::integer, -1) AS item, (flow ->> 'parent_generation')::integer AS generation,
           flow ->> 'status' AS status
    FROM flow_history
    WHERE (flow ->> 'parent_id')::bigint = $flow_id AND flow ->> 'parent_node' = $node AND flow ->> 'parent_id' IS NOT NULL
      AND (coalesce((flow ->> 'parent_item')::integer, -1), (flow ->> 'parent_generation')::integer)
          > ($item::integer, $generation::integer)
    ORDER BY coalesce((flow ->> 'parent_item')::integer, -1), (flow ->> 'parent_generation')::integer LIMIT $most_examined
), reached AS (
    SELECT item, generation, count(*) OVER () AS examined FROM examined ORDER BY item DESC, generation DESC LIMIT 1
), matching AS (
    SELECT id, item, generation FROM examined WHERE $states::text[] IS NULL OR status = ANY ($states) ORDER BY item, generation LIMIT $limit
)
SELECT r.item AS reached_item, r.generation AS reached_generation, r.examined, f.*
FROM reached r LEFT JOIN (matching m JOIN flow_history f ON f.id = m.id AND f.id = ANY (ARRAY(SELECT id FROM matching))) ON true
ORDER BY m.item, m.generation;

-- name: failed_item
-- The item of a map with the lowest index whose child is in one of the states, among the first
-- `limit` children in history.
SELECT item, task, state, flow FROM (
    (SELECT flow_item AS item, id AS task, state, NULL::bigint AS flow FROM history
     WHERE flow_id = $flow_id AND flow_node = $node AND coalesce(flow_item, -1) >= 0
     ORDER BY coalesce(flow_item, -1), flow_generation LIMIT $limit)
    UNION ALL
    (SELECT (flow ->> 'parent_item')::integer, NULL, flow ->> 'status', id FROM flow_history
     WHERE (flow ->> 'parent_id')::bigint = $flow_id AND flow ->> 'parent_node' = $node AND flow ->> 'parent_id' IS NOT NULL
       AND coalesce((flow ->> 'parent_item')::integer, -1) >= 0
     ORDER BY coalesce((flow ->> 'parent_item')::integer, -1), (flow ->> 'parent_generation')::integer LIMIT $limit)
) c
WHERE state = ANY ($states::text[]) ORDER BY item LIMIT 1;

-- name: delete_events
-- Deletes events that are older than a day, at most $1. While an event waits in an inbox for so
-- long that its owner does not run, all are kept: the owner will read them.
DELETE FROM flow_event WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM flow_event
    WHERE created_at < now() - interval '1 day'
      AND NOT EXISTS (SELECT FROM flow_inbox WHERE kind = 'event' AND created_at < now() - interval '1 hour')
    ORDER BY created_at LIMIT $1 FOR UPDATE SKIP LOCKED))
RETURNING id;

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

-- name: ends_of
-- When the given tasks ended, in one snapshot of both tables; null until the end.
SELECT id, CASE WHEN state IN ('succeeded', 'failed', 'cancelled', 'quarantined')
           THEN coalesce(finished_at, updated_at) END AS ended_at
FROM task WHERE id = ANY ($1::bigint[])
UNION ALL SELECT id, coalesce(finished_at, updated_at) FROM history WHERE id = ANY ($1::bigint[]);

-- name: by_idempotency_keys
SELECT h.id, h.type, h.idempotency_key, h.context_digest
FROM history h JOIN unnest($1::text[], $2::text[]) AS k (type, key) ON h.type = k.type AND h.idempotency_key = k.key
WHERE h.type = ANY ($1::text[]) AND h.idempotency_key = ANY ($2::text[])
ORDER BY h.moved_at;
