"""Finding attempts that were released and never ended.

A worker releases a lease once its result is on Kafka, and the commit of that result ends the attempt. When the result
was lost on the way, or took no effect, the attempt would run for ever: nobody watches it. In doubt (results not yet
committed, Kafka away) nothing is found: whoever is late is not lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import asyncpg

from penstock.core.leases import Key, Lease
from penstock.errors import Unavailable
from penstock.kafka.connection import admin_client, translated
from penstock.kafka.declared import partitions_of
from penstock.kafka.observer import observing
from penstock.kafka.topics import STAGE_RESULTS, service_group
from penstock.postgres import leases
from penstock.settings import Kafka

log = logging.getLogger(__name__)


class Recount:
    """Looks twice: what nobody watches at the first look, and still runs once all results there were are committed.

    Args:
        settings: where Kafka is.
        pool: of the database.
    """

    def __init__(self, settings: Kafka, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self._settings = settings
        self._pool = pool
        self._suspects: set[Key] = set()
        self._ends: dict[int, int] = {}

    async def look(
        self, partitions: Collection[int], watched: Callable[[Key], bool], now_s: float
    ) -> list[Lease]:
        """Leases for attempts that nobody watches and nobody will end.

        Args:
            partitions: of `heartbeats` that are ours.
            watched: whether somebody does.
            now_s: when the leases begin.

        Raises:
            PostgresUnavailable: no server.
        """
        try:
            if self._suspects and not await self._committed():
                return []
        except Unavailable as error:
            log.info("it is not known whether all results are committed: %s", error)
            return []
        running = [
            lease for lease in await leases.held(self._pool, partitions, now_s) if not watched(lease.key)
        ]
        found = [lease for lease in running if lease.key in self._suspects]
        self._suspects = {lease.key for lease in running} - {lease.key for lease in found}
        if self._suspects:
            try:
                # After the look: a result that ends one of them is before these ends.
                self._ends = await self._results_end()
            except Unavailable as error:
                log.info("it is not known where the results end: %s", error)
                self._suspects = set()
        return found

    async def _results_end(self) -> dict[int, int]:
        topic = STAGE_RESULTS.name
        async with observing(self._settings) as observer:
            ends = await observer.ends(
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
