-- Limits of types and of concurrency keys, all optional. The indexes have only tasks with a key and
-- tasks that were released under a limit (`tracked`), so types without limits have no cost.
ALTER TABLE penstock.task_type
    ADD COLUMN paused boolean NOT NULL DEFAULT false,
    ADD COLUMN max_in_flight integer CHECK (max_in_flight > 0),
    ADD COLUMN starts_per_s double precision CHECK (starts_per_s > 0),
    ADD COLUMN max_per_key integer CHECK (max_per_key > 0),
    ADD COLUMN fair boolean NOT NULL DEFAULT false,
    ADD COLUMN keyed boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN penstock.task_type.keyed IS 'released key by key: it is fair, has max_per_key or settings of keys (type_key)';

-- By code point, as Python compares strings; '' is no key, in types that are released key by key.
ALTER TABLE penstock.task
    ADD COLUMN key text COLLATE "C",
    ADD COLUMN tracked boolean NOT NULL DEFAULT false;
COMMENT ON COLUMN penstock.task.key IS 'tenant or resource that it counts for; empty is none, written so in types that are released key by key';
COMMENT ON COLUMN penstock.task.tracked IS 'released under a limit: counted while in flight, and its end wakes the type''s owner';

CREATE INDEX task_ready_key ON penstock.task (type, priority, key, id) WHERE state = 'ready' AND key IS NOT NULL;
CREATE INDEX task_in_flight ON penstock.task (type, key) WHERE state IN ('queued', 'running') AND tracked;

CREATE TABLE penstock.type_key (
    type text NOT NULL REFERENCES penstock.task_type (name),
    key text COLLATE "C" NOT NULL,
    paused boolean NOT NULL DEFAULT false,
    weight integer NOT NULL DEFAULT 1 CHECK (weight BETWEEN 1 AND 1000),
    max_in_flight integer CHECK (max_in_flight > 0),
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (type, key)
);
COMMENT ON TABLE penstock.type_key IS 'what operators have said of keys; a key without a row is not paused, weighs 1 and has max_per_key of its type';
