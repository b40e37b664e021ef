"""The lines that are not in a segment yet, read from the topic by one consumer for all readers.

The consumer reads the partitions that have readers. What it has read last stays in memory, so
that readers which begin at nearby offsets share it. A reader that begins before it moves the
consumer back; the others skip what they have. A reader that falls behind what is kept is ended, and
its client continues from the segments.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

from aiokafka import TopicPartition

from penstock.concurrency.retry import retry_until_available
from penstock.contracts.inbound_logs import logs_of
from penstock.contracts.task_log import partition_of
from penstock.core.log_chunk import Chunk
from penstock.core.report_tokens import ReportTokens
from penstock.errors import Invalid, KafkaUnavailable, Throttled
from penstock.kafka.client.connection import make_consumer, running, translated
from penstock.kafka.client.consumer import Consumer
from penstock.kafka.client.offset_reader import OffsetReader, observing
from penstock.kafka.topology.topics import TASK_LOGS
from penstock.settings import Kafka

log = logging.getLogger(__name__)

# Bytes of records that are kept for each partition.
KEPT_BYTES = 24 * 1024 * 1024
# Seconds that a partition without readers is read on.
IDLE_S = 30.0
# Seconds for the broker to tell the end of a partition, and for a new consumer to start.
ANSWER_S = 5.0
POLL_MS = 100
# Readers of one gateway: each is an open request.
MAX_READERS = 500


class FellBehind(Exception):  # noqa: N818 (a fact, which ends a stream in an orderly way)
    """What a reader would read next is no longer in memory."""


class _Partition:
    """What was read of a partition.

    Attributes:
        first: offset of the first record that is kept.
        position: the next offset to read; None until the consumer has begun.
    """

    def __init__(self, number: int, first: int) -> None:
        self.number = number
        self.first = first
        self.position: int | None = None
        self.records: deque[tuple[int, int, list[Chunk]]] = deque()
        self.bytes = 0
        self.readers = 0
        self.idle_since_s = 0.0
        self.changed = asyncio.Event()

    def add(self, offset: int, size: int, chunks: list[Chunk]) -> None:
        self.records.append((offset, size, chunks))
        self.bytes += size
        while self.bytes > KEPT_BYTES and len(self.records) > 1:
            _offset, gone, _chunks = self.records.popleft()
            self.bytes -= gone
            self.first = self.records[0][0]

    def rewind(self, offset: int) -> None:
        self.first = offset
        self.position = None
        self.records.clear()
        self.bytes = 0


class TailReader:
    """Reads a partition from an offset on.

    Args:
        partition: the partition.
        offset: the first one.

    Attributes:
        number: of the partition.
        offset: the next one.
    """

    def __init__(self, partition: _Partition, offset: int) -> None:
        self._partition = partition
        self.number = partition.number
        self.offset = offset
        self._began = False

    def take(self) -> Iterator[Chunk]:
        """The chunks that were read since the last call.

        Raises:
            FellBehind: some of them are no longer in memory.
        """
        partition = self._partition
        if self._began and self.offset < partition.first:
            raise FellBehind
        # As of now: a slow caller takes chunks while the consumer reads further ones.
        position = partition.position
        # From the newest one back: many small records are kept, and each reader looks often.
        new: list[list[Chunk]] = []
        for offset, _size, chunks in reversed(partition.records):
            if offset < self.offset:
                break
            new.append(chunks)
        self._began = self._began or bool(new)
        for chunks in reversed(new):
            yield from chunks
        if position is not None:
            self.offset = max(self.offset, position)

    async def wait(self, timeout_s: float) -> None:
        """Returns when more was read, or after `timeout_s` seconds."""
        partition = self._partition
        if partition.position is not None and partition.position > self.offset:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await partition.changed.wait()


class LogTail:
    """Reads the topic for all readers of a gateway.

    Args:
        settings: where Kafka is.
        tokens: that records must have.
    """

    def __init__(self, settings: Kafka, tokens: ReportTokens) -> None:
        self._settings = settings
        self._tokens = tokens
        self._topic = settings.prefix + TASK_LOGS.name
        self._partitions: dict[int, _Partition] = {}
        self._wanted = asyncio.Event()
        self._assignment_changed = False
        self._offsets: OffsetReader | None = None
        self._started = asyncio.Event()
        self._readers = self._count = 0
        self.closed = asyncio.Event()

    def close(self) -> None:
        """Ends all readers, because the gateway stops."""
        self.closed.set()

    async def partitions(self) -> int:
        """The number of partitions of the topic.

        Raises:
            KafkaUnavailable: no broker answers, or the topic does not exist.
        """
        await self._connected()
        return self._count

    async def end(self, number: int) -> int:
        """The offset behind the newest record of a partition.

        Raises:
            KafkaUnavailable: no broker answers.
        """
        offsets, partition = await self._connected(), (TASK_LOGS.name, number)
        try:
            async with asyncio.timeout(ANSWER_S):
                return (await offsets.ends([partition]))[partition]
        except TimeoutError as error:
            raise KafkaUnavailable(f"Kafka does not tell the end of {self._topic}/{number}") from error

    @asynccontextmanager
    async def reading(self, task_id: int, offset: int | None) -> AsyncIterator[TailReader]:
        """A reader of a task's partition.

        Args:
            task_id: of the task.
            offset: the first one; None is the beginning of the partition.

        Raises:
            KafkaUnavailable: no broker answers.
            Throttled: too many readers.
        """
        if self._readers >= MAX_READERS:
            raise Throttled(f"{self._readers} requests read the newest lines of logs, which is the limit")
        number = partition_of(task_id, await self.partitions())
        begin = await self._beginning(number)
        first = begin if offset is None else max(offset, begin)
        partition = self._partitions.get(number)
        if partition is None:
            partition = self._partitions[number] = _Partition(number, first)
            self._assignment_changed = True
        elif first < partition.first:
            partition.rewind(first)
            self._assignment_changed = True
        partition.readers += 1
        self._readers += 1
        self._wanted.set()
        try:
            yield TailReader(partition, first)
        finally:
            self._readers -= 1
            partition.readers -= 1
            partition.idle_since_s = asyncio.get_running_loop().time()

    async def run(self) -> None:
        """Reads while there are readers, until cancelled."""
        while True:
            await self._wanted.wait()
            await retry_until_available(self._read, waiting_for="newest lines of task logs")

    async def _connected(self) -> OffsetReader:
        self._wanted.set()
        if self._offsets is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await self._started.wait()
        if self._offsets is None:
            raise KafkaUnavailable(f"Kafka at {self._settings.kafka} does not answer")
        return self._offsets

    async def _beginning(self, number: int) -> int:
        offsets, partition = await self._connected(), (TASK_LOGS.name, number)
        return (await offsets.beginnings([partition]))[partition]

    async def _read(self) -> None:
        """Reads until there was no reader for a while."""
        async with (
            running(make_consumer(self._settings, None, name="penstock task logs")) as consumer,
            # A broker answers the requests of a connection in order. A question for offsets would
            # wait behind each fetch, for half a second.
            observing(self._settings) as offsets,
        ):
            try:
                self._count = await offsets.partitions(TASK_LOGS.name)
                self._offsets = offsets
                self._started.set()
                self._assignment_changed = True
                idle_since_s = asyncio.get_running_loop().time()
                while True:
                    now_s = asyncio.get_running_loop().time()
                    self._forget_idle(now_s)
                    if self._partitions:
                        idle_since_s = now_s
                        await self._poll(consumer)
                    elif now_s - idle_since_s > IDLE_S:
                        self._wanted.clear()
                        return
                    else:
                        await asyncio.sleep(POLL_MS / 1000)
            finally:
                self._offsets = None
                self._started.clear()
                for partition in self._partitions.values():
                    partition.rewind(partition.first)

    def _forget_idle(self, now_s: float) -> None:
        idle = [
            number
            for number, partition in self._partitions.items()
            if not partition.readers and now_s - partition.idle_since_s > IDLE_S
        ]
        for number in idle:
            del self._partitions[number]
            self._assignment_changed = True

    async def _poll(self, consumer: Consumer) -> None:
        if self._assignment_changed:
            self._assignment_changed = False
            consumer.assign([TopicPartition(self._topic, number) for number in self._partitions])
            for number, partition in self._partitions.items():
                if partition.position is None:
                    partition.position = partition.first
                consumer.seek(TopicPartition(self._topic, number), partition.position)
        with translated():
            fetched = await consumer.getmany(timeout_ms=POLL_MS, max_records=200)
        for tp, records in fetched.items():
            read = self._partitions.get(tp.partition)
            if read is None:
                continue
            for record in records:
                if read.position is None or record.offset < read.position:
                    continue  # moved back meanwhile
                with suppress(Invalid):
                    read.add(record.offset, len(record.value or b""), logs_of(record, self._tokens))
                read.position = record.offset + 1
            read.changed.set()
            read.changed = asyncio.Event()
