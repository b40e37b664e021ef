"""Until when a reader knows everything that was written: what it needs in order to call silence silence.

Where a partition ended when it was asked for is a mark; once the reader is past the mark, it has read everything
written before the asking. Clocks of others play no part in it, and while the reader stands still, so does this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

P = TypeVar("P", bound=Hashable)


class ReadingProgress(Generic[P]):
    """How far the reading of partitions has come, in time."""

    def __init__(self) -> None:
        self._marks: dict[P, deque[tuple[int, float]]] = {}
        self._until_s: dict[P, float] = {}

    @property
    def until_s(self) -> Mapping[P, float]:
        """By partition: everything written before then was read. A partition nothing is known of is missing."""
        return self._until_s

    def asked(self, ends: Mapping[P, int], at_s: float) -> None:
        """Partitions ended at these offsets (behind their newest records) some time after `at_s`."""
        for partition, end in ends.items():
            self._marks.setdefault(partition, deque()).append((end, at_s))

    def read(self, expected: Mapping[P, int]) -> None:
        """The offsets that are to be read next; partitions that are not among them are no longer ours."""
        self.forget([partition for partition in self._marks if partition not in expected])
        for partition, marks in self._marks.items():
            while marks and marks[0][0] <= expected[partition]:
                self._until_s[partition] = marks.popleft()[1]

    def has_read(self, at_s: float) -> bool:
        """Whether everything asked about up to `at_s` was read."""
        return all(not marks or marks[0][1] > at_s for marks in self._marks.values())

    def forget(self, partitions: Iterable[P]) -> None:
        """These belong to another reader now."""
        for partition in partitions:
            self._marks.pop(partition, None)
            self._until_s.pop(partition, None)
