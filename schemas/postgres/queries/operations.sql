-- Bulk operations on tasks and flows. Each batch is a transaction, which writes the tasks or the
-- commands to flows, `behind` and `changed`.

-- name: create
-- No row when the id exists.
INSERT INTO audit (id, verb, asked_by, filter, priority, rate, actor, namespaces, subject, version, upto)
VALUES ($id, $verb, $asked_by, $filter::jsonb, $priority, $rate, $actor, $namespaces, $subject, $version,
        CASE $subject WHEN 'flow' THEN coalesce((SELECT max(id) FROM flow), 0)
                ELSE coalesce((SELECT max(id) FROM task), 0) END)
ON CONFLICT (id) DO NOTHING
RETURNING *;

-- name: get
SELECT * FROM audit WHERE id = $1;

-- name: list
-- The latest first; `before` is the last seq of the page before. `visible` are the visible
-- namespaces; NULL is all.
SELECT * FROM audit
WHERE ($verb::text IS NULL OR verb = $verb)
  AND ($state::text IS NULL OR state = $state) AND ($before::bigint IS NULL OR seq < $before)
  AND ($visible::text[] IS NULL OR namespaces <@ $visible)
ORDER BY seq DESC LIMIT $limit;

-- name: running
-- Running operations, without those that the caller runs ($2).
SELECT id FROM audit WHERE state = 'running' AND id <> ALL ($2::text[]) ORDER BY seq LIMIT $1;

-- name: stop
UPDATE audit SET state = 'stopped', stopped_by = $2, finished_at = now()
WHERE id = $1 AND state = 'running';

-- name: fail
UPDATE audit SET state = 'failed', error = $2, finished_at = now()
WHERE id = $1 AND state = 'running';

-- name: claim
-- Locks a running operation until the end of the transaction. No row when it has ended, or when
-- another process holds it.
SELECT *, extract(epoch FROM next_at - now())::double precision AS wait_s
FROM audit WHERE id = $1 AND state = 'running' FOR UPDATE SKIP LOCKED;

-- name: record_batch
-- An operation with a rate catches up on at most one second, so that it does not burst after a
-- crash.
UPDATE audit
SET behind = $behind, changed = changed + $changed, found_in = $found_in::jsonb,
    next_at = CASE WHEN rate IS NULL THEN now()
                   ELSE greatest(next_at, now() - interval '1 second') + make_interval(secs => $changed / rate) END,
    state = CASE WHEN $ended::boolean THEN 'done' ELSE state END,
    finished_at = CASE WHEN $ended::boolean THEN now() END
WHERE id = $id
RETURNING extract(epoch FROM next_at - clock_timestamp())::double precision AS wait_s;

-- name: find_matching
-- Examines the first `rows` tasks after `after_id` and up to `last_id`, and returns the first
-- `limit` that match, in the order of ids. The first row has the last id examined and the number of
-- tasks examined. `source` selects the tasks: `ids` (those of that parameter), `failed` (of a type,
-- by an index) or `all`.
WITH examined AS (
    (SELECT id, type, state, stage, labels, priority, created_at, finished_at, error, pausing, key, flow_id FROM task
     WHERE $source::text = 'ids' AND id = ANY ($ids::bigint[]) AND id > $after_id AND id <= $last_id ORDER BY id LIMIT $rows)
    UNION ALL
    (SELECT id, type, state, stage, labels, priority, created_at, finished_at, error, pausing, key, flow_id FROM task
     WHERE $source::text = 'failed' AND type = $type AND state IN ('failed', 'quarantined') AND id > $after_id AND id <= $last_id
     ORDER BY id LIMIT $rows)
    UNION ALL
    (SELECT id, type, state, stage, labels, priority, created_at, finished_at, error, pausing, key, flow_id FROM task
     WHERE $source::text = 'all' AND id > $after_id AND id <= $last_id ORDER BY id LIMIT $rows)
), matching AS (
    SELECT id, state FROM examined t
    WHERE t.state = ANY ($states::text[])
      AND CASE $verb::text
          WHEN 'pause' THEN NOT (t.state = 'running' AND t.pausing)
          WHEN 'resume' THEN t.state = 'paused' OR t.pausing
          WHEN 'reprioritise' THEN t.priority <> $priority::smallint
          -- A flow counts the end of its task, so it is recovered with the flow.
          WHEN 'recover' THEN t.flow_id IS NULL
          ELSE true END
      AND ($type::text IS NULL OR t.type = $type)
      AND ($stage::text IS NULL OR t.stage = $stage)
      AND ($key::text IS NULL OR t.key = $key)
      AND ($labels::jsonb IS NULL OR t.labels @> $labels)
      AND ($priorities::smallint[] IS NULL OR t.priority = ANY ($priorities))
      AND ($created_since::timestamptz IS NULL OR t.created_at >= $created_since)
      AND ($created_until::timestamptz IS NULL OR t.created_at < $created_until)
      AND ($finished_since::timestamptz IS NULL OR t.finished_at >= $finished_since)
      AND ($finished_until::timestamptz IS NULL OR t.finished_at < $finished_until)
      -- Without the traceback. JSON may have a NUL, which PostgreSQL's text cannot have.
      AND ($error::text IS NULL OR t.error IS NOT NULL AND strpos(
               lower(replace(t.error, '\u0000', '\ufffd')::json ->> 'kind') || ': '
               || lower(replace(t.error, '\u0000', '\ufffd')::json ->> 'message'), lower($error)) > 0)
    ORDER BY id LIMIT $limit
)
SELECT NULL AS id, NULL AS state, max(id) AS reached, count(*) AS examined FROM examined
UNION ALL
SELECT id, state, NULL, NULL FROM matching
ORDER BY id NULLS FIRST;

