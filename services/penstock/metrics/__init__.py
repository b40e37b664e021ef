"""Metrics: the names and help texts of all that Penstock exports, and their samples.

A service counts in plain numbers and builds its samples when Prometheus scrapes it, so counting
costs an addition. `penstock.metrics.serving` answers from the service's own event loop: a blocked
loop fails the scrape. The metrics `process_*` come from prometheus_client
(`penstock.metrics.page`). The definitions are one list, because the reference, the dashboard and
the alerts are compared with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """The definition of a metric.

    Attributes:
        name: name in Prometheus; counters end in _total.
        doc: help text, with the unit.
        labels: names of its labels.
        buckets: upper bounds of a histogram's buckets except the last, unbounded one; empty for
            other types.
    """

    name: str
    doc: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> str:
        """The type: counter, gauge or histogram."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"


BUILD_INFO = Metric(
    "penstock_build_info",
    "Always 1; the labels have the process's service and version.",
    ("service", "version"),
)
LOGGED = Metric(
    "penstock_logged_total",
    "Log entries since the process began to serve metrics, by level: warning, or error (which includes critical).",
    ("level",),
)

CHECK_OK = Metric(
    "penstock_check_ok",
    "1 while a check of /readyz succeeds, else 0, by check. A process that waits for a server to begin again has only "
    "the check that fails.",
    ("check",),
)

WAITING_SECONDS = Metric(
    "penstock_waiting_seconds",
    "Seconds for which work of this process has waited for a server that is unavailable, by server: postgres, kafka, objects, gateway or "
    "session (of a group, a lock or a connection). 0 while none waits. Each process exports all of them, also one that waits to begin again.",
    ("server",),
)

LAST_ROUND = Metric(
    "penstock_last_round_timestamp_seconds",
    "When a loop last completed a round in this process, or when the process began, in seconds since 1970, by loop. One process "
    "at a time runs each loop, so the latest value of all processes counts.",
    ("loop",),
)
ROUND_INTERVAL = Metric(
    "penstock_round_interval_seconds",
    "Most seconds between two rounds of a loop at rest, by loop.",
    ("loop",),
)

LAG = Metric(
    "penstock_lag",
    "Records in this process's partitions of a topic that it has not fetched yet. Measured every sixth of "
    "PENSTOCK_STALL_TIMEOUT_S.",
    ("topic",),
)
IN_FLIGHT = Metric(
    "penstock_records_in_flight",
    "Records that this process has fetched and not acknowledged yet.",
)
GENERATIONS = Metric(
    "penstock_generations_total",
    "Generations of its consumer group that this process has joined: one for each rebalance.",
)
REJECTED = Metric(
    "penstock_rejected_total",
    "Records, or parts of records, that broke their contract and were copied to TOPIC.rejected.",
    ("topic",),
)
RECORDS_REFUSED = Metric(
    "penstock_records_refused_total",
    "Records of this process that Kafka refused, by the topic to which it writes and by reason: too_large, policy, "
    "timestamp (a writer's stamp, on a topic whose records the broker does not stamp) or invalid.",
    ("topic", "reason"),
)
POSITIONS_MOVED = Metric(
    "penstock_positions_moved_total",
    "Stored positions of this process that did not fit their topic. Reasons: replaced (the topic was created again), "
    "cut (the log lost its tail), deleted (records were deleted before they were read).",
    ("topic", "reason"),
)
RECORDS_DELETED = Metric(
    "penstock_records_deleted_total",
    "Records that were deleted from a topic before this process read them.",
    ("topic",),
)
WAITS = Metric(
    "penstock_waits_total",
    "Times that records in flight had to wait because Kafka or PostgreSQL did not answer.",
)

HEARTBEATS = Metric(
    "penstock_heartbeats_total",
    "Attempts in the heartbeat records of workers, by kind: claim, beat or release (the end of a lease).",
    ("kind",),
)
LEASES = Metric(
    "penstock_leases",
    "Leases that this process watches, by where they are stored: memory (recent claims) or written (in PostgreSQL).",
    ("where",),
)
LEASE_OVERDUE_SECONDS = Metric(
    "penstock_lease_overdue_seconds",
    "Seconds since the earliest deadline of a lease that cannot expire yet: a heartbeat or a result that was written "
    "before its deadline may be unread.",
)
LEASES_LOST = Metric(
    "penstock_leases_lost_total",
    "Leases that expired because their worker sent no heartbeat, by task type.",
    ("type",),
)
PROGRESS_WRITTEN = Metric(
    "penstock_progress_written_total",
    "Reports of progress that were written to PostgreSQL. Each write has only the last report of an attempt.",
)
MASS_EXPIRY_CHECKS = Metric(
    "penstock_mass_expiry_checks_total",
    "Times that more than a tenth of all leases was about to expire, so that this process first verified that it had "
    "read every heartbeat.",
)
STALLED_SECONDS = Metric(
    "penstock_stalled_seconds_total",
    "Seconds in which this process did not run; it has extended all leases by as much.",
)

