"""Wiring of task-sync."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from functools import partial

from penstock import process
from penstock.concurrency.stall_detector import StallDetector
from penstock.ingest import Ingest, IngestProgress, ingest_samples
from penstock.kafka.client import health as kafka_health
from penstock.kafka.client import positions
from penstock.kafka.client.connection import admin_client, make_consumer, make_producer, running
from penstock.kafka.client.offset_reader import OffsetReader
from penstock.kafka.client.pending_writes import probe_writes
from penstock.kafka.client.refusals import refused_by_topic
from penstock.kafka.topology.binding import ensure_bound
from penstock.kafka.topology.topics import SUBMITTED
from penstock.metrics.processing import position_samples, refusal_samples
from penstock.metrics.serving import serving, stand_in
from penstock.objects import ObjectStore
from penstock.postgres import health as postgres_health
from penstock.postgres.connection import open_pool
from penstock.postgres.deployment import deployment_id
from penstock.postgres.release import DUE_CHANNEL, READY_CHANNEL, REPLICA_NAME
from penstock.postgres.session import open_session
from penstock.postgres.types import CHANNEL as TYPES_CHANNEL
from penstock.postgres.types import TypeCache
from penstock.submission import TaskKind
from penstock.task_sync import metrics
from penstock.task_sync.backlog_counters import BacklogCounters
from penstock.task_sync.history import History
from penstock.task_sync.recheck import Recheck
from penstock.task_sync.refused import RefusedTasks
from penstock.task_sync.release import ReleaseLoop
from penstock.task_sync.settings import TaskSyncSettings
from penstock.task_sync.submissions import TaskHandler

NAME = "task-sync"
# PostgreSQL truncates the application name after 63 characters.
MAX_HOST_LENGTH = 30


def create_app(settings: TaskSyncSettings) -> process.Service:
    """The service: ingest and release in one process; when one of them fails, both end."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(settings.postgres, NAME, pooled=settings.pooled))
            # Not durable: a release that a crash of the server undoes is repeated, and the fence
            # makes its records harmless. Without this, each release would wait for the disk.
            session = await stack.enter_async_context(
                open_session(
                    settings.sessions,
                    f"{REPLICA_NAME} {_host()}-{os.getpid()}",
                    durable=False,
                    repeats_conflicts=True,
                    generic_plans=True,
                )
            )
            producer = await stack.enter_async_context(running(make_producer(settings)))
            offsets = await stack.enter_async_context(running(make_consumer(settings, None)))
            admin = await stack.enter_async_context(admin_client(settings))
            await ensure_bound(settings, partial(deployment_id, pool))
            types = TypeCache(pool)
            release_loop = ReleaseLoop(
                settings,
                session,
                producer,
                types,
                admin,
                offsets,
                RefusedTasks(pool, settings.event_source).fail,
            )
            objects = ObjectStore(settings.objects)
            reader = OffsetReader(offsets, settings.prefix)
            handler = TaskHandler(pool, TaskKind(types, objects))
            ingest = Ingest(settings, NAME, handler, pool, producer, reader)
            history = History(settings, objects)
            await session.listen(READY_CHANNEL, release_loop.on_ready)
            counters = BacklogCounters(settings, pool, release_loop.topics)
            await session.listen(READY_CHANNEL, counters.on_ready)
            await session.listen(TYPES_CHANNEL, release_loop.topics.on_type_changed)
            await session.listen(DUE_CHANNEL, release_loop.on_due_changed)
            recheck = Recheck(
                settings, pool, producer, admin, offsets, release_loop.topics, release_loop.cutoffs
            )
            progress = IngestProgress(settings.stall_timeout_s, reader, [ingest])
            # A full window has no progress, since it waits for workers.
            detector = StallDetector(
                settings.stall_timeout_s,
                lambda: release_loop.progress() | progress.progress(),
                (
                    partial(postgres_health.ping, settings.postgres, pooled=settings.pooled),
                    partial(kafka_health.ping, settings),
                    objects.probe,
                ),
            )
            await stack.enter_async_context(
                serving(
                    settings,
                    NAME,
                    lambda: [
                        *metrics.release_samples(release_loop.topics),
                        *ingest_samples([ingest], progress.lag),
                        *position_samples(
                            positions.moved_by_topic(settings.prefix, [SUBMITTED.name]),
                            positions.deleted_by_topic(settings.prefix, [SUBMITTED.name]),
                        ),
                        *refusal_samples(refused_by_topic(settings.prefix)),
                        *metrics.history_samples(history),
                        *counters.samples(),
                    ],
                    {
                        "postgres": partial(postgres_health.probe, pool),
                        "session": session.probe,
                        "kafka": partial(kafka_health.probe, producer, settings.kafka),
                        "writes": probe_writes,
                        "group": ingest.probe,
                        "objects": objects.probe,
                    },
                )
            )
            ready()
            await process.run_with_background(
                process.run_all(release_loop.run(stopping), ingest.run(stopping)),
                recheck.run(),
                history.run(),
                counters.run(),
                detector.run(),
                progress.unread.run(),
            )

    return service


def _host() -> str:
    """The host's name, short enough to leave room for the process id."""
    return socket.gethostname()[:MAX_HOST_LENGTH]


def main() -> int:
    """Runs the service with settings from the environment."""
    settings = TaskSyncSettings.load()
    return process.run(
        NAME, create_app(settings), stall_s=process.STALL_S, on_wait=partial(stand_in, settings, NAME)
    )
