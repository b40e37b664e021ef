-- API keys. Each change notifies all gateways.

-- name: create
WITH created AS (
    INSERT INTO api_key (id, name, digest, role, namespaces, rate, expires_at)
    VALUES ($id, $name, $digest, $role, $namespaces, $rate, $expires_at)
    RETURNING *
)
SELECT c.*, pg_notify('penstock_api_keys', '') FROM created c;

-- name: list
SELECT * FROM api_key ORDER BY created_at, id;

-- name: valid
-- The valid keys, which gateways cache.
SELECT id, digest, role, namespaces, rate, expires_at, now() AS read_at FROM api_key
WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now());

-- name: now
SELECT now() AS now;

-- name: lock
SELECT * FROM api_key WHERE id = $1 FOR UPDATE;

-- name: replace
-- The old key expires after $3 seconds at the latest.
UPDATE api_key SET replaced_by = $2, expires_at = least(expires_at, now() + make_interval(secs => $3)) WHERE id = $1
RETURNING *;

-- name: revoke
WITH revoked AS (
    UPDATE api_key SET revoked_at = now() WHERE id = $1 AND revoked_at IS NULL RETURNING id
)
SELECT id, pg_notify('penstock_api_keys', '') FROM revoked;

-- name: used
WITH locked AS MATERIALIZED (
    SELECT id FROM api_key WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE api_key k SET last_used_at = greatest(k.last_used_at, u.at)
FROM unnest($1::text[], $2::timestamptz[]) AS u (id, at)
WHERE k.id = ANY (ARRAY(SELECT id FROM locked)) AND k.id = u.id;
