"""An event loop on its own thread, which keeps running while handlers block the main one."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds that cancelled tasks get to end.
CANCEL_S = 5.0


class LoopThread:
    """A running event loop on another thread.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        # The same class as the caller's loop (uvloop's, if that is installed).
        self.loop = type(asyncio.get_running_loop())()
        # Handlers call from contexts of their own, which must not reach tasks that begin there.
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the other loop to its end; cancelling this call cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def call_soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls `function` on the other loop, in order; does nothing once that loop is closed."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments, context=self._context)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    async def stop(self) -> None:
        """Cancels what still runs on the other loop, and ends its thread."""
        await self.run(_cancel_other_tasks())
        self.loop.call_soon_threadsafe(self.loop.stop)
        # Not `join` in the executor: sync code of handlers may occupy all of its threads.
        while self._thread.is_alive():  # noqa: ASYNC110 (once in a process's life)
            await asyncio.sleep(0.005)
        self.loop.close()


async def _cancel_other_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CANCEL_S)


@asynccontextmanager
async def loop_thread(name: str) -> AsyncIterator[LoopThread]:
    """A `LoopThread` for the time of a `with` block."""
    thread = LoopThread(name)
    thread.start()
    try:
        yield thread
    finally:
        await thread.stop()
