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
        -- Another session may have moved the sequence meanwhile, and others take ids from it:
        -- setval with a value from before the wait, or with the last value, would give their ids
        -- again.
        clock_us := extract(epoch FROM clock_timestamp() - '2026-01-01 00:00:00+00') * 1000000;
        IF clock_us NOT BETWEEN 0 AND 4503599627370496 THEN
            clock_us := 0;
        END IF;
        ahead := greatest(pg_sequence_last_value('penstock.id_ahead'), 0);
        IF pg_sequence_last_value('penstock.id_server') IS DISTINCT FROM server THEN
            ahead := ahead + minute;
            PERFORM setval('penstock.id_ahead', ahead);
            PERFORM setval(each, greatest(pg_sequence_last_value(each) + minute, clock_us + ahead))
            FROM unnest(ARRAY['penstock.task_id_seq', 'penstock.outbox_id_seq', 'penstock.release_id_seq']::regclass[]) AS each;
            PERFORM setval('penstock.id_server', server);
        ELSIF coalesce(pg_sequence_last_value(ids), 0) <= clock_us + ahead - 1000 THEN
            PERFORM setval(ids, clock_us + ahead);
        END IF;
        PERFORM pg_advisory_unlock(lock);
    EXCEPTION WHEN query_canceled OR OTHERS THEN
        PERFORM pg_advisory_unlock(lock);
        RAISE;
    END;
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.announce_flow_ends() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.end_listener WHERE until > clock_timestamp()) THEN
        RETURN NULL;
    END IF;
    PERFORM pg_notify('penstock_ended', string_agg(id::text, ' '))
    FROM (
        SELECT n.id, (row_number() OVER () - 1) / 350 AS part
        FROM new_flows n JOIN old_flows o ON o.id = n.id
        WHERE n.status <> 'running' AND o.status = 'running'
    ) AS ended
    GROUP BY part;
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.apply_ends() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
DECLARE
    notified integer;
BEGIN
    -- Most statements end no task, and do not pay for the join.
    IF NOT EXISTS (SELECT FROM new_tasks WHERE state IN ('succeeded', 'failed', 'cancelled', 'quarantined')) THEN
        RETURN NULL;
    END IF;
    -- The tasks that ended in this statement. A late result may move a task from one final state to
    -- another, which is no second end. Not materialized: each effect then joins only the tasks that
    -- it needs, so that tasks without flows, limits and waiting requests cost no join.
    WITH ended AS NOT MATERIALIZED (
        SELECT n.*, o.state AS from_state
        FROM new_tasks n JOIN old_tasks o ON o.id = n.id
        WHERE n.state IN ('succeeded', 'failed', 'cancelled', 'quarantined')
          AND o.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
    ), inbox AS (
        INSERT INTO penstock.flow_inbox (root_id, flow_id, kind, node, generation, item, state, task_id)
        SELECT flow_root_id, flow_id, 'task', flow_node, flow_generation, flow_item, state, id
        FROM ended WHERE flow_id IS NOT NULL
        UNION ALL
        -- The children of a task that waits end with it. Not a join, which would read all flows:
        -- our sessions have no nested loops.
        SELECT f.root_id, f.id, 'cancel', NULL, NULL, NULL, NULL, NULL
        FROM ended e
        CROSS JOIN LATERAL (
            SELECT root_id, id, status FROM penstock.flow WHERE task_id = e.id OFFSET 0
        ) AS f
        WHERE e.from_state = 'waiting' AND f.status = 'running'
        RETURNING shard
    ), notification (channel, payload) AS (
        SELECT 'penstock_flows', shard::text FROM inbox
        UNION
        -- In a type with limits, a task that ended makes room for another.
        SELECT 'penstock_ready', type FROM ended WHERE tracked
        UNION
        -- A payload has at most 8,000 bytes.
        SELECT 'penstock_ended', string_agg(id::text, ' ')
        FROM (SELECT id, (row_number() OVER () - 1) / 350 AS part FROM ended) AS parts
        WHERE EXISTS (SELECT FROM penstock.end_listener WHERE until > clock_timestamp())
        GROUP BY part
    )
    SELECT count(pg_notify(channel, payload)) INTO notified FROM notification;
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
    SELECT type, stage, coalesce(flow_priority, priority), penstock.backlog_state(state), -count(*) FROM old_tasks
    WHERE penstock.backlog_state(state) IS NOT NULL
    GROUP BY type, stage, coalesce(flow_priority, priority), penstock.backlog_state(state);
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.count_inserted() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, coalesce(flow_priority, priority), penstock.backlog_state(state), count(*) FROM new_tasks
    WHERE penstock.backlog_state(state) IS NOT NULL
    GROUP BY type, stage, coalesce(flow_priority, priority), penstock.backlog_state(state);
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.count_updated() RETURNS trigger
    LANGUAGE plpgsql
    AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, level, counted, sum(tasks)
    FROM (
        SELECT type, stage, coalesce(flow_priority, priority) AS level, penstock.backlog_state(state) AS counted, 1 AS tasks
        FROM new_tasks
        UNION ALL
        SELECT type, stage, coalesce(flow_priority, priority), penstock.backlog_state(state), -1 FROM old_tasks
    ) AS c
    WHERE counted IS NOT NULL
    GROUP BY type, stage, level, counted HAVING sum(tasks) <> 0;
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.end_of_schedule() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
BEGIN
    IF NEW.backfill IS NOT NULL
       OR EXISTS (SELECT FROM schedule WHERE name = NEW.schedule AND overlap IN ('queue_one', 'queue_all')) THEN
        PERFORM pg_notify('penstock_schedules', NEW.schedule);
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION penstock.history_drop(wanted date, number integer, archived boolean) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET lock_timeout TO '1s'
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
DECLARE
    parent text;
BEGIN
    UPDATE penstock.history_part SET dropped_at = now()
    WHERE day = wanted AND part = number AND dropped_at IS NULL AND sealed_at IS NOT NULL
      AND (archived_at IS NOT NULL OR NOT archived);
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    FOREACH parent IN ARRAY ARRAY['history', 'flow_history'] LOOP
        EXECUTE format('DROP TABLE IF EXISTS penstock.%I', format('%s_%s_%s', parent, to_char(wanted, 'YYYYMMDD'), number));
    END LOOP;
    RETURN true;
END $$;

CREATE FUNCTION penstock.history_open(wanted date) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET lock_timeout TO '1s'
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
DECLARE
    number integer;
    parent text;
    name text;
