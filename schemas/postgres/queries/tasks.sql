-- Submitting, reading and cancelling tasks.

-- name: submit
-- Inserts a batch; a repeated idempotency key inserts nothing. Wakes task-sync for each type concerned.
-- A batch read from a topic ($12, partition $13) takes the reader's offset from $14 to $15 with it, or inserts nothing:
-- a reader whose partition was given away changes nothing.
-- Returns the inserted ones behind a row without id, which is not there when the offset was not where it should be.
WITH moved AS (
    UPDATE ingested SET next_offset = $15
    WHERE topic = $12 AND partition = $13 AND next_offset = $14
    RETURNING 1
), allowed AS (
    SELECT 1 WHERE $12::text IS NULL UNION ALL SELECT 1 FROM moved
), input AS (
    SELECT *
    FROM unnest($1::text[], $2::text[], $3::smallint[], $4::text[], $5::bytea[], $6::text[], $7::text[],
                $8::timestamptz[], $9::text[], $10::text[], $11::text[], $16::text[], $17::text[])
         WITH ORDINALITY AS i (type, stage, priority, content_type, context, context_ref, idempotency_key,
                               due_at, callbacks, events, labels, key, traceparent, ordinal)
), inserted AS (
    INSERT INTO task (type, state, stage, priority, content_type, context, context_ref, idempotency_key,
                      due_at, callbacks, events, labels, key, traceparent)
    SELECT i.type, CASE WHEN i.due_at > now() THEN 'scheduled' ELSE 'ready' END,
           coalesce(i.stage, t.first_stage), i.priority, i.content_type, i.context, i.context_ref,
           i.idempotency_key, i.due_at,
           -- unnest flattens arrays of arrays, so the lists travel as JSON; of what they hold, strings become text as
           -- they are and objects their JSON. NULL is "nothing said", which the type answers, here and for good.
           CASE WHEN i.callbacks IS NULL THEN t.callbacks
                ELSE ARRAY(SELECT jsonb_array_elements_text(i.callbacks::jsonb)) END,
           coalesce(i.events, t.events), i.labels::jsonb,
           CASE WHEN i.key IS NULL AND t.keyed THEN '' ELSE i.key END, i.traceparent
    FROM input i JOIN task_type t ON t.name = i.type
    WHERE EXISTS (SELECT FROM allowed)
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
SELECT t.id, t.type, t.idempotency_key
FROM task t JOIN unnest($1::text[], $2::text[]) AS k (type, key) ON t.type = k.type AND t.idempotency_key = k.key;

-- name: get
SELECT t.* FROM task t WHERE t.id = $1;

-- name: some
SELECT t.* FROM task t WHERE t.id = ANY ($1::bigint[]) ORDER BY t.id;

-- name: attempts
SELECT step, attempt, stage, outcome, worker, error, started_at, finished_at
FROM attempt WHERE task_id = $1 ORDER BY step, attempt;

-- name: callbacks_of_task
SELECT id, target, state, attempt, error, due_at, created_at, finished_at
FROM callback WHERE task_id = $1 ORDER BY created_at, id;

-- name: list
-- Newest first; `before` is the last id of the page before.
SELECT t.* FROM task t
WHERE ($1::text IS NULL OR t.type = $1)
  AND ($2::text[] IS NULL OR t.state = ANY ($2))
  AND ($3::text IS NULL OR t.stage = $3)
  AND ($4::jsonb IS NULL OR t.labels @> $4)
  AND ($5::text IS NULL OR t.idempotency_key = $5)
  AND ($6::bigint IS NULL OR t.id < $6)
  AND ($8::text IS NULL OR t.key = $8)
  AND ($9::text[] IS NULL OR t.type = ANY ($9))
ORDER BY t.id DESC
LIMIT $7;

-- name: states_of
-- How many of the tasks are in which state.
SELECT state, count(*) AS tasks FROM task WHERE id = ANY ($1::bigint[]) GROUP BY state;

-- name: known
-- Which of some ids are tasks'.
SELECT id FROM task WHERE id = ANY ($1::bigint[]);

-- name: own
-- Which of some ids are of tasks of these types.
SELECT id FROM task WHERE id = ANY ($1::bigint[]) AND type = ANY ($2::text[]);

-- name: cancel
-- Returns the tasks that were cancelled by this call; those already final are not. Where their types have limits, that
-- makes room.
WITH cancelled AS (
    UPDATE task
    SET state = 'cancelled', updated_at = now(), finished_at = now(), due_at = NULL, lease_partition = NULL,
        lease_ms = NULL,
        max_attempts = NULL,
        pausing = false
    WHERE id = ANY ($1::bigint[])
      AND state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
    RETURNING id, type, state, stage, step, attempt, priority, idempotency_key, labels, callbacks, events, updated_at,
              traceparent, tracked
), woken AS (
    SELECT pg_notify('penstock_ready', type) FROM (SELECT DISTINCT type FROM cancelled WHERE tracked) AS types
)
SELECT id, type, state, stage, step, attempt, priority, idempotency_key, labels, callbacks, events, updated_at, traceparent
FROM cancelled, (SELECT count(*) FROM woken) AS w;
