-- Task-sync: the release of ready tasks.

-- name: release
-- Releases the first `limit` ready tasks of a type and writes their batch note; deletes the notes
-- of `confirmed` batches, whose records are on Kafka. With `tracked` the tasks count for the type's
-- limits. Leaves out the `excluded` tasks. Tasks among the first that another transaction
-- locks are not released; a last row has their ids and no task. Tasks of a flow take the place of
-- its root (see `penstock.core.release_order`), and their records its priority. Releases nothing if
-- the type has another version than the one the owner has loaded: a pause or a new limit holds
-- for every task that is submitted after it.
WITH deleted AS (
    DELETE FROM release WHERE id = ANY ($confirmed::bigint[])
), found AS MATERIALIZED (
    SELECT t.id FROM task t WHERE t.type = $type AND t.state = 'ready' AND t.id NOT IN (SELECT unnest($excluded::bigint[]))
      AND ($version::text IS NULL OR EXISTS (SELECT FROM task_type y WHERE y.name = $type AND y.xmin = $version::text::xid))
    ORDER BY t.type, {{t.release_order}} LIMIT $limit
), chosen AS MATERIALIZED (
    SELECT id FROM task WHERE id = ANY (ARRAY(SELECT id FROM found)) AND state || '' = 'ready'
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), released AS (
    -- Joins by primary key with any statistics: the state is compared as an expression, so that
    -- the planner uses no index on it. The state is compared again, because a task may be cancelled
    -- meanwhile. `updated_at` is the moment of queueing, by which task-sync proves that a record is
    -- lost.
    UPDATE task t SET state = 'queued', due_at = NULL, queued_at = now(), updated_at = now(), tracked = t.tracked OR $tracked::boolean
    WHERE t.id = ANY (ARRAY(SELECT id FROM chosen)) AND t.state || '' = 'ready'
    RETURNING {{t.release_keys}}, t.step, t.stage, t.attempt, t.failures + t.losses AS tries, t.losses,
              t.content_type, t.context, t.context_ref, t.traceparent, t.tracked
), noted AS (
    INSERT INTO release (type, task_ids)
    SELECT $type, array_agg(id) FROM released HAVING count(*) > 0
    RETURNING id
)
SELECT r.*, (SELECT id FROM noted) AS release_id, NULL::bigint[] AS locked FROM released r
UNION ALL
SELECT {{release_nulls}}, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, array_agg(id)
FROM found WHERE id NOT IN (SELECT id FROM chosen) HAVING count(*) > 0
ORDER BY {{release_names}};

-- name: delete_notes
-- Kafka has every record of these batches.
DELETE FROM release WHERE id = ANY ($1::bigint[]);

-- name: unconfirmed
-- Batches that an earlier owner may not have written to Kafka, with their tasks that are still
-- queued.
SELECT r.id AS release_id, t.id, {{t.release_level}} AS level, t.step, t.stage, t.attempt,
       t.failures + t.losses AS tries, t.losses, t.content_type, t.context, t.context_ref, t.traceparent
FROM release r
-- Joins by primary key: the state is an expression, so that the planner uses no index on it.
LEFT JOIN task t ON t.id = ANY (r.task_ids) AND t.state || '' = 'queued'
WHERE r.type = $1
ORDER BY r.id, {{t.release_order}};

-- name: with_ready_tasks
-- The given types that have ready tasks. Not EXISTS, which is a join: sessions hash their joins,
-- and would read all ready tasks.
SELECT i.type FROM unnest($1::text[]) AS i (type)
WHERE (SELECT true FROM task t WHERE t.type = i.type AND t.state = 'ready' ORDER BY t.type, {{t.release_order}} LIMIT 1);

-- name: first_ready
-- The priority of the first ready task of a type, in the order of `release`. None of a type that is
-- released by concurrency key: the key of its first task may be paused or at its limit.
SELECT {{t.release_level}} AS level FROM task t WHERE t.type = $1 AND t.state = 'ready'
  AND NOT EXISTS (SELECT FROM task_type y WHERE y.name = $1 AND y.keyed)
ORDER BY t.type, {{t.release_order}} LIMIT 1;

-- name: in_flight
-- Attempts of the given tasks that are queued or running.
SELECT id, step, attempt FROM task WHERE id = ANY ($1::bigint[]) AND state || '' IN ('queued', 'running');

-- name: queued_cutoffs
-- The given types that have queued tasks. Kafka has the records of all tasks that were queued
-- before the cutoff, which is the transaction of the oldest batch note. Only the owner runs this,
-- between two releases, so that no release is in progress. A transaction and not a time: after the
-- clock was set back, tasks that are released later would seem to be queued before.
SELECT i.type,
       (SELECT x.xid::text
        FROM (SELECT pg_snapshot_xmax(pg_current_snapshot())::xid AS xid
              UNION ALL SELECT r.xmin FROM release r WHERE r.type = i.type) x
        ORDER BY age(x.xid) DESC LIMIT 1) AS cutoff
FROM unnest($1::text[]) AS i (type)
WHERE (SELECT true FROM task t WHERE t.type = i.type AND t.state = 'queued' ORDER BY t.type, t.updated_at LIMIT 1);