BEGIN
    IF EXISTS (SELECT FROM penstock.history_part WHERE day = wanted AND dropped_at IS NULL) THEN
        RETURN false;
    END IF;
    INSERT INTO penstock.history_part (day, part)
    SELECT wanted, coalesce(max(part), 0) + 1 FROM penstock.history_part WHERE day = wanted
    RETURNING part INTO number;
    FOREACH parent IN ARRAY ARRAY['history', 'flow_history'] LOOP
        name := format('%s_%s_%s', parent, to_char(wanted, 'YYYYMMDD'), number);
        EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.%I INCLUDING ALL)', name, parent);
        EXECUTE format('ALTER TABLE penstock.%I ATTACH PARTITION penstock.%I FOR VALUES FROM (%L) TO (%L)', parent, name,
                       wanted::timestamp AT TIME ZONE 'UTC', (wanted + 1)::timestamp AT TIME ZONE 'UTC');
    END LOOP;
    RETURN true;
END $$;

CREATE FUNCTION penstock.set_flow_id() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'penstock', 'pg_temp'
    AS $$
BEGIN
    NEW.id := nextval('penstock.task_id_seq');
    NEW.root_id := coalesce(NEW.root_id, NEW.id);
    RETURN NEW;
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
    finished_at timestamp with time zone NOT NULL,
    queued_at timestamp with time zone,
    input_type text,
    input bytea,
    input_ref text
);

COMMENT ON COLUMN penstock.attempt.input_type IS 'of the attempt that ended its stage: kind of the stage''s input; `same`: the next stage got the same input; NULL: the input was not kept';

COMMENT ON COLUMN penstock.attempt.input_ref IS 'as task.context_ref';

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
    subject text DEFAULT 'task'::text NOT NULL,
    version text,
    CONSTRAINT audit_priority_check CHECK (((priority >= 0) AND (priority <= 4))),
    CONSTRAINT audit_rate_check CHECK ((rate > (0)::double precision)),
    CONSTRAINT audit_state_check CHECK ((state = ANY (ARRAY['running'::text, 'done'::text, 'stopped'::text, 'failed'::text]))),
    CONSTRAINT audit_subject_check CHECK ((subject = ANY (ARRAY['task'::text, 'flow'::text]))),
    CONSTRAINT audit_verb_check CHECK ((verb = ANY (ARRAY['cancel'::text, 'pause'::text, 'resume'::text, 'reprioritise'::text, 'recover'::text, 'rerun'::text]))),
    CONSTRAINT audit_version_check CHECK ((version = ANY (ARRAY['same'::text, 'latest'::text])))
);

COMMENT ON COLUMN penstock.audit.seq IS 'order of the requests';

COMMENT ON COLUMN penstock.audit.filter IS 'the tasks or flows to change, as requested (TaskFilter or FlowFilter in openapi.json)';

COMMENT ON COLUMN penstock.audit.priority IS 'new priority, for the verb reprioritise';

COMMENT ON COLUMN penstock.audit.rate IS 'most tasks or flows per second; NULL: no limit';

COMMENT ON COLUMN penstock.audit.found_in IS 'number of changed tasks or flows by the state before the change';

COMMENT ON COLUMN penstock.audit.behind IS 'id of the last task or flow that the operation has examined';

COMMENT ON COLUMN penstock.audit.upto IS 'largest id at the time of the request; the operation ends there';

COMMENT ON COLUMN penstock.audit.next_at IS 'time of the next batch, by the rate';

COMMENT ON COLUMN penstock.audit.actor IS 'API key or subject of the token that made the request; NULL: the gateway did not authenticate';

COMMENT ON COLUMN penstock.audit.namespaces IS 'namespaces of the actor; NULL: all';

COMMENT ON COLUMN penstock.audit.version IS 'for the verb rerun: version of the new flows';

CREATE TABLE penstock.audit_request (
    seq bigint NOT NULL,
    at timestamp with time zone DEFAULT now() NOT NULL,
    actor text NOT NULL,
    route text NOT NULL,
    path text NOT NULL,
    status smallint NOT NULL,
    remote text,
    change json
);

COMMENT ON TABLE penstock.audit_request IS 'authenticated requests that may change something; rows older than PENSTOCK_GATEWAY_AUDIT_DAYS are removed';

COMMENT ON COLUMN penstock.audit_request.route IS 'method and path template, as in openapi.json';

COMMENT ON COLUMN penstock.audit_request.status IS 'HTTP status of the answer; 499: the client disconnected before it';

COMMENT ON COLUMN penstock.audit_request.change IS 'what the request changed, without secrets: `before` and `after`, or `request`';

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

CREATE TABLE penstock.backfill (
    id bigint NOT NULL,
    schedule text NOT NULL COLLATE pg_catalog."C",
    since timestamp with time zone NOT NULL,
    until timestamp with time zone NOT NULL,
    rate double precision,
    max_running integer,
    rerun boolean NOT NULL,
    state text DEFAULT 'running'::text NOT NULL,
    "position" timestamp with time zone NOT NULL,
    total integer NOT NULL,
    started integer DEFAULT 0 NOT NULL,
    already_run integer DEFAULT 0 NOT NULL,
    refused integer DEFAULT 0 NOT NULL,
    next_at timestamp with time zone DEFAULT now() NOT NULL,
    waits boolean DEFAULT false NOT NULL,
    asked_by text NOT NULL,
    actor text,
    stopped_by text,
    error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    CONSTRAINT backfill_max_running_check CHECK ((max_running > 0)),
    CONSTRAINT backfill_rate_check CHECK ((rate > (0)::double precision)),
    CONSTRAINT backfill_state_check CHECK ((state = ANY (ARRAY['running'::text, 'done'::text, 'stopped'::text, 'failed'::text])))
);

COMMENT ON TABLE penstock.backfill IS 'runs of a schedule over a past range';

COMMENT ON COLUMN penstock.backfill.until IS 'the last moment of the range';

COMMENT ON COLUMN penstock.backfill.rerun IS 'whether ticks that have a flow are run again';

COMMENT ON COLUMN penstock.backfill."position" IS 'ticks of the range up to this moment have been started';

COMMENT ON COLUMN penstock.backfill.total IS 'ticks of the range';

COMMENT ON COLUMN penstock.backfill.already_run IS 'ticks that had a flow and were left';

COMMENT ON COLUMN penstock.backfill.refused IS 'ticks whose inputs could not be evaluated; see schedule_skip';

COMMENT ON COLUMN penstock.backfill.waits IS 'whether the end of one of its flows makes it due';

COMMENT ON COLUMN penstock.backfill.error IS 'why it ended early';

