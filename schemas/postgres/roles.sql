-- Roles with least privilege: one for each service, with only the rights that its statements need.
-- `penstock roles plan` compares this file with a database, and `penstock roles apply` executes the
-- difference. The roles cannot log in; an operator allows it with ALTER ROLE penstock_stages LOGIN
-- PASSWORD '…'. Each role also gets the session settings that `penstock.postgres.connection`
-- expects, since a pooler does not forward them.
--
-- A test derives the rights of services from schemas/postgres/queries and their code, and fails
-- when this file differs. PENSTOCK_WRITE_ROLES=1 pytest tests/integration/postgres/test_roles.py
-- regenerates it.

-- begin: services (generated)
GRANT USAGE ON SCHEMA penstock TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE ON api_key TO penstock_gateway;
GRANT SELECT ON attempt TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE ON audit TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE, DELETE ON audit_request TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE ON backfill TO penstock_gateway;
GRANT SELECT ON backlog TO penstock_gateway;
GRANT SELECT, INSERT ON backlog_change TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE ON callback TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE, DELETE ON callback_secret TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE ON callback_target TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE, DELETE ON console_session TO penstock_gateway;
GRANT SELECT ON deployment TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE, DELETE ON end_listener TO penstock_gateway;
GRANT SELECT, INSERT ON flow TO penstock_gateway;
GRANT SELECT, INSERT ON flow_definition TO penstock_gateway;
GRANT SELECT, INSERT ON flow_event TO penstock_gateway;
GRANT SELECT ON flow_history TO penstock_gateway;
GRANT SELECT, INSERT ON flow_inbox TO penstock_gateway;
GRANT SELECT ON flow_limit TO penstock_gateway;
GRANT SELECT ON flow_node TO penstock_gateway;
GRANT SELECT ON flow_node_history TO penstock_gateway;
GRANT SELECT, UPDATE, DELETE ON flow_wait TO penstock_gateway;
GRANT SELECT ON history TO penstock_gateway;
GRANT SELECT, UPDATE ON ingested TO penstock_gateway;
GRANT SELECT, INSERT ON log_deletion TO penstock_gateway;
GRANT SELECT ON log_segment TO penstock_gateway;
GRANT SELECT ON migration TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox TO penstock_gateway;
GRANT SELECT ON release TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE, DELETE ON schedule TO penstock_gateway;
GRANT SELECT, INSERT, DELETE ON schedule_skip TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE ON task TO penstock_gateway;
GRANT SELECT ON task_progress TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE ON task_type TO penstock_gateway;
GRANT SELECT, INSERT, UPDATE, DELETE ON type_key TO penstock_gateway;

GRANT USAGE ON SCHEMA penstock TO penstock_task_sync;
GRANT EXECUTE ON FUNCTION history_drop(wanted date, number integer, archived boolean) TO penstock_task_sync;
GRANT EXECUTE ON FUNCTION history_open(wanted date) TO penstock_task_sync;
GRANT SELECT, INSERT, DELETE ON attempt TO penstock_task_sync;
GRANT SELECT, INSERT, UPDATE, DELETE ON backlog TO penstock_task_sync;
GRANT SELECT, INSERT, UPDATE, DELETE ON backlog_change TO penstock_task_sync;
GRANT SELECT, INSERT, UPDATE, DELETE ON callback TO penstock_task_sync;
GRANT SELECT ON deployment TO penstock_task_sync;
GRANT SELECT, INSERT, UPDATE, DELETE ON flow TO penstock_task_sync;
GRANT SELECT, UPDATE, DELETE ON flow_event TO penstock_task_sync;
GRANT SELECT, INSERT ON flow_history TO penstock_task_sync;
GRANT SELECT, INSERT ON flow_inbox TO penstock_task_sync;
GRANT SELECT, DELETE ON flow_limit TO penstock_task_sync;
GRANT SELECT, DELETE ON flow_node TO penstock_task_sync;
GRANT SELECT, DELETE ON flow_node_history TO penstock_task_sync;
GRANT SELECT, DELETE ON flow_wait TO penstock_task_sync;
GRANT SELECT, INSERT ON history TO penstock_task_sync;
GRANT SELECT, UPDATE ON history_part TO penstock_task_sync;
GRANT SELECT, INSERT, UPDATE ON ingested TO penstock_task_sync;
GRANT SELECT ON migration TO penstock_task_sync;
GRANT SELECT, INSERT ON outbox TO penstock_task_sync;
GRANT INSERT ON position_reset TO penstock_task_sync;
GRANT SELECT, INSERT, DELETE ON release TO penstock_task_sync;
GRANT SELECT, INSERT, UPDATE, DELETE ON task TO penstock_task_sync;
GRANT SELECT ON task_type TO penstock_task_sync;
GRANT SELECT ON type_key TO penstock_task_sync;

