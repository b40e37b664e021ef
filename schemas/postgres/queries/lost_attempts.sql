-- Attempts whose worker was lost.

-- name: get
-- The outcome of each attempt, which is NULL until it has ended, and the state of its task now. The
-- statement reads `task` and `history` in one snapshot, because tasks move between them.
SELECT i.id, i.step, i.attempt, t.type, t.state, a.outcome
FROM task t JOIN unnest($1::bigint[], $2::integer[], $3::integer[]) AS i (id, step, attempt) ON t.id = i.id
LEFT JOIN attempt a ON a.task_id = ANY ($1::bigint[]) AND a.task_id = i.id AND a.step = i.step
  AND a.attempt = CASE WHEN i.attempt < {{first_chosen}} THEN i.attempt ELSE 0 END
WHERE t.id = ANY ($1::bigint[])
UNION ALL
SELECT i.id, i.step, i.attempt, h.type, h.state,
       (SELECT e ->> 'outcome' FROM jsonb_array_elements(h.attempts) e
        WHERE (e ->> 'step')::integer = i.step
          AND (e ->> 'attempt')::integer = CASE WHEN i.attempt < {{first_chosen}} THEN i.attempt ELSE 0 END LIMIT 1)
FROM history h JOIN unnest($1::bigint[], $2::integer[], $3::integer[]) AS i (id, step, attempt) ON h.id = i.id
WHERE h.id = ANY ($1::bigint[]);
