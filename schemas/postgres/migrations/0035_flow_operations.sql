-- Operations on flows by filter, beside those on tasks. Gateways of an earlier release continue
-- each operation in state `running`, and would apply the filter to tasks: an operation on flows
-- runs in a state that they do not know.
ALTER TABLE penstock.audit
    ADD COLUMN subject text NOT NULL DEFAULT 'task' CHECK (subject IN ('task', 'flow')),
    ADD COLUMN version text CHECK (version IN ('same', 'latest')),
    DROP CONSTRAINT audit_verb_check,
    ADD CONSTRAINT audit_verb_check CHECK (verb IN ('cancel', 'pause', 'resume', 'reprioritise', 'recover', 'rerun')),
    DROP CONSTRAINT audit_state_check,
    ADD CONSTRAINT audit_state_check CHECK (state IN ('running', 'running_flows', 'done', 'stopped', 'failed'));

COMMENT ON COLUMN penstock.audit.filter IS 'the tasks or flows to change, as requested (TaskFilter or FlowFilter in openapi.json)';
COMMENT ON COLUMN penstock.audit.rate IS 'most tasks or flows per second; NULL: no limit';
COMMENT ON COLUMN penstock.audit.state IS 'running_flows: an operation on flows runs';
COMMENT ON COLUMN penstock.audit.found_in IS 'number of changed tasks or flows by the state before the change';
COMMENT ON COLUMN penstock.audit.behind IS 'id of the last task or flow that the operation has examined';
COMMENT ON COLUMN penstock.audit.upto IS 'largest id at the time of the request; the operation ends there';
COMMENT ON COLUMN penstock.audit.version IS 'for the verb rerun: version of the new flows';

CREATE INDEX audit_running_flows ON penstock.audit (seq) WHERE state = 'running_flows';
