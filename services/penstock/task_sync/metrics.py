"""Metrics of task-sync (`penstock.metrics`): owned types and windows, ingest, history."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import metrics
from penstock.kafka.topics import SUBMITTED
from penstock.metrics import Sample
from penstock.task_sync.history import History
from penstock.task_sync.ingest import Ingest
from penstock.task_sync.release import ReleaseLoop


def release_samples(release_loop: ReleaseLoop) -> Iterator[Sample]:
    """Samples of the owned types."""
    for topic in release_loop.ready_topics():
        name, window = topic.type.name, topic.window
        size, reason = topic.size_and_reason()
        yield Sample(metrics.WINDOW_SIZE, size, (name, reason))
        yield Sample(metrics.WINDOW_LAG, topic.lag, (name,))
        yield Sample(metrics.WINDOW_DRAIN, window.completions_per_s, (name,))
        yield Sample(metrics.RELEASED, topic.released, (name,))
        yield Sample(metrics.WITHDRAWN, topic.withdrawn, (name,))
        yield Sample(metrics.PAUSED, bool(topic.type.paused), (name,))
        limits = (
            ("in_flight", topic.type.max_in_flight),
            ("starts_per_s", topic.type.starts_per_s),
            ("per_key", topic.type.max_per_key),
        )
        for limit, value in limits:
            if value is not None:
                yield Sample(metrics.LIMIT, value, (name, limit))


def history_samples(history: History) -> Iterator[Sample]:
    """Samples of history, counted since the process started."""
    yield Sample(metrics.HISTORY_MOVED, history.moved)
    yield Sample(metrics.HISTORY_ARCHIVED, history.archived)
    yield Sample(metrics.HISTORY_ARCHIVED_BYTES, history.archived_bytes)
    yield Sample(metrics.HISTORY_DROPPED, history.dropped)


def ingest_samples(ingest: Ingest, lag: int) -> Iterator[Sample]:
    """Samples of ingest.

    Args:
        ingest: of this process.
        lag: records of `submitted` that it has not inserted.
    """
    yield Sample(metrics.LAG, lag, (SUBMITTED.name,))
    yield Sample(metrics.REJECTED, ingest.rejected, (SUBMITTED.name,))
    yield Sample(metrics.INGEST_WAITING, ingest.waiting)
    yield Sample(metrics.INGEST_PAUSED, ingest.paused)
    yield Sample(metrics.INGEST_HELD, ingest.held)
    yield Sample(metrics.INGEST_PROCESSED, ingest.inserted)