-- name: of_flows
-- The first task, out of these, that belongs to a flow.
SELECT id, flow_id FROM task WHERE id = ANY ($1::bigint[]) AND flow_id IS NOT NULL ORDER BY id LIMIT 1;

-- name: find_flows
-- As `find_matching`, for flows. `source` selects them: `ids`, `running` (of a definition, by an
-- index), `schedule` (by an index) or `all`. Without ids only flows without a parent, for
-- which no task waits. The end of a child flow is counted by its parent, so it is not recovered
-- alone. `visible` are the visible namespaces; NULL is all.
WITH examined AS (
    (SELECT f.* FROM flow f WHERE $source::text = 'ids' AND f.id = ANY ($ids::bigint[]) AND f.id > $after_id AND f.id <= $last_id
     ORDER BY f.id LIMIT $rows)
    UNION ALL
    (SELECT f.* FROM flow f WHERE $source::text = 'running' AND f.name = $name AND f.status = 'running' AND f.id > $after_id AND f.id <= $last_id
     ORDER BY f.id LIMIT $rows)
    UNION ALL
    (SELECT f.* FROM flow f WHERE $source::text = 'schedule' AND f.schedule = $schedule::text AND f.id > $after_id AND f.id <= $last_id
     ORDER BY f.id LIMIT $rows)
    UNION ALL
    (SELECT f.* FROM flow f WHERE $source::text = 'all' AND f.id > $after_id AND f.id <= $last_id ORDER BY f.id LIMIT $rows)
), matching AS (
    SELECT id, status FROM examined f
    WHERE f.status = ANY ($statuses::text[])
      AND ($source::text = 'ids' OR f.parent_id IS NULL)
      AND (f.task_id IS NULL OR $source::text = 'ids' AND $verb::text NOT IN ('recover', 'rerun'))
      AND CASE $verb::text WHEN 'pause' THEN NOT f.paused
                        WHEN 'resume' THEN f.paused
                        WHEN 'cancel' THEN f.stop IS DISTINCT FROM 'cancel'
                        WHEN 'recover' THEN f.parent_id IS NULL
                        ELSE true END
      AND ($visible::text[] IS NULL
           OR CASE WHEN strpos(f.name, '--') <= 1 THEN 'default' ELSE split_part(f.name, '--', 1) END = ANY ($visible))
      AND ($name::text IS NULL OR f.name = $name)
      AND ($version::integer IS NULL OR f.version = $version)
      AND ($labels::jsonb IS NULL OR f.labels @> $labels)
      AND ($created_since::timestamptz IS NULL OR f.created_at >= $created_since)
      AND ($created_until::timestamptz IS NULL OR f.created_at < $created_until)
      AND ($finished_since::timestamptz IS NULL OR f.finished_at >= $finished_since)
      AND ($finished_until::timestamptz IS NULL OR f.finished_at < $finished_until)
      AND ($error::text IS NULL OR strpos(lower(f.error), lower($error)) > 0)
      AND ($schedule::text IS NULL OR f.schedule = $schedule)
    ORDER BY id LIMIT $limit
)
SELECT NULL AS id, NULL AS state, max(id) AS reached, count(*) AS examined FROM examined
UNION ALL
SELECT id, status, NULL, NULL FROM matching
ORDER BY id NULLS FIRST;

-- name: lock
-- Skips rows that other transactions hold: a statement that never waits cannot deadlock.
SELECT id FROM task WHERE id = ANY ($1::bigint[]) ORDER BY id FOR UPDATE SKIP LOCKED;

-- name: lock_one
SELECT id FROM task WHERE id = $1 FOR UPDATE;

-- name: pause
-- Pauses all tasks but running ones at once. The record of a queued task is on Kafka, so the task
-- gets a new attempt, and the fence rejects the old one; that frees capacity of a type with limits.
-- A running task pauses at the end of its stage (see `advance.advance`).
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
-- Restores the state before the pause: `scheduled` when the delay is not over, else `ready`. A
-- running task that was to pause goes on.
WITH resumed AS (
    UPDATE task
    SET state = CASE WHEN state <> 'paused' THEN state WHEN due_at > now() THEN 'scheduled' ELSE 'ready' END,
        pausing = false, updated_at = now()
    WHERE id = ANY ($1::bigint[])
      AND (state = 'paused' OR pausing AND state = 'running')
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
-- Starts the last stage again, as a new attempt without earlier failures and losses. A task with a
-- completed stage is `tracked`, so that it counts as started (see `limits.heads`).
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
