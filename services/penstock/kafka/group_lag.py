"""The workers of a type's group, and the lag of its ready topic."""

from __future__ import annotations

import asyncio

from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.coordinator.protocol import ConsumerProtocolMemberAssignment

from penstock.core.position import taken
from penstock.core.why import GroupLag
from penstock.errors import KafkaUnavailable
from penstock.kafka.connection import admin_client, make_consumer, running, translated
from penstock.kafka.topics import ready, workers_group
from penstock.settings import Kafka

# An HTTP client waits for the answer.
ANSWER_S = 5.0


async def readers(settings: Kafka, type_name: str, partitions: int) -> GroupLag:
    """The workers of a type, also those behind a gateway, and their lag. Joins no group.

    Raises:
        KafkaUnavailable: no broker answered in time, or there is no such topic yet.
    """
    topic = settings.prefix + ready(type_name, partitions).name
    group = workers_group(settings.prefix, type_name)
    try:
        async with asyncio.timeout(ANSWER_S), admin_client(settings) as admin:
            with translated():
                # A consumer would wait for a topic that does not exist.
                if topic not in await admin.list_topics():
                    raise KafkaUnavailable(f"there is no topic {topic} yet")
                committed = await admin.list_consumer_group_offsets(group)
                workers = await _workers(admin, group, topic)
            async with running(make_consumer(settings, None)) as consumer:
                with translated():
                    asked = [TopicPartition(topic, number) for number in range(partitions)]
                    ends = await consumer.end_offsets(asked)
                    begins = await consumer.beginning_offsets(asked)
    except TimeoutError as error:
        raise KafkaUnavailable(f"no broker at {settings.kafka} answers within {ANSWER_S:g} s") from error
    offsets = {tp: meta.offset for tp, meta in committed.items()}
    # Deleted records are no lag, and a group whose offset is beyond the end reads the topic again.
    unread = (end - taken(offsets.get(tp, -1), begins[tp], end) for tp, end in ends.items())
    return GroupLag(workers, sum(unread))


async def _workers(admin: AIOKafkaAdminClient, group: str, topic: str) -> int | None:
    [response] = await admin.describe_consumer_groups([group])
    described = response.to_object()["groups"][0]
    if described["state"] not in ("Stable", "Empty", "Dead"):
        return None
    return sum(
        any(
            tp.topic == topic
            for tp in ConsumerProtocolMemberAssignment.decode(member["member_assignment"]).partitions()
        )
        for member in described["members"]
        if member["member_assignment"]
    )
