"""The ticks of a schedule: moments at which a clock on the wall of a time zone shows a match.

A tick is nominal: it is a moment in UTC that follows from the schedule alone, whenever its flow
starts. The rules for the days on which the clocks change:

- A schedule that names hours of the day runs once for each time that it names. If the clocks skip
  a time, its tick is the moment after the gap. If the clocks repeat it, its tick is the first one.
- A schedule of every hour follows the time that passes. Skipped times have no tick, and repeated
  times have two.

So UTC grows from tick to tick, and the ticks after a moment do not depend on where one began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from itertools import takewhile

# Gives the matching times of a wall clock, without a zone, after a time; strictly growing.
WallTimes = Callable[[datetime], Iterator[datetime]]

# No change of a clock repeats more than a day.
_LONGEST_REPEAT = timedelta(hours=25)
_SECOND = timedelta(seconds=1)
# The first window in which `latest_ticks` searches.
_WINDOW = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Ticks:
    """The ticks of a schedule.

    Attributes:
        wall_times: when its wall clock matches.
        zone: the zone of that clock.
        every_hour: whether it follows the time that passes, because it names no hour.
    """

    wall_times: WallTimes
    zone: tzinfo
    every_hour: bool

    def after(self, moment: datetime) -> Iterator[datetime]:
        """The ticks after a moment in UTC, in order; they may end."""
        last = moment
        for tick in self._passing(moment) if self.every_hour else self._named(moment):
            # Several skipped times have one tick, and repeated times may lie before the moment.
            if tick > last:
                yield tick
                last = tick

    def first_after(self, moment: datetime) -> datetime | None:
        """The first tick after a moment in UTC; None if there is none."""
        return next(self.after(moment), None)

    def between(self, after: datetime, until: datetime) -> Iterator[datetime]:
        """The ticks after a moment and up to another one, in order."""
        return takewhile(lambda tick: tick <= until, self.after(after))

    def _named(self, moment: datetime) -> Iterator[datetime]:
        for wall_time in self.wall_times(self._wall_time(moment)):
            yield self._moment(wall_time) or self._end_of_gap(wall_time)

    def _passing(self, moment: datetime) -> Iterator[datetime]:
        # Each repeated time has a second moment, after the first ones of all repeated times.
        second: deque[datetime] = deque()
        for wall_time in self.wall_times(self._wall_time(moment) - self._repeat_near(moment)):
            first = self._moment(wall_time)
            if first is None:
                continue
            while second and second[0] < first:
                yield second.popleft()
            yield first
            later = wall_time.replace(tzinfo=self.zone, fold=1).astimezone(UTC)
            if later != first:
                second.append(later)
        yield from second

    def _wall_time(self, moment: datetime) -> datetime:
        return moment.astimezone(self.zone).replace(tzinfo=None, fold=0)

    def _moment(self, wall_time: datetime) -> datetime | None:
        """The first moment at which the clock shows a time; None if it skips the time."""
        moment = wall_time.replace(tzinfo=self.zone).astimezone(UTC)
        return moment if self._wall_time(moment) == wall_time else None

    def _end_of_gap(self, wall_time: datetime) -> datetime:
        # The offsets before and after the gap enclose it.
        before = wall_time.replace(tzinfo=self.zone, fold=1).astimezone(UTC)
        after = wall_time.replace(tzinfo=self.zone).astimezone(UTC)
        offset = self._offset(after)
        while after - before > _SECOND:
            middle = before + (after - before) // 2 // _SECOND * _SECOND
            if self._offset(middle) == offset:
                after = middle
            else:
                before = middle
        return after

    def _offset(self, moment: datetime) -> timedelta | None:
        return moment.astimezone(self.zone).utcoffset()

    def _repeat_near(self, moment: datetime) -> timedelta:
        """How far back repeated times may begin whose second moment is still to come."""
        offset = self._offset(moment)
        near = {self._offset(moment - _LONGEST_REPEAT), self._offset(moment + _LONGEST_REPEAT)}
        return timedelta() if near == {offset} else _LONGEST_REPEAT


def latest_ticks(
    ticks: Ticks, after: datetime, until: datetime, limit: int
) -> tuple[Sequence[datetime], bool]:
    """The latest ticks of a span, and whether it has earlier ones.

    The cost depends on the limit and not on the span: after a year without a service a schedule of
    every minute has half a million ticks.

    Args:
        ticks: the schedule.
        after: the span begins after this moment.
        until: its last moment.
        limit: most ticks to return.
    """
    window = _WINDOW
    while True:
        since = max(after, until - window)
        found = deque(ticks.between(since, until), maxlen=limit + 1)
        if len(found) > limit or since == after:
            return list(found)[-limit:], len(found) > limit
        window *= 2
