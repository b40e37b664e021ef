-- Segments of task logs.

-- name: insert
-- Inserts the row of a segment, if there is one ($7 is not NULL).
-- It was read from topic $1, partition $2, and moves the reader's offset from $3 to $4, and its
-- identity from $5 to $6. When they are not $3 and $5, another process reads the partition now, and
-- nothing is inserted. Returns a row if the offset was moved.
WITH moved AS (
    UPDATE ingested SET next_offset = $4, identity = $6::text
    WHERE topic = $1 AND partition = $2 AND next_offset = $3 AND identity IS NOT DISTINCT FROM $5::text
      -- As in `tasks.submit`.
      AND (SELECT set_config('lock_timeout', coalesce(nullif(current_setting('lock_timeout'), '0'), 400 + floor(200 * random()) || 'ms'), true)) IS NOT NULL
    RETURNING 1
), inserted AS (
    INSERT INTO log_segment (partition, partitions, first_offset, next_offset, object_key, size, raw_size,
                             lines, runs, begin_at, end_at, tasks)
    SELECT $2, $8, $3, $4, $7, $9, $10, $11, $12, $13, $14, $15
    FROM moved WHERE $7::text IS NOT NULL
)
SELECT 1 AS moved FROM moved;

-- name: find
-- The segments that may have lines of a task ($1) of the moments from $2 to $3, in the order of
-- their offsets, and how far its partition of topic $4 with $5 partitions has been stored.
-- $6 are the hashes of the task: all their bits are set in the filter of a segment that has it.
SELECT s.id, s.object_key, s.size, s.partition, i.next_offset, i.identity
FROM (SELECT 1) AS one
LEFT JOIN ingested i ON i.topic = $4::text AND i.partition = ($1::bigint % $5::integer)::integer
LEFT JOIN log_segment s
    ON s.end_at >= $2::timestamptz AND s.begin_at <= $3::timestamptz
   AND s.partition = $1::bigint % s.partitions
   AND get_bit(s.tasks, ($6::bigint[])[1] % (octet_length(s.tasks)::bigint * 8)) = 1
   AND get_bit(s.tasks, ($6::bigint[])[2] % (octet_length(s.tasks)::bigint * 8)) = 1
   AND get_bit(s.tasks, ($6::bigint[])[3] % (octet_length(s.tasks)::bigint * 8)) = 1
   AND get_bit(s.tasks, ($6::bigint[])[4] % (octet_length(s.tasks)::bigint * 8)) = 1
ORDER BY s.id;

-- name: lock
-- Locks retention for as long as this session lives; returns whether it did.
SELECT pg_try_advisory_lock(hashtextextended('penstock.task-logs', 0)) AS locked;

-- name: expire
-- Deletes the rows of at most $2 segments that ended before $1, and returns their objects.
DELETE FROM log_segment
WHERE id IN (SELECT id FROM log_segment WHERE end_at < $1::timestamptz ORDER BY end_at LIMIT $2)
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
