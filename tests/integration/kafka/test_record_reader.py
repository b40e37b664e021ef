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


@pytest.fixture
def made(monkeypatch):
    """The consumers that were made."""
    consumers = []
    make = records.make_consumer

    def make_and_note(*given):
        consumers.append(make(*given))
        return consumers[-1]

    monkeypatch.setattr(records, "make_consumer", make_and_note)
    return consumers


def values(found):
    return {tp.partition: [record.value for record in each] for tp, each in found.items()}


async def test_one_consumer_serves_one_read_after_the_other(partitions, made):
    """S13: each read has its own partitions and offsets, and a consumer that has read is used
    again."""
    settings, [first, second] = partitions
    reader = records.RecordReader(settings, 1)
    try:
        both = await reader.read({first: 1, second: 0}, 2, within_s=60)
        assert values(both) == {0: [b"1", b"2"], 1: [b"0", b"1"]}
        assert values(await reader.read({second: 2}, 5, within_s=60)) == {1: [b"2"]}
        assert values(await reader.read({first: 3}, 5, within_s=60)) == {0: []}
        again = await asyncio.gather(*(reader.read({first: 0}, 9, within_s=60) for _ in range(3)))
        assert [values(each) for each in again] == [{0: [b"0", b"1", b"2"]}] * 3
        assert len(made) == 1
    finally:
        await reader.close()


async def test_a_read_that_takes_too_long_closes_its_consumer(partitions, made, monkeypatch):
    """S13: a read ends in time while the broker does not answer, and the next one has a new
    consumer."""
    settings, [first, _second] = partitions
    reader = records.RecordReader(settings, 1)
    read = records.read_records

    async def hang(*_given):
        await asyncio.Event().wait()

    try:
        monkeypatch.setattr(records, "read_records", hang)
        with pytest.raises(KafkaUnavailable):
            await reader.read({first: 0}, 1, within_s=1)
        monkeypatch.setattr(records, "read_records", read)
        assert values(await reader.read({first: 0}, 1, within_s=60)) == {0: [b"0"]}
        assert len(made) == 2
    finally:
        await reader.close()
