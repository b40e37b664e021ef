"""The samples that every Kafka processor (`penstock.kafka.processing.processor`) exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from penstock import metrics
from penstock.metrics import Sample

if TYPE_CHECKING:
    from penstock.kafka.processing.metrics import ProcessorMetrics


def position_samples(moved: Mapping[tuple[str, str], int], deleted: Mapping[str, int]) -> Iterator[Sample]:
    """The samples of a process's positions.

    Args:
        moved: positions that did not fit, by topic and reason.
        deleted: records that were deleted before they were read, by topic.
    """
    for (topic, reason), positions in moved.items():
        yield Sample(metrics.POSITIONS_MOVED, positions, (topic, reason))
    for topic, records in deleted.items():
        yield Sample(metrics.RECORDS_DELETED, records, (topic,))


def refusal_samples(refused: Mapping[tuple[str, str], int]) -> Iterator[Sample]:
    """The samples of the records of a process that Kafka refuses.

    Args:
        refused: by topic and reason.
    """
    for (topic, reason), records in refused.items():
        yield Sample(metrics.RECORDS_REFUSED, records, (topic, reason))


def processor_samples(processor: ProcessorMetrics) -> Iterator[Sample]:
    """The current samples of a processor."""
    yield Sample(metrics.IN_FLIGHT, processor.in_flight)
    yield Sample(metrics.GENERATIONS, processor.generations)
    yield Sample(metrics.WAITS, processor.waits)
    for topic, records in processor.lag.items():
        yield Sample(metrics.LAG, records, (topic,))
    yield from position_samples(processor.positions_moved, processor.records_deleted)
    yield from refusal_samples(processor.records_refused)
    for topic, records in processor.rejected.items():
        yield Sample(metrics.REJECTED, records, (topic,))
