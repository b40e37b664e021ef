-- Targets of callbacks: one URL in one namespace. Times come from the owning process, in seconds
-- since 1970. A change by an operator clears the owner, so that the owner's next save fails and it
-- reads the target again. Namespace and URL are ordered by code point in every collation.
-- Statements take several targets as arrays of namespaces and of URLs.

-- name: take_over
-- Takes over targets: from now on `save` accepts this owner only.
INSERT INTO callback_target AS t (namespace, url, owner)
SELECT namespace, url, $3 FROM unnest($1::text[], $2::text[]) AS i (namespace, url) ORDER BY namespace, url
ON CONFLICT (namespace, url) DO UPDATE SET owner = excluded.owner
RETURNING namespace, url, state, count, failures, rate, attempts,
          extract(epoch FROM slow_at)::double precision AS slow_at_s,
          extract(epoch FROM called_at)::double precision AS called_at_s;

-- name: save
-- Saves targets; returns those that still belonged to the owner.
WITH locked AS MATERIALIZED (
    SELECT namespace, url FROM callback_target WHERE url = ANY ($url::text[]) AND owner = $owner
    ORDER BY namespace, url FOR NO KEY UPDATE
)
UPDATE callback_target t
SET state = CASE WHEN t.state = 'disabled' THEN t.state WHEN i.abnormal THEN 'abnormal' ELSE 'normal' END,
    count = i.count,
    slow_at = to_timestamp(i.slow_at_s),
    called_at = to_timestamp(i.called_at_s),
    failures = i.failures,
    attempts = i.attempts::jsonb,
    changed_at = CASE WHEN t.state <> 'disabled' AND (t.state = 'abnormal') <> i.abnormal THEN now() ELSE t.changed_at END
FROM unnest({{$saved_target}}) AS i ({{saved_target}})
WHERE t.url = ANY (ARRAY(SELECT url FROM locked)) AND t.url = i.url AND t.namespace = i.namespace AND t.owner = $owner
RETURNING t.namespace, t.url;

-- name: find_abnormal
-- A page of the targets that are not normal, after URL $2 of namespace $1, each with whether it is
-- abnormal.
SELECT namespace, url, state = 'abnormal' AS found
FROM callback_target
WHERE state <> 'normal' AND (url, namespace) > ($2, $1)
ORDER BY url, namespace LIMIT $3;

-- name: find_held
-- A page of the targets that have held callbacks, after URL $2 of namespace $1, each with whether
-- it may be called. A loose index scan: one step for each target, however many callbacks it has.
WITH RECURSIVE held AS (
    (SELECT namespace, target, 1 AS number FROM callback
     WHERE state = 'held' AND (namespace, target) > ($1, $2) ORDER BY namespace, target LIMIT 1)
    UNION ALL
    SELECT n.namespace, n.target, h.number + 1
    FROM held h
    CROSS JOIN LATERAL (
        SELECT c.namespace, c.target FROM callback c
        WHERE c.state = 'held' AND (c.namespace, c.target) > (h.namespace, h.target)
        ORDER BY c.namespace, c.target LIMIT 1
    ) n
    WHERE h.number < $3
)
SELECT h.namespace, h.target AS url, t.state IS DISTINCT FROM 'disabled' AS found
FROM held h
LEFT JOIN callback_target t ON t.namespace = h.namespace AND t.url = h.target
ORDER BY h.number;

-- name: disable
-- Disables a target, also one that was never called. One that is gone stays disabled from now on,
-- however long it is not called.
WITH changed AS (
    INSERT INTO callback_target AS t (namespace, url, state, why)
    VALUES ($1, $2, 'disabled', $3)
    ON CONFLICT (namespace, url) DO UPDATE SET
        state = 'disabled', why = excluded.why, gone_at = NULL, owner = NULL, changed_at = now()
    WHERE t.state <> 'disabled' OR t.gone_at IS NOT NULL
    RETURNING namespace, url
)
SELECT url, pg_notify('penstock_targets', namespace || ' ' || url) FROM changed;

