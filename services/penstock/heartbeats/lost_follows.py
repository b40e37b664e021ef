"""Finds attempts with which a worker went on, and which it was lost with before it claimed them.

No record tells of them, so the recount would find them a minute later. In doubt (results not
committed yet, Kafka unavailable) nothing is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.concurrency.retry import retry_until_available
from penstock.errors import PostgresUnavailable
from penstock.heartbeats.lease_tracker import LeaseTracker
from penstock.heartbeats.unwatched import UnwatchedAttempts

# Seconds between two searches. An attempt that two of them find gets a lease.
SEARCH_S = 3.0
# The most of its time that it searches: a search reads all running attempts of the partitions.
MOST_SHARE = 0.02


class LostFollows:
    """Grants leases to attempts that their workers have neither claimed nor ended in time.

    Args:
        search: for such attempts only.
        leases: of this process.
        clock: monotonic seconds.
    """

    def __init__(self, search: UnwatchedAttempts, leases: LeaseTracker, clock: Callable[[], float]) -> None:
        self._search = search
        self._leases = leases
        self._clock = clock

    async def run(self) -> None:
        """Searches the partitions of this process until cancelled."""
        took_s = 0.0
        while True:
            await asyncio.sleep(max(SEARCH_S, took_s / MOST_SHARE))
            began_s = self._clock()
            await retry_until_available(
                self._step, waiting_for="attempts without a claim", retry_on=(PostgresUnavailable,)
            )
            took_s = self._clock() - began_s

    async def _step(self) -> None:
        found = await self._search.find(self._leases.partitions, self._leases.is_watched, self._clock())
        for lease in found.unwatched:
            # As without a claim in general: the loss of its worker is not charged.
            lease.begun = False
        self._leases.watch(found.unwatched)
