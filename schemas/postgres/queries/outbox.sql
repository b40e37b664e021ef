-- What is owed to Kafka: events and callbacks, written with the transitions they report.

-- name: owe_events
INSERT INTO outbox (keys, records) VALUES ($1::bytea[], $2::bytea[]) RETURNING id;

-- name: owe_callbacks
-- `due_at` is when the record is written again unless its fate is known by then. Columns that would hold nothing but
-- defaults are given as NULL; `seq` counts in the order given.
INSERT INTO callback (id, namespace, target, task_id, body, due_at, headers, ordered)
SELECT i.id, coalesce(i.namespace, 'default'), i.target, i.task_id, i.body, now() + make_interval(secs => $5), i.headers::jsonb,
       coalesce(i.ordered, false)
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bytea[], $6::text[], $7::boolean[], $8::text[])
     AS i (id, target, task_id, body, headers, ordered, namespace)
ON CONFLICT (id) DO NOTHING;

-- name: paid_events
DELETE FROM outbox WHERE id = ANY ($1::bigint[]);

-- name: owed_events
-- Batches older than `age` seconds: their writer has died or Kafka was away.
SELECT id, keys, records FROM outbox
WHERE created_at < now() - make_interval(secs => $1) ORDER BY id LIMIT $2;

-- name: sweep
-- The right to sweep, for one process at a time.
SELECT pg_try_advisory_lock(hashtextextended('penstock.sweep.' || $1, 0)) AS owned;
