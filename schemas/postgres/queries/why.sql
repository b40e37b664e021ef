-- The facts that explain why a task is waiting. Every count has a limit and uses an index.

-- name: facts
-- A task, the settings of its type and key, and the owner of its type (see `types.owners`). Tasks
-- in flight are counted only when they are limited. `unrun` of its last attempts of this stage have
-- no row: their records were withdrawn, or the task was paused. `failed` is step and number of the
-- last attempt that ended with an error.
SELECT {{t.release_keys}}, t.type, t.state, t.stage, t.step, t.attempt, t.flow_id, t.flow_root_id,
       coalesce((SELECT f.created_at FROM flow f WHERE f.id = t.flow_root_id),
                (SELECT w.created_at FROM task w WHERE w.id = t.flow_root_id), t.created_at) AS waits_since,
       EXISTS (SELECT FROM task w WHERE w.id = t.flow_root_id) AS root_is_task,
       coalesce(t.key, '') AS key, t.tracked, t.pausing,
       t.worker, t.error, t.due_at, t.updated_at, t.finished_at, now() AS now,
       coalesce(t.lease_ms, y.lease_ms) AS lease_ms,
       y.paused AS type_paused, y.keyed, y.fair, y.ageing_s, y.finish_first, y.max_in_flight, y.starts_per_s,
       y.partitions, y.no_handler_s,
       least(t.attempt, 100) - (SELECT count(*) FROM attempt a WHERE a.task_id = t.id AND a.step = t.step
           AND a.attempt < t.attempt AND a.attempt >= t.attempt - 100) AS unrun,
       (SELECT ARRAY[a.step, a.attempt] FROM attempt a WHERE a.task_id = t.id AND a.error IS NOT NULL
        ORDER BY a.step DESC, a.attempt DESC LIMIT 1) AS failed,
       k.paused AS key_paused, coalesce(k.weight, 1) AS weight, l.key_limit,
       (SELECT count(*) FROM task f WHERE f.type = t.type AND f.state IN ('queued', 'running') AND f.tracked
           AND y.max_in_flight IS NOT NULL) AS in_flight,
       (SELECT count(*) FROM task f WHERE f.type = t.type AND f.state IN ('queued', 'running') AND f.tracked
           AND f.key = t.key AND l.key_limit IS NOT NULL) AS key_in_flight,
       (SELECT max(f.id) FROM flow f WHERE f.task_id = t.id AND f.status || '' = 'running') AS waits_for,
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
-- The ready tasks of a type before a task, in the order of release.
SELECT count(*) AS tasks FROM (
    SELECT FROM task t
    WHERE t.type = $1 AND t.state = 'ready'
      AND ({{t.release_order}}) < ({{$2.release_position}})
    ORDER BY t.type, {{t.release_order}} LIMIT $3
) f;

-- name: ahead_in_order
-- The same for types with `ageing_s` or `finish_first`, for a task at a position that has begun or
-- not: see `penstock.core.release_order`. Ids of tasks and flows grow with the
-- time of submission, so the first `limit` tasks of each level are enough.
WITH found AS (
    SELECT h.begun, {{h.release_place_names}},
           greatest(0, h.level - coalesce(floor(
               greatest(0, extract(epoch FROM now() - coalesce(
                   -- Not joins, which would read whole tables: our sessions have no nested loops.
                   (SELECT f.created_at FROM flow f WHERE f.id = h.flow_root_id),
                   (SELECT w.created_at FROM task w WHERE w.id = h.flow_root_id),
                   h.created_at))::double precision)
               / $ageing_s::double precision), 0)) AS level
    FROM (
        SELECT true AS begun, l.level, t.*
        FROM generate_series(0, 4) AS l (level)
        CROSS JOIN LATERAL (
            SELECT {{t.release_place_keys}}, t.flow_root_id, t.created_at FROM task t
            WHERE t.type = $type AND t.state = 'ready' AND t.step > 0 AND t.tracked
              AND {{t.release_level}} = l.level::smallint
            ORDER BY t.type, {{t.release_order}} LIMIT $limit
        ) t
        WHERE $finish_first::boolean
        UNION ALL
        SELECT false, l.level, {{t.release_place_names}}, t.flow_root_id, t.created_at
        FROM generate_series(0, 4) AS l (level)
        CROSS JOIN LATERAL (
            SELECT {{t.release_place_keys}}, t.flow_root_id, t.created_at,
                   t.step > 0 AND t.tracked AS begun
            FROM task t
            WHERE t.type = $type AND t.state = 'ready' AND {{t.release_level}} = l.level::smallint
            ORDER BY t.type, {{t.release_order}} LIMIT $limit
        ) t
        WHERE NOT ($finish_first::boolean AND (t.begun OR $begun::boolean))
          AND ($ageing_s::double precision IS NOT NULL OR l.level <= ($position::bigint[])[1])
    ) h
)
SELECT count(*) AS tasks FROM (
    SELECT FROM found
    WHERE CASE WHEN begun = ($finish_first::boolean AND $begun::boolean)
               THEN ({{release_names}}) < ({{$position.release_position}})
               ELSE begun END
    LIMIT $limit
) f;

