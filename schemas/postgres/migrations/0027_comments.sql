-- Replaces the comments on tables, columns and functions with the words of docs/glossary.md.
-- COMMENT ON takes a light lock: it conflicts with VACUUM and other DDL, not with reads or writes.

COMMENT ON FUNCTION penstock.backlog_state(text) IS 'state under which `backlog` counts a task; NULL: it does not count the task';

COMMENT ON COLUMN penstock.api_key.digest IS 'SHA-256 of the secret, which has 256 random bits';
COMMENT ON COLUMN penstock.api_key.namespaces IS 'namespaces for which the role is valid; NULL: all';
COMMENT ON COLUMN penstock.api_key.rate IS 'most requests per second to one gateway; NULL: the setting of the gateway';
COMMENT ON COLUMN penstock.api_key.last_used_at IS 'time of the last use; each gateway updates it at most once a minute';
COMMENT ON COLUMN penstock.api_key.replaced_by IS 'id of the API key that replaces this one; both are valid until this one expires';

COMMENT ON COLUMN penstock.audit.seq IS 'order of the requests';
COMMENT ON COLUMN penstock.audit.filter IS 'the tasks to change, as requested (TaskFilter in openapi.json)';
COMMENT ON COLUMN penstock.audit.priority IS 'new priority, for the verb reprioritise';
COMMENT ON COLUMN penstock.audit.rate IS 'most tasks per second; NULL: no limit';
COMMENT ON COLUMN penstock.audit.found_in IS 'number of changed tasks by the state before the change';
COMMENT ON COLUMN penstock.audit.behind IS 'id of the last task that the operation has examined';
COMMENT ON COLUMN penstock.audit.upto IS 'largest task id at the time of the request; the operation ends there';
COMMENT ON COLUMN penstock.audit.next_at IS 'time of the next batch, by the rate';
COMMENT ON COLUMN penstock.audit.actor IS 'API key or subject of the token that made the request; NULL: the gateway did not authenticate';
COMMENT ON COLUMN penstock.audit.namespaces IS 'namespaces of the actor; NULL: all';
COMMENT ON TABLE penstock.audit_request IS 'authenticated requests that may change something; rows older than PENSTOCK_GATEWAY_AUDIT_DAYS are removed';
COMMENT ON COLUMN penstock.audit_request.route IS 'method and path template, as in openapi.json';
COMMENT ON COLUMN penstock.audit_request.status IS 'HTTP status of the answer; 499: the client disconnected before it';

COMMENT ON TABLE penstock.backlog IS 'number of unfinished tasks; `backlog_change` has the changes that are not included yet';
COMMENT ON COLUMN penstock.backlog.state IS 'state of the tasks; in_flight: queued or running';
COMMENT ON TABLE penstock.backlog_change IS 'changes of `backlog` that task-sync has not added to it yet';

COMMENT ON COLUMN penstock.callback.due_at IS 'while pending: when the record is published again, unless the outcome is recorded before';
COMMENT ON COLUMN penstock.callback.headers IS 'headers of the call, in addition to the standard ones; content-type replaces the standard one; values are secrets';
COMMENT ON COLUMN penstock.callback.ordered IS 'whether it waits for unfinished callbacks of its task and target with a lower seq';
COMMENT ON COLUMN penstock.callback.seq IS 'order of creation; within a task, the order of its transitions';
COMMENT ON COLUMN penstock.callback.diverted IS 'whether it was held before; its records then go to the diverted topic';
COMMENT ON COLUMN penstock.callback.replayed_after IS 'attempts before the last replay; the retry schedule begins anew after them';
COMMENT ON COLUMN penstock.callback.spent IS 'attempts that the retry schedule does not count: those before a replay and those in self-check mode';
COMMENT ON COLUMN penstock.callback.published IS 'publications since it was last claimed, postponed or held';
COMMENT ON COLUMN penstock.callback.published_at IS 'time of the last publication by the requeuer';
COMMENT ON COLUMN penstock.callback.waits_since IS 'while pending: time of the first publication without a claim; NULL: it is not overdue';
COMMENT ON COLUMN penstock.callback.namespace IS 'namespace of the type of the task; with the URL it identifies the target';
COMMENT ON TABLE penstock.callback_target IS 'targets of callbacks: their health, their owner and the settings by operators';
COMMENT ON COLUMN penstock.callback_target.namespace IS 'namespace of the types whose tasks call the target';
COMMENT ON COLUMN penstock.callback_target.why IS 'while disabled: the reason, from the answer of the target or from an operator';
COMMENT ON COLUMN penstock.callback_target.count IS 'count of slow calls in the health window (penstock.core.health)';
COMMENT ON COLUMN penstock.callback_target.failures IS 'consecutive quick failures';
COMMENT ON COLUMN penstock.callback_target.rate IS 'most calls per second; NULL: the setting of the callbacks service';
COMMENT ON COLUMN penstock.callback_target.attempts IS 'the latest attempts: at, callback, attempt, took_ms, status, message';
COMMENT ON COLUMN penstock.callback_target.owner IS 'process that owns the target; only its snapshots are saved';

