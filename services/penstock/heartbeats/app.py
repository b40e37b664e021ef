"""Wiring of the heartbeat processor."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial

from penstock import process
from penstock.heartbeats.handlers import Watch
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.kafka.connection import make_producer, running
from penstock.kafka.outbox import Publisher
from penstock.kafka.processor import Processor
from penstock.kafka.topics import HEARTBEATS
from penstock.postgres import outbox
from penstock.postgres.connection import open_pool

NAME = "heartbeats"


def create_app(settings: HeartbeatsSettings) -> process.Service:
    """The service: one processor and the watch over its leases; neither goes on without the other."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(settings.postgres, NAME))
            producer = await stack.enter_async_context(running(make_producer(settings)))
            publisher = Publisher(producer, settings, partial(outbox.paid, pool))
            watch = Watch(settings, pool, publisher, asyncio.get_running_loop().time, random.random)

            async def assigned(partitions: frozenset[tuple[str, int]]) -> None:
                await watch.assigned(frozenset(number for _topic, number in partitions))

            async def revoked(partitions: frozenset[tuple[str, int]]) -> None:
                watch.revoked(frozenset(number for _topic, number in partitions))

            processor = Processor(
                settings,
                NAME,
                {HEARTBEATS: watch.take},
                on_assigned=assigned,
                on_revoked=revoked,
                linger_s=settings.linger_s,
            )
            await process.leading(processor.run(stopping, ready), watch.run(), publisher.run())
            await publisher.drain()

    return service


def main() -> int:
    """Runs the service with settings from the environment."""
    return process.run(NAME, create_app(HeartbeatsSettings.load()))
