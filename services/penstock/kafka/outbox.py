"""Publishing what a transaction owes: events and callbacks, after commit and at least once.

A crash between commit and publication leaves the outbox row and the callback's `due_at`, from which the
sweepers publish again. Consumers tell repeats by the event's id, the callbacks service by the attempt number.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from aiokafka import AIOKafkaProducer
from aiokafka.partitioner import DefaultPartitioner

from penstock.contracts.event import Callback, Owed, encode_callbacks
from penstock.contracts.revocation import Revocation
from penstock.core.leases import Key
from penstock.errors import Fatal, Unavailable
from penstock.kafka.connection import send_in_batches, translated
from penstock.kafka.topics import CALLBACKS, CALLBACKS_DIVERTED, EVENTS, REVOKED
from penstock.settings import Kafka

log = logging.getLogger(__name__)

# aiokafka's own, which is the Java client's: a key's records are on one partition whoever writes them.
_PARTITIONER = DefaultPartitioner()

# Debts paid within this many seconds are struck out by one statement.
STRIKE_OUT_EVERY_S = 0.1
# Leases taken back by one record, well below what a record may hold.
REVOKED_A_RECORD = 10_000


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key's records on a topic with so many partitions."""
    numbers = list(range(partitions))
    return int(_PARTITIONER(key, numbers, numbers))


async def send_all(
    producer: AIOKafkaProducer, topic: str, records: Iterable[tuple[bytes | None, bytes]]
) -> None:
    """Writes (key, value) records to a topic and returns once Kafka has them all.

    Each goes to the partition of its key, as every Kafka client would choose it; keyless ones go to the first.

    Raises:
        KafkaUnavailable: some may not be there; send all of them again.
    """
    records = list(records)
    if not records:
        return
    with translated():
        partitions = sorted(await producer.partitions_for(topic))
        by_partition: dict[int, list[tuple[bytes | None, bytes]]] = {}
        for key, value in records:
            partition = partitions[0] if key is None else _PARTITIONER(key, partitions, partitions)
            by_partition.setdefault(partition, []).append((key, value))
        pending = []
        for partition, some in by_partition.items():
            pending += await send_in_batches(producer, topic, partition, some)
        await asyncio.gather(*pending)


async def publish(
    producer: AIOKafkaProducer,
    settings: Kafka,
    keys: Sequence[bytes],
    events: Sequence[bytes],
    callbacks: Sequence[Callback] = (),
) -> None:
    """Writes events (keyed by task) and callbacks (keyed by their targets' URLs) to their topics.

    Raises:
        KafkaUnavailable: publish all of them again.
    """
    await send_all(producer, settings.prefix + EVENTS.name, zip(keys, events, strict=True))
    await send_callbacks(producer, settings.prefix + CALLBACKS.name, callbacks)


async def send_callbacks(producer: AIOKafkaProducer, topic: str, callbacks: Iterable[Callback]) -> None:
    """Writes callbacks to a topic, those of one partition many a record, and returns once Kafka has them all.

    Each goes to the partition of its target, in the order given. A record of one has the target's URL as its key; all namespaces that call it are on one partition.

    Raises:
        KafkaUnavailable: some may not be there; send all of them again.
    """
    by_partition: dict[int, list[Callback]] = {}
    pending: list[asyncio.Future[object]] = []
    with translated():
        callbacks = list(callbacks)
        partitions = sorted(await producer.partitions_for(topic)) if callbacks else []
        # An address often has many, and finding its partition takes as long as all else done here for one.
        found: dict[str, int] = {}
        for callback in callbacks:
            url = callback.target.url
            partition = found.get(url)
            if partition is None:
                partition = found[url] = _PARTITIONER(url.encode(), partitions, partitions)
            by_partition.setdefault(partition, []).append(callback)
        for partition, some in by_partition.items():
            pending += await send_in_batches(producer, topic, partition, encode_callbacks(some))
        await asyncio.gather(*pending)


async def redeliver(
    producer: AIOKafkaProducer, settings: Kafka, due: Sequence[tuple[Callback, bool]]
) -> None:
    """Writes callbacks that are due, each with whether it goes the diverted way, to the topics of the two ways.

    Raises:
        KafkaUnavailable: write all of them again.
    """
    for topic, way in ((CALLBACKS, False), (CALLBACKS_DIVERTED, True)):
        some = [callback for callback, diverted in due if diverted is way]
        await send_callbacks(producer, settings.prefix + topic.name, some)