COMMENT ON TABLE penstock.history IS 'tasks that ended a while ago, each as it was when it was moved here';
COMMENT ON COLUMN penstock.history.attempts IS 'rows of `attempt`, by step and attempt';
COMMENT ON COLUMN penstock.history.callbacks_owed IS 'rows of `callback`, in the order of creation, without headers, whose values are secrets';
COMMENT ON TABLE penstock.history_part IS 'partitions of `history`, including dropped ones: the manifest of the archive';
COMMENT ON COLUMN penstock.history_part.part IS 'number from 1; a task that is moved after its partition was dropped goes to a new part of the day';
COMMENT ON COLUMN penstock.history_part.tasks IS 'number of tasks, updated by the statement that moves them';
COMMENT ON COLUMN penstock.history_part.sealed_at IS 'time after which no task is moved here';
COMMENT ON COLUMN penstock.history_part.archived_at IS 'time at which its object was read back and verified';

COMMENT ON COLUMN penstock.task.step IS 'stages entered so far; id, step and attempt are the fence, also when a stage is visited twice';
COMMENT ON COLUMN penstock.task.context_ref IS 'JSON with key, sha256 and size of the object that has a context above the inline limit';
COMMENT ON COLUMN penstock.task.callbacks IS 'targets, each a URL or JSON with url, events, headers (secrets), format, ordered';
COMMENT ON COLUMN penstock.task.lease_partition IS 'while running: partition of the topic `heartbeats` that has the heartbeats of its worker';
COMMENT ON COLUMN penstock.task.lease_ms IS 'while running: length of the lease in milliseconds, from the claim';
COMMENT ON COLUMN penstock.task.max_attempts IS 'while running: most attempts of the stage, from the claim; NULL: the limit of the type';
COMMENT ON COLUMN penstock.task.pausing IS 'while running: whether the task is paused when its stage ends';
COMMENT ON COLUMN penstock.task.key IS 'concurrency key: the tenant or resource for which limits apply; empty: none';
COMMENT ON COLUMN penstock.task.tracked IS 'whether it was released under a limit: it counts while in flight, and its end notifies the owner of the type';
COMMENT ON COLUMN penstock.task.traceparent IS 'W3C traceparent of the submission, if it was sampled';
COMMENT ON COLUMN penstock.task_type.callbacks IS 'targets of tasks that were submitted without any, as in task.callbacks';
COMMENT ON COLUMN penstock.task_type.keyed IS 'whether tasks are released by concurrency key: the type is fair, has max_per_key, or has rows in type_key';
COMMENT ON COLUMN penstock.task_type.ageing_s IS 'seconds since submission after which a task gains a level of priority; NULL: never';
COMMENT ON COLUMN penstock.task_type.finish_first IS 'whether tasks in a later stage are released before those in their first stage';
COMMENT ON TABLE penstock.type_key IS 'settings of concurrency keys by operators; a key without a row is not paused, has weight 1 and the max_per_key of its type';
