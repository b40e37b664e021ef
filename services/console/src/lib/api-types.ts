// Written by infra/console_types.py from schemas/http/openapi. Do not edit.

export type ApiKey = { "id": string; "name": string; "role": "reader" | "submitter" | "worker" | "operator" | "admin"; "namespaces": string[] | null; "rate": number | null; "state": "valid" | "replaced" | "expired" | "revoked"; "created_at": string; "expires_at": string | null; "last_used_at": string | null; "replaced_by": string | null };

export type ApiKeyCreate = { "name": string; "role": "reader" | "submitter" | "worker" | "operator" | "admin"; "namespaces"?: string[] | null; "rate"?: number; "expires_in_s"?: number };

export type ApiKeyPage = { "keys": ApiKey[] };

export type ApiKeyRevoked = { "id": string; "revoked": boolean };

export type ApiKeyRotate = { "overlap_s"?: number; "expires_in_s"?: number };

export type ApiKeyWithSecret = { "id": string; "name": string; "role": "reader" | "submitter" | "worker" | "operator" | "admin"; "namespaces": string[] | null; "rate": number | null; "state": "valid" | "replaced" | "expired" | "revoked"; "created_at": string; "expires_at": string | null; "last_used_at": string | null; "replaced_by": string | null; "secret": string };

export type Attempt = { "step": number; "attempt": number; "stage": string; "outcome": "next" | "done" | "fail" | "retry" | "handed_back" | "spawn" | "wait" | "expired"; "worker": string | null; "error": Error | null; "started_at": string | null; "finished_at": string; "log": string };

export type AuditEntry = { "seq": number; "at": string; "actor": string; "route": string; "path": string; "status": number; "remote": string | null; "change": Record<string, unknown> | null };

export type AuditPage = { "entries": AuditEntry[]; "next": string | null };

export type Backfill = { "id": number; "schedule": string; "since": string; "until": string; "rate": number | null; "max_running": number | null; "rerun": boolean; "state": "running" | "done" | "stopped" | "failed"; "total": number; "started": number; "already_run": number; "refused": number; "flows": Record<string, number>; "by": string; "actor": string | null; "stopped_by": string | null; "error": string | null; "created_at": string; "finished_at": string | null };

export type BackfillPage = { "backfills": Backfill[]; "next": string | null };

export type BackfillPreview = { "dry_run": true; "total": number; "already_run": number; "would_start": number; "first_tick": string | null; "last_tick": string | null };

export type BackfillRequest = { "since": string; "until"?: string; "rate"?: number; "max_running"?: number; "rerun"?: boolean; "by"?: string; "dry_run"?: boolean };

export type BackfillStop = { "by": string; "cancel"?: boolean };

export type Backlog = { "normal": number; "diverted": number; "held": number; "complete": boolean };

