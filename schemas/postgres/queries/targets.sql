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
