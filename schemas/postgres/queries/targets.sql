-- Targets of callbacks, each an address as one namespace calls it. Times come from the process that judges, in seconds since 1970.
-- What operators change takes the target from its owner, whose snapshot must not undo it: the owner reads it again.
-- Both columns are ordered by code point, whatever the collation of the database. Several targets are named by arrays of namespaces and of URLs.

-- name: own
-- Takes targets over: from now on only this owner's snapshots are kept.
INSERT INTO callback_target AS t (namespace, url, owner)
SELECT namespace, url, $3 FROM unnest($1::text[], $2::text[]) AS i (namespace, url) ORDER BY namespace, url
ON CONFLICT (namespace, url) DO UPDATE SET owner = excluded.owner
RETURNING namespace, url, state, count, failures, rate, attempts,
          extract(epoch FROM slow_at)::double precision AS slow_at_s,
          extract(epoch FROM called_at)::double precision AS called_at_s;

-- name: keep
-- Writes snapshots; returns the targets that were still the owner's.
UPDATE callback_target t
SET state = CASE WHEN t.state = 'disabled' THEN t.state WHEN i.abnormal THEN 'abnormal' ELSE 'normal' END,
    count = i.count,
    slow_at = to_timestamp(i.slow_at_s),
    called_at = to_timestamp(i.called_at_s),
    failures = i.failures,
    attempts = i.attempts::jsonb,
    changed_at = CASE WHEN t.state <> 'disabled' AND (t.state = 'abnormal') <> i.abnormal THEN now() ELSE t.changed_at END
FROM unnest($2::text[], $3::text[], $4::boolean[], $5::integer[], $6::double precision[], $7::double precision[],
            $8::integer[], $9::text[]) AS i (namespace, url, abnormal, count, slow_at_s, called_at_s, failures, attempts)
WHERE t.url = ANY ($3::text[]) AND t.url = i.url AND t.namespace = i.namespace AND t.owner = $1
RETURNING t.namespace, t.url;

-- name: troubled
-- Targets that are not normal, which have an index of their own, or for which something is held; each held one is found by
-- one look at the index.
WITH RECURSIVE held AS (
    (SELECT namespace, target FROM callback WHERE state = 'held' ORDER BY namespace, target LIMIT 1)
    UNION ALL
    SELECT n.namespace, n.target
    FROM held h
    CROSS JOIN LATERAL (
        SELECT c.namespace, c.target FROM callback c
        WHERE c.state = 'held' AND (c.namespace, c.target) > (h.namespace, h.target)
        ORDER BY c.namespace, c.target LIMIT 1
    ) n
)
SELECT namespace, url FROM callback_target WHERE state <> 'normal'
UNION
SELECT namespace, target FROM held;

-- name: disable
-- Also one that nobody has called yet; what is owed to it is held from now on. $4: whether this was its answer to a call, just now.
WITH changed AS (
    INSERT INTO callback_target AS t (namespace, url, state, why, called_at)
    VALUES ($1, $2, 'disabled', $3, CASE WHEN $4 THEN now() END)
    ON CONFLICT (namespace, url) DO UPDATE SET
        state = 'disabled', why = excluded.why, owner = NULL, changed_at = now(), called_at = coalesce(excluded.called_at, t.called_at)
    WHERE t.state <> 'disabled'
    RETURNING namespace, url
)
SELECT url, pg_notify('penstock_targets', namespace || ' ' || url) FROM changed;

-- name: enable
-- Its health begins anew; what was held is drained.
WITH changed AS (
    UPDATE callback_target
    SET state = 'normal', why = NULL, count = 0, slow_at = NULL, failures = 0, owner = NULL, changed_at = now()
    WHERE namespace = $1 AND url = $2 AND state <> 'normal'
    RETURNING namespace, url
)
SELECT url, pg_notify('penstock_targets', namespace || ' ' || url) FROM changed;

-- name: limit
-- The most calls a second that a target gets; NULL is the setting of the callbacks service.
WITH changed AS (
    INSERT INTO callback_target AS t (namespace, url, rate) VALUES ($1, $2, $3)
    ON CONFLICT (namespace, url) DO UPDATE SET rate = excluded.rate, owner = NULL
    RETURNING namespace, url
)
SELECT url, pg_notify('penstock_targets', namespace || ' ' || url) FROM changed;

-- name: get
-- Of one address, in those of some namespaces that have it; NULL is all of them.
SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM callback_target
WHERE url = $1 AND ($2::text[] IS NULL OR namespace = ANY ($2))
ORDER BY namespace;

-- name: find
-- In the order of their URLs and then their namespaces: behind $2 in the namespace $1, from $3 on and before $4, which are the
-- bounds of a prefix. Nearly all are normal, so who asks for these finds them by walking.
SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM callback_target
WHERE (url, namespace) > ($2, $1) AND url >= $3 AND url < $4
  AND ($6::text IS NULL OR state = $6)
