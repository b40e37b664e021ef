-- Checks of flows, and their repairs. One statement sees the rows of a flow in one snapshot, and
-- the owner consumes an inbox row in the transaction that applies it. So no rule needs a grace
-- time, except those about owners that do not run. Sessions hash their joins, so each table names
-- the flows itself: otherwise each page would read all of it. The state is an expression where the
-- planner would read the index of all running flows.

-- name: page
-- The last of the next `limit` ($2) flows behind an id ($1).
SELECT max(id) AS last_id FROM (SELECT id FROM flow WHERE id > $1 ORDER BY id LIMIT $2) AS f;

-- name: stalled
-- Running nodes with nothing that could end them, of the flows behind an id ($1) up to another
-- ($2); and running flows without a running node, unless a pause holds one. Of a flow with inbox
-- rows the owner has still to decide.
WITH noted AS MATERIALIZED (
    SELECT DISTINCT flow_id FROM flow_inbox
), running AS MATERIALIZED (
    SELECT f.id, f.paused FROM flow f
    WHERE f.id > $1 AND f.id <= $2 AND f.status || '' = 'running' AND NOT EXISTS (SELECT FROM noted WHERE noted.flow_id = f.id)
)
SELECT f.id, n.name AS node, n.total IS NOT NULL AS is_map
FROM running f JOIN flow_node n ON n.flow_id = f.id
WHERE n.flow_id > $1 AND n.flow_id <= $2 AND n.status = 'running'
  AND NOT EXISTS (SELECT FROM task t WHERE t.flow_id > $1 AND t.flow_id <= $2 AND t.flow_id = f.id AND t.flow_node = n.name COLLATE "default"
                  AND t.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined'))
  AND NOT EXISTS (SELECT FROM flow c WHERE c.parent_id > $1 AND c.parent_id <= $2 AND c.parent_id = f.id AND c.parent_node = n.name COLLATE "default"
                  AND c.status || '' = 'running')
  AND NOT EXISTS (SELECT FROM flow_wait w WHERE w.flow_id > $1 AND w.flow_id <= $2 AND w.flow_id = f.id AND w.node = n.name COLLATE "default")
  AND NOT EXISTS (SELECT FROM flow_limit l WHERE l.flow_id > $1 AND l.flow_id <= $2 AND l.flow_id = f.id AND l.node = n.name COLLATE "default" AND l.kind = 'timer')
  AND NOT (f.paused AND n.total IS NOT NULL AND (n.opened < n.total OR n.retry > 0))
UNION ALL
SELECT f.id, NULL, false
FROM running f
WHERE NOT EXISTS (SELECT FROM flow_node n WHERE n.flow_id > $1 AND n.flow_id <= $2 AND n.flow_id = f.id AND n.status = 'running')
  AND NOT (f.paused AND EXISTS (SELECT FROM flow_node n WHERE n.flow_id > $1 AND n.flow_id <= $2 AND n.flow_id = f.id AND n.status = 'ready'))
ORDER BY id, node;

-- name: leftovers
-- Finds what flows that have ended left behind: live tasks and child flows, limits and waits. Also
-- finds flows that no task waits for any more, although one began to.
WITH noted AS MATERIALIZED (
    SELECT DISTINCT flow_id FROM flow_inbox
)
SELECT f.id, 'task' AS what, t.id AS child_id, t.flow_node AS node
FROM flow f JOIN task t ON t.flow_id = f.id
WHERE t.flow_id > $1 AND t.flow_id <= $2 AND f.id > $1 AND f.id <= $2 AND f.status <> 'running'
  AND t.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
UNION ALL
SELECT f.id, 'flow', c.id, c.parent_node
FROM flow f JOIN flow c ON c.parent_id = f.id
WHERE c.parent_id > $1 AND c.parent_id <= $2 AND f.id > $1 AND f.id <= $2 AND f.status <> 'running' AND c.status || '' = 'running'
UNION ALL
SELECT f.id, 'waiter', f.id, NULL
FROM flow f CROSS JOIN LATERAL (SELECT state FROM task WHERE id = f.task_id OFFSET 0) t
WHERE f.id > $1 AND f.id <= $2 AND f.task_id IS NOT NULL AND f.status || '' = 'running' AND f.stop IS DISTINCT FROM 'cancel'
  AND t.state IN ('succeeded', 'failed', 'cancelled', 'quarantined')
  AND NOT EXISTS (SELECT FROM noted WHERE noted.flow_id = f.id)
UNION ALL
SELECT f.id, 'limit', NULL, l.node
FROM flow f JOIN flow_limit l ON l.flow_id = f.id
WHERE l.flow_id > $1 AND l.flow_id <= $2 AND f.id > $1 AND f.id <= $2 AND f.status <> 'running'
UNION ALL
SELECT f.id, 'wait', NULL, w.node
FROM flow f JOIN flow_wait w ON w.flow_id = f.id
WHERE w.flow_id > $1 AND w.flow_id <= $2 AND f.id > $1 AND f.id <= $2 AND f.status <> 'running'
ORDER BY id, what, child_id, node;

-- name: miscounted
-- Flows whose counters differ from their nodes. A node without a row is pending.
WITH size AS MATERIALIZED (
    SELECT d.name, d.version, (SELECT count(*) FROM json_object_keys(d.definition -> 'nodes')) AS nodes
    FROM flow_definition d
), sized AS (
    -- A flow that a task waits for has its definition in its row.
    -- The reader may not read the column callbacks.
    SELECT f.id, f.unfinished, f.live, f.unsuccessful,
           CASE WHEN f.definition IS NULL THEN s.nodes
                ELSE (SELECT count(*) FROM json_object_keys(f.definition -> 'nodes')) END AS nodes
    FROM flow f LEFT JOIN size s ON s.name = f.name AND s.version = f.version
    WHERE f.id > $1 AND f.id <= $2
)
SELECT f.id, f.unfinished, f.live, f.unsuccessful, f.nodes - c.final AS counted_unfinished, c.live AS counted_live,
       c.unsuccessful AS counted_unsuccessful
FROM sized f
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE n.status NOT IN ('pending', 'ready', 'running')) AS final,
           count(*) FILTER (WHERE n.status = 'running') AS live,
           count(*) FILTER (WHERE n.status IN ('failed', 'cancelled', 'blocked')) AS unsuccessful
    FROM flow_node n WHERE n.flow_id = f.id
) c
WHERE (f.unfinished, f.live, f.unsuccessful) <> (f.nodes - c.final, c.live, c.unsuccessful)
ORDER BY f.id;

