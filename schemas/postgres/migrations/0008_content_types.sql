-- Whoever reads a task must know what its context is: one row written by hand with another word stopped every type's
-- release, again after each restart. Refused where it is written. The words are penstock.contracts.context.ContentType's.
ALTER TABLE penstock.task
    ADD CONSTRAINT task_content_type_check CHECK (content_type IN ('json', 'text', 'url', 'bytes')),
    ADD CONSTRAINT task_result_type_check CHECK (result_type IN ('json', 'text', 'url', 'bytes'));
