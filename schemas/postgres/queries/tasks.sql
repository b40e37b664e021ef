-- Statements that submit, read and cancel tasks.

-- name: wait_briefly
-- For the statements of this transaction.
-- Each part of a divided batch may wait, so many parts must not add up.
SELECT set_config('lock_timeout', '2ms', true);

-- name: submit
-- Inserts a batch. A task whose idempotency key exists already is not inserted. Notifies task-sync
-- of each type.
-- A batch that was read from a topic moves the reader's offset from `first_offset` to
-- `next_offset`, and its identity from `identity` to `next_identity`. When they are not
-- `first_offset` and `identity`, another process reads the partition now, and nothing is inserted.
-- Returns one row without an id, then the inserted tasks; no row when the offset was another.
WITH moved AS (
    UPDATE ingested SET next_offset = $next_offset, identity = $next_identity::text
    WHERE topic = $topic AND partition = $partition AND next_offset = $first_offset AND identity IS NOT DISTINCT FROM $identity::text
      -- A lock of another transaction, here or in `inserted`, may last without end. The limit holds for
      -- the rest of the caller's transaction. It is random: of two submissions that wait for each
      -- other, only one ends.
      AND (SELECT set_config('lock_timeout', coalesce(nullif(current_setting('lock_timeout'), '0'), 400 + floor(200 * random()) || 'ms'), true)) IS NOT NULL
    RETURNING 1
), allowed AS (
    SELECT 1 WHERE $topic::text IS NULL UNION ALL SELECT 1 FROM moved
), input AS (
    SELECT *
    FROM unnest({{$submitted}}) WITH ORDINALITY AS i ({{submitted}}, ordinal)
), inserted AS (
    INSERT INTO task (state, stage, callbacks, events, labels, key, {{verbatim_columns}})
    SELECT CASE WHEN i.due_at > now() THEN 'scheduled' ELSE 'ready' END,
           coalesce(i.stage, t.first_stage),
           -- unnest flattens arrays of arrays, so each list of callbacks is a JSON text. In the
           -- column a URL is plain text and an object is JSON text. A task without a list gets the
           -- list of its type.
           CASE WHEN i.callbacks IS NULL THEN t.callbacks
                ELSE ARRAY(SELECT jsonb_array_elements_text(i.callbacks::jsonb)) END,
           coalesce(i.events, t.events),
           i.labels::jsonb,
           CASE WHEN i.key IS NULL AND t.keyed THEN '' ELSE i.key END,
           {{i.verbatim_columns}}
    FROM input i JOIN task_type t ON t.name = i.type
    WHERE EXISTS (SELECT FROM allowed)
      -- Of a transaction that has changed the task of an idempotency key.
      AND (SELECT set_config('lock_timeout', coalesce(nullif(current_setting('lock_timeout'), '0'), 400 + floor(200 * random()) || 'ms'), true)) IS NOT NULL
    ORDER BY i.ordinal
    ON CONFLICT (type, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING id, type, idempotency_key, state
), woken AS (
    SELECT pg_notify(CASE state WHEN 'ready' THEN 'penstock_ready' ELSE 'penstock_due' END, type)
    FROM (SELECT DISTINCT type, state FROM inserted) AS types
)
SELECT NULL AS id, NULL AS type, NULL AS idempotency_key FROM allowed
UNION ALL
SELECT id, type, idempotency_key FROM inserted, (SELECT count(*) FROM woken) AS w
ORDER BY id NULLS FIRST;

-- name: by_idempotency_keys
-- A probe for each key: a join would read all tasks that have one.
SELECT t.* FROM unnest($1::text[], $2::text[]) AS k (type, key)
CROSS JOIN LATERAL (
    SELECT id, type, idempotency_key, context_digest FROM task WHERE type = k.type AND idempotency_key = k.key OFFSET 0
) t;

-- name: get
SELECT t.* FROM task t WHERE t.id = $1;

-- name: by_ids
SELECT t.* FROM task t WHERE t.id = ANY ($1::bigint[]) ORDER BY t.id;

-- name: types
-- Reads the types of tasks whose results refer to objects.
SELECT id, type FROM task WHERE id = ANY ($1::bigint[]);

-- name: attempts
SELECT step, attempt, stage, outcome, worker, error, queued_at, started_at, finished_at, input_type, input, input_ref
FROM attempt WHERE task_id = $1 ORDER BY step, attempt;

-- name: callbacks_of_task
SELECT id, target, state, attempt, error, due_at, created_at, finished_at
FROM callback WHERE task_id = $1 ORDER BY created_at, id;

-- name: walk
-- The last id, the number and the latest creation of the next `limit` ($2) tasks behind an id ($1),
-- newest first.
SELECT min(id) AS last, count(*) AS tasks, max(created_at) AS newest FROM (
    SELECT id, CASE WHEN $3::boolean THEN created_at END AS created_at FROM task WHERE $1::bigint IS NULL OR id < $1 ORDER BY id DESC LIMIT $2
) w;

-- name: list
-- Newest first; `before` is the last id of the page before, `first_id` the smallest id to
-- search. `error` is a text in the error.
SELECT t.* FROM task t
WHERE ($type::text IS NULL OR t.type = $type)
  AND ($states::text[] IS NULL OR t.state = ANY ($states))
  AND ($stage::text IS NULL OR t.stage = $stage)
  AND ($labels::jsonb IS NULL OR t.labels @> $labels)
  AND ($idempotency_key::text IS NULL OR t.idempotency_key = $idempotency_key)
  -- The index of idempotency keys begins with the type.
  AND ($idempotency_key::text IS NULL OR $type::text IS NOT NULL OR t.type = ANY (ARRAY(SELECT name FROM task_type)))
  AND ($before::bigint IS NULL OR t.id < $before)
  AND ($key::text IS NULL OR t.key = $key)
  AND ($visible::text[] IS NULL OR t.type = ANY ($visible))
  AND ($first_id::bigint IS NULL OR t.id >= $first_id)
  AND ($flow_id::bigint IS NULL OR t.flow_id = $flow_id)
  AND ($created_since::timestamptz IS NULL OR t.created_at >= $created_since)
  -- Without the traceback. JSON may have a NUL, which PostgreSQL's text cannot have.
  AND ($error::text IS NULL OR t.error IS NOT NULL AND strpos(
           lower(replace(t.error, '\u0000', '\ufffd')::json ->> 'kind') || ': '
           || lower(replace(t.error, '\u0000', '\ufffd')::json ->> 'message'), lower($error)) > 0)
ORDER BY t.id DESC
LIMIT $limit;

-- name: states_of
-- The number of tasks by state.
SELECT state, count(*) AS tasks FROM task WHERE id = ANY ($1::bigint[]) GROUP BY state;

-- name: ends_of
-- Those of the tasks that are not in history; `ended_at` is null until the end.
SELECT id, CASE WHEN state IN ('succeeded', 'failed', 'cancelled', 'quarantined')
           THEN coalesce(finished_at, updated_at) END AS ended_at
FROM task WHERE id = ANY ($1::bigint[]);

-- name: existing
-- The ids that belong to a task.
SELECT id FROM task WHERE id = ANY ($1::bigint[]);

-- name: of_types
-- The ids that belong to a task of these types.
SELECT id FROM task WHERE id = ANY ($1::bigint[]) AND type = ANY ($2::text[]);

-- name: cancel
-- Returns the tasks that this call cancelled, without those that were final already.
WITH locked AS MATERIALIZED (
    SELECT id FROM task WHERE id = ANY ($1::bigint[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE task
SET state = 'cancelled', updated_at = now(), finished_at = now(), due_at = NULL, lease_partition = NULL,
    lease_ms = NULL,
    max_attempts = NULL,
    pausing = false
WHERE id = ANY (ARRAY(SELECT id FROM locked))
  AND state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
RETURNING id, type, state, stage, step, attempt, idempotency_key, labels, callbacks, events, updated_at, traceparent,
          CASE WHEN flow_id IS NOT NULL
               THEN json_build_object('id', flow_id, 'node', flow_node, 'generation', flow_generation,
                                      'item', flow_item)::text END AS flow;