GRANT USAGE ON SCHEMA penstock TO penstock_heartbeats;
GRANT INSERT ON attempt TO penstock_heartbeats;
GRANT INSERT ON backlog_change TO penstock_heartbeats;
GRANT SELECT, INSERT ON callback TO penstock_heartbeats;
GRANT SELECT ON deployment TO penstock_heartbeats;
GRANT SELECT, INSERT ON flow TO penstock_heartbeats;
GRANT SELECT, INSERT ON flow_inbox TO penstock_heartbeats;
GRANT SELECT ON migration TO penstock_heartbeats;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox TO penstock_heartbeats;
GRANT SELECT, UPDATE ON task TO penstock_heartbeats;
GRANT SELECT, INSERT, UPDATE, DELETE ON task_progress TO penstock_heartbeats;
GRANT SELECT ON task_type TO penstock_heartbeats;

GRANT USAGE ON SCHEMA penstock TO penstock_stages;
GRANT SELECT, INSERT ON attempt TO penstock_stages;
GRANT INSERT ON backlog_change TO penstock_stages;
GRANT SELECT, INSERT ON callback TO penstock_stages;
GRANT SELECT ON deployment TO penstock_stages;
GRANT SELECT, INSERT ON flow TO penstock_stages;
GRANT SELECT, INSERT ON flow_inbox TO penstock_stages;
GRANT SELECT ON migration TO penstock_stages;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox TO penstock_stages;
GRANT SELECT, UPDATE ON task TO penstock_stages;
GRANT SELECT ON task_type TO penstock_stages;

GRANT USAGE ON SCHEMA penstock TO penstock_flows;
GRANT SELECT, UPDATE ON backfill TO penstock_flows;
GRANT INSERT ON backlog_change TO penstock_flows;
GRANT SELECT, INSERT ON callback TO penstock_flows;
GRANT SELECT ON deployment TO penstock_flows;
GRANT SELECT, INSERT, UPDATE ON flow TO penstock_flows;
GRANT SELECT ON flow_definition TO penstock_flows;
GRANT SELECT, INSERT ON flow_event TO penstock_flows;
GRANT SELECT ON flow_history TO penstock_flows;
GRANT SELECT, INSERT, UPDATE, DELETE ON flow_inbox TO penstock_flows;
GRANT SELECT, INSERT, UPDATE, DELETE ON flow_limit TO penstock_flows;
GRANT SELECT, INSERT, UPDATE, DELETE ON flow_node TO penstock_flows;
GRANT INSERT ON flow_node_history TO penstock_flows;
GRANT SELECT, INSERT, UPDATE, DELETE ON flow_wait TO penstock_flows;
GRANT SELECT, INSERT, UPDATE ON ingested TO penstock_flows;
GRANT SELECT ON migration TO penstock_flows;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox TO penstock_flows;
GRANT INSERT ON position_reset TO penstock_flows;
GRANT SELECT, UPDATE ON schedule TO penstock_flows;
GRANT SELECT, INSERT, DELETE ON schedule_skip TO penstock_flows;
GRANT SELECT, INSERT, UPDATE ON task TO penstock_flows;
GRANT SELECT ON task_type TO penstock_flows;

GRANT USAGE ON SCHEMA penstock TO penstock_callbacks;
GRANT SELECT, UPDATE ON callback TO penstock_callbacks;
GRANT SELECT, INSERT, UPDATE, DELETE ON callback_outbox TO penstock_callbacks;
GRANT SELECT ON callback_secret TO penstock_callbacks;
GRANT SELECT, INSERT, UPDATE, DELETE ON callback_target TO penstock_callbacks;
GRANT SELECT ON deployment TO penstock_callbacks;
GRANT SELECT ON migration TO penstock_callbacks;

GRANT USAGE ON SCHEMA penstock TO penstock_tasklogs;
GRANT SELECT ON deployment TO penstock_tasklogs;
GRANT SELECT, INSERT, UPDATE ON ingested TO penstock_tasklogs;
GRANT SELECT, DELETE ON log_deletion TO penstock_tasklogs;
GRANT SELECT, INSERT, DELETE ON log_segment TO penstock_tasklogs;
GRANT SELECT ON migration TO penstock_tasklogs;
GRANT INSERT ON position_reset TO penstock_tasklogs;
-- end: services

-- The gateway answers which replica of task-sync owns a type. PostgreSQL shows the names (and
-- statements) of other users' sessions to members of this role only.
GRANT pg_read_all_stats TO penstock_gateway;

