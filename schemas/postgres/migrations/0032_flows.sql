-- Flows: definitions, running flows, and what their owner has still to apply.

-- A version never changes, because flows are pinned to it. The column is `json` and not `jsonb`,
-- because the order of the nodes counts.
CREATE TABLE penstock.flow_definition (
    name       text COLLATE "C" NOT NULL,
    version    integer NOT NULL CHECK (version > 0),
    definition json NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    created_by text,
    PRIMARY KEY (name, version)
);

COMMENT ON COLUMN penstock.flow_definition.definition IS 'as in schemas/flows/definition.schema.json';
COMMENT ON COLUMN penstock.flow_definition.created_by IS 'API key or subject of the token; NULL: the gateway did not authenticate';

CREATE TABLE penstock.flow (
    id                bigint PRIMARY KEY,
    root_id           bigint NOT NULL,
    parent_id         bigint,
    parent_node       text,
    parent_generation integer,
    parent_item       integer,
    name              text COLLATE "C" NOT NULL,
    version           integer NOT NULL,
    versions          jsonb,
    status            text NOT NULL DEFAULT 'running'
                      CHECK (status IN ('running', 'succeeded', 'failed', 'cancelled')),
    generation        integer NOT NULL DEFAULT 0,
    paused            boolean NOT NULL DEFAULT false,
    stop              text CHECK (stop IN ('failure', 'timeout', 'cancel')),
    unfinished        integer NOT NULL,
    live              integer NOT NULL DEFAULT 0,
    unsuccessful      integer NOT NULL DEFAULT 0,
    priority          smallint NOT NULL DEFAULT 2 CHECK (priority BETWEEN 0 AND 4),
    inputs            bytea,
    inputs_ref        text,
    output            bytea,
    output_ref        text,
    error             text,
    idempotency_key   text,
    events            text NOT NULL DEFAULT 'final' CHECK (events IN ('final', 'all')),
    callbacks         text[],
    labels            jsonb,
    traceparent       text,
    rerun_of          bigint,
    schedule          text,
    tick              timestamptz,
    task_id           bigint,
    task_step         integer,
    task_stage        text,
    definition        json,
    created_at        timestamptz NOT NULL DEFAULT now(),
    updated_at        timestamptz NOT NULL DEFAULT now(),
    finished_at       timestamptz
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

COMMENT ON COLUMN penstock.flow.root_id IS 'the flow at the top; its own id for a flow without a parent';
COMMENT ON COLUMN penstock.flow.parent_item IS 'item of the parent''s map; NULL: its node is not a map';
COMMENT ON COLUMN penstock.flow.versions IS 'of a root: version of each definition below it, by name, fixed at its start';
COMMENT ON COLUMN penstock.flow.stop IS 'why nothing more starts in this generation';
COMMENT ON COLUMN penstock.flow.unfinished IS 'nodes that are not final';
COMMENT ON COLUMN penstock.flow.live IS 'nodes that run';
COMMENT ON COLUMN penstock.flow.unsuccessful IS 'nodes that failed, were cancelled or are blocked';
COMMENT ON COLUMN penstock.flow.inputs IS 'JSON';
COMMENT ON COLUMN penstock.flow.inputs_ref IS 'JSON with key, sha256 and size of the object that has inputs above the inline limit';
COMMENT ON COLUMN penstock.flow.output IS 'JSON; NULL: none, or output_ref';
COMMENT ON COLUMN penstock.flow.callbacks IS 'as in task.callbacks; child flows have none';
COMMENT ON COLUMN penstock.flow.rerun_of IS 'the flow that this one repeats from the start';
COMMENT ON COLUMN penstock.flow.task_id IS 'the waiting task that the end of this flow wakes; NULL: none';
COMMENT ON COLUMN penstock.flow.task_step IS 'step of that task in which it began to wait';
COMMENT ON COLUMN penstock.flow.task_stage IS 'stage that the task enters then';
COMMENT ON COLUMN penstock.flow.definition IS 'of a flow that a task waits for: its definition, which has version 0 and the name of the type';
COMMENT ON COLUMN penstock.flow.tick IS 'nominal time of its schedule';

-- A child cannot exist twice, also when two owners decide.
CREATE UNIQUE INDEX flow_child ON penstock.flow (parent_id, parent_node, coalesce(parent_item, -1), parent_generation)
    WHERE parent_id IS NOT NULL;
CREATE UNIQUE INDEX flow_task ON penstock.flow (task_id, task_step) WHERE task_id IS NOT NULL;
CREATE UNIQUE INDEX flow_idempotency ON penstock.flow (name, idempotency_key) WHERE idempotency_key IS NOT NULL;
CREATE UNIQUE INDEX flow_tick ON penstock.flow (schedule, tick) WHERE schedule IS NOT NULL;
CREATE INDEX flow_family ON penstock.flow (root_id, id);
CREATE INDEX flow_running ON penstock.flow (name, id) WHERE status = 'running';
CREATE INDEX flow_finished ON penstock.flow (finished_at, id) WHERE finished_at IS NOT NULL;
CREATE INDEX flow_labels ON penstock.flow USING gin (labels jsonb_path_ops) WHERE labels IS NOT NULL;

-- A node without a row is pending.
CREATE TABLE penstock.flow_node (
    flow_id      bigint NOT NULL,
    name         text COLLATE "C" NOT NULL,
    status       text NOT NULL
                 CHECK (status IN ('pending', 'ready', 'running', 'succeeded', 'failed', 'cancelled', 'skipped', 'blocked')),
    generation   integer NOT NULL DEFAULT 0,
    arrivals     jsonb,
    chosen_case  text,
    timed_out    text,
    recovers     boolean NOT NULL DEFAULT false,
    total        integer,
    opened       integer NOT NULL DEFAULT 0,
    succeeded    integer NOT NULL DEFAULT 0,
    unsuccessful integer NOT NULL DEFAULT 0,
    retry        integer NOT NULL DEFAULT 0,
    enough       boolean NOT NULL DEFAULT false,
    list         bytea,
    list_ref     text,
    output       bytea,
    output_type  text,
    output_ref   text,
    reason       text,
    started_at   timestamptz,
    finished_at  timestamptz,
    PRIMARY KEY (flow_id, name)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

COMMENT ON TABLE penstock.flow_node IS 'nodes that have begun, or have arrivals; all others are pending';
COMMENT ON COLUMN penstock.flow_node.generation IS 'generation of the flow in which the node last started';
COMMENT ON COLUMN penstock.flow_node.arrivals IS 'what its edges have brought: succeeded, failed or dead by the edge''s position';
COMMENT ON COLUMN penstock.flow_node.recovers IS 'whether its next start continues its child flow, or its items, in place';
COMMENT ON COLUMN penstock.flow_node.total IS 'of a map: items of its list; NULL: the list is not known';
COMMENT ON COLUMN penstock.flow_node.opened IS 'of a map: items 0 to opened - 1 have a child';
COMMENT ON COLUMN penstock.flow_node.retry IS 'of a map: items that ended without success in an earlier generation and wait to be started again';
COMMENT ON COLUMN penstock.flow_node.enough IS 'of a map: whether k items have succeeded';
COMMENT ON COLUMN penstock.flow_node.list IS 'of a map: its list as JSON; NULL: none, or list_ref';
COMMENT ON COLUMN penstock.flow_node.output_type IS 'content type of output or output_ref; NULL: no output';

-- Nodes as they were before a recovery ran them again.
CREATE TABLE penstock.flow_node_history (
    flow_id        bigint NOT NULL,
    name           text COLLATE "C" NOT NULL,
    flow_generation integer NOT NULL,
    status         text NOT NULL,
    generation     integer NOT NULL,
    chosen_case    text,
    timed_out      text,
    total          integer,
    succeeded      integer NOT NULL,
    unsuccessful   integer NOT NULL,
    reason         text,
    started_at     timestamptz,
    finished_at    timestamptz,
    PRIMARY KEY (flow_id, name, flow_generation)
);

COMMENT ON COLUMN penstock.flow_node_history.flow_generation IS 'generation of the flow that the recovery ended';

-- The inbox has what flows must learn. The owner of the shard deletes a row in the transaction that
-- applies it.
CREATE TABLE penstock.flow_inbox (
    root_id    bigint NOT NULL,
    shard      smallint NOT NULL GENERATED ALWAYS AS ((root_id % 64)::smallint) STORED,
    id         bigint GENERATED ALWAYS AS IDENTITY,
    flow_id    bigint NOT NULL,
    kind       text NOT NULL
               CHECK (kind IN ('began', 'task', 'event', 'visit', 'pause', 'resume', 'cancel', 'cancel_live', 'recover')),
    node       text,
    generation integer,
    item       integer,
    state      text,
    task_id    bigint,
    detail     jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (shard, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000);

COMMENT ON COLUMN penstock.flow_inbox.root_id IS 'the flow at the top: its whole family has one owner';
COMMENT ON COLUMN penstock.flow_inbox.state IS 'of kind task: final state of the task';
COMMENT ON COLUMN penstock.flow_inbox.detail IS 'of kind recover: generation and nodes; of kind event: id of the event';

-- Moments at which flows have something to learn.
CREATE TABLE penstock.flow_limit (
    root_id    bigint NOT NULL,
    shard      smallint NOT NULL GENERATED ALWAYS AS ((root_id % 64)::smallint) STORED,
    flow_id    bigint NOT NULL,
    node       text NOT NULL DEFAULT '',
    generation integer NOT NULL,
    kind       text NOT NULL CHECK (kind IN ('start_within', 'finish_within', 'warn_after', 'timeout', 'timer')),
    at         timestamptz NOT NULL,
    PRIMARY KEY (flow_id, node, generation, kind)
);

COMMENT ON COLUMN penstock.flow_limit.node IS 'empty: a limit of the flow';
COMMENT ON COLUMN penstock.flow_limit.kind IS 'the limit; timer: the end of a node of this kind';

CREATE INDEX flow_limit_due ON penstock.flow_limit (shard, at);

CREATE TABLE penstock.flow_wait (
    flow_id    bigint NOT NULL,
    node       text NOT NULL,
    generation integer NOT NULL,
    root_id    bigint NOT NULL,
    namespace  text COLLATE "C" NOT NULL,
    event      text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL DEFAULT '',
    PRIMARY KEY (flow_id, node)
);

CREATE INDEX flow_wait_event ON penstock.flow_wait (namespace, event, key);

-- Events are kept for a day, so that one may come before its wait.
CREATE TABLE penstock.flow_event (
    namespace  text COLLATE "C" NOT NULL,
    id         text COLLATE "C" NOT NULL,
    event      text COLLATE "C" NOT NULL,
    key        text COLLATE "C" NOT NULL DEFAULT '',
    data       bytea,
    data_ref   text,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (id, namespace)
);

COMMENT ON COLUMN penstock.flow_event.id IS 'of the sender: an event that is sent twice counts once';
COMMENT ON COLUMN penstock.flow_event.data IS 'JSON; NULL: none, or data_ref';

CREATE INDEX flow_event_name ON penstock.flow_event (namespace, event, key);
CREATE INDEX flow_event_created ON penstock.flow_event (created_at);

-- The place of a task in its flow.
ALTER TABLE penstock.task
    ADD COLUMN flow_id bigint,
    ADD COLUMN flow_root_id bigint,
    ADD COLUMN flow_priority smallint,
    ADD COLUMN flow_node text,
    ADD COLUMN flow_generation integer,
    ADD COLUMN flow_item integer;

COMMENT ON COLUMN penstock.task.flow_id IS 'the flow that the task belongs to; NULL: none';
COMMENT ON COLUMN penstock.task.flow_root_id IS 'the flow at the top, by whose priority and id the task is released';
COMMENT ON COLUMN penstock.task.flow_priority IS 'priority of that flow';
COMMENT ON COLUMN penstock.task.flow_item IS 'item of a map; NULL: its node is not a map';

-- One place sees every end of a task of a flow, whichever service ends it, also one of an earlier
-- release, whose role has no right on the inbox. A result that arrives after the end changes the
-- task and not its flow.
CREATE FUNCTION penstock.end_in_flow() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = penstock, pg_temp AS $$
DECLARE
    shards integer;
BEGIN
    WITH noted AS (
        INSERT INTO penstock.flow_inbox (root_id, flow_id, kind, node, generation, item, state, task_id)
        SELECT n.flow_root_id, n.flow_id, 'task', n.flow_node, n.flow_generation, n.flow_item, n.state, n.id
        FROM new_tasks n JOIN old_tasks o ON o.id = n.id
        WHERE n.flow_id IS NOT NULL
          AND n.state IN ('succeeded', 'failed', 'cancelled', 'quarantined')
          AND o.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
        RETURNING shard
    )
    SELECT count(pg_notify('penstock_flows', shard::text)) INTO shards FROM (SELECT DISTINCT shard FROM noted) AS n;
    -- The children of a task that waits end with it.
    IF EXISTS (SELECT FROM old_tasks WHERE state = 'waiting') THEN
        WITH noted AS (
            INSERT INTO penstock.flow_inbox (root_id, flow_id, kind)
            SELECT f.root_id, f.id, 'cancel'
            FROM old_tasks o JOIN new_tasks n ON n.id = o.id JOIN penstock.flow f ON f.task_id = o.id
            WHERE o.state = 'waiting' AND f.status = 'running'
              AND n.state IN ('succeeded', 'failed', 'cancelled', 'quarantined')
            RETURNING shard
        )
        SELECT count(pg_notify('penstock_flows', shard::text)) INTO shards FROM (SELECT DISTINCT shard FROM noted) AS n;
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER task_flow_ended AFTER UPDATE ON penstock.task
REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks
FOR EACH STATEMENT EXECUTE FUNCTION penstock.end_in_flow();

-- Flows and tasks take their ids from one sequence: an id names one of either, and the ids tell
-- which was submitted first.
CREATE TRIGGER flow_ids BEFORE INSERT ON penstock.flow
FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.task_id_seq');

-- With the rights of its owner, because roles have none on sequences.
CREATE FUNCTION penstock.set_flow_id() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = penstock, pg_temp AS $$
BEGIN
    NEW.id := nextval('penstock.task_id_seq');
    NEW.root_id := coalesce(NEW.root_id, NEW.id);
    RETURN NEW;
END $$;

CREATE TRIGGER flow_id BEFORE INSERT ON penstock.flow
FOR EACH ROW WHEN (NEW.id IS NULL) EXECUTE FUNCTION penstock.set_flow_id();
