"""Records that are deleted before a member of a workers' group has read them."""

import logging

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import RecordsToDelete
from tests.support.services import make_topics, write
from tests.support.state_faults import recreate_topic

from penstock.errors import KafkaUnavailable
from penstock.kafka.client import positions
from penstock.kafka.client.connection import admin_client, running
from penstock.kafka.client.group_consumer import GroupConsumer
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import ready


@pytest.fixture
async def settings(kafka_servers, prefix):
    settings = await make_topics(kafka_servers, prefix)
    await create_topics(settings, [ready("t", 1)])
    return settings


def member(settings):
    async def revoked():
        pass

    consumer = GroupConsumer(settings, f"{settings.prefix}workers.t")
    consumer.follow(f"{settings.prefix}ready.t", revoked)
    return consumer


async def read(consumer, count):
    found = []
    while len(found) < count:
        for records in (await consumer.getmany(timeout_ms=500, max_records=count - len(found))).values():
            found += records
    return [record.value for record in found]


async def delete(settings, before_offset):
    async with admin_client(settings) as admin:
        await admin.delete_records(
            {TopicPartition(f"{settings.prefix}ready.t", 0): RecordsToDelete(before_offset)}
        )


async def test_a_member_reads_on_behind_deleted_records(settings, caplog):
    """W4: records that are deleted before a member of a workers' group has read them neither end it
    nor are reported; it continues with the oldest record that is left, and commits behind it. So
    does a member that starts there."""
    caplog.set_level(logging.WARNING)
    tp = TopicPartition(f"{settings.prefix}ready.t", 0)
    await write(settings.kafka, tp.topic, *(b"%d" % n for n in range(10)), partition=0)
    async with running(member(settings)) as consumer:
        assert await read(consumer, 3) == [b"0", b"1", b"2"]
        await consumer.commit()
        await delete(settings, 8)
        # As a worker that was full: what the client has fetched ahead is not used.
        consumer.seek(tp, 3)
        assert await read(consumer, 1) == [b"8"]
        await consumer.commit()
        assert (await consumer.committed(tp)) == 9
        await write(settings.kafka, tp.topic, b"10", b"11", partition=0)
        assert await read(consumer, 2) == [b"9", b"10"]
    await delete(settings, 11)
    async with running(member(settings)) as consumer:
        assert await read(consumer, 1) == [b"11"]
    assert not [entry for entry in caplog.records if entry.name.startswith("penstock")]
    assert not positions.deleted[tp.topic]


async def test_a_recreated_topic_is_not_taken_for_deleted_records(settings):
    """S1: an offset beyond a topic that was created again still ends the reader, which starts at
    the beginning of the new topic."""
    tp = TopicPartition(f"{settings.prefix}ready.t", 0)
    await write(settings.kafka, tp.topic, *(b"%d" % n for n in range(10)), partition=0)

    async def read_on():
        async with running(member(settings)) as consumer:
            assert len(await read(consumer, 10)) == 10
            await consumer.commit()
            await recreate_topic(settings, ready("t", 1))
            await write(settings.kafka, tp.topic, b"new", partition=0)
            await read(consumer, 1)

    with pytest.raises(KafkaUnavailable):
        await read_on()
    async with running(member(settings)) as consumer:
        assert await read(consumer, 1) == [b"new"]
