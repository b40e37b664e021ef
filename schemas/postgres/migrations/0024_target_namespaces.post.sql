-- Drops the objects that only releases before 0022 used.
DROP TRIGGER target_back ON penstock.callback_target;
DROP TABLE penstock.target;
DROP FUNCTION penstock.target_forth(), penstock.target_back(), penstock.namespaces();
DROP TRIGGER callback_namespace ON penstock.callback;
DROP FUNCTION penstock.callback_namespace(), penstock.namespace_of(text);
ALTER TABLE penstock.callback ALTER COLUMN namespace SET DEFAULT 'default';
