-- Segments of task logs.

-- name: insert
-- Inserts the row of a segment, if there is one (`object_key` is not NULL), and moves the reader's
-- offset as `tasks.submit`. Returns a row if the offset was moved.
WITH moved AS (
    UPDATE ingested SET next_offset = $next_offset, identity = $next_identity::text
    WHERE topic = $topic AND partition = $partition AND next_offset = $first_offset AND identity IS NOT DISTINCT FROM $identity::text
      -- As in `tasks.submit`.
      AND (SELECT set_config('lock_timeout', coalesce(nullif(current_setting('lock_timeout'), '0'), 400 + floor(200 * random()) || 'ms'), true)) IS NOT NULL
    RETURNING 1
), inserted AS (
    INSERT INTO log_segment (partition, partitions, first_offset, next_offset, object_key, size, raw_size,
                             lines, runs, begin_at, end_at, tasks)
    SELECT $partition, $partitions, $first_offset, $next_offset, $object_key, $size, $raw_size, $lines, $runs, $begin_at, $end_at, $tasks
    FROM moved WHERE $object_key::text IS NOT NULL
)
SELECT 1 AS moved FROM moved;

-- name: find
-- The segments that may have lines of a task of the moments from `since` to `until`, in the order
-- of their offsets, and how far its partition of the topic with so many partitions has been stored.
-- All bits of the task's `hashes` are set in the filter of a segment that has it.
SELECT s.id, s.object_key, s.size, s.partition, i.next_offset, i.identity
FROM (SELECT 1) AS one
LEFT JOIN ingested i ON i.topic = $topic::text AND i.partition = ($task::bigint % $partitions::integer)::integer
LEFT JOIN log_segment s
    ON s.end_at >= $since::timestamptz AND s.begin_at <= $until::timestamptz
   AND s.partition = $task::bigint % s.partitions
   AND get_bit(s.tasks, ($hashes::bigint[])[1] % (octet_length(s.tasks)::bigint * 8)) = 1
   AND get_bit(s.tasks, ($hashes::bigint[])[2] % (octet_length(s.tasks)::bigint * 8)) = 1
   AND get_bit(s.tasks, ($hashes::bigint[])[3] % (octet_length(s.tasks)::bigint * 8)) = 1
   AND get_bit(s.tasks, ($hashes::bigint[])[4] % (octet_length(s.tasks)::bigint * 8)) = 1
ORDER BY s.id;

-- name: lock
-- Locks retention for as long as this session lives; returns whether it did.
SELECT pg_try_advisory_lock(hashtextextended('penstock.task-logs', 0)) AS locked;

-- name: expire
-- Deletes the rows of at most $2 segments that ended before $1, and returns their objects.
DELETE FROM log_segment
WHERE id = ANY (ARRAY(SELECT id FROM log_segment WHERE end_at < $1::timestamptz ORDER BY end_at LIMIT $2))
RETURNING object_key;

-- name: forget_deletions
DELETE FROM log_deletion WHERE deleted_at < $1::timestamptz;

-- name: known_objects
-- Those of the objects that belong to a segment.
SELECT object_key FROM log_segment WHERE object_key = ANY ($1::text[]);

-- name: delete_log
INSERT INTO log_deletion (task_id) VALUES ($1) ON CONFLICT DO NOTHING;

-- name: is_deleted
SELECT EXISTS (SELECT FROM log_deletion WHERE task_id = $1) AS deleted;

-- name: now
SELECT now() AS now;
