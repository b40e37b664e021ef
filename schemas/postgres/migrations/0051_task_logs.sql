-- Segments of task logs. A row does not grow with the lines of its segment.
CREATE TABLE log_segment (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    partition    integer NOT NULL,
    partitions   integer NOT NULL,
    first_offset bigint NOT NULL,
    next_offset  bigint NOT NULL,
    object_key   text NOT NULL UNIQUE,
    size         bigint NOT NULL,
    raw_size     bigint NOT NULL,
    lines        bigint NOT NULL,
    runs         integer NOT NULL,
    begin_at     timestamptz NOT NULL,
    end_at       timestamptz NOT NULL,
    tasks        bytea NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now()
);
-- A search for a task's segments reads a range of time; retention deletes from its beginning.
CREATE INDEX log_segment_end ON log_segment (end_at);
-- Filters are hashes, which do not compress.
ALTER TABLE log_segment ALTER COLUMN tasks SET STORAGE EXTERNAL;

CREATE TABLE log_deletion (
    task_id    bigint PRIMARY KEY,
    deleted_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE log_segment IS 'Segments of task logs: each is one object with the lines of some offsets of the topic task-logs.';
COMMENT ON COLUMN log_segment.partitions IS 'Partitions of the topic when the segment was written: a task has the partition of its id modulo this.';
COMMENT ON COLUMN log_segment.tasks IS 'Bloom filter of the tasks with lines in the segment (core/log_segment.py).';
COMMENT ON TABLE log_deletion IS 'Tasks whose logs are hidden; their lines go with their segments.';
