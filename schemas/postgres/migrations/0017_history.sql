-- History: what has ended longer ago than task-sync is told to keep moves out of the hot tables, a task with its attempts and
-- callbacks as one row, into partitions by the UTC day it ended on; a day that is old enough is archived and its partition dropped.
--
-- The hot tables stay as they are and unpartitioned: a unique key of a partitioned table must contain the partition's
-- column, and neither a task's id nor its idempotency key has a day in it. Finished rows would also have to change partition
-- when a task ends, which is an insert and a delete on the path of every stage instead of one later in bulk.

-- The order in which they are moved. Only what has ended is in it, so nothing that is released or run writes it.
CREATE INDEX task_finished ON penstock.task (finished_at, id) WHERE finished_at IS NOT NULL;

-- What a task has while it runs (its lease, its mark for pausing, `tracked`) is not here: it is empty by then.
CREATE TABLE penstock.history (
    id               bigint NOT NULL,
    type             text NOT NULL,
    state            text NOT NULL,
    stage            text NOT NULL,
    step             integer NOT NULL,
    attempt          integer NOT NULL,
    failures         integer NOT NULL,
    losses           integer NOT NULL,
    priority         smallint NOT NULL,
    content_type     text NOT NULL,
    context          bytea,
    context_ref      text,
    result_type      text,
    result           bytea,
    result_ref       text,
    error            text,
    idempotency_key  text,
    events           text NOT NULL,
    callbacks        text[],
    labels           jsonb,
    worker           text,
    key              text COLLATE "C",
    created_at       timestamptz NOT NULL,
    updated_at       timestamptz NOT NULL,
    finished_at      timestamptz NOT NULL,
    attempts         jsonb NOT NULL,
    callbacks_owed   jsonb NOT NULL,
    moved_at         timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (id, finished_at)
) PARTITION BY RANGE (finished_at);
COMMENT ON TABLE penstock.history IS 'tasks that ended a while ago, each as it was when it was moved';
COMMENT ON COLUMN penstock.history.attempts IS 'rows of attempt, by step and attempt';
COMMENT ON COLUMN penstock.history.callbacks_owed IS 'rows of callback, in the order of their creation, without their headers, whose values are secrets';

-- Who submits a key while its task is being moved is told of that task.
CREATE INDEX history_idempotency ON penstock.history (type, idempotency_key) WHERE idempotency_key IS NOT NULL;

CREATE TABLE penstock.history_part (
    day          date NOT NULL,
    part         integer NOT NULL,
    tasks        bigint NOT NULL DEFAULT 0,
    opened_at    timestamptz NOT NULL DEFAULT now(),
    sealed_at    timestamptz,
    object       text,
    bytes        bigint,
    sha256       text,
    archived_at  timestamptz,
    dropped_at   timestamptz,
    PRIMARY KEY (day, part),
    CHECK (archived_at IS NULL OR (sealed_at IS NOT NULL AND object IS NOT NULL AND bytes IS NOT NULL AND sha256 IS NOT NULL)),
    CHECK (dropped_at IS NULL OR sealed_at IS NOT NULL)
);
COMMENT ON TABLE penstock.history_part IS 'partitions of history, those that were dropped, too: the manifest of the archive';
COMMENT ON COLUMN penstock.history_part.part IS 'from 1; a task that is moved after its day was dropped begins another';
COMMENT ON COLUMN penstock.history_part.tasks IS 'counted in the statement that moves them';
COMMENT ON COLUMN penstock.history_part.sealed_at IS 'since when no task is moved into it';
COMMENT ON COLUMN penstock.history_part.archived_at IS 'when its object had been read back and found whole';

-- Only one part of a day is there at a time.
CREATE UNIQUE INDEX history_part_present ON penstock.history_part (day) WHERE dropped_at IS NULL;

-- Makes sure that there is a partition for a day; returns whether it had to be made. Attached rather than made in its place:
-- that waits for nobody who reads history, and nobody who does waits for it.
CREATE FUNCTION penstock.history_open(wanted date) RETURNS boolean LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
DECLARE
    number integer;
    name text;
BEGIN
    IF EXISTS (SELECT FROM penstock.history_part WHERE day = wanted AND dropped_at IS NULL) THEN
        RETURN false;
    END IF;
    INSERT INTO penstock.history_part (day, part)
    SELECT wanted, coalesce(max(part), 0) + 1 FROM penstock.history_part WHERE day = wanted
    RETURNING part INTO number;
    name := format('history_%s_%s', to_char(wanted, 'YYYYMMDD'), number);
    EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.history INCLUDING ALL)', name);
    EXECUTE format('ALTER TABLE penstock.history ATTACH PARTITION penstock.%I FOR VALUES FROM (%L) TO (%L)', name,
                   wanted::timestamp AT TIME ZONE 'UTC', (wanted + 1)::timestamp AT TIME ZONE 'UTC');
    RETURN true;
END $$;

-- Drops the sealed partition of a day, archived unless that is not asked for, and notes it, both or neither; returns whether
-- it was noted. Who reads history makes it give up, so that nobody queues behind it for longer than its timeout.
CREATE FUNCTION penstock.history_drop(wanted date, number integer, archived boolean) RETURNS boolean
LANGUAGE plpgsql SET lock_timeout = '1s' AS $$
BEGIN
    UPDATE penstock.history_part SET dropped_at = now()
    WHERE day = wanted AND part = number AND dropped_at IS NULL AND sealed_at IS NOT NULL
      AND (archived_at IS NOT NULL OR NOT archived);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS penstock.%I', format('history_%s_%s', to_char(wanted, 'YYYYMMDD'), number));
    RETURN true;
END $$;
