-- Flows: their start, and the rows that their owner reads and writes.
--
-- Sessions avoid nested loops (`SESSION_SETTINGS`), so a join with a table that grows would read
-- all of it. Each look-up by keys is LATERAL with OFFSET 0 or LIMIT, which the planner must run
-- once per key. A statement that has locked rows deletes them by `ctid`.

-- name: start
-- Inserts root flows and what lets their owner begin them. A flow whose idempotency key, or whose
-- tick, exists already is not inserted; a rerun of a tick is.
-- A batch that was read from a topic moves the reader's offset from `first_offset` to
-- `next_offset`, and its identity from `identity` to `next_identity`. When they are not
-- `first_offset` and `identity`, another process reads the partition now, and nothing is inserted.
-- Returns one row without an id, then the inserted flows; no row when the offset was another.
WITH moved AS (
    UPDATE ingested SET next_offset = $next_offset, identity = $next_identity::text
    WHERE topic = $topic AND partition = $partition AND next_offset = $first_offset AND identity IS NOT DISTINCT FROM $identity::text
      -- As in `tasks.submit`.
      AND (SELECT set_config('lock_timeout', coalesce(nullif(current_setting('lock_timeout'), '0'), 400 + floor(200 * random()) || 'ms'), true)) IS NOT NULL
    RETURNING 1
), allowed AS (
    SELECT 1 WHERE $topic::text IS NULL UNION ALL SELECT 1 FROM moved
), input AS (
    SELECT *
    FROM unnest({{$given_flow_start}}) WITH ORDINALITY AS i ({{given_flow_start}}, ordinal)
), inserted AS (
    INSERT INTO flow (versions, priority, events, callbacks, labels, {{flow_start}})
    SELECT versions::jsonb, coalesce(priority, 2), coalesce(events, 'final'),
           CASE WHEN callbacks IS NOT NULL THEN ARRAY(SELECT jsonb_array_elements_text(callbacks::jsonb)) END,
           labels::jsonb, {{flow_start}}
    FROM input
    WHERE EXISTS (SELECT FROM allowed)
      -- As in `tasks.submit`.
      AND (SELECT set_config('lock_timeout', coalesce(nullif(current_setting('lock_timeout'), '0'), 400 + floor(200 * random()) || 'ms'), true)) IS NOT NULL
    ORDER BY ordinal
    ON CONFLICT DO NOTHING
    -- A tick may have any number of reruns.
    RETURNING id, name, idempotency_key, CASE WHEN rerun_of IS NULL THEN schedule END AS schedule, tick
), noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind) SELECT id, id, 'began' FROM inserted
    RETURNING shard
), woken AS (
    SELECT pg_notify('penstock_flows', shard::text) FROM (SELECT DISTINCT shard FROM noted) AS shards
)
SELECT NULL AS id, NULL AS name, NULL AS idempotency_key, NULL AS schedule, NULL::timestamptz AS tick FROM allowed
UNION ALL
SELECT id, name, idempotency_key, schedule, tick FROM inserted, (SELECT count(*) FROM woken) AS w
ORDER BY id NULLS FIRST;

-- name: by_idempotency_keys
SELECT f.id, k.name, k.key AS idempotency_key
FROM unnest($1::text[], $2::text[]) AS k (name, key)
CROSS JOIN LATERAL (SELECT id FROM flow WHERE name = k.name AND idempotency_key = k.key OFFSET 0) AS f;

-- name: by_ticks
SELECT f.id, k.schedule, k.tick
FROM unnest($1::text[], $2::timestamptz[]) AS k (schedule, tick)
CROSS JOIN LATERAL (
    SELECT id FROM flow WHERE schedule = k.schedule AND tick = k.tick AND rerun_of IS NULL OFFSET 0
) AS f;