-- name: ahead_by_key
-- The same for types that are released by key: other keys count only up to their room. With
-- `ageing_s` the level of the position is the effective one. Among the first `limit` tasks before
-- it; `examined` is their number, `keys` the number of their keys.
WITH examined AS MATERIALIZED (
    (SELECT coalesce(t.key, '') AS key FROM task t
     WHERE $ageing_s::double precision IS NULL AND t.type = $type AND t.state = 'ready'
       AND ({{t.release_order}}) < ({{$position.release_position}})
     ORDER BY t.type, {{t.release_order}} LIMIT $limit)
    UNION ALL
    (SELECT h.key
     FROM generate_series(0, 4) AS l (level)
     CROSS JOIN LATERAL (
         SELECT coalesce(t.key, '') AS key, {{t.release_keys}} FROM task t
         WHERE t.type = $type AND t.state = 'ready' AND {{t.release_level}} = l.level::smallint
         ORDER BY t.type, {{t.release_order}} LIMIT $limit
     ) h
     WHERE $ageing_s::double precision IS NOT NULL
       AND (greatest(0, h.level - floor(greatest(0, {{h.release_waited_s}}) / $ageing_s::double precision)),
            {{h.release_place_names}}) < ({{$position.release_position}})
     LIMIT $limit)
), queue AS (
    SELECT key, count(*) AS tasks FROM examined GROUP BY key
), room AS (
    SELECT i.key, i.tasks,
           CASE WHEN i.key = $key THEN i.tasks
                WHEN k.paused THEN 0
                WHEN i.key <> '' AND coalesce(k.max_in_flight, y.max_per_key) IS NOT NULL
                THEN greatest(0, coalesce(k.max_in_flight, y.max_per_key) - (
                    SELECT count(*) FROM task t
                    WHERE t.type = $type AND t.state IN ('queued', 'running') AND t.tracked AND t.key = i.key))
           END AS room
    FROM queue i
    JOIN task_type y ON y.name = $type
    LEFT JOIN type_key k ON k.type = $type AND k.key = i.key
)
SELECT coalesce(sum(least(tasks, room)), 0)::bigint AS tasks,
       (SELECT count(*) FROM examined) AS examined, count(*) AS keys
FROM room;