async def revoke(producer: AIOKafkaProducer, settings: Kafka, revocation: Revocation) -> None:
    """Tells every worker of leases taken back.

    Raises:
        KafkaUnavailable: not all may hear of it.
    """
    tasks = revocation.tasks
    some = (tasks[at : at + REVOKED_A_RECORD] for at in range(0, len(tasks), REVOKED_A_RECORD))
    records = [(None, Revocation(revocation.why, keys).encode()) for keys in some]
    await send_all(producer, settings.prefix + REVOKED.name, records)


class Publisher:
    """Publishes what transactions owe, in the background, and strikes out what is paid.

    What comes while something is on its way goes together after it. Many that write a record each to one partition would
    wait for each other's batches, and aiokafka's producer gives up on one that has been overtaken some hundred times.

    In doubt it leaves the debt standing: the sweeper publishes it again.

    Args:
        producer: acks=all.
        settings: for the topics' prefix.
        paid: strikes out outbox rows by id.
    """

    def __init__(
        self,
        producer: AIOKafkaProducer,
        settings: Kafka,
        paid: Callable[[Sequence[int]], Awaitable[None]],
    ) -> None:
        self._producer = producer
        self._settings = settings
        self._strike_out = paid
        self._owed: list[Owed] = []
        # Of transactions, those that are being paid included.
        self._under_way = 0
        self._paying: asyncio.Task[None] | None = None
        self._paid: list[int] = []
        self._some_paid = asyncio.Event()
        self._broken: Fatal | None = None

    def owe(self, owed: Owed) -> None:
        """Takes over a committed transaction's debt."""
        if owed.events or owed.callbacks or owed.revocation:
            self._owed.append(owed)
            self._under_way += 1
            if self._paying is None:
                self._paying = asyncio.create_task(self._pay_all())

    @property
    def under_way(self) -> int:
        """Transactions whose debt is on its way to Kafka."""
        return self._under_way

    def fail(self, error: Fatal) -> None:
        """Somebody else has found that this producer can write nothing any more: `run` ends with it."""
        self._broken = error
        self._some_paid.set()

    async def run(self) -> None:
        """Strikes out paid debts until cancelled.

        Raises:
            Fatal: this producer can write nothing any more.
        """
        while True:
            await self._some_paid.wait()
            if self._broken is not None:
                raise self._broken
            await asyncio.sleep(STRIKE_OUT_EVERY_S)
            await self._strike_out_paid()

    async def drain(self) -> None:
        """Waits until everything taken over is published, and strikes it out."""
        while self._paying is not None:
            await self._paying
        await self._strike_out_paid()

    async def _pay_all(self) -> None:
        try:
            while self._owed:
                some, self._owed = self._owed, []
                try:
                    await self._pay(some)
                finally:
                    self._under_way -= len(some)
        finally:
            self._paying = None

    async def _pay(self, some: Sequence[Owed]) -> None:
        keys = [key for owed in some for key in owed.keys]
        events = [event for owed in some for event in owed.events]
        callbacks = [callback for owed in some for callback in owed.callbacks]
        revoked: dict[str, list[Key]] = {}
        for owed in some:
            if owed.revocation:
                revoked.setdefault(owed.revocation.why, []).extend(owed.revocation.tasks)
        try:
            for why, tasks in revoked.items():
                await revoke(self._producer, self._settings, Revocation(why, tasks))
            await publish(self._producer, self._settings, keys, events, callbacks)
        except Unavailable as error:
            log.warning("left to the sweeper: %d events, %s", len(events), error)
            return
        except Fatal as error:
            self.fail(error)
            return
        if paid := [owed.outbox_id for owed in some if owed.outbox_id is not None]:
            self._paid += paid
            self._some_paid.set()

    async def _strike_out_paid(self) -> None:
        self._some_paid.clear()
        ids, self._paid = self._paid, []
        try:
            await self._strike_out(ids)
        except Unavailable as error:
            # They are swept, and published twice at worst.
            log.warning("could not strike out %d paid batches: %s", len(ids), error)
