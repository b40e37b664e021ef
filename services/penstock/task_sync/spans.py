"""Spans of a release: from the row that was opened to the record that Kafka has."""

from __future__ import annotations

from collections.abc import Sequence

from penstock import tracing
from penstock.contracts.ready import ReadyTask
from penstock.tracing import Span


def traced(tasks: Sequence[ReadyTask]) -> list[Span]:
    """Begins a span for each traced task, under which its attempt will hang; they end when Kafka has the records."""
    found: list[Span] = []
    if not tracing.is_on():
        return found
    for task in tasks:
        fence = task.fence
        span = tracing.begin(
            "release",
            task.traceparent,
            kind="producer",
            task_id=fence.id,
            type=task.type,
            stage=fence.stage,
            attempt=fence.attempt,
        )
        if span is not None:
            task.traceparent = span.traceparent
            found.append(span)
    return found
