CREATE SCHEMA penstock;

CREATE FUNCTION penstock.advance_ids() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
DECLARE
    ids CONSTANT regclass := TG_ARGV[0];
    lock CONSTANT bigint := hashtextextended('penstock.ids', 0);
    minute CONSTANT bigint := 60000000;
    server CONSTANT bigint := extract(epoch FROM pg_postmaster_start_time()) * 1000000;
    clock_us bigint := extract(epoch FROM clock_timestamp() - '2026-01-01 00:00:00+00') * 1000000;
    ahead bigint := pg_sequence_last_value('penstock.id_ahead');
BEGIN
    -- JavaScript reads ids below 2^53, which is the year 2311. A clock beyond 2^52 is wrong.
    IF clock_us NOT BETWEEN 0 AND 4503599627370496 THEN
        clock_us := 0;
    END IF;
    -- A millisecond is accepted, since no other server takes over within it. A sequence is not
    -- moved more often.
    IF pg_sequence_last_value('penstock.id_server') = server AND pg_sequence_last_value(ids) > clock_us + ahead - 1000 THEN
        RETURN NULL;
    END IF;
    BEGIN
        -- A session's lock: one of the transaction would make submissions wait for each other.
        PERFORM pg_advisory_lock(lock);
        ahead := greatest(pg_sequence_last_value('penstock.id_ahead'), 0);
        IF pg_sequence_last_value('penstock.id_server') IS DISTINCT FROM server THEN
            ahead := ahead + minute;
            PERFORM setval('penstock.id_ahead', ahead);
            PERFORM setval(each, greatest(pg_sequence_last_value(each) + minute, clock_us + ahead))
            FROM unnest(ARRAY['penstock.task_id_seq', 'penstock.outbox_id_seq', 'penstock.release_id_seq']::regclass[]) AS each;
            PERFORM setval('penstock.id_server', server);
        ELSE
            PERFORM setval(ids, greatest(pg_sequence_last_value(ids), clock_us + ahead));
        END IF;
        PERFORM pg_advisory_unlock(lock);
    EXCEPTION WHEN query_canceled OR OTHERS THEN
        PERFORM pg_advisory_unlock(lock);
        RAISE;
    END;
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.backlog_state(state text) RETURNS text
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    AS $$
    SELECT CASE WHEN state IN ('queued', 'running') THEN 'in_flight'
                WHEN state IN ('succeeded', 'failed', 'cancelled', 'quarantined') THEN NULL
                ELSE state END
$$;

COMMENT ON FUNCTION penstock.backlog_state(state text) IS 'state under which `backlog` counts a task; NULL: it does not count the task';

CREATE FUNCTION penstock.count_deleted() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, priority, penstock.backlog_state(state), -count(*) FROM old_tasks
    WHERE penstock.backlog_state(state) IS NOT NULL
    GROUP BY type, stage, priority, penstock.backlog_state(state);
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.count_inserted() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, priority, penstock.backlog_state(state), count(*) FROM new_tasks
    WHERE penstock.backlog_state(state) IS NOT NULL
    GROUP BY type, stage, priority, penstock.backlog_state(state);
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.count_updated() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, priority, counted, sum(tasks)
    FROM (
        SELECT type, stage, priority, penstock.backlog_state(state) AS counted, 1 AS tasks FROM new_tasks
        UNION ALL
        SELECT type, stage, priority, penstock.backlog_state(state), -1 FROM old_tasks
    ) AS c
    WHERE counted IS NOT NULL
    GROUP BY type, stage, priority, counted HAVING sum(tasks) <> 0;
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.history_drop(wanted date, number integer, archived boolean) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET lock_timeout TO '1s'
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
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

CREATE FUNCTION penstock.history_open(wanted date) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET lock_timeout TO '1s'
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
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

