"""What a processor (`penstock.kafka.processor`) tells of itself, as samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from penstock import metrics
from penstock.metrics import Sample


class Processing(Protocol):
    """The figures of a processor; adapters do not import each other."""

    @property
    def in_hand(self) -> int:
        """Records taken and not settled."""

    @property
    def generations(self) -> int:
        """Generations of its group that it has been in."""

    @property
    def lag(self) -> Mapping[str, int]:
        """Records not taken yet when it last looked, by topic."""

    @property
    def rejected(self) -> Mapping[str, int]:
        """Records, or parts of them, that were parked, by topic."""

    @property
    def waits(self) -> int:
        """Times that a server was waited for."""


def of_processor(processor: Processing) -> Iterator[Sample]:
    """Its figures as they are now."""
    yield Sample(metrics.IN_HAND, processor.in_hand)
    yield Sample(metrics.GENERATIONS, processor.generations)
    yield Sample(metrics.WAITS, processor.waits)
    for topic, records in processor.lag.items():
        yield Sample(metrics.LAG, records, (topic,))
    for topic, records in processor.rejected.items():
        yield Sample(metrics.REJECTED, records, (topic,))
