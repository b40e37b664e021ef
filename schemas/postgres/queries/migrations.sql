-- The state of migrations.

-- name: try_lock
-- A statement that waited for the lock would keep its snapshot, for which an index that is built
-- concurrently would wait.
SELECT pg_try_advisory_lock(hashtextextended('penstock.migrate', 0));

-- name: limit_lock_wait
-- Limits the wait for a table lock, such as '200ms'; '0' is no limit.
SELECT set_config('lock_timeout', $1, false);

-- name: index_is_valid
-- Whether an index is complete; NULL without that index.
SELECT i.indisvalid FROM pg_index i WHERE i.indexrelid = to_regclass('penstock.' || $1::text);

-- name: drop_index
DROP INDEX CONCURRENTLY IF EXISTS penstock.{index};

-- name: prepare
CREATE SCHEMA IF NOT EXISTS penstock;
CREATE TABLE IF NOT EXISTS migration (name text PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now());

-- name: applied
SELECT name FROM migration;

-- name: mark
INSERT INTO migration (name) VALUES ($1);
