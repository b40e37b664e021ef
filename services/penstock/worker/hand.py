"""What a worker has in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.contracts.ready import ReadyTask
from penstock.core.leases import Key


def key_of(ready: ReadyTask) -> Key:
    """(task id, step, attempt)."""
    fence = ready.fence
    return (fence.id, fence.step, fence.attempt)


class Hand:
    """Every claimed attempt whose result is not on Kafka yet.

    Args:
        room: most attempts in hand.
    """

    def __init__(self, room: int) -> None:
        self._most = room
        self._held: set[Key] = set()
        self._freed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    @property
    def room(self) -> int:
        """How many more may be claimed."""
        return self._most - len(self._held)

    async def wait_room(self, timeout_s: float) -> bool:
        """Waits until there is room, at most `timeout_s` seconds; returns whether there is."""
        if self.room <= 0:
            self._freed.clear()
            try:
                await asyncio.wait_for(self._freed.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def take(self, claimed: Iterable[ReadyTask]) -> None:
        """Attempts were claimed."""
        self._held.update(key_of(ready) for ready in claimed)

    def let_go(self, keys: Iterable[Key]) -> None:
        """Results of these are on Kafka, or nobody wants them any more."""
        self._held.difference_update(keys)
        self._freed.set()
