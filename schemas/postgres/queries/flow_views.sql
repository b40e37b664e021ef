-- These statements read flows for people and programs. Every count and every search has a limit and
-- uses an index.

-- name: get
-- A flow with its definition (that of a flow for which a task waits is its own), and the versions
-- that its root has fixed. `recovering`: it has ended, and its owner has not applied its next
-- recovery yet. The index `flow_inbox_recovery` has recoveries only.
SELECT f.*, (SELECT r.versions FROM flow r WHERE r.id = f.root_id) AS root_versions,
       coalesce(f.definition, (SELECT d.definition FROM flow_definition d WHERE d.name = f.name AND d.version = f.version))
           AS definition_json,
       f.status <> 'running' AND EXISTS (
           SELECT FROM flow_inbox i WHERE i.flow_id = f.id AND i.kind = 'recover'
             AND (i.detail ->> 'generation')::integer = f.generation + 1
       ) AS recovering,
       now() AS now
FROM flow f WHERE f.id = $1;

-- name: definition
SELECT definition AS definition_json FROM flow_definition WHERE name = $1 AND version = $2;

-- name: many
-- The same for several flows, by id.
SELECT f.*, (SELECT r.versions FROM flow r WHERE r.id = f.root_id) AS root_versions,
       coalesce(f.definition, (SELECT d.definition FROM flow_definition d WHERE d.name = f.name AND d.version = f.version))
           AS definition_json
FROM flow f WHERE f.id = ANY ($1::bigint[]) ORDER BY f.id;

-- name: nodes
-- The nodes of a flow that have a row, each with its own task or child flow; items of maps are not
-- among these. The names of nodes have another collation than the indexes of tasks and flows.
SELECT n.*, t.id AS task_id, t.type AS task_type, t.state AS task_state, c.id AS child_id, c.status AS child_status
FROM flow_node n
LEFT JOIN LATERAL (
    SELECT t.id, t.type, t.state FROM task t
    WHERE t.flow_id = n.flow_id AND t.flow_node = n.name COLLATE "default" AND coalesce(t.flow_item, -1) = -1
      AND t.flow_generation = n.generation
    LIMIT 1
) t ON true
LEFT JOIN LATERAL (
    SELECT c.id, c.status FROM flow c
    WHERE c.parent_id = n.flow_id AND c.parent_node = n.name COLLATE "default" AND coalesce(c.parent_item, -1) = -1
    ORDER BY c.parent_generation DESC LIMIT 1
) c ON true
WHERE n.flow_id = $1;

-- name: history
-- The nodes of a flow as they were before recoveries, the latest generation first.
SELECT * FROM flow_node_history WHERE flow_id = $1 ORDER BY flow_generation DESC, name LIMIT $2;

-- name: node_history
SELECT * FROM flow_node_history WHERE flow_id = $1 AND name = $2 ORDER BY flow_generation DESC LIMIT $3;

-- name: tasks_of_node
-- Examines the next `most_examined` tasks of a node behind an item and generation, and returns the
-- first `limit` of them in one of the states, in order, each with the last place and the number of
-- tasks that were examined. Without such a task one row has these, and no id.
WITH examined AS (
    SELECT id, coalesce(flow_item, -1) AS item, flow_generation AS generation, state FROM task
    WHERE flow_id = $flow_id AND flow_node = $node
      AND (coalesce(flow_item, -1), flow_generation) > ($item::integer, $generation::integer)
    ORDER BY coalesce(flow_item, -1), flow_generation LIMIT $most_examined
), reached AS (
    SELECT item, generation, count(*) OVER () AS examined FROM examined ORDER BY item DESC, generation DESC LIMIT 1
), matching AS (
    SELECT id FROM examined WHERE $states::text[] IS NULL OR state = ANY ($states) ORDER BY item, generation LIMIT $limit
)
SELECT r.item AS reached_item, r.generation AS reached_generation, r.examined, t.*
FROM reached r LEFT JOIN task t ON t.id = ANY (ARRAY(SELECT id FROM matching))
ORDER BY coalesce(t.flow_item, -1), t.flow_generation;

