"""Inserts the records of a topic into PostgreSQL, exactly once.

One loop reads. A lane for each partition inserts its records in batches, so that reading and
validation continue while PostgreSQL works. The records in flight are bounded: a partition with too
many is paused, and resumed when half of them are inserted. It is no `Batcher`: a rebalance drops
the records that a lane has not inserted.

While the object store is away, a partition is held at its next record with a large value, and while
another transaction locks what a record needs, such as its idempotency key, at that record. A
partition has one position, so the records behind it wait; all other partitions go on. The reader is
one module, because reading, inserting and seeking share the position of each partition.

A database that was restored, or that failed over to a standby that lagged, has older positions and
lacks the last records. Each batch finds this out by its position; a partition without new records
is compared once in a while, so that its last records are inserted again as well.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import asyncpg
from aiokafka import AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition

from penstock.core.admission import partitions_to_pause
from penstock.core.position import checksum
from penstock.errors import (
    IdempotencyConflict,
    Invalid,
    KafkaUnavailable,
    LockConflict,
    ObjectsUnavailable,
    SessionLost,
    ValueRefused,
)
from penstock.ingest.checked_positions import checked_positions
from penstock.ingest.handler import Gathering, RecordHandler
from penstock.ingest.partition import SoughtPartition
from penstock.ingest.rejections import Rejections
from penstock.ingest.settings import IngestSettings
from penstock.kafka.client.connection import make_consumer, start, stop, translated
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.kafka.topology.topics import service_group
from penstock.postgres import ingest_positions
from penstock.postgres.ingest_positions import OffsetRange

log = logging.getLogger(__name__)

# Bytes in flight at which a partition is paused; one fetch may add a megabyte.
MAX_IN_FLIGHT_BYTES = 4 * 1024 * 1024
# Seconds between two attempts to insert the record at which a partition is held.
HELD_RETRY_S = 1.0
# Transactions at a time: one is prepared while another waits for its commit.
TRANSACTIONS = 2
# Seconds between two looks at a partition that gathers records.
GATHER_LOOK_S = 0.25
# Seconds between two comparisons of the positions of idle partitions with the stored ones.
RECHECK_S = 15.0

T = TypeVar("T")


class Ingest(ConsumerRebalanceListener, Generic[T]):  # type: ignore[misc]  # aiokafka is untyped
    """Reads the records of one topic and inserts them.

    Args:
        settings: of the service.
        group: name of the consumer group, without the prefix.
        handler: of the records.
        pool: of the database.
        producer: for rejections.
        offsets: checks the stored positions against the topic.
        gathering: how much is inserted at once; None inserts what was read.
        recheck_s: seconds between two comparisons of idle partitions with their stored positions.

    Attributes:
        topic: name of the topic, without the prefix.
        inserted: records that are in PostgreSQL, or rejected.
        rejected: records that were rejected.
    """

    def __init__(
        self,
        settings: IngestSettings,
        group: str,
        handler: RecordHandler[T],
        pool: asyncpg.Pool[asyncpg.Record],
        producer: AIOKafkaProducer,
        offsets: OffsetReader,
        gathering: Gathering | None = None,
        recheck_s: float = RECHECK_S,
    ) -> None:
        self._settings = settings
        self._recheck_s = recheck_s
        self._gathering = gathering
        self._batch_rows = gathering.rows if gathering else settings.ingest_batch
        self._batch_bytes = gathering.size_bytes if gathering else MAX_IN_FLIGHT_BYTES
        self._take_bytes = gathering.size_bytes if gathering else None
        self._group = service_group(settings.prefix, group)
        self._handler = handler
        self._pool = pool
        self._rejections = Rejections(producer, settings.prefix, handler.topic, handler.rejected_topic)
        self._offsets = offsets
        self.topic = handler.topic.name
        self._topic = settings.prefix + self.topic
        # By number. A seek replaces one, and records that were read before are read again.
        self._partitions: dict[int, SoughtPartition] = {}
        self._lanes: dict[int, asyncio.Task[None]] = {}
        self._transactions = asyncio.Semaphore(TRANSACTIONS)
        # Held partitions share one of their own: many of them would delay all others.
        self._held_transaction = asyncio.Semaphore(1)
        self._attempts = 0  # at held records
        self._closing = False
        self.inserted = 0
        self.rejected = 0
        # Work in progress, and how far it has advanced, for the stall detector.
        self._progress: dict[str, int] = {}
        self._rebalances = 0
        self._assigned = False
        self._seeking: asyncio.Task[None] | None = None
        self._consumer = make_consumer(settings, self._group)
        self._guard = self._consumer.guard

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        """Drops records that are not inserted; the new owner reads them."""
        self._assigned = False
        self._rebalances += 1
        self._guard.forget()
        for tp in revoked:
            self._partitions.pop(tp.partition, None)

    async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        """Seeks to the offsets in PostgreSQL; the offsets in Kafka are not used."""
        self._assigned = True
        if assigned:
            # In a task: aiokafka swallows exceptions of a listener, and its `stop` awaits its end.
            self._seeking = asyncio.create_task(self._seek(assigned))
            await asyncio.wait({self._seeking})

    def positions(self) -> dict[int, int]:
        """The next offset of each assigned partition; all records before it are in PostgreSQL."""
        return {number: partition.next for number, partition in self._partitions.items()}

    def progress(self) -> dict[str, Hashable]:
        """Work in progress, each with a value that changes as it advances; empty at rest."""
        return dict(self._progress)

    def is_busy(self, number: int) -> bool:
        """Whether records of a partition are in flight, or it has no valid position yet."""
        lane = self._lanes.get(number)
        return (lane is not None and not lane.done()) or (
            self._seeking is not None and not self._seeking.done()
        )

    @property
    def waiting(self) -> int:
        """Records that were read and are not in PostgreSQL yet."""
        return sum(partition.load.rows for partition in self._partitions.values())

    @property
    def paused(self) -> int:
        """Partitions that are paused, because too many of their records are in flight."""
        return len(self._consumer.paused())

    @property
    def held(self) -> int:
        """Partitions that wait at their next record."""
        return sum(partition.held is not None for partition in self._partitions.values())

    async def probe(self) -> None:
        """Returns while this process is in its group.

        Raises:
            KafkaUnavailable: it is joining, or the group rebalances.
        """
        if not self._assigned:
            raise KafkaUnavailable(f"joining the group {self._group}")

    def group_progress(self) -> dict[str, Hashable]:
        """As `progress`, for joining the group, which needs a broker; a rebalance is progress."""
        return {} if self._assigned else {f"joining the group {self._group}": self._rebalances}

    @contextmanager
    def _in_progress(self, name: str, value: int = 0) -> Iterator[None]:
        self._progress[name] = value
        try:
            yield
        finally:
            self._progress.pop(name, None)

    async def _seek(self, assigned: Sequence[TopicPartition]) -> None:
        with self._in_progress(f"seeking to the stored offsets of {self.topic}"):
            starts = await checked_positions(self._pool, self._offsets, self._topic, assigned)
            current = self._consumer.assignment()
            for tp, position in starts.items():
                if tp not in current:
                    continue  # revoked meanwhile
                self._partitions[tp.partition] = SoughtPartition(tp, position)
                self._guard.start({tp: position})
                self._consumer.seek(tp, position.offset)

    async def _recheck(self) -> None:
        """Seeks in each idle partition whose stored position is no longer the one it has here."""
        idle = {
            number: (partition, partition.next)
            for number, partition in self._partitions.items()
            if not self.is_busy(number)
        }
        if not idle:
            return
        with self._in_progress(f"comparing the stored offsets of {self.topic}"):
            stored = await ingest_positions.stored(self._pool, self._topic, idle)
        moved = {
            number
            for number, (partition, offset) in idle.items()
            # A partition that was revoked, sought or read meanwhile has compared its position.
            if self._is_current(partition)
            and partition.next == offset
            and not self.is_busy(number)
            and stored.get(number) != (offset, partition.identity)
        }
        if moved:
            log.warning(
                "The stored position of a partition has moved without this process; reading on from there",
                extra={"event": "ingest_moved", "topic": self._topic, "partitions": sorted(moved)},
            )
            await self._seek([tp for tp in self._consumer.assignment() if tp.partition in moved])

    async def run(self, stopping: asyncio.Event) -> None:
        """Inserts records until `stopping` is set.

        Raises:
            PostgresUnavailable, KafkaUnavailable: batches in flight may not be inserted; their
                records are read again.
        """
        self._consumer.subscribe([self._topic], listener=self)
        await start(self._consumer)
        loop = asyncio.get_running_loop()
        rechecked_s = loop.time()
        try:
            while not stopping.is_set():
                if loop.time() - rechecked_s >= self._recheck_s:
                    await self._recheck()
                    rechecked_s = loop.time()
                self._pause_or_resume()
                with translated():
                    fetched = await self._consumer.getmany(
                        timeout_ms=500, max_records=self._settings.ingest_batch
                    )
                if self._seeking is not None and self._seeking.done():
                    # Raises its error: without a seek, none of their records can be inserted.
                    self._seeking.result()
                for lane in [lane for lane in self._lanes.values() if lane.done()]:
                    lane.result()
                for tp, records in fetched.items():
                    self._add(tp.partition, records)
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

    def _is_current(self, partition: SoughtPartition) -> bool:
        """Whether it was neither revoked nor sought anew; otherwise its records are read again."""
        return self._partitions.get(partition.number) is partition

    def _add(self, number: int, records: Sequence[Any]) -> None:
        partition = self._partitions.get(number)
        if partition is None:
            return  # revoked, or not sought yet
        partition.add(records)
        lane = self._lanes.get(number)
        if lane is None or (lane.done() and not lane.exception()):
            self._lanes[number] = asyncio.create_task(self._run_lane(number))

    async def _run_lane(self, number: int) -> None:
        while (partition := self._partitions.get(number)) and partition.waiting and not self._closing:
            is_held = partition.held is not None
            # When the service stops meanwhile, the next owner reads them again.
            if self._gathering and not is_held and not await self._gathered(partition, self._gathering):
                break
            async with self._held_transaction if is_held else self._transactions:
                if not self._is_current(partition):
                    continue
                # At a lock it is one: a larger batch would wait for it as well. A gathered batch is
                # inserted whole.
                one = isinstance(partition.held, LockConflict) and not self._gathering
                records = partition.take(1 if one else self._batch_rows, self._take_bytes)
                held: Sequence[Any] = ()
                try:
                    name = f"inserting {self.topic}/{number} from {records[0].offset}"
                    # Each attempt at a held record has another value: many of them are no stall.
                    with self._in_progress(name, self._attempts if is_held else 0):
                        held = await self._insert(partition, records, name)
                except ObjectsUnavailable as error:
                    partition.hold(records[0].offset, error)
                    # Those that are inserted already are skipped.
                    held = records
                finally:
                    partition.end(records, held)
            self._pause_or_resume()
            if held and self._is_current(partition):
                # Not in a transaction, which the other partitions need.
                self._attempts += 1
                with self._in_progress(f"held at a record of {self.topic}/{number}", self._attempts):
                    await asyncio.sleep(HELD_RETRY_S)
            else:
                partition.held = None

    async def _gathered(self, partition: SoughtPartition, gathering: Gathering) -> bool:
        """Waits until a partition has a full batch, or its first record has waited long enough.

        Returns:
            Whether the batch is to be inserted; False when the service stops.
        """
        deadline_s = asyncio.get_running_loop().time() + gathering.seconds
        looks = 0
        # Read anew after each wait: other tasks change them.
        while not self._closing and self._is_current(partition) and partition.waiting < gathering.rows:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if partition.load.size_bytes >= gathering.size_bytes or left_s <= 0:
                break
            looks += 1
            with self._in_progress(f"gathering {self.topic}/{partition.number}", looks):
                await asyncio.sleep(min(GATHER_LOOK_S, left_s))
        return not self._closing

    def _pause_or_resume(self) -> None:
        before = self._consumer.paused()
        now = partitions_to_pause(
            {partition.tp: partition.load for partition in self._partitions.values()},
            before,
            rows=2 * self._batch_rows,
            size_bytes=max(MAX_IN_FLIGHT_BYTES, 2 * self._batch_bytes if self._gathering else 0),
        )
        if now - before:
            log.info(
                "Partitions are paused because PostgreSQL is behind",
                extra={
                    "event": "partitions_paused",
                    "topic": self._topic,
                    "partitions": sorted(tp.partition for tp in now - before),
                },
            )
        assigned = self._consumer.assignment()
        self._consumer.pause(*(now & assigned))
        self._consumer.resume(*(before & assigned - now))

    async def _read(
        self, partition: SoughtPartition, records: Sequence[Any], name: str
    ) -> tuple[list[T], dict[int, tuple[bytes | None, bytes]], Sequence[Any]]:
        """The submissions of records, the rejections by offset, and the records that are held."""
        items: list[T] = []
        reader = self._handler.open_batch()
        rejected: dict[int, tuple[bytes | None, bytes]] = {}
        for index, record in enumerate(records):
            if record.offset < partition.next or record.offset in partition.rejected:
                continue  # fetched before the seek, or rejected by an earlier attempt
            try:
                items.append(await reader.read(record))
            except Invalid as invalid:
                rejected[record.offset] = self._rejections.of(record, invalid)
                self.rejected += 1
            except ObjectsUnavailable as error:
                partition.hold(record.offset, error)
                return items, rejected, records[index:]
            # An advance for each record: a batch of large values takes long in the object store.
            self._progress[name] += 1
        return items, rejected, ()

    async def _insert(self, partition: SoughtPartition, records: Sequence[Any], name: str) -> Sequence[Any]:
        """Inserts records; returns those that are held.

        Args:
            partition: whose records they are.
            records: in the order of their offsets.
            name: of the work in progress.
        """
        if not self._is_current(partition):
            # The stored position has no meaning for these records.
            return ()
        first, identity = partition.next, partition.identity
        items, rejected, held = await self._read(partition, records, name)
        records = records[: len(records) - len(held)]
        following = records[-1].offset + 1 if records else first
        if following <= first:
            return held
        # Before the offset: after a crash they may be there twice, but none is lost.
        await self._reject(partition, rejected)
        last = records[-1]
        position = dataclasses.replace(
            self._guard.position(partition.tp, following),
            checksum=checksum(last.timestamp, last.key, last.value),
        )
        source = OffsetRange(self._topic, partition.number, first, following, identity, position.identity())
        return [*await self._store(partition, records, items, source, name), *held]

    async def _reject(
        self, partition: SoughtPartition, rejected: Mapping[int, tuple[bytes | None, bytes]]
    ) -> None:
        """Writes rejections, by the offsets of their records."""
        if rejected:
            await self._rejections.write([*rejected.values()])
            partition.rejected.update(rejected)

    async def _store(
        self,
        partition: SoughtPartition,
        records: Sequence[Any],
        items: Sequence[T],
        source: OffsetRange,
        name: str,
    ) -> Sequence[Any]:
        """Stores the submissions of records, and the position behind them; returns records held."""
        try:
            try:
                await self._handler.insert(items, source)
            except (ValueRefused, IdempotencyConflict) as refused:
                if len(records) > 1:
                    return await self._insert_parts(partition, records, (len(records) + 1) // 2, name)
                rejection = self._rejections.of(records[0], refused)
                await self._reject(partition, {records[0].offset: rejection})
                self.rejected += 1
                await self._handler.insert([], source)
        except LockConflict as locked:
            if len(records) > 1 and not self._gathering:
                # Each part with a locked row waits for it, and many halves would have it.
                return await self._insert_parts(partition, records, 1, name)
            partition.hold(records[0].offset, locked)
            return records
        except SessionLost as error:
            log.info(
                "Another process has inserted these records; reading on from its offset",
                extra={
                    "event": "ingest_fenced",
                    "topic": self._topic,
                    "partition": partition.number,
                    "error": error,
                },
            )
            await self._seek([tp for tp in self._consumer.assignment() if tp == partition.tp])
            return ()
        partition.advance(source.following, source.following_identity)
        self.inserted += source.following - source.first
        return ()

    async def _insert_parts(
        self, partition: SoughtPartition, records: Sequence[Any], size: int, name: str
    ) -> Sequence[Any]:
        """As `_insert`, so many records at a time; the record at fault will be alone."""
        for first in range(0, len(records), size):
            if held := await self._insert(partition, records[first : first + size], name):
                return [*held, *records[first + size :]]
        return ()
