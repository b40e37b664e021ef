-- Types may refuse a submission whose idempotency key was used with another context.
ALTER TABLE penstock.task_type
    ADD COLUMN idempotency text NOT NULL DEFAULT 'lenient'
    CONSTRAINT task_type_idempotency_check CHECK (idempotency IN ('lenient', 'strict'));
ALTER TABLE penstock.task ADD COLUMN context_digest bytea;
ALTER TABLE penstock.history ADD COLUMN context_digest bytea;

COMMENT ON COLUMN penstock.task_type.idempotency IS 'strict: an idempotency key with another context is refused';
COMMENT ON COLUMN penstock.task.context_digest IS 'of the submitted context, for types whose idempotency is strict';
