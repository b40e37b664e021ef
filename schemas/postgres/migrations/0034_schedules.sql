-- Schedules: flows that start by cron, what they skipped, and runs over a past range.

CREATE TABLE penstock.schedule (
    name           text COLLATE "C" PRIMARY KEY,
    flow           text COLLATE "C" NOT NULL,
    version        integer CHECK (version > 0),
    cron           text NOT NULL,
    zone           text NOT NULL,
    input          text,
    priority       smallint NOT NULL CHECK (priority BETWEEN 0 AND 4),
    labels         jsonb,
    catch_up       text NOT NULL CHECK (catch_up IN ('latest', 'none', 'all')),
    catch_up_limit integer NOT NULL CHECK (catch_up_limit > 0),
    catch_up_rate  double precision NOT NULL CHECK (catch_up_rate > 0),
    overlap        text NOT NULL CHECK (overlap IN ('skip', 'queue_one', 'queue_all', 'cancel_other', 'allow')),
    paused         boolean NOT NULL,
    position       timestamptz NOT NULL,
    next_tick      timestamptz,
    next_at        timestamptz,
    queued         timestamptz[] NOT NULL DEFAULT '{}',
    queue_at       timestamptz,
    last_tick      timestamptz,
    started        bigint NOT NULL DEFAULT 0,
    error          text,
    created_at     timestamptz NOT NULL DEFAULT now(),
    updated_at     timestamptz NOT NULL DEFAULT now(),
    created_by     text
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05);

COMMENT ON COLUMN penstock.schedule.version IS 'of the definition; NULL: the newest one at each tick';
COMMENT ON COLUMN penstock.schedule.input IS 'expression for the inputs; it reads schedule, tick and local_tick';
COMMENT ON COLUMN penstock.schedule.position IS 'ticks up to this moment are decided';
COMMENT ON COLUMN penstock.schedule.next_tick IS 'first tick after position; NULL: there is none';
COMMENT ON COLUMN penstock.schedule.next_at IS 'when the schedule is due; NULL: never';
COMMENT ON COLUMN penstock.schedule.queued IS 'ticks that wait for a running flow, or for the rate of the catch-up';
COMMENT ON COLUMN penstock.schedule.queue_at IS 'when the next queued tick may start; NULL: time does not decide it';
COMMENT ON COLUMN penstock.schedule.last_tick IS 'the latest tick that started a flow';
COMMENT ON COLUMN penstock.schedule.error IS 'why the latest tick could not start';
COMMENT ON COLUMN penstock.schedule.created_by IS 'API key or subject of the token; NULL: the gateway did not authenticate';

CREATE INDEX schedule_due ON penstock.schedule (next_at) WHERE NOT paused;
CREATE INDEX schedule_queued ON penstock.schedule (name) WHERE queued <> '{}';

CREATE TABLE penstock.schedule_skip (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule   text COLLATE "C" NOT NULL,
    first_tick timestamptz NOT NULL,
    last_tick  timestamptz NOT NULL,
    ticks      integer,
    reason     text NOT NULL CHECK (reason IN ('catch_up', 'overlap', 'queue_full', 'paused', 'error')),
    detail     text,
    created_at timestamptz NOT NULL DEFAULT now()
);

COMMENT ON TABLE penstock.schedule_skip IS 'ticks that started no flow';
COMMENT ON COLUMN penstock.schedule_skip.ticks IS 'number of ticks; NULL: not counted';

CREATE INDEX schedule_skip_schedule ON penstock.schedule_skip (schedule, id);
CREATE INDEX schedule_skip_created ON penstock.schedule_skip (created_at);

CREATE TABLE penstock.backfill (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule    text COLLATE "C" NOT NULL,
    since       timestamptz NOT NULL,
    until       timestamptz NOT NULL,
    rate        double precision CHECK (rate > 0),
    max_running integer CHECK (max_running > 0),
    rerun       boolean NOT NULL,
    state       text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'done', 'stopped', 'failed')),
    position    timestamptz NOT NULL,
    total       integer NOT NULL,
    started     integer NOT NULL DEFAULT 0,
    already_run integer NOT NULL DEFAULT 0,
    refused     integer NOT NULL DEFAULT 0,
    next_at     timestamptz NOT NULL DEFAULT now(),
    waits       boolean NOT NULL DEFAULT false,
    asked_by    text NOT NULL,
    actor       text,
    stopped_by  text,
    error       text,
    created_at  timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz
);

COMMENT ON TABLE penstock.backfill IS 'runs of a schedule over a past range';
COMMENT ON COLUMN penstock.backfill.until IS 'the last moment of the range';
COMMENT ON COLUMN penstock.backfill.rerun IS 'whether ticks that have a flow are run again';
COMMENT ON COLUMN penstock.backfill.position IS 'ticks of the range up to this moment have been started';
COMMENT ON COLUMN penstock.backfill.total IS 'ticks of the range';
COMMENT ON COLUMN penstock.backfill.already_run IS 'ticks that had a flow and were left';
COMMENT ON COLUMN penstock.backfill.refused IS 'ticks whose inputs could not be evaluated; see schedule_skip';
COMMENT ON COLUMN penstock.backfill.waits IS 'whether the end of one of its flows makes it due';
COMMENT ON COLUMN penstock.backfill.error IS 'why it ended early';

CREATE INDEX backfill_running ON penstock.backfill (next_at) WHERE state = 'running';
CREATE INDEX backfill_schedule ON penstock.backfill (schedule, id);

ALTER TABLE penstock.flow ADD COLUMN backfill bigint;

COMMENT ON COLUMN penstock.flow.backfill IS 'the backfill that started it; it does not count for the overlap of its schedule';

-- A tick has one flow and any number of reruns.
DROP INDEX penstock.flow_tick;
CREATE UNIQUE INDEX flow_tick ON penstock.flow (schedule, tick) WHERE schedule IS NOT NULL AND rerun_of IS NULL;
CREATE INDEX flow_schedule_running ON penstock.flow (schedule) WHERE schedule IS NOT NULL AND status = 'running';
CREATE INDEX flow_backfill ON penstock.flow (backfill, status) WHERE backfill IS NOT NULL;

-- A backfill leaves ticks whose flows have moved to history.
ALTER TABLE penstock.flow_history
    ADD COLUMN schedule text,
    ADD COLUMN tick timestamptz;

COMMENT ON COLUMN penstock.flow_history.schedule IS 'as in flow';
COMMENT ON COLUMN penstock.flow_history.tick IS 'as in flow';

CREATE INDEX flow_history_tick ON penstock.flow_history (schedule, tick) WHERE schedule IS NOT NULL;

-- A queued tick, and a backfill with a limit, wait for the end of a flow.
CREATE FUNCTION penstock.end_of_schedule() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = penstock, pg_temp AS $$
BEGIN
    IF NEW.backfill IS NOT NULL
       OR EXISTS (SELECT FROM schedule WHERE name = NEW.schedule AND overlap IN ('queue_one', 'queue_all')) THEN
        PERFORM pg_notify('penstock_schedules', NEW.schedule);
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER flow_schedule_ended AFTER UPDATE OF status ON penstock.flow
FOR EACH ROW WHEN (NEW.schedule IS NOT NULL AND OLD.status = 'running' AND NEW.status <> 'running')
EXECUTE FUNCTION penstock.end_of_schedule();
