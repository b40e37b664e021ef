"""The attempts that a worker has in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.contracts.ready import ReadyTask
from penstock.core.attempt import AttemptId


class InFlight:
    """Every claimed attempt whose result is not on Kafka yet.

    Args:
        capacity: most attempts in flight.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._attempts: set[AttemptId] = set()
        self._removed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, attempt_id: object) -> bool:
        return attempt_id in self._attempts

    @property
    def room(self) -> int:
        """How many more attempts may be claimed."""
        return self._capacity - len(self._attempts)

    async def wait_room(self, timeout_s: float) -> bool:
        """Waits until there is room, at most `timeout_s` seconds; returns whether there is."""
        if self.room <= 0:
            self._removed.clear()
            try:
                await asyncio.wait_for(self._removed.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    async def wait_gone(self, attempt_ids: Iterable[AttemptId]) -> None:
        """Waits until none of these attempts is in flight."""
        waited_for = list(attempt_ids)
        while not self._attempts.isdisjoint(waited_for):
            self._removed.clear()
            await self._removed.wait()

    def add(self, claimed: Iterable[ReadyTask]) -> None:
        """Adds claimed attempts."""
        self._attempts.update(ready.fence.attempt_id for ready in claimed)

    def remove(self, attempt_ids: Iterable[AttemptId]) -> None:
        """Removes attempts whose results are on Kafka, or that this worker has lost."""
        self._attempts.difference_update(attempt_ids)
        self._removed.set()
