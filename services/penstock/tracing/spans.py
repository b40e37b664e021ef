"""Spans of OpenTelemetry's SDK; this module is imported only when tracing is on."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import penstock
from penstock.tracing import TRACEPARENT, Kind

_KINDS: Mapping[Kind, trace.SpanKind] = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
    "producer": trace.SpanKind.PRODUCER,
    "consumer": trace.SpanKind.CONSUMER,
}
_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]")


class OtelSpan:
    """A sampled span that has begun.

    Attributes:
        traceparent: the parent of child spans.
    """

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def set_attributes(self, **attributes: str | int) -> None:
        """Adds attributes, named as by `begin`."""
        self._span.set_attributes(_named(attributes))

    def fail(self, reason: str) -> None:
        """Sets the status of the span to error."""
        self._span.set_status(trace.StatusCode.ERROR, reason)

    def end(self, end_ns: int | None = None) -> None:
        """Ends the span, now or at a time in nanoseconds since 1970."""
        self._span.end(end_ns)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Makes the span the current one inside the block."""
        with trace.use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield


class ProcessExporter(SpanExporter):
    """Exports spans on connections of this process: a forked child does not use its parent's.

    Args:
        connect: makes an exporter, which has connections.
    """

    def __init__(self, connect: Callable[[], SpanExporter] = OTLPSpanExporter) -> None:
        self._connect = connect
        self._exporter = connect()
        self._process = os.getpid()
        # It is kept, because it would be closed when it is collected.
        self._inherited: SpanExporter | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Exports a batch."""
        if self._process != os.getpid():
            self._inherited, self._exporter = self._exporter, self._connect()
            self._process = os.getpid()
        return self._exporter.export(spans)

    def shutdown(self) -> None:
        """Closes the connections."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Does nothing: an exporter keeps no spans."""
        return self._exporter.force_flush(timeout_millis)


class OtelTracer:
    """Creates spans.

    Args:
        service: see `penstock.tracing.configure`.
    """

    def __init__(self, service: str) -> None:
        self._own: TracerProvider | None = None
        provider = trace.get_tracer_provider()
        # A worker's program may have configured a provider. Its spans and Penstock's then share one
        # exporter.
        if isinstance(provider, trace.ProxyTracerProvider):
            named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"penstock-{service}"}
            provider = self._own = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(ProcessExporter()))
            trace.set_tracer_provider(provider)
        self._tracer = provider.get_tracer("penstock", penstock.__version__)

    def begin(
        self,
        name: str,
        parent: str | None,
        kind: Kind,
        start_ns: int | None,
        attributes: Mapping[str, str | int],
        *,
        root: bool,
    ) -> OtelSpan | None:
        """See `penstock.tracing.begin`."""
        context = Context()
        if parent is not None:
            if not root and not _SAMPLED.fullmatch(parent):
                return None
            context = _PROPAGATOR.extract({TRACEPARENT: parent}, context)
        span = self._tracer.start_span(
            name, context, _KINDS[kind], attributes=_named(attributes), start_time=start_ns
        )
        return OtelSpan(span) if span.is_recording() else None

    def current_trace_id(self) -> str | None:
        """The trace id of the current span, or None."""
        context = trace.get_current_span().get_span_context()
        return f"{context.trace_id:032x}" if context.is_valid else None

    def shutdown(self) -> None:
        """Exports the remaining spans."""
        if self._own is not None:
            self._own.shutdown()


def _named(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"penstock.{name.replace('_', '.')}": value for name, value in attributes.items()}
