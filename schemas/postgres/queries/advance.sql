-- The fence: the only statements that end an attempt.

-- name: retry_states
-- Failed attempts and retry policy of tasks about to fail or to expire. The limit that a stage was
-- claimed with wins over its type's limit. `unhandled` is the error of a task whose last worker had
-- no handler for its stage.
SELECT t.id, t.type, t.stage, t.failures, t.losses,
       CASE WHEN t.error LIKE '%,"unhandled_s":%' THEN t.error END AS unhandled, y.no_handler_s,
       y.max_losses, coalesce(t.max_attempts, y.max_attempts) AS max_attempts,
       y.retry_base_ms, y.retry_factor, y.retry_max_ms, y.retry_jitter
FROM task t JOIN task_type y ON y.name = t.type
WHERE t.id = ANY ($1::bigint[]) AND t.state IN ('queued', 'running');

-- name: stages_of
-- The stages of current attempts whose results name another stage.
SELECT t.id, t.step, t.attempt, t.stage
FROM task t JOIN unnest($1::bigint[], $2::integer[], $3::integer[]) AS i (id, step, attempt)
  ON t.id = i.id AND t.step = i.step AND t.attempt = i.attempt
WHERE t.id = ANY ($1::bigint[]) AND t.state IN ('queued', 'running');

-- name: ahead
-- The given attempts whose tasks are still in an earlier step: the result with which their worker
-- went on is not committed.
SELECT i.id, i.step, i.attempt
FROM task t JOIN unnest($1::bigint[], $2::integer[], $3::integer[]) AS i (id, step, attempt)
  ON t.id = i.id AND t.step < i.step
WHERE t.id = ANY ($1::bigint[]) AND t.state NOT IN ('succeeded', 'failed', 'cancelled', 'quarantined');

-- name: late_attempts
-- Attempts that expired before their result came, and whose stage is not finished since. `now_at`
-- is the attempt that the result ends. A task whose last attempt expired has no further attempt, so
-- the result ends the one that would have followed. No attempt is found whose number a worker
-- chose: history has 0 for it, so nothing proves that the result is of the attempt that expired.
SELECT t.id, t.step, t.stage, a.attempt,
       t.attempt + (t.state IN ('failed', 'quarantined'))::integer AS now_at
FROM unnest($id::bigint[], $step::integer[], $stage::text[], $attempt::integer[]) AS i (id, step, stage, attempt)
JOIN task t ON t.id = i.id AND t.step = i.step AND t.stage = i.stage AND t.attempt >= i.attempt
JOIN attempt a ON a.task_id = i.id AND a.step = i.step AND a.attempt = i.attempt AND a.outcome = 'expired'
JOIN task_type y ON y.name = t.type
WHERE t.id = ANY ($id::bigint[]) AND a.task_id = ANY ($id::bigint[])
  AND y.late_results = 'accept'
  AND (t.attempt > i.attempt AND t.state IN ('scheduled', 'ready', 'paused', 'queued', 'running')
       -- A stage that its handler failed is finished; one that only lost its last worker is not.
       OR t.state IN ('failed', 'quarantined')
          AND EXISTS (SELECT FROM attempt l WHERE l.task_id = t.id AND l.step = t.step AND l.attempt = t.attempt
                      AND l.outcome = 'expired' OFFSET 0));

