-- The invariant, as far as PostgreSQL knows it. Every answer is bounded: the first `show`
-- offenders, each with the number of all of them (`found`). No number exceeds `most`, because
-- counting all rows of a large table would read all of it.

-- name: states
-- Unfinished tasks by state, at most `most` ($1) of each; and the `most` that ended last.
SELECT state, count(*) AS tasks
FROM (
    (SELECT state FROM task WHERE state = 'scheduled' LIMIT $1)
    UNION ALL (SELECT state FROM task WHERE state = 'ready' LIMIT $1)
    UNION ALL (SELECT state FROM task WHERE state = 'queued' LIMIT $1)
    UNION ALL (SELECT state FROM task WHERE state = 'running' LIMIT $1)
    UNION ALL (SELECT state FROM task WHERE state = 'waiting' LIMIT $1)
    UNION ALL (SELECT state FROM task WHERE state = 'paused' LIMIT $1)
    UNION ALL (SELECT state FROM task WHERE finished_at IS NOT NULL ORDER BY finished_at DESC, id DESC LIMIT $1)
) AS counted
GROUP BY state ORDER BY state;

-- name: callback_states
-- Callbacks by state, at most `most` ($1) of each; of those that were delivered, among as many of
-- the newest.
SELECT state, count(*) AS callbacks
FROM (
    (SELECT state FROM callback WHERE state = 'pending' LIMIT $1)
    UNION ALL (SELECT state FROM callback WHERE state = 'held' LIMIT $1)
    UNION ALL (SELECT state FROM callback WHERE state = 'dead' LIMIT $1)
    UNION ALL (SELECT state FROM (SELECT state FROM callback ORDER BY id DESC LIMIT $1) AS newest WHERE state = 'delivered')
) AS counted
GROUP BY state ORDER BY state;

-- name: task_range
-- The last of the next `limit` ($2) tasks behind an id ($1).
SELECT max(id) AS last_id FROM (SELECT id FROM task WHERE id > $1 ORDER BY id LIMIT $2) AS t;

-- name: now
SELECT now() AS now;

-- name: queued_types
-- Types with tasks that have been queued since before a moment.
SELECT y.name AS type FROM task_type y
WHERE (SELECT true FROM task t WHERE t.type = y.name AND t.state = 'queued' AND t.updated_at < $1
       ORDER BY t.type, t.updated_at LIMIT 1)
ORDER BY y.name;

-- name: noted
-- Tasks whose release Kafka has not confirmed yet, at most `limit`.
SELECT unnest(task_ids) AS id FROM release LIMIT $1;

-- name: queued
-- Tasks that have been queued since before a moment; read by cursor.
SELECT id, type, step, attempt FROM task WHERE state = 'queued' AND updated_at < $1;

-- name: ready
-- Types with tasks that have been ready for longer than `grace` ($1) seconds, and the first task of
-- each; `tasks` is their number among the first `most` ($2) in the order of release. `owned`:
-- whether a task-sync holds the lock of the type (see `release.own`). `limited`: whether the type
-- is paused or full, or has limits for its concurrency keys or its rate, any of which may explain
-- the wait.
SELECT r.*,
       (SELECT y.paused OR y.keyed OR y.starts_per_s IS NOT NULL
               OR coalesce(y.max_in_flight <= (SELECT count(*) FROM task t
                                               WHERE t.type = y.name AND t.state IN ('queued', 'running') AND t.tracked), false)
        FROM task_type y WHERE y.name = r.type) AS limited,
       EXISTS (
    SELECT FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.classid::bigint = (hashtextextended('penstock.release.' || r.type, 0) >> 32) & 4294967295
      AND l.objid::bigint = hashtextextended('penstock.release.' || r.type, 0) & 4294967295
) AS owned
FROM (SELECT y.name AS type, f.*
      FROM task_type y
      CROSS JOIN LATERAL (
          SELECT min(n.id) AS id, count(*) AS tasks,
                 extract(epoch FROM now() - min(n.updated_at))::double precision AS age_s
          FROM (SELECT t.id, t.updated_at FROM task t WHERE t.type = y.name AND t.state = 'ready'
                ORDER BY t.type, {{t.release_level}} LIMIT $2) n
          WHERE n.updated_at < now() - make_interval(secs => $1)
      ) f
      WHERE f.tasks > 0) r
