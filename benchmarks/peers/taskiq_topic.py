"""taskiq on Kafka: each stage sends the next one.

The producer waits for all replicas. The consumers are in a group that begins at the earliest
record; without a group taskiq-aio-kafka keeps no offsets at all. The broker has no
acknowledgements: the client library commits the offsets of what was read, each 5 s. Partitioner and
assignor are those of aiokafka: the defaults come from kafka-python, whose version 3 they don't fit.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.partitioner import DefaultPartitioner
from taskiq_aio_kafka import AioKafkaBroker

from benchmarks.peers import job
from benchmarks.peers.taskiq_stages import stages

broker = AioKafkaBroker(os.environ[job.KAFKA], kafka_topic="taskiq")
broker.configure_producer(acks="all", partitioner=DefaultPartitioner())
broker.configure_consumer(
    group_id="taskiq",
    auto_offset_reset="earliest",
    partition_assignment_strategy=(RoundRobinPartitionAssignor,),
)
one = stages(broker)


async def prepare() -> None:
    """Creates the topic."""
    admin = AIOKafkaAdminClient(bootstrap_servers=os.environ[job.KAFKA])
    await admin.start()
    await admin.create_topics([NewTopic("taskiq", 8, 1)])
    await admin.close()


@asynccontextmanager
async def submitter() -> AsyncIterator[Callable[[dict[str, Any]], Awaitable[None]]]:
    """Sends a record per task."""
    await broker.startup()

    async def submit(context: dict[str, Any]) -> None:
        await one.kiq(context)

    yield submit
    await broker.shutdown()
