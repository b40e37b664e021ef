"""The names of all topics and consumer groups; `topic_config` has partitions and replicas."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kafka.client.record_sizes import RECORD_BYTES, REJECTION_BYTES

DAY_MS = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic, by its name without the deployment's prefix.

    Attributes:
        name: the name without the prefix.
        partitions: number of partitions; None stands for the value in `schemas/topics.toml`, which
            `topic_config.config_of` reads.
        retention_ms: how long records are kept, in milliseconds; None as above.
        doc: its records, in one sentence.
        max_bytes: size of the largest record, in bytes.
        fixed: why the number of its partitions must not change while it is in use; "" when it may.
    """

    name: str
    partitions: int | None
    retention_ms: int | None
    doc: str
    max_bytes: int = RECORD_BYTES
    fixed: str = ""


def _declared(name: str, doc: str, max_bytes: int = RECORD_BYTES, *, fixed: str = "") -> Topic:
    return Topic(name, None, None, doc, max_bytes, fixed)


_BY_TARGET = (
    "keyed by target: the reader of a target's partition measures its health. With more partitions, a target would "
    "have two such readers until its old records are gone"
)
_BY_TASK = "keyed by task: the records of one task would be on two partitions, and consumers could read them out of order"

SUBMITTED = _declared("submitted", "Tasks submitted by any producer.")
SUBMITTED_REJECTED = _declared(
    "submitted.rejected", "Submissions that could not be ingested, with the reason.", REJECTION_BYTES
)
FLOWS_SUBMITTED = _declared("flows.submitted", "Flows submitted by any producer.")
FLOWS_SUBMITTED_REJECTED = _declared(
    "flows.submitted.rejected",
    "Flow submissions that could not be ingested, with the reason.",
    REJECTION_BYTES,
)
FLOW_EVENTS_SUBMITTED = _declared("flow-events.submitted", "Events for flows, sent by any producer.")
FLOW_EVENTS_SUBMITTED_REJECTED = _declared(
    "flow-events.submitted.rejected",
    "Events for flows that could not be ingested, with the reason.",
    REJECTION_BYTES,
)
HEARTBEATS = _declared(
    "heartbeats",
    "Claims, beats and ended leases, keyed by worker.",
    fixed="keyed by worker: the reader of a partition tracks its leases, and another reader could read the beats of a claim",
)
HEARTBEATS_REJECTED = _declared(
    "heartbeats.rejected", "Heartbeat records that violate their contract.", REJECTION_BYTES
)
REVOKED = _declared(
    "revoked", "Revoked leases, read by every worker.", fixed="every worker reads its only partition"
)
STAGE_RESULTS = _declared(
    "stage-results",
    "Batches of stage results, keyed by worker.",
    fixed="the search for lost records compares the ends of known partitions. It would miss results on a new partition, "
    "and their stages would run again",
)
STAGE_RESULTS_REJECTED = _declared(
    "stage-results.rejected", "Results that violate their contract.", REJECTION_BYTES
)
EVENTS = _declared("events", "Transitions of tasks, keyed by task; for consumers.", fixed=_BY_TASK)
CALLBACKS = _declared("callbacks", "Callbacks to deliver now, keyed by target.", fixed=_BY_TARGET)
CALLBACKS_DIVERTED = _declared(
    "callbacks.diverted", "Callbacks of slow or failing targets, keyed by target.", fixed=_BY_TARGET
)
CALLBACKS_DEAD = _declared(
    "callbacks.dead",
    "Callbacks without a further attempt: schedule exhausted, target gone (410), URL invalid, or held for too long.",
)
CALLBACKS_DIVERTED_REJECTED = _declared(
    "callbacks.diverted.rejected", "Diverted records that violate their contract.", REJECTION_BYTES
)
CALLBACKS_RESULTS = _declared("callbacks.results", "Outcomes of callbacks, keyed by task.", fixed=_BY_TASK)
CALLBACKS_REJECTED = _declared(
    "callbacks.rejected", "Callback records that violate their contract.", REJECTION_BYTES
)

TASK_LOGS = _declared(
    "task-logs",
    "Lines of task logs, by task.",
    fixed="by task: the lines of one run would be on two partitions, and its readers would miss some",
)
TASK_LOGS_REJECTED = _declared(
    "task-logs.rejected", "Records of task logs that violate their contract.", REJECTION_BYTES
)

WORKERS = _declared(
    "workers",
    "Signs of life of workers and gateways.",
    fixed="the stamps of its only partition are the clock by which a worker counts as lost",
)

DEPLOYMENT = _declared(
    "deployment",
    "The database that the prefix belongs to.",
    fixed="every service reads its only partition",
)

PLATFORM = (
    SUBMITTED,
    SUBMITTED_REJECTED,
    FLOWS_SUBMITTED,
    FLOWS_SUBMITTED_REJECTED,
    FLOW_EVENTS_SUBMITTED,
    FLOW_EVENTS_SUBMITTED_REJECTED,
    HEARTBEATS,
    HEARTBEATS_REJECTED,
    REVOKED,
    STAGE_RESULTS,
    STAGE_RESULTS_REJECTED,
    EVENTS,
    CALLBACKS,
    CALLBACKS_DIVERTED,
    CALLBACKS_DEAD,
    CALLBACKS_REJECTED,
    CALLBACKS_DIVERTED_REJECTED,
    CALLBACKS_RESULTS,
    TASK_LOGS,
    TASK_LOGS_REJECTED,
    WORKERS,
    DEPLOYMENT,
)

# The topics to which services publish what a transition leaves in the outbox.
OUTBOX = (EVENTS, CALLBACKS, REVOKED)

# The name of all ready topics in the declaration; with a dot, the prefix of their names.
READY = "ready"


def ready(type_name: str, partitions: int) -> Topic:
    """The ready topic of one task type; only task-sync writes to it."""
    return Topic(
        f"{READY}.{type_name}", partitions, None, "Released tasks of one type, one record for each task."
    )


def workers_group(prefix: str, type_name: str) -> str:
    """The consumer group of all workers of a type; the window bounds its lag."""
    return f"{prefix}workers.{type_name}"


def service_group(prefix: str, service: str) -> str:
    """The consumer group of a service's replicas."""
    return f"{prefix}{service}"