ALTER TABLE penstock.backfill ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.backfill_id_seq
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
    held_since timestamp with time zone,
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

COMMENT ON COLUMN penstock.callback.held_since IS 'since when it is held, or was before it was drained; cleared by a claim';

CREATE TABLE penstock.callback_outbox (
    id uuid NOT NULL,
    topic text NOT NULL,
    keys bytea[] NOT NULL,
    records bytea[] NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    refused text
);

COMMENT ON TABLE penstock.callback_outbox IS 'records of ended callbacks that are not on their topic yet';

COMMENT ON COLUMN penstock.callback_outbox.topic IS 'callbacks.results or callbacks.dead, without the prefix';

COMMENT ON COLUMN penstock.callback_outbox.refused IS 'the reason of Kafka, when it refuses the records';

CREATE TABLE penstock.callback_secret (
    id text NOT NULL,
    namespace text NOT NULL COLLATE pg_catalog."C",
    url text NOT NULL COLLATE pg_catalog."C",
    scheme text NOT NULL,
    key_id text,
    sealed bytea,
    reference text,
    public_key text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    created_by text,
    expires_at timestamp with time zone,
    revoked_at timestamp with time zone,
    wider_until timestamp with time zone,
    replaced_by text,
    CONSTRAINT callback_secret_check CHECK (((sealed IS NULL) = (key_id IS NULL))),
    CONSTRAINT callback_secret_check1 CHECK (((revoked_at IS NOT NULL) OR ((sealed IS NULL) <> (reference IS NULL)))),
    CONSTRAINT callback_secret_check2 CHECK (((public_key IS NULL) = (scheme = 'v1'::text))),
    CONSTRAINT callback_secret_scheme_check CHECK ((scheme = ANY (ARRAY['v1'::text, 'v1a'::text])))
);

COMMENT ON TABLE penstock.callback_secret IS 'secrets that sign callbacks; the narrowest scope that has valid ones signs';

COMMENT ON COLUMN penstock.callback_secret.namespace IS 'of the targets; * is the deployment';

COMMENT ON COLUMN penstock.callback_secret.url IS 'of the target; empty is every target of the namespace';

COMMENT ON COLUMN penstock.callback_secret.scheme IS 'v1 is HMAC-SHA256, v1a is ed25519';

COMMENT ON COLUMN penstock.callback_secret.key_id IS 'the key of PENSTOCK_ENCRYPTION_KEYS that encrypted it';

COMMENT ON COLUMN penstock.callback_secret.sealed IS 'nonce and ciphertext by AES-256-GCM; id, namespace, url and scheme are associated data';

COMMENT ON COLUMN penstock.callback_secret.reference IS 'the variable or file of the callbacks service that has the secret';

COMMENT ON COLUMN penstock.callback_secret.expires_at IS 'end of the overlap with the secret that replaces it, or its revocation';

COMMENT ON COLUMN penstock.callback_secret.revoked_at IS 'when it was revoked, which also removed the ciphertext';

COMMENT ON COLUMN penstock.callback_secret.wider_until IS 'until then the secrets of the next wider scope sign too';

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
    gone_at timestamp with time zone,
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

COMMENT ON COLUMN penstock.callback_target.gone_at IS 'while disabled: when the target answered 410; NULL: an operator disabled it';

CREATE TABLE penstock.console_session (
    digest bytea NOT NULL,
    key_id text,
    issuer text,
    actor text NOT NULL,
    roles text[] NOT NULL,
    namespaces text[],
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    used_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT console_session_digest_check CHECK ((octet_length(digest) = 32))
);

COMMENT ON TABLE penstock.console_session IS 'sessions of the console; rows without use for 8 hours, or older than 24 hours, are removed';

COMMENT ON COLUMN penstock.console_session.digest IS 'SHA-256 of the token in the cookie';

COMMENT ON COLUMN penstock.console_session.key_id IS 'API key that began the session, which ends with it and has its rights; NULL: a token of the provider did';

COMMENT ON COLUMN penstock.console_session.issuer IS 'provider whose token began the session; it ends when the gateway trusts another one';

COMMENT ON COLUMN penstock.console_session.roles IS 'by the token of the provider; empty for an API key';

CREATE TABLE penstock.deployment (
    one boolean DEFAULT true NOT NULL,
    id uuid DEFAULT gen_random_uuid() NOT NULL,
    CONSTRAINT deployment_one_check CHECK (one)
);

CREATE UNLOGGED TABLE penstock.end_listener (
    gateway text NOT NULL,
    until timestamp with time zone NOT NULL
);

COMMENT ON TABLE penstock.end_listener IS 'gateways to which ends are announced';

COMMENT ON COLUMN penstock.end_listener.gateway IS 'random name of the process';

COMMENT ON COLUMN penstock.end_listener.until IS 'when the row expires, unless the gateway renews it';

