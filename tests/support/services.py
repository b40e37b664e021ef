"""Runs services inside a test, and reads the records that they wrote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import orjson
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from penstock.errors import KafkaUnavailable, PenstockError
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import PLATFORM
from penstock.settings import Kafka
from tests.support.waiting import wait_until

# Seconds before a service that has ended is started again.
RESTART_DELAY_S = 0.5


@asynccontextmanager
async def running_service(
    service: Callable[[asyncio.Event, Callable[[], None]], Awaitable[None]],
) -> AsyncIterator[asyncio.Task[None]]:
    """Starts a service, waits until it is ready, and stops it at the end; raises what the
    service raised."""
    stopping, ready = asyncio.Event(), asyncio.Event()
    task = asyncio.ensure_future(service(stopping, ready.set))
    waiting = asyncio.ensure_future(ready.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
        raise AssertionError("the service ended before it was ready")
    try:
        yield task
    finally:
        stopping.set()
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()


@asynccontextmanager
async def restarted_when_ended(
    make: Callable[[], Callable[[asyncio.Event, Callable[[], None]], Awaitable[None]]],
) -> AsyncIterator[None]:
    """Restarts a service that ends, as its supervisor would."""
    stopping = asyncio.Event()
    restarts = 0

    async def run() -> None:
        nonlocal restarts
        while not stopping.is_set():
            try:
                await make()(stopping, lambda: None)
            except PenstockError:
                restarts += 1
                assert restarts < 50
                # As a supervisor does; an outage of seconds would otherwise use up all restarts.
                await asyncio.sleep(RESTART_DELAY_S)

    task = asyncio.ensure_future(run())
    try:
        yield
    finally:
        stopping.set()
        await task


async def make_topics(kafka: str, prefix: str) -> Kafka:
    """The platform's topics under a prefix; returns the settings that lead to them."""
    settings = Kafka(kafka=kafka, prefix=prefix)
    await create_topics(settings, PLATFORM)
    return settings


@asynccontextmanager
async def producing(kafka: str) -> AsyncIterator[AIOKafkaProducer]:
    """A started producer."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka, acks="all")
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


@asynccontextmanager
async def producing_when_available(settings: Kafka, timeout_s: float) -> AsyncIterator[AIOKafkaProducer]:
    """A producer, which starts as soon as a broker answers."""
    async with AsyncExitStack() as stack:

        async def started() -> AIOKafkaProducer | None:
            try:
                return await stack.enter_async_context(running(make_producer(settings)))
            except KafkaUnavailable:
                return None

        yield await wait_until(started, timeout=timeout_s, every=0.2, what="a producer has started")


async def write(
    kafka: str, topic: str, *values: Any, key: bytes | None = None, partition: int | None = None
) -> None:
    """Writes records in order; values other than bytes are written as JSON."""
    async with producing(kafka) as producer:
        for value in values:
            data = value if isinstance(value, bytes) else orjson.dumps(value)
            await producer.send_and_wait(topic, data, key=key, partition=partition)


async def read(kafka: str, topic: str) -> list[Any]:
    """Returns the JSON of all records of a topic, one partition after the other."""
    return [orjson.loads(record.value) for record in await read_records(kafka, topic)]


async def read_records(kafka: str, topic: str) -> list[Any]:
    """Returns all records of a topic, one partition after the other."""
    consumer = AIOKafkaConsumer(bootstrap_servers=kafka, auto_offset_reset="earliest")
    await consumer.start()
    try:
        # The first metadata lacks topics that were created just before.
        await consumer._client.force_metadata_update()
        numbers = consumer.partitions_for_topic(topic) or set()
        partitions = [TopicPartition(topic, number) for number in sorted(numbers)]
        if not partitions:
            return []
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        await consumer.seek_to_beginning(*partitions)
        found: dict[TopicPartition, list[Any]] = {tp: [] for tp in partitions}
        while True:
            left = [tp for tp in partitions if await consumer.position(tp) < ends[tp]]
            if not left:
                return [record for records in found.values() for record in records]
            for tp, records in (await consumer.getmany(*left, timeout_ms=500)).items():
                found[tp] += records
    finally:
        await consumer.stop()
