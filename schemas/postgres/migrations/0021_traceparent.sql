-- W3C Trace Context of tasks whose submission was sampled. No query filters by it.
ALTER TABLE penstock.task ADD COLUMN traceparent text;

COMMENT ON COLUMN penstock.task.traceparent IS 'W3C traceparent of its submission, if that was sampled';
