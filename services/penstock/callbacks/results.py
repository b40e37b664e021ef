"""Publishes the records of ended callbacks: results on `callbacks.results`, and dead letters.

PostgreSQL has the outcomes, and the records in `callback_outbox`, written in one transaction. The
process that wrote them publishes them in the background and deletes their rows. The sweeper of one
process publishes what a crash or an outage of a topic left. Each topic is published on its own, so
one that takes no records delays no other, and no call.

A record that is published twice has the same id; when in doubt, both publish.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any
from uuid import UUID

import asyncpg
from aiokafka import AIOKafkaProducer

from penstock.callbacks.settings import CallbacksSettings
from penstock.concurrency.batcher import Batcher
from penstock.errors import KafkaRefused, KafkaUnavailable, PostgresUnavailable, RecordsRefused
from penstock.kafka.client.refusals import refusal_error
from penstock.kafka.processing.outbox import send_all
from penstock.kafka.topology.topics import CALLBACKS_DEAD, CALLBACKS_RESULTS
from penstock.metrics.rounds import sweep_in_one_replica
from penstock.postgres import callback_outbox
from penstock.postgres.callback_outbox import OutboxRow
from penstock.postgres.session import Session
from penstock.process import run_all

log = logging.getLogger(__name__)

# The sweeper's name in metrics.
LOOP = "results_sweeper"
TOPICS = (CALLBACKS_RESULTS.name, CALLBACKS_DEAD.name)
# Seconds that a process leaves a topic to the sweeper after it took no records.
PAUSE_S = 10.0
# Most seconds for the publication of a batch: a deleted topic is looked for without end.
PUBLISH_S = 15.0
# Rows that wait in memory for one topic; the sweeper publishes more.
MOST_WAITING = 1_000
# Rows that the sweeper reads at a time: each may have a megabyte.
ROWS_PER_BATCH = 20
# Seconds between two attempts to publish records that Kafka has refused: a limit may be raised.
REFUSED_EVERY_S = 60.0
# The errors of a topic that takes no records now, or not from this user.
_TAKES_NONE = (KafkaUnavailable, KafkaRefused, TimeoutError)

# Reads the rows behind an id.
_Read = Callable[[Any, UUID], Awaitable[list[OutboxRow]]]


class ResultsPublisher:
    """Publishes what this process has enqueued, soon after the commit.

    Args:
        settings: of the service.
        pool: of the database.
        producer: with acks=all.
    """

    def __init__(
        self,
        settings: CallbacksSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: AIOKafkaProducer,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._producer = producer
        self._clock = asyncio.get_running_loop().time
        self._batchers = {
            topic: Batcher(partial(self._publish, topic), max_size=ROWS_PER_BATCH) for topic in TOPICS
        }
        # By topic that took no records: until when the sweeper alone publishes.
        self._paused_until_s: dict[str, float] = {}

    def __len__(self) -> int:
        """Rows that are on their way to Kafka."""
        return sum(map(len, self._batchers.values()))

    def publish(self, rows: Iterable[OutboxRow]) -> None:
        """Takes over rows that a committed transaction has enqueued."""
        for row in rows:
            batcher = self._batchers[row.topic]
            if len(batcher) < MOST_WAITING and self._clock() >= self._paused_until_s.get(row.topic, 0.0):
                batcher.add(row)

    async def run(self) -> None:
        """Waits until cancelled.

        Raises:
            Fatal: this producer is broken for good.
        """
        await run_all(*(batcher.run() for batcher in self._batchers.values()))

    async def _publish(self, topic: str, rows: Sequence[OutboxRow]) -> None:
        if self._clock() < self._paused_until_s.get(topic, 0.0):
            return
        try:
            async with asyncio.timeout(PUBLISH_S):
                refused = await _send(self._producer, self._settings.prefix + topic, rows)
        except _TAKES_NONE as error:
            self._paused_until_s[topic] = self._clock() + PAUSE_S
            log.warning(
                "A topic takes no results of callbacks; the sweeper publishes them",
                extra={"event": "results_left_to_sweeper", "topic": topic, "error": str(error)},
            )
            return
        try:
            # The sweeper finds those that Kafka refuses, and parks them.
            await callback_outbox.delete_published(
                self._pool, [row.id for row in rows if row.id not in refused]
            )
        except PostgresUnavailable as error:
            # The sweeper publishes them a second time, which their ids make harmless.
            log.warning(
                "PostgreSQL is unavailable; published outbox rows are not deleted",
                extra={"event": "published_rows_kept", "rows": len(rows), "error": str(error)},
            )


class ResultsSweeper:
    """Publishes the rows that their writers have left.

    Any number of replicas may run it: one of them holds the lock, by its session, and sweeps.

    Args:
        settings: of the service.
        session: holds the lock.
        producer: with acks=all.
    """

    def __init__(self, settings: CallbacksSettings, session: Session, producer: AIOKafkaProducer) -> None:
        self._settings = settings
        self._session = session
        self._producer = producer
        self._refused_at_s = -math.inf

    async def run(self) -> None:
        """Sweeps at intervals until cancelled.

        Raises:
            SessionLost: the lock is gone with its session.
        """
        await sweep_in_one_replica(
            self._session,
            "callback_results",
            self.sweep,
            loop=LOOP,
            every_s=self._settings.sweep_every_s,
        )

    async def sweep(self) -> None:
        """Publishes all rows that are left, of each topic that takes records.

        Raises:
            SessionLost: as `run`.
            PostgresUnavailable: the rows that are left stay in the outbox.
        """
        now_s = time.monotonic()
        with_refused = now_s >= self._refused_at_s + REFUSED_EVERY_S
        if with_refused:
            self._refused_at_s = now_s
        await run_all(*(self._sweep_topic(topic, with_refused=with_refused) for topic in TOPICS))

    async def _sweep_topic(self, topic: str, *, with_refused: bool) -> None:
        age_s = self._settings.sweep_age_s
        swept = await self._publish_pages(
            topic,
            lambda connection, _after: callback_outbox.unpublished(
                connection, topic, age_s=age_s, limit=ROWS_PER_BATCH
            ),
        )
        if with_refused:
            swept += await self._publish_pages(
                topic,
                lambda connection, after: callback_outbox.refused(
                    connection, topic, behind=after, limit=ROWS_PER_BATCH
                ),
            )
        if swept:
            log.info(
                "Results of callbacks that their writer had not published are published",
                extra={"event": "results_swept", "topic": topic, "records": swept},
            )

    async def _publish_pages(self, topic: str, read: _Read) -> int:
        """Publishes page after page; returns how many records it published."""
        swept = 0
        after = callback_outbox.FIRST
        while True:
            async with self._session.connection() as connection:
                rows = await read(connection, after)
            if not rows:
                return swept
            after = rows[-1].id
            try:
                async with asyncio.timeout(PUBLISH_S):
                    refused = await _send(self._producer, self._settings.prefix + topic, rows)
            except _TAKES_NONE as error:
                log.warning(
                    "A topic takes no results of callbacks; they wait in the outbox",
                    extra={"event": "results_waiting", "topic": topic, "error": str(error)},
                )
                return swept
            async with self._session.connection() as connection:
                for row in rows:
                    # Without the mark, the sweeper would publish the row first in every round.
                    if row.id in refused:
                        await callback_outbox.park(connection, row, refused[row.id])
                published = [row.id for row in rows if row.id not in refused]
                await callback_outbox.delete_published(connection, published)
            swept += sum(len(row.records) for row in rows if row.id not in refused)
            if len(rows) < ROWS_PER_BATCH:
                return swept


async def _send(
    producer: AIOKafkaProducer, topic: str, rows: Sequence[OutboxRow]
) -> dict[UUID, RecordsRefused]:
    """Writes rows to a topic; returns those with records that Kafka refuses.

    Raises:
        KafkaUnavailable, KafkaRefused: some may not be there; send all of them again.
    """
    records = [record for row in rows for record in zip(row.keys, row.records, strict=True)]
    try:
        await send_all(producer, topic, records)
    except RecordsRefused as error:
        refused: dict[UUID, RecordsRefused] = {}
        begin = 0
        for row in rows:
            end = begin + len(row.records)
            found = {at - begin: why for at, why in error.records.items() if begin <= at < end}
            if found:
                refused[row.id] = refusal_error(found)
            begin = end
        return refused
    return {}