-- name: disable_gone
-- Disables targets whose answer said just now that they are gone. Their `owner` knows of them; any
-- other process is notified.
WITH changed AS (
    INSERT INTO callback_target AS t (namespace, url, state, why, called_at, gone_at)
    SELECT namespace, url, 'disabled', why, now(), now()
    FROM unnest($namespace::text[], $url::text[], $why::text[]) AS i (namespace, url, why) ORDER BY namespace, url
    ON CONFLICT (namespace, url) DO UPDATE SET
        state = 'disabled', why = excluded.why, changed_at = now(), called_at = now(), gone_at = now(),
        owner = CASE WHEN t.owner = $owner THEN t.owner END
    WHERE t.state <> 'disabled'
    RETURNING namespace, url, owner
)
SELECT pg_notify('penstock_targets', namespace || ' ' || url) FROM changed WHERE owner IS NULL;

-- name: enable
-- Enables a target with new health; its held callbacks are drained.
WITH changed AS (
    UPDATE callback_target
    SET state = 'normal', why = NULL, gone_at = NULL, count = 0, slow_at = NULL, failures = 0, owner = NULL, changed_at = now()
    WHERE namespace = $1 AND url = $2 AND state <> 'normal'
    RETURNING namespace, url
)
SELECT url, pg_notify('penstock_targets', namespace || ' ' || url) FROM changed;

-- name: limit
-- Sets the most calls per second of a target; NULL for the setting of the callbacks service.
WITH changed AS (
    INSERT INTO callback_target AS t (namespace, url, rate) VALUES ($1, $2, $3)
    ON CONFLICT (namespace, url) DO UPDATE SET rate = excluded.rate, owner = NULL
    RETURNING namespace, url
)
SELECT url, pg_notify('penstock_targets', namespace || ' ' || url) FROM changed;

-- name: get
-- The targets of one URL, in the given namespaces or (NULL) in all.
SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM callback_target
WHERE url = $1 AND ($2::text[] IS NULL OR namespace = ANY ($2))
ORDER BY namespace;

-- name: lock
-- The settings of operators of one target, locked until the end of the transaction; no row when it
-- is unknown.
SELECT state, why, rate FROM callback_target WHERE namespace = $1 AND url = $2 FOR UPDATE;

-- name: find
-- A page in the order of URL and namespace, after `after_url` of `after_namespace`. `from_url` and
-- `until_url` bound a prefix.
-- It filters by state in a walk over the index, because nearly all targets are normal.
SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM callback_target
WHERE (url, namespace) > ($after_url, $after_namespace) AND url >= $from_url AND url < $until_url
  AND ($state::text IS NULL OR state = $state)
ORDER BY url, namespace LIMIT $limit;

-- name: find_in_state
-- As `find`, for a state other than normal, which has a partial index.
SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM callback_target
WHERE (url, namespace) > ($after_url, $after_namespace) AND url >= $from_url AND url < $until_url
  AND state <> 'normal' AND state = $state
ORDER BY url, namespace LIMIT $limit;

-- name: find_within
-- As `find`, in some namespaces: merges a page of each.
SELECT f.*
FROM unnest($namespaces::text[]) AS n (namespace)
CROSS JOIN LATERAL (
    SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
    FROM callback_target t
    WHERE t.namespace = n.namespace AND url >= $after_url AND (url <> $after_url OR n.namespace COLLATE "C" > $after_namespace)
      AND url >= $from_url AND url < $until_url AND ($state::text IS NULL OR state = $state)
    ORDER BY url LIMIT $limit
) f
ORDER BY f.url, f.namespace LIMIT $limit;

-- name: find_in_state_within
-- As `find_in_state`, in some namespaces.
SELECT f.*
FROM unnest($namespaces::text[]) AS n (namespace)
CROSS JOIN LATERAL (
    SELECT namespace, url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
    FROM callback_target t
    WHERE t.namespace = n.namespace AND url >= $after_url AND (url <> $after_url OR n.namespace COLLATE "C" > $after_namespace)
      AND url >= $from_url AND url < $until_url AND state <> 'normal' AND state = $state
    ORDER BY url LIMIT $limit
) f
ORDER BY f.url, f.namespace LIMIT $limit;

