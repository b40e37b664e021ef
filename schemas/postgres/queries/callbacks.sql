-- Callbacks. Every attempt is claimed before it is made. Statements by id ask for `finished_at IS
-- NULL` or for `state || ''`, and not for `state = 'pending'`: with the latter the planner would
-- read the whole index of due callbacks.

-- name: claim
-- Claims attempts. Returns the callbacks whose attempt number was still the record's. `spent` is
-- the number of attempts that the retry schedule does not count: those before a replay, and those
-- made in self-check mode.
WITH locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE callback c
SET attempt = c.attempt + 1, state = 'pending', due_at = now() + make_interval(secs => $3),
    published = 0, waits_since = NULL, held_since = NULL
FROM unnest($1::text[], $2::integer[]) AS i (id, attempt)
WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL
RETURNING c.id, c.attempt, greatest(c.replayed_after, c.spent, 0) AS spent;

-- name: claim_in_order
-- As `claim`, but a callback waits while an earlier one of its task and target is not finished. It
-- gets the state of the earlier one, and is due after it in case `requeue_next` misses it.
-- Returns the waiting callbacks, too, with their state.
WITH input AS (
    SELECT id, attempt FROM unnest($1::text[], $2::integer[]) AS i (id, attempt)
), behind AS (
    SELECT c.id, c.attempt, p.state, p.due_at
    FROM input i
    JOIN callback c ON c.id = i.id AND c.attempt = i.attempt
    CROSS JOIN LATERAL (
        SELECT state, due_at FROM callback p
        WHERE p.task_id = c.task_id AND p.target = c.target AND p.seq < c.seq AND p.finished_at IS NULL
        ORDER BY p.seq LIMIT 1
    ) p
    WHERE c.id = ANY ($1::text[]) AND c.ordered AND c.finished_at IS NULL
), locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE
), waiting AS (
    UPDATE callback c
    SET state = b.state, diverted = c.diverted OR b.state = 'held',
        due_at = greatest(now(), b.due_at) + make_interval(secs => 1),
        published = 0, waits_since = NULL,
        held_since = CASE WHEN b.state = 'held' THEN coalesce(c.held_since, now()) ELSE c.held_since END
    FROM behind b
    WHERE c.id = ANY (ARRAY(SELECT id FROM behind)) AND c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = b.id AND c.attempt = b.attempt AND c.finished_at IS NULL
    RETURNING c.id, c.attempt, c.state
), begun AS (
    UPDATE callback c
    SET attempt = c.attempt + 1, state = 'pending', due_at = now() + make_interval(secs => $3),
        published = 0, waits_since = NULL, held_since = NULL
    FROM input i
    WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL
      AND c.id <> ALL (ARRAY(SELECT id FROM behind))
    RETURNING c.id, c.attempt, greatest(c.replayed_after, c.spent, 0) AS spent
)
SELECT id, attempt, spent, NULL AS waits FROM begun
UNION ALL
SELECT id, attempt, 0, state FROM waiting;

-- name: requeue_unblocked
-- Makes callbacks due that `claim_in_order` made wait for an earlier one, if that one has ended.
-- It may end between the check and the update, which then overwrites the result of `requeue_next`.
-- An earlier callback that ends later requeues them itself.
WITH locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE callback c SET due_at = now()
FROM unnest($1::text[], $2::integer[]) AS i (id, attempt)
WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = i.id AND c.attempt = i.attempt AND c.state || '' = 'pending'
  -- A probe for each callback: a join would read all of them.
  AND (SELECT p.id FROM callback p
       WHERE p.task_id = c.task_id AND p.target = c.target AND p.seq < c.seq AND p.finished_at IS NULL
       LIMIT 1) IS NULL
RETURNING c.id;

