"""A processor that stops leaves its group, also during a rebalance or without a broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiokafka.client
import pytest
from aiokafka.consumer.group_coordinator import GroupCoordinator
from tests.support.waiting import in_time, wait_until

from penstock.errors import Fatal
from penstock.kafka.client import consumer as client_consumer
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.consumer import Consumer
from penstock.kafka.processing import processor as processing
from penstock.kafka.processing.faust_app import FaustApp
from penstock.kafka.processing.faust_consumer import LoopThread
from penstock.kafka.processing.processor import Delivery, Processor, ProcessorSettings
from penstock.kafka.topology.creation import create_topics
from penstock.kafka.topology.topics import Topic

TOPIC = Topic("stopped", 4, 3_600_000, "Used by the tests of the processor.")


class Attempt:
    """A processor as one attempt of a service runs it, and the tasks that it starts."""

    def __init__(self, settings: ProcessorSettings) -> None:
        self._before = asyncio.all_tasks()
        self.values: list[str] = []
        self.processor = Processor(settings, "stopper", {TOPIC: self._settle})
        self.stopping, self.ready = asyncio.Event(), asyncio.Event()
        self.run = asyncio.create_task(self.processor.run(self.stopping, self.ready.set))

    async def _settle(self, delivery: Delivery) -> None:
        self.values.append(delivery.value.decode())
        delivery.settle()

    @property
    def consumer(self) -> Consumer:
        found: Consumer | None = self.processor._app._consumer
        assert found is not None
        return found

    async def cancel(self) -> BaseException | None:
        """Cancels it, as a service does whose session is lost, and returns its error."""
        self.run.cancel()
        await in_time(asyncio.wait({self.run}))
        return None if self.run.cancelled() else self.run.exception()

    def left(self) -> set[asyncio.Task[Any]]:
        """Its tasks that still run."""
        return asyncio.all_tasks() - self._before - {asyncio.current_task()}  # type: ignore[arg-type]


@pytest.fixture
async def settings(kafka_servers: str, prefix: str) -> ProcessorSettings:
    settings = ProcessorSettings(kafka=kafka_servers, prefix=prefix, session_timeout_s=6.0)
    await create_topics(settings, [TOPIC])
    return settings


async def publish(settings: ProcessorSettings, values: range) -> None:
    async with running(make_producer(settings)) as producer:
        for value in values:
            await producer.send(
                settings.prefix + TOPIC.name, b"%d" % value, partition=value % TOPIC.partitions
            )


async def next_one_has_all_partitions(settings: ProcessorSettings) -> None:
    """A processor of the same process has all partitions from its first generation on."""
    attempt = Attempt(settings)
    await in_time(attempt.ready.wait())
    assert len(attempt.processor.expected()) == TOPIC.partitions
    attempt.stopping.set()
    await in_time(attempt.run)
    assert attempt.left() == set()


async def hang(*_arguments: object) -> bool:
    await asyncio.Event().wait()
    return False


async def fail(*_arguments: object) -> bool:
    raise RuntimeError("the commit has failed")


@pytest.mark.parametrize("commit", [hang, fail])
async def test_a_processor_leaves_its_group_whatever_its_last_commit_meets(
    settings: ProcessorSettings, monkeypatch: pytest.MonkeyPatch, commit: Callable[..., Awaitable[bool]]
) -> None:
    """O2, O3: a last commit without an answer, or with an error, does not keep the member in its
    group. It kept partitions from the service that began again in the same process."""
    monkeypatch.setattr(processing, "LAST_COMMIT_S", 0.05)
    # The error of a periodic commit would end the processor first.
    monkeypatch.setattr(processing, "COMMIT_EVERY_S", 1_000.0)
    attempt = Attempt(settings)
    await in_time(attempt.ready.wait())
    with monkeypatch.context() as patch:
        patch.setattr(FaustApp, "commit", commit)
        await publish(settings, range(8))
        await wait_until(lambda: len(attempt.values) == 8)
        await attempt.cancel()
    assert attempt.left() == set()
    await next_one_has_all_partitions(settings)


@pytest.fixture
def brokers_away(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set while no connection to a broker is opened, as while its name is not resolved."""
    away, connect = asyncio.Event(), aiokafka.client.create_conn

    async def create_conn(*arguments: Any, **options: Any) -> Any:
        if away.is_set():
            await asyncio.Event().wait()
        return await connect(*arguments, **options)

    monkeypatch.setattr(aiokafka.client, "create_conn", create_conn)
    return away


async def test_a_processor_stops_while_no_broker_answers(
    settings: ProcessorSettings, brokers_away: asyncio.Event
) -> None:
    """O3, S11: its connections are broken, and no new one is opened. No task of it is left."""
    attempt = Attempt(settings)
    await in_time(attempt.ready.wait())
    await publish(settings, range(8))
    await wait_until(lambda: len(attempt.values) == 8)
    brokers_away.set()
    for connection in attempt.consumer.client._conns.values():
        connection._writer.transport.abort()
    await attempt.cancel()
    assert attempt.left() == set()
    brokers_away.clear()
    await next_one_has_all_partitions(settings)


async def test_a_processor_stops_while_its_consumer_starts(
    settings: ProcessorSettings, brokers_away: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O3, S11: the consumer connects for the first time, and no broker answers."""
    began, start = asyncio.Event(), LoopThread.on_start

    async def start_without_brokers(thread: LoopThread) -> None:
        brokers_away.set()
        began.set()
        await start(thread)

    monkeypatch.setattr(LoopThread, "on_start", start_without_brokers)
    attempt = Attempt(settings)
    await in_time(began.wait())
    await attempt.cancel()
    assert attempt.left() == set()
    monkeypatch.setattr(LoopThread, "on_start", start)
    brokers_away.clear()
    await next_one_has_all_partitions(settings)


async def test_a_processor_stops_while_its_coordinator_waits(
    settings: ProcessorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O3: the client waits for its coordination without a limit. A rebalance that does not end does
    not keep the member."""
    monkeypatch.setattr(client_consumer, "LEAVE_S", 0.1)
    joining = asyncio.Event()

    async def join(_coordinator: GroupCoordinator, *_arguments: object) -> None:
        joining.set()
        await asyncio.Event().wait()

    attempt = Attempt(settings)
    await in_time(attempt.ready.wait())
    with monkeypatch.context() as patch:
        patch.setattr(GroupCoordinator, "ensure_active_group", join)
        attempt.consumer._coordinator.request_rejoin()
        await in_time(joining.wait())
        await attempt.cancel()
    assert attempt.left() == set()


async def test_a_consumer_that_does_not_end_is_an_error(
    settings: ProcessorSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: then the process ends, and its supervisor starts another one."""
    monkeypatch.setattr(client_consumer, "LEAVE_S", 0.1)
    monkeypatch.setattr(client_consumer, "END_S", 0.1)
    may_end = asyncio.Event()

    async def stay(_coordinator: GroupCoordinator, *_arguments: object) -> None:
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    attempt = Attempt(settings)
    await in_time(attempt.ready.wait())
    with monkeypatch.context() as patch:
        patch.setattr(GroupCoordinator, "ensure_active_group", stay)
        attempt.consumer._coordinator.request_rejoin()
        error = await attempt.cancel()
        assert isinstance(error, Fatal)
        assert "does not end" in str(error)
        may_end.set()
        await wait_until(lambda: not attempt.left())
