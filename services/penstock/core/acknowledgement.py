"""Acknowledging in order what is finished out of order. Pure: no I/O, no clock.

A consumer's commit says "everything before this offset is done", so an offset may be committed only when all
records before it in its partition are settled. What is in hand belongs to a generation of the consumer group:
when a new one begins every partition is read again from its committed offset, and what was in hand is dropped.

In doubt a record counts as unsettled: it is delivered again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum

# The topic's name and the partition's number.
Partition = tuple[str, int]

# So many settled records, of each of which an offset is kept, fill the hand as one that is not settled does.
SETTLED_WEIGH = 10


class Arrival(Enum):
    """How a record fits behind the ones that came before it."""

    NEXT = "next"  # the one expected; it is in hand now
    REPEATED = "repeated"  # it came before in this generation
    AHEAD = "ahead"  # others should have come first
    FOREIGN = "foreign"  # of another generation, or of a partition that is not ours


class Sequence:
    """The records of one partition in one generation.

    Args:
        start: offset of the first record to come.

    Attributes:
        expected: offset of the record that comes next.
        frontier: everything before this offset is settled; what a commit may say.
    """

    __slots__ = ("_order", "_unsettled", "expected", "frontier")

    def __init__(self, start: int) -> None:
        self.expected = self.frontier = start
        # Offsets from the frontier on, in order, settled or not; and those of them that are not.
        self._order: deque[int] = deque()
        self._unsettled: set[int] = set()

    def __len__(self) -> int:
        return len(self._order)

    @property
    def unsettled(self) -> int:
        """Records in hand whose effects are not durable yet."""
        return len(self._unsettled)

    def arrive(self, offset: int) -> Arrival:
        """Takes a record in hand if it is the one expected."""
        if offset != self.expected:
            return Arrival.REPEATED if offset < self.expected else Arrival.AHEAD
        self._order.append(offset)
        self._unsettled.add(offset)
        self.expected = offset + 1
        return Arrival.NEXT

    def skip_to(self, offset: int) -> None:
        """What lies between the record expected and this one does not exist (any more)."""
        self.expected = max(offset, self.expected)
        if not self._order:
            self.frontier = self.expected

    def settle(self, offset: int) -> int:
        """A record's effects are durable; returns by how many records the frontier moved.

        Settling twice, or what is not in hand, changes nothing.
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


class Hand:
    """All that a process has in hand: taken and not yet acknowledged.

    A record that is settled behind one that is not still counts, though little: it costs little memory, and one that
    takes long must not stop all that comes behind it.

    Args:
        limit: most records in hand that are not settled; of settled ones, `SETTLED_WEIGH` count as one.

    Attributes:
        limit: as given.
        generation: of the consumer group; -1 before the first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.generation = -1
        self._count = 0
        self._sequences: dict[Partition, Sequence] = {}
        self._committed: dict[Partition, int] = {}

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        """Whether nothing more may be taken."""
        if self._count < self.limit:
            return False
        unsettled = sum(sequence.unsettled for sequence in self._sequences.values())
        return unsettled + (self._count - unsettled) // SETTLED_WEIGH >= self.limit

    def begin(self, generation: int, starts: Mapping[Partition, int]) -> None:
        """A new generation: what was in hand is dropped.

        Args:
            generation: its number.
            starts: this process's partitions now, with the offset of the first record to come in each.
        """
        self.generation = generation
        self._count = 0
        self._sequences = {partition: Sequence(start) for partition, start in starts.items()}
        self._committed = dict(starts)

    def arrive(self, generation: int, partition: Partition, offset: int) -> Arrival:
        """Takes a record in hand if it is this generation's and the one expected."""
        sequence = self._sequences.get(partition)
        if sequence is None or generation != self.generation:
            return Arrival.FOREIGN
        arrival = sequence.arrive(offset)
        if arrival is Arrival.NEXT:
            self._count += 1
        return arrival

    def skip_to(self, generation: int, partition: Partition, offset: int) -> None:
        """What lies between the record expected and this one does not exist (any more)."""
        if generation == self.generation and partition in self._sequences:
            self._sequences[partition].skip_to(offset)

    def settle(self, generation: int, partition: Partition, offset: int) -> None:
        """A record's effects are durable; ignored when its generation is over."""
        if generation == self.generation and partition in self._sequences:
            self._count -= self._sequences[partition].settle(offset)

    def expected(self) -> dict[Partition, int]:
        """The offset that comes next, by partition."""
        return {partition: sequence.expected for partition, sequence in self._sequences.items()}

    def held(self) -> dict[Partition, int]:
        """The offset of the oldest record in hand, for each partition that has one."""
        return {partition: s.frontier for partition, s in self._sequences.items() if len(s)}

    def committable(self) -> dict[Partition, int]:
        """Offsets to commit: those that have moved since `committed` was told of them."""
        return {
            partition: sequence.frontier
            for partition, sequence in self._sequences.items()
            if sequence.frontier > self._committed[partition]
        }

    def committed(self, offsets: Mapping[Partition, int]) -> None:
        """Kafka has these offsets (an old generation's say nothing about this one)."""
        for partition, offset in offsets.items():
            if offset <= self._committed.get(partition, -1):
                continue
            self._committed[partition] = offset
