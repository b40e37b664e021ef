-- The ends of flows are announced by one trigger for each statement, as those of tasks are. The
-- trigger for each row looked for listeners once for every flow that ended, also for child flows,
-- which took half of the time of the statement that ends them.

CREATE FUNCTION penstock.announce_flow_ends() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = penstock, pg_temp AS $$
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

CREATE TRIGGER flow_ends_announced AFTER UPDATE ON penstock.flow
REFERENCING OLD TABLE AS old_flows NEW TABLE AS new_flows
FOR EACH STATEMENT EXECUTE FUNCTION penstock.announce_flow_ends();

DROP TRIGGER flow_end_announced ON penstock.flow;
