"""Asking the broker, past Faust: where partitions begin and end, and what really lies at an offset."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager

from aiokafka import AIOKafkaConsumer, TopicPartition

from penstock.core.acknowledgement import Partition
from penstock.errors import KafkaUnavailable
from penstock.kafka.connection import make_consumer, running, translated
from penstock.settings import Kafka

# A request that takes longer is given up; the caller asks again.
ANSWER_S = 10.0
# How long a topic just created may be unknown to another broker.
NEWS_S = 5.0


class Observer:
    """A consumer without a group: it reads along and changes nothing.

    Args:
        consumer: started, without group and topics.
        prefix: put before the name of every topic.
    """

    def __init__(self, consumer: AIOKafkaConsumer, prefix: str) -> None:
        self._consumer = consumer
        self._prefix = prefix
        # Reading needs the consumer's one assignment.
        self._reading = asyncio.Lock()

    def _full(self, partition: Partition) -> TopicPartition:
        return TopicPartition(self._prefix + partition[0], partition[1])

    async def missing(self, topics: Iterable[str]) -> list[str]:
        """Those of `topics` (bare names) that do not exist, in full.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        with translated():
            existing = await self._consumer.topics()
        return [self._prefix + topic for topic in topics if self._prefix + topic not in existing]

    async def require(self, topics: Iterable[str]) -> None:
        """Waits a moment for those of `topics` (bare names) that do not exist: a topic just made may be news to a broker.

        Raises:
            KafkaUnavailable: no broker answered, or some still do not exist after `NEWS_S`.
        """
        topics = list(topics)
        deadline_s = time.monotonic() + NEWS_S
        while missing := await self.missing(topics):
            if time.monotonic() > deadline_s:
                raise KafkaUnavailable(f"no such topic: {', '.join(missing)}; create the topics first")
            await asyncio.sleep(0.2)

    async def bounds(
        self, partitions: Collection[Partition]
    ) -> tuple[dict[Partition, int], dict[Partition, int]]:
        """The offset of the oldest record of each partition, and the one behind its newest.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        asked = {self._full(partition): partition for partition in partitions}
        with translated():
            beginnings = await self._consumer.beginning_offsets(list(asked))
        return {asked[full]: offset for full, offset in beginnings.items()}, await self.ends(partitions)

    async def ends(self, partitions: Collection[Partition]) -> dict[Partition, int]:
        """The offset behind the newest record of each partition.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        asked = {self._full(partition): partition for partition in partitions}
        with translated():
            answers = await self._consumer.end_offsets(list(asked))
        return {asked[full]: offset for full, offset in answers.items()}

    async def first_from(self, partition: Partition, offset: int) -> int | None:
        """The offset of the first record at or after `offset`; None when there is none within `ANSWER_S`.

        Raises:
            KafkaUnavailable: no broker answered.
        """
        full = self._full(partition)
        async with self._reading:
            with translated():
                self._consumer.assign([full])
                try:
                    self._consumer.seek(full, offset)
                    record = await asyncio.wait_for(self._consumer.getone(full), ANSWER_S)
                except TimeoutError:
                    return None
                finally:
                    self._consumer.unsubscribe()
        return int(record.offset)


@asynccontextmanager
async def observing(settings: Kafka) -> AsyncIterator[Observer]:
    """An observer for the time of a `with` block.

    Raises:
        KafkaUnavailable: no broker answered.
    """
    async with running(make_consumer(settings, None)) as consumer:
        yield Observer(consumer, settings.prefix)
