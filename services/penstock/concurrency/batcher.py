"""Micro-batching: items that arrive while a batch is written go into the next."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from penstock.concurrency.cancellation import own_cancellation
from penstock.core.round_robin import RoundRobin
from penstock.errors import Fatal

T = TypeVar("T")


class Batcher(Generic[T]):
    """Collects items and writes them in batches, in the order in which they were added.

    With `turn_of`, items with different keys take turns.

    `add` starts a writer, which ends when nothing is left. The batcher stops when `write` raises,
    when `run` is cancelled, and by `stop`: then nothing more is written.

    Args:
        write: writes a batch.
        max_size: size of a batch at most; a single item that is larger is a batch of its own.
        size_of: an item's size; 1 for each unless given.
        linger_s: takes the number of items in the batch before; returns how many seconds the next
            one waits for more items. A batch that is full or has an urgent item does not wait.
        writers: batches that are written at the same time.
        turn_of: an item's key; a burst of one key delays no item of another.
    """

    def __init__(
        self,
        write: Callable[[Sequence[T]], Awaitable[None]],
        *,
        max_size: float = 1_000,
        size_of: Callable[[T], float] = lambda _item: 1,
        linger_s: Callable[[int], float] | None = None,
        writers: int = 1,
        turn_of: Callable[[T], Hashable] = lambda _item: None,
    ) -> None:
        # The writer must not belong to the trace of the first item alone.
        self._context = contextvars.copy_context()
        self._write = write
        self._max_size = max_size
        self._size_of = size_of
        self._linger_s = linger_s
        self._max_writers = writers
        # Items with their sizes.
        self._waiting: RoundRobin[tuple[T, float]] = RoundRobin(lambda entry: turn_of(entry[0]))
        self._count = 0
        self._waiting_size = 0.0
        self._writing = 0
        self._previous = 0
        self._urgent = asyncio.Event()
        self._writers: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._error: Exception | None = None
        self._failed = asyncio.Event()
        self._stopped = False

    def __len__(self) -> int:
        """Items that are not written yet."""
        return self._count + self._writing

    def add(self, item: T, *, urgent: bool = False) -> None:
        """Puts an item into the next batch; an urgent one ends the wait for more.

        Raises:
            Exception: raised by an earlier `write`.
        """
        if self._error is not None:
            raise self._error
        size = self._size_of(item)
        self._waiting.append((item, size))
        self._count += 1
        self._waiting_size += size
        if urgent:
            self._urgent.set()
        self._idle.clear()
        if len(self._writers) < self._max_writers and not self._stopped:
            writer = asyncio.create_task(self._write_waiting(), context=self._context.copy())
            self._writers.add(writer)

    async def run(self) -> None:
        """Waits until cancelled, then stops; not needed if `write` raises nothing.

        Raises:
            Exception: raised by `write`.
        """
        try:
            await self._failed.wait()
            assert self._error is not None
            raise self._error
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Cancels the writes and waits until they have ended."""
        self._stopped = True
        writers = tuple(self._writers)
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)

    async def wait_idle(self) -> None:
        """Waits until every item is written.

        Raises:
            Exception: raised by `write`; some items are not written.
        """
        await self._idle.wait()
        if self._error is not None:
            raise self._error

    async def _write_waiting(self) -> None:
        try:
            # Other coroutines that are ready to run add their items first.
            await asyncio.sleep(0)
            while self._waiting and not self._stopped:
                await self._linger()
                batch = self._next_batch()
                if not batch:
                    continue  # another writer took the items while this one lingered
                self._previous = len(batch)
                self._writing += len(batch)
                try:
                    # If the writer ended, its batch would stay, and `wait_idle` would not return.
                    with own_cancellation(_ended_by_itself):
                        await self._write(batch)
                finally:
                    self._writing -= len(batch)
        except Exception as error:  # noqa: BLE001 (raised by `run`)
            self._stopped = True
            self._error = self._error or error
            self._failed.set()
            # Wakes `wait_idle`, which raises the error.
            self._idle.set()
        else:
            if not len(self):
                self._idle.set()
        finally:
            self._writers -= {asyncio.current_task()}

    async def _linger(self) -> None:
        if self._linger_s is None or self._waiting_size >= self._max_size:
            return
        if linger_s := self._linger_s(self._previous):
            with suppress(TimeoutError):
                async with asyncio.timeout(linger_s):
                    await self._urgent.wait()

    def _next_batch(self) -> list[T]:
        batch: list[T] = []
        batch_size = 0.0
        while self._waiting:
            item, size = self._waiting.first
            batch_size += size
            if batch and batch_size > self._max_size:
                break
            self._waiting.popleft()
            self._count -= 1
            self._waiting_size -= size
            batch.append(item)
        if not self._waiting:
            self._urgent.clear()
        return batch


def _ended_by_itself() -> Fatal:
    return Fatal("a write was cancelled without a request")