ORDER BY url, namespace LIMIT $5;

-- name: find_troubled
-- The same of those in a state that is not normal.
SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM callback_target
WHERE (url, namespace) > ($2, $1) AND url >= $3 AND url < $4
  AND state <> 'normal' AND state = $6
ORDER BY url, namespace LIMIT $5;

-- name: find_within
-- As `find`, in some namespaces: the first few of each, without a look at others'.
SELECT f.*
FROM unnest($7::text[]) AS n (namespace)
CROSS JOIN LATERAL (
    SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
    FROM callback_target t
    WHERE t.namespace = n.namespace AND url >= $2 AND (url <> $2 OR n.namespace COLLATE "C" > $1)
      AND url >= $3 AND url < $4 AND ($6::text IS NULL OR state = $6)
    ORDER BY url LIMIT $5
) f
ORDER BY f.url, f.namespace LIMIT $5;

-- name: find_troubled_within
SELECT f.*
FROM unnest($7::text[]) AS n (namespace)
CROSS JOIN LATERAL (
    SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
    FROM callback_target t
    WHERE t.namespace = n.namespace AND url >= $2 AND (url <> $2 OR n.namespace COLLATE "C" > $1)
      AND url >= $3 AND url < $4 AND state <> 'normal' AND state = $6
    ORDER BY url LIMIT $5
) f
ORDER BY f.url, f.namespace LIMIT $5;

-- name: forget
-- Removes, among the first $3 behind $2 in the namespace $1, those of which nothing is to be said: normal, charged with nothing,
-- without a rate of their own, and not called or changed for $4 seconds. One that somebody writes just now is left to the next
-- time, so nobody waits; and one that was written meanwhile is asked again. Returns the last one looked at, if there may be more.
WITH looked AS (
    SELECT namespace, url, state = 'normal' AND count = 0 AND rate IS NULL
                           AND greatest(called_at, changed_at) < now() - make_interval(secs => $4) AS quiet
    FROM callback_target WHERE (url, namespace) > ($2, $1)
    ORDER BY url, namespace LIMIT $3
), quiet AS (
    SELECT namespace, url FROM looked WHERE quiet
), chosen AS (
    SELECT t.namespace, t.url FROM callback_target t JOIN quiet q ON t.url = q.url AND t.namespace = q.namespace
    WHERE t.url = ANY (ARRAY(SELECT url FROM quiet)) FOR UPDATE OF t SKIP LOCKED
), gone AS (
    DELETE FROM callback_target t USING chosen c
    WHERE t.url = ANY (ARRAY(SELECT url FROM chosen)) AND t.url = c.url AND t.namespace = c.namespace
      AND state = 'normal' AND count = 0 AND rate IS NULL
      AND greatest(called_at, changed_at) < now() - make_interval(secs => $4)
    RETURNING t.url
), last AS (
    SELECT namespace, url FROM looked ORDER BY url DESC, namespace DESC LIMIT 1
)
SELECT (SELECT count(*) FROM gone)::integer AS forgotten, l.namespace, l.url
FROM (SELECT count(*) = $3 AS more FROM looked) m
LEFT JOIN last l ON m.more;

-- name: backlog
-- What is owed to some targets. Those held are counted in the index, up to $4 for each. No index has the pending by
-- target, because every callback would pay for it: with one, inserting, beginning and settling went at 0.73 of the rate
-- (median of four runs). They are counted among the first $3 that are due, which takes 50 ms for 20,000, and `complete`
-- says whether these are all there are.
WITH due AS MATERIALIZED (
    SELECT namespace, target, diverted OR attempt > 0 AS aside FROM callback WHERE state = 'pending' ORDER BY due_at LIMIT $3
), pending AS (
    SELECT namespace, target, count(*) FILTER (WHERE NOT aside) AS normal, count(*) FILTER (WHERE aside) AS diverted
    FROM due WHERE target = ANY ($2::text[]) GROUP BY namespace, target
)
SELECT i.namespace, i.url, coalesce(p.normal, 0) AS normal, coalesce(p.diverted, 0) AS diverted, h.held,
       h.held < $4 AND (SELECT count(*) FROM due) < $3 AS complete
FROM unnest($1::text[], $2::text[]) AS i (namespace, url)
CROSS JOIN LATERAL (
    SELECT count(*) AS held
    FROM (SELECT FROM callback WHERE state = 'held' AND namespace = i.namespace AND target = i.url LIMIT $4) c
) h
LEFT JOIN pending p ON p.target = i.url AND p.namespace = i.namespace;

-- name: disabled
-- Which of some targets are.
SELECT t.namespace, t.url
FROM callback_target t JOIN unnest($1::text[], $2::text[]) AS i (namespace, url) ON t.url = i.url AND t.namespace = i.namespace
WHERE t.url = ANY ($2::text[]) AND t.state = 'disabled';
