"""A histogram that observes seconds."""

from __future__ import annotations

from bisect import bisect_left

from penstock.metrics import Metric, Sample


class Histogram:
    """Counts observations by the buckets of a metric.

    Args:
        metric: a metric with buckets.

    Attributes:
        counts: observations per bucket, the unbounded bucket last.
        sum_s: sum of all observations, in seconds.
    """

    __slots__ = ("_buckets", "_metric", "counts", "sum_s")

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._buckets = metric.buckets
        self.counts = [0] * (len(metric.buckets) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Adds one observation."""
        self.counts[bisect_left(self._buckets, seconds)] += 1
        self.sum_s += seconds

    def sample(self, *labels: str) -> Sample:
        """The current state as a sample with these label values."""
        return Sample(self._metric, self.sum_s, labels, self.counts)
