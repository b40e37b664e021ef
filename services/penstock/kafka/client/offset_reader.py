"""Asks the broker, past Faust, for the ends of partitions and for the record at an offset."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager

from aiokafka import TopicPartition
from aiokafka.structs import OffsetAndMetadata

from penstock.core.offset_tracker import Partition
from penstock.core.position import Position, Start
from penstock.errors import KafkaUnavailable, SessionLost
from penstock.kafka.client.connection import make_consumer, running, translated
from penstock.kafka.client.consumer import Consumer
from penstock.kafka.client.positions import Commit, check, commits_of_logs
from penstock.settings import Kafka

# Seconds for one read; the caller retries.
ANSWER_S = 10.0
# How long a new topic may be unknown to another broker.
METADATA_S = 5.0


class OffsetReader:
    """A consumer without a group: it reads and changes nothing.

    Args:
        consumer: started, without group and topics.
        prefix: put before the name of every topic.
    """

    def __init__(self, consumer: Consumer, prefix: str) -> None:
        self._consumer = consumer
        self._prefix = prefix
        # A read replaces the consumer's assignment, so there is one at a time.
        self._reading = asyncio.Lock()

    def _full(self, partition: Partition) -> TopicPartition:
        return TopicPartition(self._prefix + partition[0], partition[1])

    async def missing(self, topics: Iterable[str]) -> list[str]:
        """The full names of those of `topics` (bare names) that do not exist.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        with translated():
            existing = await self._consumer.topics()
        return [self._prefix + topic for topic in topics if self._prefix + topic not in existing]

    async def partitions(self, topic: str) -> int:
        """The number of partitions of a topic (bare name).

        Raises:
            KafkaUnavailable: no broker answered, or the topic does not exist.
        """
        with translated():
            cluster = await self._consumer.client.fetch_all_metadata()
        found = cluster.partitions_for_topic(self._prefix + topic)
        if not found:
            raise KafkaUnavailable(f"there is no topic {self._prefix + topic}; create the topics first")
        return len(found)

    async def require(self, topics: Iterable[str]) -> None:
        """Waits a moment for `topics` (bare names) to exist: a broker may not know a new topic yet.

        Raises:
            KafkaUnavailable: no broker answered, or some still do not exist after `METADATA_S`.
        """
        topics = list(topics)
        deadline_s = time.monotonic() + METADATA_S
        while missing := await self.missing(topics):
            if time.monotonic() > deadline_s:
                raise KafkaUnavailable(f"no such topic: {', '.join(missing)}; create the topics first")
            await asyncio.sleep(0.2)

    async def beginnings(self, partitions: Collection[Partition]) -> dict[Partition, int]:
        """The offset of the oldest record of each partition.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        asked = {self._full(partition): partition for partition in partitions}
        with translated():
            answers = await self._consumer.beginning_offsets(list(asked))
        return {asked[full]: offset for full, offset in answers.items()}

    async def ends(self, partitions: Collection[Partition]) -> dict[Partition, int]:
        """The offset behind the newest record of each partition.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        asked = {self._full(partition): partition for partition in partitions}
        with translated():
            answers = await self._consumer.end_offsets(list(asked))
        return {asked[full]: offset for full, offset in answers.items()}

    async def check(self, positions: Mapping[TopicPartition, Position | None]) -> dict[TopicPartition, Start]:
        """See `positions.check`."""
        async with self._reading:
            return await check(self._consumer, positions)

    async def commits_of_logs(
        self, committed: Mapping[TopicPartition, OffsetAndMetadata]
    ) -> dict[TopicPartition, Commit]:
        """See `positions.commits_of_logs`."""
        return await commits_of_logs(self._consumer, committed)

    async def first_from(self, partition: Partition, offset: int) -> int | None:
        """The offset of the first record from `offset` on; None if there is none within `ANSWER_S`.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        full = self._full(partition)
        async with self._reading:
            with translated():
                self._consumer.assign([full])
                try:
                    self._consumer.seek(full, offset)
                    async with asyncio.timeout(ANSWER_S):
                        record = await self._consumer.getone(full)
                except TimeoutError:
                    return None
                finally:
                    self._consumer.unsubscribe()
        return int(record.offset)

    async def confirm_gap(self, partition: Partition, expected: int, offset: int) -> None:
        """Verifies that there is no record from `expected` up to (not with) `offset`.

        Such offsets belong to deleted records, or to the end of a transaction.

        Raises:
            SessionLost: there is one, so the reader has skipped it.
            KafkaUnavailable: no broker answered.
        """
        found = await self.first_from(partition, expected)
        if found is None or found < offset:
            topic, number = partition
            raise SessionLost(f"Faust has skipped {topic}/{number} from {expected} to {offset}")


@asynccontextmanager
async def observing(settings: Kafka) -> AsyncIterator[OffsetReader]:
    """An offset reader, closed at the end of the block.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    async with running(make_consumer(settings, None)) as consumer:
        yield OffsetReader(consumer, settings.prefix)
