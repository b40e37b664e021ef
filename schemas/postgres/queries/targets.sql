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
-- Targets that are not normal, which have an index of their own, or for which something is held; each held one is found by
-- one look at the index.
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
-- In the order of their URLs, by code point: behind $1, from $2 on and before $3, which are the bounds of a prefix.
SELECT url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM target
WHERE url COLLATE "C" > $1 AND url COLLATE "C" >= $2 AND url COLLATE "C" < $3
ORDER BY url COLLATE "C" LIMIT $4;

-- name: find_normal
SELECT url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM target
WHERE url COLLATE "C" > $1 AND url COLLATE "C" >= $2 AND url COLLATE "C" < $3 AND state = 'normal'
ORDER BY url COLLATE "C" LIMIT $4;

-- name: find_abnormal
SELECT url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM target
WHERE url COLLATE "C" > $1 AND url COLLATE "C" >= $2 AND url COLLATE "C" < $3 AND state <> 'normal' AND state = 'abnormal'
ORDER BY url COLLATE "C" LIMIT $4;

-- name: find_disabled
SELECT url, state, why, count, slow_at, called_at, failures, rate, attempts, owner, changed_at
FROM target
WHERE url COLLATE "C" > $1 AND url COLLATE "C" >= $2 AND url COLLATE "C" < $3 AND state <> 'normal' AND state = 'disabled'
ORDER BY url COLLATE "C" LIMIT $4;

-- name: forget
-- Removes, among the first $2 behind $1, those of which nothing is to be said: normal, charged with nothing, without a rate
-- of their own, and not called or changed for $3 seconds. One that somebody writes just now is left to the next time, so
-- nobody waits; and one that was written meanwhile is asked again. Returns the last one looked at, if there may be more.
WITH looked AS (
    SELECT url, state = 'normal' AND count = 0 AND rate IS NULL
                AND greatest(called_at, changed_at) < now() - make_interval(secs => $3) AS quiet
    FROM target WHERE url COLLATE "C" > $1 ORDER BY url COLLATE "C" LIMIT $2
), chosen AS (
    SELECT url FROM target WHERE url = ANY (ARRAY(SELECT url FROM looked WHERE quiet)) FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM target
    WHERE url = ANY (ARRAY(SELECT url FROM chosen)) AND state = 'normal' AND count = 0 AND rate IS NULL
      AND greatest(called_at, changed_at) < now() - make_interval(secs => $3)
    RETURNING url
)
SELECT (SELECT count(*) FROM gone)::integer AS forgotten,
       (SELECT max(url COLLATE "C") FROM looked HAVING count(*) = $2) AS behind;

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
