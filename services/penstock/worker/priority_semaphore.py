"""Priority order among claimed attempts; within a priority, in order of arrival."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager

from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId
from penstock.core.task import Priority


class PriorityQueue:
    """Attempts that wait for a handler.

    Args:
        numbers: count arrivals; several queues that are compared share them.
    """

    def __init__(self, numbers: Iterator[int] | None = None) -> None:
        self._heap: list[tuple[Priority, int, ReadyTask]] = []
        self._numbers = itertools.count() if numbers is None else numbers
        self._waiting: set[AttemptId] = set()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, attempt_id: object) -> bool:
        """Whether an attempt waits; may be asked from any thread."""
        return attempt_id in self._waiting

    def add(self, ready: ReadyTask) -> None:
        """Adds an attempt."""
        heapq.heappush(self._heap, (ready.priority, next(self._numbers), ready))
        self._waiting.add(ready.attempt_id)

    def take(self) -> ReadyTask:
        """Removes and returns the first attempt; the queue must not be empty."""
        ready = heapq.heappop(self._heap)[2]
        self._waiting.discard(ready.attempt_id)
        return ready

    @property
    def head(self) -> tuple[Priority, int]:
        """Orders the first attempt among those of other queues; the queue must not be empty."""
        return self._heap[0][:2]

    def take_last(self, count: int) -> list[ReadyTask]:
        """Removes and returns the last attempts, in their order; none for a count below 1."""
        if count < 1:
            return []
        last = [entry[2] for entry in heapq.nlargest(count, self._heap, key=lambda entry: entry[:2])]
        self.drop({ready.attempt_id for ready in last})
        return last[::-1]

    def drop(self, attempt_ids: Collection[AttemptId]) -> None:
        """Removes attempts."""
        self._heap = [entry for entry in self._heap if entry[2].fence.attempt_id not in attempt_ids]
        heapq.heapify(self._heap)
        self._waiting.difference_update(attempt_ids)


class PrioritySemaphore:
    """A semaphore that admits the waiter with the highest priority first.

    Args:
        permits: how many may hold it at once.
    """

    def __init__(self, permits: int) -> None:
        self._free = permits
        self._waiters: list[tuple[Priority, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def permit(self, priority: Priority) -> AsyncIterator[None]:
        """Holds a permit for the time of a `with` block."""
        await self._acquire(priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, priority: Priority) -> None:
        # A free permit means that there are no waiters: `_release` hands permits to waiters
        # directly.
        if self._free:
            self._free -= 1
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (priority, next(self._numbers), waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                self._release()
            # Now, because a permit may be held for hours.
            self._waiters = [entry for entry in self._waiters if not entry[2].done()]
            heapq.heapify(self._waiters)
            raise

    def _release(self) -> None:
        while self._waiters:
            waiter = heapq.heappop(self._waiters)[2]
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1
