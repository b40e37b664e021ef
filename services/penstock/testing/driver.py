"""Drives a pipeline: runs what can run, and moves the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.core.attempt import AttemptId
from penstock.testing.clock import Clock, LoopTime
from penstock.testing.models import NoEnd
from penstock.testing.platform import Platform

# Turns of the event loop that a handler gets before a real wait.
_TURNS = 20
# A handler that does nothing for so many real waits of so many seconds waits for the test, or for
# another clock: the pipeline goes on without it.
_WAITS = 50
_WAIT_S = 0.01


class Driver:
    """Runs handlers, services and the clock.

    Args:
        clock: of the pipeline.
        time: of the event loop.
        platform: the services.
    """

    def __init__(self, clock: Clock, time: LoopTime, platform: Platform) -> None:
        self._clock = clock
        self._time = time
        self._platform = platform
        # Seconds by which the clock has moved without the loop's time.
        self._ahead_s = 0.0

    async def settle(self) -> None:
        """Runs what can run now; the clock stands still."""
        await self._work(set())

    async def step(self, seconds: float) -> None:
        """Lets time pass, from one moment at which something is due to the next."""
        target_s = self._clock.elapsed_s + seconds
        waiting: set[AttemptId] = set()
        await self._work(waiting)
        while True:
            moments = [] if (due_s := self._platform.next_s()) is None else [due_s]
            if (timer_s := self._next_timer_s()) is not None:
                moments.append(timer_s)
            if not moments or min(moments) > target_s:
                break
            self._jump(min(moments))
            await self._work(waiting)
        self._jump(target_s)
        await self._work(waiting)

    def _jump(self, to_s: float) -> None:
        # Real time that has passed counts, so that a busy machine ends no timeout early.
        self._time.jump(to_s - self._ahead_s)
        self._clock.elapsed_s = max(self._clock.elapsed_s, to_s)

    def _next_timer_s(self) -> float | None:
        """When the next timer of the loop is due, on the scale of `Clock.elapsed_s`."""
        timer_s = self._time.next_s() if self._time.can_jump else None
        return None if timer_s is None else timer_s + self._ahead_s

    async def proceed(self, root_id: int, enough: Callable[[], bool]) -> bool:
        """Runs everything, moving the clock, until there is enough, or nothing is due.

        The clock moves while no handler runs, or while all that run are in a long `asyncio.sleep`.
        Otherwise handlers run in real time.

        Args:
            root_id: the task or flow at the top of the family that is waited for.
            enough: ends the call.

        Returns:
            Whether there was enough.

        Raises:
            NoEnd: the family cannot end.
        """
        while True:
            await self._work(None, enough)
            if enough():
                return True
            if (reason := self._platform.why_endless(root_id)) is not None:
                raise NoEnd(reason)
            due_s = self._platform.next_s()
            if self._platform.running() and (timer_s := self._next_timer_s()) is not None:
                self._jump(timer_s if due_s is None else min(due_s, timer_s))
            elif due_s is None:
                return False
            else:
                # Without a jump of the loop's time, which could not be undone.
                self._ahead_s += max(0.0, due_s - self._clock.elapsed_s)
                self._clock.elapsed_s = max(self._clock.elapsed_s, due_s)

    async def _work(self, waiting: set[AttemptId] | None, enough: Callable[[], bool] = lambda: False) -> None:
        """Runs what can run.

        Args:
            waiting: attempts that wait for the test, to which more are added; None waits for all
                handlers, until each has ended or sleeps.
            enough: ends the call earlier.
        """
        while not enough():
            if not await self._platform.work() and not await self._moved(waiting):
                return

    async def _moved(self, waiting: set[AttemptId] | None) -> bool:
        """Waits for handlers; returns whether something has changed."""
        platform, before, waits = self._platform, self._platform.changes, 0
        while True:
            for _ in range(_TURNS):
                await asyncio.sleep(0)
                if platform.changes != before:
                    return True
            running = platform.running()
            awake = {attempt_id for attempt_id, task in running.items() if not self._time.sleeps(task)}
            if not (running if waiting is None else awake - waiting):
                return False
            if waiting is None and awake:
                # They may compute, or wait for another process.
                waits = 0
            elif waits >= _WAITS:
                if waiting is not None:
                    waiting |= awake
                return False
            waits += 1
            platform.changed.clear()
            try:
                async with asyncio.timeout(_WAIT_S):
                    await platform.changed.wait()
            except TimeoutError:
                continue
