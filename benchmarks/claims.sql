-- name: begin
TRUNCATE penstock.task RESTART IDENTITY;

-- name: fill
-- Inserts ready tasks of one type, of all priorities except the first $3, and notifies task-sync.
WITH filled AS (
    INSERT INTO penstock.task (type, state, stage, priority, content_type, context)
    SELECT $1, 'ready', 'one', $3::integer + n % (5 - $3::integer), 'json', convert_to('{"pad": "' || repeat('x', 180) || '"}', 'UTF8')
    FROM generate_series(1, $2::integer) AS i (n)
    RETURNING id
)
SELECT count(*), pg_notify('penstock_ready', $1) FROM filled;

-- name: claimed
SELECT count(*) FROM penstock.task WHERE state <> 'ready';

-- name: lock
-- Every claim waits for the one before it, since all lock the first row.
UPDATE penstock.task SET state = 'running', worker = $2, updated_at = now()
WHERE id = ANY (ARRAY(SELECT id FROM penstock.task WHERE type = $1 AND state = 'ready' ORDER BY priority, id LIMIT $3 FOR UPDATE))
  AND state || '' = 'ready'
RETURNING id, step, stage, attempt, context;

-- name: skip
UPDATE penstock.task SET state = 'running', worker = $2, updated_at = now()
WHERE id = ANY (ARRAY(SELECT id FROM penstock.task WHERE type = $1 AND state = 'ready' ORDER BY priority, id LIMIT $3
                      FOR UPDATE SKIP LOCKED))
RETURNING id, step, stage, attempt, context;

-- name: look
SELECT id FROM penstock.task WHERE type = $1 AND state = 'ready' ORDER BY priority, id LIMIT $2;

-- name: swap
-- By primary key, regardless of statistics.
UPDATE penstock.task SET state = 'running', worker = $2, updated_at = now()
WHERE id = ANY ($1::bigint[]) AND state || '' = 'ready'
RETURNING id, step, stage, attempt, context;