ATTEMPTS_ENDED = Metric(
    "penstock_attempts_ended_total",
    "Attempts that have ended, by outcome (next, done, fail, retry, handed_back, spawn, wait or "
    "expired) and by the resulting state of the task.",
    ("outcome", "state"),
)
ATTEMPTS_UNHANDLED = Metric(
    "penstock_attempts_unhandled_total",
    "Attempts that a worker handed back, because it has no handler for their stage.",
)
ATTEMPT_SECONDS = Metric(
    "penstock_attempt_seconds",
    "Seconds that handlers ran, by stage, for attempts whose result took effect.",
    ("stage",),
    (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0),
)
RESULTS_STALE = Metric(
    "penstock_results_stale_total",
    "Results that changed nothing, because they were repeated or their attempt was no longer current.",
)
RESULTS_LATE = Metric(
    "penstock_results_late_total",
    "Results of expired attempts that were accepted (late_results of the type).",
)
COMMIT_SECONDS = Metric(
    "penstock_commit_seconds",
    "Seconds from the start of a commit of results until it took effect, including waits for PostgreSQL.",
    (),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
)
FLOW_MESSAGES = Metric(
    "penstock_flow_messages_total",
    "Messages that flows have received and applied: ends of tasks and child flows, events, limits and commands.",
)
FLOW_SHARDS = Metric("penstock_flow_shards", "Shards of flows, of 64, that this process owns.")
FLOWS_HELD = Metric(
    "penstock_flows_held",
    "Families of flows that wait for the object store, or cannot be advanced; the log has the reason.",
)
FLOW_TRANSACTION_SECONDS = Metric(
    "penstock_flow_transaction_seconds",
    "Seconds of a transaction that advances flows.",
    (),
    COMMIT_SECONDS.buckets,
)

LOG_SEGMENTS = Metric(
    "penstock_log_segments_total",
    "Segments of task logs that this process has stored, or deleted because they have expired, by what happened.",
    ("what",),
)
LOG_LINES = Metric("penstock_log_lines_total", "Lines of task logs that this process has stored.")
LOG_BYTES = Metric(
    "penstock_log_bytes_total",
    "Bytes of task logs that this process has stored: raw, and as stored.",
    ("size",),
)
LOG_OBJECTS_SWEPT = Metric(
    "penstock_log_objects_swept_total",
    "Objects without a row that this process has deleted: a crash left them.",
)

WORKER_ATTEMPTS = Metric(
    "penstock_worker_attempts_total",
    "Attempts of this worker that have ended, by task type, stage (empty for stages without a handler) and outcome: next, done, fail, "
    "retry, spawn, wait, handed_back or cancelled.",
    ("type", "stage", "outcome"),
)
WORKER_RUNNING = Metric(
    "penstock_worker_running", "Handlers of this worker that run, by task type and stage.", ("type", "stage")
)
WORKER_WAITING = Metric("penstock_worker_waiting", "Tasks of this worker that wait for a handler.")
WORKER_SLOTS = Metric("penstock_worker_slots", "Most handlers of this worker at once.")
WORKER_BLOCKED = Metric(
    "penstock_worker_blocked_total",
    "Times that an async handler blocked the event loop of this worker for more than a second, by task type and stage.",
    ("type", "stage"),
)
WORKER_LOG_LINES_DROPPED = Metric(
    "penstock_worker_log_lines_dropped_total",
    "Lines of task logs that this worker has dropped, by reason: rate (of a run), size (of a run) or buffer (of the worker).",
    ("reason",),
)

PUBLISHING = Metric(
    "penstock_publishing",
    "Committed transactions whose events and callbacks Kafka has not acknowledged yet.",
)
SWEPT = Metric(
    "penstock_swept_events_total",
    "Events that their writer had not published and this process's sweeper has published.",
)

