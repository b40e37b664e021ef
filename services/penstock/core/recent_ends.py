"""Ends of tasks in the last minutes, counted in parts. Pure; the time is an argument.

Parts are kept, so that each end is read a few times only. A transaction may commit a while after
the moment that it writes. So the latest parts are read again, until they are `SETTLED_S` old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

PART_S = 10
MINUTES = 15
# A part that ended so long ago does not change any more.
SETTLED_S = 30

# The column of the series for each final state.
_OUTCOMES = {
    "succeeded": "succeeded",
    "failed": "failed",
    "quarantined": "failed",
    "cancelled": "cancelled",
}


class Ends(NamedTuple):
    """Ends of tasks of one type in one part."""

    type: str
    state: str
    part: int
    tasks: int


class RecentEnds:
    """The counts of the last `MINUTES`."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Ends]] = {}
        self._settled = 0

    def wanted_s(self, now_s: float) -> float:
        """The moment since which the ends must be read, in seconds since 1970."""
        first = int((now_s - MINUTES * 60) // 60 * 60)
        return max(first, self._settled * PART_S)

    def put(self, found: Iterable[Ends], until_s: float, now_s: float) -> None:
        """Replaces the counts since `wanted_s`.

        Args:
            found: the ends until `until_s`.
            until_s: a multiple of `PART_S`, or later than `now_s`.
            now_s: the present moment.
        """
        since = int(self.wanted_s(now_s) // PART_S)
        self._parts = {part: ends for part, ends in self._parts.items() if part < since}
        for each in found:
            self._parts.setdefault(each.part, []).append(each)
        self._settled = max(self._settled, int(min(until_s, now_s - SETTLED_S) // PART_S))
        oldest = int((now_s - (MINUTES + 1) * 60) // PART_S)
        self._parts = {part: ends for part, ends in self._parts.items() if part >= oldest}

    def minutes(self, now_s: float, covers: Callable[[str], bool]) -> list[tuple[int, Counter[str]]]:
        """The ends by outcome for each minute, the oldest first; the last minute is not over.

        Args:
            now_s: as of `put`.
            covers: whether a type is visible.
        """
        last = int(now_s // 60)
        series = {minute: Counter[str]() for minute in range(last - MINUTES + 1, last + 1)}
        for part, ends in self._parts.items():
            minute = part * PART_S // 60
            if minute in series:
                for each in ends:
                    if covers(each.type) and each.state in _OUTCOMES:
                        series[minute][_OUTCOMES[each.state]] += each.tasks
        return [(minute * 60, counts) for minute, counts in series.items()]
