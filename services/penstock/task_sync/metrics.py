"""Metrics of task-sync (`penstock.metrics`): owned types and windows, ingest, history."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import metrics
from penstock.metrics import Sample
from penstock.task_sync.history import History
from penstock.task_sync.owned_topics import OwnedTopics
from penstock.task_sync.topic_opener import HeldReason


def release_samples(topics: OwnedTopics) -> Iterator[Sample]:
    """Samples of the owned types."""
    held = topics.held()
    for name in held.keys() | {topic.type.name for topic in topics.ready_topics()}:
        for reason in HeldReason:
            yield Sample(metrics.HELD, held.get(name) is reason, (name, reason))
    for topic in topics.ready_topics():
        name, window = topic.type.name, topic.window
        size, window_reason = topic.size_and_reason()
        yield Sample(metrics.WINDOW_SIZE, size, (name, window_reason))
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
    yield Sample(metrics.HISTORY_MOVED_FLOWS, history.moved_flows)
    yield Sample(metrics.HISTORY_ARCHIVED, history.archived)
    yield Sample(metrics.HISTORY_ARCHIVED_BYTES, history.archived_bytes)
    yield Sample(metrics.HISTORY_DROPPED, history.dropped)
