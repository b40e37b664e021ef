-- Sessions of the console.

-- name: create
INSERT INTO console_session (digest, key_id, issuer, actor, roles, namespaces)
VALUES ($digest, $key_id, $issuer, $actor, $roles, $namespaces)
RETURNING created_at + interval '24 hours' AS expires_at;

-- name: find
-- A session that has not ended. Its use is written once a minute.
WITH touched AS (
    UPDATE console_session SET used_at = now()
    WHERE digest = $1 AND used_at < now() - interval '1 minute' AND used_at > now() - interval '8 hours'
      AND created_at > now() - interval '24 hours'
)
SELECT key_id, issuer, actor, roles, namespaces, created_at + interval '24 hours' AS expires_at
FROM console_session
WHERE digest = $1 AND created_at > now() - interval '24 hours' AND used_at > now() - interval '8 hours';

-- name: delete
DELETE FROM console_session WHERE digest = $1;

-- name: prune
DELETE FROM console_session
WHERE digest = ANY (ARRAY(SELECT digest FROM console_session
                          WHERE used_at < now() - interval '8 hours' OR created_at < now() - interval '24 hours'
                          LIMIT 1000 FOR UPDATE SKIP LOCKED));
