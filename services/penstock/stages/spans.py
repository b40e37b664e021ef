"""Spans of a commit: what became of the attempts of traced tasks."""

from __future__ import annotations

from collections.abc import Sequence

from penstock import tracing
from penstock.postgres.advance import Advanced, Ending


def trace(endings: Sequence[Ending], advanced: Advanced, began_ns: int) -> None:
    """Tells of those that have taken effect, all by the commit that began then (nanoseconds since 1970)."""
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
            attempt=fence.attempt,
            outcome=ending.outcome.value,
            state=ending.verdict.state.value,
        )
        if span is not None:
            span.end()
