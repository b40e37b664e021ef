"""Finds the offsets to commit of records that are settled out of order. Pure: no I/O, no clock.

A committed offset means that all records before it are done, so an offset may be committed only
when all records before it in its partition are settled. Records in flight belong to a generation of
the consumer group. When a new one begins, every partition is read again from its committed offset,
and the records in flight are dropped.

A record of unknown state counts as unsettled and is delivered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum

# The topic's name and the partition's number.
Partition = tuple[str, int]

# This many settled records behind an unsettled one count as one record against the limit, because
# they use little memory.
SETTLED_PER_RECORD = 10


class Arrival(Enum):
    """How a record follows the records before it."""

    NEXT = "next"  # the expected one; it is in flight now
    REPEATED = "repeated"  # it arrived before in this generation
    AHEAD = "ahead"  # records before it are missing
    FOREIGN = "foreign"  # of another generation, or of a partition of another member


class PartitionOffsets:
    """The records of one partition in one generation.

    Args:
        start: offset of the first record.

    Attributes:
        expected: offset of the next record.
        frontier: all records before this offset are settled, so it may be committed.
    """

    __slots__ = ("_order", "_unsettled", "expected", "frontier")

    def __init__(self, start: int) -> None:
        self.expected = self.frontier = start
        # Offsets from the frontier on, in order; and those of them that are not settled.
        self._order: deque[int] = deque()
        self._unsettled: set[int] = set()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def unsettled(self) -> int:
        """Records in flight whose effects are not durable yet."""
        return len(self._unsettled)

    def arrive(self, offset: int) -> Arrival:
        """Adds a record if it is the expected one."""
        if offset != self.expected:
            return Arrival.REPEATED if offset < self.expected else Arrival.AHEAD
        self._order.append(offset)
        self._unsettled.add(offset)
        self.expected = offset + 1
        return Arrival.NEXT

    def skip_to(self, offset: int) -> None:
        """Skips offsets without a record, from the expected one to this one."""
        self.expected = max(offset, self.expected)
        if not self._order:
            self.frontier = self.expected

    def settle(self, offset: int) -> int:
        """Settles a record; returns by how many records the frontier moved.

        A record that is settled already, or not in flight, changes nothing.
        """
        if offset not in self._unsettled:
            return 0
        self._unsettled.remove(offset)
        moved = 0
        while self._order and self._order[0] not in self._unsettled:
            self._order.popleft()
            moved += 1
        self.frontier = self._order[0] if self._order else self.expected
        return moved


class CommittableOffsets:
    """The offsets of the partitions that a consumer reads, and those that Kafka has."""

    def __init__(self) -> None:
        self._partitions: dict[Partition, PartitionOffsets] = {}
        self._committed: dict[Partition, int] = {}

    def committable(self) -> dict[Partition, int]:
        """Offsets to commit: those that have moved since the last commit."""
        return {
            partition: offsets.frontier
            for partition, offsets in self._partitions.items()
            if offsets.frontier > self._committed[partition]
        }

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Stores offsets that Kafka has; smaller ones than before change nothing."""
        for partition, offset in offsets.items():
            self._committed[partition] = max(offset, self._committed.get(partition, -1))


class OffsetTracker(CommittableOffsets):
    """The records that a process has in flight: read and not yet acknowledged.

    A settled record behind an unsettled one counts little, so that a slow record does not stop all
    those behind it.

    Args:
        limit: most records in flight; of settled ones, `SETTLED_PER_RECORD` count as one.

    Attributes:
        limit: as given.
        generation: of the consumer group; -1 before the first.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.generation = -1
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        """Whether no more records may be read."""
        if self._count < self.limit:
            return False
        unsettled = sum(offsets.unsettled for offsets in self._partitions.values())
        return unsettled + (self._count - unsettled) // SETTLED_PER_RECORD >= self.limit

    def begin(self, generation: int, starts: Mapping[Partition, int]) -> None:
        """Begins a generation and drops the records in flight.

        Args:
            generation: its number.
            starts: this process's partitions, with the offset of the first record of each.
        """
        self.generation = generation
        self._count = 0
        self._partitions = {partition: PartitionOffsets(start) for partition, start in starts.items()}
        self._committed = dict(starts)

    def arrive(self, generation: int, partition: Partition, offset: int) -> Arrival:
        """Adds a record if it is of this generation and the expected one."""
        offsets = self._partitions.get(partition)
        if offsets is None or generation != self.generation:
            return Arrival.FOREIGN
        arrival = offsets.arrive(offset)
        if arrival is Arrival.NEXT:
            self._count += 1
        return arrival

    def skip_to(self, generation: int, partition: Partition, offset: int) -> None:
        """Skips offsets without a record, from the expected one to this one."""
        if generation == self.generation and partition in self._partitions:
            self._partitions[partition].skip_to(offset)

    def settle(self, generation: int, partition: Partition, offset: int) -> None:
        """Settles a record, whose effects are durable; ignored when its generation is over."""
        if generation == self.generation and partition in self._partitions:
            self._count -= self._partitions[partition].settle(offset)

    def expected(self) -> dict[Partition, int]:
        """The offset of the next record, by partition."""
        return {partition: offsets.expected for partition, offsets in self._partitions.items()}

    def oldest(self) -> dict[Partition, int]:
        """The offset of the oldest record in flight, by partition that has one."""
        return {
            partition: offsets.frontier for partition, offsets in self._partitions.items() if len(offsets)
        }
