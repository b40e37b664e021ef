"""Kafka is unavailable while the sweeper and the requeuer have records to publish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import asyncpg
import pytest
from aiokafka import AIOKafkaProducer
from tests.support.callback_targets import Bench, make_callback
from tests.support.services import read
from tests.support.waiting import wait_until

from penstock.callbacks import requeuer
from penstock.callbacks.requeuer import Requeuer
from penstock.callbacks.settings import CallbacksSettings
from penstock.errors import KafkaUnavailable
from penstock.kafka.client.connection import make_producer, running
from penstock.postgres.connection import open_pool
from penstock.postgres.session import Session, open_session
from penstock.stages import sweeper
from penstock.stages.metrics import Metrics
from penstock.stages.settings import StagesSettings


@asynccontextmanager
async def connected(
    settings: StagesSettings | CallbacksSettings,
) -> AsyncIterator[tuple[asyncpg.Pool[Any], Session, AIOKafkaProducer]]:
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_pool(settings.postgres, "test"))
        session = await stack.enter_async_context(open_session(settings.sessions, "test"))
        yield pool, session, await stack.enter_async_context(running(make_producer(settings)))


@asynccontextmanager
async def looping(loop: asyncio.Task[None]) -> AsyncIterator[None]:
    """Ends a background loop at the end of the block; an error of the loop leaves the block."""
    try:
        yield
    finally:
        if loop.done():
            loop.result()
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


def fail_first(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, failures: int = 2) -> list[None]:
    """Makes the first calls of a function fail as when a partition has no leader."""
    publish, failed = getattr(module, name), []

    async def failing(*arguments: Any) -> Any:
        if len(failed) < failures:
            failed.append(None)
            raise KafkaUnavailable("Kafka: LeaderNotAvailableError()")
        return await publish(*arguments)

    monkeypatch.setattr(module, name, failing)
    return failed


async def test_an_outage_of_kafka_does_not_end_the_sweeper(
    where: dict[str, Any], kafka_servers: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11, O1: Kafka is unavailable while rows are left in the outbox. The sweeper keeps its lock,
    and publishes the rows when Kafka is back."""
    settings = StagesSettings(**where, sweep_age_s=0.0, sweep_every_s=0.1)
    failed = fail_first(monkeypatch, sweeper, "publish")
    async with connected(settings) as (pool, session, producer):
        await pool.execute("INSERT INTO outbox (keys, records) VALUES ($1, $2)", [b"1"], [b"{}"])
        loop = asyncio.create_task(sweeper.sweep(settings, session, producer, Metrics()))
        async with looping(loop):

            async def is_published() -> bool:
                return loop.done() or await pool.fetchval("SELECT count(*) = 0 FROM outbox")

            await wait_until(is_published, what="the row is published")
    assert len(failed) == 2
    assert await read(kafka_servers, f"{prefix}events") == [{}]


async def test_an_outage_of_kafka_does_not_end_the_requeuer(
    platform: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11, C1: Kafka is unavailable while callbacks are due. The requeuer keeps its lock, and
    publishes them when Kafka is back, without waiting until they are due again."""
    monkeypatch.setattr("penstock.callbacks.settings.REPUBLISH", 1_000)
    settings = platform.settings()
    await platform.enqueue(make_callback("http://127.0.0.1:1/"), publish=False, due_in_s=0.0)
    failed = fail_first(monkeypatch, requeuer, "redeliver")
    async with connected(settings) as (pool, session, producer):
        loop = asyncio.create_task(Requeuer(settings, session, pool, producer).run())
        async with looping(loop):
            [record] = await platform.records("callbacks", 1)
    assert record["target"] == "http://127.0.0.1:1/"
    assert len(failed) == 2
