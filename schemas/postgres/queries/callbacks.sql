-- Deliveries. Every attempt is recorded before it is made.
-- What is found by id asks for `finished_at IS NULL`, which says the same as `state = 'pending'`: by the latter
-- the planner would read the whole index of what is due.

-- name: begin
-- Takes the right to make attempts: returns the ids whose attempt number was still the record's, and how many attempts
-- their schedule does not count: those from before a replay, and those that were made while the service suspected itself.
UPDATE callback c
SET attempt = c.attempt + 1, state = 'pending', due_at = now() + make_interval(secs => $3),
    published = 0, waits_since = NULL
FROM unnest($1::text[], $2::integer[]) AS i (id, attempt)
WHERE c.id = ANY ($1::text[]) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL
RETURNING c.id, c.attempt, greatest(c.replayed_after, c.spent, 0) AS spent;

-- name: begin_in_order
-- The same, but one whose task owes its target something earlier waits for that, in the state of that; it comes again by
-- itself, should nobody call it when the earlier one has ended. Returns those, too, with their state.
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
), waiting AS (
    UPDATE callback c
    SET state = b.state, diverted = c.diverted OR b.state = 'held',
        due_at = greatest(now(), b.due_at) + make_interval(secs => 1),
        published = 0, waits_since = NULL
    FROM behind b
    WHERE c.id = ANY (ARRAY(SELECT id FROM behind)) AND c.id = b.id AND c.attempt = b.attempt AND c.finished_at IS NULL
    RETURNING c.id, c.attempt, c.state
), begun AS (
    UPDATE callback c
    SET attempt = c.attempt + 1, state = 'pending', due_at = now() + make_interval(secs => $3),
        published = 0, waits_since = NULL
    FROM input i
    WHERE c.id = ANY ($1::text[]) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL
      AND c.id <> ALL (ARRAY(SELECT id FROM behind))
    RETURNING c.id, c.attempt, greatest(c.replayed_after, c.spent, 0) AS spent
)
SELECT id, attempt, spent, NULL AS waits FROM begun
UNION ALL
SELECT id, attempt, 0, state FROM waiting;

-- name: overtaken
-- A second look at those that were put behind an earlier one: it may have ended between the look at it and the update, and
-- what `follow` did then is written over. Whatever ends after that is followed by those, so either way they are called.
UPDATE callback c SET due_at = now()
FROM unnest($1::text[], $2::integer[]) AS i (id, attempt)
WHERE c.id = ANY ($1::text[]) AND c.id = i.id AND c.attempt = i.attempt AND c.state = 'pending'
  AND NOT EXISTS (SELECT FROM callback p
                  WHERE p.task_id = c.task_id AND p.target = c.target AND p.seq < c.seq AND p.finished_at IS NULL)
RETURNING c.id;

-- name: follow
-- Calls those that waited for callbacks that have ended just now: in one transaction with that, so that none of them can
-- have begun by itself, which would be called a second time.
WITH next AS (
    SELECT n.id
    FROM callback c
    CROSS JOIN LATERAL (
        SELECT id FROM callback n
        WHERE n.task_id = c.task_id AND n.target = c.target AND n.seq > c.seq AND n.finished_at IS NULL
        ORDER BY n.seq LIMIT 1
    ) n
    WHERE c.id = ANY ($1::text[])
)
UPDATE callback c SET due_at = now()
WHERE c.id = ANY (ARRAY(SELECT id FROM next)) AND c.state = 'pending' AND c.ordered;

-- name: hold
-- Takes them off the topics until their target may have them. `spent` is how many attempts do not count when one of them
-- was begun and is not made, else NULL; not one more than before, so that writing it again is harmless.
UPDATE callback c
SET state = 'held', diverted = true, published = 0, waits_since = NULL,
    spent = coalesce(i.spent, c.spent)
FROM unnest($1::text[], $2::integer[], $3::integer[]) AS i (id, attempt, spent)
WHERE c.id = ANY ($1::text[]) AND c.id = i.id AND c.attempt = i.attempt AND c.state = 'pending';

-- name: grant
-- Lets the first few that are held for each target go; returns of which targets, and how many.
WITH wanted AS (
    SELECT namespace, target, most FROM unnest($1::text[], $2::text[], $3::integer[]) AS i (namespace, target, most)
), granted AS (
    UPDATE callback c
    SET state = 'pending', due_at = now()
    WHERE c.id = ANY (ARRAY(
        SELECT h.id FROM wanted w CROSS JOIN LATERAL (
            SELECT id FROM callback h WHERE h.state = 'held' AND h.namespace = w.namespace AND h.target = w.target
            ORDER BY h.seq LIMIT w.most FOR UPDATE SKIP LOCKED) h))
    RETURNING c.namespace, c.target
)
SELECT namespace, target, count(*)::integer AS count FROM granted GROUP BY namespace, target;

-- name: settle
-- Writes down what became of attempts: delivered, dead, or pending until `due_in` seconds from now. Written again after
-- the callback was replayed, the fate of an attempt from before changes nothing. `spent` is how many attempts do not
-- count by now, and not one more than before, so that writing it again is harmless.
UPDATE callback c
SET state = i.state,
    error = i.error,
    due_at = now() + make_interval(secs => i.due_in),
    spent = nullif(i.spent, 0),
    finished_at = CASE WHEN i.state <> 'pending' THEN now() END
FROM unnest($1::text[], $2::integer[], $3::text[], $4::text[], $5::double precision[], $6::integer[])
     AS i (id, attempt, state, error, due_in, spent)
WHERE c.id = ANY ($1::text[]) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL
  AND c.attempt > coalesce(c.replayed_after, 0)
RETURNING c.id;

-- name: postpone
-- Puts back what was not begun: its record is written again in `due_in` seconds. Or what was begun and not made, as in `hold`.
UPDATE callback c
SET due_at = now() + make_interval(secs => i.due_in), published = 0,
    spent = coalesce(i.spent, c.spent)
FROM unnest($1::text[], $2::integer[], $3::double precision[], $4::integer[]) AS i (id, attempt, due_in, spent)
WHERE c.id = ANY ($1::text[]) AND c.id = i.id AND c.attempt = i.attempt AND c.finished_at IS NULL;

-- name: announce
-- Tells the process that releases callbacks in how many seconds one is due.
SELECT pg_notify('penstock_callback_due', $1);

-- name: due
-- Pending callbacks whose time has come: their records are written (again), and not before `horizon` after that. How often
-- in vain is counted anew when nobody released anything for a while: that explains why they were not begun.
UPDATE callback c
SET due_at = now() + make_interval(secs => $2),
    published = CASE WHEN c.due_at < now() - interval '5 minutes' THEN 1 ELSE c.published + 1 END,
    published_at = now(),
    waits_since = CASE WHEN c.due_at < now() - interval '5 minutes' THEN now() ELSE coalesce(c.waits_since, now()) END
WHERE c.id = ANY (ARRAY(SELECT id FROM callback WHERE state = 'pending' AND due_at <= now()
                        ORDER BY due_at LIMIT $1 FOR UPDATE SKIP LOCKED))
RETURNING c.id, c.namespace, c.target, c.task_id, c.attempt, c.body, c.headers, c.ordered, c.diverted OR c.attempt > 0 AS diverted;

-- name: next_due
SELECT extract(epoch FROM min(due_at) - now())::double precision AS wait_s FROM callback WHERE state = 'pending';