ORDER BY r.type;

-- name: running
-- The running tasks of each of so many ($1) heartbeats partitions: their number, at most `most`
-- ($2), and the first one of these.
SELECT p.lease_partition, f.id, f.tasks
FROM generate_series(0, $1::integer - 1) AS p (lease_partition)
CROSS JOIN LATERAL (
    SELECT min(n.id) AS id, count(*) AS tasks
    FROM (SELECT t.id FROM task t WHERE t.state = 'running' AND t.lease_partition = p.lease_partition LIMIT $2) n
) f
WHERE f.tasks > 0 ORDER BY p.lease_partition;

-- name: leased
-- Running attempts whose rows have not changed for the length of their lease and `grace` ($2)
-- seconds, on one of so many ($1) heartbeats partitions; read by cursor.
SELECT t.id, t.step, t.attempt, t.worker, l.lease_s
FROM task t
JOIN task_type y ON y.name = t.type
CROSS JOIN LATERAL (SELECT coalesce(t.lease_ms, y.lease_ms) / 1000.0::double precision AS lease_s) l
WHERE t.state = 'running' AND t.worker IS NOT NULL AND t.lease_partition >= 0 AND t.lease_partition < $1
  AND t.updated_at < now() - make_interval(secs => l.lease_s + $2);

-- name: overdue
-- Scheduled tasks that have been due for longer than `grace` seconds.
SELECT id, extract(epoch FROM now() - due_at)::double precision AS late_s, count(*) OVER () AS found
FROM (SELECT id, due_at FROM task WHERE state = 'scheduled' AND due_at < now() - make_interval(secs => $2)
      ORDER BY due_at LIMIT $3) AS t
ORDER BY due_at LIMIT $1;

-- name: unwatched
-- Running attempts without a heartbeats partition that exists.
SELECT id, step, attempt, stage, worker, lease_partition, count(*) OVER () AS found
FROM task
WHERE state = 'running'
  AND (worker IS NULL OR lease_partition IS NULL OR lease_partition < 0 OR lease_partition >= $2)
ORDER BY id LIMIT $1;

-- name: waiting
-- Waiting tasks without anything that could wake them, behind an id ($1) up to another ($2). With
-- OFFSET 0 it looks flows up, and does not read all running ones for each range.
SELECT t.id FROM task t
WHERE t.id > $1 AND t.id <= $2 AND t.state = 'waiting'
  AND NOT EXISTS (SELECT FROM flow f WHERE f.task_id = t.id AND f.task_step = t.step AND f.status = 'running'
                  OFFSET 0)
ORDER BY t.id;

-- name: unsent
SELECT id, type, cardinality(task_ids) AS tasks, count(*) OVER () AS found
FROM release WHERE created_at < now() - make_interval(secs => $2) ORDER BY id LIMIT $1;

-- name: unpublished
SELECT id, cardinality(records) AS events, count(*) OVER () AS found
FROM outbox WHERE refused IS NULL AND created_at < now() - make_interval(secs => $2) ORDER BY id LIMIT $1;

-- name: refused
SELECT id, cardinality(records) AS events, refused, count(*) OVER () AS found
FROM outbox WHERE refused IS NOT NULL ORDER BY id LIMIT $1;

-- name: unpublished_results
SELECT id::text, topic, cardinality(records) AS records, count(*) OVER () AS found
FROM callback_outbox WHERE refused IS NULL AND created_at < now() - make_interval(secs => $2) ORDER BY created_at LIMIT $1;

-- name: refused_results
SELECT id::text, topic, cardinality(records) AS records, refused, count(*) OVER () AS found
FROM callback_outbox WHERE refused IS NOT NULL ORDER BY created_at LIMIT $1;

-- name: tasks_ahead
-- Tasks behind an id ($1) up to another ($2) with times of a database clock that was ahead by more
-- than `grace` ($3) seconds: they come late by as much. A time that the database wrote itself shows
-- it while it is in the future. A back-off shows it by its length, which the type limits. A
-- `run_at` (step 0, attempt 0) and a delay that a handler chose may have any length.
SELECT 'task' AS what, t.id::text AS id,
       extract(epoch FROM greatest(t.updated_at - now(), d.due_at - now()))::double precision AS ahead_s
