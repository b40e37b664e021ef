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
-- Those of the ids whose tasks and flows have not ended.
SELECT id FROM task
WHERE id = ANY ($1::bigint[]) AND state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
UNION ALL
SELECT id FROM flow WHERE id = ANY ($1::bigint[]) AND status = 'running';
