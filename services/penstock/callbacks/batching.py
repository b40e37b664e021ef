"""Many in one statement: what arrives while one is under way goes into the next, so batches grow with the load."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from penstock.core.retry import RetryPolicy
from penstock.errors import Unavailable

log = logging.getLogger(__name__)

# While a server is away: patient, and quick once it is back.
WHILE_AWAY = RetryPolicy(max_attempts=1_000_000, base_s=0.1, factor=2, max_s=2.0, jitter=0.3)

T = TypeVar("T")
R = TypeVar("R")


async def persevere(work: Callable[[], Awaitable[R]], what: str) -> R:
    """Does `work` until the server it needs is there; the stall watchdog ends the process if that lasts."""
    tries = 0
    while True:
        try:
            return await work()
        except Unavailable as error:
            tries += 1
            log.warning("%s waits: %s", what, error)
            await asyncio.sleep(WHILE_AWAY.delay_s(tries, random.random()))  # noqa: S311 (jitter)


class Batches(Generic[T]):
    """Collects items and writes them, one batch after the other.

    Args:
        write: writes a batch.
        most: items in a batch.
        linger_s: how long the first item waits for others, in seconds.
        few: it does not when the batch before had fewer items than this: then there is little to gain.
        many: when the batch before had as many, it waits `many_linger_s` instead.
        many_linger_s: see there, in seconds.
    """

    def __init__(
        self,
        write: Callable[[Sequence[T]], Awaitable[None]],
        *,
        most: int = 1000,
        linger_s: float = 0.0,
        few: int = 0,
        many: int | None = None,
        many_linger_s: float = 0.0,
    ) -> None:
        self._write = write
        self._most = most
        self._linger_s = linger_s
        self._few = few
        self._many = many
        self._many_linger_s = many_linger_s
        self._before = 0
        self._items: list[T] = []
        self._some = asyncio.Event()

    def add(self, item: T) -> None:
        """Puts an item into the next batch."""
        self._items.append(item)
        self._some.set()

    async def run(self) -> None:
        """Writes until cancelled.

        Raises:
            Exception: whatever `write` raises.
        """
        while True:
            await self._some.wait()
            if self._linger_s and self._before >= self._few and len(self._items) < self._most:
                busy = self._many is not None and self._before >= self._many
                await asyncio.sleep(self._many_linger_s if busy else self._linger_s)
            batch, self._items = self._items[: self._most], self._items[self._most :]
            if not self._items:
                self._some.clear()
            self._before = len(batch)
            await self._write(batch)
