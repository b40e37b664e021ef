-- History says which task a rerun repeats. Each table has a migration of its own: one that waits
-- for a long statement on history would hold back those on tasks and attempts meanwhile.

ALTER TABLE penstock.history ADD COLUMN rerun_of bigint;
