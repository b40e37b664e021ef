-- A stage may have its own limit of tries, which only its worker knows: kept while an attempt runs, so that a worker that
-- is lost and says nothing any more is counted by it, too.
ALTER TABLE penstock.task ADD COLUMN max_attempts integer CHECK (max_attempts > 0);
COMMENT ON COLUMN penstock.task.max_attempts IS 'while running: tries that its stage may have, as claimed; null is the limit of its type';
