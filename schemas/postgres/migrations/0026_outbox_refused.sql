-- Events that Kafka refuses stay in the outbox, marked, so that the sweeper does not publish them
-- first in every round.
ALTER TABLE penstock.outbox ADD COLUMN refused text;

COMMENT ON COLUMN penstock.outbox.refused IS 'the reason of Kafka, when it refuses the records';
