"""The marks of progress of task-sync, for its stall detector.

Work in progress has a mark. Ingest without records or partitions has none, and neither has a full
window, which waits for workers. While the lag is unknown, reading and joining the group have none.
A stall ends the process; the next owner continues from PostgreSQL and the batch notes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from penstock.concurrency.stall_detector import StallDetector
from penstock.core.offset_tracker import Partition
from penstock.kafka.offset_reader import OffsetReader
from penstock.kafka.topics import SUBMITTED
from penstock.kafka.unread import UnreadPartitions
from penstock.task_sync.ingest import Ingest
from penstock.task_sync.release import ReleaseLoop


class Progress:
    """Watches ingest and release.

    Args:
        limit_s: seconds without progress that are a stall.
        offsets: asks the broker for the lag.
        ingest: names its work in progress, and its positions.
        release_loop: names its work in progress.

    Attributes:
        detector: raises when work makes no progress.
        unread: finds partitions of `submitted` that are not read on.
        lag: records of `submitted` that were not in PostgreSQL at the last poll.
    """

    def __init__(
        self, limit_s: float, offsets: OffsetReader, ingest: Ingest, release_loop: ReleaseLoop
    ) -> None:
        self._ingest = ingest
        self._release_loop = release_loop
        self.lag = 0
        self.detector = StallDetector(limit_s, self._marks)
        self.unread = UnreadPartitions(
            offsets,
            self._positions,
            lambda _partition: bool(ingest.progress()),
            self._set_lag,
            every_s=limit_s / 6,
            # One partition is always read, because joining the group needs a broker that answers.
            always=[(SUBMITTED.name, 0)],
        )

    def _set_lag(self, by_partition: Mapping[Partition, int]) -> None:
        self.lag = sum(by_partition.values())

    def _positions(self) -> dict[Partition, int]:
        return {(SUBMITTED.name, number): offset for number, offset in self._ingest.positions().items()}

    def _marks(self) -> dict[str, Hashable]:
        ingesting = self._ingest.progress()
        marks = self._release_loop.progress() | ingesting
        # While records of one partition are ingested, those of the others wait for them.
        if self.unread.stalled is None or ingesting:
            return marks
        marks |= self._ingest.group_progress()
        positions = self._positions()
        for partition, offset in self.unread.stalled.items():
            if positions.get(partition) == offset:
                marks[f"reading {partition[0]}/{partition[1]} from {offset}"] = offset
        return marks
