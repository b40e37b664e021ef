-- The outbox: events and callbacks that are written in the transaction of the transition they
-- report.

-- name: enqueue_events
INSERT INTO outbox (keys, records) VALUES ($1::bytea[], $2::bytea[]) RETURNING id;

-- name: enqueue_callbacks
-- `due_at` is when the record is written again unless the callback's outcome is recorded by then. A
-- column that would hold only defaults is given as NULL. `seq` counts in the given order.
INSERT INTO callback (id, namespace, target, task_id, body, due_at, headers, ordered)
SELECT i.id, coalesce(i.namespace, 'default'), i.target, i.task_id, i.body, now() + make_interval(secs => $due_in), i.headers::jsonb,
       coalesce(i.ordered, false)
FROM unnest($id::text[], $target::text[], $task_id::bigint[], $body::bytea[], $headers::text[], $ordered::boolean[], $namespace::text[])
     AS i (id, target, task_id, body, headers, ordered, namespace)
ON CONFLICT (id) DO NOTHING;

-- name: delete_published
-- The sweeper publishes rows again that another transaction locks now.
DELETE FROM outbox
WHERE id = ANY (ARRAY(SELECT id FROM outbox WHERE id = ANY ($1::bigint[]) ORDER BY id FOR UPDATE SKIP LOCKED));

-- name: unpublished
-- Batches older than $1 seconds: their writer has died, or Kafka was away.
SELECT id, keys, records FROM outbox
WHERE refused IS NULL AND created_at < now() - make_interval(secs => $1) ORDER BY id LIMIT $2;

-- name: refused
-- Batches behind an id whose events Kafka has refused.
SELECT id, keys, records FROM outbox WHERE refused IS NOT NULL AND id > $1 ORDER BY id LIMIT $2;

-- name: park
-- Keeps the events of a batch that Kafka refuses, with its reason.
UPDATE outbox SET keys = $keys::bytea[], records = $records::bytea[], refused = $refused WHERE id = $id;

-- name: sweep
-- The right to sweep, for one process at a time.
SELECT pg_try_advisory_lock(hashtextextended('penstock.sweep.' || $1, 0)) AS owned;
