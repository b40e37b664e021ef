-- The facts that explain why a task is waiting. Every count has a limit and uses an index.

-- name: facts
-- A task, the settings of its type and key, and the owner of its type (see `types.owners`). Tasks
-- in flight are counted only when they are limited. `unrun` of its last attempts of this stage have
-- no row: their records were withdrawn, or the task was paused.
SELECT t.id, t.type, t.state, t.step, t.attempt, t.priority, coalesce(t.key, '') AS key, t.tracked, t.pausing,
       t.worker, t.error, t.due_at, t.created_at, t.updated_at, t.finished_at, now() AS now,
       coalesce(t.lease_ms, y.lease_ms) AS lease_ms,
       y.paused AS type_paused, y.keyed, y.fair, y.ageing_s, y.finish_first, y.max_in_flight, y.starts_per_s,
       y.partitions,
       least(t.attempt, 100) - (SELECT count(*) FROM attempt a WHERE a.task_id = t.id AND a.step = t.step
           AND a.attempt < t.attempt AND a.attempt >= t.attempt - 100) AS unrun,
       k.paused AS key_paused, coalesce(k.weight, 1) AS weight, l.key_limit,
       (SELECT count(*) FROM task f WHERE f.type = t.type AND f.state IN ('queued', 'running') AND f.tracked
           AND y.max_in_flight IS NOT NULL) AS in_flight,
       (SELECT count(*) FROM task f WHERE f.type = t.type AND f.state IN ('queued', 'running') AND f.tracked
           AND f.key = t.key AND l.key_limit IS NOT NULL) AS key_in_flight,
       EXISTS (SELECT FROM release r WHERE r.type = t.type AND t.id = ANY (r.task_ids)) AS noted,
       (SELECT a.application_name FROM pg_locks p JOIN pg_stat_activity a ON a.pid = p.pid
        WHERE p.locktype = 'advisory' AND p.granted AND p.objsubid = 1
          AND p.database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND ((p.classid::bigint << 32) | p.objid::bigint) = hashtextextended('penstock.release.' || t.type, 0)) AS session
FROM task t
JOIN task_type y ON y.name = t.type
LEFT JOIN type_key k ON y.keyed AND k.type = t.type AND k.key = t.key
CROSS JOIN LATERAL (
    SELECT CASE WHEN y.keyed AND t.key <> '' THEN coalesce(k.max_in_flight, y.max_per_key) END AS key_limit
) l
WHERE t.id = $1;

-- name: ahead
-- The ready tasks of a type before a task, by priority and id.
SELECT count(*) AS tasks FROM (
    SELECT FROM task t
    WHERE t.type = $1 AND t.state = 'ready' AND (t.priority, t.id) < ($2::smallint, $3::bigint)
    ORDER BY t.type, t.priority, t.id LIMIT $4
) f;

-- name: ahead_in_order
-- The same for types with `ageing_s` ($5) or `finish_first` ($6), for a task at `level` ($2) that
-- has begun or not ($7): see `penstock.core.release_order`. Ids grow with the time of submission,
-- so the first `limit` ($4) tasks of each level are enough.
WITH found AS (
    SELECT h.begun, h.id,
           greatest(0, h.level - coalesce(floor(greatest(0, h.waited_s) / $5::double precision), 0)) AS level
    FROM (
        SELECT true AS begun, l.level, t.id, t.waited_s
        FROM generate_series(0, 4) AS l (level)
        CROSS JOIN LATERAL (
            SELECT t.id, extract(epoch FROM now() - t.created_at)::double precision AS waited_s FROM task t
            WHERE t.type = $1 AND t.state = 'ready' AND t.step > 0 AND t.tracked AND t.priority = l.level::smallint
            ORDER BY t.type, t.priority, t.id LIMIT $4
        ) t
        WHERE $6::boolean
        UNION ALL
        SELECT false, l.level, t.id, t.waited_s
        FROM generate_series(0, 4) AS l (level)
        CROSS JOIN LATERAL (
            SELECT t.id, t.step > 0 AND t.tracked AS begun,
                   extract(epoch FROM now() - t.created_at)::double precision AS waited_s
            FROM task t
            WHERE t.type = $1 AND t.state = 'ready' AND t.priority = l.level::smallint
            ORDER BY t.type, t.priority, t.id LIMIT $4
        ) t
        WHERE NOT ($6::boolean AND (t.begun OR $7::boolean))
          AND ($5::double precision IS NOT NULL OR l.level <= $2::integer)
    ) h
)
SELECT count(*) AS tasks FROM (
    SELECT FROM found
    WHERE CASE WHEN begun = ($6::boolean AND $7::boolean) THEN (level, id) < ($2::integer, $3::bigint) ELSE begun END
    LIMIT $4
) f;

