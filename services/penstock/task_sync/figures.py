"""What task-sync can tell of its present state (`penstock.metrics`): its types, each with its window, ingest and history."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import metrics
from penstock.kafka.topics import SUBMITTED
from penstock.metrics import Sample
from penstock.task_sync.history import History
from penstock.task_sync.ingest import Ingest
from penstock.task_sync.release import Release


def samples(gate: Release) -> Iterator[Sample]:
    """The gates as they are now."""
    for one in gate.gates():
        name, window = one.type.name, one.window
        size, reason = one.sized()
        yield Sample(metrics.WINDOW_SIZE, size, (name, reason))
        yield Sample(metrics.WINDOW_LAG, one.lag, (name,))
        yield Sample(metrics.WINDOW_DRAIN, window.drain_per_s, (name,))
        yield Sample(metrics.RELEASED, one.released, (name,))
        yield Sample(metrics.PAUSED, bool(one.type.paused), (name,))
        limits = (
            ("in_flight", one.type.max_in_flight),
            ("starts_per_s", one.type.starts_per_s),
            ("per_key", one.type.max_per_key),
        )
        for limit, most in limits:
            if most is not None:
                yield Sample(metrics.LIMIT, most, (name, limit))


def of_history(history: History) -> Iterator[Sample]:
    """What has been moved and retired until now."""
    yield Sample(metrics.HISTORY_MOVED, history.moved)
    yield Sample(metrics.HISTORY_ARCHIVED, history.archived)
    yield Sample(metrics.HISTORY_ARCHIVED_BYTES, history.archived_bytes)
    yield Sample(metrics.HISTORY_DROPPED, history.dropped)


def of_ingest(ingest: Ingest, lag: int) -> Iterator[Sample]:
    """What is on its way from the topic `submitted`, of which so many records are not read yet."""
    yield Sample(metrics.LAG, lag, (SUBMITTED.name,))
    yield Sample(metrics.REJECTED, ingest.rejected, (SUBMITTED.name,))
    yield Sample(metrics.INGEST_WAITING, ingest.waiting)
    yield Sample(metrics.INGEST_PAUSED, ingest.paused)
    yield Sample(metrics.INGEST_TAKEN, ingest.taken)