-- name: flows_of_node
-- The same for the child flows of a node.
WITH examined AS (
    SELECT id, coalesce(parent_item, -1) AS item, parent_generation AS generation, status FROM flow
    WHERE parent_id = $flow_id AND parent_node = $node
      AND (coalesce(parent_item, -1), parent_generation) > ($item::integer, $generation::integer)
    ORDER BY coalesce(parent_item, -1), parent_generation LIMIT $most_examined
), reached AS (
    SELECT item, generation, count(*) OVER () AS examined FROM examined ORDER BY item DESC, generation DESC LIMIT 1
), matching AS (
    SELECT id FROM examined WHERE $states::text[] IS NULL OR status = ANY ($states) ORDER BY item, generation LIMIT $limit
)
SELECT r.item AS reached_item, r.generation AS reached_generation, r.examined, f.*
FROM reached r LEFT JOIN flow f ON f.id = ANY (ARRAY(SELECT id FROM matching))
ORDER BY coalesce(f.parent_item, -1), f.parent_generation;

-- name: walk
-- The last id and the number of the next `limit` ($2) flows behind an id ($1), newest first.
SELECT min(id) AS last, count(*) AS flows FROM (
    SELECT id FROM flow WHERE $1::bigint IS NULL OR id < $1 ORDER BY id DESC LIMIT $2
) w;

-- name: list
-- Newest first; `before` is the last id of the page before, `first_id` the smallest id to search.
-- Without a family only flows without a parent for which no task waits. `visible` are the visible
-- namespaces; NULL is all.
SELECT f.* FROM flow f
WHERE ($name::text IS NULL OR f.name = $name)
  AND ($statuses::text[] IS NULL OR f.status = ANY ($statuses)
       OR (f.status = 'running' AND (f.paused AND 'paused' = ANY ($statuses)
                                     OR f.stop = 'cancel' AND 'cancelling' = ANY ($statuses))))
  AND ($labels::jsonb IS NULL OR f.labels @> $labels)
  AND ($idempotency_key::text IS NULL OR f.idempotency_key = $idempotency_key)
  AND ($created_since::timestamptz IS NULL OR f.created_at >= $created_since)
  AND CASE WHEN $family::bigint IS NULL THEN f.parent_id IS NULL AND f.task_id IS NULL ELSE f.root_id = $family END
  AND ($visible::text[] IS NULL
       OR CASE WHEN strpos(f.name, '--') <= 1 THEN 'default' ELSE split_part(f.name, '--', 1) END = ANY ($visible))
  AND ($schedule::text IS NULL OR f.schedule = $schedule)
  AND ($before::bigint IS NULL OR f.id < $before)
  AND ($first_id::bigint IS NULL OR f.id >= $first_id)
ORDER BY f.id DESC
LIMIT $limit;

-- name: why
SELECT f.id, f.root_id, f.name, f.version, f.status, f.paused, f.stop, f.live, f.error, f.updated_at, f.finished_at, now() AS now
FROM flow f WHERE f.id = $1;

-- name: why_node
-- Returns the first node in one of the states that started, with what it waits for; `name` and
-- `version` are those of the definition.
SELECT n.*,
       coalesce((SELECT f.definition FROM flow f WHERE f.id = $flow_id),
                (SELECT d.definition FROM flow_definition d WHERE d.name = $name AND d.version = $version))
           -> 'nodes' -> n.name ->> 'kind' AS kind,
       (SELECT w.event FROM flow_wait w WHERE w.flow_id = n.flow_id AND w.node = n.name COLLATE "default") AS event,
       (SELECT w.key FROM flow_wait w WHERE w.flow_id = n.flow_id AND w.node = n.name COLLATE "default") AS key,
       (SELECT l.at FROM flow_limit l WHERE l.flow_id = n.flow_id AND l.node = n.name COLLATE "default"
           AND l.generation = n.generation AND l.kind = 'timer') AS until,
       (SELECT l.at FROM flow_limit l WHERE l.flow_id = n.flow_id AND l.node = n.name COLLATE "default"
           AND l.generation = n.generation AND l.kind = 'finish_within') AS finish_by
