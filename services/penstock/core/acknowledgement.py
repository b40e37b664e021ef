"""Acknowledging in order what is finished out of order. Pure: no I/O, no clock.

A consumer's commit says "everything before this offset is done", so a record may be acknowledged only when all
records before it in its partition are. One `Sequence` is kept per partition and generation: what was in hand
when the partition was given away (or the group was rebalanced) belongs to a sequence that is simply dropped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(slots=True)
class _Entry:
    offset: int
    settled: bool = False


class Sequence:
    """The records of one partition that are in hand, in the order in which they came."""

    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()
        self._by_offset: dict[int, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def take(self, offset: int) -> bool:
        """A record has come; False when it is in hand already (then nothing changes)."""
        if offset in self._by_offset:
            return False
        entry = _Entry(offset)
        self._entries.append(entry)
        self._by_offset[offset] = entry
        return True

    def settle(self, offset: int) -> list[int]:
        """A record's effects are durable; returns the offsets that may be acknowledged now, in order.

        Settling twice, or what is not in hand, changes nothing.
        """
        entry = self._by_offset.get(offset)
        if entry is None:
            return []
        entry.settled = True
        free = []
        while self._entries and self._entries[0].settled:
            done = self._entries.popleft()
            del self._by_offset[done.offset]
            free.append(done.offset)
        return free