CONNECTIONS = Metric("penstock_http_connections", "Connections of clients that are open.")
CONNECTIONS_REFUSED = Metric(
    "penstock_http_connections_refused_total",
    "Connections that were refused, by the bound that they met: address, or all. Each other one has a request under way.",
    ("bound",),
)
CONNECTIONS_ENDED = Metric(
    "penstock_http_connections_ended_total",
    "Connections that the gateway has ended, by reason. Too slow was the client with the head of a request, its body, the next request "
    "(idle) or the answer (write). At a bound of connections or of bodies a waiting one gave way (bound, bodies).",
    ("reason",),
)
REQUESTS = Metric(
    "penstock_http_requests_total",
    "Requests answered, by method, route (as in openapi.json) and status; 499 when the client closed the connection.",
    ("method", "route", "status"),
)
REQUEST_SECONDS = Metric(
    "penstock_http_request_seconds",
    "Seconds until requests were answered; a long poll includes its wait for tasks.",
    ("method", "route"),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
)

CALLBACKS = Metric(
    "penstock_callbacks",
    "Callbacks in PostgreSQL by state: pending, overdue (pending, and published or due for five minutes without a claim), held or "
    "dead. One process counts up to 10,000 of each, every 30 s.",
    ("state",),
)
CALLBACK_HELD_OLDEST = Metric(
    "penstock_callback_held_oldest_seconds",
    "Seconds for which the oldest held callback has been held; 0 without one. After PENSTOCK_CALLBACK_HELD_MAX_S it is dead.",
)
CALLBACK_DEAD_UNCALLED = Metric(
    "penstock_callback_dead_uncalled_total",
    "Callbacks that died without a call, by reason: held (for too long) or refused (Kafka refuses the record).",
    ("reason",),
)
CALLBACK_RECEIVED = Metric(
    "penstock_callback_received_total",
    "Callbacks received from Kafka, by path: normal or diverted.",
    ("path",),
)
CALLBACK_CALLS = Metric(
    "penstock_callback_calls_total",
    "Calls that have ended, by path and by outcome: delivered, retried or dead.",
    ("path", "outcome"),
)
CALLBACK_SLOW = Metric(
    "penstock_callback_slow_calls_total",
    "Calls that took longer than PENSTOCK_CALLBACK_SLOW_S, by path.",
    ("path",),
)
CALLBACK_SECONDS = Metric(
    "penstock_callback_call_seconds",
    "Seconds from connecting until the end of the response, by path.",
    ("path",),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0),
)
CALLBACK_HELD = Metric(
    "penstock_callback_held_total", "Callbacks held because their target is abnormal or disabled."
)
CALLBACK_REQUEUED = Metric(
    "penstock_callback_requeued_total",
    "Held callbacks that were requeued, as probes or to drain a target that has recovered.",
)
CALLBACK_SLOTS = Metric(
    "penstock_callback_slots",
    "Size of a pool in concurrent calls, by pool: normal, diverted or slow.",
    ("pool",),
)
CALLBACK_SLOTS_USED = Metric("penstock_callback_slots_used", "Calls in flight in a pool, by pool.", ("pool",))
CALLBACK_WAITING = Metric(
    "penstock_callback_waiting",
    "Callbacks in flight that wait for a slot of their target, by path.",
    ("path",),
)
CALLBACK_TARGETS = Metric(
    "penstock_callback_targets",
    "Targets in the memory of this process, by state: normal, abnormal or disabled. Disabled ones leave it soon.",
    ("state",),
)
CALLBACK_HOSTS_ABNORMAL = Metric(
    "penstock_callback_hosts_abnormal",
    "Hosts in the memory of this process whose circuit breaker is open: the callbacks of all their targets are diverted.",
)
CALLBACK_SELF_CHECK = Metric(
    "penstock_callback_self_check",
    "1 while this process is in self-check mode and counts no slow call against a target, else 0.",
)
CALLBACK_SECRETS_UNUSABLE = Metric(
    "penstock_callback_secrets_unusable",
    "Secrets that this process needs to sign callbacks, and cannot decrypt or find.",
)

