-- Events for flows.

-- name: insert
-- Inserts the events whose id their namespace does not have, and returns them. They end the waits
-- that the statement sees, so that these flows go on after one commit. `match_events` must follow:
-- it finds the waits that were committed meanwhile.
-- A batch that was read from a topic moves the reader's offset from `first_offset` to
-- `next_offset`, and its identity from `identity` to `next_identity`. When they are not
-- `first_offset` and `identity`, another process reads the partition now, and nothing is inserted.
-- Returns one row without an id, then the inserted events; no row when the offset was another.
WITH moved AS (
    UPDATE ingested SET next_offset = $next_offset, identity = $next_identity::text
    WHERE topic = $topic AND partition = $partition AND next_offset = $first_offset AND identity IS NOT DISTINCT FROM $identity::text
      -- As in `tasks.submit`.
      AND (SELECT set_config('lock_timeout', coalesce(nullif(current_setting('lock_timeout'), '0'), 400 + floor(200 * random()) || 'ms'), true)) IS NOT NULL
    RETURNING 1
), allowed AS (
    SELECT 1 WHERE $topic::text IS NULL UNION ALL SELECT 1 FROM moved
), inserted AS (
    INSERT INTO flow_event ({{flow_event}})
    SELECT {{flow_event}}
    FROM unnest({{$flow_event}}) WITH ORDINALITY AS i ({{flow_event}}, ordinal)
    WHERE EXISTS (SELECT FROM allowed)
      -- As in `tasks.submit`.
      AND (SELECT set_config('lock_timeout', coalesce(nullif(current_setting('lock_timeout'), '0'), 400 + floor(200 * random()) || 'ms'), true)) IS NOT NULL
    -- In one order, so that two batches with the same events do not wait for each other.
    ORDER BY namespace, id, ordinal
    ON CONFLICT DO NOTHING
    RETURNING namespace, id, event, key
), found AS (
    SELECT DISTINCT ON (w.flow_id, w.node) w.flow_id, w.node, e.id, e.namespace
    FROM inserted e
    CROSS JOIN LATERAL (
        SELECT flow_id, node FROM flow_wait WHERE namespace = e.namespace AND event = e.event AND key = e.key OFFSET 0
    ) AS w
    ORDER BY w.flow_id, w.node, e.id
), locked AS MATERIALIZED (
    SELECT w.ctid AS place FROM (SELECT flow_id, node FROM found ORDER BY flow_id, node) AS f
    CROSS JOIN LATERAL (
        SELECT ctid FROM flow_wait WHERE flow_id = f.flow_id AND node = f.node FOR UPDATE SKIP LOCKED OFFSET 0
    ) AS w
), matched AS (
    DELETE FROM flow_wait WHERE ctid = ANY (ARRAY(SELECT place FROM locked))
    RETURNING root_id, flow_id, node, generation
), noted AS (
    INSERT INTO flow_inbox (root_id, flow_id, kind, node, generation, detail)
    SELECT m.root_id, m.flow_id, 'event', m.node, m.generation, jsonb_build_object('namespace', f.namespace, 'id', f.id)
    FROM matched m JOIN found f USING (flow_id, node)
    RETURNING shard
), woken AS (
    SELECT pg_notify('penstock_flows', shard::text) FROM (SELECT DISTINCT shard FROM noted) AS shards
)
SELECT NULL AS namespace, NULL AS id FROM allowed, (SELECT count(*) FROM woken) AS w
UNION ALL
SELECT namespace, id FROM inserted
ORDER BY id NULLS FIRST;
