-- Requests that wait for the ends of tasks and flows.

-- name: listen
-- Begins or renews the announcements for a gateway, and removes the rows of gateways that crashed.
WITH expired AS (
    DELETE FROM end_listener WHERE until < clock_timestamp() - interval '1 hour'
)
INSERT INTO end_listener (gateway, until) VALUES ($1, clock_timestamp() + make_interval(secs => $2))
ON CONFLICT (gateway) DO UPDATE SET until = excluded.until;

-- name: leave
DELETE FROM end_listener WHERE gateway = $1;

-- name: unfinished
-- Those of the ids whose tasks and flows have not ended. A flow with a recovery that its owner has
-- not applied yet goes on.
SELECT id FROM task
WHERE id = ANY ($1::bigint[]) AND state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
UNION ALL
SELECT f.id FROM flow f WHERE f.id = ANY ($1::bigint[]) AND CASE WHEN f.status <> 'running' THEN EXISTS (
    SELECT FROM (SELECT flow_id, kind FROM flow_inbox WHERE shard = (f.root_id % 64)::smallint
                 ORDER BY shard DESC, id DESC LIMIT 10000) i
    WHERE i.flow_id = f.id AND i.kind = 'recover') ELSE true END;
