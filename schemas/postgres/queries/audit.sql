-- Audit of requests.

-- name: write
INSERT INTO audit_request (at, actor, route, path, status, remote, change)
SELECT at, actor, route, path, status, remote, change::json
FROM unnest({{$audit_entry}}) AS entry ({{audit_entry}});

-- name: prune
-- Deletes at most $2 rows older than $1 days, the oldest first, and returns their number.
WITH gone AS (
    DELETE FROM audit_request
    WHERE seq = ANY (ARRAY(SELECT seq FROM audit_request WHERE at < now() - make_interval(days => $1) ORDER BY at LIMIT $2
                           FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) FROM gone;

-- name: list
-- The latest first; $1 is the last seq of the page before.
SELECT seq, at, actor, route, path, status, remote, change::text FROM audit_request
WHERE ($1::bigint IS NULL OR seq < $1) AND ($2::text IS NULL OR actor = $2)
ORDER BY seq DESC LIMIT $3;
