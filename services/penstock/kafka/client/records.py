"""Reads and deletes records of a topic, outside its groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from penstock.errors import KafkaUnavailable
from penstock.kafka.client.connection import make_consumer, own_cancellation, running, start, stop, translated
from penstock.settings import Kafka


async def records_of(settings: Kafka, topic: str, partitions: int) -> AsyncIterator[Any]:
    """The records of a topic, one partition after the other.

    Args:
        settings: where.
        topic: its full name.
        partitions: how many it has.

    Raises:
        KafkaUnavailable: no broker answered.
        KafkaRefused: this user may not read the topic.
    """
    async with running(make_consumer(settings, None)) as consumer:
        with translated():
            for number in range(partitions):
                partition = TopicPartition(topic, number)
                consumer.assign([partition])
                end = (await consumer.end_offsets([partition]))[partition]
                await consumer.seek_to_beginning(partition)
                while await consumer.position(partition) < end:
                    for record in (await consumer.getmany(partition, timeout_ms=500)).get(partition, ()):
                        yield record


class RecordReader:
    """Reads records from given offsets on. A consumer that has read is kept for the next read.

    Args:
        settings: where.
        reads: most reads at a time; others wait.
    """

    def __init__(self, settings: Kafka, reads: int) -> None:
        self._settings = settings
        self._reads = asyncio.Semaphore(reads)
        self._idle: list[AIOKafkaConsumer] = []

    async def read(
        self, offsets: Mapping[TopicPartition, int], limit: int, *, within_s: float
    ) -> dict[TopicPartition, list[Any]]:
        """The records from given offsets on, at most `limit` of each partition.

        Args:
            offsets: by partition, the first offset; the oldest record, if that is gone.
            limit: most records of a partition.
            within_s: seconds for all, a wait for other reads included.

        Raises:
            KafkaUnavailable: no broker answered in time.
            KafkaRefused: this user may not read the topic.
        """
        try:
            async with asyncio.timeout(within_s), self._reads, self._consumer() as consumer:
                with translated():
                    return await read_records(consumer, offsets, limit)
        except TimeoutError as error:
            raise KafkaUnavailable(f"no broker returned the records within {within_s:g} s") from error

    async def close(self) -> None:
        """Closes the consumers; no read may be under way."""
        while self._idle:
            await stop(self._idle.pop())

    @asynccontextmanager
    async def _consumer(self) -> AsyncIterator[AIOKafkaConsumer]:
        with own_cancellation():
            kept = bool(self._idle)
            consumer = self._idle.pop() if kept else make_consumer(self._settings, None)
            try:
                if not kept:
                    await start(consumer)
                yield consumer
                # Otherwise it would go on fetching. After `unsubscribe` the client's fetcher may
                # fail.
                consumer.assign([])
            except BaseException:
                await stop(consumer)
                raise
            self._idle.append(consumer)


async def read_records(
    consumer: AIOKafkaConsumer, offsets: Mapping[TopicPartition, int], limit: int
) -> dict[TopicPartition, list[Any]]:
    """As `RecordReader.read`, with a consumer outside all groups, and without a limit of time.

    Raises:
        KafkaError: of the client library.
    """
    found: dict[TopicPartition, list[Any]] = {tp: [] for tp in offsets}
    begins = await consumer.beginning_offsets(list(offsets))
    ends = await consumer.end_offsets(list(offsets))
    consumer.assign(list(offsets))
    for tp, offset in offsets.items():
        consumer.seek(tp, max(offset, begins[tp]))
    while left := [tp for tp in offsets if len(found[tp]) < limit and await consumer.position(tp) < ends[tp]]:
        for tp, records in (await consumer.getmany(*left, timeout_ms=500)).items():
            found[tp] += records
    return {tp: records[:limit] for tp, records in found.items()}


async def delete_before(admin: AIOKafkaAdminClient, offsets: Mapping[TopicPartition, int]) -> None:
    """Deletes the records before an offset of each partition.

    Raises:
        KafkaUnavailable: some records may be left.
        KafkaRefused: this user may not delete records of the topic.
    """
    with translated():
        await admin.delete_records({tp: RecordsToDelete(offset) for tp, offset in offsets.items()})
