-- Task types, tasks, their attempts, and the outbox.

CREATE TABLE task_type (
    name           text PRIMARY KEY,
    first_stage    text NOT NULL DEFAULT 'start',
    partitions     integer NOT NULL DEFAULT 8 CHECK (partitions > 0),
    lease_ms       integer NOT NULL DEFAULT 300000 CHECK (lease_ms > 0),
    max_attempts   integer NOT NULL DEFAULT 3 CHECK (max_attempts > 0),
    retry_base_ms  integer NOT NULL DEFAULT 1000,
    retry_factor   double precision NOT NULL DEFAULT 2,
    retry_max_ms   integer NOT NULL DEFAULT 300000,
    retry_jitter   double precision NOT NULL DEFAULT 0.5,
    events         text NOT NULL DEFAULT 'final' CHECK (events IN ('final', 'all')),
    created_at     timestamptz NOT NULL DEFAULT now(),
    updated_at     timestamptz NOT NULL DEFAULT now()
);

-- Every stage updates its task's row a few times, each time into another partial index, so no
-- update is heap-only. Therefore the table has few indexes, all partial, and a fill factor that
-- leaves space.
CREATE TABLE task (
    id               bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    type             text NOT NULL REFERENCES task_type (name),
    state            text NOT NULL CHECK (state IN ('scheduled', 'ready', 'queued', 'running', 'waiting', 'paused',
                                                    'succeeded', 'failed', 'cancelled', 'quarantined')),
    stage            text NOT NULL,
    step             integer NOT NULL DEFAULT 0,
    attempt          integer NOT NULL DEFAULT 0,
    failures         integer NOT NULL DEFAULT 0,
    losses           integer NOT NULL DEFAULT 0,
    priority         smallint NOT NULL DEFAULT 2 CHECK (priority BETWEEN 0 AND 4),
    content_type     text NOT NULL,
    context          bytea,
    context_ref      text,
    result_type      text,
    result           bytea,
    result_ref       text,
    error            text,
    idempotency_key  text,
    events           text NOT NULL DEFAULT 'final' CHECK (events IN ('final', 'all')),
    callbacks        text[],
    labels           jsonb,
    worker           text,
    lease_partition  integer,
    due_at           timestamptz,
    created_at       timestamptz NOT NULL DEFAULT now(),
    updated_at       timestamptz NOT NULL DEFAULT now(),
    finished_at      timestamptz,
    CHECK ((context IS NULL) <> (context_ref IS NULL)),
    CHECK (state <> 'scheduled' OR due_at IS NOT NULL)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_insert_scale_factor = 0.1);

COMMENT ON COLUMN task.step IS 'stages entered so far: with id and attempt it is the fence, also when a stage is visited twice';
COMMENT ON COLUMN task.failures IS 'attempts of the current stage whose handler failed';
COMMENT ON COLUMN task.losses IS 'attempts of the current stage whose worker was lost';
COMMENT ON COLUMN task.context_ref IS 'JSON: key, sha256 and size of an object above the inline limit';
COMMENT ON COLUMN task.lease_partition IS 'while running: the heartbeats partition over which its worker reports';

-- S3: the order of release.
CREATE INDEX task_ready ON task (type, priority, id) WHERE state = 'ready';
-- S4: the tasks that are due next.
CREATE INDEX task_scheduled ON task (due_at) WHERE state = 'scheduled';
-- The leases that a processor restores when it gets a partition.
CREATE INDEX task_running ON task (lease_partition) WHERE state = 'running';
-- Failed tasks by type, for operators.
CREATE INDEX task_failed ON task (type, id) WHERE state IN ('failed', 'quarantined');
-- T5: a repeated idempotency key finds the first task.
CREATE UNIQUE INDEX task_idempotency ON task (type, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE INDEX task_labels ON task USING gin (labels jsonb_path_ops) WHERE labels IS NOT NULL;

-- One row per ended attempt.
CREATE TABLE attempt (
    task_id      bigint NOT NULL,
    step         integer NOT NULL,
    attempt      integer NOT NULL,
    stage        text NOT NULL,
    outcome      text NOT NULL,
    worker       text,
    error        text,
    started_at   timestamptz,
    finished_at  timestamptz NOT NULL,
    PRIMARY KEY (task_id, step, attempt)
);

-- Batches of a release: written with the release and removed once Kafka has all records. After a
-- crash the next owner of the type sends them again.
CREATE TABLE release (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    type        text NOT NULL,
    task_ids    bigint[] NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now()
);

-- The outbox of events: batches that are written with the transitions they report.
CREATE TABLE outbox (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    keys        bytea[] NOT NULL,
    records     bytea[] NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now()
);

-- One row per callback, written with the transition it reports.
CREATE TABLE callback (
    id           text PRIMARY KEY,
    target       text NOT NULL,
    task_id      bigint NOT NULL,
    state        text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'delivered', 'dead')),
    attempt      integer NOT NULL DEFAULT 0,
    body         bytea NOT NULL,
    error        text,
    due_at       timestamptz NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    finished_at  timestamptz
) WITH (fillfactor = 80);

COMMENT ON COLUMN callback.due_at IS 'while pending: when its record is written (again) unless its fate is known by then';

CREATE INDEX callback_due ON callback (due_at) WHERE state = 'pending';
CREATE INDEX callback_task ON callback (task_id);

-- The ingest offsets, written in the transaction of the tasks, so a record is ingested exactly
-- once.
CREATE TABLE ingested (
    topic        text NOT NULL,
    partition    integer NOT NULL,
    next_offset  bigint NOT NULL,
    PRIMARY KEY (topic, partition)
);
