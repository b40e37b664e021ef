-- Deliveries. Every attempt is recorded before it is made.
-- What is found by id asks for `finished_at IS NULL`, which says the same as `state = 'pending'`: by the latter
-- the planner would read the whole index of what is due.

-- name: begin
-- Takes the right to make attempts: returns the ids whose attempt number was still the record's.
UPDATE callback c
SET attempt = c.attempt + 1, due_at = now() + make_interval(secs => $3)
FROM unnest($1::text[], $2::integer[]) AS i (id, attempt)
WHERE c.id = ANY ($1::text[]) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL
RETURNING c.id, c.attempt;

-- name: settle
-- Writes down what became of attempts: delivered, dead, or pending until `due_in` seconds from now.
UPDATE callback c
SET state = i.state,
    error = i.error,
    due_at = now() + make_interval(secs => i.due_in),
    finished_at = CASE WHEN i.state <> 'pending' THEN now() END
FROM unnest($1::text[], $2::integer[], $3::text[], $4::text[], $5::double precision[])
     AS i (id, attempt, state, error, due_in)
WHERE c.id = ANY ($1::text[]) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL
RETURNING c.id;

-- name: postpone
-- Puts back what was not begun: its record is written again in `due_in` seconds.
UPDATE callback c
SET due_at = now() + make_interval(secs => i.due_in)
FROM unnest($1::text[], $2::integer[], $3::double precision[]) AS i (id, attempt, due_in)
WHERE c.id = ANY ($1::text[]) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL;

-- name: announce
-- Tells the process that releases callbacks in how many seconds one is due.
SELECT pg_notify('penstock_callback_due', $1);

-- name: due
-- Pending callbacks whose time has come: their records are written (again), and not before `horizon` after that.
UPDATE callback c
SET due_at = now() + make_interval(secs => $2)
WHERE c.id = ANY (ARRAY(SELECT id FROM callback WHERE state = 'pending' AND due_at <= now()
                        ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED))
RETURNING c.id, c.target, c.task_id, c.attempt, c.body, c.headers, c.ordered;

-- name: next_due
SELECT extract(epoch FROM min(due_at) - now())::double precision AS wait_s FROM callback WHERE state = 'pending';
