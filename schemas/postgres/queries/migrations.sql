-- The state of migrations.

-- name: lock
SELECT pg_advisory_lock(hashtextextended('penstock.migrate', 0));

-- name: limit_lock_wait
-- Limits the wait for a table lock. The wait for the advisory lock has no limit, because another
-- migration may hold it.
SELECT set_config('lock_timeout', '2s', false);

-- name: prepare
CREATE SCHEMA IF NOT EXISTS penstock;
CREATE TABLE IF NOT EXISTS migration (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());

-- name: applied
SELECT name FROM migration;

-- name: mark
INSERT INTO migration (name) VALUES ($1);
