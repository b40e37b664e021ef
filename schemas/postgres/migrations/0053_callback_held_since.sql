-- Finds the callbacks that have been held for too long, and the oldest one.
CREATE INDEX CONCURRENTLY IF NOT EXISTS callback_held_since ON penstock.callback (held_since) WHERE state = 'held';