FROM task t
JOIN task_type y ON y.name = t.type
CROSS JOIN LATERAL (
    SELECT CASE WHEN t.state = 'scheduled' AND t.attempt > 0
                     AND t.due_at > now() + make_interval(secs => $3 + y.retry_max_ms / 1000.0)
                     AND EXISTS (SELECT FROM attempt a WHERE a.task_id = t.id AND a.step = t.step
                                 AND a.attempt = t.attempt - 1 AND a.outcome IN ('fail', 'expired') OFFSET 0)
                THEN t.due_at END AS due_at
) d
WHERE t.id > $1 AND t.id <= $2 AND t.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
  AND (t.updated_at > now() + make_interval(secs => $3) OR d.due_at IS NOT NULL)
ORDER BY t.id;

-- name: ahead
-- The same of other rows.
WITH ahead AS (
    SELECT 'callback' AS what, id, greatest(created_at, published_at, waits_since) - now() AS by FROM callback
    WHERE state = 'pending' AND greatest(created_at, published_at, waits_since) > now() + make_interval(secs => $2)
    UNION ALL
    SELECT 'event', id::text, created_at - now() FROM outbox WHERE created_at > now() + make_interval(secs => $2)
    UNION ALL
    SELECT 'result', id::text, created_at - now() FROM callback_outbox WHERE created_at > now() + make_interval(secs => $2)
    UNION ALL
    SELECT 'release', id::text, created_at - now() FROM release WHERE created_at > now() + make_interval(secs => $2)
    UNION ALL
    SELECT 'operation', id, next_at - now() FROM audit
    WHERE state = 'running' AND next_at > now() + make_interval(secs => $2 + coalesce(1 / rate, 0))
)
SELECT what, id, extract(epoch FROM by)::double precision AS ahead_s, count(*) OVER () AS found
FROM ahead ORDER BY what, id LIMIT $1;

-- name: undelivered
SELECT id, namespace, target, extract(epoch FROM now() - due_at)::double precision AS late_s, count(*) OVER () AS found
FROM (SELECT id, namespace, target, due_at FROM callback
      WHERE state = 'pending' AND due_at < now() - make_interval(secs => $2) ORDER BY due_at LIMIT $3) AS c
ORDER BY due_at LIMIT $1;

-- name: held
-- Targets that have been normal for longer than `grace` ($1) seconds and have held callbacks, with
-- their number, at most `most` ($2), and the first callback of each. Callbacks that wait for others
-- of a target are right while it is called. Callbacks of a host that hangs are right, too. The
-- state of the host is in the memory of a process, but slow calls to its targets are stored, and
-- the process probes it repeatedly.
WITH RECURSIVE held AS (
    (SELECT namespace, target FROM callback WHERE state = 'held' ORDER BY namespace, target LIMIT 1)
    UNION ALL
    SELECT n.namespace, n.target
    FROM held h
    CROSS JOIN LATERAL (
        SELECT c.namespace, c.target FROM callback c
        WHERE c.state = 'held' AND (c.namespace, c.target) > (h.namespace, h.target)
        ORDER BY c.namespace, c.target LIMIT 1
    ) n
), slow AS MATERIALIZED (
    SELECT DISTINCT namespace, coalesce(lower(substring(url FROM '^[^:]*://[^/?#]*')), '') AS origin
    FROM callback_target WHERE slow_at > now() - interval '10 minutes'
)
SELECT h.namespace, h.target, f.id, f.seq,
       (SELECT count(*) FROM (SELECT FROM callback c WHERE c.state = 'held' AND c.namespace = h.namespace
                              AND c.target = h.target LIMIT $2) AS n) AS held
