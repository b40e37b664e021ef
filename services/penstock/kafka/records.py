"""Reads a small topic from its beginning to its present end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from aiokafka import TopicPartition

from penstock.kafka.connection import make_consumer, running, translated
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
