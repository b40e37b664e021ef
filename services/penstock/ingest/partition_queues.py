"""The records of each partition that were read and are not inserted yet. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

from penstock.core.admission import PartitionLoad


class PartitionQueues:
    """Waiting records by partition, and the load of each partition.

    Its load is what waits and what a lane is inserting.

    Args:
        batch_rows: records of a batch.
        batch_bytes: bytes of the values of a batch; None for any number.
    """

    def __init__(self, batch_rows: int, batch_bytes: int | None) -> None:
        self._batch_rows = batch_rows
        self._batch_bytes = batch_bytes
        self._waiting: defaultdict[int, deque[Any]] = defaultdict(deque)
        self._drops: Counter[int] = Counter()
        self._loads: defaultdict[int, PartitionLoad] = defaultdict(lambda: PartitionLoad(0, 0))

    def add(self, number: int, records: Sequence[Any]) -> None:
        """Appends records of a partition."""
        self._waiting[number] += records
        self._count(number, records, 1)

    def put_back(self, number: int, records: Sequence[Any], drops: int) -> None:
        """Puts records that were not inserted before the others.

        Args:
            number: the partition.
            records: of its last batch.
            drops: as `drops` was when the batch was taken. If records were dropped since, these are
                read again with those before them.
        """
        if drops == self._drops[number]:
            self._waiting[number].extendleft(reversed(records))
            self._count(number, records, 1)

    def take(self, number: int, most: int) -> list[Any]:
        """Removes the next batch: at least one record, if there is any. It counts until `end`.

        Args:
            number: the partition.
            most: records, if a batch may have so many.
        """
        waiting = self._waiting[number]
        records: list[Any] = []
        size_bytes = 0
        while waiting and len(records) < min(most, self._batch_rows):
            size_bytes += len(waiting[0].value or b"")
            if records and self._batch_bytes is not None and size_bytes > self._batch_bytes:
                break
            records.append(waiting.popleft())
        return records

    def end(self, number: int, records: Sequence[Any]) -> None:
        """A batch is inserted, or dropped, or is put back next."""
        self._count(number, records, -1)

    def drop(self, number: int) -> None:
        """Drops the waiting records of a partition, which will be read again."""
        self._drops[number] += 1
        waiting = self._waiting[number]
        self._count(number, waiting, -1)
        waiting.clear()

    def drops(self, number: int) -> int:
        """How often waiting records of a partition were dropped."""
        return self._drops[number]

    def waiting(self, number: int) -> int:
        """Records of a partition that no lane has taken."""
        return len(self._waiting[number])

    def load(self, number: int) -> PartitionLoad:
        """The load of a partition."""
        return self._loads[number]

    @property
    def rows(self) -> int:
        """Records of all partitions."""
        return sum(load.rows for load in self._loads.values())

    def _count(self, number: int, records: Iterable[Any], sign: int) -> None:
        rows = size_bytes = 0
        for record in records:
            rows += 1
            size_bytes += len(record.value or b"")
        load = self._loads[number]
        self._loads[number] = PartitionLoad(load.rows + sign * rows, load.size_bytes + sign * size_bytes)
