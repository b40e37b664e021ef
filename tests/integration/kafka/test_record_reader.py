"""Reads of records outside all groups, on the real Kafka."""

import asyncio

import pytest
from aiokafka import TopicPartition
from tests.support.services import producing

from penstock.errors import KafkaUnavailable
from penstock.kafka.client import records
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready
from penstock.settings import Kafka


@pytest.fixture
async def partitions(kafka_servers, prefix):
    """Two partitions with three records each."""
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, [ready("t", 2)])
    found = [TopicPartition(f"{prefix}ready.t", number) for number in range(2)]
    async with producing(kafka_servers) as producer:
        for tp in found:
            for value in range(3):
                await producer.send_and_wait(tp.topic, b"%d" % value, partition=tp.partition)
    return settings, found


def values(found):
    return {tp.partition: [record.value for record in each] for tp, each in found.items()}


async def test_a_read_has_its_own_partitions_and_offsets(partitions):
    """S13: a read returns records from the given offsets on, at most so many of each partition."""
    settings, [first, second] = partitions
    both = await records.read_within(settings, {first: 1, second: 0}, 2, within_s=60)
    assert values(both) == {0: [b"1", b"2"], 1: [b"0", b"1"]}
    assert values(await records.read_within(settings, {first: 3}, 5, within_s=60)) == {0: []}


async def test_a_read_that_takes_too_long_ends(partitions, monkeypatch):
    """S13: a read ends in time while the broker does not answer."""
    settings, [first, _second] = partitions

    async def hang(*_given):
        await asyncio.Event().wait()

    monkeypatch.setattr(records, "read_records", hang)
    with pytest.raises(KafkaUnavailable):
        await records.read_within(settings, {first: 0}, 1, within_s=1)