-- name: ahead_by_key
-- The same for types that are released by key in the order of ids: other keys count only up to
-- their room. Among the first `limit` ($4) tasks before it; `examined` is their number, `keys` the
-- number of their keys.
WITH examined AS MATERIALIZED (
    SELECT coalesce(t.key, '') AS key FROM task t
    WHERE t.type = $1 AND t.state = 'ready' AND (t.priority, t.id) < ($2::smallint, $3::bigint)
    ORDER BY t.type, t.priority, t.id LIMIT $4
), queue AS (
    SELECT key, count(*) AS tasks FROM examined GROUP BY key
), room AS (
    SELECT i.key, i.tasks,
           CASE WHEN i.key = $5 THEN i.tasks
                WHEN k.paused THEN 0
                WHEN i.key <> '' AND coalesce(k.max_in_flight, y.max_per_key) IS NOT NULL
                THEN greatest(0, coalesce(k.max_in_flight, y.max_per_key) - (
                    SELECT count(*) FROM task t
                    WHERE t.type = $1 AND t.state IN ('queued', 'running') AND t.tracked AND t.key = i.key))
           END AS room
    FROM queue i
    JOIN task_type y ON y.name = $1
    LEFT JOIN type_key k ON k.type = $1 AND k.key = i.key
)
SELECT coalesce(sum(least(tasks, room)), 0)::bigint AS tasks,
       (SELECT count(*) FROM examined) AS examined, count(*) AS keys
FROM room;

-- name: ahead_by_round_robin
-- The same at its own level when keys are released by round robin: the tasks before it under its
-- own key ($5), whose weight is $6, and the tasks that other keys release in as many rounds, up to
-- their room.
WITH RECURSIVE own AS MATERIALIZED (
    SELECT count(*) AS tasks FROM (
        SELECT FROM task t
        WHERE t.type = $1 AND t.state = 'ready' AND t.key IS NOT NULL AND t.priority = $2::smallint AND t.key = $5
          AND t.id < $3
        ORDER BY t.type, t.priority, t.key, t.id LIMIT $4
    ) f
), scan AS (
    (SELECT t.key, 1 AS n FROM task t
     WHERE t.type = $1 AND t.state = 'ready' AND t.key IS NOT NULL AND t.priority = $2::smallint
     ORDER BY t.type, t.priority, t.key LIMIT 1)
    UNION ALL
    SELECT f.key, w.n + 1
    FROM scan w
    CROSS JOIN LATERAL (
        SELECT t.key FROM task t
        WHERE t.type = $1 AND t.state = 'ready' AND t.key IS NOT NULL AND t.priority = $2::smallint AND t.key > w.key
        ORDER BY t.type, t.priority, t.key LIMIT 1
    ) f
    WHERE w.n < $4::integer
), others AS (
    SELECT FROM scan w
    CROSS JOIN LATERAL (
        SELECT max(s.weight) AS weight, coalesce(bool_or(s.paused), false) AS paused, max(s.max_in_flight) AS max_in_flight
        FROM type_key s WHERE s.type = $1 AND s.key = w.key
    ) k
    CROSS JOIN LATERAL (
        SELECT CASE WHEN k.paused THEN 0
                    WHEN w.key <> '' AND coalesce(k.max_in_flight, y.max_per_key) IS NOT NULL
                    THEN greatest(0, coalesce(k.max_in_flight, y.max_per_key) - (
                        SELECT count(*) FROM task t
                        WHERE t.type = $1 AND t.state IN ('queued', 'running') AND t.tracked AND t.key = w.key))
               END AS room
        FROM task_type y WHERE y.name = $1
    ) r
    CROSS JOIN LATERAL (
        SELECT FROM task t
        WHERE t.type = $1 AND t.state = 'ready' AND t.key IS NOT NULL AND t.priority = $2::smallint AND t.key = w.key
        ORDER BY t.type, t.priority, t.key, t.id
        -- An upper bound: every other key is assumed to come before its own key in the round.
        LIMIT least(r.room, $4, coalesce(k.weight, 1) * ((SELECT tasks FROM own) / $6::integer + 1))
    ) f
    WHERE w.key <> $5
    LIMIT $4
)
SELECT (SELECT tasks FROM own) + (SELECT count(*) FROM others) AS tasks;
