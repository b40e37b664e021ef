-- How long tasks took, from those that ended last.

-- name: part
-- Examines the `most` tasks that ended before a task, the latest first. Returns the place and the
-- number of those that were examined, and the first `limit` that succeeded and have the type.
WITH examined AS (
    SELECT id, finished_at, type, state FROM task
    WHERE finished_at IS NOT NULL AND (finished_at, id) < ($finished_at::timestamptz, $id::bigint)
    ORDER BY finished_at DESC, id DESC LIMIT $most
)
SELECT r.finished_at, r.id, (SELECT count(*) FROM examined) AS examined,
       ARRAY(SELECT id FROM examined WHERE type = $type AND state = 'succeeded'
             ORDER BY finished_at DESC, id DESC LIMIT $limit) AS found
FROM (SELECT finished_at, id FROM examined ORDER BY finished_at, id LIMIT 1) AS r;

-- name: of_tasks
-- The median and the 95th percentile of the seconds that handlers took. Rows of tasks have their
-- first stage, and the others the stage of attempts. Attempts that failed do not count. The start
-- is by a worker's clock and may be ahead.
WITH ended AS (
    SELECT task_id, step, stage, greatest(0, extract(epoch FROM finished_at - started_at))::double precision AS takes_s
    FROM attempt
    WHERE task_id = ANY ($1::bigint[]) AND outcome IN ('done', 'next', 'spawn', 'wait') AND started_at IS NOT NULL
), whole AS (
    SELECT (array_agg(stage ORDER BY step))[1] AS stage, sum(takes_s) AS takes_s FROM ended GROUP BY task_id
)
SELECT true AS of_tasks, stage, count(*) AS counted,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY takes_s) AS p50_s,
       percentile_cont(0.95) WITHIN GROUP (ORDER BY takes_s) AS p95_s
FROM whole GROUP BY stage
UNION ALL
SELECT false, stage, count(*), percentile_cont(0.5) WITHIN GROUP (ORDER BY takes_s),
       percentile_cont(0.95) WITHIN GROUP (ORDER BY takes_s)
FROM ended GROUP BY stage
ORDER BY of_tasks, counted DESC, stage;
