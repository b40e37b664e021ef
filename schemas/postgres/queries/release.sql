-- Task-sync: the gate.

-- name: own
-- The right to release a type, held by this session for as long as it lives.
SELECT pg_try_advisory_lock(hashtextextended('penstock.release.' || $1, 0)) AS owned;

-- name: disown
SELECT pg_advisory_unlock(hashtextextended('penstock.release.' || $1, 0)) AS released;

-- name: join
-- A replica of task-sync, known as one for as long as this session lives.
WITH joined AS MATERIALIZED (SELECT pg_advisory_lock_shared(hashtextextended('penstock.release', 0)))
SELECT pg_notify('penstock_replicas', '') FROM joined;

-- name: leave
WITH gone AS MATERIALIZED (SELECT pg_advisory_unlock_all())
SELECT pg_notify('penstock_replicas', '') FROM gone;

-- name: tell_replicas
SELECT pg_notify('penstock_replicas', '');

-- name: owners
-- The sessions of all replicas, and for each of some types, in their order, the session that owns it.
WITH held AS (
    -- A key of 64 bits is shown in two halves.
    SELECT (l.classid::bigint << 32) | l.objid::bigint AS key, l.pid FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT (SELECT array_agg(pid ORDER BY pid) FROM held WHERE key = hashtextextended('penstock.release', 0)) AS members,
       (SELECT array_agg(h.pid ORDER BY t.place) FROM unnest($1::text[]) WITH ORDINALITY AS t (name, place)
        LEFT JOIN held h ON h.key = hashtextextended('penstock.release.' || t.name, 0)) AS owners;

-- name: release
-- Opens the gate for the first `limit` ready tasks of a type and notes them as on their way to Kafka;
-- forgets the notes of earlier batches that have arrived. With `tracked` ($4) they count for the type's limits.
WITH forgotten AS (
    DELETE FROM release WHERE id = ANY ($3::bigint[])
), chosen AS (
    SELECT id FROM task WHERE type = $1 AND state = 'ready' ORDER BY priority, id LIMIT $2
), opened AS (
    -- Found by key, whatever the statistics say. The state is asked again, since a task may be cancelled meanwhile;
    -- as an expression, so that no index on it is taken for a better way to find a few keys.
    -- `updated_at` says since when it has been queued: the proof that its record is lost goes by that.
    UPDATE task t SET state = 'queued', due_at = NULL, updated_at = now(), tracked = t.tracked OR $4::boolean
    WHERE t.id = ANY (ARRAY(SELECT id FROM chosen)) AND t.state || '' = 'ready'
    RETURNING t.id, t.step, t.stage, t.attempt, t.failures + t.losses AS tries, t.priority,
              t.content_type, t.context, t.context_ref, t.traceparent
), noted AS (
    INSERT INTO release (type, task_ids)
    SELECT $1, array_agg(id) FROM opened HAVING count(*) > 0
    RETURNING id
)
SELECT o.*, (SELECT id FROM noted) AS release_id FROM opened o ORDER BY o.priority, o.id;

-- name: forget
-- Kafka has every record of these batches.
DELETE FROM release WHERE id = ANY ($1::bigint[]);

-- name: unconfirmed
-- Batches that an earlier owner may not have brought to Kafka, with what is still queued of them.
SELECT r.id AS release_id, t.id, t.step, t.stage, t.attempt, t.failures + t.losses AS tries, t.priority,
       t.content_type, t.context, t.context_ref, t.traceparent
FROM release r
-- By key: as an expression, so that no index on the state is taken instead.
LEFT JOIN task t ON t.id = ANY (r.task_ids) AND t.state || '' = 'queued'
WHERE r.type = $1
ORDER BY r.id, t.priority, t.id;

-- name: waiting
-- Those of some types of which something is ready.
SELECT i.type FROM unnest($1::text[]) AS i (type)
WHERE EXISTS (SELECT FROM task t WHERE t.type = i.type AND t.state = 'ready');

-- name: under_way
-- Attempts of some tasks that are on their way to a worker or with one.
SELECT id, step, attempt FROM task WHERE id = ANY ($1::bigint[]) AND state || '' IN ('queued', 'running');

-- name: cuts
-- Those of some types that have queued tasks, and until when the records of all that was queued are known to have been
-- on Kafka: until the oldest batch that is still noted. Asked by the owner between two releases, so that none is under way.
SELECT i.type, least(now(), (SELECT min(r.created_at) FROM release r WHERE r.type = i.type)) AS cut
FROM unnest($1::text[]) AS i (type)
WHERE EXISTS (SELECT FROM task t WHERE t.type = i.type AND t.state = 'queued');

-- name: lost
-- Makes ready again what has been queued since before `cut`, at most `limit`; their type's owner is told.
-- Every release renews `updated_at`, so what was released again meanwhile is another's to prove.
WITH found AS (
    UPDATE task SET state = 'ready', updated_at = now()
    WHERE id = ANY (ARRAY(SELECT id FROM task WHERE type = $1 AND state = 'queued' AND updated_at < $2
                          ORDER BY updated_at LIMIT $3 FOR UPDATE))
    RETURNING id
), told AS (
    SELECT pg_notify('penstock_ready', $1) WHERE EXISTS (SELECT FROM found)
)
SELECT id FROM found, (SELECT count(*) FROM told) AS t;

-- name: promote
-- The first `limit` tasks that have fallen due become ready; how many, by type. Every process may do it, so the owner of each
-- type is told by notification, and what another process has at hand is left to it.
WITH due AS (
    UPDATE task SET state = 'ready', updated_at = now()
    WHERE id = ANY (ARRAY(SELECT id FROM task WHERE state = 'scheduled' AND due_at <= now()
                          ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING type
)
SELECT type, count(*) AS tasks, pg_notify('penstock_ready', type) FROM due GROUP BY type;

-- name: next_due
-- Seconds until something falls due; no value when nothing will.
SELECT extract(epoch FROM min(due_at) - now())::double precision AS wait_s FROM task WHERE state = 'scheduled';

-- name: ingested
SELECT partition, next_offset FROM ingested WHERE topic = $1 AND partition = ANY ($2::integer[]);

-- name: ingest_begin
INSERT INTO ingested (topic, partition, next_offset) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING;
