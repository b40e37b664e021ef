"""Metrics of a processor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.core.offset_tracker import OffsetTracker, Partition
from penstock.kafka.client import positions
from penstock.kafka.client.refusals import refused_by_topic


class ProcessorMetrics:
    """Plain numbers, read at each scrape.

    Attributes:
        rejected: records, or parts of them, that were rejected, by topic.
        lag: records that were not read yet at the last poll, by topic.
        waits: retries because a server was unavailable.
        generations: generations of its group that it has joined.

    Args:
        tracker: of the records in flight.
        topics: that it reads (bare names).
        prefix: of the topics.
    """

    def __init__(self, tracker: OffsetTracker, topics: Iterable[str], prefix: str = "") -> None:
        self._prefix = prefix
        self._tracker = tracker
        self.rejected = dict.fromkeys(topics, 0)
        self.lag = dict.fromkeys(self.rejected, 0)
        self.waits = 0
        self.generations = 0

    @property
    def in_flight(self) -> int:
        """Records that are read and not acknowledged."""
        return len(self._tracker)

    @property
    def positions_moved(self) -> Mapping[tuple[str, str], int]:
        """Stored positions that did not fit their topic, by topic and reason."""
        return positions.moved_by_topic(self._prefix, self.rejected)

    @property
    def records_deleted(self) -> Mapping[str, int]:
        """Records that were deleted before they were read, by topic."""
        return positions.deleted_by_topic(self._prefix, self.rejected)

    @property
    def records_refused(self) -> Mapping[tuple[str, str], int]:
        """Records of this process that Kafka has refused, by topic and reason."""
        return refused_by_topic(self._prefix)

    def set_lag(self, by_partition: Mapping[Partition, int]) -> None:
        """Stores the lag by topic."""
        lag = dict.fromkeys(self.lag, 0)
        for (topic, _number), records in by_partition.items():
            lag[topic] += records
        self.lag = lag
