"""A refused batch ends no producer, on a real broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import KafkaConnectionError, OutOfOrderSequenceNumber, UnknownProducerId
from tests.support.waiting import in_time, wait_until

from penstock.concurrency.retry import retry_until_available
from penstock.errors import KafkaUnavailable, RecordsRefused, SessionLost
from penstock.kafka.client import connection
from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running, translated
from penstock.kafka.client.refusals import refused_by_topic
from penstock.kafka.processing.outbox import send_all
from penstock.kafka.topology import topic_plan
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topic_config import STAMP
from penstock.kafka.topology.topics import Topic
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
        return [(await in_time(consumer.getone())).value for _ in range(count)]


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


async def test_refused_records_are_counted_by_topic_and_reason(small: Kafka) -> None:
    """O4: each record that Kafka refuses counts once, however its batch is divided. A topic to
    which the process writes begins at 0."""
    topic = small.prefix + SMALL.name
    async with running(make_producer(small)) as producer:
        await send_all(producer, topic, [(None, b"small")])
        reasons = ("too_large", "policy", "timestamp", "invalid")
        before = {(SMALL.name, reason): 0 for reason in reasons}
        assert refused_by_topic(small.prefix).items() >= before.items()
        with pytest.raises(RecordsRefused):
            await send_all(
                producer, topic, [(None, LARGE if number % 5 == 0 else b"x") for number in range(20)]
            )
        with pytest.raises(RecordsRefused), translated():
            await producer.send_and_wait(topic, LARGE, partition=0)
        # Above the client's own limit.
        with pytest.raises(RecordsRefused):
            await send_all(producer, topic, [(None, b"x" * 9_000_000)])
    assert refused_by_topic(small.prefix).items() >= {**before, (SMALL.name, "too_large"): 6}.items()


async def test_a_batch_larger_than_the_topic_takes_is_written_in_parts(small: Kafka) -> None:
    """O1: a topic with a smaller limit than our batches refuses no record that it would take
    alone."""
    topic = small.prefix + SMALL.name
    values = [b"%03d" % number + b"." * 500 for number in range(40)]
    async with running(make_producer(small)) as producer:
        await send_all(producer, topic, [(None, value) for value in values])
    assert sorted(await read(small, 40)) == values


async def test_a_clock_that_is_ahead_delays_and_ends_nothing(small: Kafka) -> None:
    """O1: on a topic that its writers stamp, a broker refuses records of a process whose clock is
    two hours ahead. That is no fault of the records: they are sent again, and accepted once brokers
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


PRODUCE = 0


def refusing(producer: AIOKafkaProducer, error: int, refuses: Callable[[], bool]) -> None:
    """Lets a producer receive `error` in place of the broker's answer while `refuses` is true."""
    send = producer.client.send

    async def answered(node: int, request: Any, **options: Any) -> Any:
        refused = request.API_KEY == PRODUCE and refuses()
        response = await send(node, request, **options)
        if refused:
            response.topics = [
                (topic, [(number, error, *rest) for number, _error, *rest in partitions])
                for topic, partitions in response.topics
            ]
        return response

    producer.client.send = answered


async def test_a_producer_that_the_broker_fences_repeatedly_gets_another_id(small: Kafka) -> None:
    """H6: the broker refuses each batch of a producer id, and serves others. After consecutive
    refusals the producer gets another id, and writes."""
    topic = small.prefix + SMALL.name
    async with running(make_producer(small)) as producer:
        await send_all(producer, topic, [(None, b"before")])
        old = producer._txn_manager.producer_id
        refusing(producer, UnknownProducerId.errno, lambda: producer._txn_manager.producer_id == old)
        await in_time(
            retry_until_available(
                lambda: send_all(producer, topic, [(None, b"after")]), waiting_for="another id"
            )
        )
        assert producer._txn_manager.producer_id != old


async def test_a_producer_that_the_broker_refuses_with_every_id_ends_its_process(small: Kafka) -> None:
    """H6: when another id does not help either, the producer ends its process with a clear error,
    instead of trying again without end beside a broker that answers others."""
    topic = small.prefix + SMALL.name
    async with running(make_producer(small)) as producer:
        refusing(producer, OutOfOrderSequenceNumber.errno, lambda: True)
        with pytest.raises(SessionLost, match="refuses each batch"):
            await in_time(
                retry_until_available(
                    lambda: send_all(producer, topic, [(None, b"x")]), waiting_for="the broker"
                )
            )
        with pytest.raises(SessionLost):
            await send_all(producer, topic, [(None, b"y")])


async def test_a_success_clears_the_count_of_refusals(small: Kafka) -> None:
    """H6: refusals with successes in between are not consecutive: the producer keeps its id."""
    topic = small.prefix + SMALL.name
    async with running(make_producer(small)) as producer:
        refused = iter([True, False] * 10)
        refusing(producer, OutOfOrderSequenceNumber.errno, lambda: next(refused))
        old = producer._txn_manager.producer_id
        for number in range(10):
            # Its batch is refused once and sent again.
            await send_all(producer, topic, [(None, b"%d" % number)])
        assert producer._txn_manager.producer_id == old


async def test_batches_that_are_refused_together_count_once(kafka_servers: str, prefix: str) -> None:
    """H6: a broker that lost the state of a producer refuses a batch on each partition. That is one
    refusal: the batches are sent again with the same id."""
    settings = Kafka(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, [Topic("wide", 20, None, "Many partitions.")])
    async with running(make_producer(settings)) as producer:
        first = iter([True])
        refusing(producer, OutOfOrderSequenceNumber.errno, lambda: next(first, False))
        old = producer._txn_manager.producer_id
        records = [(b"%d" % number, b"x") for number in range(200)]
        await send_all(producer, prefix + "wide", records)
        assert producer._txn_manager.producer_id == old


async def test_a_producer_whose_sender_has_ended_ends_its_process(
    small: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H6: aiokafka's sender ends at an error that it does not expect, and then no batch is ever
    sent. The process ends with a clear error."""
    topic = small.prefix + SMALL.name
    producer = make_producer(small)
    async with running(producer):
        await send_all(producer, topic, [(None, b"before")])

        def broken(**_options: Any) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr(producer._message_accumulator, "drain_by_nodes", broken)
        with pytest.raises(SessionLost, match="producer"):
            await in_time(
                retry_until_available(
                    lambda: send_all(producer, topic, [(None, b"x")]), waiting_for="the sender"
                )
            )


async def test_a_producer_stops_while_kafka_is_away(small: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """O1, O2: records that no broker takes do not hold up the stop of a producer, and so not the
    service that begins again. They fail."""

    async def away(*_arguments: object, **_more: object) -> None:
        raise KafkaConnectionError

    topic = small.prefix + SMALL.name
    async with asyncio.timeout(connection.STOP_S + 30):
        async with running(make_producer(small)) as producer:
            await producer.send_and_wait(topic, b"written", partition=0)
            monkeypatch.setattr(producer.client, "send", away)
            unwritten = await producer.send(topic, b"unwritten", partition=0)
    with pytest.raises((KafkaUnavailable, SessionLost)), translated():
        await unwritten
