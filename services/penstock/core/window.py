"""The window: how many records of a type may wait on its ready topic. Pure: no I/O, no clock.

What is on Kafka can no longer change its order, so there should be no more than the workers get done in about a second;
with less they might run dry. What they take tells little of that: a worker that starts takes thousands of records into its
hand at once. So a sample of what was released is watched until its attempts end, and the rate at which they do is the drain.

A drain measured so is no more than the window lets through. Workers that leave next to nothing of it are hungry: then it is
some times larger, and falls back once they leave something. So it grows as long as it is what holds them up.

In doubt the window is small: at rest, at the start and when nothing ends it is the floor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from penstock.core.leases import Key

# Attempts watched of one type: the error of the rate is about one over the root of how many of them end in a horizon.
MOST_WATCHED = 256
# The rate is that of the last so many seconds, and what was seen before a pause of this length says nothing of now.
HORIZON_S = 2.0
# Hungry workers have left no more than this share of the window.
LEFT = 0.25
# What hunger makes of a window at most, and how long nobody must be hungry until it is half that.
MOST_TIMES = 4
SATED_S = 1.0


class Reason(StrEnum):
    """What a window's size goes by."""

    FLOOR = "floor"
    DRAIN = "drain"
    HUNGER = "hunger"
    CEILING = "ceiling"
    # A second's starts of a type with a rate: less than the window itself.
    RATE = "rate"


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """How large a window may be.

    Attributes:
        floor: fewest records, at least 1; the ceiling where that is lower.
        ceiling: most records.
        work_s: seconds of the workers' work that it holds between the two.
    """

    floor: int
    ceiling: int
    work_s: float = 1.0


class Window:
    """The window of one type.

    Args:
        policy: its bounds.
    """

    def __init__(self, policy: WindowPolicy) -> None:
        self._policy = policy
        # Attempts under watch, and how many each of them stands for.
        self._watched: dict[Key, int] = {}
        self._stride = 1
        self._passed = 0
        self._ended = 0
        # When it was looked, oldest first, and how many had ended by then.
        self._looks: deque[tuple[float, int]] = deque()
        self._times = 1
        self._hungry_s = float("-inf")

    @property
    def drain_per_s(self) -> float:
        """Attempts that end each second; 0 when nobody knows."""
        if len(self._looks) < 2:
            return 0.0
        (begin_s, before), (end_s, after) = self._looks[0], self._looks[-1]
        return (after - before) / (end_s - begin_s)

    @property
    def size(self) -> int:
        """Most records that may wait."""
        return self._sized()[0]

    @property
    def reason(self) -> Reason:
        """What the size goes by."""
        return self._sized()[1]

    def _sized(self) -> tuple[int, Reason]:
        policy = self._policy
        drained = int(self.drain_per_s * policy.work_s)
        wanted = max(drained, policy.floor) * self._times
        if wanted >= policy.ceiling:
            return policy.ceiling, Reason.CEILING
        if self._times > 1:
            return wanted, Reason.HUNGER
        return wanted, Reason.DRAIN if drained > policy.floor else Reason.FLOOR

    def left(self, records: int, now_s: float) -> None:
        """So many were left by the workers of a window that was at least half full when it was last looked at."""
        if records <= self.size * LEFT:
            self._times = min(MOST_TIMES, self._times * 2)
            self._hungry_s = now_s
        elif self._times > 1 and now_s - self._hungry_s >= SATED_S:
            self._times //= 2
            self._hungry_s = now_s

    def released(self, keys: Sequence[Key], now_s: float) -> None:
        """These went to the ready topic."""
        if not self._looks or now_s - self._looks[-1][0] > HORIZON_S:
            # When those ended that were watched before the pause, nobody can tell.
            self._watched.clear()
            self._stride, self._passed, self._ended = 1, 0, 0
            self._looks = deque([(now_s, 0)])
        # Each of them stands for the stride that leads to it.
        first = (-self._passed - 1) % self._stride
        self._watched.update(dict.fromkeys(keys[first :: self._stride], self._stride))
        self._passed += len(keys)
        while len(self._watched) > MOST_WATCHED:
            self._stride *= 2
            every_other = list(self._watched.items())[1::2]
            self._watched = {key: 2 * stands_for for key, stands_for in every_other}

    def watched(self) -> list[Key]:
        """The attempts of which it must be known whether they have ended."""
        return list(self._watched)

    def looked(self, under_way: Collection[Key], now_s: float) -> None:
        """Of those that are watched, only these have not ended.

        Args:
            under_way: keys out of `watched`, as it was at the last call.
            now_s: when they were looked at.
        """
        if not self._looks or now_s <= self._looks[-1][0]:
            return
        for key in [key for key in self._watched if key not in under_way]:
            self._ended += self._watched.pop(key)
        self._looks.append((now_s, self._ended))
        # One look before the horizon stays: the rate is that from there on.
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= HORIZON_S:
            self._looks.popleft()
        if len(self._watched) < MOST_WATCHED // 4:
            self._stride = 1
