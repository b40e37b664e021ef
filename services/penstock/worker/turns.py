"""Whose turn it is among claimed attempts: the more urgent goes first, and of two alike the one that came first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from penstock.contracts.ready import ReadyTask
from penstock.core.leases import Key
from penstock.core.task import Priority
from penstock.worker.hand import key_of


class Backlog:
    """Attempts that wait for a handler."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Priority, int, ReadyTask]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ready: ReadyTask) -> None:
        """One more waits."""
        heapq.heappush(self._waiting, (ready.priority, next(self._numbers), ready))

    def take(self) -> ReadyTask:
        """The one whose turn it is; there must be one."""
        return heapq.heappop(self._waiting)[2]

    def drop(self, keys: Collection[Key]) -> None:
        """These wait no more."""
        self._waiting = [entry for entry in self._waiting if key_of(entry[2]) not in keys]
        heapq.heapify(self._waiting)


class Places:
    """So many places, each given to the waiter whose turn it is.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: list[tuple[Priority, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @asynccontextmanager
    async def place(self, priority: Priority) -> AsyncIterator[None]:
        """A place for the time of a `with` block."""
        await self._take(priority)
        try:
            yield
        finally:
            self._give()

    async def _take(self, priority: Priority) -> None:
        # Whoever waits while a place is free does not exist: a place goes to a waiter before it is free.
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._numbers), turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._give()
            raise

    def _give(self) -> None:
        while self._waiting:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
