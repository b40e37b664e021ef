-- An alternative ingest, for comparison: COPY into a temporary table, and one statement from there.

-- name: stage
CREATE TEMPORARY TABLE IF NOT EXISTS staged (
    ordinal bigint, type text, stage text, priority smallint, content_type text, context bytea, context_ref text,
    idempotency_key text, due_at timestamptz, callbacks text, events text, labels text, key text
) ON COMMIT DELETE ROWS;

-- name: insert
WITH inserted AS (
    INSERT INTO task (type, state, stage, priority, content_type, context, context_ref, idempotency_key,
                      due_at, callbacks, events, labels, key)
    SELECT i.type, CASE WHEN i.due_at > now() THEN 'scheduled' ELSE 'ready' END,
           coalesce(i.stage, t.first_stage), i.priority, i.content_type, i.context, i.context_ref,
           i.idempotency_key, i.due_at,
           CASE WHEN i.callbacks IS NULL THEN t.callbacks
                ELSE ARRAY(SELECT jsonb_array_elements_text(i.callbacks::jsonb)) END,
           coalesce(i.events, t.events), i.labels::jsonb,
           CASE WHEN i.key IS NULL AND t.keyed THEN '' ELSE i.key END
    FROM staged i JOIN task_type t ON t.name = i.type
    ORDER BY i.ordinal
    ON CONFLICT (type, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING id, type, idempotency_key, state
), woken AS (
    SELECT pg_notify(CASE state WHEN 'ready' THEN 'penstock_ready' ELSE 'penstock_due' END, type)
    FROM (SELECT DISTINCT type, state FROM inserted) AS types
)
SELECT id, type, idempotency_key FROM inserted, (SELECT count(*) FROM woken) AS w
ORDER BY id;