FROM held h
LEFT JOIN callback_target t ON t.namespace = h.namespace AND t.url = h.target
CROSS JOIN LATERAL (
    SELECT id, seq, diverted FROM callback c
    WHERE c.state = 'held' AND c.namespace = h.namespace AND c.target = h.target
    ORDER BY seq LIMIT 1
) f
WHERE coalesce(t.state = 'normal' AND t.changed_at < now() - make_interval(secs => $1), t.url IS NULL)
  AND (f.diverted OR coalesce(t.called_at < now() - make_interval(secs => $1), true))
  AND (h.namespace, coalesce(lower(substring(h.target FROM '^[^:]*://[^/?#]*')), ''))
      NOT IN (SELECT namespace, origin FROM slow)
ORDER BY h.target, h.namespace;

-- name: unanswered
-- Pending callbacks whose records were written at least `least` times in a row without a call.
SELECT id, namespace, target, attempt, published, diverted OR attempt > 0 AS diverted,
       extract(epoch FROM published_at)::double precision AS published_at_s
FROM callback WHERE state = 'pending' AND published >= $2 ORDER BY seq LIMIT $1;

-- name: uncalled
-- Targets that have had published callbacks, and no call, for longer than `long` seconds, with the
-- number of callbacks and the first one. A target with a lower rate gets three times the interval
-- between two calls. It leaves out callbacks that were found already (`known`), and those
-- that have been due for so long that they are counted anew.
SELECT c.namespace, c.target, (array_agg(c.id ORDER BY c.seq))[1] AS id, count(*) AS callbacks, min(s.age_s) AS age_s
FROM callback c
LEFT JOIN callback_target t ON t.url = c.target AND t.namespace = c.namespace
CROSS JOIN LATERAL (
    SELECT extract(epoch FROM now() - greatest(c.waits_since, t.called_at))::double precision AS age_s
) s
WHERE c.state = 'pending' AND c.waits_since < now() - make_interval(secs => $2)
  AND c.due_at > now() - interval '5 minutes' AND c.id <> ALL ($3::text[])
  AND s.age_s > $2 AND coalesce(t.rate * s.age_s > 3, true)
GROUP BY c.target, c.namespace ORDER BY c.target, c.namespace LIMIT $1;

-- name: divert
-- Makes the callbacks due, on the diverted path, that are still pending in the same attempt.
WITH locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE
), due AS (
    UPDATE callback c
    SET due_at = now(), diverted = true, published = 0, waits_since = NULL
    FROM unnest($1::text[], $2::integer[], $3::integer[]) AS i (id, attempt, published)
    WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = i.id AND c.attempt = i.attempt AND c.published >= i.published
      AND c.finished_at IS NULL AND c.state || '' = 'pending'
    RETURNING c.id
), notified AS (
    SELECT pg_notify('penstock_callback_due', '0') WHERE EXISTS (SELECT FROM due)
)
SELECT id FROM due, (SELECT count(*) FROM notified) AS n;

-- name: divert_uncalled
-- The same for the first `limit` callbacks of targets that are not called.
WITH due AS (
    UPDATE callback c
    SET due_at = now(), diverted = true, published = 0, waits_since = NULL
    WHERE c.id = ANY (ARRAY(
        SELECT w.id FROM callback w JOIN unnest($namespace::text[], $url::text[]) AS i (namespace, url)
            ON w.target = i.url AND w.namespace = i.namespace
        WHERE w.state = 'pending' AND w.target = ANY ($url::text[]) AND w.waits_since < now() - make_interval(secs => $uncalled_s)
        LIMIT $limit FOR UPDATE OF w SKIP LOCKED))
    RETURNING c.id
), notified AS (
    SELECT pg_notify('penstock_callback_due', '0') WHERE EXISTS (SELECT FROM due)
)
SELECT id FROM due, (SELECT count(*) FROM notified) AS n;

-- name: requeue_held
-- Makes due the first `limit` callbacks that are held for targets that are normal, without regard
-- to their rate.
WITH due AS (
    UPDATE callback c SET state = 'pending', due_at = now()
    WHERE c.id = ANY (ARRAY(
        SELECT h.id FROM callback h JOIN unnest($2::text[], $3::text[]) AS i (namespace, url)
            ON h.target = i.url AND h.namespace = i.namespace
        LEFT JOIN callback_target t ON t.url = h.target AND t.namespace = h.namespace
        WHERE h.state = 'held' AND h.target = ANY ($3::text[]) AND coalesce(t.state, 'normal') = 'normal'
        LIMIT $1 FOR UPDATE OF h SKIP LOCKED))
    RETURNING c.id
), notified AS (
    SELECT pg_notify('penstock_callback_due', '0') WHERE EXISTS (SELECT FROM due)
)
SELECT id FROM due, (SELECT count(*) FROM notified) AS n;