-- name: match_runs
-- Ends waits for runs of other flows that have ended. A run is the latest flow of a definition with
-- a tick. Run after the commit of an end, and after that of a wait: the later one of the two sees
-- the other. $1 are flows that wait or have ended; without them all waits are compared.
WITH awaited AS (
    SELECT w.flow_id, w.node, w.event, w.key FROM flow_wait w WHERE w.namespace = '' AND w.flow_id = ANY ($1::bigint[])
    UNION
    SELECT w.flow_id, w.node, w.event, w.key FROM flow_wait w WHERE w.namespace = '' AND $1::bigint[] IS NULL
    UNION
    SELECT w.flow_id, w.node, w.event, w.key
    FROM flow f
    CROSS JOIN LATERAL (
        SELECT * FROM flow_wait
        WHERE namespace = '' AND event = 'flow:' || f.name
          AND key = to_char(f.tick AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"')
        OFFSET 0
    ) AS w
    WHERE f.id = ANY ($1) AND f.tick IS NOT NULL AND f.parent_id IS NULL
), found AS (
    SELECT a.flow_id, a.node, r.id, r.status
    FROM awaited a
    CROSS JOIN LATERAL (
        (SELECT f.id, f.status FROM flow f
         WHERE f.name = substr(a.event, 6) AND f.tick = a.key::timestamptz AND f.tick IS NOT NULL AND f.parent_id IS NULL
         ORDER BY f.id DESC LIMIT 1)
        UNION ALL
        (SELECT h.id, h.flow ->> 'status' FROM flow_history h
         WHERE h.tick = a.key::timestamptz AND h.tick IS NOT NULL AND h.flow ->> 'name' = substr(a.event, 6)
           AND h.id = h.root_id
         ORDER BY h.id DESC LIMIT 1)
        ORDER BY id DESC LIMIT 1
    ) AS r
    WHERE r.status <> 'running'
), locked AS MATERIALIZED (
    SELECT w.ctid AS place FROM (SELECT flow_id, node FROM found ORDER BY flow_id, node) AS f
    CROSS JOIN LATERAL (
        SELECT ctid FROM flow_wait WHERE flow_id = f.flow_id AND node = f.node FOR UPDATE SKIP LOCKED OFFSET 0
    ) AS w
), matched AS (
    DELETE FROM flow_wait WHERE ctid = ANY (ARRAY(SELECT place FROM locked))
    RETURNING root_id, flow_id, node, generation
), noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind, node, generation, detail)
    SELECT m.root_id, m.flow_id, 'event', m.node, m.generation, jsonb_build_object('flow', f.id, 'status', f.status)
    FROM matched m JOIN found f USING (flow_id, node)
    RETURNING shard
), woken AS (
    SELECT pg_notify('penstock_flows', shard::text) FROM (SELECT DISTINCT shard FROM noted) AS shards
)
SELECT (SELECT count(*) FROM noted) AS matched, (SELECT count(*) FROM woken) AS woken;

-- name: runs
-- The outputs of runs that waits were for, and of child flows.
SELECT id, name, output, output_ref, error FROM flow WHERE id = ANY ($1::bigint[])
UNION ALL
SELECT id, flow ->> 'name', (flow ->> 'output')::bytea, flow ->> 'output_ref', flow ->> 'error'
FROM flow_history WHERE id = ANY ($1::bigint[]);

-- name: match_events
-- Brings events to the waits of flows. Run after the commit of an event, and after that of a wait:
-- the later one of the two sees the other. A wait is deleted, so it gets one event. Without events
-- ($1) and without flows ($2) all are compared.
WITH candidates AS (
    -- Each branch has an index that fits, with any parameters.
    SELECT w.flow_id, w.node, e.id, e.namespace, e.created_at
    FROM flow_event e
    CROSS JOIN LATERAL (
        SELECT * FROM flow_wait WHERE namespace = e.namespace AND event = e.event AND key = e.key OFFSET 0
    ) AS w
    WHERE e.id = ANY ($1::text[])
    UNION ALL
    SELECT w.flow_id, w.node, e.id, e.namespace, e.created_at
    FROM flow_wait w
    CROSS JOIN LATERAL (
        SELECT * FROM flow_event WHERE namespace = w.namespace AND event = w.event AND key = w.key OFFSET 0
    ) AS e
    WHERE w.flow_id = ANY ($2::bigint[])
    UNION ALL
    SELECT w.flow_id, w.node, e.id, e.namespace, e.created_at
    FROM flow_event e
    CROSS JOIN LATERAL (
        SELECT * FROM flow_wait WHERE namespace = e.namespace AND event = e.event AND key = e.key OFFSET 0
    ) AS w
    WHERE $1::text[] IS NULL AND $2::bigint[] IS NULL
), found AS (
    SELECT DISTINCT ON (flow_id, node) flow_id, node, id, namespace FROM candidates
    ORDER BY flow_id, node, created_at, id
), locked AS MATERIALIZED (
    SELECT w.ctid AS place FROM (SELECT flow_id, node FROM found ORDER BY flow_id, node) AS f
    CROSS JOIN LATERAL (
        SELECT ctid FROM flow_wait WHERE flow_id = f.flow_id AND node = f.node FOR UPDATE SKIP LOCKED OFFSET 0
    ) AS w
), matched AS (
    DELETE FROM flow_wait WHERE ctid = ANY (ARRAY(SELECT place FROM locked))
    RETURNING root_id, flow_id, node, generation
), noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind, node, generation, detail)
    SELECT m.root_id, m.flow_id, 'event', m.node, m.generation, jsonb_build_object('namespace', f.namespace, 'id', f.id)
    FROM matched m JOIN found f USING (flow_id, node)
    RETURNING shard
), woken AS (
    SELECT pg_notify('penstock_flows', shard::text) FROM (SELECT DISTINCT shard FROM noted) AS shards
)
SELECT (SELECT count(*) FROM noted) AS matched, (SELECT count(*) FROM woken) AS woken;