-- For people, dashboards, `penstock check` and `penstock history list`: read access except to the
-- headers of callbacks (and the column `callbacks`), which contain secrets.
-- tests/integration/postgres/test_roles.py lists the excluded columns.
GRANT USAGE ON SCHEMA penstock TO penstock_reader;
GRANT SELECT (id, name, role, namespaces, rate, created_at, expires_at, revoked_at, last_used_at, replaced_by) ON api_key TO penstock_reader;
GRANT SELECT ON attempt TO penstock_reader;
GRANT SELECT ON audit TO penstock_reader;
GRANT SELECT ON audit_request TO penstock_reader;
GRANT SELECT ON backfill TO penstock_reader;
GRANT SELECT ON backlog TO penstock_reader;
GRANT SELECT ON backlog_change TO penstock_reader;
GRANT SELECT (id, namespace, target, task_id, state, attempt, body, error, due_at, created_at, finished_at, ordered, seq, diverted, replayed_after, spent, published, published_at, waits_since, held_since) ON callback TO penstock_reader;
GRANT SELECT ON callback_outbox TO penstock_reader;
GRANT SELECT (id, namespace, url, scheme, key_id, reference, public_key, created_at, created_by, expires_at, revoked_at, wider_until, replaced_by) ON callback_secret TO penstock_reader;
GRANT SELECT (key_id, issuer, actor, roles, namespaces, created_at, used_at) ON console_session TO penstock_reader;
GRANT SELECT ON deployment TO penstock_reader;
GRANT SELECT (id, root_id, parent_id, parent_node, parent_generation, parent_item, name, version, versions, status, generation, paused, stop, unfinished, live, unsuccessful, priority, inputs, inputs_ref, output, output_ref, error, idempotency_key, events, labels, traceparent, rerun_of, schedule, tick, task_id, task_step, task_stage, definition, created_at, updated_at, finished_at, backfill) ON flow TO penstock_reader;
GRANT SELECT ON end_listener TO penstock_reader;
GRANT SELECT ON flow_definition TO penstock_reader;
GRANT SELECT ON flow_event TO penstock_reader;
GRANT SELECT (id, root_id, finished_at, flow, nodes, past_nodes, callbacks_owed, moved_at, schedule, tick) ON flow_history TO penstock_reader;
GRANT SELECT ON flow_inbox TO penstock_reader;
GRANT SELECT ON flow_limit TO penstock_reader;
GRANT SELECT ON flow_node TO penstock_reader;
GRANT SELECT ON flow_node_history TO penstock_reader;
GRANT SELECT ON flow_wait TO penstock_reader;
GRANT SELECT (id, type, state, stage, step, attempt, failures, losses, priority, content_type, context, context_ref, context_digest, result_type, result, result_ref, error, idempotency_key, events, labels, worker, key, created_at, updated_at, finished_at, attempts, callbacks_owed, moved_at, flow_id, flow_node, flow_generation, flow_item, rerun_of) ON history TO penstock_reader;
GRANT SELECT ON history_part TO penstock_reader;
GRANT SELECT ON ingested TO penstock_reader;
GRANT SELECT ON log_deletion TO penstock_reader;
GRANT SELECT ON log_segment TO penstock_reader;
GRANT SELECT ON migration TO penstock_reader;
GRANT SELECT ON outbox TO penstock_reader;
GRANT SELECT ON position_reset TO penstock_reader;
GRANT SELECT ON release TO penstock_reader;
GRANT SELECT ON callback_target TO penstock_reader;
GRANT SELECT (name, flow, version, cron, zone, input, priority, labels, catch_up, catch_up_limit, catch_up_rate, overlap, paused, position, next_tick, next_at, queued, queue_at, last_tick, started, error, created_at, updated_at, created_by, events) ON schedule TO penstock_reader;
GRANT SELECT ON schedule_skip TO penstock_reader;
GRANT SELECT (id, type, state, stage, step, attempt, failures, losses, priority, content_type, context, context_ref, context_digest, result_type, result, result_ref, error, idempotency_key, events, labels, worker, lease_partition, due_at, created_at, updated_at, finished_at, lease_ms, max_attempts, pausing, key, tracked, traceparent, flow_id, flow_root_id, flow_priority, flow_node, flow_generation, flow_item, queued_at, started_at, rerun_of) ON task TO penstock_reader;
GRANT SELECT ON task_progress TO penstock_reader;
GRANT SELECT (name, first_stage, partitions, lease_ms, max_attempts, retry_base_ms, retry_factor, retry_max_ms, retry_jitter, events, created_at, updated_at, max_losses, late_results, paused, max_in_flight, starts_per_s, max_per_key, fair, keyed, ageing_s, finish_first, idempotency, no_handler_s) ON task_type TO penstock_reader;
GRANT SELECT ON type_key TO penstock_reader;
