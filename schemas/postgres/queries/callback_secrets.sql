-- Secrets that sign callbacks. Each change notifies the callbacks services with namespace and URL,
-- which is empty for a secret of a whole namespace.

-- name: count
-- How many secrets a namespace has that did not end more than a day ago, and how many valid ones a
-- scope has.
SELECT count(*) AS of_namespace,
       count(*) FILTER (WHERE url = $2 AND (expires_at IS NULL OR expires_at > now())) AS of_scope
FROM callback_secret
WHERE namespace = $1 AND (expires_at IS NULL OR expires_at >= now() - interval '1 day');

-- name: create
-- Inserts a secret, and removes those of its namespace that ended more than a day ago.
WITH removed AS (
    DELETE FROM callback_secret WHERE namespace = $namespace AND expires_at < now() - interval '1 day'
), created AS (
    INSERT INTO callback_secret
        (id, namespace, url, scheme, key_id, sealed, reference, public_key, created_by, wider_until)
    VALUES ($id, $namespace, $url, $scheme, $key_id, $sealed, $reference, $public_key, $created_by, now() + make_interval(secs => $wider_s))
    RETURNING *
)
SELECT c.*, now() AS read_at, pg_notify('penstock_callback_secrets', namespace || ' ' || url) FROM created c;

-- name: find
-- A page by namespace, URL and id, after those of `after_namespace`, `after_url` and `after_id`.
-- NULL as `namespaces` is all.
SELECT s.*, now() AS read_at FROM callback_secret s
WHERE ($namespaces::text[] IS NULL OR namespace = ANY ($namespaces)) AND (namespace, url, id) > ($after_namespace, $after_url, $after_id)
  AND ($url::text IS NULL OR url = $url)
ORDER BY namespace, url, id LIMIT $limit;

-- name: lock
SELECT s.*, now() AS read_at FROM callback_secret s WHERE id = $1 FOR UPDATE;

-- name: replace
-- The old secret expires after $3 seconds.
WITH replaced AS (
    UPDATE callback_secret SET replaced_by = $2, expires_at = now() + make_interval(secs => $3) WHERE id = $1 RETURNING *
)
SELECT r.*, now() AS read_at, pg_notify('penstock_callback_secrets', namespace || ' ' || url) FROM replaced r;

-- name: revoke
-- The secret expires now, and its ciphertext is removed.
WITH revoked AS (
    UPDATE callback_secret SET revoked_at = now(), expires_at = least(expires_at, now()), sealed = NULL, key_id = NULL
    WHERE id = $1 RETURNING *
)
SELECT r.*, now() AS read_at, pg_notify('penstock_callback_secrets', namespace || ' ' || url) FROM revoked r;

-- name: sealed_by_other_keys
-- Secrets that another key than $1 encrypted, at most $3 after the id $2.
SELECT id, namespace, url, scheme, key_id, sealed FROM callback_secret
WHERE key_id <> $1 AND id > $2 ORDER BY id LIMIT $3;

-- name: reseal
-- Stores a secret that was encrypted again, unless it was changed meanwhile.
UPDATE callback_secret SET key_id = $new_key_id, sealed = $new_sealed WHERE id = $id AND sealed = $sealed RETURNING id;

-- name: of_scopes
-- The valid secrets of some scopes. `left_s` is the time until a secret expires; NULL is no end.
-- `wider_s` is the time for which wider scopes sign too; NULL is none. Both are durations, because
-- the clock of the reader may differ.
SELECT s.id, s.namespace, s.url, s.scheme, s.key_id, s.sealed, s.reference, s.public_key,
       extract(epoch FROM s.expires_at - now())::double precision AS left_s,
       extract(epoch FROM s.wider_until - now())::double precision AS wider_s
FROM unnest($1::text[], $2::text[]) AS i (namespace, url)
JOIN callback_secret s ON s.namespace = i.namespace AND s.url = i.url
WHERE s.expires_at IS NULL OR s.expires_at > now()
ORDER BY s.created_at DESC, s.id;

-- name: with_targets
-- Those of some namespaces in which a target has a secret of its own.
SELECT n AS namespace FROM unnest($1::text[]) n
WHERE EXISTS (SELECT FROM callback_secret s WHERE s.namespace = n COLLATE "C" AND s.url > '');

-- name: public_keys
-- The valid secrets of three scopes: the target's, the namespace's and the deployment's.
SELECT namespace, url, id, scheme, public_key, created_at, expires_at, wider_until > now() AS wider
FROM callback_secret
WHERE (namespace = $1 AND url IN ($2, '') OR namespace = '*' AND url = '')
  AND (expires_at IS NULL OR expires_at > now())
ORDER BY created_at DESC, id;