CREATE TABLE penstock.api_key (
    id text NOT NULL,
    name text NOT NULL,
    digest bytea NOT NULL,
    role text NOT NULL,
    namespaces text[],
    rate double precision,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    last_used_at timestamp with time zone,
    replaced_by text,
    CONSTRAINT api_key_digest_check CHECK ((octet_length(digest) = 32)),
    CONSTRAINT api_key_namespaces_check CHECK ((cardinality(namespaces) > 0)),
    CONSTRAINT api_key_rate_check CHECK ((rate > (0)::double precision)),
    CONSTRAINT api_key_role_check CHECK ((role = ANY (ARRAY['reader'::text, 'submitter'::text, 'worker'::text, 'operator'::text, 'admin'::text])))
);

COMMENT ON COLUMN penstock.api_key.digest IS 'SHA-256 of the secret, which has 256 random bits';

COMMENT ON COLUMN penstock.api_key.namespaces IS 'namespaces for which the role is valid; NULL: all';

COMMENT ON COLUMN penstock.api_key.rate IS 'most requests per second to one gateway; NULL: the setting of the gateway';

COMMENT ON COLUMN penstock.api_key.last_used_at IS 'time of the last use; each gateway updates it at most once a minute';

COMMENT ON COLUMN penstock.api_key.replaced_by IS 'id of the API key that replaces this one; both are valid until this one expires';

CREATE TABLE penstock.attempt (
    task_id bigint NOT NULL,
    step integer NOT NULL,
    attempt integer NOT NULL,
    stage text NOT NULL,
    outcome text NOT NULL,
    worker text,
    error text,
    started_at timestamp with time zone,
    finished_at timestamp with time zone NOT NULL
);

CREATE TABLE penstock.audit (
    id text NOT NULL,
    seq bigint NOT NULL,
    verb text NOT NULL,
    asked_by text NOT NULL,
    filter jsonb NOT NULL,
    priority smallint,
    rate double precision,
    state text DEFAULT 'running'::text NOT NULL,
    changed bigint DEFAULT 0 NOT NULL,
    found_in jsonb DEFAULT '{}'::jsonb NOT NULL,
    behind bigint DEFAULT 0 NOT NULL,
    upto bigint NOT NULL,
    next_at timestamp with time zone DEFAULT now() NOT NULL,
    stopped_by text,
    error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    actor text,
    namespaces text[],
    CONSTRAINT audit_priority_check CHECK (((priority >= 0) AND (priority <= 4))),
    CONSTRAINT audit_rate_check CHECK ((rate > (0)::double precision)),
    CONSTRAINT audit_state_check CHECK ((state = ANY (ARRAY['running'::text, 'done'::text, 'stopped'::text, 'failed'::text]))),
    CONSTRAINT audit_verb_check CHECK ((verb = ANY (ARRAY['cancel'::text, 'pause'::text, 'resume'::text, 'reprioritise'::text, 'recover'::text])))
);

COMMENT ON COLUMN penstock.audit.seq IS 'order of the requests';

COMMENT ON COLUMN penstock.audit.filter IS 'the tasks to change, as requested (TaskFilter in openapi.json)';

COMMENT ON COLUMN penstock.audit.priority IS 'new priority, for the verb reprioritise';

COMMENT ON COLUMN penstock.audit.rate IS 'most tasks per second; NULL: no limit';

COMMENT ON COLUMN penstock.audit.found_in IS 'number of changed tasks by the state before the change';

COMMENT ON COLUMN penstock.audit.behind IS 'id of the last task that the operation has examined';

COMMENT ON COLUMN penstock.audit.upto IS 'largest task id at the time of the request; the operation ends there';

COMMENT ON COLUMN penstock.audit.next_at IS 'time of the next batch, by the rate';

COMMENT ON COLUMN penstock.audit.actor IS 'API key or subject of the token that made the request; NULL: the gateway did not authenticate';

COMMENT ON COLUMN penstock.audit.namespaces IS 'namespaces of the actor; NULL: all';

CREATE TABLE penstock.audit_request (
    seq bigint NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    actor text NOT NULL,
    route text NOT NULL,
    path text NOT NULL,
    status smallint NOT NULL,
    remote text
);

