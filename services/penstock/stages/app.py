"""Wiring of the stage processor."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial

from penstock import process
from penstock.kafka.client import health as kafka_health
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.pending_writes import probe_writes
from penstock.kafka.processing.outbox import Publisher
from penstock.kafka.processing.processor import Delivery, Processor
from penstock.kafka.topology.binding import ensure_bound
from penstock.kafka.topology.topics import STAGE_RESULTS
from penstock.metrics.processing import processor_samples
from penstock.metrics.serving import serving, stand_in
from penstock.postgres import health as postgres_health
from penstock.postgres import outbox
from penstock.postgres.connection import open_pool
from penstock.postgres.deployment import deployment_id
from penstock.postgres.session import open_session
from penstock.stages.handlers import Committer
from penstock.stages.settings import StagesSettings
from penstock.stages.sweeper import sweep

NAME = "stages"


def create_app(settings: StagesSettings) -> process.Service:
    """The service: a processor, a committer, a publisher and a sweeper; when one fails all end."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(
                open_pool(settings.postgres, NAME, pooled=settings.pooled, generic_plans=True)
            )
            session = await stack.enter_async_context(open_session(settings.sessions, f"{NAME} sweeper"))
            producer = await stack.enter_async_context(running(make_producer(settings)))
            publisher = Publisher(producer, settings, partial(outbox.delete_published, pool))
            committer = Committer(settings, pool, publisher, random.random)

            async def take(delivery: Delivery) -> None:
                await committer.take(delivery)

            processor = Processor(
                settings,
                NAME,
                {STAGE_RESULTS: take},
                gap_s=committer.gap_s,
                servers=(
                    partial(postgres_health.ping, settings.postgres, pooled=settings.pooled),
                    partial(kafka_health.ping, settings),
                ),
            )
            await stack.enter_async_context(
                serving(
                    settings,
                    NAME,
                    lambda: [
                        *processor_samples(processor.metrics),
                        *committer.metrics.samples(publishing=publisher.in_flight),
                    ],
                    {
                        "postgres": partial(postgres_health.probe, pool),
                        "session": session.probe,
                        "kafka": partial(kafka_health.probe, producer, settings.kafka),
                        "writes": probe_writes,
                        "group": processor.probe,
                    },
                )
            )
            await ensure_bound(settings, partial(deployment_id, pool))
            await process.run_with_background(
                processor.run(stopping, ready),
                committer.run(),
                publisher.run(),
                sweep(settings, session, producer, committer.metrics),
            )
            await publisher.drain()

    return service


def main() -> int:
    """Runs the service with settings from the environment."""
    settings = StagesSettings.load()
    return process.run(NAME, create_app(settings), on_wait=partial(stand_in, settings, NAME))
