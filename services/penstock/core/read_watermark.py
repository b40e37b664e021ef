"""The time until which a reader has read everything that was written.

An end is a partition's end offset with the time at which the broker was asked for it. Once the
reader has passed the end, it has read everything that was written before that time. Only the
reader's own clock counts, and while the reader stands still the watermark does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)

# Ends of one partition that a reader has not passed. Above this the last one moves, so that a
# reader that is away for days costs no memory.
MOST_ENDS = 1_000


class ReadWatermark(Generic[P]):
    """How far partitions are read, in time."""

    def __init__(self) -> None:
        self._ends: dict[P, deque[tuple[int, float]]] = {}
        self._until_s: dict[P, float] = {}

    @property
    def until_s(self) -> Mapping[P, float]:
        """By partition: all records written before then are read; without an end, none is known."""
        return self._until_s

    def asked(self, ends: Mapping[P, int], at_s: float) -> None:
        """Adds ends: at some time after `at_s` the partitions ended at these offsets."""
        for partition, end in ends.items():
            asked = self._ends.setdefault(partition, deque())
            # A log that lost its tail ends before an earlier end, which its reader never passes.
            # It has read what is left once it passes the new one.
            while asked and asked[-1][0] >= end:
                asked.pop()
            if len(asked) >= MOST_ENDS:
                asked.pop()
            asked.append((end, at_s))

    def read(self, expected: Mapping[P, int]) -> None:
        """Passes ends, by the next offsets; drops partitions without one."""
        self.drop([partition for partition in self._ends if partition not in expected])
        for partition, asked in self._ends.items():
            while asked and asked[0][0] <= expected[partition]:
                self._until_s[partition] = asked.popleft()[1]

    def has_read(self, at_s: float) -> bool:
        """Whether all ends are passed, the last of which was added at `at_s`."""
        return all(not asked or asked[0][1] > at_s for asked in self._ends.values())

    @property
    def all_until_s(self) -> float:
        """All records of all partitions that were written before then are read."""
        return min((self._until_s.get(partition, -math.inf) for partition in self._ends), default=math.inf)

    def drop(self, partitions: Iterable[P]) -> None:
        """Drops partitions that another reader has now."""
        for partition in partitions:
            self._ends.pop(partition, None)
            self._until_s.pop(partition, None)
