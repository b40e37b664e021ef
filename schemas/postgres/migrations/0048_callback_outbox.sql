-- Results of callbacks and dead letters are written with the outcome, and published after it: a
-- topic that took no records made each delivered callback be called again.

CREATE TABLE penstock.callback_outbox (
    id uuid NOT NULL PRIMARY KEY,
    topic text NOT NULL,
    keys bytea[] NOT NULL,
    records bytea[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    refused text
);

COMMENT ON TABLE penstock.callback_outbox IS 'records of ended callbacks that are not on their topic yet';
COMMENT ON COLUMN penstock.callback_outbox.topic IS 'callbacks.results or callbacks.dead, without the prefix';
COMMENT ON COLUMN penstock.callback_outbox.refused IS 'the reason of Kafka, when it refuses the records';

CREATE INDEX callback_outbox_unpublished ON penstock.callback_outbox (topic, created_at) WHERE refused IS NULL;
