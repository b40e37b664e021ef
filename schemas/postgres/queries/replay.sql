-- Finding callbacks, and replaying them. Each `find` walks one index, after the last row of the
-- page before. The caller asks for one row more than a page, which shows whether there is another
-- page.

-- name: find_ids
SELECT id, namespace, target, seq FROM callback
WHERE id = ANY ($ids::text[]) AND ($state::text IS NULL OR state = $state)
  AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
  AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
  AND ($namespaces::text[] IS NULL OR namespace = ANY ($namespaces))
ORDER BY seq LIMIT $limit;

-- name: find_of_task
SELECT id, namespace, target, seq FROM callback
WHERE task_id = $task_id AND seq > $after_seq
  AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
  AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
  AND ($state::text IS NULL OR state = $state) AND ($target::text IS NULL OR target = $target)
  AND ($namespaces::text[] IS NULL OR namespace = ANY ($namespaces))
ORDER BY seq LIMIT $limit;

-- name: find_dead
-- For all targets, in the order of target and seq.
SELECT id, namespace, target, seq FROM callback
WHERE state = 'dead' AND (target, seq) > ($after_target, $after_seq)
  AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
  AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
ORDER BY target, seq LIMIT $limit;

-- name: find_dead_within
-- The same in some namespaces: merges a page of each.
SELECT f.*
FROM unnest($namespaces::text[]) AS n (namespace)
CROSS JOIN LATERAL (
    SELECT id, namespace, target, seq FROM callback c
    WHERE state = 'dead' AND c.namespace = n.namespace AND (target, seq) > ($after_target, $after_seq)
      AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
      AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
    ORDER BY target, seq LIMIT $limit
) f
ORDER BY f.target, f.seq LIMIT $limit;

-- name: find_dead_of_target
SELECT id, namespace, target, seq FROM callback
WHERE state = 'dead' AND target = $target AND seq > $after_seq
  AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
  AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
ORDER BY seq LIMIT $limit;

-- name: find_dead_of_target_within
SELECT f.*
FROM unnest($namespaces::text[]) AS n (namespace)
CROSS JOIN LATERAL (
    SELECT id, namespace, target, seq FROM callback c
    WHERE state = 'dead' AND c.namespace = n.namespace AND target = $target AND seq > $after_seq
      AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
      AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
    ORDER BY seq LIMIT $limit
) f
ORDER BY f.seq LIMIT $limit;

-- name: find_held
-- For all targets, in the order of target and seq.
SELECT id, namespace, target, seq FROM callback
WHERE state = 'held' AND (target, seq) > ($after_target, $after_seq)
  AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
  AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
ORDER BY target, seq LIMIT $limit;

-- name: find_held_within
-- The same in some namespaces: merges a page of each.
SELECT f.*
FROM unnest($namespaces::text[]) AS n (namespace)
CROSS JOIN LATERAL (
    SELECT id, namespace, target, seq FROM callback c
    WHERE state = 'held' AND c.namespace = n.namespace AND (target, seq) > ($after_target, $after_seq)
      AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
      AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
    ORDER BY target, seq LIMIT $limit
) f
ORDER BY f.target, f.seq LIMIT $limit;

-- name: find_held_of_target
SELECT id, namespace, target, seq FROM callback
WHERE state = 'held' AND target = $target AND seq > $after_seq
  AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
  AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
ORDER BY seq LIMIT $limit;

-- name: find_held_of_target_within
SELECT f.*
FROM unnest($namespaces::text[]) AS n (namespace)
CROSS JOIN LATERAL (
    SELECT id, namespace, target, seq FROM callback c
    WHERE state = 'held' AND c.namespace = n.namespace AND target = $target AND seq > $after_seq
      AND ($since::timestamptz IS NULL OR coalesce(finished_at, created_at) >= $since)
      AND ($until::timestamptz IS NULL OR coalesce(finished_at, created_at) < $until)
    ORDER BY seq LIMIT $limit
) f
ORDER BY f.seq LIMIT $limit;

-- name: find_pending
-- Searches the first `examined` due callbacks, because pending ones have no index by target.
SELECT id, namespace, target, seq
FROM (
    SELECT id, namespace, target, seq, created_at FROM callback
    WHERE state = 'pending' AND ($namespaces::text[] IS NULL OR namespace = ANY ($namespaces))
    ORDER BY due_at LIMIT $examined
) c
WHERE (target, seq) > ($after_target, $after_seq) AND ($target::text IS NULL OR target = $target)
  AND ($since::timestamptz IS NULL OR created_at >= $since)
  AND ($until::timestamptz IS NULL OR created_at < $until)
ORDER BY target, seq LIMIT $limit;

-- name: read
SELECT id, namespace, target, task_id, state, attempt, replayed_after, ordered, diverted, error, due_at, created_at, finished_at, seq
FROM callback WHERE id = ANY ($1::text[]) ORDER BY target, seq;

-- name: replay
-- Makes finished callbacks pending again, due in `due_in` seconds, if they are still in the given
-- state; held if their target is disabled.
WITH locked AS MATERIALIZED (
    SELECT id FROM callback WHERE id = ANY ($id::text[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE callback c
SET state = CASE WHEN d.disabled THEN 'held' ELSE 'pending' END,
    diverted = c.diverted OR d.disabled,
    error = NULL,
    finished_at = NULL,
    replayed_after = c.attempt,
    due_at = now() + make_interval(secs => i.due_in),
    held_since = CASE WHEN d.disabled THEN now() END
FROM unnest($id::text[], $due_in::double precision[], $namespace::text[], $target::text[]) AS i (id, due_in, namespace, target)
CROSS JOIN LATERAL (
    SELECT EXISTS (SELECT FROM callback_target t
                   WHERE t.namespace = i.namespace AND t.url = i.target AND t.state = 'disabled') AS disabled
) d
WHERE c.id = ANY (ARRAY(SELECT id FROM locked)) AND c.id = i.id AND c.state = $state AND c.finished_at IS NOT NULL
RETURNING c.id, c.namespace, c.target, c.state;