-- name: make_lost_ready
-- Makes tasks ready again that were queued before the cutoff ($2), at most `limit` ($3), and
-- notifies the owner of their type. Every release writes the row: a task that was released again is
-- not found. Tasks that another transaction locks are found by the next recheck.
WITH found AS (
    UPDATE task SET state = 'ready', updated_at = now()
    WHERE id = ANY (ARRAY(SELECT id FROM task WHERE type = $1 AND state = 'queued' AND age(xmin) > age($2::text::xid)
                          ORDER BY type, updated_at LIMIT $3 FOR UPDATE SKIP LOCKED))
    RETURNING id
), notified AS (
    SELECT pg_notify('penstock_ready', $1) WHERE EXISTS (SELECT FROM found)
)
SELECT id FROM found, (SELECT count(*) FROM notified) AS n;

-- name: withdraw
-- Makes tasks ready again whose records no worker has taken: those of the given attempts that are
-- still queued. Each gets a new attempt, so that the fence rejects a worker that takes the record
-- meanwhile. Returns these tasks, and those that another transaction locks, which are not moved.
-- The commit waits for the disk, although the session's commits do not: the records are deleted
-- next.
WITH durable AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'on', true)
), found AS MATERIALIZED (
    SELECT t.id, t.step, t.attempt FROM task t
    JOIN unnest($1::bigint[], $2::integer[], $3::integer[]) AS i (id, step, attempt)
      ON t.id = i.id AND t.step = i.step AND t.attempt = i.attempt
    WHERE t.id = ANY ($1::bigint[]) AND t.state || '' = 'queued'
), free AS MATERIALIZED (
    -- The newest version of a row decides: the task may be queued in its next stage by now.
    SELECT t.id FROM task t JOIN found f ON f.id = t.id AND f.step = t.step AND f.attempt = t.attempt
    WHERE t.id = ANY (ARRAY(SELECT id FROM found)) AND t.state || '' = 'queued'
    ORDER BY t.id FOR UPDATE OF t SKIP LOCKED
), moved AS (
    UPDATE task SET state = 'ready', attempt = attempt + 1, updated_at = now()
    WHERE id = ANY (ARRAY(SELECT id FROM free))
    RETURNING id
)
SELECT f.id, f.step, f.attempt, m.id IS NOT NULL AS moved
FROM found f LEFT JOIN moved m ON m.id = f.id, (SELECT count(*) FROM durable) AS d;

-- name: durations
-- How long attempts took, in seconds, of those that their workers have ended.
SELECT extract(epoch FROM a.finished_at - a.started_at)::double precision AS took_s
FROM attempt a JOIN unnest($1::bigint[], $2::integer[], $3::integer[]) AS i (id, step, attempt)
  ON a.task_id = i.id AND a.step = i.step AND a.attempt = i.attempt
WHERE a.task_id = ANY ($1::bigint[]) AND a.started_at IS NOT NULL AND a.outcome <> 'expired';

-- name: promote
-- Makes the first `limit` ($1) due tasks ready; returns how many, by type. If there are as many,
-- each type with due tasks gets an equal share of `limit` more, and at least one task. So tasks of
-- one type do not wait for thousands of another. Any replica may promote tasks of any type, so each
-- type's owner is notified. Tasks that another transaction locks are left to it.
WITH oldest AS MATERIALIZED (
    SELECT id FROM task WHERE state = 'scheduled' AND due_at <= now()
    ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED
), due_type AS MATERIALIZED (
    SELECT y.name FROM task_type y
    -- A limit, so that the planner probes the index once for each type.
    CROSS JOIN LATERAL (
        SELECT FROM task t WHERE t.type = y.name AND backlog_state(t.state) = 'scheduled' AND t.due_at <= now()
        ORDER BY t.due_at LIMIT 1
    ) AS first
    WHERE (SELECT count(*) FROM oldest) >= $1
), share AS MATERIALIZED (
    SELECT s.id FROM due_type y
    CROSS JOIN LATERAL (
        SELECT id FROM task t WHERE t.type = y.name AND backlog_state(t.state) = 'scheduled' AND t.due_at <= now()
        ORDER BY t.due_at LIMIT (SELECT greatest(1, $1 / count(*)) FROM due_type) FOR UPDATE SKIP LOCKED
    ) AS s
), due AS (
    UPDATE task SET state = 'ready', updated_at = now()
    WHERE id = ANY (ARRAY(SELECT id FROM oldest) || ARRAY(SELECT id FROM share))
    RETURNING type
)
SELECT type, count(*) AS tasks, pg_notify('penstock_ready', type) FROM due GROUP BY type;

-- name: next_due
-- Seconds until the next scheduled task is due; null without scheduled tasks.
SELECT extract(epoch FROM min(due_at) - now())::double precision AS wait_s FROM task WHERE state = 'scheduled';

-- name: ingest_offsets
SELECT partition, next_offset, identity FROM ingested WHERE topic = $1 AND partition = ANY ($2::integer[]);

-- name: insert_ingest_offset
INSERT INTO ingested (topic, partition, next_offset, identity) VALUES ($topic, $partition, $next_offset, $identity) ON CONFLICT DO NOTHING;

-- name: move_ingest_offset
-- Moves the offset of a partition to `next_offset` with `identity`, if it is still `stored` with
-- `stored_identity`. Keeps the reason, and how many records were deleted, unless the offset stays.
WITH moved AS (
    UPDATE ingested SET next_offset = $next_offset, identity = $identity
    WHERE topic = $topic AND partition = $partition AND next_offset = $stored AND identity IS NOT DISTINCT FROM $stored_identity::text
    RETURNING 1
), kept AS (
    INSERT INTO position_reset (topic, partition, reason, stored, resumed, deleted)
    SELECT $topic, $partition, $reason, $stored, $next_offset, $deleted FROM moved WHERE $reason::text IS NOT NULL
)
SELECT count(*) FROM moved;
