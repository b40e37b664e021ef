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
from penstock.callbacks.caller import open_caller
from penstock.callbacks.hosts import Hosts
from penstock.callbacks.pipeline import Pipeline
from penstock.callbacks.requeuer import Requeuer
from penstock.callbacks.results import ResultsPublisher, ResultsSweeper
from penstock.callbacks.secret_cache import SecretCache
from penstock.callbacks.settings import CallbacksSettings
from penstock.kafka.client import health as kafka_health
from penstock.kafka.client.connection import make_producer, running, translated
from penstock.kafka.client.pending_writes import probe_writes
from penstock.kafka.processing.outbox import partition_of
from penstock.kafka.processing.processor import Processor
from penstock.kafka.topology.binding import ensure_bound
from penstock.kafka.topology.topics import CALLBACKS, CALLBACKS_DIVERTED
from penstock.metrics.processing import processor_samples
from penstock.metrics.serving import serving, stand_in
from penstock.postgres import callback_secrets, targets
from penstock.postgres import health as postgres_health
from penstock.postgres.connection import open_pool
from penstock.postgres.deployment import deployment_id
from penstock.postgres.session import open_session

NAME = "callbacks"


def create_app(settings: CallbacksSettings) -> process.Service:
    """The service: a processor, a pipeline, a requeuer and a sweeper; when one fails, it ends."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(
                open_pool(settings.postgres, NAME, pooled=settings.pooled, generic_plans=True)
            )
            session = await stack.enter_async_context(open_session(settings.sessions, f"{NAME} requeuer"))
            producer = await stack.enter_async_context(running(make_producer(settings)))
            hosts = Hosts(settings)
            secret_cache = SecretCache(settings, pool)
            caller = await stack.enter_async_context(
                open_caller(settings, secret_cache.keys_of, hosts.resolved)
            )
            with translated():
                partitions = len(await producer.partitions_for(settings.prefix + CALLBACKS.name))
            requeuer = Requeuer(settings, session, pool, producer)
            sweeper = ResultsSweeper(settings, session, producer)
            pipeline = Pipeline(
                settings,
                pool,
                caller,
                ResultsPublisher(settings, pool, producer),
                requeuer,
                hosts,
                secret_cache,
                owner=f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}",
                partition_of=lambda url: partition_of(url.encode(), partitions),
                random_share=random.random,
            )
            processor = Processor(
                settings,
                NAME,
                {CALLBACKS: pipeline.receive, CALLBACKS_DIVERTED: pipeline.receive},
                on_assigned=pipeline.assign,
                on_revoked=pipeline.revoke,
                in_flight=lambda: pipeline.unfinished,
                servers=(
                    partial(postgres_health.ping, settings.postgres, pooled=settings.pooled),
                    partial(kafka_health.ping, settings),
                ),
            )
            await stack.enter_async_context(
                serving(
                    settings,
                    NAME,
                    lambda: [*processor_samples(processor.metrics), *pipeline.metrics.samples()],
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
            await session.listen(targets.CHANNEL, pipeline.targets.invalidate)
            await session.listen(callback_secrets.CHANNEL, secret_cache.invalidate)
            await process.run_with_background(
                processor.run(stopping, ready),
                pipeline.run(stopping),
                requeuer.run(),
                sweeper.run(),
                secret_cache.run(),
            )

    return service


def main() -> int:
    """Runs the service with settings from the environment."""
    settings = CallbacksSettings.load()
    return process.run(NAME, create_app(settings), on_wait=partial(stand_in, settings, NAME))