COMMENT ON TABLE penstock.audit_request IS 'authenticated requests that may change something; rows older than PENSTOCK_GATEWAY_AUDIT_DAYS are removed';

COMMENT ON COLUMN penstock.audit_request.route IS 'method and path template, as in openapi.json';

COMMENT ON COLUMN penstock.audit_request.status IS 'HTTP status of the answer; 499: the client disconnected before it';

ALTER TABLE penstock.audit_request ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.audit_request_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

ALTER TABLE penstock.audit ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.audit_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE penstock.backlog (
    type text NOT NULL,
    stage text NOT NULL,
    priority smallint NOT NULL,
    state text NOT NULL,
    tasks bigint NOT NULL
)
WITH (fillfactor='50');

COMMENT ON TABLE penstock.backlog IS 'number of unfinished tasks; `backlog_change` has the changes that are not included yet';

COMMENT ON COLUMN penstock.backlog.state IS 'state of the tasks; in_flight: queued or running';

CREATE TABLE penstock.backlog_change (
    type text NOT NULL,
    stage text NOT NULL,
    priority smallint NOT NULL,
    state text NOT NULL,
    tasks bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000');

COMMENT ON TABLE penstock.backlog_change IS 'changes of `backlog` that task-sync has not added to it yet';

CREATE TABLE penstock.callback (
    id text NOT NULL,
    target text NOT NULL,
    task_id bigint NOT NULL,
    state text DEFAULT 'pending'::text NOT NULL,
    attempt integer DEFAULT 0 NOT NULL,
    body bytea NOT NULL,
    error text,
    due_at timestamp with time zone NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    headers jsonb,
    ordered boolean DEFAULT false NOT NULL,
    seq bigint NOT NULL,
    diverted boolean DEFAULT false NOT NULL,
    replayed_after integer,
    spent integer,
    published integer DEFAULT 0 NOT NULL,
    published_at timestamp with time zone,
    waits_since timestamp with time zone,
    namespace text DEFAULT 'default'::text NOT NULL,
    CONSTRAINT callback_state_check CHECK ((state = ANY (ARRAY['pending'::text, 'held'::text, 'delivered'::text, 'dead'::text])))
)
WITH (fillfactor='80');

COMMENT ON COLUMN penstock.callback.due_at IS 'while pending: when the record is published again, unless the outcome is recorded before';

COMMENT ON COLUMN penstock.callback.headers IS 'headers of the call, in addition to the standard ones; content-type replaces the standard one; values are secrets';

COMMENT ON COLUMN penstock.callback.ordered IS 'whether it waits for unfinished callbacks of its task and target with a lower seq';

COMMENT ON COLUMN penstock.callback.seq IS 'order of creation; within a task, the order of its transitions';

COMMENT ON COLUMN penstock.callback.diverted IS 'whether it was held before; its records then go to the diverted topic';

COMMENT ON COLUMN penstock.callback.replayed_after IS 'attempts before the last replay; the retry schedule begins anew after them';

COMMENT ON COLUMN penstock.callback.spent IS 'attempts that the retry schedule does not count: those before a replay and those in self-check mode';

COMMENT ON COLUMN penstock.callback.published IS 'publications since it was last claimed, postponed or held';

COMMENT ON COLUMN penstock.callback.published_at IS 'time of the last publication by the requeuer';

COMMENT ON COLUMN penstock.callback.waits_since IS 'while pending: time of the first publication without a claim; NULL: it is not overdue';

COMMENT ON COLUMN penstock.callback.namespace IS 'namespace of the type of the task; with the URL it identifies the target';

ALTER TABLE penstock.callback ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.callback_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE penstock.callback_target (
    namespace text DEFAULT 'default'::text NOT NULL COLLATE pg_catalog."C",
    url text NOT NULL COLLATE pg_catalog."C",
    state text DEFAULT 'normal'::text NOT NULL,
    why text,
    count integer DEFAULT 0 NOT NULL,
    slow_at timestamp with time zone,
    called_at timestamp with time zone,
    failures integer DEFAULT 0 NOT NULL,
    rate double precision,
    attempts jsonb DEFAULT '[]'::jsonb NOT NULL,
    owner text,
    changed_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT callback_target_rate_check CHECK ((rate > (0)::double precision)),
    CONSTRAINT callback_target_state_check CHECK ((state = ANY (ARRAY['normal'::text, 'abnormal'::text, 'disabled'::text])))
)
WITH (fillfactor='70');

COMMENT ON TABLE penstock.callback_target IS 'targets of callbacks: their health, their owner and the settings by operators';

COMMENT ON COLUMN penstock.callback_target.namespace IS 'namespace of the types whose tasks call the target';

COMMENT ON COLUMN penstock.callback_target.why IS 'while disabled: the reason, from the answer of the target or from an operator';

COMMENT ON COLUMN penstock.callback_target.count IS 'count of slow calls in the health window (penstock.core.health)';

COMMENT ON COLUMN penstock.callback_target.failures IS 'consecutive quick failures';

COMMENT ON COLUMN penstock.callback_target.rate IS 'most calls per second; NULL: the setting of the callbacks service';

COMMENT ON COLUMN penstock.callback_target.attempts IS 'the latest attempts: at, callback, attempt, took_ms, status, message';

COMMENT ON COLUMN penstock.callback_target.owner IS 'process that owns the target; only its snapshots are saved';

CREATE TABLE penstock.deployment (
    one boolean DEFAULT true NOT NULL,
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    CONSTRAINT deployment_one_check CHECK (one)
);

CREATE TABLE penstock.history (
    id bigint NOT NULL,
    type text NOT NULL,
    state text NOT NULL,
    stage text NOT NULL,
    step integer NOT NULL,
    attempt integer NOT NULL,
    failures integer NOT NULL,
    losses integer NOT NULL,
    priority smallint NOT NULL,
    content_type text NOT NULL,
    context bytea,
    context_ref text,
    result_type text,
    result bytea,
    result_ref text,
    error text,
    idempotency_key text,
    events text NOT NULL,
    callbacks text[],
    labels jsonb,
    worker text,
    key text COLLATE pg_catalog."C",
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    finished_at timestamp with time zone NOT NULL,
    attempts jsonb NOT NULL,
    callbacks_owed jsonb NOT NULL,
    moved_at timestamp with time zone DEFAULT now() NOT NULL
)
PARTITION BY RANGE (finished_at);

COMMENT ON TABLE penstock.history IS 'tasks that ended a while ago, each as it was when it was moved here';

COMMENT ON COLUMN penstock.history.attempts IS 'rows of `attempt`, by step and attempt';

COMMENT ON COLUMN penstock.history.callbacks_owed IS 'rows of `callback`, in the order of creation, without headers, whose values are secrets';

CREATE TABLE penstock.history_part (
    day date NOT NULL,
    part integer NOT NULL,
    tasks bigint DEFAULT 0 NOT NULL,
    opened_at timestamp with time zone DEFAULT now() NOT NULL,
    sealed_at timestamp with time zone,
    object text,
    bytes bigint,
    sha256 text,
    archived_at timestamp with time zone,
    dropped_at timestamp with time zone,
    CONSTRAINT history_part_check CHECK (((archived_at IS NULL) OR ((sealed_at IS NOT NULL) AND (object IS NOT NULL) AND (bytes IS NOT NULL) AND (sha256 IS NOT NULL)))),
    CONSTRAINT history_part_check1 CHECK (((dropped_at IS NULL) OR (sealed_at IS NOT NULL)))
);

COMMENT ON TABLE penstock.history_part IS 'partitions of `history`, including dropped ones: the manifest of the archive';

COMMENT ON COLUMN penstock.history_part.part IS 'number from 1; a task that is moved after its partition was dropped goes to a new part of the day';

COMMENT ON COLUMN penstock.history_part.tasks IS 'number of tasks, updated by the statement that moves them';

COMMENT ON COLUMN penstock.history_part.sealed_at IS 'time after which no task is moved here';

COMMENT ON COLUMN penstock.history_part.archived_at IS 'time at which its object was read back and verified';

CREATE SEQUENCE penstock.id_ahead
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE SEQUENCE penstock.id_server
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE TABLE penstock.ingested (
    topic text NOT NULL,
    partition integer NOT NULL,
    next_offset bigint NOT NULL,
    identity text
);

COMMENT ON COLUMN penstock.ingested.identity IS 'of the record before next_offset: topic id/leader epoch/checksum@offset';

CREATE TABLE penstock.migration (
    name text NOT NULL,
    applied_at timestamp with time zone DEFAULT now() NOT NULL
);

CREATE TABLE penstock.outbox (
    id bigint NOT NULL,
    keys bytea[] NOT NULL,
    records bytea[] NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    refused text
);

COMMENT ON COLUMN penstock.outbox.refused IS 'the reason of Kafka, when it refuses the records';

ALTER TABLE penstock.outbox ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.outbox_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE penstock.position_reset (
    id bigint NOT NULL,
    topic text NOT NULL,
    partition integer NOT NULL,
    reason text NOT NULL,
    stored bigint NOT NULL,
    resumed bigint NOT NULL,
    deleted bigint DEFAULT 0 NOT NULL,
    moved_at timestamp with time zone DEFAULT now() NOT NULL,
    noted_at timestamp with time zone
);

COMMENT ON COLUMN penstock.position_reset.reason IS 'replaced, cut or deleted';

COMMENT ON COLUMN penstock.position_reset.deleted IS 'records that were deleted before they were ingested';

COMMENT ON COLUMN penstock.position_reset.noted_at IS 'when an operator took note of the deleted records';

ALTER TABLE penstock.position_reset ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.position_reset_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE penstock.release (
    id bigint NOT NULL,
    type text NOT NULL,
    task_ids bigint[] NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

ALTER TABLE penstock.release ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.release_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE penstock.task (
    id bigint NOT NULL,
    type text NOT NULL,
    state text NOT NULL,
    stage text NOT NULL,
    step integer DEFAULT 0 NOT NULL,
    attempt integer DEFAULT 0 NOT NULL,
    failures integer DEFAULT 0 NOT NULL,
    losses integer DEFAULT 0 NOT NULL,
    priority smallint DEFAULT 2 NOT NULL,
    content_type text NOT NULL,
    context bytea,
    context_ref text,
    result_type text,
    result bytea,
    result_ref text,
    error text,
    idempotency_key text,
    events text DEFAULT 'final'::text NOT NULL,
    callbacks text[],
    labels jsonb,
    worker text,
    lease_partition integer,
    due_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    lease_ms integer,
    max_attempts integer,
    pausing boolean DEFAULT false NOT NULL,
    key text COLLATE pg_catalog."C",
    tracked boolean DEFAULT false NOT NULL,
    traceparent text,
    CONSTRAINT task_check CHECK (((context IS NULL) <> (context_ref IS NULL))),
    CONSTRAINT task_check1 CHECK (((state <> 'scheduled'::text) OR (due_at IS NOT NULL))),
    CONSTRAINT task_content_type_check CHECK ((content_type = ANY (ARRAY['json'::text, 'text'::text, 'url'::text, 'bytes'::text]))),
    CONSTRAINT task_events_check CHECK ((events = ANY (ARRAY['final'::text, 'all'::text]))),
    CONSTRAINT task_max_attempts_check CHECK ((max_attempts > 0)),
    CONSTRAINT task_priority_check CHECK (((priority >= 0) AND (priority <= 4))),
    CONSTRAINT task_result_type_check CHECK ((result_type = ANY (ARRAY['json'::text, 'text'::text, 'url'::text, 'bytes'::text]))),
    CONSTRAINT task_state_check CHECK ((state = ANY (ARRAY['scheduled'::text, 'ready'::text, 'queued'::text, 'running'::text, 'waiting'::text, 'paused'::text, 'succeeded'::text, 'failed'::text, 'cancelled'::text, 'quarantined'::text])))
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_insert_scale_factor='0.1');

COMMENT ON COLUMN penstock.task.step IS 'stages entered so far; id, step and attempt are the fence, also when a stage is visited twice';

COMMENT ON COLUMN penstock.task.failures IS 'attempts of the current stage whose handler failed';

COMMENT ON COLUMN penstock.task.losses IS 'attempts of the current stage whose worker was lost';

COMMENT ON COLUMN penstock.task.context_ref IS 'JSON with key, sha256 and size of the object that has a context above the inline limit';

COMMENT ON COLUMN penstock.task.callbacks IS 'targets, each a URL or JSON with url, events, headers (secrets), format, ordered';

COMMENT ON COLUMN penstock.task.lease_partition IS 'while running: partition of the topic `heartbeats` that has the heartbeats of its worker';

COMMENT ON COLUMN penstock.task.lease_ms IS 'while running: length of the lease in milliseconds, from the claim';

COMMENT ON COLUMN penstock.task.max_attempts IS 'while running: most attempts of the stage, from the claim; NULL: the limit of the type';

COMMENT ON COLUMN penstock.task.pausing IS 'while running: whether the task is paused when its stage ends';

COMMENT ON COLUMN penstock.task.key IS 'concurrency key: the tenant or resource for which limits apply; empty: none';

COMMENT ON COLUMN penstock.task.tracked IS 'whether it was released under a limit: it counts while in flight, and its end notifies the owner of the type';

COMMENT ON COLUMN penstock.task.traceparent IS 'W3C traceparent of the submission, if it was sampled';

ALTER TABLE penstock.task ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.task_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE penstock.task_type (
    name text NOT NULL,
    first_stage text DEFAULT 'start'::text NOT NULL,
    partitions integer DEFAULT 8 NOT NULL,
    lease_ms integer DEFAULT 300000 NOT NULL,
    max_attempts integer DEFAULT 3 NOT NULL,
    retry_base_ms integer DEFAULT 1000 NOT NULL,
    retry_factor double precision DEFAULT 2 NOT NULL,
    retry_max_ms integer DEFAULT 300000 NOT NULL,
    retry_jitter double precision DEFAULT 0.5 NOT NULL,
    events text DEFAULT 'final'::text NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    max_losses integer DEFAULT 3 NOT NULL,
    late_results text DEFAULT 'accept'::text NOT NULL,
    callbacks text[],
    paused boolean DEFAULT false NOT NULL,
    max_in_flight integer,
    starts_per_s double precision,
    max_per_key integer,
    fair boolean DEFAULT false NOT NULL,
    keyed boolean DEFAULT false NOT NULL,
    ageing_s double precision,
    finish_first boolean DEFAULT false NOT NULL,
    CONSTRAINT task_type_ageing_s_check CHECK ((ageing_s > (0)::double precision)),
    CONSTRAINT task_type_events_check CHECK ((events = ANY (ARRAY['final'::text, 'all'::text]))),
    CONSTRAINT task_type_late_results_check CHECK ((late_results = ANY (ARRAY['accept'::text, 'refuse'::text]))),
    CONSTRAINT task_type_lease_ms_check CHECK ((lease_ms > 0)),
    CONSTRAINT task_type_max_attempts_check CHECK ((max_attempts > 0)),
    CONSTRAINT task_type_max_in_flight_check CHECK ((max_in_flight > 0)),
    CONSTRAINT task_type_max_losses_check CHECK ((max_losses > 0)),
    CONSTRAINT task_type_max_per_key_check CHECK ((max_per_key > 0)),
    CONSTRAINT task_type_order_check CHECK ((NOT (keyed AND ((ageing_s IS NOT NULL) OR finish_first)))),
    CONSTRAINT task_type_partitions_check CHECK ((partitions > 0)),
    CONSTRAINT task_type_starts_per_s_check CHECK ((starts_per_s > (0)::double precision))
);

COMMENT ON COLUMN penstock.task_type.callbacks IS 'targets of tasks that were submitted without any, as in task.callbacks';

COMMENT ON COLUMN penstock.task_type.keyed IS 'whether tasks are released by concurrency key: the type is fair, has max_per_key, or has rows in type_key';

COMMENT ON COLUMN penstock.task_type.ageing_s IS 'seconds since submission after which a task gains a level of priority; NULL: never';

COMMENT ON COLUMN penstock.task_type.finish_first IS 'whether tasks in a later stage are released before those in their first stage';

CREATE TABLE penstock.type_key (
    type text NOT NULL,
    key text NOT NULL COLLATE pg_catalog."C",
    paused boolean DEFAULT false NOT NULL,
    weight integer DEFAULT 1 NOT NULL,
    max_in_flight integer,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT type_key_max_in_flight_check CHECK ((max_in_flight > 0)),
    CONSTRAINT type_key_weight_check CHECK (((weight >= 1) AND (weight <= 1000)))
);

COMMENT ON TABLE penstock.type_key IS 'settings of concurrency keys by operators; a key without a row is not paused, has weight 1 and the max_per_key of its type';

ALTER TABLE ONLY penstock.api_key
    ADD CONSTRAINT api_key_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.attempt
    ADD CONSTRAINT attempt_pkey PRIMARY KEY (task_id, step, attempt);

ALTER TABLE ONLY penstock.audit
    ADD CONSTRAINT audit_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.audit_request
    ADD CONSTRAINT audit_request_pkey PRIMARY KEY (seq);

ALTER TABLE ONLY penstock.audit
    ADD CONSTRAINT audit_seq_key UNIQUE (seq);

ALTER TABLE ONLY penstock.backlog
    ADD CONSTRAINT backlog_pkey PRIMARY KEY (type, priority, stage, state);

ALTER TABLE ONLY penstock.callback
    ADD CONSTRAINT callback_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.callback_target
    ADD CONSTRAINT callback_target_pkey PRIMARY KEY (namespace, url);

ALTER TABLE ONLY penstock.deployment
    ADD CONSTRAINT deployment_pkey PRIMARY KEY (one);

ALTER TABLE ONLY penstock.history_part
    ADD CONSTRAINT history_part_pkey PRIMARY KEY (day, part);

ALTER TABLE ONLY penstock.history
    ADD CONSTRAINT history_pkey PRIMARY KEY (id, finished_at);

ALTER TABLE ONLY penstock.ingested
    ADD CONSTRAINT ingested_pkey PRIMARY KEY (topic, partition);

ALTER TABLE ONLY penstock.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (name);

ALTER TABLE ONLY penstock.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.position_reset
    ADD CONSTRAINT position_reset_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.release
    ADD CONSTRAINT release_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.task
    ADD CONSTRAINT task_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.task_type
    ADD CONSTRAINT task_type_pkey PRIMARY KEY (name);

ALTER TABLE ONLY penstock.type_key
    ADD CONSTRAINT type_key_pkey PRIMARY KEY (type, key);

CREATE INDEX audit_request_at ON penstock.audit_request USING btree (at);

CREATE INDEX audit_running ON penstock.audit USING btree (seq) WHERE (state = 'running'::text);

CREATE INDEX callback_dead ON penstock.callback USING btree (target, seq) WHERE (state = 'dead'::text);

CREATE INDEX callback_dead_of ON penstock.callback USING btree (namespace, target, seq) WHERE (state = 'dead'::text);

CREATE INDEX callback_due ON penstock.callback USING btree (due_at) WHERE (state = 'pending'::text);

CREATE INDEX callback_held ON penstock.callback USING btree (target, seq) WHERE (state = 'held'::text);

CREATE INDEX callback_held_of ON penstock.callback USING btree (namespace, target, seq) WHERE (state = 'held'::text);

CREATE INDEX callback_target_troubled ON penstock.callback_target USING btree (url, namespace) WHERE (state <> 'normal'::text);

CREATE INDEX callback_target_troubled_of ON penstock.callback_target USING btree (namespace, url) WHERE (state <> 'normal'::text);

CREATE INDEX callback_target_url ON penstock.callback_target USING btree (url, namespace);

CREATE INDEX callback_task ON penstock.callback USING btree (task_id);

CREATE INDEX history_idempotency ON ONLY penstock.history USING btree (type, idempotency_key) WHERE (idempotency_key IS NOT NULL);

CREATE UNIQUE INDEX history_part_present ON penstock.history_part USING btree (day) WHERE (dropped_at IS NULL);

CREATE INDEX task_begun_later ON penstock.task USING btree (type, id) WHERE ((state = ANY (ARRAY['scheduled'::text, 'paused'::text])) AND (step > 0) AND (NOT tracked));

CREATE INDEX task_failed ON penstock.task USING btree (type, id) WHERE (state = ANY (ARRAY['failed'::text, 'quarantined'::text]));

CREATE INDEX task_finished ON penstock.task USING btree (finished_at, id) WHERE (finished_at IS NOT NULL);

CREATE UNIQUE INDEX task_idempotency ON penstock.task USING btree (type, idempotency_key) WHERE (idempotency_key IS NOT NULL);

CREATE INDEX task_in_flight ON penstock.task USING btree (type, key) WHERE ((state = ANY (ARRAY['queued'::text, 'running'::text])) AND tracked);

CREATE INDEX task_labels ON penstock.task USING gin (labels jsonb_path_ops) WHERE (labels IS NOT NULL);

CREATE INDEX task_queued ON penstock.task USING btree (type, updated_at) WHERE (state = 'queued'::text);

CREATE INDEX task_ready ON penstock.task USING btree (type, priority, id) WHERE (state = 'ready'::text);

CREATE INDEX task_ready_begun ON penstock.task USING btree (type, priority, id) WHERE ((state = 'ready'::text) AND (step > 0) AND tracked);

CREATE INDEX task_ready_key ON penstock.task USING btree (type, priority, key, id) WHERE ((state = 'ready'::text) AND (key IS NOT NULL));

CREATE INDEX task_ready_since ON penstock.task USING btree (type, stage, priority, updated_at) WHERE (penstock.backlog_state(state) = 'ready'::text);

CREATE INDEX task_running ON penstock.task USING btree (lease_partition) WHERE (state = 'running'::text);

CREATE INDEX task_scheduled ON penstock.task USING btree (due_at) WHERE (state = 'scheduled'::text);

CREATE INDEX task_scheduled_type ON penstock.task USING btree (type, due_at) WHERE (penstock.backlog_state(state) = 'scheduled'::text);

CREATE TRIGGER outbox_ids BEFORE INSERT ON penstock.outbox FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.outbox_id_seq');

CREATE TRIGGER release_ids BEFORE INSERT ON penstock.release FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.release_id_seq');

CREATE TRIGGER task_deleted AFTER DELETE ON penstock.task REFERENCING OLD TABLE AS old_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.count_deleted();

CREATE TRIGGER task_ids BEFORE INSERT ON penstock.task FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.task_id_seq');

CREATE TRIGGER task_inserted AFTER INSERT ON penstock.task REFERENCING NEW TABLE AS new_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.count_inserted();

CREATE TRIGGER task_updated AFTER UPDATE ON penstock.task REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.count_updated();

ALTER TABLE ONLY penstock.task
    ADD CONSTRAINT task_type_fkey FOREIGN KEY (type) REFERENCES penstock.task_type(name);

ALTER TABLE ONLY penstock.type_key
    ADD CONSTRAINT type_key_type_fkey FOREIGN KEY (type) REFERENCES penstock.task_type(name);