-- name: take
-- Takes the oldest rows of the inboxes of these shards, at most `each` of a shard and `most` of
-- all, without those of the root flows in `held`. The shards have their turns in this order. A
-- command waits until an earlier recovery of its flow is applied, which makes it run. Rows that
-- another transaction takes are left to it. Returns them in their order, with the results of the
-- tasks of nodes.
WITH taken AS (
    DELETE FROM flow_inbox WHERE ctid = ANY (ARRAY(
        SELECT found.ctid FROM unnest($shards::smallint[]) AS s (shard)
        CROSS JOIN LATERAL (
            SELECT n.ctid FROM flow_inbox n
            WHERE n.shard = s.shard AND n.root_id <> ALL ($held::bigint[])
              AND (n.kind NOT IN ('pause', 'resume', 'cancel')
                   OR NOT EXISTS (SELECT FROM flow_inbox r WHERE r.flow_id = n.flow_id AND r.kind = 'recover' AND r.id < n.id
                                  OFFSET 0))
            ORDER BY n.id LIMIT $each FOR UPDATE SKIP LOCKED
        ) AS found
        LIMIT $most
    ))
    RETURNING id, shard, root_id, flow_id, kind, node, generation, item, state, task_id, detail
)
SELECT i.*, t.result_type, t.result, t.result_ref, t.error
FROM taken i
LEFT JOIN LATERAL (
    SELECT result_type, result, result_ref, error FROM task WHERE id = i.task_id AND i.item IS NULL OFFSET 0
) AS t ON true
ORDER BY i.id;

-- name: announce_ends
-- Wakes requests that wait for these flows, as the trigger `flow_ends_announced` does for others.
SELECT pg_notify('penstock_ended', id::text) FROM unnest($1::bigint[]) AS f (id);

-- name: due
-- Takes the limits of these shards ($1) that are due, at most $2 of each shard, without those of
-- the given root flows ($3).
DELETE FROM flow_limit WHERE ctid = ANY (ARRAY(
    SELECT found.ctid FROM unnest($1::smallint[]) AS s (shard)
    CROSS JOIN LATERAL (
        SELECT n.ctid FROM flow_limit n
        WHERE n.shard = s.shard AND n.at <= now() AND n.root_id <> ALL ($3::bigint[])
        ORDER BY n.at LIMIT $2 FOR UPDATE SKIP LOCKED
    ) AS found
))
RETURNING root_id, flow_id, node, generation, kind;

-- name: next_due
-- Seconds until the first limit of these shards is due.
SELECT extract(epoch FROM min(found.at) - now())::double precision AS due_s FROM unnest($1::smallint[]) AS s (shard)
CROSS JOIN LATERAL (SELECT n.at FROM flow_limit n WHERE n.shard = s.shard ORDER BY n.at LIMIT 1) AS found;

-- name: with_inbox
-- The shards, out of these, whose inbox has rows.
SELECT s.shard FROM unnest($1::smallint[]) AS s (shard)
CROSS JOIN LATERAL (SELECT FROM flow_inbox i WHERE i.shard = s.shard LIMIT 1) AS found;

