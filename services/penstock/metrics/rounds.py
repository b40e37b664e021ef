"""When the loops of this process completed their last round.

One process runs each of these loops at a time: the one that holds its lock. Every process exports
all its loops from its start on, so an alert on the latest value of all processes also fires when
none of them gets the lock. The registry belongs to the process and not to a run of its service: a
service that waits for a server keeps its values.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator

from penstock import metrics
from penstock.errors import Unavailable
from penstock.metrics import Sample
from penstock.postgres.session import Session

log = logging.getLogger(__name__)

# Seconds between two attempts to take the lock of another replica.
LOCK_EVERY_S = 2.0


class Rounds:
    """The last rounds of loops.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last_s: dict[str, float] = {}
        self._every_s: dict[str, float] = {}

    def expect(self, loop: str, every_s: float) -> None:
        """This process runs a loop, perhaps in turn with other processes.

        Args:
            loop: its name in metrics.
            every_s: most seconds between two of its rounds while it is idle.
        """
        self._every_s[loop] = every_s
        self._last_s.setdefault(loop, self._clock())

    def complete(self, loop: str) -> None:
        """A loop has completed a round, also one that found nothing to do."""
        self._last_s[loop] = self._clock()

    def samples(self) -> Iterator[Sample]:
        """The current samples."""
        for loop, last_s in self._last_s.items():
            yield Sample(metrics.LAST_ROUND, last_s, (loop,))
            yield Sample(metrics.ROUND_INTERVAL, self._every_s[loop], (loop,))


ROUNDS = Rounds()


async def sweep_in_one_replica(
    session: Session, lock: str, sweep: Callable[[], Awaitable[None]], *, loop: str, every_s: float
) -> None:
    """Sweeps at intervals until cancelled, in the replica whose session holds the lock.

    Args:
        session: holds the lock.
        lock: of the query `outbox.sweep`.
        sweep: one round; a later round does what an unavailable server has left.
        loop: its name in metrics.
        every_s: seconds between two rounds.

    Raises:
        SessionLost: the lock is gone with its session.
    """
    owned = False
    ROUNDS.expect(loop, every_s)
    while True:
        try:
            owned = owned or bool(await session.fetchval("outbox.sweep", lock))
            if owned:
                await sweep()
                ROUNDS.complete(loop)
        except Unavailable as error:
            log.warning(
                "A server is unavailable; the next sweep publishes what is left",
                extra={"event": "sweep_delayed", "loop": loop, "error": str(error)},
            )
        # The end of the session wakes it too: then `fetchval` or the sweep raises.
        try:
            async with asyncio.timeout(every_s if owned else min(LOCK_EVERY_S, every_s)):
                await session.lost.wait()
        except TimeoutError:
            continue
