-- History: task-sync moves finished tasks out of the hot tables after a number of days. A task with
-- its attempts and callbacks becomes one row, in a partition by the UTC day of its end. An old day
-- is archived, and its partition is dropped.
--
-- The hot tables are not partitioned: a unique key of a partitioned table must contain the
-- partition's column, and neither a task's id nor its idempotency key contains a day. A task would
-- also change its partition when it ends, which costs an insert and a delete on the path of every
-- stage.

-- The order of the moves. The index has only finished tasks, so releases and stages do not write
-- it.
CREATE INDEX task_finished ON penstock.task (finished_at, id) WHERE finished_at IS NOT NULL;

-- Without the columns that are empty after the end, such as the lease and `tracked`.
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

-- A submission finds an idempotency key while its task is being moved.
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

-- A day has one part at a time.
CREATE UNIQUE INDEX history_part_present ON penstock.history_part (day) WHERE dropped_at IS NULL;

-- Ensures that a day has a partition; returns whether it was created. ATTACH is used because it
-- does not conflict with readers of history.
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

-- Drops the sealed partition of a day, which must be archived unless archiving is off, and records
-- the drop in the same transaction; returns whether it did. It gives up while history is read, so
-- that later queries do not queue behind its lock for longer than the timeout.
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
