"""One partition from a seek on: its position, and the records behind it. No I/O but the log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from aiokafka import TopicPartition

from penstock.core.admission import PartitionLoad
from penstock.core.position import Position
from penstock.errors import LockConflict, ObjectsUnavailable

log = logging.getLogger(__name__)


class SoughtPartition:
    """A partition whose records are read and inserted; each seek makes another one.

    Args:
        tp: the partition.
        position: from which its records are read.

    Attributes:
        tp: as given.
        number: of the partition.
        next: offset of the next record; all before it are in PostgreSQL.
        identity: stored beside that offset.
        held: why its next record waits; None when it does not.
        rejected: offsets whose rejections are written: a record that is held is read again.
        load: what waits, and what a lane is inserting.
    """

    def __init__(self, tp: TopicPartition, position: Position) -> None:
        self.tp = tp
        self.number: int = tp.partition
        self.next = position.offset
        self.identity: str | None = position.identity()
        self.held: ObjectsUnavailable | LockConflict | None = None
        self.rejected: set[int] = set()
        self.load = PartitionLoad(0, 0)
        self._waiting: deque[Any] = deque()

    @property
    def waiting(self) -> int:
        """Records that no lane has taken."""
        return len(self._waiting)

    def add(self, records: Sequence[Any]) -> None:
        """Appends records."""
        self._waiting += records
        self._count(records, 1)

    def take(self, most: int, size_bytes: int | None) -> list[Any]:
        """Removes the next batch: at least one record, if there is any. It counts until `end`.

        Args:
            most: records.
            size_bytes: of the values; None for any number.
        """
        records: list[Any] = []
        taken_bytes = 0
        while self._waiting and len(records) < most:
            taken_bytes += len(self._waiting[0].value or b"")
            if records and size_bytes is not None and taken_bytes > size_bytes:
                break
            records.append(self._waiting.popleft())
        return records

    def end(self, records: Sequence[Any], held: Sequence[Any]) -> None:
        """A batch is inserted, but for the records that are held: they are the next ones."""
        self._count(records, -1)
        self._waiting.extendleft(reversed(held))
        self._count(held, 1)

    def advance(self, following: int, identity: str | None) -> None:
        """The records before an offset are in PostgreSQL."""
        self.next, self.identity = following, identity
        self.rejected = {offset for offset in self.rejected if offset >= following}

    def hold(self, offset: int, reason: ObjectsUnavailable | LockConflict) -> None:
        """Holds it at the record of an offset, and says so once for each reason."""
        if str(self.held) != str(reason):
            log.warning(
                "A partition waits at its next record",
                extra={
                    "event": "partition_held",
                    "topic": self.tp.topic,
                    "partition": self.number,
                    "offset": offset,
                    "error": reason,
                },
            )
        self.held = reason

    def _count(self, records: Iterable[Any], sign: int) -> None:
        rows = size_bytes = 0
        for record in records:
            rows += 1
            size_bytes += len(record.value or b"")
        self.load = PartitionLoad(self.load.rows + sign * rows, self.load.size_bytes + sign * size_bytes)
