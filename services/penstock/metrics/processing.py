"""The samples that every Kafka processor (`penstock.kafka.processor`) exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from penstock import metrics
from penstock.metrics import Sample


class ProcessorMetrics(Protocol):
    """The numbers of a processor. A protocol, because adapters do not import each other."""

    @property
    def in_flight(self) -> int:
        """Records fetched and not acknowledged."""

    @property
    def generations(self) -> int:
        """Generations of its consumer group that it has joined."""

    @property
    def lag(self) -> Mapping[str, int]:
        """Records not fetched yet at the last measurement, by topic."""

    @property
    def rejected(self) -> Mapping[str, int]:
        """Records, or parts of records, that were rejected, by topic."""

    @property
    def waits(self) -> int:
        """Times that records waited for Kafka or PostgreSQL."""


def processor_samples(processor: ProcessorMetrics) -> Iterator[Sample]:
    """The current samples of a processor."""
    yield Sample(metrics.IN_FLIGHT, processor.in_flight)
    yield Sample(metrics.GENERATIONS, processor.generations)
    yield Sample(metrics.WAITS, processor.waits)
    for topic, records in processor.lag.items():
        yield Sample(metrics.LAG, records, (topic,))
    for topic, records in processor.rejected.items():
        yield Sample(metrics.REJECTED, records, (topic,))
