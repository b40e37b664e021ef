"""The span of a submission by a record."""

from __future__ import annotations

from typing import Any

from penstock import tracing


def submission_traceparent(record: Any, **attributes: Any) -> str | None:
    """The span of a record's submission, in the trace of its header or in a new one.

    Args:
        record: of Kafka.
        attributes: of the span.

    Returns:
        The span as `traceparent`; None if it is not sampled, or the process does not trace.
    """
    if not tracing.is_on():
        return None
    header = dict(record.headers).get(tracing.TRACEPARENT)
    parent = header.decode("ascii", "replace") if header else None
    with tracing.span("submit", parent, kind="consumer", root=True, **attributes) as span:
        return span.traceparent if span else None
