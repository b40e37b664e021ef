"""Faults of Faust inside the processor, injected in this process, on a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from faust.types import TP
from tests.support.waiting import wait_until

from penstock.errors import PostgresUnavailable, SessionLost, Stalled
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.kafka.processing.faust_app import FaustApp
from penstock.kafka.processing.processor import Delivery, Handler, Processor, ProcessorSettings
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import Topic

SOLO = Topic("solo", 1, 3_600_000, "Used by the tests of the processor.")


class Stage:
    """One processor on one partition, and the values that it has handled."""

    def __init__(self, settings: ProcessorSettings) -> None:
        self.settings = settings
        self.values: list[str] = []
        self.processor: Processor
        self.run: asyncio.Task[None]

    @property
    def consumer(self) -> Any:
        return self.processor._app._app.consumer

    @property
    def partition(self) -> TP:
        return TP(self.settings.prefix + SOLO.name, 0)

    async def settle(self, delivery: Delivery) -> None:
        self.values.append(delivery.value.decode())
        delivery.settle()

    async def publish(self, *values: str) -> None:
        async with running(make_producer(self.settings)) as producer:
            for value in values:
                await producer.send(self.settings.prefix + SOLO.name, value.encode())

    async def seen(self, *values: str) -> None:
        await wait_until(lambda: self.values == list(values) or self.run.done(), what=f"{values}")
        if self.run.done():
            await self.run
        assert self.values == list(values)

    async def failure(self) -> BaseException | None:
        await asyncio.wait([self.run], timeout=40)
        return self.run.exception()


Staging = Callable[..., Any]


@pytest.fixture
def staging(kafka_servers: str, prefix: str) -> Staging:
    @asynccontextmanager
    async def stage(handler: Handler | None = None, **options: Any) -> AsyncIterator[Stage]:
        stall_timeout_s = options.pop("stall_timeout_s", 30.0)
        settings = ProcessorSettings(
            kafka=kafka_servers, prefix=prefix, session_timeout_s=6.0, stall_timeout_s=stall_timeout_s
        )
        await create_topics(settings, [SOLO])
        stage = Stage(settings)
        stage.processor = Processor(settings, "soloist", {SOLO: handler or stage.settle}, **options)
        stopping, ready = asyncio.Event(), asyncio.Event()
        stage.run = asyncio.create_task(stage.processor.run(stopping, ready.set))
        started = asyncio.create_task(ready.wait())
        await asyncio.wait((stage.run, started), return_when=asyncio.FIRST_COMPLETED, timeout=40)
        started.cancel()
        try:
            yield stage
        finally:
            stopping.set()
            await asyncio.wait([stage.run], timeout=40)

    return stage


async def test_records_that_faust_skips_end_the_processor(staging: Staging) -> None:
    """O1: when Faust skips records, the processor asks the broker for them and ends. It never
    passes over a record that the broker has."""
    async with staging() as stage:
        await stage.publish("0", "1")
        await stage.seen("0", "1")
        await stage.consumer.seek_wait({stage.partition: 4})
        await stage.publish("2", "3", "4", "5")
        error = await stage.failure()
    assert isinstance(error, SessionLost)
    assert "skipped solo/0 from 2 to 4" in str(error)
    async with staging() as stage:
        await stage.seen("2", "3", "4", "5")


@pytest.mark.parametrize("read_offset", [0, 2], ids=["no read offset", "a read offset"])
async def test_a_partition_without_a_committed_offset_starts_with_its_first_record(
    staging: Staging, kafka_servers: str, prefix: str, monkeypatch: pytest.MonkeyPatch, read_offset: int
) -> None:
    """O1: a partition without a committed offset starts with its first record, even if records were
    fetched and discarded while the group formed, or Faust counts them as read."""
    seek_starts = FaustApp.seek_starts

    async def skip_then_seek(app: FaustApp, offsets: OffsetReader) -> Any:
        consumer: Any = app._app.consumer
        for partition in consumer.assignment():
            await consumer.seek_wait({partition: 2})
            consumer._read_offset[partition] = read_offset or None
        return await seek_starts(app, offsets)

    monkeypatch.setattr(FaustApp, "seek_starts", skip_then_seek)
    settings = ProcessorSettings(kafka=kafka_servers, prefix=prefix)
    await create_topics(settings, [SOLO])
    await Stage(settings).publish("0", "1", "2")
    async with staging() as stage:
        await stage.seen("0", "1", "2")


async def test_offsets_without_records_are_skipped(staging: Staging) -> None:
    """O1: a transaction marker takes an offset. The processor counts the marker neither as a lost
    record nor as lag."""
    async with staging(stall_timeout_s=4.0) as stage:
        producer = AIOKafkaProducer(
            bootstrap_servers=stage.settings.kafka, transactional_id=f"{stage.settings.prefix}transaction"
        )
        async with running(producer):
            for value in ("0", "1"):
                async with producer.transaction():
                    await producer.send(stage.settings.prefix + SOLO.name, value.encode())
        await stage.seen("0", "1")
        # The marker after "1" must not count as lag, or the stall detector ends the processor.
        await asyncio.wait([stage.run], timeout=8)
        assert not stage.run.done()
        await stage.publish("2")
        await stage.seen("0", "1", "2")


async def test_a_partition_without_reads_ends_the_processor(staging: Staging) -> None:
    """O2a: lag without progress ends the processor, even with no record in flight."""
    async with staging(stall_timeout_s=3.0) as stage:
        await stage.publish("0")
        await stage.seen("0")
        stage.consumer.pause_partitions({stage.partition})
        await stage.publish("1")
        error = await stage.failure()
    assert isinstance(error, Stalled)
    assert "reading solo/0 from 1" in str(error)


async def test_a_crash_of_faust_ends_the_processor(staging: Staging) -> None:
    """O2: a crash inside Faust ends the processor; Faust alone would leave the process alive and
    idle."""
    async with staging() as stage:
        await stage.consumer._thread.crash(RuntimeError("its thread has died"))
        error = await stage.failure()
    assert isinstance(error, SessionLost)
    assert "its thread has died" in str(error)


async def test_a_failed_background_task_ends_the_processor(staging: Staging) -> None:
    """O1: `fail` ends the processor with that error, and the records in flight are delivered
    again."""
    held: list[Delivery] = []

    async def hold(delivery: Delivery) -> None:
        held.append(delivery)

    async with staging(hold) as stage:
        await stage.publish("0", "1")
        await wait_until(lambda: len(held) == 2)
        held[1].settle()
        stage.processor.fail(RuntimeError("the committer has died"))
        error = await stage.failure()
    assert str(error) == "the committer has died"
    async with staging() as stage:
        await stage.seen("0", "1")


async def test_hooks_run_before_the_first_record_and_wait_for_servers(staging: Staging) -> None:
    """O1: the processor handles no record before the hook has restored the partition's state."""
    seen: list[object] = []

    async def assigned(partitions: frozenset[tuple[str, int]]) -> None:
        seen.append(partitions)
        if len(seen) < 3:
            raise PostgresUnavailable("away")

    async def take(delivery: Delivery) -> None:
        seen.append(delivery.value)
        delivery.settle()

    partition = frozenset({("solo", 0)})
    async with staging(take, on_assigned=assigned) as stage:
        await stage.publish("0")
        await wait_until(lambda: len(seen) == 4 or stage.run.done())
    assert seen == [partition, partition, partition, b"0"]


async def test_a_failing_hook_ends_the_processor(staging: Staging) -> None:
    """O1: a failing hook ends the processor, because its state is missing."""

    async def assigned(_partitions: frozenset[tuple[str, int]]) -> None:
        raise RuntimeError("cannot restore")

    async with staging(on_assigned=assigned) as stage:
        assert str(await stage.failure()) == "cannot restore"
    assert stage.values == []
