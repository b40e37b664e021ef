"""The gate's window, delays, idleness and replicas, on the real Kafka and PostgreSQL."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.running import make_topics, running_service
from tests.system import System
from tests.waiting import wait_until

from penstock import metrics
from penstock.contracts.context import Context
from penstock.contracts.submission import Submission
from penstock.local.ports import choose_port
from penstock.postgres import tasks, types
from penstock.postgres.connection import open_pool
from penstock.task_sync.app import create_app
from penstock.task_sync.settings import TaskSyncSettings


@pytest.fixture
async def settings(kafka_servers, prefix, database):
    await make_topics(kafka_servers, prefix)
    return TaskSyncSettings(
        kafka=kafka_servers,
        prefix=prefix,
        postgres=database,
        objects="memory:///",
        metrics_port=choose_port(),
    )


@pytest.fixture
async def pool(settings):
    async with open_pool(settings.postgres, "test") as pool:
        await types.register(pool, types.TaskType(name="t", partitions=2))
        yield pool


@pytest.fixture
async def system(settings, pool):
    async with AsyncExitStack() as stack:
        yield System(settings.kafka, settings.prefix, settings.postgres, stack, pool)


async def submit(pool, count, **fields):
    one = Submission(type="t", context=Context.encode(None), **fields)
    return [found.id for found in await tasks.submit(pool, [one] * count)]


async def scraped(settings):
    """Every sample by its name and the values of its labels in the order of their names."""
    url = f"http://127.0.0.1:{settings.metrics_port}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        text = await answer.text()
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_window_goes_by_what_workers_get_done(settings, pool, system, caplog):
    """S2: with nobody at work the window is its floor; workers that end some hundreds a second make it about a second of
    their work; its size, reason, lag and drain are metrics, and a change of reason is logged."""
    caplog.set_level(logging.DEBUG, logger="penstock.task_sync")
    for _ in range(4):
        await submit(pool, 1_000)
    async with running_service(create_app(settings)):
        await wait_until(lambda: pool.fetchval("SELECT count(*) = 100 FROM task WHERE state = 'queued'"))
        found = await scraped(settings)
        assert found["penstock_window_size", "floor", "t"] == settings.window_floor == 100
        assert found["penstock_window_lag", "t"] == found["penstock_released_total", "t"] == 100
        names = {metric.name for metric in metrics.ALL if metric.labels[:1] == ("type",)}
        assert names <= {key[0] for key in found}
        await system.start("heartbeats", "stages")
        # 400 a second at most.
        await system.work(handler_s=0.1, pool=40, backlog=2_000)

        async def drained():
            found = await scraped(settings)
            size = found.get(("penstock_window_size", "drain", "t"))
            return size and abs(size - found["penstock_window_drain", "t"]) < 1 and 100 < size <= 480

        await wait_until(drained, what="the window is what its workers do in a second")
    assert "by its drain" in caplog.text
