-- Drops the indexes by which releases before 0033 order ready tasks. They may be gone: the
-- migration had another number before its release.
DROP INDEX IF EXISTS penstock.task_ready, penstock.task_ready_begun, penstock.task_ready_key, penstock.task_ready_since;