-- name: lock
-- The given flows ($1) with what they inherit from their roots, locked until the end of the
-- transaction. With them, up to $2 levels, the ancestors whose last unfinished node is below:
-- they may end as well. The root of a flow that a task without a flow waits for is that task. Flows
-- that another transaction locks are left out, because the other flows must not wait for it.
WITH RECURSIVE ends AS (
    SELECT id, parent_id, unfinished, 0 AS level FROM flow WHERE id = ANY ($1::bigint[])
    UNION
    SELECT p.id, p.parent_id, p.unfinished, e.level + 1
    FROM ends e CROSS JOIN LATERAL (SELECT id, parent_id, unfinished FROM flow WHERE id = e.parent_id OFFSET 0) AS p
    WHERE e.unfinished <= 1 AND e.level < $2::integer
)
SELECT f.id, f.root_id, f.parent_id, f.parent_node, f.parent_generation, f.parent_item, f.name, f.version,
       r.versions, f.status, f.generation, f.paused, f.stop, f.unfinished, f.live, f.unsuccessful,
       coalesce(r.priority, f.priority) AS priority, f.inputs, f.inputs_ref, f.task_id, f.task_step, f.task_stage,
       f.definition::text AS definition, f.idempotency_key, f.events, f.callbacks, f.labels,
       coalesce(f.traceparent, r.traceparent) AS traceparent, r.schedule, r.tick, now() AS now
FROM flow f
LEFT JOIN LATERAL (
    SELECT versions, priority, traceparent, schedule, tick FROM flow WHERE id = f.root_id OFFSET 0
) AS r ON true
WHERE f.id = ANY (ARRAY(SELECT id FROM ends)) ORDER BY f.id FOR NO KEY UPDATE OF f SKIP LOCKED;

-- name: roots
-- The roots of those of the given flows that are not in history.
SELECT DISTINCT root_id FROM flow WHERE id = ANY ($1::bigint[]);

-- name: definitions
SELECT k.name, k.version, d.definition::text AS definition
FROM unnest($1::text[], $2::integer[]) AS k (name, version)
CROSS JOIN LATERAL (SELECT definition FROM flow_definition WHERE name = k.name AND version = k.version OFFSET 0) AS d;

-- name: nodes
-- The rows of the given nodes; a node without a row is pending.
SELECT n.* FROM unnest($1::bigint[], $2::text[]) AS k (flow_id, name)
CROSS JOIN LATERAL (SELECT * FROM flow_node WHERE flow_id = k.flow_id AND name = k.name OFFSET 0) AS n;

-- name: eligible
-- The nodes of a flow that may start something: ready ones, and maps that run.
SELECT name FROM flow_node WHERE flow_id = $1 AND (status = 'ready' OR status = 'running' AND total IS NOT NULL);

-- name: item_results
-- The last results of some items of a map, by item. The index has the item as `coalesce`.
SELECT DISTINCT ON (coalesce(flow_item, -1)) flow_item AS item, state, result_type, result, result_ref FROM task
WHERE flow_id = $flow_id AND flow_node = $node AND coalesce(flow_item, -1) BETWEEN $first AND $last
ORDER BY coalesce(flow_item, -1), flow_generation DESC;

-- name: item_outputs
-- The outputs of the last child flows of some items of a map, by item. A flow without an output has
-- no type.
SELECT DISTINCT ON (coalesce(parent_item, -1)) parent_item AS item, status AS state, output AS result,
       output_ref AS result_ref, CASE WHEN output IS NOT NULL OR output_ref IS NOT NULL THEN 'json' END AS result_type
FROM flow WHERE parent_id = $flow_id AND parent_node = $node AND coalesce(parent_item, -1) BETWEEN $first AND $last
ORDER BY coalesce(parent_item, -1), parent_generation DESC;

-- name: claimed
-- The given nodes whose task a worker has claimed.
SELECT k.flow_id, k.node AS flow_node, k.generation AS flow_generation
FROM unnest($1::bigint[], $2::text[], $3::integer[]) AS k (flow_id, node, generation)
CROSS JOIN LATERAL (
    SELECT * FROM task
    WHERE flow_id = k.flow_id AND flow_node = k.node AND flow_generation = k.generation AND coalesce(flow_item, -1) = -1
    OFFSET 0
) AS t
WHERE t.step > 0 OR t.failures + t.losses > 0 OR t.state NOT IN ('scheduled', 'ready', 'queued', 'paused');

