-- What operators say of keys. Whoever changes it tells the type's owner, and has locked the type before (`types.lock`): whether
-- it is released key by key goes by all that was said of its keys.

-- name: set
-- What is not given (null; for the limit: $6 is false) stays as it is. No row: the type has an order that
-- does not go together with keys.
WITH kept AS (
    INSERT INTO type_key AS k (type, key, paused, weight, max_in_flight)
    SELECT y.name, $2, coalesce($3::boolean, false), coalesce($4::integer, 1), $5::integer FROM task_type y
    WHERE y.name = $1 AND y.ageing_s IS NULL AND NOT y.finish_first
    ON CONFLICT (type, key) DO UPDATE
    SET paused = coalesce($3::boolean, k.paused), weight = coalesce($4::integer, k.weight),
        max_in_flight = CASE WHEN $6::boolean THEN $5::integer ELSE k.max_in_flight END, updated_at = now()
    RETURNING k.*
), keyed AS (
    UPDATE task_type SET keyed = true WHERE name = $1 AND NOT keyed AND EXISTS (SELECT FROM kept) RETURNING name
)
SELECT k.*, pg_notify('penstock_types', k.type), (SELECT count(*) FROM keyed),
       (SELECT count(*) FROM task t
        WHERE t.type = k.type AND t.state IN ('queued', 'running') AND t.tracked AND t.key = k.key) AS in_flight
FROM kept k;

-- name: reset
-- One row when there was something to forget.
WITH gone AS (
    DELETE FROM type_key WHERE type = $1 AND key = $2 RETURNING type
), keyed AS (
    UPDATE task_type y
    SET keyed = fair OR max_per_key IS NOT NULL OR EXISTS (SELECT FROM type_key k WHERE k.type = y.name AND k.key <> $2)
    WHERE y.name = $1 AND EXISTS (SELECT FROM gone)
    RETURNING name
)
SELECT g.type, pg_notify('penstock_types', g.type), (SELECT count(*) FROM keyed) FROM gone g;

-- name: find
-- By key, behind the last one of the page before ($2).
SELECT k.*,
       (SELECT count(*) FROM task t
        WHERE t.type = k.type AND t.state IN ('queued', 'running') AND t.tracked AND t.key = k.key) AS in_flight
FROM type_key k
WHERE k.type = $1 AND k.key > $2 AND ($4::text IS NULL OR k.key = $4)
ORDER BY k.key LIMIT $3;
