"""The workers of a type's group, and the lag of its ready topic."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from aiokafka import AIOKafkaConsumer, TopicPartition

from penstock.core.attempt import AttemptId
from penstock.core.position import taken
from penstock.core.why import GroupLag, RecordPosition
from penstock.errors import KafkaRefused, KafkaUnavailable
from penstock.kafka.client.connection import admin_client, make_consumer, running, translated
from penstock.kafka.client.records import read_records, ready_task
from penstock.kafka.topology.group_members import ANSWER_S, Member, describe
from penstock.kafka.topology.topics import ready, workers_group
from penstock.settings import Kafka

log = logging.getLogger(__name__)

# Seconds of an answer for the records that wait, and most of them on a partition.
PLACES_S = 2.0
MOST_PLACES = 200


async def readers(settings: Kafka, type_name: str, partitions: int, *, positions: bool = False) -> GroupLag:
    """The workers of a type, also those behind a gateway, and their lag. Joins no group.

    Args:
        settings: where.
        type_name: the type.
        partitions: of its ready topic.
        positions: whether to read the records that wait, for the positions of their attempts.

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
            workers = _reading(await describe(admin, group), topic)
            async with running(make_consumer(settings, None)) as consumer:
                with translated():
                    asked = [TopicPartition(topic, number) for number in range(partitions)]
                    ends = await consumer.end_offsets(asked)
                    begins = await consumer.beginning_offsets(asked)
                offsets = {tp: meta.offset for tp, meta in committed.items()}
                # Deleted records are no lag, and a group whose offset is beyond the end reads the
                # topic again.
                first = {tp: taken(offsets.get(tp, -1), begins[tp], end) for tp, end in ends.items()}
                unread = {tp: offset for tp, offset in first.items() if offset < ends[tp]}
                found = (
                    await _positions_of(consumer, type_name, unread, workers) if positions and unread else {}
                )
    except TimeoutError as error:
        raise KafkaUnavailable(f"no broker at {settings.kafka} answers within {ANSWER_S:g} s") from error
    lag = sum(ends[tp] - offset for tp, offset in first.items())
    if workers is None:
        return GroupLag(None, lag, found)
    return GroupLag(len(workers), lag, found, _stages(workers))


def _reading(members: Sequence[Member] | None, topic: str) -> list[Member] | None:
    """The members that have partitions of a topic; None during a rebalance."""
    return None if members is None else [member for member in members if member.partitions.get(topic)]


def _stages(workers: Iterable[Member]) -> frozenset[str] | None:
    """The stages that the workers have handlers for; None when one of them does not say."""
    named: set[str] = set()
    for worker in workers:
        if worker.data.stages is None:
            return None
        named |= worker.data.stages
    return frozenset(named)


async def _positions_of(
    consumer: AIOKafkaConsumer,
    type_name: str,
    unread: Mapping[TopicPartition, int],
    workers: Sequence[Member] | None,
) -> dict[AttemptId, RecordPosition]:
    """The positions of waiting attempts; none if the records cannot be read in time."""
    names = {
        TopicPartition(topic, number): worker.client
        for worker in workers or ()
        for topic, numbers in worker.partitions.items()
        for number in numbers
    }
    try:
        async with asyncio.timeout(PLACES_S):
            with translated():
                records = await read_records(consumer, unread, MOST_PLACES)
    except (TimeoutError, KafkaUnavailable, KafkaRefused) as error:
        log.info(
            "The records of a ready topic cannot be read",
            extra={"event": "ready_records_unread", "task_type": type_name, "error": repr(error)},
        )
        return {}
    positions = {}
    for tp, waiting in records.items():
        before = 0
        for record in waiting:
            if (task := ready_task(record, type_name)) is not None:
                positions[task.fence.attempt_id] = RecordPosition(tp.partition, names.get(tp), before)
                before += 1
    return positions