-- name: miscounted_maps
-- Running maps that count other than the live items that they have: those with a live child, and
-- those whose end is in the inbox.
SELECT n.flow_id AS id, n.name AS node, n.opened - n.succeeded - n.unsuccessful - n.retry AS live,
       c.live + e.noted AS counted
FROM flow f
JOIN flow_node n ON n.flow_id = f.id AND n.status = 'running' AND n.total IS NOT NULL
CROSS JOIN LATERAL (
    SELECT count(DISTINCT i.item) AS live FROM (
        SELECT t.flow_item AS item FROM task t
        WHERE t.flow_id = n.flow_id AND t.flow_node = n.name COLLATE "default" AND t.flow_generation = n.generation
          AND t.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
        UNION ALL
        SELECT c.parent_item FROM flow c
        WHERE c.parent_id = n.flow_id AND c.parent_node = n.name COLLATE "default" AND c.parent_generation = n.generation
          AND c.status = 'running'
    ) i
) c
CROSS JOIN LATERAL (
    SELECT count(DISTINCT i.item) AS noted FROM flow_inbox i
    WHERE i.shard = (f.root_id % 64)::smallint AND i.flow_id = n.flow_id AND i.node = n.name
      AND i.generation = n.generation AND i.kind = 'task'
) e
WHERE f.id > $1 AND f.id <= $2 AND n.flow_id > $1 AND n.flow_id <= $2 AND f.status = 'running'
  AND n.opened - n.succeeded - n.unsuccessful - n.retry <> c.live + e.noted
ORDER BY n.flow_id, n.name;

-- name: unapplied
-- Families whose inbox rows, or limits, have waited for the owner of their shard for longer than
-- `grace` ($2) seconds; those that wait longest first, at most $1.
SELECT root_id AS id, shard, count(*) AS messages, extract(epoch FROM now() - min(since))::double precision AS late_s,
       count(*) OVER () AS found
FROM (
    SELECT root_id, shard, created_at AS since FROM flow_inbox WHERE created_at < now() - make_interval(secs => $2)
    UNION ALL
    SELECT root_id, shard, at FROM flow_limit WHERE at < now() - make_interval(secs => $2)
) AS w
GROUP BY root_id, shard ORDER BY min(since), root_id LIMIT $1;

-- name: unmatched
-- Waits for events that have been there for longer than `grace` ($2) seconds; at most $1.
SELECT w.flow_id AS id, w.node, w.event, w.key, count(*) OVER () AS found
FROM flow_wait w
WHERE EXISTS (SELECT FROM flow_event e
              WHERE e.namespace = w.namespace AND e.event = w.event AND e.key = w.key
                AND e.created_at < now() - make_interval(secs => $2) OFFSET 0)
