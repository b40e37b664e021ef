-- name: create
CREATE TABLE job (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state       text NOT NULL DEFAULT 'ready',
    stage       text NOT NULL DEFAULT 'one',
    attempt     integer NOT NULL DEFAULT 0,
    context     bytea NOT NULL,
    lease_until timestamptz,
    created_at  timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz
) WITH (fillfactor = 70);
CREATE INDEX ON job (id) WHERE state = 'ready';
CREATE INDEX ON job (lease_until) WHERE state = 'running';

-- name: submit
INSERT INTO job (context) VALUES ($1);

-- name: claim
UPDATE job SET state = 'running', attempt = attempt + 1, lease_until = now() + interval '30 s'
WHERE id = ANY (ARRAY(SELECT id FROM job WHERE state = 'ready' ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED))
RETURNING id, stage, attempt, context;

-- name: complete
UPDATE job
SET state = CASE WHEN $3::text IS NULL THEN 'succeeded' ELSE 'ready' END,
    stage = coalesce($3, stage),
    context = $4,
    finished_at = CASE WHEN $3::text IS NULL THEN now() END
WHERE id = $1 AND attempt = $2 AND state = 'running';

-- name: complete_all
UPDATE job j
SET state = CASE WHEN d.following IS NULL THEN 'succeeded' ELSE 'ready' END,
    stage = coalesce(d.following, j.stage),
    context = d.context,
    finished_at = CASE WHEN d.following IS NULL THEN now() END
FROM unnest($1::bigint[], $2::integer[], $3::text[], $4::bytea[]) AS d (id, attempt, following, context)
WHERE j.id = d.id AND j.attempt = d.attempt AND j.state = 'running';

-- name: reap
UPDATE job SET state = 'ready' WHERE state = 'running' AND lease_until < now();
