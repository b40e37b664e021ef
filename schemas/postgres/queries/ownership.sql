-- Advisory locks of sessions tell which replica of a service owns what; $1 is the name of a group.

-- name: lock
-- Makes this session the owner of a thing, for as long as it lives.
SELECT pg_try_advisory_lock(hashtextextended($1 || '.' || $2, 0)) AS locked;

-- name: unlock
SELECT pg_advisory_unlock(hashtextextended($1 || '.' || $2, 0)) AS unlocked;

-- name: join
-- Registers this session as a replica, for as long as it lives, and notifies the others.
WITH joined AS MATERIALIZED (SELECT pg_advisory_lock_shared(hashtextextended($1, 0)))
SELECT pg_notify($2, '') FROM joined;

-- name: leave
WITH unlocked AS MATERIALIZED (SELECT pg_advisory_unlock_all())
SELECT pg_notify($1, '') FROM unlocked;

-- name: notify_replicas
SELECT pg_notify($1, '');

-- name: owners
-- The sessions of all replicas, and the session that owns each of the given things, in the given
-- order.
WITH held AS (
    -- pg_locks shows a key of 64 bits in two halves.
    SELECT (l.classid::bigint << 32) | l.objid::bigint AS key, l.pid FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
SELECT (SELECT array_agg(pid ORDER BY pid) FROM held WHERE key = hashtextextended($1, 0)) AS members,
       (SELECT array_agg(h.pid ORDER BY t.position) FROM unnest($2::text[]) WITH ORDINALITY AS t (name, position)
        LEFT JOIN held h ON h.key = hashtextextended($1 || '.' || t.name, 0)) AS owners;