-- name: live_tasks
-- Tasks of a flow, or with a name ($2) of one node, that are not final; at most $3.
SELECT id FROM task
WHERE flow_id = $1 AND ($2::text IS NULL OR flow_node = $2)
  AND state IN ('scheduled', 'ready', 'queued', 'running', 'waiting', 'paused')
ORDER BY id LIMIT $3;

-- name: command_children
-- Passes a command on to the child flows of a flow, or of one of its nodes: to those that run, and
-- to those that will, because their recovery is in the inbox or in this transaction (`recovering`).
INSERT INTO flow_inbox (root_id, flow_id, kind)
SELECT root_id, id, $kind FROM (SELECT * FROM flow WHERE parent_id = $flow_id OFFSET 0) AS f
WHERE ($node::text IS NULL OR parent_node = $node)
  AND (status = 'running' OR id = ANY ($recovering::bigint[])
       OR EXISTS (SELECT FROM flow_inbox r WHERE r.flow_id = f.id AND r.kind = 'recover' OFFSET 0));

-- name: unwait
-- Ends the waits and timers of a flow, or of one of its nodes; returns their nodes.
WITH waits AS (
    DELETE FROM flow_wait WHERE flow_id = $1 AND ($2::text IS NULL OR node = $2) RETURNING node, generation
), timers AS (
    DELETE FROM flow_limit WHERE flow_id = $1 AND kind = 'timer' AND ($2::text IS NULL OR node = $2)
    RETURNING node, generation
)
SELECT node, generation FROM waits UNION ALL SELECT node, generation FROM timers;

-- name: reopen_tasks
-- The first items of a map without a successful task, and without one of this generation; at most
-- `most` of the items below `below`.
SELECT s.item FROM generate_series(0, $below::integer - 1) AS s (item)
WHERE NOT EXISTS (SELECT FROM task t WHERE t.flow_id = $flow_id AND t.flow_node = $node AND coalesce(t.flow_item, -1) = s.item
                  AND (t.state = 'succeeded' OR t.flow_generation = $generation))
ORDER BY s.item LIMIT $most;

-- name: reopen_flows
-- As `reopen_tasks`, for maps of flows; with the last child flow of each item.
SELECT s.item, c.id FROM generate_series(0, $below::integer - 1) AS s (item)
LEFT JOIN LATERAL (
    SELECT f.id, f.status, f.parent_generation FROM flow f
    WHERE f.parent_id = $flow_id AND f.parent_node = $node AND coalesce(f.parent_item, -1) = s.item
    ORDER BY f.parent_generation DESC LIMIT 1
) AS c ON true
WHERE c.id IS NULL OR (c.status <> 'succeeded' AND c.parent_generation <> $generation)
ORDER BY s.item LIMIT $most;

-- name: child
-- The last child flow of a node.
SELECT id FROM flow WHERE parent_id = $1 AND parent_node = $2 AND coalesce(parent_item, -1) = coalesce($3, -1)
ORDER BY parent_generation DESC LIMIT 1;

-- name: events
SELECT k.namespace, k.id, e.data, e.data_ref FROM unnest($1::text[], $2::text[]) AS k (namespace, id)
CROSS JOIN LATERAL (SELECT data, data_ref FROM flow_event WHERE id = k.id AND namespace = k.namespace OFFSET 0) AS e;

-- name: insert_tasks
-- Inserts the tasks of nodes and items, and notifies task-sync of each type. A child that exists
-- already is not inserted again.
WITH inserted AS (
    INSERT INTO task (type, state, stage, priority, content_type, context, context_ref, key, events, callbacks,
                      traceparent, flow_id, flow_root_id, flow_priority, flow_node, flow_generation, flow_item)
    SELECT i.type, 'ready', coalesce(i.stage, t.first_stage), i.priority, i.content_type, i.context, i.context_ref,
           CASE WHEN i.key IS NULL AND t.keyed THEN '' ELSE i.key END, t.events, t.callbacks,
           i.traceparent, i.flow_id, i.root_id, i.flow_priority, i.node, coalesce(i.generation, 0), i.item
    FROM unnest({{$new_flow_task}}) WITH ORDINALITY AS i ({{new_flow_task}}, ordinal)
    JOIN task_type t ON t.name = i.type
    ORDER BY i.ordinal
    ON CONFLICT (flow_id, flow_node, coalesce(flow_item, -1), flow_generation) WHERE flow_id IS NOT NULL DO NOTHING
    RETURNING type
)
SELECT pg_notify('penstock_ready', type) FROM (SELECT DISTINCT type FROM inserted) AS types;

