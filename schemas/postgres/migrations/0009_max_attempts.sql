-- The stage's own limit of attempts, which only its worker knows. It is stored while an attempt
-- runs, so that it also applies when the worker is lost.
ALTER TABLE penstock.task ADD COLUMN max_attempts integer CHECK (max_attempts > 0);
COMMENT ON COLUMN penstock.task.max_attempts IS 'while running: tries that its stage may have, as claimed; null is the limit of its type';
