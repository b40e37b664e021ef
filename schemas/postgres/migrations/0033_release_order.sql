-- The backlog and the history of flows. The indexes by which tasks are released are 0040 to 0043.

-- The backlog counts tasks of a flow under the priority by which they are released.
CREATE OR REPLACE FUNCTION penstock.count_inserted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, coalesce(flow_priority, priority), penstock.backlog_state(state), count(*) FROM new_tasks
    WHERE penstock.backlog_state(state) IS NOT NULL
    GROUP BY type, stage, coalesce(flow_priority, priority), penstock.backlog_state(state);
    RETURN NULL;
END $$;

CREATE OR REPLACE FUNCTION penstock.count_updated() RETURNS trigger LANGUAGE plpgsql AS $$
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

CREATE OR REPLACE FUNCTION penstock.count_deleted() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO penstock.backlog_change (type, stage, priority, state, tasks)
    SELECT type, stage, coalesce(flow_priority, priority), penstock.backlog_state(state), -count(*) FROM old_tasks
    WHERE penstock.backlog_state(state) IS NOT NULL
    GROUP BY type, stage, coalesce(flow_priority, priority), penstock.backlog_state(state);
    RETURN NULL;
END $$;

-- History keeps the place of a task in its flow, and flows as a whole.
ALTER TABLE penstock.history
    ADD COLUMN flow_id bigint,
    ADD COLUMN flow_node text,
    ADD COLUMN flow_generation integer,
    ADD COLUMN flow_item integer;

CREATE TABLE penstock.flow_history (
    id             bigint NOT NULL,
    root_id        bigint NOT NULL,
    finished_at    timestamptz NOT NULL,
    flow           jsonb NOT NULL,
    callbacks      text[],
    nodes          jsonb NOT NULL,
    past_nodes     jsonb NOT NULL,
    callbacks_owed jsonb NOT NULL,
    moved_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (id, finished_at)
) PARTITION BY RANGE (finished_at);
COMMENT ON TABLE penstock.flow_history IS 'flows that ended a while ago, each as it was when it was moved';
COMMENT ON COLUMN penstock.flow_history.flow IS 'row of flow, without its callbacks, whose headers are secrets';
COMMENT ON COLUMN penstock.flow_history.callbacks IS 'as in flow';
COMMENT ON COLUMN penstock.flow_history.nodes IS 'rows of flow_node';
COMMENT ON COLUMN penstock.flow_history.past_nodes IS 'rows of flow_node_history';
COMMENT ON COLUMN penstock.flow_history.callbacks_owed IS 'as in history';
CREATE INDEX flow_history_family ON penstock.flow_history (root_id, id);

ALTER TABLE penstock.history_part
    ADD COLUMN flows bigint NOT NULL DEFAULT 0,
    ADD COLUMN flow_bytes bigint,
    ADD COLUMN flow_sha256 text;
COMMENT ON COLUMN penstock.history_part.flows IS 'number of flows, updated by the statement that moves them';
COMMENT ON COLUMN penstock.history_part.flow_bytes IS 'size of the object that archives them; NULL: none';
COMMENT ON COLUMN penstock.history_part.flow_sha256 IS 'digest of that object';

-- A partition of history and one of flow_history have the same day, part and life.
CREATE OR REPLACE FUNCTION penstock.history_open(wanted date) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET lock_timeout = '1s' SET search_path = penstock, pg_temp AS $$
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

CREATE OR REPLACE FUNCTION penstock.history_drop(wanted date, number integer, archived boolean) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '1s' SET search_path = penstock, pg_temp AS $$
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

-- The days that exist already.
DO $$
DECLARE
    existing record;
    name text;
BEGIN
    FOR existing IN SELECT day, part FROM penstock.history_part WHERE dropped_at IS NULL LOOP
        name := format('flow_history_%s_%s', to_char(existing.day, 'YYYYMMDD'), existing.part);
        EXECUTE format('CREATE TABLE penstock.%I (LIKE penstock.flow_history INCLUDING ALL)', name);
        EXECUTE format('ALTER TABLE penstock.flow_history ATTACH PARTITION penstock.%I FOR VALUES FROM (%L) TO (%L)', name,
                       existing.day::timestamp AT TIME ZONE 'UTC', (existing.day + 1)::timestamp AT TIME ZONE 'UTC');
    END LOOP;
END $$;
