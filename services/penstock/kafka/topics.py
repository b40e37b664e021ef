"""The names of all topics and consumer groups, and how many partitions each has."""

from __future__ import annotations

from dataclasses import dataclass

DAY_MS = 24 * 3600 * 1000

# Kafka's own default for the largest record.
RECORD_BYTES = 1_048_588
# A rejection carries its original in base64, and the original may be as large as a record can be.
REJECTION_BYTES = 2 * RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as it is created: its bare name (without the deployment's prefix) and settings."""

    name: str
    partitions: int
    retention_ms: int
    doc: str
    max_bytes: int = RECORD_BYTES


SUBMITTED = Topic("submitted", 4, 7 * DAY_MS, "Tasks submitted by any producer.")
SUBMITTED_REJECTED = Topic(
    "submitted.rejected", 1, 30 * DAY_MS, "What could not be ingested, with the reason.", REJECTION_BYTES
)
HEARTBEATS = Topic("heartbeats", 8, DAY_MS, "Claims, beats and releases, keyed by worker.")
HEARTBEATS_REJECTED = Topic(
    "heartbeats.rejected", 1, 30 * DAY_MS, "Heartbeat records that broke their contract.", REJECTION_BYTES
)
REVOKED = Topic("revoked", 1, DAY_MS, "Leases taken back, read by every worker.")
STAGE_RESULTS = Topic("stage-results", 8, 7 * DAY_MS, "Batches of stage results, keyed by worker.")
STAGE_RESULTS_REJECTED = Topic(
    "stage-results.rejected", 1, 30 * DAY_MS, "Results that broke their contract.", REJECTION_BYTES
)
EVENTS = Topic("events", 8, 7 * DAY_MS, "What became of tasks, keyed by task; for consumers.")
CALLBACKS = Topic("callbacks", 8, 7 * DAY_MS, "Callbacks to deliver now, keyed by target.")
CALLBACKS_DIVERTED = Topic(
    "callbacks.diverted", 8, 7 * DAY_MS, "Callbacks of targets that misbehave, keyed by target."
)
CALLBACKS_DEAD = Topic("callbacks.dead", 1, 30 * DAY_MS, "Callbacks whose schedule is exhausted.")
CALLBACKS_DIVERTED_REJECTED = Topic(
    "callbacks.diverted.rejected",
    1,
    30 * DAY_MS,
    "Diverted records that broke their contract.",
    REJECTION_BYTES,
)
CALLBACKS_RESULTS = Topic("callbacks.results", 8, 7 * DAY_MS, "What became of each callback, keyed by task.")
CALLBACKS_REJECTED = Topic(
    "callbacks.rejected", 1, 30 * DAY_MS, "Callback records that broke their contract.", REJECTION_BYTES
)

PLATFORM = (
    SUBMITTED,
    SUBMITTED_REJECTED,
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
)


def ready(type_name: str, partitions: int) -> Topic:
    """The ready topic of one task type; only task-sync writes to it."""
    return Topic(
        f"ready.{type_name}", partitions, 7 * DAY_MS, "Released tasks of one type, one record a task."
    )


def workers_group(prefix: str, type_name: str) -> str:
    """The consumer group in which all workers of a type share its ready topic; its lag is the window."""
    return f"{prefix}workers.{type_name}"


def service_group(prefix: str, service: str) -> str:
    """The consumer group of a service's replicas."""
    return f"{prefix}{service}"
