"""What task-sync can tell of its present state (`penstock.metrics`): the types it owns, each with its window."""

from __future__ import annotations

from collections.abc import Iterator

from penstock import metrics
from penstock.metrics import Sample
from penstock.task_sync.release import Release


def samples(gate: Release) -> Iterator[Sample]:
    """Everything as it is now."""
    for one in gate.gates():
        name, window = one.type.name, one.window
        size, reason = one.sized()
        yield Sample(metrics.WINDOW_SIZE, size, (name, reason))
        yield Sample(metrics.WINDOW_LAG, one.lag, (name,))
        yield Sample(metrics.WINDOW_DRAIN, window.drain_per_s, (name,))
        yield Sample(metrics.RELEASED, one.released, (name,))
