"""Metrics: every name and what it means, and the port on which a process tells of itself.

What a service counts are plain numbers of its own, read when somebody asks: counting costs the hot path an addition,
and nothing is kept here. `serving` answers from the service's own loop, so that a loop which stands still is seen.
All names of Penstock stand in this module; `process_*` come from prometheus_client (`penstock.metrics.page`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """What is measured.

    Attributes:
        name: as Prometheus shows it; counters end in _total.
        doc: what it is, with its unit.
        labels: names of its labels.
        buckets: upper bounds of a histogram's buckets but the last; none for others.
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
    "penstock_build_info", "1; which service this process is, in which version.", ("service", "version")
)
LOGGED = Metric(
    "penstock_logged_total",
    "What this process has logged since it serves metrics, by level: warning, or error (and above).",
    ("level",),
)

LAG = Metric(
    "penstock_lag",
    "Records of a topic that this process has yet to take from its partitions, when it last looked (every sixth of "
    "PENSTOCK_STALL_TIMEOUT_S).",
    ("topic",),
)
IN_HAND = Metric("penstock_in_hand", "Records that this process has taken and not settled yet.")
GENERATIONS = Metric(
    "penstock_generations_total",
    "Generations of its consumer group that this process has been in: one for each rebalance.",
)
REJECTED = Metric(
    "penstock_rejected_total",
    "Records, or parts of them, that broke their contract and were parked on TOPIC.rejected.",
    ("topic",),
)
WAITS = Metric(
    "penstock_waits_total",
    "Times that what was in hand had to wait because Kafka or PostgreSQL did not answer.",
)

HEARTBEATS = Metric(
    "penstock_heartbeats_total",
    "Attempts that workers have spoken of, by what they said: claim, beat or release.",
    ("kind",),
)
LEASES = Metric(
    "penstock_leases",
    "Leases that this process watches, by where they are: memory (claimed a moment ago) or written.",
    ("where",),
)
LEASES_LOST = Metric(
    "penstock_leases_lost_total", "Leases that expired: their worker was silent. By type.", ("type",)
)
LEASE_SUSPICIONS = Metric(
    "penstock_lease_suspicions_total",
    "Times that so many leases would have expired at once that this process first made sure that it hears.",
)
STOOD_STILL = Metric(
    "penstock_stood_still_seconds_total",
    "Seconds in which this process itself stood still, by which it has lengthened all leases.",
)

ENDED = Metric(
    "penstock_attempts_ended_total",
    "Attempts that have ended, by outcome (next, done, retry, fail or expired) and by the state of their task then.",
    ("outcome", "state"),
)
ATTEMPT_SECONDS = Metric(
    "penstock_attempt_seconds",
    "Seconds for which handlers ran, by stage, of attempts whose result took effect.",
    ("stage",),
    (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0),
)
RESULTS_VAIN = Metric(
    "penstock_results_vain_total", "Results that changed nothing: repeated, or of an attempt that was over."
)
RESULTS_LATE = Metric(
    "penstock_results_late_total", "Results of expired attempts that were accepted all the same."
)
COMMIT_SECONDS = Metric(
    "penstock_commit_seconds",
    "Seconds from the beginning of a commit of results until it has taken effect, waiting for PostgreSQL included.",
    (),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
)
PUBLISHING = Metric(
    "penstock_publishing", "Transactions whose events and callbacks are on their way to Kafka."
)
SWEPT = Metric("penstock_swept_events_total", "Events that a crash had left and this process has published.")

REQUESTS = Metric(
    "penstock_http_requests_total",
    "Requests answered, by method, route (as in openapi.json) and status; 499 if the client has gone.",
    ("method", "route", "status"),
)
REQUEST_SECONDS = Metric(
    "penstock_http_request_seconds",
    "Seconds until they were answered; long-polls wait for tasks.",
    ("method", "route"),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0),
)

