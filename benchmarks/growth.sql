-- Rows for the benchmark of growth, many in one statement. They look like those that tasks of three
-- no-op stages leave. Ids are microseconds since 2026, as the database gives them.

-- name: waiting
-- Inserts ready tasks of a type: $2 of them, of the priorities from $3 to $4.
INSERT INTO penstock.task (type, state, stage, priority, content_type, context)
SELECT $1, 'ready', 'one', $3::integer + n % ($4::integer - $3::integer + 1), 'json',
       convert_to(json_build_object('at', extract(epoch FROM now()), 'pad', repeat('x', 160))::text, 'UTF8')
FROM generate_series(0, $2::integer - 1) AS i (n);

-- name: ended
-- Inserts $2 succeeded tasks of a type with three attempts each, which ended in one hour. $3 is how
-- many hours ago that was.
WITH ended AS (
    INSERT INTO penstock.task (id, type, state, stage, step, content_type, context, result_type, result,
                               created_at, updated_at, finished_at)
    OVERRIDING SYSTEM VALUE
    SELECT (extract(epoch FROM at - '2026-01-01 00:00:00+00') * 1000000)::bigint, $1, 'succeeded', 'three', 2, 'json', document,
           'json', document, at, at, at
    FROM (SELECT n, now() - make_interval(secs => 3600 * ($3::integer + 1 - n::float8 / $2::integer)) AS at,
                 convert_to(json_build_object('at', extract(epoch FROM now()), 'pad', repeat('x', 160))::text, 'UTF8') AS document
          FROM generate_series(0, $2::integer - 1) AS i (n)) t
    RETURNING id, finished_at, context
)
INSERT INTO penstock.attempt (task_id, step, attempt, stage, outcome, worker, queued_at, started_at, finished_at, input_type, input)
SELECT id, step, 0, stage, outcome, 'worker-of-growth', finished_at, finished_at, finished_at,
       CASE outcome WHEN 'next' THEN 'json' END, CASE outcome WHEN 'next' THEN context END
FROM ended, (VALUES (0, 'one', 'next'), (1, 'two', 'next'), (2, 'three', 'done')) AS s (step, stage, outcome);

-- name: open_day
-- Creates the partition of the day $1 days ago.
SELECT penstock.history_open((now() AT TIME ZONE 'UTC')::date - $1::integer);

-- name: history
-- Inserts tasks of a type into history: $2 of them, which ended on the day $3 days ago.
WITH moved AS (
    INSERT INTO penstock.history (id, type, state, stage, step, attempt, failures, losses, priority, content_type, context,
                                  result_type, result, events, created_at, updated_at, finished_at, attempts,
                                  callbacks_owed)
    SELECT (extract(epoch FROM at - '2026-01-01 00:00:00+00') * 1000000)::bigint, $1, 'succeeded', 'three', 2, 0, 0, 0, 2, 'json',
           document, 'json', document, 'final', at, at, at,
           (SELECT jsonb_agg(jsonb_build_object(
                       'step', step, 'attempt', 0, 'stage', stage, 'outcome', outcome, 'worker', 'worker-of-growth',
                       'error', NULL, 'queued_at', at, 'started_at', at, 'finished_at', at, 'input_type', CASE outcome WHEN 'next' THEN 'json' END,
                       'input', CASE outcome WHEN 'next' THEN document END, 'input_ref', NULL))
            FROM (VALUES (0, 'one', 'next'), (1, 'two', 'next'), (2, 'three', 'done')) AS s (step, stage, outcome)), '[]'
    FROM (SELECT n, (((now() AT TIME ZONE 'UTC')::date - $3::integer)::timestamp AT TIME ZONE 'UTC')
                    + make_interval(secs => 86400 * n::float8 / $2::integer) AS at,
                 convert_to(json_build_object('at', extract(epoch FROM now()), 'pad', repeat('x', 160))::text, 'UTF8') AS document
          FROM generate_series(0, $2::integer - 1) AS i (n)) t
    RETURNING 1
)
UPDATE penstock.history_part SET tasks = tasks + (SELECT count(*) FROM moved)
WHERE day = (now() AT TIME ZONE 'UTC')::date - $3::integer AND dropped_at IS NULL;

-- name: succeeded
-- How many tasks of a type succeeded since a moment; an index scan over these alone.
SELECT count(*) FROM penstock.task WHERE finished_at >= $2 AND type = $1 AND state = 'succeeded';

-- name: latencies
-- Milliseconds from submission to the end, of the tasks of a type that ended since a moment.
SELECT (extract(epoch FROM finished_at)::float8 - (convert_from(result, 'UTF8')::jsonb ->> 'at')::float8) * 1000 AS ms
FROM penstock.task WHERE finished_at >= $2 AND type = $1 AND state = 'succeeded';
