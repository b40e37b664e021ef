-- Operations on many tasks, a batch a transaction. `behind`, `changed` and the tasks are written together.

-- name: begin
-- Under an id that is there already nothing is written.
INSERT INTO audit (id, verb, asked_by, filter, priority, rate, upto, actor, namespaces)
VALUES ($1, $2, $3, $4::jsonb, $5, $6, coalesce((SELECT max(id) FROM task), 0), $7, $8)
ON CONFLICT (id) DO NOTHING
RETURNING *;

-- name: get
SELECT * FROM audit WHERE id = $1;

-- name: list
-- Latest first; `before` is the last seq of the page before. $5 are the namespaces that whoever asks may see; NULL is all.
SELECT * FROM audit
WHERE ($1::text IS NULL OR verb = $1) AND ($2::text IS NULL OR state = $2) AND ($3::bigint IS NULL OR seq < $3)
  AND ($5::text[] IS NULL OR namespaces <@ $5)
ORDER BY seq DESC LIMIT $4;

-- name: running
-- What is to be gone on with, but for what is known ($2).
SELECT id FROM audit WHERE state = 'running' AND id <> ALL ($2::text[]) ORDER BY seq LIMIT $1;

-- name: stop
UPDATE audit SET state = 'stopped', stopped_by = $2, finished_at = now() WHERE id = $1 AND state = 'running';

-- name: fail
UPDATE audit SET state = 'failed', error = $2, finished_at = now() WHERE id = $1 AND state = 'running';

-- name: take
-- The right to go on with it until the end of the transaction; no row when it has ended or somebody else is at it.
SELECT *, extract(epoch FROM next_at - now())::double precision AS wait_s
FROM audit WHERE id = $1 AND state = 'running' FOR UPDATE SKIP LOCKED;

-- name: go_on
-- A rate that was not reached for a moment is made good for; that of more than a second is not, so that whoever goes on
-- after a crash does not burst.
UPDATE audit
SET behind = $2, changed = changed + $3, found_in = $4::jsonb,
    next_at = CASE WHEN rate IS NULL THEN now()
                   ELSE greatest(next_at, now() - interval '1 second') + make_interval(secs => $3 / rate) END,
    state = CASE WHEN $5::boolean THEN 'done' ELSE state END,
    finished_at = CASE WHEN $5::boolean THEN now() END
WHERE id = $1
RETURNING extract(epoch FROM next_at - clock_timestamp())::double precision AS wait_s;

-- name: look
-- Of the first `looked` ($3) tasks behind $1 and up to $2 the first `limit` ($4) that match, in the order of their ids,
-- behind a row that tells how far it has looked and at how many. Which tasks are walked over is $5: those named by `ids`,
-- the `failed` of a type (by index), or `all`.
WITH looked AS (
    (SELECT id, type, state, stage, labels, priority, created_at, finished_at, error, pausing, key FROM task
     WHERE $5::text = 'ids' AND id = ANY ($6::bigint[]) AND id > $1 AND id <= $2 ORDER BY id LIMIT $3)
    UNION ALL
    (SELECT id, type, state, stage, labels, priority, created_at, finished_at, error, pausing, key FROM task
     WHERE $5::text = 'failed' AND type = $9 AND state IN ('failed', 'quarantined') AND id > $1 AND id <= $2
     ORDER BY id LIMIT $3)
    UNION ALL
    (SELECT id, type, state, stage, labels, priority, created_at, finished_at, error, pausing, key FROM task
     WHERE $5::text = 'all' AND id > $1 AND id <= $2 ORDER BY id LIMIT $3)
), matching AS (
    SELECT id, state FROM looked t
    WHERE t.state = ANY ($7::text[])
      AND CASE $8::text
          WHEN 'pause' THEN NOT (t.state = 'running' AND t.pausing)
          WHEN 'resume' THEN t.state = 'paused' OR t.pausing
          WHEN 'reprioritise' THEN t.priority <> $18::smallint
          ELSE true END
      AND ($9::text IS NULL OR t.type = $9)
      AND ($10::text IS NULL OR t.stage = $10)
      AND ($19::text IS NULL OR t.key = $19)
      AND ($11::jsonb IS NULL OR t.labels @> $11)
      AND ($12::smallint[] IS NULL OR t.priority = ANY ($12))
      AND ($13::timestamptz IS NULL OR t.created_at >= $13)
      AND ($14::timestamptz IS NULL OR t.created_at < $14)
      AND ($15::timestamptz IS NULL OR t.finished_at >= $15)
      AND ($16::timestamptz IS NULL OR t.finished_at < $16)
      -- Not in the traceback. A NUL is no text of PostgreSQL's, but of JSON.
      AND ($17::text IS NULL OR t.error IS NOT NULL AND strpos(
               lower(replace(t.error, '\u0000', '\ufffd')::json ->> 'kind') || ': '
               || lower(replace(t.error, '\u0000', '\ufffd')::json ->> 'message'), lower($17)) > 0)
    ORDER BY id LIMIT $4
)
SELECT NULL AS id, NULL AS state, max(id) AS reached, count(*) AS looked FROM looked
UNION ALL
SELECT id, state, NULL, NULL FROM matching
ORDER BY id NULLS FIRST;

