-- Task-sync: the release of types with limits, concurrency keys or an order of their own. Only the
-- type's owner runs these, in the session that holds its lock: no other session can increase what
-- they count.

-- name: versions
-- The version of each type, which every change of its row replaces, and whether it is released by
-- concurrency key.
SELECT name, keyed, xmin::text AS version FROM task_type;

-- name: track
-- Tracks tasks in flight that were released before the type had limits; with `begun` ($2) also
-- delayed and paused tasks of later stages. At most `limit` ($3): how many were found, and how many
-- of these were tracked now, because no other transaction locks them.
WITH found AS (
    SELECT f.id FROM (
        SELECT id FROM task WHERE type = $1 AND state = 'queued' AND NOT tracked
        UNION ALL
        SELECT id FROM task WHERE type = $1 AND state = 'running' AND NOT tracked
        UNION ALL
        SELECT id FROM task
        WHERE type = $1 AND state IN ('scheduled', 'paused') AND step > 0 AND NOT tracked AND $2::boolean
    ) f ORDER BY f.id LIMIT $3
), free AS (
    SELECT id FROM task WHERE id = ANY (ARRAY(SELECT id FROM found)) AND NOT tracked ORDER BY id FOR UPDATE SKIP LOCKED
), done AS (
    UPDATE task SET tracked = true WHERE id = ANY (ARRAY(SELECT id FROM free)) RETURNING id
)
SELECT (SELECT count(*) FROM found) AS found, (SELECT count(*) FROM done) AS done;

-- name: track_ready
-- Tracks ready tasks of later stages, among the next `limit` ($3) ready tasks behind a position
-- ($2). Returns the last position, which is null at the end.
WITH examined AS MATERIALIZED (
    SELECT {{t.release_keys}}, t.step, t.tracked FROM task t
    WHERE t.type = $1 AND t.state = 'ready'
      AND ({{t.release_order}}) > ({{$2.release_position}})
    ORDER BY t.type, {{t.release_order}} LIMIT $3
), free AS (
    SELECT id FROM task
    WHERE id = ANY (ARRAY(SELECT id FROM examined WHERE step > 0 AND NOT tracked)) AND NOT tracked
    ORDER BY id FOR UPDATE SKIP LOCKED
), done AS (
    UPDATE task SET tracked = true WHERE id = ANY (ARRAY(SELECT id FROM free)) RETURNING id
)
SELECT (SELECT count(*) FROM examined WHERE step > 0 AND NOT tracked) AS found,
       (SELECT count(*) FROM done) AS done, {{e.release_names}}
FROM (SELECT) AS one
LEFT JOIN LATERAL (
    SELECT {{release_names}} FROM examined ORDER BY {{release_names}} OFFSET $3 - 1
) e ON true;

-- name: in_flight
-- The number of tasks in flight, counted up to `limit` ($2).
SELECT count(*) AS tasks FROM (
    SELECT FROM task WHERE type = $1 AND state IN ('queued', 'running') AND tracked LIMIT $2
) f;

-- name: set_empty_keys
-- Sets the empty key on tasks without a key, which were submitted before their type was released by
-- key. Among the next `limit` ($3) ready tasks behind a position ($2). Returns how many other
-- transactions lock, and the last position, which is null at the end.
WITH examined AS MATERIALIZED (
    SELECT {{t.release_keys}}, t.key FROM task t
    WHERE t.type = $1 AND t.state = 'ready'
      AND ({{t.release_order}}) > ({{$2.release_position}})
    ORDER BY t.type, {{t.release_order}} LIMIT $3
), free AS (
    SELECT id FROM task WHERE id = ANY (ARRAY(SELECT id FROM examined WHERE key IS NULL)) AND key IS NULL
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), updated AS (
    UPDATE task SET key = '' WHERE id = ANY (ARRAY(SELECT id FROM free)) RETURNING id
)
SELECT (SELECT count(*) FROM examined WHERE key IS NULL) - (SELECT count(*) FROM updated) AS locked,
       {{e.release_names}}
FROM (SELECT) AS one
LEFT JOIN LATERAL (
    SELECT {{release_names}} FROM examined ORDER BY {{release_names}} OFFSET $3 - 1
) e ON true;

