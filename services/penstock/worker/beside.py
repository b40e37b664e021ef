"""An event loop on a thread of its own, for what must go on while handlers block the main one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

T = TypeVar("T")

# How long what is cancelled at the end may take.
END_S = 5.0


class Beside:
    """A running loop beside the caller's.

    Args:
        name: of its thread.
    """

    def __init__(self, name: str) -> None:
        # Of the kind that runs the caller (uvloop's, where it is installed).
        self.loop = type(asyncio.get_running_loop())()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` over there to its end; a cancellation here reaches it there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def tell(self, act: Callable[..., object], *arguments: Any) -> None:
        """Calls `act` over there soon, in the order of the tellings; nothing once that loop has ended."""
        try:
            self.loop.call_soon_threadsafe(act, *arguments)
        except RuntimeError:
            if not self.loop.is_closed():
                raise

    def _begin(self) -> None:
        self._thread.start()

    async def _end(self) -> None:
        await self.call(_cancel_the_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        # Not joined in the loop's executor: that may be full of the handlers' own work.
        while self._thread.is_alive():  # noqa: ASYNC110 (once in a process's life)
            await asyncio.sleep(0.005)
        self.loop.close()


async def _cancel_the_others() -> None:
    """Ends what was left behind in this loop by a failure on the other side."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_S)


@asynccontextmanager
async def beside(name: str) -> AsyncIterator[Beside]:
    """A loop beside ours for the time of a `with` block; what still runs in it at the end is cancelled."""
    other = Beside(name)
    other._begin()  # noqa: SLF001 (ours)
    try:
        yield other
    finally:
        await other._end()  # noqa: SLF001 (ours)
