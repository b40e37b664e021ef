-- The heartbeat processor.

-- name: claimed
-- Claims that have settled become `running`; the last worker to claim an attempt holds it. A beat
-- takes only attempts that no other worker holds. Tasks that another transaction locks are left as
-- they are, and so are those in an earlier step, whose worker went on before the commit of its
-- result; a last row has their ids.
WITH free AS MATERIALIZED (
    -- Tasks in an earlier step are left out: a lock would delay the commit for which the claim
    -- waits.
    SELECT t.id FROM task t JOIN unnest($id::bigint[], $step::integer[]) AS i (id, step) ON t.id = i.id AND t.step >= i.step
    WHERE t.id = ANY ($id::bigint[]) ORDER BY t.id FOR NO KEY UPDATE OF t SKIP LOCKED
), written AS (
    UPDATE task t
    SET state = 'running', worker = i.worker, lease_partition = i.partition, lease_ms = i.lease_ms, max_attempts = i.max_attempts,
        started_at = CASE WHEN t.worker = i.worker THEN t.started_at ELSE now() END,
        updated_at = now()
    FROM unnest({{$claim}}) AS i ({{claim}})
    WHERE t.id = ANY (ARRAY(SELECT id FROM free))
      AND t.id = i.id AND t.step = i.step AND t.attempt = i.attempt AND t.state IN ('queued', 'running')
      AND (NOT i.by_heartbeat OR t.worker IS NULL OR t.worker = i.worker)
    RETURNING t.id, t.step, t.attempt
)
SELECT id, step, attempt, NULL::bigint[] AS locked FROM written
UNION ALL
SELECT NULL, NULL, NULL, array_agg(t.id)
FROM task t JOIN unnest({{$claim}}) AS i ({{claim}}) ON t.id = i.id
WHERE t.id = ANY ($id::bigint[]) AND (SELECT count(*) FROM written) < cardinality($id::bigint[])
  AND (t.id NOT IN (SELECT id FROM free) OR t.step < i.step)
  AND (t.step >= i.step OR t.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined'))
HAVING count(*) > 0;

-- name: held
-- Leases of partitions, each with the length of its claim, by which its worker beats. With
-- `unclaimed` ($2) those of attempts with which workers went on and that have no claim, or only the
-- others.
SELECT t.id, t.step, t.attempt, t.worker, t.lease_partition, coalesce(t.lease_ms, y.lease_ms) AS lease_ms,
       t.max_attempts
FROM task t JOIN task_type y ON y.name = t.type
WHERE t.state = 'running' AND t.lease_partition = ANY ($1::integer[]) AND ($2::boolean IS NULL OR $2 = (t.lease_ms IS NULL));

-- name: holders
-- The holders of attempts that are current.
SELECT t.id, t.step, t.attempt, t.type, t.state, t.worker
FROM task t JOIN unnest($1::bigint[], $2::integer[], $3::integer[]) AS i (id, step, attempt)
  ON t.id = i.id AND t.step = i.step AND t.attempt = i.attempt
WHERE t.id = ANY ($1::bigint[]);
