"""Ingest: inserts the records of the topic `submitted` into PostgreSQL, exactly once.

One loop reads. A lane for each partition inserts its records in batches, so that reading and
validation continue while PostgreSQL works. The records in flight are bounded: a partition with too
many is paused, and resumed when half of them are inserted. It is no `Batcher`: a rebalance drops
the records that a lane has not inserted.

While the object store is away, a partition is held at its next record with a large context. A
partition has one position, so the records behind it wait; all other partitions go on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition

from penstock.contracts.submission import Submission
from penstock.core.admission import PartitionLoad, partitions_to_pause
from penstock.core.position import checksum
from penstock.errors import (
    Invalid,
    KafkaUnavailable,
    ObjectsUnavailable,
    SessionLost,
    ValueRefused,
)
from penstock.kafka.connection import make_consumer, start, stop, translated
from penstock.kafka.fetch_guard import FetchGuard
from penstock.kafka.offset_reader import OffsetReader
from penstock.kafka.topics import SUBMITTED, service_group
from penstock.objects import ObjectStore
from penstock.postgres import tasks
from penstock.postgres.types import TypeCache
from penstock.task_sync.checked_positions import checked_positions
from penstock.task_sync.rejections import Rejections
from penstock.task_sync.settings import TaskSyncSettings
from penstock.task_sync.submissions import SubmissionReader

log = logging.getLogger(__name__)

# Bytes in flight at which a partition is paused; one fetch may add a megabyte.
MAX_IN_FLIGHT_BYTES = 4 * 1024 * 1024

# Seconds between two attempts to store a large context.
OBJECTS_RETRY_S = 1.0

# Concurrent transactions: one is prepared while another waits for its commit.
TRANSACTIONS = 2


class Ingest(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """Reads submissions and inserts them.

    Args:
        settings: of the service.
        pool: of the database.
        producer: for rejections.
        types: the registered types.
        objects: the object store for large contexts.
        offsets: checks the stored positions against the topic.

    Attributes:
        inserted: records that are in PostgreSQL, or rejected.
        rejected: records that were rejected.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: AIOKafkaProducer,
        types: TypeCache,
        objects: ObjectStore,
        offsets: OffsetReader,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._rejections = Rejections(producer, settings.prefix)
        self._reader = SubmissionReader(types, objects)
        self._offsets = offsets
        self._topic = settings.prefix + SUBMITTED.name
        self._next: dict[int, int] = {}
        # The identity that is stored beside each offset.
        self._identities: dict[int, str | None] = {}
        # Records that were read and wait for their lane, by partition.
        self._waiting: defaultdict[int, deque[Any]] = defaultdict(deque)
        # How often waiting records were dropped, by partition.
        self._drops: Counter[int] = Counter()
        # Records in flight, by partition: those that wait, and the batch that the lane is
        # inserting.
        self._in_flight: defaultdict[int, PartitionLoad] = defaultdict(lambda: PartitionLoad(0, 0))
        self._lanes: dict[int, asyncio.Task[None]] = {}
        self._transactions = asyncio.Semaphore(TRANSACTIONS)
        self._paused: set[int] = set()
        # Partitions whose next record waits for the object store, and why.
        self._held: dict[int, str] = {}
        # Attempts after a wait for the object store, which is no stall.
        self._attempts = 0
        self._closing = False
        self.inserted = 0
        self.rejected = 0
        # Work in progress, and how far it has advanced: marks for the stall detector.
        self._progress: dict[str, int] = {}
        self._rebalances = 0
        self._assigned = False
        self._seeking: asyncio.Task[None] | None = None
        self._consumer: AIOKafkaConsumer = make_consumer(
            settings, service_group(settings.prefix, "task-sync")
        )
        self._guard = FetchGuard(self._consumer)

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        """Drops records that are not inserted; the new owner reads them."""
        self._assigned = False
        self._rebalances += 1
        self._guard.forget()
        for tp in revoked:
            self._next.pop(tp.partition, None)
            self._paused.discard(tp.partition)
            self._held.pop(tp.partition, None)
            self._drop_waiting(tp.partition)

    async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        """Seeks to the offsets in PostgreSQL; the offsets in Kafka are not used."""
        self._assigned = True
        if assigned:
            # In a task, because aiokafka swallows exceptions of a listener, and its `stop` waits
            # for the listener's end.
            self._seeking = asyncio.create_task(self._seek(assigned))
            await asyncio.wait({self._seeking})

    def positions(self) -> dict[int, int]:
        """The next offset of each assigned partition; all records before it are in PostgreSQL."""
        return dict(self._next)

    def progress(self) -> dict[str, Hashable]:
        """Work in progress, each with a mark that changes as it advances; empty at rest."""
        return dict(self._progress)

    @property
    def waiting(self) -> int:
        """Records that were read and are not in PostgreSQL yet."""
        return sum(load.rows for load in self._in_flight.values())

    @property
    def paused(self) -> int:
        """Partitions that are paused, because too many of their records are in flight."""
        return len(self._paused)

    @property
    def held(self) -> int:
        """Partitions that wait for the object store."""
        return len(self._held)

    async def probe(self) -> None:
        """Returns while this process is in its group.

        Raises:
            KafkaUnavailable: it is joining, or the group rebalances.
        """
        if not self._assigned:
            raise KafkaUnavailable(f"joining the group {service_group(self._settings.prefix, 'task-sync')}")

    def group_progress(self) -> dict[str, Hashable]:
        """As `progress`, for joining the group, which needs a broker; a rebalance is progress."""
        return {} if self._assigned else {"joining the group": self._rebalances}

    @contextmanager
    def _in_progress(self, name: str, mark: int = 0) -> Iterator[None]:
        self._progress[name] = mark
        try:
            yield
        finally:
            self._progress.pop(name, None)

    async def _seek(self, assigned: Sequence[TopicPartition]) -> None:
        with self._in_progress("seeking to the stored offsets"):
            starts = await checked_positions(self._pool, self._offsets, self._topic, assigned)
            current = self._consumer.assignment()
            for tp, position in starts.items():
                if tp not in current:
                    continue  # revoked meanwhile
                self._drop_waiting(tp.partition)
                self._next[tp.partition] = position.offset
                self._identities[tp.partition] = position.identity()
                self._guard.start({tp: position})
                self._consumer.seek(tp, position.offset)

    async def run(self, stopping: asyncio.Event) -> None:
        """Inserts submissions until `stopping` is set.

        Raises:
            PostgresUnavailable, KafkaUnavailable: batches in flight may not be inserted; their
                records are read again.
        """
        self._consumer.subscribe([self._topic], listener=self)
        await start(self._consumer)
        try:
            while not stopping.is_set():
                self._pause_or_resume()
                with translated():
                    fetched = await self._consumer.getmany(
                        timeout_ms=500, max_records=self._settings.ingest_batch
                    )
                if self._seeking is not None and self._seeking.done():
                    # Raises its error: without a seek, no record of these partitions can be
                    # inserted.
                    self._seeking.result()
                for lane in [lane for lane in self._lanes.values() if lane.done()]:
                    lane.result()
                for tp, records in fetched.items():
                    self._add(tp, records)
                if broken := [tp for tp in self._guard.broken if tp in self._consumer.assignment()]:
                    # A log was replaced or lost its tail under this process.
                    await self._seek(broken)
            self._closing = True
            await asyncio.gather(*self._lanes.values())
        finally:
            if self._seeking is not None:
                self._seeking.cancel()
            for lane in self._lanes.values():
                lane.cancel()
            # The first error leaves this method; errors of other lanes have the same cause.
            await asyncio.gather(*self._lanes.values(), return_exceptions=True)
            await stop(self._consumer)

    def _add(self, tp: TopicPartition, records: Sequence[Any]) -> None:
        number = tp.partition
        if number not in self._next:
            return  # revoked, or not sought yet
        self._waiting[number] += records
        self._count(number, records, 1)
        lane = self._lanes.get(number)
        if lane is None or (lane.done() and not lane.exception()):
            self._lanes[number] = asyncio.create_task(self._run_lane(tp))

    async def _run_lane(self, tp: TopicPartition) -> None:
        waiting = self._waiting[tp.partition]
        while waiting and not self._closing:
            async with self._transactions:
                records = [waiting.popleft() for _ in range(min(len(waiting), self._settings.ingest_batch))]
                if not records:
                    break  # dropped meanwhile
                drops = self._drops[tp.partition]
                try:
                    name = f"inserting {SUBMITTED.name}/{tp.partition} from {records[0].offset}"
                    with self._in_progress(name):
                        held = await self._insert(tp, records, name)
                finally:
                    self._count(tp.partition, records, -1)
                # Not after a seek, which reads them again with those before them.
                if drops == self._drops[tp.partition]:
                    waiting.extendleft(reversed(held))
                    self._count(tp.partition, held, 1)
            self._pause_or_resume()
            if held:
                # Not in a transaction, which the other partitions need.
                self._attempts += 1
                with self._in_progress(f"waiting for the object store, {tp.partition}", self._attempts):
                    await asyncio.sleep(OBJECTS_RETRY_S)
            else:
                self._held.pop(tp.partition, None)

    def _drop_waiting(self, number: int) -> None:
        """Drops the waiting records of a partition, which will be read again."""
        self._drops[number] += 1
        waiting = self._waiting[number]
        self._count(number, waiting, -1)
        waiting.clear()

    def _count(self, number: int, records: Iterable[Any], sign: int) -> None:
        rows = size_bytes = 0
        for record in records:
            rows += 1
            size_bytes += len(record.value or b"")
        load = self._in_flight[number]
        self._in_flight[number] = PartitionLoad(load.rows + sign * rows, load.size_bytes + sign * size_bytes)

    def _pause_or_resume(self) -> None:
        assigned = {tp.partition: tp for tp in self._consumer.assignment()}
        load = {number: self._in_flight[number] for number in assigned}
        before = self._paused & assigned.keys()
        now = partitions_to_pause(
            load, before, rows=2 * self._settings.ingest_batch, size_bytes=MAX_IN_FLIGHT_BYTES
        )
        if now - before:
            log.info(
                "Partitions are paused because PostgreSQL is behind",
                extra={
                    "event": "partitions_paused",
                    "topic": self._topic,
                    "partitions": sorted(now - before),
                },
            )
        self._consumer.pause(*(assigned[number] for number in now - before))
        self._consumer.resume(*(assigned[number] for number in before - now))
        self._paused = now

    def _hold(self, number: int, error: ObjectsUnavailable) -> None:
        if self._held.get(number) != str(error):
            log.warning(
                "A partition waits for the object store",
                extra={"event": "partition_held", "topic": self._topic, "partition": number, "error": error},
            )
        self._held[number] = str(error)

    async def _read(
        self, tp: TopicPartition, records: Sequence[Any], first: int, name: str
    ) -> tuple[list[Submission], list[tuple[bytes | None, bytes]], Sequence[Any]]:
        """The submissions of records, the rejections, and the records that are held."""
        submissions: list[Submission] = []
        rejected: list[tuple[bytes | None, bytes]] = []
        for index, record in enumerate(records):
            if record.offset < first:
                continue  # fetched before the seek
            try:
                submissions.append(await self._reader.read(record))
            except Invalid as invalid:
                rejected.append(self._rejections.of(record, invalid))
                self.rejected += 1
            except ObjectsUnavailable as error:
                self._hold(tp.partition, error)
                return submissions, rejected, records[index:]
            # An advance for each record: a batch of large contexts may take long, because each goes
            # to the object store.
            self._progress[name] += 1
        return submissions, rejected, ()

    async def _insert(self, tp: TopicPartition, records: Sequence[Any], name: str) -> Sequence[Any]:
        """Inserts records; returns those that are held."""
        first, identity = self._next.get(tp.partition), self._identities.get(tp.partition)
        if first is None:
            return ()  # revoked between fetch and now
        submissions, rejected, held = await self._read(tp, records, first, name)
        records = records[: len(records) - len(held)]
        following = records[-1].offset + 1 if records else first
        if following <= first:
            return held
        # Before the offset: after a crash a rejection may be there twice, but is never lost.
        await self._rejections.write(rejected)
        last = records[-1]
        position = dataclasses.replace(
            self._guard.position(tp, following), checksum=checksum(last.timestamp, last.key, last.value)
        )
        source = tasks.OffsetRange(
            self._topic,
            tp.partition,
            first,
            following,
            identity,
            position.identity(),
        )
        try:
            try:
                await tasks.submit(self._pool, submissions, source)
            except ValueRefused as refused:
                if len(records) > 1:
                    # Halves until the record at fault is alone.
                    middle = len(records) // 2
                    if again := await self._insert(tp, records[:middle], name):
                        return [*again, *records[middle:], *held]
                    return [*await self._insert(tp, records[middle:], name), *held]
                await self._rejections.write([self._rejections.of(records[0], refused)])
                self.rejected += 1
                await tasks.submit(self._pool, [], source)
        except SessionLost as error:
            log.info(
                "Another process has inserted these records; reading on from its offset",
                extra={"event": "ingest_fenced", "partition": tp.partition, "error": error},
            )
            await self._seek([t for t in self._consumer.assignment() if t == tp])
            return ()
        # If it differs, the partition was revoked meanwhile, and perhaps assigned again.
        if self._next.get(tp.partition) == first:
            self._next[tp.partition] = following
            self._identities[tp.partition] = source.following_identity
        self.inserted += following - first
        return held
