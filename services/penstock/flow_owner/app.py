"""Wiring of the service `flows`."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from penstock import process
from penstock.concurrency.stall_detector import StallDetector
from penstock.flow_owner.contents import Contents
from penstock.flow_owner.owner import LOCK_TIMEOUT, Owner
from penstock.flow_owner.schedule_loop import ScheduleLoop
from penstock.flow_owner.settings import FlowsSettings
from penstock.ingest import Ingest, IngestProgress, SubmissionHandler, ingest_samples
from penstock.kafka.client import health as kafka_health
from penstock.kafka.client import positions
from penstock.kafka.client.connection import make_consumer, make_producer, running
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.kafka.client.pending_writes import probe_writes
from penstock.kafka.client.refusals import refused_by_topic
from penstock.kafka.processing.outbox import Publisher
from penstock.kafka.topology.binding import ensure_bound
from penstock.kafka.topology.topics import (
    FLOW_EVENTS_SUBMITTED,
    FLOW_EVENTS_SUBMITTED_REJECTED,
    FLOWS_SUBMITTED,
    FLOWS_SUBMITTED_REJECTED,
)
from penstock.metrics.processing import position_samples, refusal_samples
from penstock.metrics.serving import serving, stand_in
from penstock.objects import ObjectStore
from penstock.postgres import health as postgres_health
from penstock.postgres import outbox
from penstock.postgres.connection import open_pool
from penstock.postgres.deployment import deployment_id
from penstock.postgres.flow_definitions import DefinitionCache
from penstock.postgres.session import open_session
from penstock.submission import EventKind, FlowKind

NAME = "flows"
# The consumer group of the replicas that read events; `NAME` is that of flows.
EVENTS_GROUP = "flow-events"
# PostgreSQL truncates the application name after 63 characters.
MAX_HOST_LENGTH = 30


def create_app(settings: FlowsSettings) -> process.Service:
    """The service: an owner of shards and a publisher; when one of them fails, all end."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(settings.postgres, NAME, pooled=settings.pooled))
            session = await stack.enter_async_context(
                open_session(
                    settings.sessions,
                    f"{NAME} owner {socket.gethostname()[:MAX_HOST_LENGTH]}-{os.getpid()}",
                    repeats_conflicts=True,
                    lock_timeout=LOCK_TIMEOUT,
                    generic_plans=True,
                )
            )
            producer = await stack.enter_async_context(running(make_producer(settings)))
            offsets = await stack.enter_async_context(running(make_consumer(settings, None)))
            await ensure_bound(settings, partial(deployment_id, pool))
            objects = ObjectStore(settings.objects)
            publisher = Publisher(producer, settings, partial(outbox.delete_published, pool))
            owner = Owner(settings, session, Contents(objects), publisher)
            reader = OffsetReader(offsets, settings.prefix)
            flow_handler = SubmissionHandler(
                FLOWS_SUBMITTED,
                FLOWS_SUBMITTED_REJECTED,
                pool,
                FlowKind(DefinitionCache(pool), objects),
            )
            event_handler = SubmissionHandler(
                FLOW_EVENTS_SUBMITTED, FLOW_EVENTS_SUBMITTED_REJECTED, pool, EventKind(objects)
            )
            flows = Ingest(settings, NAME, flow_handler, pool, producer, reader)
            events = Ingest(settings, EVENTS_GROUP, event_handler, pool, producer, reader)
            ingests: list[Ingest[Any]] = [flows, events]
            topics = [ingest.topic for ingest in ingests]
            ingest_progress = IngestProgress(settings.stall_timeout_s, reader, ingests)

            async def probe_groups() -> None:
                for ingest in ingests:
                    await ingest.probe()

            schedule_loop = ScheduleLoop(settings, pool, objects)
            await stack.enter_async_context(
                serving(
                    settings,
                    NAME,
                    lambda: [
                        *owner.metrics.samples(owned=owner.owned, held=len(owner.held)),
                        *schedule_loop.samples(),
                        *ingest_samples(ingests, ingest_progress.lag),
                        *position_samples(
                            positions.moved_by_topic(settings.prefix, topics),
                            positions.deleted_by_topic(settings.prefix, topics),
                        ),
                        *refusal_samples(refused_by_topic(settings.prefix)),
                    ],
                    {
                        "postgres": partial(postgres_health.probe, pool),
                        "session": session.probe,
                        "kafka": partial(kafka_health.probe, producer, settings.kafka),
                        "writes": probe_writes,
                        "group": probe_groups,
                        "objects": objects.probe,
                    },
                )
            )
            ready()
            await process.run_with_background(
                process.run_all(owner.run(stopping), flows.run(stopping), events.run(stopping)),
                publisher.run(),
                schedule_loop.run(),
                StallDetector(
                    settings.stall_timeout_s,
                    lambda: {**owner.progress(), **schedule_loop.progress(), **ingest_progress.progress()},
                    (
                        partial(postgres_health.ping, settings.postgres, pooled=settings.pooled),
                        partial(kafka_health.ping, settings),
                        objects.probe,
                    ),
                ).run(),
                ingest_progress.unread.run(),
            )
            await publisher.drain()

    return service


def main() -> int:
    """Runs the service with settings from the environment."""
    settings = FlowsSettings.load()
    return process.run(
        NAME, create_app(settings), stall_s=process.STALL_S, on_wait=partial(stand_in, settings, NAME)
    )
