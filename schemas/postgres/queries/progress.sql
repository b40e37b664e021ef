-- The progress of attempts.

-- name: write
-- Only of attempts that are current, and from the workers that hold them. A queued task has no
-- worker yet: its claim is written a moment later.
INSERT INTO task_progress AS p (task_id, step, attempt, fraction, message, reported_at)
SELECT i.id, i.step, i.attempt, i.fraction, i.message, i.reported_at
FROM unnest({{$progress}}) WITH ORDINALITY AS i ({{progress}}, ordinal)
     JOIN task t ON t.id = i.id AND t.step = i.step AND t.attempt = i.attempt
WHERE t.id = ANY ($id::bigint[]) AND t.state IN ('queued', 'running') AND (t.worker IS NULL OR t.worker = i.worker)
ORDER BY i.ordinal
ON CONFLICT (task_id) DO UPDATE
SET step = excluded.step, attempt = excluded.attempt, fraction = excluded.fraction, message = excluded.message,
    reported_at = excluded.reported_at
-- A process that owned the partition before may be late.
WHERE (p.step, p.attempt) <> (excluded.step, excluded.attempt) OR p.reported_at <= excluded.reported_at
RETURNING task_id;

-- name: sweep
-- Removes what belongs to no current attempt. Rows that are being written stay until the next time.
DELETE FROM task_progress
WHERE task_id = ANY (ARRAY(
    SELECT p.task_id
    FROM task_progress p
    WHERE NOT EXISTS (
        SELECT FROM task t
        WHERE t.id = p.task_id AND t.step = p.step AND t.attempt = p.attempt AND t.state IN ('queued', 'running')
        OFFSET 0  -- a join would read all tasks
    )
    LIMIT 10000
    FOR UPDATE OF p SKIP LOCKED
));

-- name: of_tasks
-- The progress of current attempts; those of the first $2 tasks.
SELECT p.task_id, p.fraction, p.message, p.reported_at
FROM task_progress p JOIN task t ON t.id = p.task_id AND t.step = p.step AND t.attempt = p.attempt
WHERE p.task_id = ANY ($1::bigint[]) AND t.id = ANY ($1::bigint[]) AND t.state IN ('queued', 'running')
ORDER BY p.task_id
LIMIT $2;
