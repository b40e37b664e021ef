-- Options of callbacks besides the URL: events, headers, format and order.

-- task.callbacks stays text[]: a URL, or an object as JSON text, which cannot be mistaken for a
-- URL. So no table is rewritten, and services of the previous release keep working with URLs.
COMMENT ON COLUMN penstock.task.callbacks IS 'each a URL, or JSON: url and perhaps events, headers (secrets), format, ordered';

ALTER TABLE penstock.task_type ADD COLUMN callbacks text[];

COMMENT ON COLUMN penstock.task_type.callbacks IS 'as task.callbacks: of tasks submitted without their own';

ALTER TABLE penstock.callback
    ADD COLUMN headers jsonb,
    ADD COLUMN ordered boolean NOT NULL DEFAULT false,
    ADD COLUMN seq bigint GENERATED ALWAYS AS IDENTITY;

COMMENT ON COLUMN penstock.callback.headers IS 'sent beside the standard ones, or as a content type instead; values are secrets';
COMMENT ON COLUMN penstock.callback.ordered IS 'waits for those of its task and target with a lower seq';
COMMENT ON COLUMN penstock.callback.seq IS 'order of creation; of one task also the order of its transitions';
