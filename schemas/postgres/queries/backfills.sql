-- Backfills: runs of a schedule over a past range.

-- name: create
WITH created AS (
    INSERT INTO backfill (schedule, since, until, rate, max_running, rerun, position, total, asked_by, actor)
    VALUES ($schedule, $since, $until, $rate, $max_running, $rerun, $position, $total, $asked_by, $actor)
    RETURNING *
)
SELECT c.*, pg_notify('penstock_schedules', c.schedule) FROM created c;

-- name: get
SELECT * FROM backfill WHERE id = $1;

-- name: list
-- The latest first, before an id; `visible` are the visible namespaces, and NULL is all.
SELECT * FROM backfill
WHERE ($schedule::text IS NULL OR schedule = $schedule)
  AND ($visible::text[] IS NULL
       OR CASE WHEN strpos(schedule, '--') > 1 THEN split_part(schedule, '--', 1) ELSE 'default' END = ANY ($visible))
  AND ($before::bigint IS NULL OR id < $before)
ORDER BY id DESC LIMIT $limit;

-- name: counts
-- Flows of backfills by state.
SELECT backfill, status, count(*) AS flows FROM flow WHERE backfill = ANY ($1::bigint[]) GROUP BY backfill, status;

-- name: stop
UPDATE backfill SET state = 'stopped', stopped_by = $2, finished_at = now() WHERE id = $1 AND state = 'running'
RETURNING id;

-- name: stop_all
-- Stops the backfills of a schedule that is removed.
UPDATE backfill SET state = 'stopped', stopped_by = $2, finished_at = now() WHERE schedule = $1 AND state = 'running';

-- name: cancel_running
WITH noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind)
    SELECT id, id, 'cancel' FROM flow WHERE backfill = $1 AND status = 'running'
    RETURNING shard
)
SELECT count(pg_notify('penstock_flows', shard::text)) AS woken FROM (SELECT DISTINCT shard FROM noted) AS n;

-- name: claim
-- Locks the backfill that has been due the longest, with its schedule's definition and inputs. The
-- fields of the schedule are NULL when it was removed. One that waits is also due when a flow of
-- its schedule has ended ($1).
SELECT b.*, s.name, s.flow, s.version, s.cron, s.zone, s.input, s.priority, s.labels, s.events, s.callbacks,
       s.catch_up, s.catch_up_limit,
       s.catch_up_rate, s.overlap, s.paused
FROM backfill b LEFT JOIN schedule s ON s.name = b.schedule
WHERE b.state = 'running' AND (b.next_at <= now() OR b.waits AND b.schedule = ANY ($1::text[]))
ORDER BY b.next_at LIMIT 1 FOR UPDATE OF b SKIP LOCKED;

-- name: running
SELECT count(*) AS flows FROM flow WHERE backfill = $1 AND status = 'running';

-- name: flows_of_ticks
-- The latest flow of each of these ticks of a schedule, also if it has moved to history.
SELECT DISTINCT ON (tick) tick, id
FROM (SELECT tick, id FROM flow WHERE schedule = $1 AND tick = ANY ($2::timestamptz[])
      UNION ALL
      SELECT tick, id FROM flow_history WHERE schedule = $1 AND tick = ANY ($2::timestamptz[])) AS f
ORDER BY tick, id DESC;

-- name: advance
-- A backfill with a rate catches up on at most one second, so that it does not burst after a crash.
UPDATE backfill
SET position = $position, started = started + $started, already_run = already_run + $already_run, refused = refused + $refused,
    waits = $wait_s::double precision IS NOT NULL,
    next_at = CASE WHEN $wait_s::double precision IS NOT NULL THEN now() + make_interval(secs => $wait_s)
                   WHEN rate IS NULL THEN now()
                   ELSE greatest(next_at, now() - interval '1 second') + make_interval(secs => $started / rate) END,
    state = CASE WHEN $ended::boolean THEN 'done' ELSE state END,
    finished_at = CASE WHEN $ended::boolean THEN now() END
WHERE id = $id;

-- name: fail
UPDATE backfill SET state = 'failed', error = $2, finished_at = now() WHERE id = $1 AND state = 'running';
