"""Spans of a commit: the conclusions of traced tasks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock import tracing
from penstock.core.attempt import count_of
from penstock.postgres.advance import Advanced
from penstock.postgres.ending import Ending


def trace(endings: Sequence[Ending], advanced: Advanced, began_ns: int) -> None:
    """Records a span for each ending that took effect in the commit since `began_ns`."""
    if not (advanced.traces and tracing.is_on()):
        return
    for ending in endings:
        fence = ending.fence
        span = tracing.begin(
            "complete",
            advanced.traces.get(fence),
            start_ns=began_ns,
            task_id=fence.id,
            stage=fence.stage,
            attempt=count_of(fence.attempt),
            outcome=ending.outcome.value,
            state=ending.conclusion.state.value,
        )
        if span is not None:
            span.end()
