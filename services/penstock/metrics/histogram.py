"""Counting by buckets."""

from __future__ import annotations

from bisect import bisect_left

from penstock.metrics import Metric, Sample


class Histogram:
    """Seconds, by the buckets of a metric.

    Args:
        metric: a histogram.

    Attributes:
        counts: how many were in each bucket, the unbounded one last.
        sum_s: of all.
    """

    __slots__ = ("_buckets", "_metric", "counts", "sum_s")

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self._buckets = metric.buckets
        self.counts = [0] * (len(metric.buckets) + 1)
        self.sum_s = 0.0

    def see(self, took_s: float) -> None:
        """One more."""
        self.counts[bisect_left(self._buckets, took_s)] += 1
        self.sum_s += took_s

    def sample(self, *labels: str) -> Sample:
        """As it is now."""
        return Sample(self._metric, self.sum_s, labels, self.counts)
