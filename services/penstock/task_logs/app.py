"""Wiring of the service `tasklogs`."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial

from penstock import process
from penstock.concurrency.stall_detector import StallDetector
from penstock.core.report_tokens import ReportTokens
from penstock.ingest import Gathering, Ingest, IngestProgress, ingest_samples
from penstock.kafka.client import health as kafka_health
from penstock.kafka.client import positions
from penstock.kafka.client.connection import make_consumer, make_producer, running
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.kafka.client.pending_writes import probe_writes
from penstock.kafka.client.refusals import refused_by_topic
from penstock.kafka.topology.binding import ensure_bound
from penstock.kafka.topology.topics import TASK_LOGS
from penstock.metrics.processing import position_samples, refusal_samples
from penstock.metrics.serving import serving, stand_in
from penstock.objects import ObjectStore
from penstock.postgres import health as postgres_health
from penstock.postgres.connection import open_pool
from penstock.postgres.deployment import deployment_id
from penstock.task_logs import metrics
from penstock.task_logs.retention import Retention
from penstock.task_logs.segments import SegmentHandler
from penstock.task_logs.settings import TaskLogsSettings

NAME = "tasklogs"

# A segment closes at so many records, or bytes of their values.
SEGMENT_RECORDS = 20_000
SEGMENT_BYTES = 8 * 1024 * 1024


def create_app(settings: TaskLogsSettings) -> process.Service:
    """The service: one reader of the topic, and retention; when one fails, both end."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(settings.postgres, NAME, pooled=settings.pooled))
            producer = await stack.enter_async_context(running(make_producer(settings)))
            offsets = await stack.enter_async_context(running(make_consumer(settings, None)))
            await ensure_bound(settings, partial(deployment_id, pool))
            objects = ObjectStore(settings.objects)
            reader = OffsetReader(offsets, settings.prefix)
            await reader.require([TASK_LOGS.name])
            partitions, tokens = await reader.partitions(TASK_LOGS.name), ReportTokens(settings.report_keys)
            segments = SegmentHandler(pool, objects, partitions, tokens)
            gathering = Gathering(SEGMENT_RECORDS, SEGMENT_BYTES, settings.logs_segment_s)
            ingest = Ingest(settings, NAME, segments, pool, producer, reader, gathering)
            progress = IngestProgress(settings.stall_timeout_s, reader, [ingest])
            retention = Retention(settings, objects)
            topics = [TASK_LOGS.name]
            await stack.enter_async_context(
                serving(
                    settings,
                    NAME,
                    lambda: [
                        *metrics.samples(segments, retention),
                        *ingest_samples([ingest], progress.lag),
                        *position_samples(
                            positions.moved_by_topic(settings.prefix, topics),
                            positions.deleted_by_topic(settings.prefix, topics),
                        ),
                        *refusal_samples(refused_by_topic(settings.prefix)),
                    ],
                    {
                        "postgres": partial(postgres_health.probe, pool),
                        "kafka": partial(kafka_health.probe, producer, settings.kafka),
                        "writes": probe_writes,
                        "group": ingest.probe,
                        "objects": objects.probe,
                    },
                )
            )
            ready()
            await process.run_with_background(
                ingest.run(stopping),
                retention.run(),
                StallDetector(
                    settings.stall_timeout_s,
                    progress.progress,
                    (
                        partial(postgres_health.ping, settings.postgres, pooled=settings.pooled),
                        partial(kafka_health.ping, settings),
                        objects.probe,
                    ),
                ).run(),
                progress.unread.run(),
            )

    return service


def main() -> int:
    """Runs the service with settings from the environment."""
    settings = TaskLogsSettings.load()
    return process.run(
        NAME, create_app(settings), stall_s=process.STALL_S, on_wait=partial(stand_in, settings, NAME)
    )