-- name: insert_children
-- Inserts child flows in the given order; returns their ids. One that exists already has no row.
WITH inserted AS (
    INSERT INTO flow (root_id, parent_id, parent_node, parent_generation, parent_item, name, version, unfinished,
                      priority, inputs, inputs_ref)
    SELECT i.root_id, i.parent_id, i.node, coalesce(i.generation, 0), i.item, i.name, i.version, i.unfinished,
           i.priority, i.inputs, i.inputs_ref
    FROM unnest({{$child_flow}}) WITH ORDINALITY AS i ({{child_flow}}, ordinal)
    ORDER BY i.ordinal
    ON CONFLICT (parent_id, parent_node, coalesce(parent_item, -1), parent_generation) WHERE parent_id IS NOT NULL
    DO NOTHING
    RETURNING id
)
SELECT id FROM inserted ORDER BY id;

-- name: adopt
-- Gives child flows the generation in which their node continues them.
UPDATE flow f SET parent_generation = i.generation
FROM unnest($1::bigint[], $2::integer[]) AS i (id, generation) WHERE f.id = ANY ($1::bigint[]) AND f.id = i.id;

-- name: write_flows
-- Writes flows, and deletes the limits and waits of those that have `ended`.
WITH limits AS (
    DELETE FROM flow_limit WHERE flow_id = ANY ($ended::bigint[])
), waits AS (
    DELETE FROM flow_wait WHERE flow_id = ANY ($ended::bigint[])
)
UPDATE flow f
SET status = i.status, generation = coalesce(i.generation, 0), paused = coalesce(i.paused, false), stop = i.stop,
    unfinished = i.unfinished, live = i.live, unsuccessful = coalesce(i.unsuccessful, 0), output = i.output, output_ref = i.output_ref, error = i.error,
    updated_at = now(),
    finished_at = CASE WHEN i.status <> 'running' THEN coalesce(f.finished_at, now()) END
FROM unnest({{$written_flow}}) AS i ({{written_flow}})
WHERE f.id = ANY ($id::bigint[]) AND f.id = i.id;

-- name: write_version
UPDATE flow SET version = $version, versions = $versions::jsonb, inputs = $inputs, inputs_ref = $inputs_ref WHERE id = $id;

-- name: delete_nodes
-- Deletes nodes that another version of the definition does not have, with their limits. The owner
-- could not apply the limit of a node that the version does not have.
WITH limits AS (
    DELETE FROM flow_limit WHERE flow_id = $1 AND node = ANY ($2::text[])
)
DELETE FROM flow_node WHERE flow_id = $1 AND name = ANY ($2::text[]);

-- name: write_nodes
INSERT INTO flow_node AS n
    (flow_id, name, {{flow_node}}, generation, arrivals, recovers, opened, succeeded, unsuccessful, retry, enough,
     started_at, finished_at)
SELECT i.flow_id, i.name, {{i.flow_node}}, coalesce(i.generation, 0), i.arrivals::jsonb, coalesce(i.recovers, false),
       coalesce(i.opened, 0), coalesce(i.succeeded, 0), coalesce(i.unsuccessful, 0), coalesce(i.retry, 0),
       coalesce(i.enough, false),
       CASE WHEN i.status NOT IN ('pending', 'ready', 'skipped', 'blocked') THEN now() END,
       CASE WHEN i.status NOT IN ('pending', 'ready', 'running') THEN now() END
FROM unnest({{$given_flow_node}}) AS i ({{given_flow_node}})
ORDER BY i.flow_id, i.name
ON CONFLICT (flow_id, name) DO UPDATE
SET ({{written_flow_node}}) = ROW ({{excluded.written_flow_node}}),
    started_at = CASE WHEN excluded.started_at IS NULL THEN NULL
                      WHEN n.generation = excluded.generation THEN coalesce(n.started_at, excluded.started_at)
                      ELSE excluded.started_at END,
    finished_at = CASE WHEN excluded.finished_at IS NULL THEN NULL
                       WHEN n.generation = excluded.generation THEN coalesce(n.finished_at, excluded.finished_at)
                       ELSE excluded.finished_at END;

