"""The progress of ingest, for the stall detector of its service, and the lag.

Work in progress has a value. Ingest without records or partitions has none. While the lag is
unknown, reading and joining the group have none.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from penstock.core.offset_tracker import Partition
from penstock.ingest.reader import Ingest
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.kafka.processing.unread import UnreadPartitions


class IngestProgress:
    """Watches the ingest of a process.

    Args:
        limit_s: seconds without progress that are a stall.
        offsets: asks the broker for the lag.
        ingests: of different topics.

    Attributes:
        unread: finds partitions that are not read on; its `run` polls the lag.
        lag: by topic, records that were not in PostgreSQL at the last poll.
    """

    def __init__(self, limit_s: float, offsets: OffsetReader, ingests: Sequence[Ingest[Any]]) -> None:
        self._ingests = {ingest.topic: ingest for ingest in ingests}
        self.lag = dict.fromkeys(self._ingests, 0)
        self.unread = UnreadPartitions(
            offsets,
            self._positions,
            lambda partition: self._ingests[partition[0]].is_busy(partition[1]),
            self._set_lag,
            every_s=limit_s / 6,
            # One partition is always read, because joining the group needs a broker that answers.
            always=[(topic, 0) for topic in self._ingests],
        )

    def progress(self) -> dict[str, Hashable]:
        """Work in progress, each with a value that changes as it advances; empty at rest."""
        progress: dict[str, Hashable] = {}
        for topic, ingest in self._ingests.items():
            progress |= ingest.progress()
            if self.unread.stalled is None:
                continue
            progress |= ingest.group_progress()
            positions = ingest.positions()
            for (name, number), offset in self.unread.stalled.items():
                if name == topic and positions.get(number) == offset and not ingest.is_busy(number):
                    progress[f"reading {name}/{number} from {offset}"] = offset
        return progress

    def _set_lag(self, by_partition: Mapping[Partition, int]) -> None:
        self.lag = dict.fromkeys(self._ingests, 0)
        for (topic, _), records in by_partition.items():
            self.lag[topic] += records

    def _positions(self) -> dict[Partition, int]:
        return {
            (topic, number): offset
            for topic, ingest in self._ingests.items()
            for number, offset in ingest.positions().items()
        }
