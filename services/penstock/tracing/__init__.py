"""Traces: one from the submission of a task through its stages to its callbacks, by OpenTelemetry.

Off unless an OTLP endpoint is named (OTEL_EXPORTER_OTLP_ENDPOINT, or …_TRACES_ENDPOINT): then nothing of OpenTelemetry is
imported, and whoever asks is answered None. Its settings are OpenTelemetry's own variables.

The submission begins the trace or goes on with its sender's, and decides with OTEL_TRACES_SAMPLER whether it is sampled. Only the
context of a sampled one is kept, as a W3C `traceparent`: in the task's row, in its ready records and in the headers of its callbacks. All that
comes later is done only where there is one, so a task that is not sampled costs nothing.

Fails open: what cannot be exported is dropped, and no task waits for a trace.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Literal, Protocol

log = logging.getLogger(__name__)

# The header of W3C Trace Context, of HTTP and of Kafka.
TRACEPARENT = "traceparent"

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

Kind = Literal["internal", "server", "client", "producer", "consumer"]


class Span(Protocol):
    """One that is sampled, and has begun."""

    @property
    def traceparent(self) -> str:
        """What belongs under it is given this."""

    def note(self, **attributes: str | int) -> None:
        """Adds attributes, named as by `begin`."""

    def fail(self, why: str) -> None:
        """What it is about went wrong."""

    def end(self, end_ns: int | None = None) -> None:
        """It is over, now or at that moment (nanoseconds since 1970)."""

    def current(self) -> AbstractContextManager[None]:
        """What is traced inside, by whomever, hangs under it."""


class Tracer(Protocol):
    """What makes spans (`penstock.tracing.spans`)."""

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
        """Of whatever span is current."""

    def shutdown(self) -> None:
        """Exports what is left."""


_tracer: Tracer | None = None


def configure(service: str) -> None:
    """Traces from now on if the environment names an endpoint; says so when what it takes is not installed.

    Args:
        service: `service.name` is `penstock-SERVICE`, unless OTEL_SERVICE_NAME says another.
    """
    global _tracer  # noqa: PLW0603 (one a process, like the provider of OpenTelemetry)
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return
    try:
        from penstock.tracing import spans  # noqa: PLC0415 (optional packages)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        log.warning("no traces: %s is not installed: pip install 'penstock[otel]'", error.name)
        return
    _tracer = spans.OtelTracer(service)


def shutdown() -> None:
    """Exports what is left, and traces no more."""
    global _tracer
    tracer, _tracer = _tracer, None
    if tracer is not None:
        tracer.shutdown()


def is_on() -> bool:
    """Whether this process traces."""
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
    """Begins a span; None when nothing is traced here.

    Args:
        name: of the span.
        parent: the traceparent that it belongs under; without one, or with one that cannot be read, there is none.
        kind: OpenTelemetry's.
        root: it begins a trace when it has no parent.
        start_ns: when it began, nanoseconds since 1970; None is now.
        attributes: shown behind `penstock.`; an underscore stands for a dot.
    """
    if _tracer is None or (parent is None and not root):
        return None
    return _tracer.begin(name, parent, kind, start_ns, attributes, root=root)


@contextmanager
def span(
    name: str, parent: str | None, *, kind: Kind = "internal", root: bool = False, **attributes: str | int
) -> Iterator[Span | None]:
    """A span for the time of a block, and the current one in it: what others trace inside hangs under it. As `begin`."""
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