-- name: promote
-- Makes ready the first `limit` overdue tasks, as task-sync does, and notifies the owners of their
-- types.
WITH due AS (
    UPDATE task SET state = 'ready', updated_at = now()
    WHERE id = ANY (ARRAY(SELECT id FROM task
                          WHERE state = 'scheduled' AND due_at < now() - make_interval(secs => $2)
                          ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING id, type
), notified AS (
    SELECT pg_notify('penstock_ready', type) FROM (SELECT DISTINCT type FROM due) AS types
)
SELECT id FROM due, (SELECT count(*) FROM notified) AS n;

-- name: release_again
-- Makes ready again the tasks that have been queued in the same attempt since before a moment, and
-- notifies the owners of their types.
WITH locked AS MATERIALIZED (
    SELECT id FROM task WHERE id = ANY ($id::bigint[]) ORDER BY id FOR NO KEY UPDATE
), again AS (
    UPDATE task t SET state = 'ready', updated_at = now()
    FROM unnest($id::bigint[], $step::integer[], $attempt::integer[]) AS i (id, step, attempt)
    WHERE t.id = ANY (ARRAY(SELECT id FROM locked)) AND t.id = i.id AND t.step = i.step AND t.attempt = i.attempt
      AND t.state || '' = 'queued' AND t.updated_at < $since
    RETURNING t.id, t.type
), notified AS (
    SELECT pg_notify('penstock_ready', type) FROM (SELECT DISTINCT type FROM again) AS types
)
SELECT id FROM again, (SELECT count(*) FROM notified) AS n;

-- name: undo_releases
-- Deletes releases of a type that Kafka has not confirmed for `grace` seconds. Their tasks are
-- ready again if they are unchanged since. Only the session that holds the type's lock may run
-- this.
WITH gone AS (
    DELETE FROM release WHERE type = $1 AND created_at < now() - make_interval(secs => $2)
    RETURNING task_ids, created_at
), locked AS MATERIALIZED (
    SELECT id FROM task WHERE id = ANY (ARRAY(SELECT unnest(task_ids) FROM gone)) ORDER BY id FOR NO KEY UPDATE
), again AS (
    UPDATE task t SET state = 'ready', updated_at = now()
    FROM (SELECT unnest(task_ids) AS id, created_at FROM gone) AS g
    WHERE t.id = ANY (ARRAY(SELECT id FROM locked)) AND t.id = g.id
      AND t.state || '' = 'queued' AND t.updated_at <= g.created_at
    RETURNING t.id
), notified AS (
    SELECT pg_notify('penstock_ready', $1) WHERE EXISTS (SELECT FROM again)
)
SELECT count(*) AS notes, (SELECT count(*) FROM notified) AS notified FROM gone;

-- name: wake
-- Notifies the owners of types of ready tasks.
SELECT pg_notify('penstock_ready', type) FROM unnest($1::text[]) AS i (type);

-- name: lost
-- Records that were deleted before they were ingested, which no operator has noted.
SELECT topic || '/' || partition AS id, sum(deleted)::bigint AS deleted, count(*) OVER () AS found
FROM position_reset WHERE deleted > 0 AND noted_at IS NULL
GROUP BY topic, partition ORDER BY topic, partition LIMIT $1;

-- name: type_names
SELECT name FROM task_type ORDER BY name;

-- name: missing
-- Ids that belong to no task, finished tasks included.
SELECT i.id FROM unnest($1::bigint[]) AS i (id)
WHERE NOT EXISTS (SELECT FROM task t WHERE t.id = i.id OFFSET 0)
  AND NOT EXISTS (SELECT FROM history h WHERE h.id = i.id OFFSET 0)
ORDER BY i.id;

-- name: note_lost
UPDATE position_reset SET noted_at = now() WHERE deleted > 0 AND noted_at IS NULL RETURNING id;

-- name: moved
-- Ingest offsets that did not fit their topic in the last seven days.
SELECT reason, count(*) AS positions FROM position_reset
WHERE moved_at > now() - interval '7 days' GROUP BY reason ORDER BY reason;

-- name: ingested
SELECT partition, next_offset, identity FROM ingested WHERE topic = $1;

-- name: mend_tasks
-- Mends tasks that are ahead (see `tasks_ahead`), by the clock of now: a delay starts anew, and a
-- back-off has its longest length at most. A `run_at` stays.
WITH ahead AS MATERIALIZED (
    SELECT t.id, make_interval(secs => y.retry_max_ms / 1000.0) AS longest, b.backs_off
    FROM task t
    JOIN task_type y ON y.name = t.type
    CROSS JOIN LATERAL (
        SELECT t.state = 'scheduled' AND t.attempt > 0
               AND EXISTS (SELECT FROM attempt a WHERE a.task_id = t.id AND a.step = t.step
                           AND a.attempt = t.attempt - 1 AND a.outcome IN ('fail', 'expired') OFFSET 0) AS backs_off
    ) b
    WHERE t.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
      AND (t.updated_at > now() + make_interval(secs => $2)
           OR (b.backs_off AND t.due_at > now() + make_interval(secs => $2 + y.retry_max_ms / 1000.0)))
    ORDER BY t.id LIMIT $1
    FOR UPDATE OF t SKIP LOCKED
), mended AS (
    UPDATE task t
    SET due_at = CASE WHEN t.due_at IS NULL OR (t.step = 0 AND t.attempt = 0) THEN t.due_at
                      WHEN a.backs_off THEN now() + least(greatest(t.due_at - t.updated_at, interval '0'), a.longest)
                      ELSE now() + greatest(t.due_at - t.updated_at, interval '0') END,
        updated_at = now()
    FROM ahead a
    WHERE t.id = a.id
    RETURNING t.id, t.type, t.state
), notified AS (
    SELECT pg_notify('penstock_due', type)
    FROM (SELECT DISTINCT type FROM mended WHERE state = 'scheduled') AS types
)
SELECT id FROM mended, (SELECT count(*) FROM notified) AS n;

-- name: mend_callbacks
-- As `mend_tasks`, for callbacks.
WITH mended AS (
    UPDATE callback
    SET due_at = now() + greatest(due_at - greatest(created_at, published_at), interval '0'),
        created_at = least(created_at, now()),
        published_at = least(published_at, now()),
        waits_since = least(waits_since, now())
    WHERE id = ANY (ARRAY(SELECT id FROM callback
                          WHERE state = 'pending'
                            AND greatest(created_at, published_at, waits_since) > now() + make_interval(secs => $2)
                          ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED))
    RETURNING id, extract(epoch FROM due_at - now()) AS due_in_s
), notified AS (
    SELECT pg_notify('penstock_callback_due', min(due_in_s)::text) FROM mended HAVING count(*) > 0
)
SELECT id FROM mended, (SELECT count(*) FROM notified) AS n;

-- name: mend_outbox
UPDATE outbox SET created_at = now()
WHERE id = ANY (ARRAY(SELECT id FROM outbox WHERE created_at > now() + make_interval(secs => $1) ORDER BY id
                      FOR UPDATE SKIP LOCKED))
RETURNING id;

-- name: mend_results
UPDATE callback_outbox SET created_at = now()
WHERE id = ANY (ARRAY(SELECT id FROM callback_outbox WHERE created_at > now() + make_interval(secs => $1) ORDER BY id
                      FOR UPDATE SKIP LOCKED))
RETURNING id;

-- name: mend_releases
UPDATE release SET created_at = now()
WHERE id = ANY (ARRAY(SELECT id FROM release WHERE created_at > now() + make_interval(secs => $1) ORDER BY id
                      FOR UPDATE SKIP LOCKED))
RETURNING id;

-- name: mend_operations
UPDATE audit SET next_at = now()
WHERE state = 'running' AND next_at > now() + make_interval(secs => $1 + coalesce(1 / rate, 0)) RETURNING id;
