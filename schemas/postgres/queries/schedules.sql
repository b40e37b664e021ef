-- Schedules: their rows, and the ticks that are due.

-- name: lock
SELECT *, now() AS now FROM schedule WHERE name = $1 FOR UPDATE;

-- name: now
SELECT now() AS now;

-- name: put
-- Inserts or replaces a schedule. It keeps its queue and its record of ticks.
WITH put AS (
    INSERT INTO schedule AS s (name, flow, version, cron, zone, input, priority, labels, catch_up, catch_up_limit,
                               catch_up_rate, overlap, paused, position, next_tick, next_at, created_by, events, callbacks)
    VALUES ($name, $flow, $version, $cron, $zone, $input, $priority, $labels::jsonb, $catch_up, $catch_up_limit,
            $catch_up_rate, $overlap, $paused, $position, $next_tick, $next_tick, $created_by, $events, $callbacks)
    ON CONFLICT (name) DO UPDATE
    SET flow = excluded.flow, version = excluded.version, cron = excluded.cron, zone = excluded.zone,
        input = excluded.input, priority = excluded.priority, labels = excluded.labels, catch_up = excluded.catch_up,
        catch_up_limit = excluded.catch_up_limit, catch_up_rate = excluded.catch_up_rate,
        overlap = excluded.overlap, paused = excluded.paused, position = excluded.position,
        next_tick = excluded.next_tick, events = excluded.events, callbacks = excluded.callbacks,
        -- Queued ticks may be due under the new settings.
        next_at = CASE WHEN s.queued <> '{}' THEN now() ELSE excluded.next_at END,
        queue_at = NULL, error = NULL, updated_at = now()
    RETURNING s.*
)
SELECT p.*, pg_notify('penstock_schedules', p.name) FROM put p;

-- name: get
SELECT * FROM schedule WHERE name = $1;

-- name: list
-- By name, behind a name; `visible` are the visible namespaces, and NULL is all.
SELECT * FROM schedule
WHERE name > $behind
  AND ($visible::text[] IS NULL
       OR CASE WHEN strpos(name, '--') > 1 THEN split_part(name, '--', 1) ELSE 'default' END = ANY ($visible))
  AND ($flow::text IS NULL OR flow = $flow)
ORDER BY name LIMIT $limit;

-- name: remove
DELETE FROM schedule WHERE name = $1 RETURNING name;

-- name: remove_skips
DELETE FROM schedule_skip WHERE schedule = $1;

-- name: set_paused
-- A resumed schedule continues behind its new position.
WITH changed AS (
    UPDATE schedule
    SET paused = $paused, position = $position, next_tick = $next_tick,
        next_at = CASE WHEN queued <> '{}' THEN now() ELSE $next_tick END, updated_at = now()
    WHERE name = $name
    RETURNING *
)
SELECT c.*, pg_notify('penstock_schedules', c.name) FROM changed c;

-- name: claim
-- Locks due schedules. Replicas share them: each skips the rows that another one has locked.
SELECT *, now() AS now FROM schedule WHERE NOT paused AND next_at <= now()
ORDER BY next_at LIMIT $1 FOR UPDATE SKIP LOCKED;

-- name: claim_queued
-- Locks schedules with queued ticks and without a running flow; $1 are their names, and NULL is
-- all. Flows of backfills and reruns do not count, here and below.
SELECT s.*, now() AS now FROM schedule s
WHERE queued <> '{}' AND NOT paused AND overlap <> 'allow' AND ($1::text[] IS NULL OR name = ANY ($1))
  AND NOT EXISTS (SELECT FROM flow f WHERE f.schedule = s.name AND f.status = 'running' AND f.backfill IS NULL
                  AND f.rerun_of IS NULL OFFSET 0)
ORDER BY name LIMIT $2 FOR UPDATE OF s SKIP LOCKED;

-- name: running
-- Those of these schedules that have a running flow. A statement of its own, behind the lock: it
-- sees the flows that another replica started meanwhile.
SELECT k.name FROM unnest($1::text[]) AS k (name)
WHERE EXISTS (SELECT FROM flow f WHERE f.schedule = k.name AND f.status = 'running' AND f.backfill IS NULL
              AND f.rerun_of IS NULL OFFSET 0);

