"""Kafka tells the offsets of one type slowly, or takes its records slowly: no other type waits."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from tests.support.pipeline import submit
from tests.support.services import running_service
from tests.support.waiting import in_time, wait_until

from penstock.kafka.client.connection import make_consumer, running
from penstock.kafka.topology.topics import workers_group
from penstock.postgres import types
from penstock.task_sync import lag_poller
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings

TASK_TYPES = tuple(types.TaskType(name=name, partitions=2) for name in ("slow", "quick"))

WINDOW = 20


@pytest.fixture
def settings(where):
    # The polls that hang by intent are no stall.
    return TaskSyncSettings(**where, window_floor=WINDOW, window=1_000, sweep_s=1.0, stall_timeout_s=3600.0)


async def queued(pool, type_name):
    return await pool.fetchval("SELECT count(*) FROM task WHERE type = $1 AND state = 'queued'", type_name)


async def releases_one_by_one(pool, count=10):
    """Releases tasks of the quick type, fewer than its window, while the slow type hangs."""
    for expected in range(1, count + 1):
        await submit(pool, 1, "quick")

        async def released(expected=expected):
            return await queued(pool, "quick") == expected

        await wait_until(released)


@asynccontextmanager
async def takes_records(settings, group, topic):
    """A member of a group, which commits all records."""

    async def take():
        while True:
            await consumer.getmany(timeout_ms=100)
            await consumer.commit()

    async with running(make_consumer(settings, group, topic)) as consumer:
        taking = asyncio.create_task(take())
        yield
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)


async def test_a_slow_group_delays_no_other_type(settings, pool, monkeypatch):
    """S1, O1: the coordinator of one type's group does not answer. The type is released until its
    window is full by its last known lag, and no further; the other type is released at once. When
    the coordinator answers, and workers have taken the records, the type goes on."""
    answers, asked = asyncio.Event(), asyncio.Event()
    list_offsets = AIOKafkaAdminClient.list_consumer_group_offsets
    slow = workers_group(settings.prefix, "slow")

    async def listed(self, group, *arguments, **options):
        if group == slow:
            asked.set()
            await answers.wait()
        return await list_offsets(self, group, *arguments, **options)

    monkeypatch.setattr(AIOKafkaAdminClient, "list_consumer_group_offsets", listed)
    # A release that waited for the coordinator would wait until the test lets it answer.
    monkeypatch.setattr(lag_poller, "POLL_S", 3600.0)
    async with running_service(create_app(settings)) as service:
        await submit(pool, 5 * WINDOW, "slow")
        await in_time(asked.wait())

        async def window_is_full():
            return await queued(pool, "slow") == WINDOW

        await wait_until(window_is_full)
        await releases_one_by_one(pool)
        assert not service.done()
        assert await queued(pool, "slow") == WINDOW
        answers.set()
        async with takes_records(settings, slow, f"{settings.prefix}ready.slow"):

            async def all_released():
                return await queued(pool, "slow") == 5 * WINDOW

            await wait_until(all_released)


async def test_a_slow_write_delays_no_other_type(settings, pool, monkeypatch):
    """S1, O1: the producer does not take the records of one type, because its partitions have no
    leader. The other type is released at once, and the type goes on when its partitions have
    leaders again."""
    leaders, begun = asyncio.Event(), asyncio.Event()
    send_batch = AIOKafkaProducer.send_batch

    async def sent(self, batch, topic, **options):
        if topic.endswith("ready.slow"):
            begun.set()
            await leaders.wait()
        return await send_batch(self, batch, topic, **options)

    monkeypatch.setattr(AIOKafkaProducer, "send_batch", sent)
    async with running_service(create_app(settings)) as service:
        await submit(pool, 5, "slow")
        await in_time(begun.wait())
        await releases_one_by_one(pool)
        await submit(pool, 5, "slow")
        assert not service.done()
        assert await queued(pool, "slow") == 5
        leaders.set()

        async def all_released():
            return await queued(pool, "slow") == 10

        await wait_until(all_released)