ORDER BY w.flow_id, w.node LIMIT $1;

-- name: wake
-- Notifies the owners of shards.
SELECT pg_notify('penstock_flows', shard::text) FROM unnest($1::smallint[]) AS s (shard);

-- name: lock
-- Locks flows as their owner does, without those that it holds now: they are moving.
SELECT id FROM flow WHERE id = ANY ($1::bigint[]) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED;

-- name: restart
-- Makes running nodes of locked flows ready again whose task does not exist: an operator deleted
-- it, or its type was missing when the node started. The owner inserts a task and its node in one
-- transaction, and history takes no task of a running flow. A node whose end is in the inbox starts
-- no second task. The limits of the node begin again with it.
WITH restarted AS (
    UPDATE flow_node n SET status = 'ready', started_at = NULL, timed_out = NULL
    FROM flow f
    WHERE f.id = ANY ($1::bigint[]) AND f.status = 'running'
      AND n.flow_id = ANY ($1::bigint[]) AND n.flow_id = f.id AND n.status = 'running' AND n.total IS NULL
      AND NOT EXISTS (SELECT FROM task t WHERE t.flow_id = n.flow_id AND t.flow_node = n.name COLLATE "default"
                      AND coalesce(t.flow_item, -1) = -1 AND t.flow_generation = n.generation OFFSET 0)
      AND NOT EXISTS (SELECT FROM flow_inbox i WHERE i.shard = (f.root_id % 64)::smallint AND i.flow_id = f.id
                      AND i.node = n.name COLLATE "default" OFFSET 0)
      AND coalesce(f.definition, (SELECT d.definition FROM flow_definition d WHERE d.name = f.name AND d.version = f.version))
          -> 'nodes' -> n.name ->> 'kind' = 'task'
    RETURNING n.flow_id, n.name
), unlimited AS (
    DELETE FROM flow_limit l USING restarted r
    WHERE l.flow_id = ANY ($1::bigint[]) AND l.flow_id = r.flow_id AND l.node = r.name
)
UPDATE flow f SET live = f.live - r.nodes, updated_at = now()
FROM (SELECT flow_id, count(*)::integer AS nodes FROM restarted GROUP BY flow_id) r
WHERE f.id = ANY ($1::bigint[]) AND f.id = r.flow_id
RETURNING f.id;

-- name: revive
-- Lets the owner decide anew about flows that are locked and run: all of this changes nothing that
-- was applied before. A flow without nodes begins. Nodes bring their end to their successors,
-- start, or open items. The end of a node's task is noted once more; those of items count, and are
-- not.
WITH noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind, node, generation, state, task_id)
    SELECT f.root_id, f.id, 'began', NULL, NULL::integer, NULL, NULL::bigint
    FROM flow f WHERE f.id = ANY ($1::bigint[]) AND f.status = 'running'
      AND NOT EXISTS (SELECT FROM flow_node n WHERE n.flow_id = f.id OFFSET 0)
    UNION ALL
    SELECT f.root_id, f.id, 'task', n.name, n.generation, t.state, t.id
    FROM flow f JOIN flow_node n ON n.flow_id = f.id AND n.status = 'running' AND n.total IS NULL
    JOIN task t ON t.flow_id = f.id AND t.flow_node = n.name COLLATE "default" AND t.flow_generation = n.generation
        AND t.flow_item IS NULL
               AND t.state IN ('succeeded', 'failed', 'cancelled', 'quarantined')
    WHERE f.id = ANY ($1::bigint[]) AND n.flow_id = ANY ($1::bigint[]) AND t.flow_id = ANY ($1::bigint[]) AND f.status = 'running'
    UNION ALL
    SELECT f.root_id, f.id, 'visit', n.name, NULL, NULL, NULL
    FROM flow f JOIN flow_node n ON n.flow_id = f.id AND (n.status NOT IN ('pending', 'running') OR n.total IS NOT NULL)
    WHERE f.id = ANY ($1::bigint[]) AND n.flow_id = ANY ($1::bigint[]) AND f.status = 'running'
    RETURNING shard
), woken AS (
    SELECT pg_notify('penstock_flows', shard::text) FROM (SELECT DISTINCT shard FROM noted) AS shards
)
SELECT count(*) FROM woken;

