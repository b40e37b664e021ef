"""Wiring of the heartbeat processor."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial

from penstock import process
from penstock.core.acknowledgement import Partition
from penstock.heartbeats.bereavement import Bereavement
from penstock.heartbeats.handlers import Watch
from penstock.heartbeats.reading import Reading
from penstock.heartbeats.recount import Recount
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.kafka import health as kafka_health
from penstock.kafka.connection import make_producer, running
from penstock.kafka.outbox import Publisher
from penstock.kafka.processor import Delivery, Processor
from penstock.kafka.topics import HEARTBEATS
from penstock.metrics.processing import of_processor
from penstock.metrics.serving import serving
from penstock.postgres import health as postgres_health
from penstock.postgres import outbox
from penstock.postgres.connection import open_pool

NAME = "heartbeats"


def create_app(settings: HeartbeatsSettings) -> process.Service:
    """The service: one processor and the watch over its leases; neither goes on without the other."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(settings.postgres, NAME, pooled=settings.pooled))
            producer = await stack.enter_async_context(running(make_producer(settings)))
            publisher = Publisher(producer, settings, partial(outbox.paid, pool))

            async def take(delivery: Delivery) -> None:
                await watch.take(delivery)

            async def assigned(partitions: frozenset[Partition]) -> None:
                await watch.assigned(frozenset(number for _topic, number in partitions))

            async def revoked(partitions: frozenset[Partition]) -> None:
                watch.revoked(frozenset(number for _topic, number in partitions))

            processor = Processor(
                settings,
                NAME,
                {HEARTBEATS: take},
                on_assigned=assigned,
                on_revoked=revoked,
                linger_s=settings.linger_s,
            )
            reading = Reading(processor.ends, processor.expected)
            lost = Bereavement(settings).lost
            clock = asyncio.get_running_loop().time
            watch = Watch(
                settings, pool, publisher, reading, Recount(settings, pool).look, lost, clock, random.random
            )
            await stack.enter_async_context(
                serving(
                    settings,
                    NAME,
                    lambda: [*of_processor(processor.figures), *watch.samples()],
                    {
                        "postgres": partial(postgres_health.probe, pool),
                        "kafka": partial(kafka_health.probe, producer, settings.kafka),
                        "group": processor.probe,
                    },
                )
            )
            await process.leading(processor.run(stopping, ready), watch.run(), publisher.run())
            await publisher.drain()

    return service


def main() -> int:
    """Runs the service with settings from the environment."""
    return process.run(NAME, create_app(HeartbeatsSettings.load()))
