"""Stall detection: a process with work and without progress ends, and is restarted.

`StallDetector` compares the progress of all work while the event loop turns. An outage of a server
is no stall: while attempts fail and are repeated, times start anew. An attempt may also wait for a
server that keeps its connections and answers nothing, so the servers are asked before a stall is
reported.
`LoopWatchdog` covers the loop itself: a timer of the interpreter, which ends the process even when
a C extension holds the interpreter lock.

When in doubt, the process ends: its records in flight are delivered again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import time
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from penstock.concurrency.outages import count_failed_attempt, failed_attempts
from penstock.errors import PenstockError, Stalled, Unavailable

CHECK_EVERY_S = 1.0
# How often the servers are asked within the limit.
ASKS_PER_LIMIT = 6


class StallDetector:
    """Reports work that has made no progress for too long.

    Args:
        limit_s: seconds after which an unchanged value is a stall.
        progress: returns name and value of everything that should progress now. A value changes
            with each step. A name that is left out is at rest; its time starts anew when it is
            named again.
        servers: each returns when a server that the work needs answers on a new connection, raises
            `Unavailable` when it does not, and limits itself to seconds for each of its hosts.
        name: of what is watched, for the error; "" for none.
    """

    def __init__(
        self,
        limit_s: float,
        progress: Callable[[], Mapping[str, Hashable]],
        servers: Sequence[Callable[[], Awaitable[None]]] = (),
        *,
        name: str = "",
    ) -> None:
        self._limit_s = limit_s
        self._progress = progress
        self._servers = servers
        self._ask_at_s = 0.0
        self._name = name
        self._since: dict[str, tuple[Hashable, float]] = {}
        self._failed_attempts = failed_attempts()

    async def run(self) -> None:
        """Checks until cancelled.

        Raises:
            Stalled: something has made no progress for longer than the limit.
        """
        while True:
            asked_s = time.monotonic()
            await self.ask_servers(asked_s)
            # A server may have answered at the end of an outage: the work goes on only now.
            self.postpone(time.monotonic() - asked_s)
            self.check(time.monotonic())
            await asyncio.sleep(CHECK_EVERY_S)

    async def ask_servers(self, now_s: float) -> None:
        """Asks the servers while a value is unchanged for more than half the limit.

        An unavailable one counts as a failed attempt. One that refuses has answered.
        """
        oldest_s = min((since_s for _value, since_s in self._since.values()), default=now_s)
        if now_s - oldest_s < self._limit_s / 2 or now_s < self._ask_at_s:
            return
        self._ask_at_s = now_s + self._limit_s / ASKS_PER_LIMIT
        for server in self._servers:
            try:
                await server()
            except Unavailable:
                count_failed_attempt()
                return
            except PenstockError:
                continue

    def postpone(self, delay_s: float) -> None:
        """Leaves a time out of all judgements."""
        self._since = {name: (value, since_s + delay_s) for name, (value, since_s) in self._since.items()}

    def check(self, now_s: float) -> None:
        """Compares all progress with that of the check before.

        Args:
            now_s: seconds on a monotonic clock.

        Raises:
            Stalled: something has made no progress for longer than the limit.
        """
        if (failed := failed_attempts()) != self._failed_attempts:
            self._failed_attempts = failed
            self._since.clear()
        self._since = {
            name: self._since[name]
            if name in self._since and self._since[name][0] == value
            else (value, now_s)
            for name, value in self._progress().items()
        }
        stalled = [name for name, (_value, since_s) in self._since.items() if now_s - since_s > self._limit_s]
        if stalled:
            prefix = f"{self._name}: " if self._name else ""
            raise Stalled(f"{prefix}{', '.join(stalled)}: no progress for {self._limit_s:g} s")


class LoopWatchdog:
    """Ends the process (status 1, all stacks on standard error) unless it is rewound in time."""

    def rewind(self, limit_s: float) -> None:
        """The process ends in `limit_s` seconds unless this is called again."""
        # There is one timer a process. It needs a real file, which a test's captured output is not.
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__)

    async def run(self, limit_s: float) -> None:
        """Rewinds until cancelled: the process ends if its loop stalls for `limit_s` seconds.

        It ends up to a twelfth of the limit later: each rewind starts a thread, so they are rare.
        """
        every_s = limit_s / 12
        while True:
            self.rewind(limit_s + every_s)
            await asyncio.sleep(every_s)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Stops the timer at the end of the block."""
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