CREATE TABLE penstock.flow (
    id bigint NOT NULL,
    root_id bigint NOT NULL,
    parent_id bigint,
    parent_node text,
    parent_generation integer,
    parent_item integer,
    name text NOT NULL COLLATE pg_catalog."C",
    version integer NOT NULL,
    versions jsonb,
    status text DEFAULT 'running'::text NOT NULL,
    generation integer DEFAULT 0 NOT NULL,
    paused boolean DEFAULT false NOT NULL,
    stop text,
    unfinished integer NOT NULL,
    live integer DEFAULT 0 NOT NULL,
    unsuccessful integer DEFAULT 0 NOT NULL,
    priority smallint DEFAULT 2 NOT NULL,
    inputs bytea,
    inputs_ref text,
    output bytea,
    output_ref text,
    error text,
    idempotency_key text,
    events text DEFAULT 'final'::text NOT NULL,
    callbacks text[],
    labels jsonb,
    traceparent text,
    rerun_of bigint,
    schedule text,
    tick timestamp with time zone,
    task_id bigint,
    task_step integer,
    task_stage text,
    definition json,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    finished_at timestamp with time zone,
    backfill bigint,
    CONSTRAINT flow_events_check CHECK ((events = ANY (ARRAY['final'::text, 'all'::text]))),
    CONSTRAINT flow_priority_check CHECK (((priority >= 0) AND (priority <= 4))),
    CONSTRAINT flow_status_check CHECK ((status = ANY (ARRAY['running'::text, 'succeeded'::text, 'failed'::text, 'cancelled'::text]))),
    CONSTRAINT flow_stop_check CHECK ((stop = ANY (ARRAY['failure'::text, 'timeout'::text, 'cancel'::text])))
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.05');

COMMENT ON COLUMN penstock.flow.root_id IS 'the flow at the top; its own id for a flow without a parent; of a flow that a task without a flow waits for: the task';

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

COMMENT ON COLUMN penstock.flow.tick IS 'nominal time of its schedule';

COMMENT ON COLUMN penstock.flow.task_id IS 'the waiting task that the end of this flow wakes; NULL: none';

COMMENT ON COLUMN penstock.flow.task_step IS 'step of that task in which it began to wait';

COMMENT ON COLUMN penstock.flow.task_stage IS 'stage that the task enters then';

COMMENT ON COLUMN penstock.flow.definition IS 'of a flow that a task waits for: its definition, which has version 0 and the name of the type';

COMMENT ON COLUMN penstock.flow.backfill IS 'the backfill that started it; it does not count for the overlap of its schedule';

CREATE TABLE penstock.flow_definition (
    name text NOT NULL COLLATE pg_catalog."C",
    version integer NOT NULL,
    definition json NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    created_by text,
    CONSTRAINT flow_definition_version_check CHECK ((version > 0))
);

COMMENT ON COLUMN penstock.flow_definition.definition IS 'as in schemas/flows/definition.schema.json';

COMMENT ON COLUMN penstock.flow_definition.created_by IS 'API key or subject of the token; NULL: the gateway did not authenticate';

CREATE TABLE penstock.flow_event (
    namespace text NOT NULL COLLATE pg_catalog."C",
    id text NOT NULL COLLATE pg_catalog."C",
    event text NOT NULL COLLATE pg_catalog."C",
    key text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    data bytea,
    data_ref text,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON COLUMN penstock.flow_event.id IS 'of the sender: an event that is sent twice counts once';

COMMENT ON COLUMN penstock.flow_event.data IS 'JSON; NULL: none, or data_ref';

CREATE TABLE penstock.flow_history (
    id bigint NOT NULL,
    root_id bigint NOT NULL,
    finished_at timestamp with time zone NOT NULL,
    flow jsonb NOT NULL,
    callbacks text[],
    nodes jsonb NOT NULL,
    past_nodes jsonb NOT NULL,
    callbacks_owed jsonb NOT NULL,
    moved_at timestamp with time zone DEFAULT now() NOT NULL,
    schedule text,
    tick timestamp with time zone
)
PARTITION BY RANGE (finished_at);

COMMENT ON TABLE penstock.flow_history IS 'flows that ended a while ago, each as it was when it was moved';

COMMENT ON COLUMN penstock.flow_history.flow IS 'row of flow, without its callbacks, whose headers are secrets';

COMMENT ON COLUMN penstock.flow_history.callbacks IS 'as in flow';

COMMENT ON COLUMN penstock.flow_history.nodes IS 'rows of flow_node';

COMMENT ON COLUMN penstock.flow_history.past_nodes IS 'rows of flow_node_history';

COMMENT ON COLUMN penstock.flow_history.callbacks_owed IS 'as in history';

COMMENT ON COLUMN penstock.flow_history.schedule IS 'as in flow';

COMMENT ON COLUMN penstock.flow_history.tick IS 'as in flow';

CREATE TABLE penstock.flow_inbox (
    root_id bigint NOT NULL,
    shard smallint GENERATED ALWAYS AS (((root_id % (64)::bigint))::smallint) STORED NOT NULL,
    id bigint NOT NULL,
    flow_id bigint NOT NULL,
    kind text NOT NULL,
    node text,
    generation integer,
    item integer,
    state text,
    task_id bigint,
    detail jsonb,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT flow_inbox_kind_check CHECK ((kind = ANY (ARRAY['began'::text, 'task'::text, 'event'::text, 'visit'::text, 'pause'::text, 'resume'::text, 'cancel'::text, 'cancel_live'::text, 'recover'::text])))
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000');

COMMENT ON COLUMN penstock.flow_inbox.root_id IS 'the flow at the top: its whole family has one owner';

COMMENT ON COLUMN penstock.flow_inbox.state IS 'of kind task: final state of the task';

COMMENT ON COLUMN penstock.flow_inbox.detail IS 'of kind recover: generation and nodes; of kind event: id of the event';

ALTER TABLE penstock.flow_inbox ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.flow_inbox_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE penstock.flow_limit (
    root_id bigint NOT NULL,
    shard smallint GENERATED ALWAYS AS (((root_id % (64)::bigint))::smallint) STORED NOT NULL,
    flow_id bigint NOT NULL,
    node text DEFAULT ''::text NOT NULL,
    generation integer NOT NULL,
    kind text NOT NULL,
    at timestamp with time zone NOT NULL,
    CONSTRAINT flow_limit_kind_check CHECK ((kind = ANY (ARRAY['start_within'::text, 'finish_within'::text, 'warn_after'::text, 'timeout'::text, 'timer'::text])))
);

COMMENT ON COLUMN penstock.flow_limit.node IS 'empty: a limit of the flow';

COMMENT ON COLUMN penstock.flow_limit.kind IS 'the limit; timer: the end of a node of this kind';

CREATE TABLE penstock.flow_node (
    flow_id bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    status text NOT NULL,
    generation integer DEFAULT 0 NOT NULL,
    arrivals jsonb,
    chosen_case text,
    timed_out text,
    recovers boolean DEFAULT false NOT NULL,
    total integer,
    opened integer DEFAULT 0 NOT NULL,
    succeeded integer DEFAULT 0 NOT NULL,
    unsuccessful integer DEFAULT 0 NOT NULL,
    retry integer DEFAULT 0 NOT NULL,
    enough boolean DEFAULT false NOT NULL,
    list bytea,
    list_ref text,
    output bytea,
    output_type text,
    output_ref text,
    reason text,
    started_at timestamp with time zone,
    finished_at timestamp with time zone,
    CONSTRAINT flow_node_status_check CHECK ((status = ANY (ARRAY['pending'::text, 'ready'::text, 'running'::text, 'succeeded'::text, 'failed'::text, 'cancelled'::text, 'skipped'::text, 'blocked'::text])))
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.05');

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

CREATE TABLE penstock.flow_node_history (
    flow_id bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    flow_generation integer NOT NULL,
    status text NOT NULL,
    generation integer NOT NULL,
    chosen_case text,
    timed_out text,
    total integer,
    succeeded integer NOT NULL,
    unsuccessful integer NOT NULL,
    reason text,
    started_at timestamp with time zone,
    finished_at timestamp with time zone
);

COMMENT ON COLUMN penstock.flow_node_history.flow_generation IS 'generation of the flow that the recovery ended';

CREATE TABLE penstock.flow_wait (
    flow_id bigint NOT NULL,
    node text NOT NULL,
    generation integer NOT NULL,
    root_id bigint NOT NULL,
    namespace text NOT NULL COLLATE pg_catalog."C",
    event text NOT NULL COLLATE pg_catalog."C",
    key text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C"
);

COMMENT ON COLUMN penstock.flow_wait.namespace IS 'empty: the wait is for a run of another flow';

COMMENT ON COLUMN penstock.flow_wait.event IS 'name of the event; of a wait for a run: flow:NAME';

COMMENT ON COLUMN penstock.flow_wait.key IS 'of the event; of a wait for a run: its tick';

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
    moved_at timestamp with time zone DEFAULT now() NOT NULL,
    flow_id bigint,
    flow_node text,
    flow_generation integer,
    flow_item integer,
    context_digest bytea,
    rerun_of bigint
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
    flows bigint DEFAULT 0 NOT NULL,
    flow_bytes bigint,
    flow_sha256 text,
    CONSTRAINT history_part_check CHECK (((archived_at IS NULL) OR ((sealed_at IS NOT NULL) AND (object IS NOT NULL) AND (bytes IS NOT NULL) AND (sha256 IS NOT NULL)))),
    CONSTRAINT history_part_check1 CHECK (((dropped_at IS NULL) OR (sealed_at IS NOT NULL)))
);

COMMENT ON TABLE penstock.history_part IS 'partitions of `history`, including dropped ones: the manifest of the archive';

COMMENT ON COLUMN penstock.history_part.part IS 'number from 1; a task that is moved after its partition was dropped goes to a new part of the day';

COMMENT ON COLUMN penstock.history_part.tasks IS 'number of tasks, updated by the statement that moves them';

COMMENT ON COLUMN penstock.history_part.sealed_at IS 'time after which no task is moved here';

COMMENT ON COLUMN penstock.history_part.archived_at IS 'time at which its object was read back and verified';

COMMENT ON COLUMN penstock.history_part.flows IS 'number of flows, updated by the statement that moves them';

COMMENT ON COLUMN penstock.history_part.flow_bytes IS 'size of the object that archives them; NULL: none';

COMMENT ON COLUMN penstock.history_part.flow_sha256 IS 'digest of that object';

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

CREATE TABLE penstock.log_deletion (
    task_id bigint NOT NULL,
    deleted_at timestamp with time zone DEFAULT now() NOT NULL
);

COMMENT ON TABLE penstock.log_deletion IS 'Tasks whose logs are hidden; their lines go with their segments.';

CREATE TABLE penstock.log_segment (
    id bigint NOT NULL,
    partition integer NOT NULL,
    partitions integer NOT NULL,
    first_offset bigint NOT NULL,
    next_offset bigint NOT NULL,
    object_key text NOT NULL,
    size bigint NOT NULL,
    raw_size bigint NOT NULL,
    lines bigint NOT NULL,
    runs integer NOT NULL,
    begin_at timestamp with time zone NOT NULL,
    end_at timestamp with time zone NOT NULL,
    tasks bytea NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL
);
ALTER TABLE ONLY penstock.log_segment ALTER COLUMN tasks SET STORAGE EXTERNAL;

COMMENT ON TABLE penstock.log_segment IS 'Segments of task logs: each is one object with the lines of some offsets of the topic task-logs.';

COMMENT ON COLUMN penstock.log_segment.partitions IS 'Partitions of the topic when the segment was written: a task has the partition of its id modulo this.';

COMMENT ON COLUMN penstock.log_segment.tasks IS 'Bloom filter of the tasks with lines in the segment (core/log_segment.py).';

ALTER TABLE penstock.log_segment ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.log_segment_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

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

CREATE TABLE penstock.schedule (
    name text NOT NULL COLLATE pg_catalog."C",
    flow text NOT NULL COLLATE pg_catalog."C",
    version integer,
    cron text NOT NULL,
    zone text NOT NULL,
    input text,
    priority smallint NOT NULL,
    labels jsonb,
    catch_up text NOT NULL,
    catch_up_limit integer NOT NULL,
    catch_up_rate double precision NOT NULL,
    overlap text NOT NULL,
    paused boolean NOT NULL,
    "position" timestamp with time zone NOT NULL,
    next_tick timestamp with time zone,
    next_at timestamp with time zone,
    queued timestamp with time zone[] DEFAULT '{}'::timestamp with time zone[] NOT NULL,
    queue_at timestamp with time zone,
    last_tick timestamp with time zone,
    started bigint DEFAULT 0 NOT NULL,
    error text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    created_by text,
    events text,
    callbacks text[],
    CONSTRAINT schedule_catch_up_check CHECK ((catch_up = ANY (ARRAY['latest'::text, 'none'::text, 'all'::text]))),
    CONSTRAINT schedule_catch_up_limit_check CHECK ((catch_up_limit > 0)),
    CONSTRAINT schedule_catch_up_rate_check CHECK ((catch_up_rate > (0)::double precision)),
    CONSTRAINT schedule_events_check CHECK ((events = ANY (ARRAY['final'::text, 'all'::text]))),
    CONSTRAINT schedule_overlap_check CHECK ((overlap = ANY (ARRAY['skip'::text, 'queue_one'::text, 'queue_all'::text, 'cancel_other'::text, 'allow'::text]))),
    CONSTRAINT schedule_priority_check CHECK (((priority >= 0) AND (priority <= 4))),
    CONSTRAINT schedule_version_check CHECK ((version > 0))
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0.05');

COMMENT ON COLUMN penstock.schedule.version IS 'of the definition; NULL: the newest one at each tick';

COMMENT ON COLUMN penstock.schedule.input IS 'expression for the inputs; it reads schedule, tick and local_tick';

COMMENT ON COLUMN penstock.schedule."position" IS 'ticks up to this moment are decided';

COMMENT ON COLUMN penstock.schedule.next_tick IS 'first tick after position; NULL: there is none';

COMMENT ON COLUMN penstock.schedule.next_at IS 'when the schedule is due; NULL: never';

COMMENT ON COLUMN penstock.schedule.queued IS 'ticks that wait for a running flow, or for the rate of the catch-up';

COMMENT ON COLUMN penstock.schedule.queue_at IS 'when the next queued tick may start; NULL: time does not decide it';

COMMENT ON COLUMN penstock.schedule.last_tick IS 'the latest tick that started a flow';

COMMENT ON COLUMN penstock.schedule.error IS 'why the latest tick could not start';

COMMENT ON COLUMN penstock.schedule.created_by IS 'API key or subject of the token; NULL: the gateway did not authenticate';

COMMENT ON COLUMN penstock.schedule.events IS 'of its flows; NULL: final';

COMMENT ON COLUMN penstock.schedule.callbacks IS 'of its flows, as in flow.callbacks';

CREATE TABLE penstock.schedule_skip (
    id bigint NOT NULL,
    schedule text NOT NULL COLLATE pg_catalog."C",
    first_tick timestamp with time zone NOT NULL,
    last_tick timestamp with time zone NOT NULL,
    ticks integer,
    reason text NOT NULL,
    detail text,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT schedule_skip_reason_check CHECK ((reason = ANY (ARRAY['catch_up'::text, 'overlap'::text, 'queue_full'::text, 'paused'::text, 'error'::text])))
);

COMMENT ON TABLE penstock.schedule_skip IS 'ticks that started no flow';

COMMENT ON COLUMN penstock.schedule_skip.ticks IS 'number of ticks; NULL: not counted';

ALTER TABLE penstock.schedule_skip ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.schedule_skip_id_seq
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
    flow_id bigint,
    flow_root_id bigint,
    flow_priority smallint,
    flow_node text,
    flow_generation integer,
    flow_item integer,
    context_digest bytea,
    queued_at timestamp with time zone,
    started_at timestamp with time zone,
    rerun_of bigint,
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

COMMENT ON COLUMN penstock.task.flow_id IS 'the flow that the task belongs to; NULL: none';

COMMENT ON COLUMN penstock.task.flow_root_id IS 'root_id of the flow, by which the task is released';

COMMENT ON COLUMN penstock.task.flow_priority IS 'priority of that flow';

COMMENT ON COLUMN penstock.task.flow_item IS 'item of a map; NULL: its node is not a map';

COMMENT ON COLUMN penstock.task.context_digest IS 'of the submitted context, for types whose idempotency is strict';

COMMENT ON COLUMN penstock.task.queued_at IS 'while queued or running: the release of the attempt';

COMMENT ON COLUMN penstock.task.started_at IS 'while running: the time at which the claim was written';

COMMENT ON COLUMN penstock.task.rerun_of IS 'task that this one runs again';

ALTER TABLE penstock.task ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME penstock.task_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE penstock.task_progress (
    task_id bigint NOT NULL,
    step integer NOT NULL,
    attempt integer NOT NULL,
    fraction double precision,
    message text NOT NULL,
    reported_at timestamp with time zone NOT NULL
)
WITH (fillfactor='50');

COMMENT ON TABLE penstock.task_progress IS 'how far current attempts are, by their handlers; at most one row a task';

COMMENT ON COLUMN penstock.task_progress.fraction IS 'from 0 to 1; NULL: the handler does not know it';

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
    idempotency text DEFAULT 'lenient'::text NOT NULL,
    no_handler_s double precision DEFAULT 3600,
    CONSTRAINT task_type_ageing_s_check CHECK ((ageing_s > (0)::double precision)),
    CONSTRAINT task_type_events_check CHECK ((events = ANY (ARRAY['final'::text, 'all'::text]))),
    CONSTRAINT task_type_idempotency_check CHECK ((idempotency = ANY (ARRAY['lenient'::text, 'strict'::text]))),
    CONSTRAINT task_type_late_results_check CHECK ((late_results = ANY (ARRAY['accept'::text, 'refuse'::text]))),
    CONSTRAINT task_type_lease_ms_check CHECK ((lease_ms > 0)),
    CONSTRAINT task_type_max_attempts_check CHECK ((max_attempts > 0)),
    CONSTRAINT task_type_max_in_flight_check CHECK ((max_in_flight > 0)),
    CONSTRAINT task_type_max_losses_check CHECK ((max_losses > 0)),
    CONSTRAINT task_type_max_per_key_check CHECK ((max_per_key > 0)),
    CONSTRAINT task_type_no_handler_s_check CHECK ((no_handler_s > (0)::double precision)),
    CONSTRAINT task_type_order_check CHECK ((NOT (keyed AND finish_first))),
    CONSTRAINT task_type_partitions_check CHECK ((partitions > 0)),
    CONSTRAINT task_type_starts_per_s_check CHECK ((starts_per_s > (0)::double precision))
);

COMMENT ON COLUMN penstock.task_type.callbacks IS 'targets of tasks that were submitted without any, as in task.callbacks';

COMMENT ON COLUMN penstock.task_type.keyed IS 'whether tasks are released by concurrency key: the type is fair, has max_per_key, or has rows in type_key';

COMMENT ON COLUMN penstock.task_type.ageing_s IS 'seconds since submission after which a task gains a level of priority; NULL: never';

COMMENT ON COLUMN penstock.task_type.finish_first IS 'whether tasks in a later stage are released before those in their first stage';

COMMENT ON COLUMN penstock.task_type.idempotency IS 'strict: an idempotency key with another context is refused';

COMMENT ON COLUMN penstock.task_type.no_handler_s IS 'seconds of delays by workers without the handler of its stage after which a task fails; NULL: never';

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

ALTER TABLE ONLY penstock.backfill
    ADD CONSTRAINT backfill_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.backlog
    ADD CONSTRAINT backlog_pkey PRIMARY KEY (type, priority, stage, state);

ALTER TABLE ONLY penstock.callback_outbox
    ADD CONSTRAINT callback_outbox_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.callback
    ADD CONSTRAINT callback_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.callback_secret
    ADD CONSTRAINT callback_secret_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.callback_target
    ADD CONSTRAINT callback_target_pkey PRIMARY KEY (namespace, url);

ALTER TABLE ONLY penstock.console_session
    ADD CONSTRAINT console_session_pkey PRIMARY KEY (digest);

ALTER TABLE ONLY penstock.deployment
    ADD CONSTRAINT deployment_pkey PRIMARY KEY (one);

ALTER TABLE ONLY penstock.end_listener
    ADD CONSTRAINT end_listener_pkey PRIMARY KEY (gateway);

ALTER TABLE ONLY penstock.flow_definition
    ADD CONSTRAINT flow_definition_pkey PRIMARY KEY (name, version);

ALTER TABLE ONLY penstock.flow_event
    ADD CONSTRAINT flow_event_pkey PRIMARY KEY (id, namespace);

ALTER TABLE ONLY penstock.flow_history
    ADD CONSTRAINT flow_history_pkey PRIMARY KEY (id, finished_at);

ALTER TABLE ONLY penstock.flow_inbox
    ADD CONSTRAINT flow_inbox_pkey PRIMARY KEY (shard, id);

ALTER TABLE ONLY penstock.flow_limit
    ADD CONSTRAINT flow_limit_pkey PRIMARY KEY (flow_id, node, generation, kind);

ALTER TABLE ONLY penstock.flow_node_history
    ADD CONSTRAINT flow_node_history_pkey PRIMARY KEY (flow_id, name, flow_generation);

ALTER TABLE ONLY penstock.flow_node
    ADD CONSTRAINT flow_node_pkey PRIMARY KEY (flow_id, name);

ALTER TABLE ONLY penstock.flow
    ADD CONSTRAINT flow_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.flow_wait
    ADD CONSTRAINT flow_wait_pkey PRIMARY KEY (flow_id, node);

ALTER TABLE ONLY penstock.history_part
    ADD CONSTRAINT history_part_pkey PRIMARY KEY (day, part);

ALTER TABLE ONLY penstock.history
    ADD CONSTRAINT history_pkey PRIMARY KEY (id, finished_at);

ALTER TABLE ONLY penstock.ingested
    ADD CONSTRAINT ingested_pkey PRIMARY KEY (topic, partition);

ALTER TABLE ONLY penstock.log_deletion
    ADD CONSTRAINT log_deletion_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY penstock.log_segment
    ADD CONSTRAINT log_segment_object_key_key UNIQUE (object_key);

ALTER TABLE ONLY penstock.log_segment
    ADD CONSTRAINT log_segment_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (name);

ALTER TABLE ONLY penstock.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.position_reset
    ADD CONSTRAINT position_reset_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.release
    ADD CONSTRAINT release_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.schedule
    ADD CONSTRAINT schedule_pkey PRIMARY KEY (name);

ALTER TABLE ONLY penstock.schedule_skip
    ADD CONSTRAINT schedule_skip_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.task
    ADD CONSTRAINT task_pkey PRIMARY KEY (id);

ALTER TABLE ONLY penstock.task_progress
    ADD CONSTRAINT task_progress_pkey PRIMARY KEY (task_id);

ALTER TABLE ONLY penstock.task_type
    ADD CONSTRAINT task_type_pkey PRIMARY KEY (name);

ALTER TABLE ONLY penstock.type_key
    ADD CONSTRAINT type_key_pkey PRIMARY KEY (type, key);

CREATE INDEX audit_request_at ON penstock.audit_request USING btree (at);

CREATE INDEX audit_running ON penstock.audit USING btree (seq) WHERE (state = 'running'::text);

CREATE INDEX backfill_running ON penstock.backfill USING btree (next_at) WHERE (state = 'running'::text);

CREATE INDEX backfill_schedule ON penstock.backfill USING btree (schedule, id);

CREATE INDEX callback_dead ON penstock.callback USING btree (target, seq) WHERE (state = 'dead'::text);

CREATE INDEX callback_dead_of ON penstock.callback USING btree (namespace, target, seq) WHERE (state = 'dead'::text);

CREATE INDEX callback_due ON penstock.callback USING btree (due_at) WHERE (state = 'pending'::text);

CREATE INDEX callback_held ON penstock.callback USING btree (target, seq) WHERE (state = 'held'::text);

CREATE INDEX callback_held_of ON penstock.callback USING btree (namespace, target, seq) WHERE (state = 'held'::text);

CREATE INDEX callback_held_since ON penstock.callback USING btree (held_since) WHERE (state = 'held'::text);

CREATE INDEX callback_outbox_unpublished ON penstock.callback_outbox USING btree (topic, created_at) WHERE (refused IS NULL);

CREATE UNIQUE INDEX callback_secret_scope ON penstock.callback_secret USING btree (namespace, url, id);

CREATE INDEX callback_target_troubled ON penstock.callback_target USING btree (url, namespace) WHERE (state <> 'normal'::text);

CREATE INDEX callback_target_troubled_of ON penstock.callback_target USING btree (namespace, url) WHERE (state <> 'normal'::text);

CREATE INDEX callback_target_url ON penstock.callback_target USING btree (url, namespace);

CREATE INDEX callback_task ON penstock.callback USING btree (task_id);

CREATE INDEX console_session_used ON penstock.console_session USING btree (used_at);

CREATE INDEX flow_backfill ON penstock.flow USING btree (backfill, status) WHERE (backfill IS NOT NULL);

CREATE UNIQUE INDEX flow_child ON penstock.flow USING btree (parent_id, parent_node, COALESCE(parent_item, '-1'::integer), parent_generation) WHERE (parent_id IS NOT NULL);

CREATE INDEX flow_event_created ON penstock.flow_event USING btree (created_at);

CREATE INDEX flow_event_name ON penstock.flow_event USING btree (namespace, event, key);

CREATE INDEX flow_family ON penstock.flow USING btree (root_id, id);

CREATE INDEX flow_finished ON penstock.flow USING btree (finished_at, id) WHERE (finished_at IS NOT NULL);

CREATE INDEX flow_history_family ON ONLY penstock.flow_history USING btree (root_id, id);

CREATE INDEX flow_history_parent ON ONLY penstock.flow_history USING btree ((((flow ->> 'parent_id'::text))::bigint), ((flow ->> 'parent_node'::text)), COALESCE(((flow ->> 'parent_item'::text))::integer, '-1'::integer), (((flow ->> 'parent_generation'::text))::integer)) WHERE ((flow ->> 'parent_id'::text) IS NOT NULL);

CREATE INDEX flow_history_run ON ONLY penstock.flow_history USING btree (tick) WHERE (tick IS NOT NULL);

CREATE INDEX flow_history_tick ON ONLY penstock.flow_history USING btree (schedule, tick) WHERE (schedule IS NOT NULL);

CREATE UNIQUE INDEX flow_idempotency ON penstock.flow USING btree (name, idempotency_key) WHERE (idempotency_key IS NOT NULL);

CREATE INDEX flow_inbox_recovery ON penstock.flow_inbox USING btree (flow_id) WHERE (kind = 'recover'::text);

CREATE INDEX flow_labels ON penstock.flow USING gin (labels jsonb_path_ops) WHERE (labels IS NOT NULL);

CREATE INDEX flow_limit_due ON penstock.flow_limit USING btree (shard, at);

CREATE INDEX flow_run ON penstock.flow USING btree (name, tick) WHERE (tick IS NOT NULL);

CREATE INDEX flow_running ON penstock.flow USING btree (name, id) WHERE (status = 'running'::text);

CREATE INDEX flow_schedule ON penstock.flow USING btree (schedule, id) WHERE (schedule IS NOT NULL);

CREATE INDEX flow_schedule_running ON penstock.flow USING btree (schedule) WHERE ((schedule IS NOT NULL) AND (status = 'running'::text));

CREATE UNIQUE INDEX flow_task ON penstock.flow USING btree (task_id, task_step) WHERE (task_id IS NOT NULL);

CREATE UNIQUE INDEX flow_tick ON penstock.flow USING btree (schedule, tick) WHERE ((schedule IS NOT NULL) AND (rerun_of IS NULL));

CREATE INDEX flow_wait_event ON penstock.flow_wait USING btree (namespace, event, key);

CREATE INDEX history_flow ON ONLY penstock.history USING btree (flow_id, flow_node, COALESCE(flow_item, '-1'::integer), flow_generation) WHERE (flow_id IS NOT NULL);

CREATE INDEX history_idempotency ON ONLY penstock.history USING btree (type, idempotency_key) WHERE (idempotency_key IS NOT NULL);

CREATE UNIQUE INDEX history_part_present ON penstock.history_part USING btree (day) WHERE (dropped_at IS NULL);

CREATE INDEX log_segment_end ON penstock.log_segment USING btree (end_at);

CREATE INDEX schedule_due ON penstock.schedule USING btree (next_at) WHERE (NOT paused);

CREATE INDEX schedule_queued ON penstock.schedule USING btree (name) WHERE (queued <> '{}'::timestamp with time zone[]);

CREATE INDEX schedule_skip_created ON penstock.schedule_skip USING btree (created_at);

CREATE INDEX schedule_skip_schedule ON penstock.schedule_skip USING btree (schedule, id);

CREATE INDEX task_begun_later ON penstock.task USING btree (type, id) WHERE ((state = ANY (ARRAY['scheduled'::text, 'paused'::text])) AND (step > 0) AND (NOT tracked));

CREATE INDEX task_failed ON penstock.task USING btree (type, id) WHERE (state = ANY (ARRAY['failed'::text, 'quarantined'::text]));

CREATE INDEX task_finished ON penstock.task USING btree (finished_at, id) WHERE (finished_at IS NOT NULL);

CREATE UNIQUE INDEX task_flow ON penstock.task USING btree (flow_id, flow_node, COALESCE(flow_item, '-1'::integer), flow_generation) WHERE (flow_id IS NOT NULL);

CREATE UNIQUE INDEX task_idempotency ON penstock.task USING btree (type, idempotency_key) WHERE (idempotency_key IS NOT NULL);

CREATE INDEX task_in_flight ON penstock.task USING btree (type, key) WHERE ((state = ANY (ARRAY['queued'::text, 'running'::text])) AND tracked);

CREATE INDEX task_labels ON penstock.task USING gin (labels jsonb_path_ops) WHERE (labels IS NOT NULL);

CREATE INDEX task_queued ON penstock.task USING btree (type, updated_at) WHERE (state = 'queued'::text);

CREATE INDEX task_ready_oldest ON penstock.task USING btree (type, stage, COALESCE(flow_priority, priority), updated_at) WHERE (penstock.backlog_state(state) = 'ready'::text);

CREATE INDEX task_release ON penstock.task USING btree (type, COALESCE(flow_priority, priority), COALESCE(flow_root_id, id), priority, id) INCLUDE (flow_priority, flow_root_id) WHERE (state = 'ready'::text);

CREATE INDEX task_release_begun ON penstock.task USING btree (type, COALESCE(flow_priority, priority), COALESCE(flow_root_id, id), priority, id) INCLUDE (flow_priority, flow_root_id) WHERE ((state = 'ready'::text) AND (step > 0) AND tracked);

CREATE INDEX task_release_key ON penstock.task USING btree (type, COALESCE(flow_priority, priority), key, COALESCE(flow_root_id, id), priority, id) INCLUDE (flow_priority, flow_root_id) WHERE ((state = 'ready'::text) AND (key IS NOT NULL));

CREATE INDEX task_running ON penstock.task USING btree (lease_partition) WHERE (state = 'running'::text);

CREATE INDEX task_scheduled ON penstock.task USING btree (due_at) WHERE (state = 'scheduled'::text);

CREATE INDEX task_scheduled_type ON penstock.task USING btree (type, due_at) WHERE (penstock.backlog_state(state) = 'scheduled'::text);

CREATE INDEX task_set_aside ON penstock.task USING btree (state, id) WHERE (state = ANY (ARRAY['waiting'::text, 'paused'::text, 'cancelled'::text]));

CREATE TRIGGER flow_ends_announced AFTER UPDATE ON penstock.flow REFERENCING OLD TABLE AS old_flows NEW TABLE AS new_flows FOR EACH STATEMENT EXECUTE FUNCTION penstock.announce_flow_ends();

CREATE TRIGGER flow_id BEFORE INSERT ON penstock.flow FOR EACH ROW WHEN ((new.id IS NULL)) EXECUTE FUNCTION penstock.set_flow_id();

CREATE TRIGGER flow_ids BEFORE INSERT ON penstock.flow FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.task_id_seq');

CREATE TRIGGER flow_schedule_ended AFTER UPDATE OF status ON penstock.flow FOR EACH ROW WHEN (((new.schedule IS NOT NULL) AND (old.status = 'running'::text) AND (new.status <> 'running'::text))) EXECUTE FUNCTION penstock.end_of_schedule();

CREATE TRIGGER outbox_ids BEFORE INSERT ON penstock.outbox FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.outbox_id_seq');

CREATE TRIGGER release_ids BEFORE INSERT ON penstock.release FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.release_id_seq');

CREATE TRIGGER task_deleted AFTER DELETE ON penstock.task REFERENCING OLD TABLE AS old_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.count_deleted();

CREATE TRIGGER task_ended AFTER UPDATE ON penstock.task REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.apply_ends();

CREATE TRIGGER task_ids BEFORE INSERT ON penstock.task FOR EACH STATEMENT EXECUTE FUNCTION penstock.advance_ids('penstock.task_id_seq');

CREATE TRIGGER task_inserted AFTER INSERT ON penstock.task REFERENCING NEW TABLE AS new_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.count_inserted();

CREATE TRIGGER task_updated AFTER UPDATE ON penstock.task REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks FOR EACH STATEMENT EXECUTE FUNCTION penstock.count_updated();

REVOKE ALL ON FUNCTION penstock.history_drop(wanted date, number integer, archived boolean) FROM PUBLIC;

REVOKE ALL ON FUNCTION penstock.history_open(wanted date) FROM PUBLIC;
