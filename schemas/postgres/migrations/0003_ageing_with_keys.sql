-- Ageing works together with concurrency keys. The table has few rows, and every row meets the new
-- constraint, which refuses less. Task-sync of the version before releases a type with both by its
-- keys, without ageing.

ALTER TABLE penstock.task_type
    DROP CONSTRAINT task_type_order_check,
    ADD CONSTRAINT task_type_order_check CHECK (NOT (keyed AND finish_first));
