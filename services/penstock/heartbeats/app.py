"""Wiring of the heartbeat processor."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial

from penstock import process
from penstock.core.offset_tracker import Partition
from penstock.heartbeats.group_eviction import GroupEviction
from penstock.heartbeats.lease_tracker import LeaseTracker
from penstock.heartbeats.lost_follows import LostFollows
from penstock.heartbeats.progress_writer import ProgressWriter
from penstock.heartbeats.read_watermark import ResultsWatermark, WatermarkReader
from penstock.heartbeats.results_progress import results_progress
from penstock.heartbeats.settings import HeartbeatsSettings
from penstock.heartbeats.unwatched import UnwatchedAttempts
from penstock.kafka.client import health as kafka_health
from penstock.kafka.client.connection import make_producer, running
from penstock.kafka.client.pending_writes import probe_writes
from penstock.kafka.processing.outbox import Publisher
from penstock.kafka.processing.processor import Delivery, Processor
from penstock.kafka.topology.binding import ensure_bound
from penstock.kafka.topology.topics import HEARTBEATS
from penstock.metrics.processing import processor_samples
from penstock.metrics.serving import serving, stand_in
from penstock.postgres import health as postgres_health
from penstock.postgres import outbox
from penstock.postgres.connection import open_pool
from penstock.postgres.deployment import deployment_id

NAME = "heartbeats"


def create_app(settings: HeartbeatsSettings) -> process.Service:
    """The service: a processor, a lease tracker and a publisher; when one fails all end."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(
                open_pool(settings.postgres, NAME, pooled=settings.pooled, generic_plans=True)
            )
            producer = await stack.enter_async_context(running(make_producer(settings)))
            results = await stack.enter_async_context(results_progress(settings))
            publisher = Publisher(producer, settings, partial(outbox.delete_published, pool))
            progress = ProgressWriter(pool)

            async def take(delivery: Delivery) -> None:
                progress.add(await leases.take(delivery), delivery.timestamp)

            async def assigned(partitions: frozenset[Partition]) -> None:
                await leases.assigned(frozenset(number for _topic, number in partitions))

            async def revoked(partitions: frozenset[Partition]) -> None:
                leases.revoked(frozenset(number for _topic, number in partitions))

            processor = Processor(
                settings,
                NAME,
                {HEARTBEATS: take},
                on_assigned=assigned,
                on_revoked=revoked,
                gap_s=lambda: settings.linger_s,
                servers=(
                    partial(postgres_health.ping, settings.postgres, pooled=settings.pooled),
                    partial(kafka_health.ping, settings),
                ),
            )
            leases = LeaseTracker(
                settings,
                pool,
                publisher,
                WatermarkReader(processor.ends, processor.expected),
                ResultsWatermark(results),
                UnwatchedAttempts(results, pool).find,
                GroupEviction(settings).evict,
                asyncio.get_running_loop().time,
                random.random,
            )
            lost_follows = LostFollows(
                UnwatchedAttempts(results, pool, unclaimed=True), leases, asyncio.get_running_loop().time
            )
            await stack.enter_async_context(
                serving(
                    settings,
                    NAME,
                    lambda: [*processor_samples(processor.metrics), *leases.samples(), *progress.samples()],
                    {
                        "postgres": partial(postgres_health.probe, pool),
                        "kafka": partial(kafka_health.probe, producer, settings.kafka),
                        "writes": probe_writes,
                        "group": processor.probe,
                    },
                )
            )
            await ensure_bound(settings, partial(deployment_id, pool))
            await process.run_with_background(
                processor.run(stopping, ready),
                leases.run(),
                lost_follows.run(),
                publisher.run(),
                progress.run(),
            )
            await publisher.drain()

    return service


def main() -> int:
    """Runs the service with settings from the environment."""
    settings = HeartbeatsSettings.load()
    return process.run(NAME, create_app(settings), on_wait=partial(stand_in, settings, NAME))