-- name: key_queues
-- The next `keys` concurrency keys with ready tasks at some of the `levels`, from `first` to before
-- `end` (null is no bound). Each has its weight, how many of its tasks may start (null
-- is any number) and its first tasks, together about twice `tasks`, divided by weight. A task of a
-- level counts if it has waited for as long as `waits_s` has for this level; ageing needs several
-- levels. Leaves out the `excluded` tasks. A loose index scan: one probe of each level for each
-- key, however many tasks wait under it.
WITH RECURSIVE scan AS (
    (SELECT n.key, 1 AS n
     FROM unnest($levels::smallint[]) AS l (level)
     CROSS JOIN LATERAL (
         SELECT t.key FROM task t
         WHERE t.type = $type AND t.state = 'ready' AND t.key IS NOT NULL AND {{t.release_level}} = l.level
           AND t.key >= $first
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
    WHERE w.n < $keys::integer
), waiting AS (
    SELECT key FROM scan WHERE $end::text IS NULL OR key < $end
), counted AS (
    SELECT w.key, coalesce(k.weight, 1) AS weight,
           CASE WHEN k.paused THEN 0
                WHEN coalesce(k.max_in_flight, $max_per_key::integer) IS NOT NULL AND w.key <> ''
                THEN coalesce(k.max_in_flight, $max_per_key::integer) - (
                    SELECT count(*) FROM (
                        SELECT FROM task t
                        WHERE t.type = $type AND t.state IN ('queued', 'running') AND t.tracked AND t.key = w.key
                        LIMIT coalesce(k.max_in_flight, $max_per_key::integer)) f)
           END AS room
    FROM waiting w
    CROSS JOIN LATERAL (
        SELECT max(s.weight) AS weight, coalesce(bool_or(s.paused), false) AS paused, max(s.max_in_flight) AS max_in_flight
        FROM type_key s WHERE s.type = $type AND s.key = w.key
    ) k
), open AS (
    SELECT key, weight, room,
           greatest(0, least(room, $tasks::integer, 8 + 2 * $tasks::integer * weight
                             / sum(weight) FILTER (WHERE room IS NULL OR room > 0) OVER ()))::integer AS depth
    FROM counted
)
SELECT o.key, o.weight, o.room::integer AS room, o.depth, h.places
FROM open o
CROSS JOIN LATERAL (
    SELECT array_agg(f.place) AS places
    FROM (
        SELECT q.place
        FROM unnest($levels::smallint[], $waits_s::double precision[]) AS l (level, wait_s)
        CROSS JOIN LATERAL (
            SELECT ARRAY[{{t.release_place}}]::bigint[] AS place, {{t.release_place_keys}} FROM task t
            WHERE t.type = $type AND t.state = 'ready' AND t.key IS NOT NULL
              AND {{t.release_level}} = l.level AND t.key = o.key
              AND t.id NOT IN (SELECT unnest($excluded::bigint[]))
            ORDER BY t.type, {{t.release_level}}, t.key, {{t.release_place}}
            LIMIT o.depth
        ) q
        -- Not before the limit, which bounds the rows that are read here: the first tasks of a
        -- level have waited longest. Without ageing no row is read.
        WHERE CASE WHEN l.wait_s = 0 THEN true ELSE {{q.release_waited_s}} >= l.wait_s END
        ORDER BY q.place LIMIT o.depth
    ) f
) h
ORDER BY o.key;

-- name: heads
-- The first `limit` tasks of each level; with `finish_first` also of each level's tasks that have
-- begun. Leaves out the `excluded` tasks. A task of a flow has waited since the start of
-- its root, so that the first tasks of a level are those that have waited longest.
SELECT h.begun, {{h.release_names}},
       extract(epoch FROM now() - coalesce(
           -- Not joins, which would read whole tables: our sessions have no nested loops.
           (SELECT f.created_at FROM flow f WHERE f.id = h.flow_root_id),
           (SELECT w.created_at FROM task w WHERE w.id = h.flow_root_id),
           h.created_at))::double precision AS waited_s
FROM (
    SELECT false AS begun, l.level, h.*
    FROM generate_series(0, 4) AS l (level)
    CROSS JOIN LATERAL (
        SELECT {{t.release_place_keys}}, t.flow_root_id, t.created_at FROM task t
        WHERE t.type = $type AND t.state = 'ready' AND {{t.release_level}} = l.level::smallint
          AND t.id NOT IN (SELECT unnest($excluded::bigint[]))
        ORDER BY t.type, {{t.release_order}} LIMIT $limit
    ) h
    UNION ALL
    SELECT true, l.level, h.*
    FROM generate_series(0, 4) AS l (level)
    CROSS JOIN LATERAL (
        SELECT {{t.release_place_keys}}, t.flow_root_id, t.created_at FROM task t
        WHERE t.type = $type AND t.state = 'ready' AND t.step > 0 AND t.tracked
          AND {{t.release_level}} = l.level::smallint
          AND t.id NOT IN (SELECT unnest($excluded::bigint[]))
        ORDER BY t.type, {{t.release_order}} LIMIT $limit
    ) h
    WHERE $finish_first::boolean
) h;

-- name: release_selected
-- As `release.release`, for selected tasks and with the version of the type; tasks that are no
-- longer ready, or that another transaction locks, are left out.
WITH deleted AS (
    DELETE FROM release WHERE id = ANY ($confirmed::bigint[])
), chosen AS MATERIALIZED (
    SELECT id FROM task WHERE id = ANY ($ids::bigint[]) AND state || '' = 'ready'
      AND EXISTS (SELECT FROM task_type y WHERE y.name = $type AND y.xmin = $version::text::xid)
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), released AS (
    UPDATE task t SET state = 'queued', due_at = NULL, queued_at = now(), updated_at = now(), tracked = true
    WHERE t.id = ANY (ARRAY(SELECT id FROM chosen)) AND t.state || '' = 'ready'
    RETURNING t.id, t.step, t.stage, t.attempt, t.failures + t.losses AS tries, t.losses,
              {{t.release_level}} AS level, t.content_type, t.context, t.context_ref, t.traceparent
), noted AS (
    INSERT INTO release (type, task_ids)
    SELECT $type, array_agg(id) FROM released HAVING count(*) > 0
    RETURNING id
)
SELECT r.*, (SELECT id FROM noted) AS release_id FROM released r;
