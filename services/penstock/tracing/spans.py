"""Spans by OpenTelemetry's SDK: imported only where traces are configured."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
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
    """One that is sampled, and has begun.

    Attributes:
        traceparent: what belongs under it is given this.
    """

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-01"

    def note(self, **attributes: str | int) -> None:
        """Adds attributes, named as by `begin`."""
        self._span.set_attributes(_named(attributes))

    def fail(self, why: str) -> None:
        """What it is about went wrong."""
        self._span.set_status(trace.StatusCode.ERROR, why)

    def end(self, end_ns: int | None = None) -> None:
        """It is over, now or at that moment."""
        self._span.end(end_ns)

    @contextmanager
    def current(self) -> Iterator[None]:
        """What is traced inside, by whomever, hangs under it."""
        with trace.use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield


class OtelTracer:
    """Makes spans.

    Args:
        service: see `penstock.tracing.configure`.
    """

    def __init__(self, service: str) -> None:
        self._own: TracerProvider | None = None
        provider = trace.get_tracer_provider()
        # A worker's program may have one of its own: its spans and ours then go the same way.
        if isinstance(provider, trace.ProxyTracerProvider):
            named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"penstock-{service}"}
            provider = self._own = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
            provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
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
        """See `penstock.tracing.begin`; None when it is not sampled."""
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
        """Of whatever span is current."""
        context = trace.get_current_span().get_span_context()
        return f"{context.trace_id:032x}" if context.is_valid else None

    def shutdown(self) -> None:
        """Exports what is left."""
        if self._own is not None:
            self._own.shutdown()


def _named(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {f"penstock.{name.replace('_', '.')}": value for name, value in attributes.items()}
