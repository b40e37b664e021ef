"""Finds running attempts that have no lease, and that no result will end.

A worker ends a lease once its result is on Kafka, and the commit of that result ends the attempt.
If the result is lost on its way or takes no effect, the attempt would run forever. When in doubt
(results not committed yet, Kafka unavailable) this module finds nothing: a late result is not a
lost one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import asyncpg

from penstock.core.attempt import AttemptId
from penstock.core.leases import Lease
from penstock.errors import Unavailable
from penstock.heartbeats.results_progress import ResultsProgress
from penstock.postgres import leases

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recount:
    """The running attempts of some partitions.

    Attributes:
        held: a lease for each of them.
        unwatched: those of the leases that are missing and that no result will end.
    """

    held: list[Lease]
    unwatched: list[Lease]


class UnwatchedAttempts:
    """Finds attempts that are unwatched at two calls, with all results committed in between.

    Args:
        progress: of the stage processor.
        pool: of the database.
        unclaimed: searches only those with which a worker went on, and which it has not claimed;
            None searches all.
    """

    def __init__(
        self,
        progress: ResultsProgress,
        pool: asyncpg.Pool[asyncpg.Record],
        *,
        unclaimed: bool | None = None,
    ) -> None:
        self._unclaimed = unclaimed
        self._progress = progress
        self._pool = pool
        self._candidates: set[AttemptId] = set()
        self._ends: dict[int, int] = {}

    async def find(
        self, partitions: Collection[int], is_watched: Callable[[AttemptId], bool], now_s: float
    ) -> Recount:
        """Reads the running attempts of partitions, and finds the unwatched ones.

        Args:
            partitions: of `heartbeats` that this process has.
            is_watched: whether this process has a lease on an attempt.
            now_s: when the leases begin.

        Raises:
            PostgresUnavailable: no server.
        """
        # Before the query: afterwards a candidate that still runs has no result on Kafka.
        conclusive = await self._is_conclusive()
        held = await leases.held(self._pool, partitions, now_s, unclaimed=self._unclaimed)
        if not conclusive:
            return Recount(held, [])
        unwatched = [lease for lease in held if not is_watched(lease.attempt_id)]
        found = [lease for lease in unwatched if lease.attempt_id in self._candidates]
        self._candidates = {lease.attempt_id for lease in unwatched} - {lease.attempt_id for lease in found}
        if self._candidates:
            try:
                # After the query: a result that ends a candidate is before these ends.
                self._ends = await self._progress.ends()
            except Unavailable as error:
                log.info(
                    "The ends of the results topic are unknown; searching for unwatched attempts anew",
                    extra={"event": "unwatched_search_restarted", "error": str(error)},
                )
                self._candidates = set()
        return Recount(held, found)

    async def _is_conclusive(self) -> bool:
        """Whether the results that were on Kafka at the last search are all committed."""
        try:
            return not self._candidates or await self._committed()
        except Unavailable as error:
            log.info(
                "The committed offsets of results are unknown; searching for unwatched attempts later",
                extra={"event": "unwatched_search_postponed", "error": str(error)},
            )
            return False

    async def _committed(self) -> bool:
        committed = await self._progress.committed(self._ends)
        return all(committed[number] >= end for number, end in self._ends.items())
