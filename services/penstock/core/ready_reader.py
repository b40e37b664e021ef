"""One partition of a ready topic, and one reader: a worker with all partitions that it reads.

Pure: no I/O, no clock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from penstock.core.task import Priority

# Takes of records from which the pace of a reader is known.
MOVES = 4
# Seconds for which a reader that took a marker is known to have room.
PROVEN_S = 1.0
# Seconds over which the rate of a partition is averaged, and for which it is kept.
RATE_S = 1.0
KEEP_RATE_S = 10.0


class Unread(NamedTuple):
    """Records that were written together and that no worker has taken; a marker, with the defaults.

    Attributes:
        end: offset behind them.
        written_s: when they were written.
        most: priority of the most urgent of them.
        least: priority of the least urgent of them.
    """

    end: int
    written_s: float
    most: Priority = Priority.LOWEST
    least: Priority = Priority.HIGHEST


@dataclass(slots=True)
class Partition:
    """One partition. Offsets are Kafka's; moments are seconds on a clock that does not step.

    Attributes:
        end: offset behind its newest record.
        taken: offset up to which the workers need no record.
        unread: records that no worker has taken, the oldest first.
        moves: when records were found taken, the oldest first.
        marker: offset behind the marker that no reader has taken yet.
        marker_s: when it was written.
        withdrawn: the records before the marker were withdrawn.
        proven_s: when a marker was found taken.
        rate: records a second that its reader takes; None while it takes all there are.
        least: records a second that it took when it took all.
        rate_s: when `rate` or `least` was last measured.
        narrow: its reader is slow, and has one record at most.
    """

    end: int = 0
    taken: int = 0
    unread: deque[Unread] = field(default_factory=deque)
    moves: deque[float] = field(default_factory=lambda: deque(maxlen=MOVES))
    marker: int | None = None
    marker_s: float = -inf
    withdrawn: bool = False
    proven_s: float = -inf
    rate: float | None = None
    least: float = 0.0
    rate_s: float = -inf
    narrow: bool = False

    @property
    def lag(self) -> int:
        """Records that no worker has taken."""
        return max(0, self.end - self.taken)

    @property
    def tasks(self) -> int:
        """Records of tasks that no worker has taken."""
        return self.lag - (self.marker is not None)

    def add(self, records: int, now_s: float, priorities: Collection[Priority] = ()) -> None:
        """Records were written, with tasks of these priorities."""
        self.end = max(self.end, self.taken) + records
        extremes = (min(priorities), max(priorities)) if priorities else ()
        self.unread.append(Unread(self.end, now_s, *extremes))

    def overtakes(self, before_s: float) -> Priority | None:
        """The most urgent task behind less urgent ones that were written before; None without."""
        least, found = Priority.HIGHEST, None
        for each in self.unread:
            if each.most < least and (found is None or each.most < found):
                found = each.most
            if each.written_s <= before_s:
                least = max(least, each.least)
        return found

    @property
    def most_urgent(self) -> Priority:
        """The priority of its most urgent task."""
        return min((each.most for each in self.unread), default=Priority.LOWEST)

    def least_urgent(self, before_s: float = inf) -> Priority:
        """The priority of its least urgent task of those that were written before."""
        return max(
            (each.least for each in self.unread if each.written_s <= before_s), default=Priority.HIGHEST
        )

    def take(self, taken: int, now_s: float, passed_s: float) -> bool:
        """Up to here workers need no record; returns whether that has changed.

        Args:
            taken: the offset. A smaller one than before is that of another group or topic.
            now_s: now.
            passed_s: seconds since the last call.
        """
        count = taken - self.taken
        if count > 0:
            self.moves.append(now_s)
        self.taken = taken
        while self.unread and self.unread[0].end <= taken:
            self.unread.popleft()
        if self.lag and not self.unread:
            self.unread.append(Unread(self.end, now_s))
        if self.marker is not None and taken >= self.marker:
            self.marker, self.withdrawn, self.proven_s = None, False, now_s
        if passed_s > 0:
            self._measure(max(count, 0) / passed_s, now_s, passed_s)
        return count != 0

    def _measure(self, rate: float, now_s: float, passed_s: float) -> None:
        if self.lag:
            new = min(1.0, passed_s / RATE_S)
            self.rate = rate if self.rate is None else self.rate * (1 - new) + rate * new
            self.rate_s = now_s
        elif rate:
            self.least = max(rate, self.least)
            if self.rate is not None and rate > self.rate:
                self.rate = None
            self.rate_s = now_s
        elif now_s - self.rate_s > KEEP_RATE_S:
            self.rate, self.least = None, 0.0


class Reader:
    """A worker with the partitions that it reads.

    Args:
        partitions: its partitions, by number.

    Attributes:
        partitions: its partitions, by number.
        lag: records that it has not taken.
        tasks: the same without markers.
        has_marker: a marker waits for it.
        withdrawn: records were withdrawn from it, and a marker waits since.
        marker_s: when its last marker was written.
        proven_s: when it was last found to have taken a marker.
        moves: when it was last found to have taken records, the oldest first.
        oldest_s: when the oldest of its records was written; infinity without records.
        narrow: it has one record at most.
    """

    def __init__(self, partitions: Mapping[int, Partition]) -> None:
        self.partitions = partitions
        self.lag = sum(each.lag for each in partitions.values())
        self.tasks = sum(each.tasks for each in partitions.values())
        self.has_marker = any(each.marker is not None for each in partitions.values())
        self.withdrawn = any(each.withdrawn for each in partitions.values())
        self.marker_s = max((each.marker_s for each in partitions.values()), default=-inf)
        self.proven_s = max((each.proven_s for each in partitions.values()), default=-inf)
        self.moves = sorted(at_s for each in partitions.values() for at_s in each.moves)[-MOVES:]
        self.narrow = any(each.narrow for each in partitions.values())
        self.oldest_s = min(
            (each.unread[0].written_s for each in partitions.values() if each.unread), default=inf
        )

    def frozen_s(self, now_s: float) -> float:
        """Seconds in which it had tasks and took nothing."""
        if self.tasks <= 0:
            return 0.0
        return now_s - max(self.oldest_s, self.moves[-1] if self.moves else -inf)

    def overtakes(self, before_s: float) -> Priority | None:
        """The most urgent task that the reader may take after less urgent ones written before.

        It takes from its partitions in any order. None without such a task.
        """
        found = [each.overtakes(before_s) for each in self.partitions.values()]
        least = sorted((each.least_urgent(before_s), number) for number, each in self.partitions.items())
        for number, each in self.partitions.items():
            beside = [priority for priority, other in least[-2:] if other != number]
            if beside and each.most_urgent < beside[-1]:
                found.append(each.most_urgent)
        return min((each for each in found if each is not None), default=None)

    def pace_s(self, now_s: float) -> float:
        """The longest time between its last takes."""
        if len(self.moves) < MOVES:
            return inf
        moments = [*self.moves, now_s]
        return max(after - before for before, after in itertools.pairwise(moments))

    def proven(self, now_s: float) -> bool:
        """Whether it had room a moment ago, and no records since."""
        return not self.lag and now_s - self.proven_s < PROVEN_S

    @property
    def rate(self) -> float | None:
        """Records a second that it takes; None while it takes all there are."""
        rates = [each.rate for each in self.partitions.values() if each.rate is not None]
        return sum(rates) if rates else None

    @property
    def least(self) -> float:
        """Records a second that it took when it took all."""
        return sum(each.least for each in self.partitions.values())
