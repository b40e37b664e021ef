-- A task fails when no worker with a handler for its stage has taken it for so long.
ALTER TABLE penstock.task_type
    ADD COLUMN no_handler_s double precision DEFAULT 3600
    CONSTRAINT task_type_no_handler_s_check CHECK (no_handler_s > 0);

COMMENT ON COLUMN penstock.task_type.no_handler_s IS 'seconds of delays by workers without the handler of its stage after which a task fails; NULL: never';