CALLBACK_TAKEN = Metric("penstock_callback_taken_total", "Records of callbacks taken in, by path.", ("path",))
CALLBACK_CALLS = Metric(
    "penstock_callback_calls_total",
    "Calls that have ended, by path and by what comes of them: delivered, retried or dead.",
    ("path", "outcome"),
)
CALLBACK_SLOW = Metric(
    "penstock_callback_slow_calls_total",
    "Calls that took longer than PENSTOCK_CALLBACK_SLOW_S, by path.",
    ("path",),
)
CALLBACK_SECONDS = Metric(
    "penstock_callback_call_seconds",
    "Seconds from connecting to the end of the answer, by path.",
    ("path",),
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0),
)
CALLBACK_HELD = Metric(
    "penstock_callback_held_total", "Callbacks held, because their target is abnormal or disabled."
)
CALLBACK_GRANTED = Metric(
    "penstock_callback_granted_total", "Held callbacks let go, as probes or to drain what is held."
)
CALLBACK_SLOTS = Metric(
    "penstock_callback_slots", "Most calls under way in a pool: normal, diverted or slow.", ("pool",)
)
CALLBACK_SLOTS_USED = Metric("penstock_callback_slots_used", "Calls under way in a pool.", ("pool",))
CALLBACK_WAITING = Metric(
    "penstock_callback_waiting", "Callbacks in hand that wait for their target's turn, by path.", ("path",)
)
CALLBACK_TARGETS = Metric(
    "penstock_callback_targets",
    "Targets that this process judges, by state: normal, abnormal or disabled.",
    ("state",),
)
CALLBACK_SUSPICION = Metric(
    "penstock_callback_suspicion",
    "1 while this process suspects itself of slowness, and charges nothing to targets; else 0.",
)

WINDOW_SIZE = Metric(
    "penstock_window_size",
    "Most records that may wait on a type's ready topic, and what that goes by: floor, drain, hunger, ceiling or rate.",
    ("type", "reason"),
)
WINDOW_LAG = Metric(
    "penstock_window_lag",
    "Records on a type's ready topic that no worker had taken when it was last looked.",
    ("type",),
)
WINDOW_DRAIN = Metric(
    "penstock_window_drain",
    "Attempts of a type that end each second, as of when its window last held tasks back.",
    ("type",),
)
RELEASED = Metric(
    "penstock_released_total", "Tasks that this process has brought to ready topics, by type.", ("type",)
)
LIMIT = Metric(
    "penstock_limit",
    "What a type may have, by limit: in_flight (tasks; what there are is told by penstock_backlog), starts_per_s (attempts a second; what "
    "start is told by penstock_released_total) or per_key (tasks in flight of one key).",
    ("type", "limit"),
)
PAUSED = Metric("penstock_type_paused", "1 while a type is paused, else 0.", ("type",))
BACKLOG = Metric(
    "penstock_backlog",
    "Tasks of a type, stage and priority in a state: ready, scheduled, paused, waiting or in_flight (queued or running).",
    ("type", "stage", "priority", "state"),
)
BACKLOG_OLDEST = Metric(
    "penstock_backlog_oldest_seconds",
    "For how long the first ready task of a type, stage and priority has been ready.",
    ("type", "stage", "priority"),
)

HISTORY_MOVED = Metric("penstock_history_moved_total", "Tasks that this process has moved to history.")
HISTORY_ARCHIVED = Metric(
    "penstock_history_archived_total",
    "Tasks that this process has archived, in objects that were found whole.",
)
HISTORY_ARCHIVED_BYTES = Metric("penstock_history_archived_bytes_total", "Bytes of these objects.")
HISTORY_DROPPED = Metric(
    "penstock_history_dropped_total", "Partitions of history that this process has dropped."
)

SUBMIT_WAITING = Metric(
    "penstock_submit_waiting", "Tasks that were submitted to this gateway and are not answered yet."
)
SUBMIT_OLDEST = Metric(
    "penstock_submit_oldest_seconds", "Seconds for which the oldest of them has been waiting; 0 when none is."
)
SUBMIT_REFUSED = Metric(
    "penstock_submit_refused_total",
    "Submissions answered 429 because PostgreSQL is behind, by what that goes by: late, rows or bytes.",
    ("why",),
)
GATEWAY_REFUSED = Metric(
    "penstock_gateway_refused_total",
    "Requests that this gateway refused before it read them, by why: nobody (no credentials), unknown (no key or token that "
    "holds), role, rate, or unavailable (they cannot be checked now).",
    ("why",),
)
INGEST_WAITING = Metric(
    "penstock_ingest_waiting",
    "Records of the topic submitted that were read by this process and are not in PostgreSQL yet.",
)
INGEST_PAUSED = Metric(
    "penstock_ingest_paused",
    "Partitions of the topic submitted that this process does not read on, because PostgreSQL is behind.",
)
INGEST_TAKEN = Metric(
    "penstock_ingest_taken_total",
    "Records of the topic submitted that this process has brought to PostgreSQL or rejected.",
)

ALL = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


@dataclass(frozen=True, slots=True)
class Sample:
    """A number as it is now.

    Attributes:
        metric: what it measures.
        value: the number; of a histogram the sum of what it has seen.
        labels: values, in the order of the metric's names.
        counts: of a histogram: how many it has seen in each bucket, the unbounded one last.
    """

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()
    counts: Sequence[int] = ()


# Asked whenever the page is.
Source = Callable[[], Iterable[Sample]]
