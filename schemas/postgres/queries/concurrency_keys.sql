-- Settings of concurrency keys. Every change notifies the type's owner. The caller locks the type
-- before (`types.lock`), because all settings of its keys together decide whether it is released by
-- key.

-- name: set
-- NULL leaves a setting unchanged; the limit is set when `sets_limit` is true. Returns no row when
-- the type has an order that excludes concurrency keys.
WITH changed AS (
    INSERT INTO type_key AS k (type, key, paused, weight, max_in_flight)
    SELECT y.name, $key, coalesce($paused::boolean, false), coalesce($weight::integer, 1), $max_in_flight::integer FROM task_type y
    WHERE y.name = $type AND NOT y.finish_first
    ON CONFLICT (type, key) DO UPDATE
    SET paused = coalesce($paused::boolean, k.paused), weight = coalesce($weight::integer, k.weight),
        max_in_flight = CASE WHEN $sets_limit::boolean THEN $max_in_flight::integer ELSE k.max_in_flight END, updated_at = now()
    RETURNING k.*
), keyed AS (
    UPDATE task_type SET keyed = true WHERE name = $type AND NOT keyed AND EXISTS (SELECT FROM changed) RETURNING name
)
SELECT k.*, pg_notify('penstock_types', k.type), (SELECT count(*) FROM keyed),
       (SELECT count(*) FROM task t
        WHERE t.type = k.type AND t.state IN ('queued', 'running') AND t.tracked AND t.key = k.key) AS in_flight
FROM changed k;

-- name: reset
-- Returns one row when the key had settings.
WITH deleted AS (
    DELETE FROM type_key WHERE type = $1 AND key = $2 RETURNING type
), keyed AS (
    UPDATE task_type y
    SET keyed = fair OR max_per_key IS NOT NULL OR EXISTS (SELECT FROM type_key k WHERE k.type = y.name AND k.key <> $2)
    WHERE y.name = $1 AND EXISTS (SELECT FROM deleted)
    RETURNING name
)
SELECT d.type, pg_notify('penstock_types', d.type), (SELECT count(*) FROM keyed) FROM deleted d;

-- name: find
-- A page in the order of keys, after the last key of the page before.
SELECT k.*,
       (SELECT count(*) FROM task t
        WHERE t.type = k.type AND t.state IN ('queued', 'running') AND t.tracked AND t.key = k.key) AS in_flight
FROM type_key k
WHERE k.type = $type AND k.key > $after AND ($key::text IS NULL OR k.key = $key)
ORDER BY k.key LIMIT $limit;
