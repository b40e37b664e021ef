-- An unknown content type in one row, written by hand, stopped the release of every type after each
-- restart. The constraint rejects it. The values are those of
-- penstock.contracts.context.ContentType.
ALTER TABLE penstock.task
    ADD CONSTRAINT task_content_type_check CHECK (content_type IN ('json', 'text', 'url', 'bytes')),
    ADD CONSTRAINT task_result_type_check CHECK (result_type IN ('json', 'text', 'url', 'bytes'));
