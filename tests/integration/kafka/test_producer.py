"""A refused batch ends no producer, on a real broker."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.support.waiting import wait_until

from penstock.concurrency.retry import retry_until_available
from penstock.errors import KafkaUnavailable, RecordsRefused
from penstock.kafka import topic_plan
from penstock.kafka.connection import (
    admin_client,
    create_topics,
    make_consumer,
    make_producer,
    running,
    translated,
)
from penstock.kafka.outbox import send_all
from penstock.kafka.topic_config import STAMP
from penstock.kafka.topics import Topic
from penstock.settings import Kafka

SMALL = Topic("small", 1, None, "Records of at most 2,000 bytes.", 2_000)
LARGE = b"x" * 3_000


@pytest.fixture
async def small(kafka_servers: str, prefix: str) -> Kafka:
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, [SMALL])
    return settings


async def read(settings: Kafka, count: int) -> list[bytes]:
    async with running(make_consumer(settings, None, settings.prefix + SMALL.name)) as consumer:
        return [(await asyncio.wait_for(consumer.getone(), 30)).value for _ in range(count)]


async def test_a_producer_goes_on_after_a_refused_batch(small: Kafka) -> None:
    """O1: a broker that refuses a batch (MESSAGE_TOO_LARGE) ends no producer. The records after it
    on the same partition are written; before, each got OUT_OF_ORDER_SEQUENCE_NUMBER without end."""
    topic = small.prefix + SMALL.name
    async with running(make_producer(small)) as producer:
        await producer.send_and_wait(topic, b"before", partition=0)
        for number in range(3):
            with pytest.raises(RecordsRefused), translated():
                await producer.send_and_wait(topic, LARGE, partition=0)
            with translated():
                await producer.send_and_wait(topic, b"after %d" % number, partition=0)
    assert await read(small, 4) == [b"before", b"after 0", b"after 1", b"after 2"]


async def test_records_behind_a_refused_one_are_written(small: Kafka) -> None:
    """O1: of records that are sent concurrently, the broker refuses the large ones alone: the
    others are written, in order, by the same producer."""
    topic = small.prefix + SMALL.name
    values = [LARGE if number % 5 == 0 else b"%d" % number for number in range(20)]
    async with running(make_producer(small)) as producer:
        with pytest.raises(RecordsRefused) as refused:
            await send_all(producer, topic, [(None, value) for value in values])
        assert sorted(refused.value.records) == [0, 5, 10, 15]
    small_ones = [value for value in values if value != LARGE]
    assert await read(small, len(small_ones)) == small_ones


async def test_a_batch_larger_than_the_topic_takes_is_written_in_parts(small: Kafka) -> None:
    """O1: a topic with a smaller limit than our batches refuses no record that it would take
    alone."""
    topic = small.prefix + SMALL.name
    values = [b"%03d" % number + b"." * 500 for number in range(40)]
    async with running(make_producer(small)) as producer:
        await send_all(producer, topic, [(None, value) for value in values])
    assert sorted(await read(small, 40)) == values


async def test_a_clock_that_is_ahead_delays_and_ends_nothing(small: Kafka) -> None:
    """O1: on a topic of an older version, a broker refuses records of a process whose clock is two
    hours ahead. That is no fault of the records: they are sent again, and accepted once brokers
    stamp them."""
    topic = small.prefix + SMALL.name
    ahead_ms = int((time.time() + 7200) * 1000)
    async with running(make_producer(small)) as producer, admin_client(small) as client:

        async def write() -> None:
            with translated():
                await producer.send_and_wait(topic, b"ahead", partition=0, timestamp_ms=ahead_ms)

        async def refused() -> bool:
            try:
                await write()
            except KafkaUnavailable as error:
                return "penstock topics" in str(error)
            return False

        await topic_plan._alter(client, {topic: {STAMP: "CreateTime"}})
        await wait_until(refused, what="the broker refuses the stamp")
        await topic_plan._alter(client, {topic: {STAMP: "LogAppendTime"}})
        await retry_until_available(write, waiting_for="the broker's stamp")


async def test_a_producer_whose_sequence_the_broker_lost_goes_on(small: Kafka) -> None:
    """O1: a broker that no longer knows the sequence of a producer (OUT_OF_ORDER_SEQUENCE_NUMBER)
    refuses one batch, which is sent again; it does not end the process."""
    topic = small.prefix + SMALL.name
    async with running(make_producer(small)) as producer:
        await send_all(producer, topic, [(None, b"first")])
        # A gap, as a broker that has lost its tail sees it.
        for tp in list(producer._txn_manager._sequence_numbers):
            producer._txn_manager._sequence_numbers[tp] += 7
        await send_all(producer, topic, [(None, b"second")])
    assert await read(small, 2) == [b"first", b"second"]


async def test_used_up_epochs_get_a_new_producer_id(small: Kafka) -> None:
    """O1: after as many refusals as a producer id has epochs, the producer gets another id."""
    topic = small.prefix + SMALL.name
    async with running(make_producer(small)) as producer:
        await producer.send_and_wait(topic, b"before", partition=0)
        manager = producer._txn_manager
        old = manager.producer_id
        manager._pid_and_epoch = manager._pid_and_epoch._replace(epoch=2**15 - 2)
        manager._sequence_numbers.clear()
        for number in range(3):
            with pytest.raises(RecordsRefused), translated():
                await producer.send_and_wait(topic, LARGE, partition=0)
            with translated():
                await producer.send_and_wait(topic, b"after %d" % number, partition=0)
        assert manager.producer_id != old
    assert await read(small, 4) == [b"before", b"after 0", b"after 1", b"after 2"]
