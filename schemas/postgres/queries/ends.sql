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
-- Those of the ids whose tasks and flows have not ended, or whose flows are `recovering` as in
-- `flow_views.get`. Lateral, so that the inbox is read by the flow: a join would read all
-- recoveries.
SELECT id FROM task
WHERE id = ANY ($1::bigint[]) AND state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined')
UNION ALL
SELECT id FROM flow WHERE id = ANY ($1::bigint[]) AND status = 'running'
UNION ALL
SELECT f.id FROM flow f
CROSS JOIN LATERAL (
    SELECT FROM flow_inbox i WHERE i.flow_id = f.id AND i.kind = 'recover'
      AND (i.detail ->> 'generation')::integer = f.generation + 1
    LIMIT 1
) AS recovery
WHERE f.id = ANY ($1::bigint[]) AND f.status <> 'running';