-- name: recount
-- Corrects the counters of flows that are locked.
UPDATE flow f
SET unfinished = s.nodes - s.final, live = s.live, unsuccessful = s.unsuccessful, updated_at = now()
FROM (
    SELECT k.id, count(*) FILTER (WHERE n.status NOT IN ('pending', 'ready', 'running')) AS final,
           count(*) FILTER (WHERE n.status = 'running') AS live,
           count(*) FILTER (WHERE n.status IN ('failed', 'cancelled', 'blocked')) AS unsuccessful,
           (SELECT count(*) FROM json_object_keys(coalesce(k.definition, d.definition) -> 'nodes')) AS nodes
    FROM flow k
    LEFT JOIN flow_definition d ON d.name = k.name AND d.version = k.version
    LEFT JOIN flow_node n ON n.flow_id = ANY ($1::bigint[]) AND n.flow_id = k.id
    WHERE k.id = ANY ($1::bigint[]) GROUP BY k.id, d.name, d.version
) s
WHERE f.id = ANY ($1::bigint[]) AND f.id = s.id AND (f.unfinished, f.live, f.unsuccessful) <> (s.nodes - s.final, s.live, s.unsuccessful)
RETURNING f.id;

-- name: clear
-- Deletes limits and waits of flows that are locked and have ended.
WITH ended AS MATERIALIZED (
    SELECT id FROM flow WHERE id = ANY ($1::bigint[]) AND status <> 'running'
), limits AS (
    DELETE FROM flow_limit WHERE flow_id = ANY (ARRAY(SELECT id FROM ended)) RETURNING flow_id
), waits AS (
    DELETE FROM flow_wait WHERE flow_id = ANY (ARRAY(SELECT id FROM ended)) RETURNING flow_id
)
SELECT (SELECT count(*) FROM limits) + (SELECT count(*) FROM waits) AS cleared;

-- name: cancel_children
-- Cancels flows that run although their parent, or the task that waited for them, has ended.
WITH noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind)
    SELECT c.root_id, c.id, 'cancel' FROM flow c
    WHERE c.id = ANY ($1::bigint[]) AND c.status = 'running'
      AND (EXISTS (SELECT FROM flow f WHERE f.id = c.parent_id AND f.status <> 'running' OFFSET 0)
           OR EXISTS (SELECT FROM task t WHERE t.id = c.task_id
                      AND t.state IN ('succeeded', 'failed', 'cancelled', 'quarantined') OFFSET 0))
    RETURNING shard
), woken AS (
    SELECT pg_notify('penstock_flows', shard::text) FROM (SELECT DISTINCT shard FROM noted) AS shards
)
SELECT count(*) AS cancelled FROM noted, (SELECT count(*) FROM woken) AS w;

-- name: recount_maps
-- Counts the ends of items that running maps of locked flows have missed. An item counts as
-- succeeded only if a task or a child flow of it has.
WITH found AS (
    SELECT n.flow_id, n.name, n.opened - n.succeeded - n.unsuccessful - n.retry - c.live - e.noted AS missed,
           greatest(0, c.succeeded - e.succeeded - n.succeeded) AS succeeded
    FROM flow f
    JOIN flow_node n ON n.flow_id = f.id AND n.status = 'running' AND n.total IS NOT NULL
    CROSS JOIN LATERAL (
        SELECT count(DISTINCT i.item) FILTER (WHERE i.live AND i.generation = n.generation) AS live,
               count(DISTINCT i.item) FILTER (WHERE i.succeeded) AS succeeded
        FROM (
            SELECT t.flow_item AS item, t.flow_generation AS generation, t.state = 'succeeded' AS succeeded,
                   t.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined') AS live
            FROM task t WHERE t.flow_id = n.flow_id AND t.flow_node = n.name COLLATE "default"
            UNION ALL
            SELECT c.parent_item, c.parent_generation, c.status = 'succeeded', c.status = 'running'
            FROM flow c WHERE c.parent_id = n.flow_id AND c.parent_node = n.name COLLATE "default"
        ) i
    ) c
    CROSS JOIN LATERAL (
        SELECT count(DISTINCT i.item) AS noted, count(DISTINCT i.item) FILTER (WHERE i.state = 'succeeded') AS succeeded
        FROM flow_inbox i
        WHERE i.shard = (f.root_id % 64)::smallint AND i.flow_id = n.flow_id AND i.node = n.name
          AND i.generation = n.generation AND i.kind = 'task'
    ) e
    WHERE f.id = ANY ($1::bigint[]) AND n.flow_id = ANY ($1::bigint[]) AND f.status = 'running'
)
UPDATE flow_node n
SET succeeded = n.succeeded + least(f.missed, f.succeeded),
    unsuccessful = n.unsuccessful + f.missed - least(f.missed, f.succeeded)
FROM found f
WHERE n.flow_id = ANY ($1::bigint[]) AND n.flow_id = f.flow_id AND n.name = f.name AND f.missed > 0
RETURNING n.flow_id;
