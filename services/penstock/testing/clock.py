"""The clock of a pipeline, and steps of the time of an event loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, cast

# The callback of the timer of `asyncio.sleep`. Without this name a sleep is not recognised, and a
# step waits a little longer for its handler.
_WAKES_SLEEP: Any = getattr(asyncio.futures, "_set_result_unless_cancelled", None)


class Clock:
    """The moment of a pipeline. It stands still between steps.

    Args:
        start: the first moment.
    """

    def __init__(self, start: datetime) -> None:
        self._start = start
        self.elapsed_s = 0.0

    @property
    def now(self) -> datetime:
        """The moment."""
        return self._start + timedelta(seconds=self.elapsed_s)

    def seconds_of(self, moment: datetime) -> float:
        """The moment on the scale of `elapsed_s`."""
        return (moment - self._start).total_seconds()


class LoopTime:
    """Lets the time of an event loop jump, so that its timers are due earlier.

    Timers of handlers (`asyncio.sleep`, `asyncio.timeout`) and of the worker (the timeout of a
    handler) follow the steps of a pipeline. Between two steps they also follow the real time.

    Args:
        loop: a loop of asyncio. The time of other loops, such as uvloop's, cannot jump; their
            timers follow the real time alone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = cast("Any", loop)
        self._offset_s = 0.0
        self._opened_s = loop.time()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._sleeps: dict[asyncio.Task[Any], list[asyncio.TimerHandle]] = {}
        self._count = itertools.count()
        self._time: Callable[[], float] = loop.time
        self._call_at: Any = loop.call_at
        # One object each, so that `close` finds out whether they are still in place.
        self._own = (self._stepped_time, self._tracked_call_at)
        try:
            self._loop.time, self._loop.call_at = self._own
            self.can_jump = True
        except AttributeError:
            self.can_jump = False

    def close(self) -> None:
        """Restores the loop unless its time has jumped: a time that goes back would stop timers."""
        if self.can_jump and not self._offset_s and (self._loop.time, self._loop.call_at) == self._own:
            del self._loop.time, self._loop.call_at
            # A pipeline that is still open on this loop was there before.
            if self._loop.time != self._time:
                self._loop.time, self._loop.call_at = self._time, self._call_at

    def next_s(self) -> float | None:
        """When the next timer is due, in seconds since this object was made; None without one."""
        now_s = self._loop.time()
        while self._timers and (self._timers[0][2].cancelled() or self._timers[0][0] <= now_s):
            heapq.heappop(self._timers)
        return self._timers[0][0] - self._opened_s if self._timers else None

    def jump(self, to_s: float) -> None:
        """Moves the loop's time forward to so many seconds since this object was made."""
        if self.can_jump:
            self._offset_s += max(0.0, to_s - (self._loop.time() - self._opened_s))

    def sleeps(self, task: asyncio.Task[Any]) -> bool:
        """Whether a task waits in `asyncio.sleep`."""
        now_s = self._loop.time()
        found = [
            timer for timer in self._sleeps.pop(task, ()) if not timer.cancelled() and timer.when() > now_s
        ]
        if found:
            self._sleeps[task] = found
        return bool(found)

    def _stepped_time(self) -> float:
        return self._time() + self._offset_s

    def _tracked_call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        # The loop that schedules compares with its own time, which has the offset as well.
        timer: asyncio.TimerHandle = self._call_at(when, callback, *args, context=context)
        heapq.heappush(self._timers, (when, next(self._count), timer))
        if callback is _WAKES_SLEEP and (task := asyncio.current_task(self._loop)) is not None:
            self._sleeps.setdefault(task, []).append(timer)
        return timer
