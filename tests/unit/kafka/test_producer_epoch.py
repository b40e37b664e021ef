"""Producers change their client library: compression, and what a failed batch leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import KafkaTimeoutError
from aiokafka.producer.transaction_manager import PidAndEpoch

from penstock.errors import SessionLost
from penstock.kafka.client.connection import make_producer
from penstock.settings import Kafka


async def test_batches_are_compressed_quickly() -> None:
    """L: compression would take half of the time that a line of a task log takes."""
    producer: Any = make_producer(Kafka(kafka="127.0.0.1:1", prefix=""), compression="gzip")
    builder = producer.create_batch()
    builder.append(key=None, value=b"x" * 1_000, timestamp=None)
    builder.close()
    builder._build()
    data = bytes(builder._buffer)
    # The flag of gzip's header for its fastest level.
    assert data[data.index(b"\x1f\x8b") + 8] == 4
    await producer.stop()


async def test_a_batch_that_fails_before_it_is_sent_again_fails_once() -> None:
    """H6, O1: a producer stops while a batch waits to be sent again, as in an outage. The sender of
    the batch gets the error, and asyncio reports none of the client library."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    producer: Any = make_producer(Kafka(kafka="127.0.0.1:1", prefix=""))
    producer._txn_manager._pid_and_epoch = PidAndEpoch(1, 0)
    accumulator, partition = producer._message_accumulator, TopicPartition("t", 0)
    builder = producer.create_batch()
    builder.append(key=None, value=b"1", timestamp=None)
    sent = await accumulator.add_batch(builder, partition, 1.0)
    accumulator.reenqueue(accumulator._pop_batch(partition))
    accumulator.fail_all(KafkaTimeoutError())
    with pytest.raises(SessionLost, match="KafkaTimeoutError"):
        await sent
    await producer.stop()
    assert not reported
