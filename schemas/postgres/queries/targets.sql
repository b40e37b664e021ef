-- Targets of callbacks. Times come from the process that judges, in seconds since 1970.
-- What operators change takes the target from its owner, whose snapshot must not undo it: the owner reads it again.

-- name: own
-- Takes targets over: from now on only this owner's snapshots are kept.
INSERT INTO target AS t (url, owner)
SELECT url, $2 FROM unnest($1::text[]) AS i (url) ORDER BY url
ON CONFLICT (url) DO UPDATE SET owner = excluded.owner
RETURNING url, state, count, failures, rate, attempts,
          extract(epoch FROM slow_at)::double precision AS slow_at_s,
          extract(epoch FROM called_at)::double precision AS called_at_s;

-- name: keep
-- Writes snapshots; returns the targets that were still the owner's.
UPDATE target t
SET state = CASE WHEN t.state = 'disabled' THEN t.state WHEN i.abnormal THEN 'abnormal' ELSE 'normal' END,
    count = i.count,
    slow_at = to_timestamp(i.slow_at_s),
    called_at = to_timestamp(i.called_at_s),
    failures = i.failures,
    attempts = i.attempts::jsonb,
    changed_at = CASE WHEN t.state <> 'disabled' AND (t.state = 'abnormal') <> i.abnormal THEN now() ELSE t.changed_at END
FROM unnest($2::text[], $3::boolean[], $4::integer[], $5::double precision[], $6::double precision[], $7::integer[],
            $8::text[]) AS i (url, abnormal, count, slow_at_s, called_at_s, failures, attempts)
WHERE t.url = ANY ($2::text[]) AND t.url = i.url AND t.owner = $1
RETURNING t.url;

-- name: troubled
-- Targets that are not normal, or for which something is held; each held one is found by one look at the index.
WITH RECURSIVE held AS (
    (SELECT target FROM callback WHERE state = 'held' ORDER BY target LIMIT 1)
    UNION ALL
    SELECT (SELECT c.target FROM callback c WHERE c.state = 'held' AND c.target > h.target ORDER BY c.target LIMIT 1)
    FROM held h WHERE h.target IS NOT NULL
)
SELECT url FROM target WHERE state <> 'normal'
UNION
SELECT target FROM held WHERE target IS NOT NULL;

-- name: disable
-- Also one that nobody has called yet; what is owed to it is held from now on.
WITH changed AS (
    INSERT INTO target AS t (url, state, why) VALUES ($1, 'disabled', $2)
    ON CONFLICT (url) DO UPDATE SET state = 'disabled', why = excluded.why, owner = NULL, changed_at = now()
    WHERE t.state <> 'disabled'
    RETURNING url
)
SELECT url, pg_notify('penstock_targets', url) FROM changed;

-- name: enable
-- Its health begins anew; what was held is drained.
WITH changed AS (
    UPDATE target SET state = 'normal', why = NULL, count = 0, slow_at = NULL, failures = 0, owner = NULL, changed_at = now()
    WHERE url = $1 AND state <> 'normal'
    RETURNING url
)
SELECT url, pg_notify('penstock_targets', url) FROM changed;

-- name: limit
-- The most calls a second that a target gets; NULL is the setting of the callbacks service.
WITH changed AS (
    INSERT INTO target AS t (url, rate) VALUES ($1, $2)
    ON CONFLICT (url) DO UPDATE SET rate = excluded.rate, owner = NULL
    RETURNING url
)
SELECT url, pg_notify('penstock_targets', url) FROM changed;

-- name: get
SELECT url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at FROM target WHERE url = $1;

-- name: find
-- In the order of their URLs; `after` is the last of the page before.
SELECT url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM target
WHERE ($1::text IS NULL OR state = $1) AND ($2::text IS NULL OR starts_with(url, $2)) AND ($3::text IS NULL OR url > $3)
ORDER BY url LIMIT $4;

-- name: backlog
-- What is owed to some targets. Those held are counted in the index, up to $3 for each. No index has the pending by
-- target, because every callback would pay for it: with one, inserting, beginning and settling went at 0.73 of the rate
-- (median of four runs). They are counted among the first $2 that are due, which takes 50 ms for 20,000, and `complete`
-- says whether these are all there are.
WITH due AS MATERIALIZED (
    SELECT target, diverted OR attempt > 0 AS aside FROM callback WHERE state = 'pending' ORDER BY due_at LIMIT $2
), pending AS (
    SELECT target, count(*) FILTER (WHERE NOT aside) AS normal, count(*) FILTER (WHERE aside) AS diverted
    FROM due WHERE target = ANY ($1::text[]) GROUP BY target
)
SELECT i.url, coalesce(p.normal, 0) AS normal, coalesce(p.diverted, 0) AS diverted, h.held,
       h.held < $3 AND (SELECT count(*) FROM due) < $2 AS complete
FROM unnest($1::text[]) AS i (url)
CROSS JOIN LATERAL (
    SELECT count(*) AS held FROM (SELECT FROM callback WHERE state = 'held' AND target = i.url LIMIT $3) c
) h
LEFT JOIN pending p ON p.target = i.url;

-- name: disabled
-- Which of some targets are.
SELECT url FROM target WHERE url = ANY ($1::text[]) AND state = 'disabled';
