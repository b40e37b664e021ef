"""Whether what is queued can still have a record, told by offsets alone. Pure: no I/O, no clock.

An attempt travels as a record of its ready topic, as a claim on `heartbeats` and as a result on `stage-results`.
Whoever reads one of these topics commits past a record only when what it said is on the next topic or in
PostgreSQL: a worker when its claim is written, the heartbeat processor when the claim is `running` or released (its
result is on Kafka by then), the stage processor when the result is committed. So the topics are stations: the ends of
one are noted, and when its readers have committed past them, the ends of the next. Past the last, all that was under
way is in PostgreSQL; what is queued there, unchanged since before the first ends were noted, has no record.

In doubt nothing is proven: a task wrongly taken for lost would run twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Station(Enum):
    """Where an attempt can be under way, in this order."""

    READY = 0
    HEARTBEATS = 1
    RESULTS = 2


@dataclass(frozen=True, slots=True)
class Offsets:
    """One partition, seen once: `committed` was read first.

    Attributes:
        committed: what its readers have committed; -1 when nothing.
        begin: its oldest record.
        end: behind its newest record.
    """

    committed: int
    begin: int
    end: int


Seen = Mapping[int, Offsets]


class Proof:
    """The proof for one type, from station to station.

    Args:
        seen: the partitions of the ready topic, each of whose tasks had its record there before this look.
        replaced: the topic may have replaced another whose readers still have records of it in hand. Then also a
            partition that has never held anything must be read once.

    Attributes:
        station: the one to look at next; past the last one it is complete.
    """

    def __init__(self, seen: Seen, *, replaced: bool = False) -> None:
        self.station = Station.READY
        self._replaced = replaced
        self._arrive(seen)

    def _arrive(self, seen: Seen) -> None:
        self._ends = {number: offsets.end for number, offsets in seen.items()}
        # Committed by readers of a topic that was deleted: says nothing about the one that took its name.
        self._stale = {number: o.committed for number, o in seen.items() if o.committed > o.end}

    def shrunk(self, seen: Seen) -> bool:
        """Whether the topic was replaced since: then there is nothing to prove with these ends."""
        return any(number not in seen or seen[number].end < end for number, end in self._ends.items())

    def passed(self, seen: Seen) -> bool:
        """Whether the readers of this station are past its ends."""
        return all(self._past(number, seen[number]) for number in self._ends)

    def _past(self, number: int, offsets: Offsets) -> bool:
        end = self._ends[number]
        if end == 0 and not (self._replaced and self.station is Station.READY):
            return True  # there was nothing to read
        return max(end, 1) <= offsets.committed <= offsets.end and offsets.committed != self._stale.get(
            number
        )

    def unreadable(self, seen: Seen) -> set[int]:
        """Partitions past whose ends nobody will commit, since all that was before them is gone.

        A reader may have some of it in hand, uncommitted, for as long as it likes. What is written there now is read
        behind that, so the commit past it tells.
        """
        return {
            number
            for number, end in self._ends.items()
            if not self._past(number, seen[number]) and seen[number].begin == seen[number].end >= end
        }

    def go_on(self, seen: Seen) -> None:
        """On to the next station, whose partitions were looked at after this one was passed."""
        self.station = Station(self.station.value + 1)
        self._arrive(seen)