FROM (
    -- The definition is read for one node only: it may be large.
    SELECT * FROM flow_node WHERE flow_id = $flow_id AND status = ANY ($statuses::text[]) ORDER BY started_at NULLS LAST, name LIMIT 1
) n;

-- name: why_child
-- The child of a node without items, in its generation ($3).
SELECT NULL::integer AS item, t.id AS task, t.state, NULL::bigint AS flow FROM task t
WHERE t.flow_id = $1 AND t.flow_node = $2 AND coalesce(t.flow_item, -1) = -1 AND t.flow_generation = $3
UNION ALL
(SELECT NULL, NULL, NULL, c.id FROM flow c
 WHERE c.parent_id = $1 AND c.parent_node = $2 AND coalesce(c.parent_item, -1) = -1
 ORDER BY c.parent_generation DESC LIMIT 1);

-- name: why_item
-- The item of a map with the lowest index whose child is in one of the states. Among the first and
-- the last `limit` children: those between have usually ended.
WITH tasks AS (
    (SELECT id, flow_item AS item, state FROM task
     WHERE flow_id = $flow_id AND flow_node = $node AND coalesce(flow_item, -1) >= 0
     ORDER BY coalesce(flow_item, -1), flow_generation LIMIT $limit)
    UNION ALL
    (SELECT id, flow_item AS item, state FROM task
     WHERE flow_id = $flow_id AND flow_node = $node AND coalesce(flow_item, -1) >= 0
     ORDER BY coalesce(flow_item, -1) DESC, flow_generation DESC LIMIT $limit)
), flows AS (
    (SELECT id, parent_item AS item, status FROM flow
     WHERE parent_id = $flow_id AND parent_node = $node AND coalesce(parent_item, -1) >= 0
     ORDER BY coalesce(parent_item, -1), parent_generation LIMIT $limit)
    UNION ALL
    (SELECT id, parent_item AS item, status FROM flow
     WHERE parent_id = $flow_id AND parent_node = $node AND coalesce(parent_item, -1) >= 0
     ORDER BY coalesce(parent_item, -1) DESC, parent_generation DESC LIMIT $limit)
)
SELECT item, id AS task, state, NULL::bigint AS flow FROM tasks WHERE state = ANY ($states::text[])
UNION ALL
SELECT item, NULL, NULL, id FROM flows WHERE status = ANY ($states::text[])
ORDER BY item LIMIT 1;

-- name: why_task
-- The flow for which a task waits.
SELECT id FROM flow WHERE task_id = $1 AND status || '' = 'running' ORDER BY id DESC LIMIT 1;

-- name: unapplied
-- The rows about flows ($3) among the first $2 rows in the inbox of a shard ($1).
SELECT flow_id, count(*) AS changes, min(created_at) AS since
FROM (SELECT flow_id, created_at FROM flow_inbox WHERE shard = $1::smallint ORDER BY shard, id LIMIT $2) i
WHERE flow_id = ANY ($3::bigint[]) GROUP BY flow_id;

-- name: owner
-- The session that owns a shard, by its application name (see `ownership.lock`).
SELECT a.application_name AS session FROM pg_locks p JOIN pg_stat_activity a ON a.pid = p.pid
WHERE p.locktype = 'advisory' AND p.granted AND p.objsubid = 1
  AND p.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND ((p.classid::bigint << 32) | p.objid::bigint) = hashtextextended('penstock.flows.' || $1::text, 0);
