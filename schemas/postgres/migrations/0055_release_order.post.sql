-- Drops the indexes by which releases before 0033 order ready tasks.
DROP INDEX penstock.task_ready, penstock.task_ready_begun, penstock.task_ready_key, penstock.task_ready_since;
