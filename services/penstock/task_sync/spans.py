"""Spans of a release: from the released row to the record on Kafka."""

from __future__ import annotations

from collections.abc import Sequence

from penstock import tracing
from penstock.contracts.ready import ReadyTask
from penstock.tracing import Span


def start_spans(tasks: Sequence[ReadyTask]) -> list[Span]:
    """Starts a span for each traced task; it is the parent of the attempt's spans."""
    spans: list[Span] = []
    if not tracing.is_on():
        return spans
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
            spans.append(span)
    return spans
