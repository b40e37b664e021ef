-- Order of release: ageing and finish_first. Both exclude the release key by key.
ALTER TABLE penstock.task_type
    ADD COLUMN ageing_s double precision CHECK (ageing_s > 0),
    ADD COLUMN finish_first boolean NOT NULL DEFAULT false,
    ADD CONSTRAINT task_type_order_check CHECK (NOT (keyed AND (ageing_s IS NOT NULL OR finish_first)));
COMMENT ON COLUMN penstock.task_type.ageing_s IS 'a task gains a level of priority with so many seconds since its submission; null is never';
COMMENT ON COLUMN penstock.task_type.finish_first IS 'tasks in a later stage go before those in their first';

CREATE INDEX task_ready_begun ON penstock.task (type, priority, id) WHERE state = 'ready' AND step > 0 AND tracked;
