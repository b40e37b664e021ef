-- Types are never deleted, and submissions are joined with them. A foreign key would lock the row
-- of the type for each submission: it would wait for an open transaction that locks that row, and
-- so would the submissions of other types in the same statement.
ALTER TABLE penstock.task DROP CONSTRAINT task_type_fkey;
ALTER TABLE penstock.type_key DROP CONSTRAINT type_key_type_fkey;
