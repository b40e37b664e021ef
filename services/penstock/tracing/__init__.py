"""Traces by OpenTelemetry: one trace from a submission through all stages to the callbacks.

Tracing is off unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set.
While it is off, OpenTelemetry is not imported and every function returns None. Settings are
OpenTelemetry's own variables.

The submission starts a trace or continues the sender's, and OTEL_TRACES_SAMPLER decides whether it
is sampled. Only a sampled trace is kept, as a W3C `traceparent` in the task's row, its ready
records and its callbacks' headers. Later steps trace only tasks with a `traceparent`, so a task
that is not sampled costs nothing.

Fails open: spans that cannot be exported are dropped, and no task waits for a trace.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol

log = logging.getLogger(__name__)

# The header of W3C Trace Context, in HTTP and in Kafka.
TRACEPARENT = "traceparent"

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

Kind = Literal["internal", "server", "client", "producer", "consumer"]


class Span(Protocol):
    """A sampled span that has begun."""

    @property
    def traceparent(self) -> str:
        """The parent of child spans."""

    def set_attributes(self, **attributes: str | int) -> None:
        """Adds attributes, named as by `begin`."""

    def fail(self, reason: str) -> None:
        """Sets the status of the span to error."""

    def end(self, end_ns: int | None = None) -> None:
        """Ends the span, now or at a time in nanoseconds since 1970."""

    def current(self) -> AbstractContextManager[None]:
        """Makes the span current: spans of any library inside the block are its children."""


class Tracer(Protocol):
    """Creates spans; `penstock.tracing.spans` implements it."""

    def begin(
        self,
        name: str,
        parent: str | None,
        kind: Kind,
        start_ns: int | None,
        attributes: Mapping[str, str | int],
        *,
        root: bool,
    ) -> Span | None:
        """See `begin`."""

    def current_trace_id(self) -> str | None:
        """The trace id of the current span, or None."""

    def shutdown(self) -> None:
        """Exports the remaining spans."""


_tracer: Tracer | None = None


def configure(service: str) -> None:
    """Turns tracing on if the environment names an endpoint and OpenTelemetry is installed.

    Args:
        service: `service.name` becomes `penstock-SERVICE`, unless OTEL_SERVICE_NAME is set.
    """
    global _tracer  # noqa: PLW0603 (one per process, like the provider of OpenTelemetry)
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    try:
        from penstock.tracing import spans  # noqa: PLC0415 (optional packages)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        log.warning(
            "Traces are off because a module is missing: pip install 'penstock[otel]'",
            extra={"event": "tracing_disabled", "missing": error.name},
        )
        return
    _tracer = spans.OtelTracer(service)


def shutdown() -> None:
    """Exports the remaining spans and turns tracing off."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.shutdown()


def is_on() -> bool:
    """Whether tracing is on in this process."""
    return _tracer is not None


def begin(
    name: str,
    parent: str | None,
    *,
    kind: Kind = "internal",
    root: bool = False,
    start_ns: int | None = None,
    **attributes: str | int,
) -> Span | None:
    """Begins a span; returns None when tracing is off or the span is not sampled.

    Args:
        name: name of the span.
        parent: traceparent of its parent. Without a valid parent there is no span, unless `root` is
            set.
        kind: OpenTelemetry's span kind.
        root: whether a span without a parent begins a trace.
        start_ns: its start in nanoseconds since 1970; None is now.
        attributes: its attributes; `task_id` becomes `penstock.task.id`.
    """
    if _tracer is None or (parent is None and not root):
        return None
    return _tracer.begin(name, parent, kind, start_ns, attributes, root=root)


@contextmanager
def span(
    name: str, parent: str | None, *, kind: Kind = "internal", root: bool = False, **attributes: str | int
) -> Iterator[Span | None]:
    """A span for the time of a block, in which it is current; see `begin`."""
    begun = begin(name, parent, kind=kind, root=root, start_ns=None, **attributes)
    if begun is None:
        yield None
        return
    try:
        with begun.current():
            yield begun
    except Exception as error:
        begun.fail(type(error).__name__)
        raise
    finally:
        begun.end()


def current_trace_id() -> str | None:
    """The id of the current trace, for logs."""
    return None if _tracer is None else _tracer.current_trace_id()
