-- Versions of topics of the live stream. A version is a text that differs after a change. None
-- scans a large table. xmin is the transaction that wrote a row.

-- name: tasks_by_id
-- Not a join: sessions hash their joins, which would read all progress.
SELECT t.id, t.xmin::text || ' ' || coalesce((SELECT p.xmin::text FROM task_progress p WHERE p.task_id = t.id), '') AS version
FROM task t WHERE t.id = ANY ($1::bigint[]);

-- name: flows_by_id
SELECT f.id, f.xmin::text || ' ' || coalesce((SELECT max(n.xmin::text::bigint) FROM flow_node n WHERE n.flow_id = f.id), 0) AS version
FROM flow f WHERE f.id = ANY ($1::bigint[]);

-- name: flow_names
SELECT id, name FROM flow WHERE id = ANY ($1::bigint[]);

-- name: tasks
SELECT (SELECT max(id) FROM task) || ' ' || coalesce((SELECT max(finished_at) FROM task)::text, '') AS version;

-- name: flows
SELECT (SELECT max(id) FROM flow) || ' ' || coalesce((SELECT max(finished_at) FROM flow)::text, '') AS version;

-- name: types
SELECT (SELECT coalesce(sum(hashtext(type || stage || priority || state)::bigint * tasks), 0) FROM
            (SELECT type, stage, priority, state, tasks FROM backlog
             UNION ALL SELECT type, stage, priority, state, tasks FROM backlog_change) AS c)
       || ' ' || (SELECT coalesce(sum(xmin::text::bigint), 0) FROM task_type) AS version;

-- name: operations
SELECT (SELECT max(seq) FROM audit) || ' ' || (SELECT coalesce(sum(xmin::text::bigint), 0) FROM audit WHERE state = 'running') AS version;

-- name: targets
SELECT count(*) || ' ' || coalesce(sum(xmin::text::bigint), 0) AS version FROM callback_target WHERE state <> 'normal';

-- name: schedules
SELECT count(*) || ' ' || coalesce(sum(xmin::text::bigint), 0) AS version FROM schedule;

-- name: keys
SELECT count(*) || ' ' || coalesce(sum(xmin::text::bigint), 0) AS version FROM api_key;
