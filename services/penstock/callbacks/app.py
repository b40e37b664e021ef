"""Wiring of the callbacks service."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import socket
from contextlib import AsyncExitStack
from functools import partial

from penstock import process
from penstock.callbacks.calling import open_caller
from penstock.callbacks.handlers import Deliverer
from penstock.callbacks.releaser import Releaser
from penstock.callbacks.settings import CallbacksSettings
from penstock.core.acknowledgement import Partition
from penstock.kafka import health as kafka_health
from penstock.kafka.connection import make_producer, running, translated
from penstock.kafka.outbox import partition_of
from penstock.kafka.processor import Delivery, Processor
from penstock.kafka.topics import CALLBACKS, CALLBACKS_DIVERTED
from penstock.metrics.processing import of_processor
from penstock.metrics.serving import serving
from penstock.postgres import health as postgres_health
from penstock.postgres import targets
from penstock.postgres.connection import open_pool
from penstock.postgres.session import open_session

NAME = "callbacks"


def create_app(settings: CallbacksSettings) -> process.Service:
    """The service: one processor, one deliverer and a releaser; none goes on without the others."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(settings.postgres, NAME, pooled=settings.pooled))
            session = await stack.enter_async_context(open_session(settings.sessions, f"{NAME} releaser"))
            producer = await stack.enter_async_context(running(make_producer(settings)))
            caller = await stack.enter_async_context(open_caller(settings))
            releaser = Releaser(settings, session, pool, producer)
            with translated():
                partitions = len(await producer.partitions_for(settings.prefix + CALLBACKS.name))

            async def take(delivery: Delivery) -> None:
                await deliverer.take(delivery)

            async def assigned(partitions: frozenset[Partition]) -> None:
                await deliverer.assigned(partitions)

            async def revoked(partitions: frozenset[Partition]) -> None:
                await deliverer.revoked(partitions)

            processor = Processor(
                settings,
                NAME,
                {CALLBACKS: take, CALLBACKS_DIVERTED: take},
                on_assigned=assigned,
                on_revoked=revoked,
                under_way=lambda: deliverer.under_way,
            )
            deliverer = Deliverer(
                settings,
                pool,
                caller,
                producer,
                owner=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
                partition_of=lambda url: partition_of(url.encode(), partitions),
                scheduled=releaser.scheduled,
                reject=partial(processor.reject, settle=False),
                fail=processor.fail,
                chance=random.random,
            )
            await stack.enter_async_context(
                serving(
                    settings,
                    NAME,
                    lambda: [*of_processor(processor.figures), *deliverer.figures.samples()],
                    {
                        "postgres": partial(postgres_health.probe, pool),
                        "session": session.probe,
                        "kafka": partial(kafka_health.probe, producer, settings.kafka),
                        "group": processor.probe,
                    },
                )
            )
            await session.listen(targets.CHANNEL, deliverer.targets.outdated)
            await process.leading(processor.run(stopping, ready), deliverer.run(stopping), releaser.run())

    return service


def main() -> int:
    """Runs the service with settings from the environment."""
    return process.run(NAME, create_app(CallbacksSettings.load()))
