"""Ingest: from the topic `submitted` into PostgreSQL, exactly once.

One loop reads; a lane for each partition takes its records in, a batch a transaction, so that reading and checking go on while
PostgreSQL works. What is in hand is bounded: a partition of which too much waits for PostgreSQL is paused, and read on when half
of it is in.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition

from penstock import tracing
from penstock.contracts.rejected import encode_rejection
from penstock.contracts.submission import Submission
from penstock.contracts.validation import parse
from penstock.core.admission import Load, crowded
from penstock.errors import Invalid, InvalidRecord, KafkaUnavailable, SessionLost, UnknownType
from penstock.kafka.connection import make_consumer, start, translated
from penstock.kafka.outbox import send_all
from penstock.kafka.topics import SUBMITTED, SUBMITTED_REJECTED, service_group
from penstock.objects import ObjectStore
from penstock.postgres import ingested, tasks
from penstock.postgres.types import KnownTypes
from penstock.task_sync.settings import TaskSyncSettings

log = logging.getLogger(__name__)

# Of one partition, beyond which it is paused; a fetch may add a megabyte.
IN_HAND_BYTES = 4 * 1024 * 1024

# Transactions under way at once: while one waits for its commit, another is prepared.
TRANSACTIONS = 2


class Ingest(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka is untyped
    """Reads submissions and inserts them.

    Args:
        settings: of the service.
        pool: of the database.
        producer: for rejections.
        types: what is registered.
        objects: where large contexts go.
    """

    def __init__(
        self,
        settings: TaskSyncSettings,
        pool: asyncpg.Pool[asyncpg.Record],
        producer: AIOKafkaProducer,
        types: KnownTypes,
        objects: ObjectStore,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._producer = producer
        self._types = types
        self._objects = objects
        self._topic = settings.prefix + SUBMITTED.name
        self._next: dict[int, int] = {}
        # Read and not in PostgreSQL, by partition: what its lane is with, and what waits behind that.
        self._hand: defaultdict[int, deque[Any]] = defaultdict(deque)
        self._load: defaultdict[int, Load] = defaultdict(lambda: Load(0, 0))
        self._lanes: dict[int, asyncio.Task[None]] = {}
        self._transactions = asyncio.Semaphore(TRANSACTIONS)
        # Those that we have paused, and nobody else.
        self._paused: set[int] = set()
        self._closing = False
        self.taken = 0
        self.rejected = 0
        # What is under way now, and how often it has moved.
        self._under_way: dict[str, int] = {}
        self._rebalances = 0
        self._assigned = False
        self._seeking: asyncio.Task[None] | None = None
        self._consumer: AIOKafkaConsumer = make_consumer(
            settings, service_group(settings.prefix, "task-sync")
        )

    async def on_partitions_revoked(self, revoked: list[TopicPartition]) -> None:
        """What was read of them and not yet inserted is another's to read; the offset's fence sees to it."""
        self._assigned = False
        self._rebalances += 1
        for tp in revoked:
            self._next.pop(tp.partition, None)
            self._paused.discard(tp.partition)
            self._drop(tp.partition)

    async def on_partitions_assigned(self, assigned: list[TopicPartition]) -> None:
        """Goes on where PostgreSQL says, whatever Kafka remembers."""
        self._assigned = True
        if assigned:
            # A task of its own: aiokafka swallows what a listener raises, and its stop waits for the listener's end.
            self._seeking = asyncio.create_task(self._seek(assigned))
            await asyncio.wait({self._seeking})

    def positions(self) -> dict[int, int]:
        """The offset that comes next of each partition that is read here; everything before it is in PostgreSQL."""
        return dict(self._next)

    def under_way(self) -> dict[str, Hashable]:
        """What is at hand now, with a mark that changes as it moves; empty at rest."""
        return dict(self._under_way)

    @property
    def waiting(self) -> int:
        """Records that were read and are not in PostgreSQL yet."""
        return sum(load.rows for load in self._load.values())

    @property
    def paused(self) -> int:
        """Partitions that are not read on, because too much of them waits."""
        return len(self._paused)

    async def probe(self) -> None:
        """Does nothing while this process is in its group.

        Raises:
            KafkaUnavailable: it is joining, or the group rebalances.
        """
        if not self._assigned:
            raise KafkaUnavailable(f"joining the group {service_group(self._settings.prefix, 'task-sync')}")

    def rebalancing(self) -> dict[str, Hashable]:
        """As `under_way`, of joining the group: each further rebalance is a move. Takes a broker that answers."""
        return {} if self._assigned else {"joining the group": self._rebalances}

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        self._under_way[what] = 0
        try:
            yield
        finally:
            self._under_way.pop(what, None)

    async def _seek(self, assigned: Sequence[TopicPartition]) -> None:
        with self._doing("asking where to read on"):
            with translated():
                begin = await self._consumer.beginning_offsets(assigned)
            found = await ingested.positions(
                self._pool, self._topic, {tp.partition: offset for tp, offset in begin.items()}
            )
            for tp in assigned:
                self._drop(tp.partition)
                # Retention may have removed what is before the log's beginning.
                self._next[tp.partition] = found[tp.partition]
                self._consumer.seek(tp, max(found[tp.partition], begin[tp]))

    async def run(self, stopping: asyncio.Event) -> None:
        """Takes in submissions until `stopping` is set.

        Raises:
            PostgresUnavailable: the batch in hand was not inserted and will be read again.
            KafkaUnavailable: as above.
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
                    # Nothing of these partitions could be taken in.
                    self._seeking.result()
                for lane in [lane for lane in self._lanes.values() if lane.done()]:
                    lane.result()
                for tp, records in fetched.items():
                    self._put(tp, records)
            self._closing = True
            await asyncio.gather(*self._lanes.values())
        finally:
            if self._seeking is not None:
                self._seeking.cancel()
            for lane in self._lanes.values():
                lane.cancel()
            # One failure is told; those of other lanes are of the same server.
            await asyncio.gather(*self._lanes.values(), return_exceptions=True)
            await self._consumer.stop()

    def _put(self, tp: TopicPartition, records: Sequence[Any]) -> None:
        number = tp.partition
        if number not in self._next:
            return  # revoked, or not sought yet
        self._hand[number] += records
        self._count(number, records, 1)
        lane = self._lanes.get(number)
        if lane is None or (lane.done() and not lane.exception()):
            self._lanes[number] = asyncio.create_task(self._work(tp))

    async def _work(self, tp: TopicPartition) -> None:
        hand = self._hand[tp.partition]
        while hand and not self._closing:
            async with self._transactions:
                records = [hand.popleft() for _ in range(min(len(hand), self._settings.ingest_batch))]
                if not records:
                    break  # dropped meanwhile
                try:
                    what = f"taking in {SUBMITTED.name}/{tp.partition} from {records[0].offset}"
                    with self._doing(what):
                        await self._take_in(tp, records, what)
                finally:
                    self._count(tp.partition, records, -1)
            self._pause_or_resume()

    def _drop(self, number: int) -> None:
        """Forgets what waits of a partition: it is read again, here or elsewhere."""
        hand = self._hand[number]
        self._count(number, hand, -1)
        hand.clear()

    def _count(self, number: int, records: Iterable[Any], sign: int) -> None:
        rows = size_bytes = 0
        for record in records:
            rows += 1
            size_bytes += len(record.value or b"")
        load = self._load[number]
        self._load[number] = Load(load.rows + sign * rows, load.size_bytes + sign * size_bytes)

    def _pause_or_resume(self) -> None:
        mine = {tp.partition: tp for tp in self._consumer.assignment()}
        load = {number: self._load[number] for number in mine}
        before = self._paused & mine.keys()
        now = crowded(load, before, rows=2 * self._settings.ingest_batch, size_bytes=IN_HAND_BYTES)
        if now - before:
            log.info("%s: PostgreSQL is behind: paused %s", self._topic, sorted(now - before))
        self._consumer.pause(*(mine[number] for number in now - before))
        self._consumer.resume(*(mine[number] for number in before - now))
        self._paused = now

    async def _take_in(self, tp: TopicPartition, records: Sequence[Any], what: str) -> None:
        first = self._next.get(tp.partition)
        if first is None:
            return  # revoked between fetch and now
        submissions: list[Submission] = []
        rejected: list[tuple[bytes | None, bytes]] = []
        for record in records:
            if record.offset < first:
                continue  # fetched before the seek
            try:
                submissions.append(_traced(record, await self._read(record.value or b"")))
            except Invalid as invalid:
                log.info(
                    "rejected %s/%d@%d: %s",
                    self._topic,
                    tp.partition,
                    record.offset,
                    invalid,
                    extra={"topic": SUBMITTED.name, "partition": tp.partition, "offset": record.offset},
                )
                value = encode_rejection(
                    invalid,
                    topic=self._topic,
                    partition=tp.partition,
                    offset=record.offset,
                    original=record.value or b"",
                    at=datetime.now(UTC),
                )
                rejected.append((record.key, value))
                self.rejected += 1
            # A batch of large contexts, each on its way to the object store, may take long and still moves.
            self._under_way[what] += 1
        following = records[-1].offset + 1
        if following <= first:
            return
        # Before the offset moves: a rejection may be there twice, never not at all.
        await send_all(self._producer, self._settings.prefix + SUBMITTED_REJECTED.name, rejected)
        try:
            stretch = tasks.Stretch(self._topic, tp.partition, first, following)
            await tasks.submit(self._pool, submissions, stretch)
        except SessionLost as lost:
            log.info("%s: reading on from where it left off", lost)
            await self._seek([t for t in self._consumer.assignment() if t == tp])
            return
        if self._next.get(tp.partition) == first:
            # Else the partition was given away, and perhaps back, meanwhile.
            self._next[tp.partition] = following
        self.taken += following - first

    async def _read(self, value: bytes) -> Submission:
        try:
            submission = Submission.from_wire(parse(value, exact=True))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            # What no check foresaw, data can still do; it must not stop what is behind it.
            raise InvalidRecord(f"cannot be read: {error!r}") from error
        await self._types.require([submission.type])
        if self._types.get(submission.type) is None:
            raise UnknownType(f"no task type {submission.type!r} is registered", pointer="/type")
        checked = await self._objects.check_in(submission.context)
        return (
            submission if checked is submission.context else dataclasses.replace(submission, context=checked)
        )


def _traced(record: Any, submission: Submission) -> Submission:
    """The submission under the trace that its record's header names, or one that begins here."""
    if not tracing.is_on():
        return submission
    named = dict(record.headers).get(tracing.TRACEPARENT)
    parent = named.decode("ascii", "replace") if named else None
    with tracing.span("submit", parent, kind="consumer", root=True, type=submission.type) as span:
        return dataclasses.replace(submission, traceparent=span.traceparent if span else None)
