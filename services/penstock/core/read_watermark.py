"""The time until which a reader has read everything that was written.

A mark is a partition's end and the time at which the broker was asked for it. Once the reader has
passed the mark, it has read everything that was written before that time. Only the reader's own
clock counts, and while the reader stands still the watermark does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)

# Marks of one partition that a reader has not passed. Above this the last one moves, so that a
# reader that is away for days costs no memory.
MOST_MARKS = 1_000


class ReadWatermark(Generic[P]):
    """How far partitions are read, in time."""

    def __init__(self) -> None:
        self._marks: dict[P, deque[tuple[int, float]]] = {}
        self._until_s: dict[P, float] = {}

    @property
    def until_s(self) -> Mapping[P, float]:
        """By partition: all records written before then are read; without a mark, none is known."""
        return self._until_s

    def asked(self, ends: Mapping[P, int], at_s: float) -> None:
        """Adds marks: at some time after `at_s` the partitions ended at these offsets."""
        for partition, end in ends.items():
            marks = self._marks.setdefault(partition, deque())
            # A log that lost its tail ends before an earlier mark, which its reader never passes.
            # It has read what is left once it passes the new one.
            while marks and marks[-1][0] >= end:
                marks.pop()
            if len(marks) >= MOST_MARKS:
                marks.pop()
            marks.append((end, at_s))

    def read(self, expected: Mapping[P, int]) -> None:
        """Passes marks, by the next offsets; drops partitions without one."""
        self.drop([partition for partition in self._marks if partition not in expected])
        for partition, marks in self._marks.items():
            while marks and marks[0][0] <= expected[partition]:
                self._until_s[partition] = marks.popleft()[1]

    def has_read(self, at_s: float) -> bool:
        """Whether all marks are passed, the last of which was added at `at_s`."""
        return all(not marks or marks[0][1] > at_s for marks in self._marks.values())

    @property
    def all_until_s(self) -> float:
        """All records of all partitions that were written before then are read."""
        return min((self._until_s.get(partition, -math.inf) for partition in self._marks), default=math.inf)

    def drop(self, partitions: Iterable[P]) -> None:
        """Drops partitions that another reader has now."""
        for partition in partitions:
            self._marks.pop(partition, None)
            self._until_s.pop(partition, None)