-- name: requeue_next
-- Makes the callbacks due that waited for callbacks that have just ended. It runs in one
-- transaction with their end: otherwise a callback could be claimed in between, and would be called
-- a second time.
WITH next AS (
    SELECT n.id
    FROM callback c
    CROSS JOIN LATERAL (
        SELECT id FROM callback n
        WHERE n.task_id = c.task_id AND n.target = c.target AND n.seq > c.seq AND n.finished_at IS NULL
        ORDER BY n.seq LIMIT 1
    ) n
    WHERE c.id = ANY ($1::text[])
), locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY (ARRAY(SELECT id FROM next)) ORDER BY id FOR NO KEY UPDATE
)
UPDATE callback c SET due_at = now()
WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.state || '' = 'pending' AND c.ordered;

-- name: hold
-- Holds callbacks until their target is drained (`diverted`) or has called those before them.
-- `spent` is the new number of uncounted attempts after a claim without a call, else NULL. It is
-- absolute, so that the statement can be repeated. A drained callback that is held again without an
-- attempt has been held all the time.
WITH locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY ($id::text[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE callback c
SET state = 'held', diverted = c.diverted OR i.diverted, published = 0, waits_since = NULL,
    held_since = coalesce(c.held_since, now()), spent = coalesce(i.spent, c.spent)
FROM unnest($id::text[], $attempt::integer[], $spent::integer[], $diverted::boolean[]) AS i (id, attempt, spent, diverted)
WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = i.id AND c.attempt = i.attempt AND c.state || '' = 'pending';

-- name: drain_held
-- Makes the oldest held callbacks of each target due; returns the targets with the number of
-- callbacks. `every` includes those that only wait for callbacks before them (`read_queued`).
WITH wanted AS (
    SELECT namespace, target, most, every
    FROM unnest($namespace::text[], $target::text[], $most::integer[], $every::boolean[]) AS i (namespace, target, most, every)
), granted AS (
    UPDATE callback c
    SET state = 'pending', due_at = now(), diverted = true
    WHERE c.id = ANY (ARRAY(
        SELECT h.id FROM wanted w CROSS JOIN LATERAL (
            SELECT id FROM callback h WHERE h.state = 'held' AND h.namespace = w.namespace AND h.target = w.target
              AND (h.diverted OR w.every)
            ORDER BY h.seq LIMIT w.most FOR UPDATE SKIP LOCKED) h))
    RETURNING c.namespace, c.target
)
SELECT namespace, target, count(*)::integer AS count FROM granted GROUP BY namespace, target;

-- name: read_queued
-- The callbacks of a target after a number that were held until it has called those before them.
-- They stay held until they are claimed, so a crash loses none.
SELECT id, task_id, attempt, body, headers, ordered, seq
FROM callback
WHERE state = 'held' AND namespace = $namespace AND target = $target AND seq > $after AND NOT diverted
ORDER BY seq LIMIT $limit;

-- name: record_outcomes
-- Records the outcomes of attempts: delivered, dead, or pending for `due_in` seconds. After a
-- replay the outcome of an earlier attempt changes nothing. `spent` is the absolute number of
-- uncounted attempts, so that the statement can be repeated. `published_at` says when `due_at` was
-- set, for `penstock check`; `published` is 0 by now.
-- Records of callbacks that ended are written to the outbox, to the given rows of it.
WITH locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY ($id::text[]) ORDER BY id FOR NO KEY UPDATE
), ended AS (
    UPDATE callback c
    SET state = i.state,
        error = i.error,
        due_at = now() + make_interval(secs => i.due_in),
        published_at = now(),
        spent = nullif(i.spent, 0),
        finished_at = CASE WHEN i.state <> 'pending' THEN now() END
    FROM unnest($id::text[], $attempt::integer[], $state::text[], $error::text[], $due_in::double precision[], $spent::integer[])
         AS i (id, attempt, state, error, due_in, spent)
    WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL
      AND c.attempt > coalesce(c.replayed_after, 0)
    RETURNING c.id
), enqueued AS (
    INSERT INTO callback_outbox (id, topic, keys, records)
    SELECT r.row, r.topic, array_agg(r.key), array_agg(r.value)
    FROM unnest($row::uuid[], $callback_id::text[], $topic::text[], $key::bytea[], $value::bytea[]) AS r (row, callback_id, topic, key, value)
    JOIN ended e ON e.id = r.callback_id
    GROUP BY r.row, r.topic
)
SELECT id FROM ended;

-- name: postpone
-- Postpones callbacks: their records are published again in `due_in` seconds. `spent` as in `hold`.
WITH locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY ($id::text[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE callback c
SET due_at = now() + make_interval(secs => i.due_in), published = 0, published_at = now(),
    spent = coalesce(i.spent, c.spent)
FROM unnest($id::text[], $attempt::integer[], $due_in::double precision[], $spent::integer[]) AS i (id, attempt, due_in, spent)
WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL;

-- name: notify_due
-- Notifies the requeuer that a callback is due in $1 seconds.
SELECT pg_notify('penstock_callback_due', $1);

-- name: take_due
-- Takes callbacks that are due and makes them due again after `horizon` seconds. `published` counts
-- publications without a claim, for `penstock check`. It starts anew after five minutes without a
-- requeuer, which explains the missing claims.
UPDATE callback c
SET due_at = now() + make_interval(secs => $2),
    published = CASE WHEN c.due_at < now() - interval '5 minutes' THEN 1 ELSE c.published + 1 END,
    published_at = now(),
    waits_since = CASE WHEN c.due_at < now() - interval '5 minutes' THEN now() ELSE coalesce(c.waits_since, now()) END
WHERE c.id = ANY (ARRAY(SELECT id FROM callback WHERE state = 'pending' AND due_at <= now()
                        ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED))
RETURNING c.id, c.namespace, c.target, c.task_id, c.attempt, c.body, c.headers, c.ordered, c.diverted OR c.attempt > 0 AS diverted;

-- name: bury
-- Ends callbacks whose records Kafka refuses.
WITH locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY ($1::text[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE callback c SET state = 'dead', error = i.error, finished_at = now()
FROM unnest($1::text[], $2::text[]) AS i (id, error)
WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = i.id AND c.state || '' = 'pending'
RETURNING c.id, c.namespace, c.target, c.task_id, c.attempt, c.body, c.headers, c.ordered, c.finished_at, c.error;

-- name: end_held
-- Ends the first callbacks that have been held for longer than $2 seconds.
UPDATE callback c SET state = 'dead', error = $3, finished_at = now()
WHERE c.id = ANY (ARRAY(SELECT id FROM callback
                        WHERE state = 'held' AND held_since < now() - make_interval(secs => $2)
                        ORDER BY held_since LIMIT $1 FOR UPDATE SKIP LOCKED))
RETURNING c.id, c.namespace, c.target, c.task_id, c.attempt, c.body, c.headers, c.ordered, c.finished_at, c.error;

-- name: count_states
-- Counts the callbacks of each state, no more than $1 of each, by the index of each state. Pending
-- ones are overdue when they are due, or published without a claim, for longer than $2 seconds:
-- those have a near `due_at`, so they are among the first.
WITH pending AS MATERIALIZED (
    SELECT due_at, waits_since FROM callback WHERE state = 'pending' ORDER BY due_at LIMIT $1
)
SELECT (SELECT count(*) FROM pending) AS pending,
       (SELECT count(*) FROM pending
        WHERE due_at < now() - make_interval(secs => $2) OR waits_since < now() - make_interval(secs => $2)) AS overdue,
       (SELECT count(*) FROM (SELECT FROM callback WHERE state = 'held' ORDER BY held_since LIMIT $1) h) AS held,
       (SELECT count(*) FROM (SELECT FROM callback WHERE state = 'dead' ORDER BY target, seq LIMIT $1) d) AS dead,
       (SELECT coalesce(extract(epoch FROM now() - min(held_since)), 0)::double precision
        FROM callback WHERE state = 'held') AS held_s;

-- name: next_due
SELECT extract(epoch FROM min(due_at) - now())::double precision AS wait_s FROM callback WHERE state = 'pending';
