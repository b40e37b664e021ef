"""The names of all topics and consumer groups; `declared` knows how many partitions and copies each has."""

from __future__ import annotations

from dataclasses import dataclass

DAY_MS = 24 * 3600 * 1000

# Kafka's own default for the largest record.
RECORD_BYTES = 1_048_588
# A rejection carries its original in base64, and the original may be as large as a record can be.
REJECTION_BYTES = 2 * RECORD_BYTES


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic by its bare name (without the deployment's prefix).

    Attributes:
        name: see above.
        partitions: how many; None is as `schemas/topics.toml` declares, which `declared.figures` reads.
        retention_ms: how long its records are kept; None as above.
        doc: what is on it, in a sentence.
        max_bytes: its largest record.
        fixed: why it must not get more partitions while it is in use; "" when it may.
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
    "keyed by target: each target has one judge, the reader of its partition, and with more partitions it would have two "
    "until the old records are gone"
)
_BY_TASK = "keyed by task: what became of one task would lie on two partitions, and its readers could hear it out of order"

SUBMITTED = _declared("submitted", "Tasks submitted by any producer.")
SUBMITTED_REJECTED = _declared(
    "submitted.rejected", "What could not be ingested, with the reason.", REJECTION_BYTES
)
HEARTBEATS = _declared(
    "heartbeats",
    "Claims, beats and releases, keyed by worker.",
    fixed="keyed by worker, and leases are held by whoever reads their partition: a beat would be read by another than the claim",
)
HEARTBEATS_REJECTED = _declared(
    "heartbeats.rejected", "Heartbeat records that broke their contract.", REJECTION_BYTES
)
REVOKED = _declared(
    "revoked", "Leases taken back, read by every worker.", fixed="every worker reads its only partition"
)
STAGE_RESULTS = _declared(
    "stage-results",
    "Batches of stage results, keyed by worker.",
    fixed="the search for lost records goes by the ends of its partitions: results on one it does not know yet would be taken "
    "for lost, and their stages run again",
)
STAGE_RESULTS_REJECTED = _declared(
    "stage-results.rejected", "Results that broke their contract.", REJECTION_BYTES
)
EVENTS = _declared("events", "What became of tasks, keyed by task; for consumers.", fixed=_BY_TASK)
CALLBACKS = _declared("callbacks", "Callbacks to deliver now, keyed by target.", fixed=_BY_TARGET)
CALLBACKS_DIVERTED = _declared(
    "callbacks.diverted", "Callbacks of targets that misbehave, keyed by target.", fixed=_BY_TARGET
)
CALLBACKS_DEAD = _declared(
    "callbacks.dead",
    "Callbacks that nobody tries again: schedule exhausted, target gone (410) or never callable.",
)
CALLBACKS_DIVERTED_REJECTED = _declared(
    "callbacks.diverted.rejected", "Diverted records that broke their contract.", REJECTION_BYTES
)
CALLBACKS_RESULTS = _declared(
    "callbacks.results", "What became of each callback, keyed by task.", fixed=_BY_TASK
)
CALLBACKS_REJECTED = _declared(
    "callbacks.rejected", "Callback records that broke their contract.", REJECTION_BYTES
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


# The name in the declaration of all ready topics, and with a dot what each begins with.
READY = "ready"


def ready(type_name: str, partitions: int) -> Topic:
    """The ready topic of one task type; only task-sync writes to it."""
    return Topic(f"{READY}.{type_name}", partitions, None, "Released tasks of one type, one record a task.")


def workers_group(prefix: str, type_name: str) -> str:
    """The consumer group in which all workers of a type share its ready topic; its lag is the window."""
    return f"{prefix}workers.{type_name}"


def service_group(prefix: str, service: str) -> str:
    """The consumer group of a service's replicas."""
    return f"{prefix}{service}"
