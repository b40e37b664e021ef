-- While a gateway has requests that wait for ends, each end of a task or a flow is announced to the
-- gateways. Without such requests an end costs one look into an empty table.

-- Not logged: after a crash of the server each gateway inserts its row again.
CREATE UNLOGGED TABLE penstock.end_listener (
    gateway text PRIMARY KEY,
    until timestamptz NOT NULL
);

COMMENT ON TABLE penstock.end_listener IS 'gateways to which ends are announced';
COMMENT ON COLUMN penstock.end_listener.gateway IS 'random name of the process';
COMMENT ON COLUMN penstock.end_listener.until IS 'when the row expires, unless the gateway renews it';

-- With the rights of its owner, because the services that end tasks have none on the table. A
-- payload has at most 350 ids, since PostgreSQL refuses 8,000 bytes.
CREATE FUNCTION penstock.announce_ends() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = penstock, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM penstock.end_listener WHERE until > clock_timestamp()) THEN
        RETURN NULL;
    END IF;
    IF TG_LEVEL = 'ROW' THEN
        PERFORM pg_notify('penstock_ended', NEW.id::text);
        RETURN NULL;
    END IF;
    PERFORM pg_notify('penstock_ended', string_agg(id::text, ' '))
    FROM (
        SELECT n.id, (row_number() OVER () - 1) / 350 AS part
        FROM new_tasks n JOIN old_tasks o ON o.id = n.id
        WHERE n.state IN ('succeeded', 'failed', 'cancelled', 'quarantined')
          AND o.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
    ) AS ended
    GROUP BY part;
    RETURN NULL;
END $$;

CREATE TRIGGER task_end_announced AFTER UPDATE ON penstock.task
REFERENCING OLD TABLE AS old_tasks NEW TABLE AS new_tasks
FOR EACH STATEMENT EXECUTE FUNCTION penstock.announce_ends();

CREATE TRIGGER flow_end_announced AFTER UPDATE OF status ON penstock.flow
FOR EACH ROW WHEN (OLD.status = 'running' AND NEW.status <> 'running')
EXECUTE FUNCTION penstock.announce_ends();