export type BacklogLine = { "type": string; "priority": "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "stage": string; "ready": number; "scheduled": number; "paused": number; "waiting": number; "in_flight": number; "oldest_s": number | null };

export type BacklogPage = { "backlog": BacklogLine[]; "next": string | null };

export type Callback = string | ({ "url": string; "events"?: ("final" | "all") | (("task.succeeded" | "task.failed" | "task.cancelled" | "task.quarantined" | "task.advanced" | "task.retried" | "task.expired" | "task.suspended" | "task.woken")[]); "headers"?: Record<string, string>; "format"?: "event" | "cloudevents"; "ordered"?: boolean });

export type CallbackOwed = { "id": string; "target": string; "state": "pending" | "held" | "delivered" | "dead"; "attempt": number; "error": string | null; "due_at": string; "created_at": string; "finished_at": string | null };

export type CallbackPage = { "callbacks": CallbackRow[]; "next": string | null };

export type CallbackRow = { "id": string; "namespace": string; "target": string; "task_id": number; "state": "pending" | "held" | "delivered" | "dead"; "attempt": number; "replayed_after": number | null; "ordered": boolean; "diverted": boolean; "due_at": string; "created_at": string; "finished_at": string | null; "error": Record<string, unknown> | null };

export type CallbackSecret = { "id": string; "namespace": string; "url": string | null; "scheme": "v1" | "v1a"; "state": "valid" | "replaced" | "expired" | "revoked"; "public_key": string | null; "reference": string | null; "encryption_key": string | null; "created_at": string; "created_by": string | null; "expires_at": string | null; "wider_until": string | null; "replaced_by": string | null };

export type CallbackSecretCreate = { "namespace"?: string; "url"?: string; "scheme"?: "v1" | "v1a"; "secret"?: string; "reference"?: string; "public_key"?: string; "overlap_s"?: number };

export type CallbackSecretCreated = { "secret": string | null; "id": string; "namespace": string; "url": string | null; "scheme": "v1" | "v1a"; "state": "valid" | "replaced" | "expired" | "revoked"; "public_key": string | null; "reference": string | null; "encryption_key": string | null; "created_at": string; "created_by": string | null; "expires_at": string | null; "wider_until": string | null; "replaced_by": string | null };

export type CallbackSecretPage = { "secrets": CallbackSecret[]; "next": string | null };

export type CallbackSecretRotate = { "secret"?: string; "reference"?: string; "public_key"?: string; "overlap_s"?: number };

export type CallbackSecretRotated = { "secret": string | null; "replaces": CallbackSecret; "id": string; "namespace": string; "url": string | null; "scheme": "v1" | "v1a"; "state": "valid" | "replaced" | "expired" | "revoked"; "public_key": string | null; "reference": string | null; "encryption_key": string | null; "created_at": string; "created_by": string | null; "expires_at": string | null; "wider_until": string | null; "replaced_by": string | null };

export type CallbackSecretsReencrypted = { "reencrypted": number; "encryption_key": string };

export type Cancelled = { "id": number; "state": "cancelled"; "cancelled": boolean };

export type CancelledMany = { "cancelled": number[]; "unchanged": number[]; "unknown": number[]; "rejected"?: Rejected[] };

export type EndedIds = { "ended": number[]; "rejected"?: Rejected[]; "unknown": number[] };

export type Error = { "kind": string; "message": string; "traceback"?: string; "unhandled_s"?: number };

export type EventSubmission = { "id": string; "key"?: string; "data"?: unknown };

export type EventSubmitted = { "id": string; "created": boolean };

export type EventsSubmitted = { "events": (EventSubmitted | SubmissionRefused)[] };

export type Fault = { "pointer"?: string; "parameter"?: string; "detail": string };

export type Figures = { "since": string; "due_at"?: string; "due_in_s"?: number; "attempt"?: number; "ahead"?: number; "ahead_more"?: true; "ahead_about"?: true; "in_flight"?: number; "max_in_flight"?: number; "starts_per_s"?: number; "key"?: string; "key_in_flight"?: number; "key_limit"?: number; "owner"?: string; "workers"?: number; "lag"?: number; "partition"?: number; "before"?: number; "unrun"?: number; "worker"?: string; "lease_s"?: number; "flow"?: number; "flow_root"?: number; "flow_priority"?: "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "waits_for"?: number; "traceback"?: string; "log"?: string };

export type Flow = { "id": number; "root_id": number; "parent": FlowParent | null; "task": number | null; "name": string; "version": number; "status": "running" | "succeeded" | "failed" | "cancelled"; "paused": boolean; "stop": "failure" | "timeout" | "cancel" | null; "generation": number; "unfinished": number; "live": number; "unsuccessful": number; "priority": "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "idempotency_key": string | null; "events": "final" | "all"; "labels": Record<string, string>; "callbacks": Callback[]; "error": string | null; "rerun_of": number | null; "schedule": string | null; "tick": string | null; "created_at": string; "updated_at": string; "finished_at": string | null; "in_history": boolean; "versions": Record<string, number> | null; "nodes": FlowNode[]; "history": FlowPastNode[]; "inputs"?: unknown; "inputs_ref"?: ObjectRef; "inputs_error"?: string; "output"?: unknown; "output_ref"?: ObjectRef; "output_error"?: string; "definition"?: Record<string, unknown> | null };

export type FlowCallbacks = (string | ({ "url": string; "events"?: ("final" | "all") | (("flow.succeeded" | "flow.failed" | "flow.cancelled" | "flow.started" | "flow.late" | "flow.recovered" | "flow.paused" | "flow.resumed")[]); "headers"?: Record<string, string>; "format"?: "event" | "cloudevents"; "ordered"?: boolean }))[];

export type FlowChild = { "item": number | null; "generation": number; "task": TaskSummary | null; "flow": FlowSummary | null; "logs": string | null };

export type FlowCommanded = { "id": number; "verb": "pause" | "resume" | "cancel" | "recover"; "accepted": boolean; "generation"?: number; "version"?: number; "nodes"?: string[] };

export type FlowDefinition = { "flow": string; "version": number; "nodes": Record<string, Record<string, unknown>> };

export type FlowDefinitionName = { "name": string; "version": number; "versions": number; "created_at": string };

export type FlowDefinitionPage = { "definitions": FlowDefinitionName[]; "next": string | null };

export type FlowDefinitionStored = { "name": string; "version": number; "definition": FlowDefinition; "created_at": string; "created_by": string | null };

export type FlowFigures = { "since": string; "live"?: number; "event"?: string; "key"?: string; "due_at"?: string; "finish_by"?: string; "task_state"?: "scheduled" | "ready" | "queued" | "running" | "waiting" | "paused" | "succeeded" | "failed" | "cancelled" | "quarantined"; "total"?: number; "opened"?: number; "live_items"?: number; "succeeded"?: number; "unsuccessful"?: number; "unapplied"?: number; "unapplied_s"?: number; "owner"?: string };

export type FlowFilter = { "ids"?: number[]; "name"?: string; "schedule"?: string; "version"?: number; "statuses"?: ("running" | "succeeded" | "failed" | "cancelled")[]; "labels"?: Record<string, string>; "created_since"?: string; "created_until"?: string; "finished_since"?: string; "finished_until"?: string; "error"?: string };

export type FlowItems = { "total": number; "opened": number; "live": number; "succeeded": number; "unsuccessful": number; "retry": number };

export type FlowNode = { "name": string; "kind": "task" | "flow" | "switch" | "wait" | "timer" | "map"; "after": string[]; "status": "pending" | "ready" | "running" | "succeeded" | "failed" | "cancelled" | "skipped" | "blocked"; "generation": number; "case": string | null; "timed_out": "start_within" | "finish_within" | "warn_after" | "timeout" | null; "reason": string | null; "items": FlowItems | null; "task": ({ "id": number; "type": string; "state": "scheduled" | "ready" | "queued" | "running" | "waiting" | "paused" | "succeeded" | "failed" | "cancelled" | "quarantined"; "logs": string }) | null; "flow": ({ "id": number; "status": "running" | "succeeded" | "failed" | "cancelled" }) | null; "started_at": string | null; "finished_at": string | null };

export type FlowNodeDetail = { "name": string; "kind": "task" | "flow" | "switch" | "wait" | "timer" | "map"; "after": string[]; "status": "pending" | "ready" | "running" | "succeeded" | "failed" | "cancelled" | "skipped" | "blocked"; "generation": number; "case": string | null; "timed_out": "start_within" | "finish_within" | "warn_after" | "timeout" | null; "reason": string | null; "items": FlowItems | null; "task": ({ "id": number; "type": string; "state": "scheduled" | "ready" | "queued" | "running" | "waiting" | "paused" | "succeeded" | "failed" | "cancelled" | "quarantined"; "logs": string }) | null; "flow": ({ "id": number; "status": "running" | "succeeded" | "failed" | "cancelled" }) | null; "started_at": string | null; "finished_at": string | null; "history": FlowPastNode[]; "output"?: unknown; "output_type"?: string; "output_ref"?: ObjectRef; "output_error"?: string };

export type FlowNodePage = { "id": number; "node": FlowNodeDetail; "children": FlowChild[]; "next": string | null };

export type FlowOperationRehearsed = { "dry_run": true; "verb": "pause" | "resume" | "cancel" | "recover" | "rerun"; "count": number; "found_in": Record<string, number>; "more": boolean; "examples": FlowSummary[] };

export type FlowOperationRequest = { "id"?: string; "verb": "pause" | "resume" | "cancel" | "recover" | "rerun"; "filter": FlowFilter; "by"?: string; "rate"?: number; "dry_run"?: boolean; "version"?: "same" | "latest" };

export type FlowPage = { "flows": FlowSummary[]; "next": string | null };

export type FlowParent = { "flow": number; "node": string; "item": number | null; "generation": number };

export type FlowPastNode = { "flow_generation": number; "name": string; "status": "pending" | "ready" | "running" | "succeeded" | "failed" | "cancelled" | "skipped" | "blocked"; "generation": number; "case": string | null; "timed_out": "start_within" | "finish_within" | "warn_after" | "timeout" | null; "reason": string | null; "total": number | null; "succeeded": number; "unsuccessful": number; "started_at": string | null; "finished_at": string | null };

export type FlowRecovery = { "nodes"?: string[]; "dry_run"?: boolean; "version"?: ("same" | "latest") | number };

export type FlowRerun = { "version"?: ("same" | "latest") | number; "idempotency_key"?: string };

export type FlowRerunStarted = { "id": number; "created": boolean; "version": number; "rerun_of": number };

export type FlowStep = { "flow": number; "name": string; "node": string | null; "item": number | null; "task": number | null; "child": number | null; "reason": "ended" | "failed" | "unapplied" | "paused" | "task" | "flow" | "event" | "timer" | "map" | "starting" | "stuck"; "sentence": string; "figures": FlowFigures };

export type FlowSubmission = { "flow": string; "version"?: number; "inputs"?: Record<string, unknown>; "priority"?: "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "idempotency_key"?: string; "callbacks"?: (string | ({ "url": string; "events"?: ("final" | "all") | (("flow.succeeded" | "flow.failed" | "flow.cancelled" | "flow.started" | "flow.late" | "flow.recovered" | "flow.paused" | "flow.resumed")[]); "headers"?: Record<string, string>; "format"?: "event" | "cloudevents"; "ordered"?: boolean }))[]; "events"?: "final" | "all"; "labels"?: Record<string, string> };

export type FlowSubmitted = { "id": number; "created": boolean };

export type FlowSummary = { "id": number; "root_id": number; "parent": FlowParent | null; "task": number | null; "name": string; "version": number; "status": "running" | "succeeded" | "failed" | "cancelled"; "paused": boolean; "stop": "failure" | "timeout" | "cancel" | null; "generation": number; "unfinished": number; "live": number; "unsuccessful": number; "priority": "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "idempotency_key": string | null; "events": "final" | "all"; "labels": Record<string, string>; "callbacks": Callback[]; "error": string | null; "rerun_of": number | null; "schedule": string | null; "tick": string | null; "created_at": string; "updated_at": string; "finished_at": string | null };

export type FlowVersion = { "version": number; "description": string | null; "created_at": string; "created_by": string | null };

export type FlowVersionPage = { "name": string; "versions": FlowVersion[]; "next": string | null };

export type FlowWhy = { "id": number; "name": string; "status": "running" | "succeeded" | "failed" | "cancelled"; "reason": "ended" | "failed" | "unapplied" | "paused" | "task" | "flow" | "event" | "timer" | "map" | "starting" | "stuck"; "sentence": string; "path": FlowStep[]; "task"?: Why | null };

export type FlowsSubmitted = { "flows": (FlowSubmitted | SubmissionRefused)[] };

export type Gone = { "index": number; "why": "cancelled" | "over" | "taken over" };

export type Health = { "status": "ok" };

export type Held = { "tasks": ReadyTask[]; "claimed_ms_ago"?: number };

export type HoldRequest = { "worker": string; "type": string; "max"?: number; "max_attempts"?: Record<string, number>; "wait_s"?: number; "host"?: string; "version"?: string; "stages"?: string[] };

export type Ids = { "ids": number[] };

export type Key = { "key": string; "paused": boolean; "weight": number; "max_in_flight": number | null; "in_flight": number; "updated_at": string };

export type KeyChange = { "key": string; "paused"?: boolean; "weight"?: number; "max_in_flight"?: number | null };

export type KeyPage = { "keys": Key[]; "next": string | null };

export type KeyReset = { "key": string };

export type KeyWasReset = { "changed": boolean };

export type LogDeleted = { "id": number; "deleted": true };

export type LogLine = { "run": string | null; "line": number | null; "at": string | null; "level": string; "source": string; "text": string; "fields"?: Record<string, unknown>; "missing"?: number };

export type LogRecord = { "worker": string; "chunks": { "id": number; "step": number; "attempt": number; "run": string; "first": number; "end"?: string; "lines": unknown[][] }[] };

export type LogRun = { "step": number; "attempt": number; "run": string; "worker": string; "lines": number; "bytes": number; "dropped_lines": number; "first_at": string | null; "last_at": string | null; "state": "waiting" | "running" | "ended" | "lost"; "outcome": string | null; "stage": string | null };

export type LogRuns = { "id": number; "state": string; "runs": LogRun[] };

export type LogsAccepted = { "accepted": number; "unknown": number[] };

export type LostAttempt = { "id": number; "step": number; "attempt": number; "outcome": string | null; "state": string };

export type ObjectRef = { "key": string; "sha256": string; "size": number };

export type Operation = { "id": string; "verb": "cancel" | "pause" | "resume" | "reprioritise" | "recover" | "rerun"; "subject": "task" | "flow"; "by": string; "actor": string | null; "filter": TaskFilter | FlowFilter; "priority": "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST" | null; "version": "same" | "latest" | null; "rate": number | null; "state": "running" | "done" | "stopped" | "failed"; "changed": number; "found_in": Record<string, number>; "stopped_by": string | null; "error": string | null; "created_at": string; "finished_at": string | null };

export type OperationPage = { "operations": Operation[]; "next": string | null };

export type OperationRehearsed = { "dry_run": true; "verb": "cancel" | "pause" | "resume" | "reprioritise" | "recover"; "count": number; "found_in": Record<string, number>; "more": boolean; "examples": TaskSummary[] };

export type OperationRequest = { "id"?: string; "verb": "cancel" | "pause" | "resume" | "reprioritise" | "recover"; "filter": TaskFilter; "by"?: string; "priority"?: "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "rate"?: number; "dry_run"?: boolean };

export type OperationStop = { "by": string };

export type Overview = { "at": string; "version": string; "types": OverviewType[]; "minutes": OverviewMinute[]; "callbacks": { "abnormal": number; "disabled": number; "dead": number }; "flows": { "running": number; "failed": number }; "operations": number; "workers": { "running": number; "lost": number }; "services": Record<string, string> };

export type OverviewMinute = { "at": string; "succeeded": number; "failed": number; "cancelled": number };

export type OverviewType = { "type": string; "ready": number; "scheduled": number; "paused": number; "waiting": number; "in_flight": number; "oldest_s": number | null; "is_paused": boolean; "workers": number | null };

export type Owners = { "owners": ({ "type": string; "process": string | null })[] };

export type Problem = { "type": string; "title": string; "status": number; "detail": string; "instance"?: string; "errors"?: Fault[]; "code"?: "cancelling" | "timing_out" | "nothing_to_recover" | "node_running" | "node_changed" | "unknown_node" | "child_flow" | "in_history" | "not_ended" | "stage_not_reached" | "input_not_kept" | "input_missing" | "of_flow"; "nodes"?: string[] };

export type Progress = { "id": number; "step": number; "stage": string; "attempt": number; "outcome": "progress"; "lease_ms"?: number; "max_attempts"?: number; "begun"?: boolean; "progress"?: ProgressReport };

export type ProgressOfTasks = { "tasks": { "id": number; "progress": TaskProgress }[]; "rejected"?: Rejected[] };

export type ProgressReport = { "fraction"?: number; "message"?: string };

export type PublicKeys = { "keys": ({ "id": string; "scheme": "v1a"; "public_key": string; "created_at": string; "expires_at": string | null; "jwk": Record<string, unknown> })[] };

export type Readiness = { "status": "ready" | "ready in part" | "not ready"; "checks": { "postgres": string; "kafka": string; "writes"?: string; "objects": string } };

export type ReadyTask = { "id": number; "step": number; "stage": string; "attempt": number; "type": string; "tries"?: number; "priority"?: "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "token"?: string; "goes_on"?: boolean; "lease_ms": number; "content_type": "json" | "text" | "url" | "bytes"; "context"?: unknown; "context_ref"?: { "key": string; "sha256": string; "size": number }; "traceparent"?: string; "isolation"?: "one" | "alone" };

export type Rejected = { "index": number; "errors": Fault[] };

export type ReplayRequest = { "ids"?: string[]; "target"?: string; "namespace"?: string; "task_id"?: number; "state"?: "dead" | "delivered"; "since"?: string; "until"?: string; "dry_run"?: boolean; "rate"?: number; "start_in_s"?: number; "limit"?: number };

export type Replayed = { "dry_run": boolean; "replayed": number; "held": number; "disabled": string[]; "more": boolean; "examples": CallbackRow[] };

export type Schedule = { "name": string; "flow": string; "version": number | null; "cron": string; "zone": string; "input": string | null; "priority": "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "labels": Record<string, string>; "events": "final" | "all"; "callbacks": Callback[]; "catch_up": "latest" | "none" | "all"; "catch_up_limit": number; "catch_up_rate": number; "overlap": "skip" | "queue_one" | "queue_all" | "cancel_other" | "allow"; "paused": boolean; "next_tick": string | null; "last_tick": string | null; "queued": string[]; "started": number; "error": string | null; "created_at": string; "updated_at": string };

export type ScheduleHistoryPage = { "records": ({ "outcome": "started" | "backfilled" | "rerun" | "skipped"; "flow_id": number | null; "task_id": number | null; "first_tick": string; "last_tick": string; "ticks": number | null; "status": "running" | "succeeded" | "failed" | "cancelled" | null; "backfill": number | null; "rerun_of": number | null; "reason": "catch_up" | "overlap" | "queue_full" | "paused" | "error" | null; "detail": string | null; "created_at": string })[]; "next": string | null };

export type SchedulePage = { "schedules": Schedule[]; "next": string | null };

export type ScheduleRemoved = { "name": string; "removed": boolean };

export type ScheduleSettings = { "name"?: string; "flow"?: string; "type"?: string; "stage"?: string; "version"?: number | null; "cron": string; "zone"?: string; "input"?: string | null; "priority"?: "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "labels"?: Record<string, string>; "events"?: "final" | "all"; "callbacks"?: FlowCallbacks; "catch_up"?: "latest" | "none" | "all"; "catch_up_limit"?: number; "catch_up_rate"?: number; "overlap"?: "skip" | "queue_one" | "queue_all" | "cancel_other" | "allow"; "paused"?: boolean };

export type Session = { "authentication": "on" | "off"; "signed_in": boolean; "actor": string | null; "roles": string[]; "actions": string[]; "namespaces": string[] | null; "csrf": string | null; "methods": ("keys" | "oidc")[]; "expires_at": string | null };

export type SetAnswer = { "received": number; "accepted": number; "rejected": Rejected[]; "gone": Gone[] };

export type SetRequest = { "worker": string; "results": (StageResult | Progress)[] };

export type SignIn = { "api_key": string };

export type SkipPage = { "skips": ({ "id": number; "first_tick": string; "last_tick": string; "ticks": number | null; "reason": "catch_up" | "overlap" | "queue_full" | "paused" | "error"; "detail": string | null; "created_at": string })[]; "next": string | null };

export type StageResult = { "id": number; "step": number; "stage": string; "attempt": number; "outcome": "next" | "done" | "fail" | "retry" | "handed_back" | "spawn" | "wait"; "next_stage"?: string; "content_type"?: "json" | "text" | "url" | "bytes"; "context"?: unknown; "context_ref"?: { "key": string; "sha256": string; "size": number }; "spawn"?: { "k"?: number; "parallel"?: number }; "wait"?: { "event": string; "key"?: string; "timeout_s"?: number }; "delay_ms"?: number; "no_handler"?: boolean; "permanent"?: boolean; "max_attempts"?: number; "error"?: { "kind": string; "message": string; "traceback"?: string }; "started_ms"?: number; "finished_ms"?: number };

export type StateCounts = { "states": Record<string, number>; "rejected"?: Rejected[]; "unknown": number[] };

export type Step = { "step": number; "stage": string; "input_type"?: "json" | "text" | "url" | "bytes"; "input_size"?: number; "input"?: unknown; "input_ref"?: ObjectRef; "attempts": StepAttempt[] };

export type StepAttempt = { "attempt": number; "outcome": "next" | "done" | "fail" | "retry" | "handed_back" | "spawn" | "wait" | "expired" | null; "worker": string | null; "queued_at": string | null; "started_at": string | null; "finished_at": string | null; "error": Error | null };

export type Submission = { "type": string; "stage"?: string; "priority"?: "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "content_type"?: "json" | "text" | "url" | "bytes"; "context"?: unknown; "key"?: string; "idempotency_key"?: string; "run_at"?: string; "callbacks"?: (string | ({ "url": string; "events"?: ("final" | "all") | (("task.succeeded" | "task.failed" | "task.cancelled" | "task.quarantined" | "task.advanced" | "task.retried" | "task.expired" | "task.suspended" | "task.woken")[]); "headers"?: Record<string, string>; "format"?: "event" | "cloudevents"; "ordered"?: boolean }))[]; "events"?: "final" | "all"; "labels"?: Record<string, string> };

export type SubmissionRefused = { "errors": Fault[]; "retry"?: true };

export type Submitted = { "id": number; "created": boolean };

export type SubmittedBatch = { "tasks": Submitted[] };

export type SubmittedPartly = { "tasks": (Submitted | SubmissionRefused)[] };

export type Target = { "namespace": string; "url": string; "state": "normal" | "abnormal" | "disabled"; "why": string | null; "count": number; "slow_at": string | null; "called_at": string | null; "failures": number; "rate": number | null; "owner": string | null; "changed_at": string; "attempts": TargetAttempt[]; "backlog": Backlog };

export type TargetAttempt = { "at": string; "callback": string; "attempt": number; "took_ms": number; "status": number | null; "message": string };

export type TargetChanged = { "changed": boolean; "target": Target };

export type TargetDisable = { "url": string; "namespace"?: string; "why": string };

export type TargetEnable = { "url": string; "namespace"?: string };

export type TargetLimit = { "url": string; "namespace"?: string; "rate": number | null };

export type TargetPage = { "targets": Target[]; "next": string | null };

export type Task = { "id": number; "type": string; "state": "scheduled" | "ready" | "queued" | "running" | "waiting" | "paused" | "succeeded" | "failed" | "cancelled" | "quarantined"; "stage": string; "step": number; "attempt": number; "priority": "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "key": string | null; "idempotency_key": string | null; "events": "final" | "all"; "labels": Record<string, string>; "flow"?: TaskFlow; "callbacks": Callback[]; "rerun_of": number | null; "worker": string | null; "progress"?: TaskProgress; "pausing": boolean; "error": Error | null; "due_at": string | null; "created_at": string; "updated_at": string; "finished_at": string | null; "content_type"?: "json" | "text" | "url" | "bytes"; "context"?: unknown; "context_ref"?: ObjectRef; "context_error"?: string; "result_type"?: "json" | "text" | "url" | "bytes"; "result"?: unknown; "result_ref"?: ObjectRef; "result_error"?: string; "attempts": Attempt[]; "timeline": Step[]; "callbacks_owed": CallbackOwed[] };

export type TaskFilter = { "ids"?: number[]; "type"?: string; "stage"?: string; "key"?: string; "states"?: ("scheduled" | "ready" | "queued" | "running" | "waiting" | "paused" | "succeeded" | "failed" | "cancelled" | "quarantined")[]; "labels"?: Record<string, string>; "priorities"?: ("HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST")[]; "created_since"?: string; "created_until"?: string; "finished_since"?: string; "finished_until"?: string; "error"?: string };

export type TaskFlow = { "id": number; "node": string; "generation": number; "item"?: number };

export type TaskPage = { "tasks": TaskSummary[]; "next": string | null };

export type TaskProgress = { "fraction": number | null; "message": string; "reported_at": string };

export type TaskRerun = { "from"?: string; "idempotency_key"?: string };

export type TaskRerunStarted = { "id": number; "created": boolean; "stage": string; "rerun_of": number };

export type TaskSummary = { "id": number; "type": string; "state": "scheduled" | "ready" | "queued" | "running" | "waiting" | "paused" | "succeeded" | "failed" | "cancelled" | "quarantined"; "stage": string; "step": number; "attempt": number; "priority": "HIGHEST" | "HIGH" | "MEDIUM" | "LOW" | "LOWEST"; "key": string | null; "idempotency_key": string | null; "events": "final" | "all"; "labels": Record<string, string>; "flow"?: TaskFlow; "callbacks": Callback[]; "rerun_of": number | null; "worker": string | null; "progress"?: TaskProgress; "pausing": boolean; "error": Error | null; "due_at": string | null; "created_at": string; "updated_at": string; "finished_at": string | null };

export type TaskType = { "name": string; "first_stage"?: string; "partitions"?: number; "lease_ms"?: number; "max_attempts"?: number; "retry_base_ms"?: number; "retry_factor"?: number; "retry_max_ms"?: number; "retry_jitter"?: number; "events"?: "final" | "all"; "max_losses"?: number; "late_results"?: "accept" | "refuse"; "idempotency"?: "lenient" | "strict"; "callbacks"?: (string | ({ "url": string; "events"?: ("final" | "all") | (("task.succeeded" | "task.failed" | "task.cancelled" | "task.quarantined" | "task.advanced" | "task.retried" | "task.expired" | "task.suspended" | "task.woken")[]); "headers"?: Record<string, string>; "format"?: "event" | "cloudevents"; "ordered"?: boolean }))[]; "paused"?: boolean; "max_in_flight"?: number | null; "starts_per_s"?: number | null; "max_per_key"?: number | null; "fair"?: boolean; "ageing_s"?: number | null; "finish_first"?: boolean; "no_handler_s"?: number | null };

export type TaskTypeChange = Record<string, unknown>;

export type TaskTypes = { "types": TaskType[] };

export type Ticks = { "ticks": { "tick": string; "local": string }[] };

export type TypeDurations = { "type": string; "since": string | null; "tasks": { "first_stage": string; "count": number; "p50_s": number; "p95_s": number }[]; "stages": { "stage": string; "count": number; "p50_s": number; "p95_s": number }[] };

export type Why = { "id": number; "type": string; "state": "scheduled" | "ready" | "queued" | "running" | "waiting" | "paused" | "succeeded" | "failed" | "cancelled" | "quarantined"; "reason": "ended" | "running" | "task_paused" | "waiting" | "not_due" | "no_handler" | "type_paused" | "key_paused" | "no_owner" | "no_worker" | "key_taken" | "limit_in_flight" | "limit_starts" | "ahead" | "next" | "on_kafka" | "taken"; "sentence": string; "figures": Figures };

export type WorkerRow = { "id": string; "kind": "worker" | "gateway" | "http"; "host": string; "version": string | null; "state": "running" | "lost"; "stages": string[] | null; "slots": number | null; "room": number | null; "in_flight": number | null; "partitions": number[] | null; "seen_at": string | null; "tasks": LostAttempt[] | null };

export type WorkersPage = { "types": ({ "type": string; "rebalancing": boolean; "as_of": string | null; "age_s": number | null; "workers": WorkerRow[] })[]; "next": string | null };

/** Answers of routes, by method and path. */
export interface Answers {
  "GET /audit": AuditPage;
  "GET /backfills": BackfillPage;
  "GET /backfills/{id}": Backfill;
  "POST /backfills/{id}/stop": Backfill;
  "GET /backlog": BacklogPage;
  "GET /callbacks": CallbackPage;
  "POST /callbacks/replay": Replayed;
  "POST /events/{name}": EventSubmitted | EventsSubmitted;
  "POST /flow-definitions": FlowDefinitionStored;
  "GET /flow-definitions": FlowDefinitionPage;
  "GET /flow-definitions/{name}": FlowVersionPage;
  "GET /flow-definitions/{name}/versions/{version}": FlowDefinitionStored;
  "GET /flows": FlowPage;
  "POST /flows": FlowSubmitted | FlowsSubmitted;
  "POST /flows/operations": FlowOperationRehearsed | Operation;
  "GET /flows/{id}": Flow;
  "POST /flows/{id}/cancel": FlowCommanded;
  "GET /flows/{id}/nodes/{node}": FlowNodePage;
  "POST /flows/{id}/pause": FlowCommanded;
  "POST /flows/{id}/recover": FlowCommanded;
  "POST /flows/{id}/rerun": FlowRerunStarted;
  "POST /flows/{id}/resume": FlowCommanded;
  "GET /flows/{id}/why": FlowWhy;
  "GET /healthz": Health;
  "POST /hold_task": Held;
  "GET /keys": ApiKeyPage;
  "POST /keys": ApiKeyWithSecret;
  "DELETE /keys/{id}": ApiKeyRevoked;
  "POST /keys/{id}/rotate": ApiKeyWithSecret;
  "GET /livez": Health;
  "POST /logs": LogsAccepted;
  "GET /openapi.json": Record<string, unknown>;
  "POST /operations": OperationRehearsed | Operation;
  "GET /operations": OperationPage;
  "GET /operations/{id}": Operation;
  "POST /operations/{id}/stop": Operation;
  "GET /overview": Overview;
  "GET /owners": Owners;
  "GET /readyz": Readiness;
  "GET /schedules": SchedulePage;
  "PUT /schedules/{name}": Schedule;
  "GET /schedules/{name}": Schedule;
  "DELETE /schedules/{name}": ScheduleRemoved;
  "POST /schedules/{name}/backfill": BackfillPreview;
  "GET /schedules/{name}/history": ScheduleHistoryPage;
  "POST /schedules/{name}/pause": Schedule;
  "POST /schedules/{name}/resume": Schedule;
  "GET /schedules/{name}/skips": SkipPage;
  "GET /schedules/{name}/ticks": Ticks;
  "GET /session": Session;
  "POST /session": Session;
  "DELETE /session": Session;
  "POST /set_task": SetAnswer;
  "GET /targets": TargetPage;
  "POST /targets/disable": TargetChanged;
  "POST /targets/enable": TargetChanged;
  "POST /targets/limit": TargetChanged;
  "GET /targets/public-keys": PublicKeys;
  "GET /targets/secrets": CallbackSecretPage;
  "POST /targets/secrets": CallbackSecretCreated;
  "POST /targets/secrets/reencrypt": CallbackSecretsReencrypted;
  "DELETE /targets/secrets/{id}": CallbackSecret;
  "POST /targets/secrets/{id}/rotate": CallbackSecretRotated;
  "POST /tasks": Submitted | SubmittedBatch;
  "GET /tasks": TaskPage;
  "POST /tasks/cancel": CancelledMany;
  "POST /tasks/ended": EndedIds;
  "POST /tasks/progress": ProgressOfTasks;
  "POST /tasks/states": StateCounts;
  "GET /tasks/{id}": Task;
  "POST /tasks/{id}/cancel": Cancelled;
  "GET /tasks/{id}/logs": LogRuns;
  "DELETE /tasks/{id}/logs": LogDeleted;
  "POST /tasks/{id}/rerun": TaskRerunStarted;
  "GET /tasks/{id}/why": Why;
  "POST /types": TaskType;
  "GET /types": TaskTypes;
  "GET /types/{name}": TaskType;
  "PATCH /types/{name}": TaskType;
  "GET /types/{name}/durations": TypeDurations;
  "GET /types/{name}/keys": KeyPage;
  "POST /types/{name}/keys": Key;
  "POST /types/{name}/keys/reset": KeyWasReset;
  "GET /workers": WorkersPage;
}