-- name: ahead_by_round_robin
-- The same at its own level when keys are released by round robin: the tasks before it under its
-- own key, and the tasks that other keys release in as many rounds, up to their room. With
-- `ageing_s` its own level is the effective one, which tasks of several `levels` may have, behind
-- `above` tasks of levels above. Reads at most `limit` tasks of other keys; `more` if there are
-- that many.
WITH RECURSIVE own AS MATERIALIZED (
    SELECT count(*) AS tasks FROM (
        SELECT FROM unnest($levels::smallint[]) AS l (level)
        CROSS JOIN LATERAL (
            SELECT {{t.release_keys}} FROM task t
            WHERE t.type = $type AND t.state = 'ready' AND t.key IS NOT NULL
              AND {{t.release_level}} = l.level AND t.key = $key
              AND ({{t.release_place}}) < ({{$position.release_place_position}})
            ORDER BY t.type, {{t.release_level}}, t.key, {{t.release_place}}
            LIMIT $limit
        ) h
        WHERE CASE WHEN $ageing_s::double precision IS NULL THEN true ELSE
              greatest(0, h.level - floor(greatest(0, {{h.release_waited_s}}) / $ageing_s::double precision))
              = ($position::bigint[])[1] END
        LIMIT $limit
    ) f
), scan AS (
    (SELECT n.key, 1 AS n
     FROM unnest($levels::smallint[]) AS l (level)
     CROSS JOIN LATERAL (
         SELECT t.key FROM task t
         WHERE t.type = $type AND t.state = 'ready' AND t.key IS NOT NULL AND {{t.release_level}} = l.level
         ORDER BY t.type, {{t.release_level}}, t.key LIMIT 1
     ) n
     ORDER BY n.key LIMIT 1)
    UNION ALL
    SELECT f.key, w.n + 1
    FROM scan w
    CROSS JOIN LATERAL (
        SELECT n.key
        FROM unnest($levels::smallint[]) AS l (level)
        CROSS JOIN LATERAL (
            SELECT t.key FROM task t
            WHERE t.type = $type AND t.state = 'ready' AND t.key IS NOT NULL AND {{t.release_level}} = l.level
              AND t.key > w.key
            ORDER BY t.type, {{t.release_level}}, t.key LIMIT 1
        ) n
        ORDER BY n.key LIMIT 1
    ) f
    WHERE w.n < $limit::integer
), read AS MATERIALIZED (
    SELECT w.key, r.most, h.* FROM scan w
    CROSS JOIN LATERAL (
        SELECT max(s.weight) AS weight, coalesce(bool_or(s.paused), false) AS paused, max(s.max_in_flight) AS max_in_flight
        FROM type_key s WHERE s.type = $type AND s.key = w.key
    ) k
    CROSS JOIN LATERAL (
        -- An upper bound: every other key is assumed to come before its own key in the round.
        SELECT least(CASE WHEN k.paused THEN 0
                          WHEN w.key <> '' AND coalesce(k.max_in_flight, y.max_per_key) IS NOT NULL
                          THEN greatest(0, coalesce(k.max_in_flight, y.max_per_key) - (
                              SELECT count(*) FROM task t
                              WHERE t.type = $type AND t.state IN ('queued', 'running') AND t.tracked AND t.key = w.key))
                     END,
                     $limit, coalesce(k.weight, 1) * ((SELECT tasks FROM own) / $weight::integer + 1)) AS most
        FROM task_type y WHERE y.name = $type
    ) r
    CROSS JOIN LATERAL (
        SELECT q.* FROM unnest($levels::smallint[]) AS l (level)
        CROSS JOIN LATERAL (
            SELECT {{t.release_keys}} FROM task t
            WHERE t.type = $type AND t.state = 'ready' AND t.key IS NOT NULL
              AND {{t.release_level}} = l.level AND t.key = w.key
            ORDER BY t.type, {{t.release_level}}, t.key, {{t.release_place}}
            LIMIT r.most + $above::bigint
        ) q
    ) h
    WHERE w.key <> $key
    LIMIT $limit
), others AS (
    SELECT least(h.most, count(*)) AS tasks FROM read h
    WHERE CASE WHEN $ageing_s::double precision IS NULL THEN true ELSE
          greatest(0, h.level - floor(greatest(0, {{h.release_waited_s}}) / $ageing_s::double precision))
          = ($position::bigint[])[1] END
    GROUP BY h.key, h.most
)
SELECT ((SELECT tasks FROM own) + coalesce((SELECT sum(tasks) FROM others), 0))::bigint AS tasks,
       (SELECT count(*) FROM read) >= $limit AS more;