WINDOW_SIZE = Metric(
    "penstock_window_size",
    "Most unclaimed records on a type's ready topic, and the reason for this size: floor, drain, hunger (workers are "
    "starved), ceiling or rate.",
    ("type", "reason"),
)
WINDOW_LAG = Metric(
    "penstock_window_lag",
    "Records on a type's ready topic that no worker had fetched at the last measurement.",
    ("type",),
)
WINDOW_DRAIN = Metric(
    "penstock_window_drain",
    "Attempts of a type that ended per second when its window last limited the release.",
    ("type",),
)
RELEASED = Metric(
    "penstock_released_total", "Tasks that this process has released to ready topics, by type.", ("type",)
)
WITHDRAWN = Metric(
    "penstock_withdrawn_total",
    "Tasks whose records this process has withdrawn from a busy worker, because another worker had room or a more urgent task waited, by type.",
    ("type",),
)
LIMIT = Metric(
    "penstock_limit",
    "Limits of a type: in_flight (tasks; penstock_backlog has the current number), starts_per_s (attempts per second; "
    "penstock_released_total has the current rate) or per_key (tasks in flight per concurrency key).",
    ("type", "limit"),
)
HELD = Metric(
    "penstock_type_held",
    "1 while a type is held, else 0: at its last known lag (lag_unknown), or not released because Kafka forbids its ready topic "
    "(topic_refused: compare the access lists with `penstock topics acls`) or does not answer for it (topic_unavailable).",
    ("type", "reason"),
)
PAUSED = Metric("penstock_type_paused", "1 while a type is paused, else 0.", ("type",))
BACKLOG = Metric(
    "penstock_backlog",
    "Tasks by type, stage, priority and state: ready, scheduled, paused, waiting or in_flight (queued or running).",
    ("type", "stage", "priority", "state"),
)
BACKLOG_OLDEST = Metric(
    "penstock_backlog_oldest_seconds",
    "Seconds that the oldest ready task of a type, stage and priority has been ready.",
    ("type", "stage", "priority"),
)

HISTORY_MOVED = Metric("penstock_history_moved_total", "Tasks that this process has moved to history.")
HISTORY_MOVED_FLOWS = Metric(
    "penstock_history_moved_flows_total", "Flows that this process has moved to history."
)
HISTORY_ARCHIVED = Metric(
    "penstock_history_archived_total",
    "Tasks that this process has written to archive objects and verified there.",
)
HISTORY_ARCHIVED_BYTES = Metric(
    "penstock_history_archived_bytes_total", "Bytes of the archive objects that this process has written."
)
HISTORY_DROPPED = Metric(
    "penstock_history_dropped_total", "Partitions of history that this process has dropped."
)

SCHEDULE_STARTED = Metric(
    "penstock_schedule_flows_started_total",
    "Flows that this process has started for schedules, without those of backfills.",
)
SCHEDULE_SKIPPED = Metric(
    "penstock_schedule_ticks_skipped_total",
    "Ticks of schedules that this process has recorded as skipped: catch_up, overlap, queue_full, paused or error. "
    "Ticks that were not counted are one.",
    ("reason",),
)
SCHEDULE_DELAY = Metric(
    "penstock_schedule_delay_seconds",
    "Seconds from its tick to the start of the latest flow of a schedule; 0 before the first.",
)
BACKFILL_STARTED = Metric(
    "penstock_backfill_flows_started_total", "Flows that this process has started for backfills."
)

SUBMIT_WAITING = Metric(
    "penstock_submit_waiting", "Submitted tasks that this gateway has accepted and not answered yet."
)
SUBMIT_OLDEST = Metric(
    "penstock_submit_oldest_seconds",
    "Seconds that the oldest of these tasks has waited; 0 when there is none.",
)
SUBMIT_REFUSED = Metric(
    "penstock_submit_refused_total",
    "Submissions answered 429 because PostgreSQL is behind, by the limit that was exceeded: late (the wait), rows or "
    "bytes.",
    ("why",),
)
GATEWAY_REFUSED = Metric(
    "penstock_gateway_refused_total",
    "Requests refused before their body was read, by reason: nobody (no credentials), unknown (invalid key or token), role "
    "(insufficient role), rate (limit exceeded) or unavailable (credentials cannot be checked now).",
    ("why",),
)
INGEST_WAITING = Metric(
    "penstock_ingest_waiting",
    "Records of tasks, flows, events or task logs that this process has fetched and not yet written to PostgreSQL.",
)
INGEST_PAUSED = Metric(
    "penstock_ingest_paused",
    "Partitions with records of submissions or task logs that this process has paused because PostgreSQL is behind.",
)
INGEST_HELD = Metric(
    "penstock_ingest_held",
    "Partitions that wait at a record of submissions or task logs, for the object store or for a lock.",
)
INGEST_PROCESSED = Metric(
    "penstock_ingest_processed_total",
    "Records of tasks, flows, events or task logs that this process has written to PostgreSQL or rejected.",
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


@dataclass(frozen=True, slots=True)
class Sample:
    """One current value of a metric.

    Attributes:
        metric: the metric.
        value: the value; for a histogram the sum of its observations.
        labels: label values, in the order of the metric's names.
        counts: for a histogram: observations per bucket, the unbounded bucket last.
    """

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    counts: Sequence[int] = ()


# Returns the current samples of a process; called for each scrape.
Source = Callable[[], Iterable[Sample]]
