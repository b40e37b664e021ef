-- The invariant, as far as PostgreSQL knows it. Every answer is bounded: a check of a broken system must not
-- fetch a million rows.

-- name: states
SELECT state, count(*) AS tasks FROM task GROUP BY state ORDER BY state;

-- name: callback_states
SELECT state, count(*) AS callbacks FROM callback GROUP BY state ORDER BY state;

-- name: queued
-- Tasks that should have a record on a ready topic or be in a worker's hands, but for those on their way there.
SELECT t.id, t.type, t.step, t.attempt
FROM task t
WHERE t.state = 'queued' AND NOT EXISTS (SELECT FROM release r WHERE t.id = ANY (r.task_ids) AND r.type = t.type);

-- name: ready
-- Types with tasks that have been ready for longer than `grace` seconds, the longest waiting of each.
SELECT type, min(id) AS id, count(*) AS tasks,
       extract(epoch FROM now() - min(updated_at))::double precision AS age_s
FROM task WHERE state = 'ready' AND updated_at < now() - make_interval(secs => $1) GROUP BY type ORDER BY type;

-- name: overdue
-- Due for longer than `grace` seconds and still not ready.
SELECT id, type, extract(epoch FROM now() - due_at)::double precision AS late_s
FROM task WHERE state = 'scheduled' AND due_at < now() - make_interval(secs => $1) ORDER BY due_at LIMIT 1000;

-- name: unwatched
-- Running, but heard over no partition that exists.
SELECT id, type, worker, lease_partition
FROM task WHERE state = 'running' AND (worker IS NULL OR lease_partition IS NULL OR lease_partition >= $1) LIMIT 1000;

-- name: stuck_releases
SELECT id, type, cardinality(task_ids) AS tasks, extract(epoch FROM now() - created_at)::double precision AS age_s
FROM release WHERE created_at < now() - make_interval(secs => $1) ORDER BY id LIMIT 1000;

-- name: stuck_events
SELECT id, cardinality(records) AS events, extract(epoch FROM now() - created_at)::double precision AS age_s
FROM outbox WHERE created_at < now() - make_interval(secs => $1) ORDER BY id LIMIT 1000;

-- name: stuck_callbacks
SELECT id, target, task_id, extract(epoch FROM now() - due_at)::double precision AS late_s
FROM callback WHERE state = 'pending' AND due_at < now() - make_interval(secs => $1) ORDER BY due_at LIMIT 1000;
