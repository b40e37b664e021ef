"""Finds running attempts that have no lease, and that no result will end.

A worker ends a lease once its result is on Kafka, and the commit of that result ends the attempt.
If the result is lost on its way or takes no effect, the attempt would run forever. When in doubt
(results not committed yet, Kafka unavailable) this module finds nothing: a late result is not a
lost one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import asyncpg

from penstock.core.attempt import AttemptId
from penstock.core.leases import Lease
from penstock.errors import Unavailable
from penstock.kafka.connection import admin_client, translated
from penstock.kafka.offset_reader import observing
from penstock.kafka.topic_config import partitions_of
from penstock.kafka.topics import STAGE_RESULTS, service_group
from penstock.postgres import leases
from penstock.settings import Kafka

log = logging.getLogger(__name__)


class UnwatchedAttempts:
    """Finds attempts that are unwatched at two calls, with all results committed in between.

    Args:
        settings: where Kafka is.
        pool: of the database.
    """

    def __init__(self, settings: Kafka, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._settings = settings
        self._pool = pool
        self._candidates: set[AttemptId] = set()
        self._ends: dict[int, int] = {}

    async def find(
        self, partitions: Collection[int], is_watched: Callable[[AttemptId], bool], now_s: float
    ) -> list[Lease]:
        """Returns new leases for unwatched attempts.

        Args:
            partitions: of `heartbeats` that this process has.
            is_watched: whether this process has a lease on an attempt.
            now_s: when the leases begin.

        Raises:
            PostgresUnavailable: no server.
        """
        try:
            if self._candidates and not await self._committed():
                return []
        except Unavailable as error:
            log.info(
                "The committed offsets of results are unknown; searching for unwatched attempts later",
                extra={"event": "unwatched_search_postponed", "error": str(error)},
            )
            return []
        unwatched = [
            lease
            for lease in await leases.held(self._pool, partitions, now_s)
            if not is_watched(lease.attempt_id)
        ]
        found = [lease for lease in unwatched if lease.attempt_id in self._candidates]
        self._candidates = {lease.attempt_id for lease in unwatched} - {lease.attempt_id for lease in found}
        if self._candidates:
            try:
                # After the query: a result that ends a candidate is before these ends.
                self._ends = await self._results_end()
            except Unavailable as error:
                log.info(
                    "The ends of the results topic are unknown; searching for unwatched attempts anew",
                    extra={"event": "unwatched_search_restarted", "error": str(error)},
                )
                self._candidates = set()
        return found

    async def _results_end(self) -> dict[int, int]:
        topic = STAGE_RESULTS.name
        async with observing(self._settings) as offsets:
            ends = await offsets.ends(
                [(topic, number) for number in range(partitions_of(self._settings, STAGE_RESULTS))]
            )
        return {number: end for (_topic, number), end in ends.items()}

    async def _committed(self) -> bool:
        group = service_group(self._settings.prefix, "stages")
        async with admin_client(self._settings) as admin:
            with translated():
                offsets = await admin.list_consumer_group_offsets(group)
        committed = {tp.partition: meta.offset for tp, meta in offsets.items()}
        return all(committed.get(number, 0) >= end for number, end in self._ends.items() if end)
