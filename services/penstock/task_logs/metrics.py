"""Metrics of the service `tasklogs` (`penstock.metrics`)."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import metrics
from penstock.metrics import Sample
from penstock.task_logs.retention import Retention
from penstock.task_logs.segments import SegmentHandler


def samples(segments: SegmentHandler, retention: Retention) -> Iterator[Sample]:
    """Samples of segments and of their retention."""
    yield Sample(metrics.LOG_SEGMENTS, segments.segments, ("stored",))
    yield Sample(metrics.LOG_SEGMENTS, retention.expired, ("expired",))
    yield Sample(metrics.LOG_LINES, segments.lines)
    yield Sample(metrics.LOG_BYTES, segments.raw_bytes, ("raw",))
    yield Sample(metrics.LOG_BYTES, segments.stored_bytes, ("stored",))
    yield Sample(metrics.LOG_OBJECTS_SWEPT, retention.swept)