-- name: advance
-- Moves each task that is still in the attempt that ended, writes the attempt's history and
-- notifies task-sync. A stale end changes nothing and returns no row. The same holds for the end of
-- a task that another transaction locks; a last row has the ids of these tasks. With `alone`,
-- the row also has the tasks whose transitions may have events, and these tasks are not moved.
-- The attempt that ends a stage keeps the stage's input, which the task loses. The input of the
-- last stage stays in the task. Only the first 64 stages keep theirs: a task that loops without end
-- would have a row of history without a bound. With `goes_on` the worker runs the next stage
-- already, so the task is `running` there. It has no claim yet: the heartbeat processor of the
-- worker's `partition` finds it, should the worker be lost before it claims or ends the attempt.
-- A worker that goes on ends several stages of a task. Such a chain takes effect as a whole: the
-- fence is that of its first attempt, `last_step` and the like are of its last. `chained_id` and
-- the like are those before the last. A task that must stop between them is not moved.
WITH input AS (
    SELECT *
    FROM unnest({{$ended_attempt}}) AS i ({{ended_attempt}})
), free AS MATERIALIZED (
    SELECT id, queued_at, started_at, content_type, context, context_ref FROM task
    WHERE id = ANY ($id::bigint[]) AND (NOT $alone::boolean OR events IS DISTINCT FROM 'all' AND callbacks IS NULL)
    ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
), moved AS (
    UPDATE task t
    -- A paused task, or one that is to be paused, becomes `paused` instead of `ready`.
    SET state = CASE WHEN i.to_state IN ('ready', 'scheduled') AND (t.pausing OR t.state = 'paused') THEN 'paused'
                     WHEN {{goes_on}} THEN 'running'
                     ELSE i.to_state END,
        pausing = false,
        stage = i.to_stage,
        step = i.to_step,
        attempt = CASE WHEN {{goes_on}} THEN i.goes_on ELSE i.to_attempt END,
        failures = coalesce(i.failures, 0),
        losses = coalesce(i.losses, 0),
        due_at = now() + make_interval(secs => i.delay_s),
        content_type = CASE WHEN i.outcome = 'next' AND i.content_type IS NOT NULL THEN i.content_type
                            ELSE coalesce(i.input_type, t.content_type) END,
        context = CASE WHEN i.outcome = 'next' AND i.content_type IS NOT NULL THEN i.context
                       WHEN i.input_type IS NOT NULL THEN i.input ELSE t.context END,
        context_ref = CASE WHEN i.outcome = 'next' AND i.content_type IS NOT NULL THEN i.context_ref
                           WHEN i.input_type IS NOT NULL THEN i.input_ref ELSE t.context_ref END,
        result_type = CASE WHEN i.outcome = 'done' THEN i.content_type END,
        result = CASE WHEN i.outcome = 'done' THEN i.context END,
        result_ref = CASE WHEN i.outcome = 'done' THEN i.context_ref END,
        error = CASE WHEN i.to_state IN ('failed', 'scheduled', 'quarantined') THEN i.error END,
        worker = CASE WHEN {{goes_on}} THEN i.worker END,
        queued_at = CASE WHEN {{goes_on}} THEN now() END,
        started_at = CASE WHEN {{goes_on}} THEN now() END,
        lease_partition = CASE WHEN {{goes_on}} THEN i.partition END,
        lease_ms = NULL,
        max_attempts = NULL,
        updated_at = now(),
        finished_at = CASE WHEN i.to_state IN ('succeeded', 'failed', 'quarantined') THEN now() END
    FROM input i
    -- Joins by primary key: the statistics of a queue are always stale, and a plan by them can be
    -- quadratic.
    WHERE t.id = ANY (ARRAY(SELECT id FROM free))
      AND t.id = i.id AND t.step = i.step AND t.stage = i.stage
      -- A late result may end an attempt that has not started, also the one that would have
      -- followed the last.
      AND (t.attempt = i.attempt
           AND (t.state IN ('queued', 'running') OR ($late::boolean AND t.state IN ('scheduled', 'ready', 'paused')))
           OR $late::boolean AND t.attempt = i.attempt - 1 AND t.state IN ('failed', 'quarantined'))
      AND (i.last_step IS NULL OR NOT (t.pausing OR t.tracked OR t.state = 'paused'))
      -- An expiry applies only while the same worker holds the lease.
      AND (i.outcome <> 'expired' OR t.worker IS NOT DISTINCT FROM i.worker)
    RETURNING t.id, t.type, t.state, t.stage, t.step, t.attempt, t.idempotency_key, t.labels, t.callbacks, t.events,
              t.updated_at, t.traceparent, t.tracked, i.outcome,
              coalesce(i.last_step, i.step) AS from_step, coalesce(i.last_stage, i.stage) AS from_stage,
              coalesce(i.last_attempt, i.attempt) AS from_attempt, i.last_step IS NOT NULL AS is_last,
              i.input_type, i.input, i.input_ref,
              i.worker AS by_worker, i.error AS why, i.started_ms, i.finished_ms,
              i.outcome IN ('next', 'spawn', 'wait') AND coalesce(i.last_step, i.step) < 64 AS leaves,
              i.outcome <> 'next' OR i.content_type IS NOT NULL AS replaces,
              CASE WHEN t.flow_id IS NOT NULL
                   THEN json_build_object('id', t.flow_id, 'node', t.flow_node, 'generation', t.flow_generation,
                                          'item', t.flow_item)::text END AS flow
), history AS (
    INSERT INTO attempt (task_id, step, attempt, stage, outcome, worker, error, queued_at, started_at, finished_at,
                         input_type, input, input_ref)
    SELECT m.id, from_step, CASE WHEN from_attempt < {{first_chosen}} THEN from_attempt ELSE 0 END, from_stage, outcome, by_worker, why,
           CASE WHEN is_last THEN to_timestamp(started_ms / 1000.0)
                -- Its worker began it before the commit that queued it.
                WHEN from_attempt >= {{first_chosen}} THEN least(f.queued_at, to_timestamp(started_ms / 1000.0))
                ELSE f.queued_at END,
           CASE outcome WHEN 'expired' THEN f.started_at ELSE to_timestamp(started_ms / 1000.0) END,
           coalesce(to_timestamp(finished_ms / 1000.0), now()),
           CASE WHEN leaves AND replaces THEN coalesce(m.input_type, f.content_type) WHEN leaves THEN 'same' END,
           CASE WHEN NOT (leaves AND replaces) THEN NULL WHEN m.input_type IS NULL THEN f.context ELSE m.input END,
           CASE WHEN NOT (leaves AND replaces) THEN NULL WHEN m.input_type IS NULL THEN f.context_ref ELSE m.input_ref END
    FROM moved m JOIN free f ON f.id = m.id
    UNION ALL
    SELECT c.id, c.step, CASE WHEN c.attempt < {{first_chosen}} THEN c.attempt ELSE 0 END, c.stage, 'next', m.by_worker, NULL,
           CASE WHEN NOT c.is_first THEN to_timestamp(c.started_ms / 1000.0)
                WHEN c.attempt >= {{first_chosen}} THEN least(f.queued_at, to_timestamp(c.started_ms / 1000.0))
                ELSE f.queued_at END,
           to_timestamp(c.started_ms / 1000.0), coalesce(to_timestamp(c.finished_ms / 1000.0), now()),
           CASE WHEN c.step >= 64 THEN NULL WHEN c.replaces THEN coalesce(c.input_type, f.content_type) ELSE 'same' END,
           CASE WHEN c.step >= 64 OR NOT c.replaces THEN NULL WHEN c.input_type IS NULL THEN f.context ELSE c.input END,
           CASE WHEN c.step >= 64 OR NOT c.replaces THEN NULL WHEN c.input_type IS NULL THEN f.context_ref ELSE c.input_ref END
    FROM unnest({{$chained_attempt}}) AS c (id, step, stage, attempt, started_ms, finished_ms, is_first, replaces,
                                            input_type, input, input_ref)
    JOIN moved m ON m.id = c.id JOIN free f ON f.id = c.id
), woken AS (
    SELECT pg_notify(CASE state WHEN 'ready' THEN 'penstock_ready' ELSE 'penstock_due' END, type)
    FROM (SELECT DISTINCT type, state FROM moved WHERE state IN ('ready', 'scheduled')
          -- In a type with limits, a task that is set aside makes room for another, as one that
          -- ended does (trigger `task_ended`).
          UNION SELECT type, 'ready' FROM moved WHERE tracked AND state IN ('scheduled', 'waiting', 'paused')) AS types
)
SELECT id, type, state, stage, step, attempt, idempotency_key, labels, callbacks, events, updated_at, traceparent,
       from_step, from_stage, from_attempt, flow, NULL::bigint[] AS locked
FROM moved, (SELECT count(*) FROM woken) AS w
UNION ALL
SELECT NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, array_agg(id)
FROM task
WHERE id = ANY ($id::bigint[]) AND (SELECT count(*) FROM free) < cardinality($id::bigint[])
  AND id NOT IN (SELECT id FROM free)
HAVING count(*) > 0;

-- name: lock
-- Waits until no other transaction locks these tasks.
SELECT id FROM task WHERE id = ANY ($1::bigint[]) ORDER BY id FOR NO KEY UPDATE;
