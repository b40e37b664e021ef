"""Writes what a worker or gateway says about itself, every few seconds.

It fails open: without these records the process works as before, and Kafka's groups show it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from penstock.concurrency.cancellation import cleanup_timeout
from penstock.errors import PenstockError, Unavailable

log = logging.getLogger(__name__)

# Seconds for the last record of a process that ends.
STOP_S = 2.0
# Seconds for any other one: for a topic that does not exist, the client asks ten times a second.
SEND_S = 2.0


class StatusSender:
    """Writes the records of one process.

    Args:
        values: the values of the records, as of now; called with whether the process ends.
        write: writes one of them.
        every_s: seconds between two calls.
    """

    def __init__(
        self,
        values: Callable[[bool], Iterable[bytes]],
        write: Callable[[bytes], Awaitable[None]],
        every_s: float,
    ) -> None:
        self._values = values
        self._write = write
        self._every_s = every_s
        self._refused = False
        self._stopped = False

    async def run(self) -> None:
        """Writes until cancelled, or until `say_stopped` is called."""
        while not self._stopped:
            with suppress(TimeoutError):
                async with cleanup_timeout(SEND_S):
                    await self._send(stopped=False)
            await asyncio.sleep(self._every_s)

    async def say_stopped(self) -> None:
        """Writes that the process ends in order; without it, the process will count as lost."""
        self._stopped = True
        try:
            async with cleanup_timeout(STOP_S):
                await self._send(stopped=True)
        except TimeoutError:
            return

    async def _send(self, *, stopped: bool) -> None:
        try:
            for value in self._values(stopped):
                await self._write(value)
            self._refused = False
        except Unavailable:
            # Other writes of this process report the outage. The next record makes up for this one.
            return
        except PenstockError as error:
            # Also a fatal one: a worker whose access list is older than this topic works on.
            if not self._refused:
                self._refused = True
                log.warning(
                    "Signs of life are refused; this process is listed by its consumer groups only",
                    extra={"event": "worker_status_refused", "error": error},
                )
