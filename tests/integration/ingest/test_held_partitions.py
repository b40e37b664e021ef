"""A reader whose partitions are held at a record or lose their position, on the real servers.

The records of these tests are texts; the handler says which of them are locked, large or refused.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiokafka.admin import NewPartitions
from tests.support.services import make_topics, read, write
from tests.support.waiting import wait_until

from penstock.errors import InvalidRecord, LockConflict, ObjectsUnavailable, SessionLost, ValueRefused
from penstock.ingest import Gathering, Ingest, IngestProgress
from penstock.ingest.reader import RECHECK_S
from penstock.ingest.settings import IngestSettings
from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.kafka.topology.topics import SUBMITTED, SUBMITTED_REJECTED
from penstock.postgres import task_logs
from penstock.postgres.connection import open_pool

GATHERING = Gathering(rows=100, size_bytes=1_000_000, seconds=0.5)


class Handler:
    """Inserts texts into a list, and moves the stored position as the real handlers do."""

    topic = SUBMITTED
    rejected_topic = SUBMITTED_REJECTED

    def __init__(self, pool, inserted):
        self.pool = pool
        self.inserted = inserted
        self.locked = set()
        self.unreadable = set()
        self.away = set()
        self.attempts = []
        self.before = None

    def open_batch(self):
        return self

    async def read(self, record):
        text = record.value.decode()
        if text.startswith("invalid"):
            raise InvalidRecord(text)
        if text in self.unreadable:
            raise ObjectsUnavailable("the store of its large value is away")
        return text

    async def insert(self, items, source):
        self.attempts.append(list(items))
        if self.before is not None:
            await self.before(items)
        if self.locked & set(items):
            raise LockConflict("another transaction has it")
        if self.away & set(items):
            raise ObjectsUnavailable("the store of the batch is away")
        await task_logs.insert(self.pool, source, None, None, 1)
        self.inserted += items

    def at(self, text):
        """Attempts to insert a batch with a text."""
        return [items for items in self.attempts if text in items]


class System:
    """A topic with several partitions, and the readers that a test starts."""

    def __init__(self, settings, pool):
        self.settings = settings
        self.pool = pool
        self.inserted = []

    async def write(self, *texts, partition=0):
        topic = self.settings.prefix + SUBMITTED.name
        await write(self.settings.kafka, topic, *(text.encode() for text in texts), partition=partition)

    async def rejections(self):
        return await read(self.settings.kafka, self.settings.prefix + SUBMITTED_REJECTED.name)

    @asynccontextmanager
    async def reading(self, gathering=None, recheck_s=RECHECK_S, **ways):
        """Runs a reader until the end of the block; yields it, its handler and its progress."""
        handler = Handler(self.pool, self.inserted)
        for name, value in ways.items():
            setattr(handler, name, value)
        async with (
            running(make_producer(self.settings)) as producer,
            running(make_consumer(self.settings, None)) as consumer,
        ):
            offsets = OffsetReader(consumer, self.settings.prefix)
            ingest = Ingest(
                self.settings, "test", handler, self.pool, producer, offsets, gathering, recheck_s
            )
            # A poll each half second.
            progress = IngestProgress(3.0, offsets, [ingest])
            stopping = asyncio.Event()
            reader = asyncio.create_task(ingest.run(stopping))
            polls = asyncio.create_task(progress.unread.run())
            try:
                await wait_until(lambda: ingest.positions() or reader.done())
                yield ingest, handler, progress
            finally:
                polls.cancel()
                stopping.set()
                await reader


@pytest.fixture
async def system(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    settings = IngestSettings(kafka=kafka_servers, prefix=prefix)
    async with admin_client(settings) as admin:
        await admin.create_partitions({settings.prefix + SUBMITTED.name: NewPartitions(4)})
    async with open_pool(database, "test") as pool:
        yield System(settings, pool)


@pytest.mark.parametrize("way", ["locked", "unreadable", "away"])
@pytest.mark.parametrize("gathering", [None, GATHERING], ids=["read", "gathered"])
async def test_a_rejection_is_written_once_while_its_partition_waits(system, way, gathering):
    """T5: however often a held record is tried again, the invalid records read with it are
    rejected once."""
    await system.write("a", "invalid", "held", "b", "invalid too")
    async with system.reading(gathering, **{way: {"held"}}) as (ingest, handler, _):
        await wait_until(lambda: ingest.held and ingest._attempts >= 3)
        assert "held" not in system.inserted
        getattr(handler, way).clear()
        await wait_until(lambda: len(system.inserted) == 3)
        await wait_until(lambda: ingest.rejected == 2)
    assert system.inserted == ["a", "held", "b"]
    assert [found["reason"] for found in await system.rejections()] == ["invalid", "invalid too"]


async def test_a_refused_value_at_a_locked_position_is_rejected_once(system):
    """S12, T5: the position of a partition may be locked as well, by another transaction, when the
    record itself was refused."""

    async def refuse(items):
        if "refused" in items:
            raise ValueRefused("no such text")
        if not items and locks:
            locks.pop()
            raise LockConflict("another transaction has the position")

    locks = [None] * 2
    await system.write("refused", "b")
    async with system.reading(before=refuse) as (ingest, _, _):
        await wait_until(lambda: system.inserted == ["b"])
        assert ingest.rejected == 1
    assert len(await system.rejections()) == 1


async def test_a_gathered_batch_at_a_lock_is_inserted_whole(system):
    """S12: a batch becomes one segment, also when it had to wait for another transaction."""
    await system.write("a", "locked", "b")
    async with system.reading(GATHERING, locked={"locked"}) as (_, handler, _):
        await wait_until(lambda: len(handler.attempts) >= 3)
        handler.locked.clear()
        await wait_until(lambda: system.inserted)
    assert system.inserted == ["a", "locked", "b"]
    assert all(items == ["a", "locked", "b"] for items in handler.attempts)


async def test_a_held_partition_goes_to_another_process(system):
    """S12: a process that joins takes over held partitions; the records of all are inserted once,
    and the process that had them before holds them no longer."""
    for number in range(4):
        await system.write(f"before {number}", f"locked {number}", f"behind {number}", partition=number)
    locked = {f"locked {number}" for number in range(4)}
    async with system.reading(locked=set(locked)) as (first, one, _):
        await wait_until(lambda: first.held == 4)
        async with system.reading(locked=set(locked)) as (second, two, _):
            await wait_until(lambda: first.positions() and len(first.positions()) + second.held == 4)
            await wait_until(lambda: first.held == len(first.positions()))
            assert second.held
            one.locked.clear()
            two.locked.clear()
            await wait_until(lambda: len(system.inserted) == 12)
            await wait_until(lambda: first.held == second.held == 0)
    assert sorted(system.inserted) == sorted(
        f"{place} {number}" for place in ("before", "locked", "behind") for number in range(4)
    )


async def test_the_rest_of_a_dropped_batch_moves_no_position(system):
    """T5: when the stored position goes back while a divided batch is inserted, its records are
    read again from there, and none is passed over."""
    went_back = False

    async def go_back(items):
        nonlocal went_back
        if len(items) > 1:
            raise ValueRefused("divided")
        if items == ["b"] and not went_back:
            went_back = True
            await system.pool.execute("UPDATE ingested SET next_offset = 0, identity = NULL")
            raise SessionLost("the position went back")

    await system.write("a", "b", "c")
    async with system.reading(before=go_back):
        await wait_until(lambda: "c" in system.inserted)
    assert went_back
    assert system.inserted == ["a", "a", "b", "c"]


@pytest.mark.parametrize("gathering", [None, GATHERING], ids=["read", "gathered"])
async def test_an_idle_partition_is_read_again_from_a_position_that_went_back(system, gathering):
    """T5: a database that fails over to a lagging standby lacks the last records. They are inserted
    again without waiting for a new record, and only those of partitions that went back."""
    await system.write("a", "b")
    await system.write("other", partition=1)
    async with system.reading(gathering, recheck_s=0.2) as (ingest, _, _):
        await wait_until(lambda: len(system.inserted) == 3 and ingest.positions().get(0) == 2)
        await system.pool.execute(
            "UPDATE ingested SET next_offset = 1, identity = NULL WHERE next_offset = 2"
        )
        await wait_until(lambda: len(system.inserted) == 4)
        await wait_until(lambda: ingest.positions()[0] == 2)
        await system.pool.execute("DELETE FROM ingested WHERE next_offset = 2")
        await wait_until(lambda: len(system.inserted) == 6)
    assert sorted(system.inserted) == ["a", "a", "b", "b", "b", "other"]


async def test_a_partition_that_is_not_read_is_found_beside_a_held_one(system, monkeypatch):
    """O2a: the wait of one partition hides no other from the stall detector."""
    await system.write("locked", partition=1)
    async with system.reading(locked={"locked"}) as (ingest, _, progress):
        await wait_until(lambda: ingest.held)
        # Pausing looks like a fetcher that has lost a partition, if the reader does not know of it.
        consumer = ingest._consumer
        monkeypatch.setattr(consumer, "paused", set)
        consumer.pause(*(tp for tp in consumer.assignment() if tp.partition == 0))
        await system.write("unread")
        names = set()

        def stalled():
            names.update(progress.progress())
            return "reading submitted/0 from 0" in names

        await wait_until(stalled)
        # Each value of the held one is another.
        assert "reading submitted/1 from 0" not in names
        # Not only in the moments between two attempts: then the detector would begin anew.
        attempts = ingest._attempts
        while ingest._attempts < attempts + 2:
            assert "reading submitted/0 from 0" in progress.progress()
            await asyncio.sleep(0)
        consumer.resume(*consumer.assignment())
        await wait_until(lambda: system.inserted == ["unread"])