-- name: cancel_running
WITH noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind)
    SELECT id, id, 'cancel' FROM flow
    WHERE schedule = ANY ($1::text[]) AND status = 'running' AND backfill IS NULL AND rerun_of IS NULL
    RETURNING shard
)
SELECT count(pg_notify('penstock_flows', shard::text)) AS woken FROM (SELECT DISTINCT shard FROM noted) AS n;

-- name: advance
-- Writes what became of the ticks of locked schedules.
UPDATE schedule s
SET position = a.position, next_tick = a.next_tick, next_at = a.next_at, queued = a.queued::timestamptz[],
    queue_at = a.queue_at, last_tick = coalesce(a.last_tick, s.last_tick), started = s.started + a.started,
    error = CASE WHEN a.decided THEN a.error ELSE s.error END
FROM unnest({{$schedule_advance}}) AS a ({{schedule_advance}})
WHERE s.name = a.name;

-- name: record_skips
INSERT INTO schedule_skip ({{schedule_skip}})
SELECT * FROM unnest({{$schedule_skip}});

-- name: skips
-- The latest first, before id $2.
SELECT * FROM schedule_skip WHERE schedule = $1 AND ($2::bigint IS NULL OR id < $2) ORDER BY id DESC LIMIT $3;

-- name: history
-- Runs and skipped ticks of a schedule, the latest tick first, after a record: its tick, its
-- source (2: a run, 1: skipped ticks) and its id. Runs are live or in history.
SELECT * FROM (
    (SELECT 2 AS source, id, tick AS first_tick, tick AS last_tick, 1 AS ticks, name AS flow, status, backfill, rerun_of,
            NULL AS reason, NULL AS detail, created_at
     FROM flow
     WHERE schedule = $name
       AND ($behind::timestamptz IS NULL OR tick <= $behind AND (tick < $behind OR (2, id) < ($source::integer, $id::bigint)))
     ORDER BY tick DESC, id DESC LIMIT $limit)
    UNION ALL
    (SELECT 2, id, tick, tick, 1, flow ->> 'name', flow ->> 'status', (flow ->> 'backfill')::bigint,
            (flow ->> 'rerun_of')::bigint, NULL, NULL, (flow ->> 'created_at')::timestamptz
     FROM flow_history
     WHERE schedule = $name
       AND ($behind::timestamptz IS NULL OR tick <= $behind AND (tick < $behind OR (2, id) < ($source::integer, $id::bigint)))
     ORDER BY tick DESC, id DESC LIMIT $limit)
    UNION ALL
    (SELECT 1, id, first_tick, last_tick, ticks, NULL, NULL, NULL, NULL, reason, detail, created_at
     FROM schedule_skip
     WHERE schedule = $name
       AND ($behind::timestamptz IS NULL
            OR last_tick <= $behind AND (last_tick < $behind OR (1, id) < ($source::integer, $id::bigint)))
     ORDER BY last_tick DESC, id DESC LIMIT $limit)
) AS found
ORDER BY last_tick DESC, source DESC, id DESC LIMIT $limit;

-- name: tasks_of_runs
-- The latest task of each of these flows of a schedule of tasks, also from history.
SELECT DISTINCT ON (flow_id) flow_id, id
FROM (SELECT flow_id, flow_generation, id FROM task WHERE flow_id = ANY ($1::bigint[]) AND flow_node = 'task'
      UNION ALL
      SELECT flow_id, flow_generation, id FROM history WHERE flow_id = ANY ($1::bigint[]) AND flow_node = 'task') AS t
ORDER BY flow_id, flow_generation DESC;

-- name: prune_skips
DELETE FROM schedule_skip
WHERE id = ANY (ARRAY(SELECT id FROM schedule_skip WHERE created_at < now() - make_interval(days => $1) LIMIT $2));

-- name: look
-- Seconds until the next schedule and the next backfill are due, and whether ticks are queued.
SELECT extract(epoch FROM (SELECT min(next_at) FROM schedule WHERE NOT paused) - now())::double precision AS schedule_s,
       extract(epoch FROM (SELECT min(next_at) FROM backfill WHERE state = 'running') - now())::double precision
           AS backfill_s,
       EXISTS (SELECT FROM schedule WHERE queued <> '{}') AS has_queue;
