-- Task types.

-- name: register
-- Inserts a type, or updates all columns of it but `partitions`, and notifies the caches of all
-- services. NULL keeps `paused`: a deployment that registers its types again must not
-- resume them.
WITH registered AS (
    INSERT INTO task_type AS t (name, first_stage, partitions, lease_ms, max_attempts,
                                retry_base_ms, retry_factor, retry_max_ms, retry_jitter, events,
                                max_losses, late_results, callbacks,
                                paused, max_in_flight, starts_per_s, max_per_key, fair, ageing_s, finish_first, idempotency, no_handler_s, keyed)
    VALUES ($name, $first_stage, $partitions, $lease_ms, $max_attempts, $retry_base_ms, $retry_factor, $retry_max_ms,
            $retry_jitter, $events, $max_losses, $late_results, $callbacks, coalesce($paused::boolean, false),
            $max_in_flight, $starts_per_s, $max_per_key::integer, $fair::boolean, $ageing_s, $finish_first, $idempotency,
            $no_handler_s, $max_per_key::integer IS NOT NULL OR $fair::boolean)
    ON CONFLICT (name) DO UPDATE
    SET first_stage = excluded.first_stage, lease_ms = excluded.lease_ms, max_attempts = excluded.max_attempts,
        retry_base_ms = excluded.retry_base_ms, retry_factor = excluded.retry_factor,
        retry_max_ms = excluded.retry_max_ms, retry_jitter = excluded.retry_jitter, events = excluded.events,
        max_losses = excluded.max_losses, late_results = excluded.late_results,
        callbacks = excluded.callbacks,
        paused = coalesce($paused::boolean, t.paused), max_in_flight = excluded.max_in_flight,
        starts_per_s = excluded.starts_per_s, max_per_key = excluded.max_per_key, fair = excluded.fair,
        ageing_s = excluded.ageing_s, finish_first = excluded.finish_first,
        idempotency = excluded.idempotency, no_handler_s = excluded.no_handler_s,
        keyed = excluded.keyed OR EXISTS (SELECT FROM type_key k WHERE k.type = t.name),
        updated_at = now()
    RETURNING t.*, (xmax = 0) AS created
)
SELECT r.*, pg_notify('penstock_types', r.name) FROM registered r;

-- name: all
SELECT * FROM task_type ORDER BY name;

-- name: named
SELECT * FROM task_type WHERE name = ANY ($1::text[]);

-- name: owners
-- The session that releases each type, by its application name.
SELECT t.name AS type, a.application_name AS session
FROM task_type t
LEFT JOIN pg_locks l
    ON l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
   AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
   AND ((l.classid::bigint << 32) | l.objid::bigint) = hashtextextended('penstock.release.' || t.name, 0)
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
ORDER BY t.name;

-- name: lock_namespace
-- One process at a time registers a new type of a namespace, until the end of its transaction.
SELECT pg_advisory_xact_lock(hashtextextended('penstock.types.' || $1, 0));

-- name: count
-- The number of types of a namespace (see `core.access.namespace_of`).
SELECT count(*) AS types FROM task_type
WHERE CASE WHEN strpos(name, '--') > 1 THEN split_part(name, '--', 1) ELSE 'default' END = $1;

-- name: lock
-- Locks a type for a change of it or of its concurrency keys. Submissions do not wait for this
-- lock.
SELECT * FROM task_type WHERE name = $1 FOR NO KEY UPDATE;
