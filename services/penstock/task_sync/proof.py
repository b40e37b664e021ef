"""Proves from offsets alone that a queued task has lost its record. Pure: no I/O, no clock.

An attempt travels as a record of its ready topic, as a claim on `heartbeats` and as a result on
`stage-results`. The readers of each topic commit past a record only when its content is on the next
topic or in PostgreSQL:

- a worker commits a ready record when its claim is written;
- the heartbeat processor commits a claim when the attempt is `running`, or its lease has ended
  (then its result is on Kafka);
- the stage processor commits a result when its transaction is committed.

The proof follows these topics. It records the end offsets of one topic, waits until its readers
have committed past them, and then records the end offsets of the next. Past the last topic,
everything that was in flight is in PostgreSQL. A task that has been queued unchanged since before
the first end offsets has no record.

When in doubt, nothing is proven: a task that is wrongly considered lost would run twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Station(Enum):
    """The topics on which an attempt can be on its way, in this order."""

    READY = 0
    HEARTBEATS = 1
    RESULTS = 2


@dataclass(frozen=True, slots=True)
class Offsets:
    """The offsets of one partition; `committed` was read first.

    Attributes:
        committed: offset that its readers have committed in this log; -1 when they have committed
            none.
        begin: offset of its oldest record.
        end: offset behind its newest record.
        topic_id: of its topic; None when it is not known.
    """

    committed: int
    begin: int
    end: int
    topic_id: str | None = None


PartitionOffsets = Mapping[int, Offsets]


def replaced(before: str | None, now: str | None) -> bool:
    """Whether a topic with another id has taken the place of one."""
    return None not in {before, now} and before != now


class Proof:
    """The proof for one type, from station to station.

    Args:
        offsets: of the ready topic's partitions, read after every task of the proof had its record
            there.
        replaced: the topic may have replaced another, whose readers may still have its records in
            flight. Then partitions that never held a record must be read, too.

    Attributes:
        station: the next one to check; past the last one the proof is complete.
    """

    def __init__(self, offsets: PartitionOffsets, *, replaced: bool = False) -> None:
        self.station = Station.READY
        self._replaced = replaced
        self._start_station(offsets)

    def _start_station(self, offsets: PartitionOffsets) -> None:
        self._ends = {number: partition.end for number, partition in offsets.items()}
        self._topic_ids = {number: partition.topic_id for number, partition in offsets.items()}
        # Committed for a deleted topic of the same name: this says nothing about the topic that
        # replaced it.
        self._stale = {number: p.committed for number, p in offsets.items() if p.committed > p.end}

    def shrunk(self, offsets: PartitionOffsets) -> bool:
        """Whether the topic was replaced since; then its end offsets prove nothing."""
        return any(
            number not in offsets
            or offsets[number].end < end
            or replaced(self._topic_ids[number], offsets[number].topic_id)
            for number, end in self._ends.items()
        )

    def passed(self, offsets: PartitionOffsets) -> bool:
        """Whether the readers of this station have committed past its end offsets."""
        return all(self._is_past(number, offsets[number]) for number in self._ends)

    def _is_past(self, number: int, offsets: Offsets) -> bool:
        end = self._ends[number]
        if end == 0 and not (self._replaced and self.station is Station.READY):
            return True  # the partition had no record
        return max(end, 1) <= offsets.committed <= offsets.end and offsets.committed != self._stale.get(
            number
        )

    def needs_marker(self, offsets: PartitionOffsets) -> set[int]:
        """Partitions whose readers cannot commit past the end: retention removed all records.

        A reader may have some of these records in flight for any time. It reads a new record behind
        them, so its commit past that marker shows that they are done.
        """
        return {
            number
            for number, end in self._ends.items()
            if not self._is_past(number, offsets[number])
            and offsets[number].begin == offsets[number].end >= end
        }

    def advance(self, offsets: PartitionOffsets) -> None:
        """Advances to the next station, whose offsets were read after this one was passed."""
        self.station = Station(self.station.value + 1)
        self._start_station(offsets)
