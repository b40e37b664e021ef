"""Work that runs beside the release loop; an error in it ends the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial


class Background:
    """Tasks by key; the base of the parts of the release loop that wait for Kafka.

    Args:
        wake: called when a task has failed.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._running: dict[object, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None

    def __contains__(self, key: object) -> bool:
        """Whether the task of a key runs."""
        return key in self._running

    def start(self, key: object, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Starts the task of a key; returns it."""
        task = self._running[key] = asyncio.create_task(work)
        task.add_done_callback(partial(self._end, key))
        return task

    def cancel(self, key: object) -> None:
        """Cancels the task of a key, if it runs."""
        if (task := self._running.get(key)) is not None:
            task.cancel()

    def raise_failure(self) -> None:
        """Raises the first error of a task."""
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Cancels all tasks and waits for their end."""
        running = tuple(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _end(self, key: object, task: asyncio.Task[None]) -> None:
        if self._running.get(key) is task:
            del self._running[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error
            self._wake()
