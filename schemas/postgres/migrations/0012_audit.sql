-- Operations on tasks by filter: requester, filter, progress and number of changed tasks. A batch
-- of tasks changes in the transaction that updates the progress, so the row is correct after a
-- crash.
CREATE TABLE penstock.audit (
    id         text PRIMARY KEY,
    seq        bigint GENERATED ALWAYS AS IDENTITY UNIQUE,
    verb       text NOT NULL CHECK (verb IN ('cancel', 'pause', 'resume', 'reprioritise', 'recover')),
    asked_by   text NOT NULL,
    filter     jsonb NOT NULL,
    priority   smallint CHECK (priority BETWEEN 0 AND 4),
    rate       double precision CHECK (rate > 0),
    state      text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'done', 'stopped', 'failed')),
    changed    bigint NOT NULL DEFAULT 0,
    found_in   jsonb NOT NULL DEFAULT '{}',
    behind     bigint NOT NULL DEFAULT 0,
    upto       bigint NOT NULL,
    next_at    timestamptz NOT NULL DEFAULT now(),
    stopped_by text,
    error      text,
    created_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz
);
COMMENT ON COLUMN penstock.audit.seq IS 'order of asking';
COMMENT ON COLUMN penstock.audit.filter IS 'which tasks, as it was asked: openapi.json, TaskFilter';
COMMENT ON COLUMN penstock.audit.priority IS 'with reprioritise: the new one';
COMMENT ON COLUMN penstock.audit.rate IS 'most tasks a second; NULL is as fast as it goes';
COMMENT ON COLUMN penstock.audit.found_in IS 'how many of those changed were in which state';
COMMENT ON COLUMN penstock.audit.behind IS 'id of the last task it has looked at';
COMMENT ON COLUMN penstock.audit.upto IS 'the largest id when it was asked: it goes no further';
COMMENT ON COLUMN penstock.audit.next_at IS 'when its rate lets it go on';

-- Finds unfinished operations without reading the finished ones.
CREATE INDEX audit_running ON penstock.audit (seq) WHERE state = 'running';

ALTER TABLE penstock.task ADD COLUMN pausing boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN penstock.task.pausing IS 'while running: to be paused when its stage ends, instead of going on';
