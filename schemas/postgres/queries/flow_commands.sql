-- Commands to flows. Only the owner of a flow changes its rows: a command is a row in its inbox.

-- name: command
-- Adds a command for each of these flows. The owner of its shard applies it, and passes it on to
-- child flows. $3 is what a recovery says. A generation in it is the one for which it was decided,
-- so that of two equal recoveries at once only one is applied. Returns the flows that exist.
WITH noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind, detail)
    SELECT f.root_id, f.id, $2,
           CASE WHEN $2 = 'recover'
                THEN jsonb_build_object('generation', f.generation + 1) || coalesce($3::jsonb, '{}'::jsonb) END
    FROM flow f WHERE f.id = ANY ($1::bigint[]) ORDER BY f.id
    RETURNING flow_id, shard
), woken AS (
    SELECT pg_notify('penstock_flows', shard::text) FROM (SELECT DISTINCT shard FROM noted) AS shards
)
SELECT flow_id AS id FROM noted, (SELECT count(*) FROM woken) AS w ORDER BY flow_id;