-- name: delete_unused
-- Among the next `limit` targets after `after_url` of `after_namespace`, deletes those that are
-- normal with count 0, or gone and without held callbacks, that have no rate of their own, and were
-- not called or changed for `unused_s` seconds. It skips rows that another transaction has locked,
-- and checks each row again before the deletion. Returns the last target of the page, unless it was
-- the last page.
WITH scanned AS (
    SELECT namespace, url, (state = 'normal' AND count = 0 OR gone_at IS NOT NULL) AND rate IS NULL
                           AND greatest(called_at, changed_at) < now() - make_interval(secs => $unused_s) AS unused
    FROM callback_target WHERE (url, namespace) > ($after_url, $after_namespace)
    ORDER BY url, namespace LIMIT $limit
), unused AS (
    SELECT s.namespace, s.url FROM scanned s
    WHERE s.unused
      -- A probe for each target: a join would read all held callbacks.
      AND (SELECT c.id FROM callback c WHERE c.state = 'held' AND c.namespace = s.namespace AND c.target = s.url
           LIMIT 1) IS NULL
), chosen AS (
    SELECT t.namespace, t.url FROM callback_target t JOIN unused q ON t.url = q.url AND t.namespace = q.namespace
    WHERE t.url = ANY (ARRAY(SELECT url FROM unused)) FOR UPDATE OF t SKIP LOCKED
), removed AS (
    DELETE FROM callback_target t USING chosen c
    WHERE t.url = ANY (ARRAY(SELECT url FROM chosen)) AND t.url = c.url AND t.namespace = c.namespace
      AND (state = 'normal' AND count = 0 OR gone_at IS NOT NULL) AND rate IS NULL
      AND greatest(called_at, changed_at) < now() - make_interval(secs => $unused_s)
    RETURNING t.url
), last AS (
    SELECT namespace, url FROM scanned ORDER BY url DESC, namespace DESC LIMIT 1
)
SELECT (SELECT count(*) FROM removed)::integer AS deleted, l.namespace, l.url
FROM (SELECT count(*) = $limit AS more FROM scanned) m
LEFT JOIN last l ON m.more;

-- name: backlog
-- Counts the unfinished callbacks of some targets. Held ones are counted by their index, up to
-- `most_held` per target. Pending ones have no index by target, because it lowered the rate of
-- inserts, claims and outcomes to 0.73 (median of four runs). They are counted among the first
-- `most_pending` that are due, which takes 50 ms for 20,000. `complete` says whether the counts are
-- exact.
WITH due AS MATERIALIZED (
    SELECT namespace, target, diverted OR attempt > 0 AS is_diverted FROM callback WHERE state = 'pending' ORDER BY due_at LIMIT $most_pending
), pending AS (
    SELECT namespace, target, count(*) FILTER (WHERE NOT is_diverted) AS normal, count(*) FILTER (WHERE is_diverted) AS diverted
    FROM due WHERE target = ANY ($url::text[]) GROUP BY namespace, target
)
SELECT i.namespace, i.url, coalesce(p.normal, 0) AS normal, coalesce(p.diverted, 0) AS diverted, h.held,
       h.held < $most_held AND (SELECT count(*) FROM due) < $most_pending AS complete
FROM unnest($namespace::text[], $url::text[]) AS i (namespace, url)
CROSS JOIN LATERAL (
    SELECT count(*) AS held
    FROM (SELECT FROM callback WHERE state = 'held' AND namespace = i.namespace AND target = i.url LIMIT $most_held) c
) h
LEFT JOIN pending p ON p.target = i.url AND p.namespace = i.namespace;

-- name: disabled
-- The disabled ones among some targets.
SELECT t.namespace, t.url
FROM callback_target t JOIN unnest($1::text[], $2::text[]) AS i (namespace, url) ON t.url = i.url AND t.namespace = i.namespace
WHERE t.url = ANY ($2::text[]) AND t.state = 'disabled';
