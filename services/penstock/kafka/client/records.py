"""Reads and deletes records of a topic, outside its groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete

from penstock.contracts.ready import MARKER, ReadyTask
from penstock.errors import InvalidRecord, KafkaUnavailable
from penstock.kafka.client.connection import make_consumer, running, translated
from penstock.kafka.client.consumer import Consumer
from penstock.settings import Kafka

log = logging.getLogger(__name__)


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


async def read_within(
    settings: Kafka, offsets: Mapping[TopicPartition, int], limit: int, *, within_s: float
) -> dict[TopicPartition, list[Any]]:
    """As `read_records`, by a consumer of its own.

    Args:
        settings: where.
        offsets: see `read_records`.
        limit: see `read_records`.
        within_s: seconds for all.

    Raises:
        KafkaUnavailable: no broker answered in time.
        KafkaRefused: this user may not read the topic.
    """
    try:
        async with asyncio.timeout(within_s), running(make_consumer(settings, None)) as consumer:
            with translated():
                return await read_records(consumer, offsets, limit)
    except TimeoutError as error:
        raise KafkaUnavailable(f"no broker returned the records within {within_s:g} s") from error


async def read_records(
    consumer: Consumer, offsets: Mapping[TopicPartition, int], limit: int
) -> dict[TopicPartition, list[Any]]:
    """The records from given offsets on.

    Args:
        consumer: outside all groups.
        offsets: by partition, the first offset; the oldest record, if that is gone.
        limit: most records of a partition.

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


def ready_task(record: Any, type_name: str) -> ReadyTask | None:
    """The task of a record of a type's ready topic; None for a mark and for an invalid record."""
    if record.value == MARKER:
        return None
    try:
        return ReadyTask.decode(record.value or b"", type_name)
    except InvalidRecord as invalid:
        # Only task-sync writes here. The records behind a foreign one must not wait for it.
        log.error(  # noqa: TRY400 (the error is a field)
            "Skipped an invalid record of a ready topic",
            extra={
                "event": "ready_record_skipped",
                "topic": record.topic,
                "partition": record.partition,
                "offset": record.offset,
                "error": str(invalid),
            },
        )
        return None


async def delete_before(admin: AIOKafkaAdminClient, offsets: Mapping[TopicPartition, int]) -> None:
    """Deletes the records before an offset of each partition.

    Raises:
        KafkaUnavailable: some records may be left.
        KafkaRefused: this user may not delete records of the topic.
    """
    with translated():
        await admin.delete_records({tp: RecordsToDelete(offset) for tp, offset in offsets.items()})
