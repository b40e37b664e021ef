-- A node may wait for the run of another flow of the same schedule tick. Such a wait has no
-- namespace, so that no user can send its event.

CREATE INDEX flow_run ON penstock.flow (name, tick) WHERE tick IS NOT NULL;
CREATE INDEX flow_history_run ON penstock.flow_history (tick) WHERE tick IS NOT NULL;

COMMENT ON COLUMN penstock.flow_wait.namespace IS 'empty: the wait is for a run of another flow';
COMMENT ON COLUMN penstock.flow_wait.event IS 'name of the event; of a wait for a run: flow:NAME';
COMMENT ON COLUMN penstock.flow_wait.key IS 'of the event; of a wait for a run: its tick';
