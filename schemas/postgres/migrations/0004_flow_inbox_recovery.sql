-- Finds the recoveries of a flow that its owner has not applied, however many other rows the inbox
-- has.

CREATE INDEX CONCURRENTLY IF NOT EXISTS flow_inbox_recovery ON penstock.flow_inbox (flow_id) WHERE kind = 'recover';
