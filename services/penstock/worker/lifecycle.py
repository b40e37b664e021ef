"""What a worker does before its first handler and after its last one: opens and closes connections.

When in doubt, nothing runs: a start that fails ends the worker before it takes a task. A stop that
fails, or takes too long, is logged, and the others follow.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from penstock.errors import CannotStart

log = logging.getLogger(__name__)

Hook = Callable[[], object] | Callable[[], Awaitable[object]]

# Functions of the start with what they have returned.
Results = Sequence[tuple[Hook, object]]

# A worker that ends by a signal has fifteen.
STOP_S = 10.0


class Lifecycle:
    """The functions of `Worker.on_start` and `Worker.on_stop`.

    Args:
        started: called with the results of the functions of the start, when all of them have run.
        stop_s: seconds that all functions of the stop get together.
    """

    def __init__(
        self, started: Callable[[Results], Awaitable[None]] | None = None, stop_s: float = STOP_S
    ) -> None:
        self._stop_s = stop_s
        self.starts: list[Hook] = []
        self.stops: list[Hook] = []
        self._started = started

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Starts in the order of registration, and stops in the reverse one.

        Raises:
            Exception: of a function of the start; those of the stop have run.
            CannotStart: one of them called for the end of the process.
        """
        try:
            try:
                results = [(hook, await _call(hook)) for hook in self.starts]
                if self._started is not None:
                    await self._started(results)
            except SystemExit as error:
                # With its own status, which may be 0, no supervisor would start the worker again.
                raise CannotStart(f"a function of the worker's start raised {error!r}") from error
            yield
        finally:
            await self._stop()

    async def _stop(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._stop_s
        for hook in reversed(self.stops):
            try:
                async with asyncio.timeout_at(until_s):
                    await _call(hook)
            except (Exception, SystemExit):
                # The connections of the others must be closed too.
                log.exception(
                    "A function of the worker's stop failed",
                    extra={"event": "on_stop_failed", "function": getattr(hook, "__name__", repr(hook))},
                )


async def _call(hook: Hook) -> object:
    returned = hook()
    return await returned if inspect.isawaitable(returned) else returned
