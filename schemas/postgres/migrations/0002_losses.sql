-- Lost workers are counted apart from failures, and late results may be accepted.

ALTER TABLE penstock.task_type
    ADD COLUMN max_losses integer NOT NULL DEFAULT 3 CHECK (max_losses > 0),
    ADD COLUMN late_results text NOT NULL DEFAULT 'accept' CHECK (late_results IN ('accept', 'refuse'));