-- name: lock
-- Those that nobody else holds: whoever waits for no row can be in no deadlock.
SELECT id FROM task WHERE id = ANY ($1::bigint[]) ORDER BY id FOR UPDATE SKIP LOCKED;

-- name: lock_one
SELECT id FROM task WHERE id = $1 FOR UPDATE;

-- name: pause
-- What waits in PostgreSQL is paused at once. So is what is queued: its record is on Kafka, so the fence moves on and leaves
-- it an attempt that is over; where its type has limits, that makes room. What runs ends its stage first (see `advance.advance`).
WITH paused AS (
    UPDATE task
    SET state = CASE state WHEN 'running' THEN 'running' ELSE 'paused' END,
        pausing = state = 'running',
        attempt = attempt + CASE state WHEN 'queued' THEN 1 ELSE 0 END,
        updated_at = now()
    WHERE id = ANY ($1::bigint[]) AND state IN ('scheduled', 'ready', 'queued', 'running')
    RETURNING id, step, attempt, type, state, tracked
), woken AS (
    SELECT pg_notify('penstock_ready', type)
    FROM (SELECT DISTINCT type FROM paused WHERE tracked AND state = 'paused') AS types
)
SELECT id, step, attempt FROM paused, (SELECT count(*) FROM woken) AS w;

-- name: resume
-- Back to where it was: to its delay, if that is not over yet. What still runs goes on as if nothing had been said; so does what
-- has the mark elsewhere, left there by a process of a version that did not know of it.
WITH resumed AS (
    UPDATE task
    SET state = CASE WHEN state <> 'paused' THEN state WHEN due_at > now() THEN 'scheduled' ELSE 'ready' END,
        pausing = false,
        updated_at = CASE state WHEN 'queued' THEN updated_at ELSE now() END
    WHERE id = ANY ($1::bigint[])
      AND (state = 'paused' OR pausing AND state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined'))
    RETURNING id, type, state
), woken AS (
    SELECT pg_notify(CASE state WHEN 'ready' THEN 'penstock_ready' ELSE 'penstock_due' END, type)
    FROM (SELECT DISTINCT type, state FROM resumed WHERE state IN ('ready', 'scheduled')) AS types
)
SELECT id FROM resumed, (SELECT count(*) FROM woken) AS w;

-- name: reprioritise
UPDATE task SET priority = $2, updated_at = CASE state WHEN 'queued' THEN updated_at ELSE now() END
WHERE id = ANY ($1::bigint[]) AND state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
RETURNING id;

-- name: recover
-- The stage it ended in is tried anew, with all its tries, as another attempt. What has begun counts as such (see
-- `limits.heads`), whatever its type was like when it ended.
WITH recovered AS (
    UPDATE task
    SET state = 'ready', attempt = attempt + 1, failures = 0, losses = 0, error = NULL, finished_at = NULL, due_at = NULL,
        updated_at = now(), tracked = tracked OR step > 0
    WHERE id = ANY ($1::bigint[]) AND state IN ('failed', 'quarantined')
    RETURNING id, type
), woken AS (
    SELECT pg_notify('penstock_ready', type) FROM (SELECT DISTINCT type FROM recovered) AS types
)
SELECT id FROM recovered, (SELECT count(*) FROM woken) AS w;