-- name: keep_history
-- Keeps the nodes of a flow as they are before a recovery runs them again ($2 names them).
INSERT INTO flow_node_history
    (flow_id, name, flow_generation, status, generation, chosen_case, timed_out, total, succeeded, unsuccessful,
     reason, started_at, finished_at)
SELECT flow_id, name, $3, status, generation, chosen_case, timed_out, total, succeeded, unsuccessful, reason,
       started_at, finished_at
FROM flow_node WHERE flow_id = $1 AND name = ANY ($2::text[]) AND status NOT IN ('pending', 'ready')
ON CONFLICT DO NOTHING;

-- name: write_limits
INSERT INTO flow_limit ({{flow_limit}})
SELECT {{i.flow_limit}} FROM unnest({{$flow_limit}}) AS i ({{flow_limit}})
ON CONFLICT DO NOTHING;

-- name: write_waits
INSERT INTO flow_wait ({{flow_wait}})
SELECT {{i.flow_wait}} FROM unnest({{$flow_wait}}) AS i ({{flow_wait}})
ON CONFLICT DO NOTHING;

-- name: write_inbox
INSERT INTO flow_inbox ({{flow_inbox}}, detail)
SELECT {{i.flow_inbox}}, i.detail::jsonb
FROM unnest({{$flow_inbox}}, $detail::text[]) WITH ORDINALITY AS i ({{flow_inbox}}, detail, ordinal)
ORDER BY i.ordinal;

-- name: first_failed
-- The node that failed first.
SELECT name, status, reason FROM flow_node
WHERE flow_id = $1 AND status IN ('failed', 'cancelled')
ORDER BY status <> 'failed', finished_at, name LIMIT 1;

-- name: suspend
-- Inserts the flows that waiting tasks wait for, and what lets their owner begin them. Each is of
-- the family of its task, so that its tasks are released in the place of that task. A task without
-- a flow is a family of its own.
WITH inserted AS (
    INSERT INTO flow (root_id, name, version, definition, unfinished, priority, inputs, inputs_ref, traceparent,
                      task_id, task_step, task_stage)
    SELECT coalesce(t.flow_root_id, t.id), t.type, 0, i.definition::json, 1, {{t.release_level}},
           i.inputs, i.inputs_ref, t.traceparent, t.id, t.step, i.stage
    FROM unnest($task_id::bigint[], $stage::text[], $definition::text[], $inputs::bytea[], $inputs_ref::text[])
         AS i (task_id, stage, definition, inputs, inputs_ref)
    JOIN task t ON t.id = i.task_id
    WHERE t.id = ANY ($task_id::bigint[])
    RETURNING root_id, id
), noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind) SELECT root_id, id, 'began' FROM inserted RETURNING shard
)
SELECT pg_notify('penstock_flows', shard::text) FROM (SELECT DISTINCT shard FROM noted) AS shards;

-- name: wake
-- Tasks enter the stage for which they waited. One that was cancelled meanwhile stays so.
WITH woken AS (
    UPDATE task t
    SET state = CASE WHEN t.pausing THEN 'paused' ELSE 'ready' END, pausing = false, stage = i.stage, step = t.step + 1,
        attempt = 0, failures = 0, losses = 0, content_type = 'json', context = i.context, context_ref = i.context_ref,
        updated_at = now()
    FROM unnest($id::bigint[], $step::integer[], $stage::text[], $context::bytea[], $context_ref::text[])
         AS i (id, step, stage, context, context_ref)
    WHERE t.id = ANY ($id::bigint[]) AND t.id = i.id AND t.step = i.step AND t.state || '' = 'waiting'
    RETURNING t.id, t.type, t.state, t.stage, t.step, t.attempt, t.idempotency_key, t.labels, t.callbacks, t.events,
              t.updated_at, t.traceparent,
              CASE WHEN t.flow_id IS NOT NULL
                   THEN jsonb_build_object('id', t.flow_id, 'node', t.flow_node, 'generation', t.flow_generation,
                                           'item', t.flow_item)::text END AS flow
), notified AS (
    SELECT pg_notify('penstock_ready', type) FROM (SELECT DISTINCT type FROM woken WHERE state = 'ready') AS types
)
SELECT w.* FROM woken w, (SELECT count(*) FROM notified) AS n;

-- name: known_types
SELECT name FROM task_type WHERE name = ANY ($1::text[]);
