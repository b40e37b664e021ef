"""Wiring of task-sync."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from functools import partial

from penstock import process
from penstock.kafka import health as kafka_health
from penstock.kafka.connection import admin_client, make_consumer, make_producer, running
from penstock.kafka.observer import Observer
from penstock.metrics.serving import serving
from penstock.objects import ObjectStore
from penstock.postgres import health as postgres_health
from penstock.postgres.connection import open_pool
from penstock.postgres.release import DUE_CHANNEL, READY_CHANNEL, REPLICA_NAME, REPLICAS_CHANNEL
from penstock.postgres.session import open_session
from penstock.postgres.types import CHANNEL as TYPES_CHANNEL
from penstock.postgres.types import KnownTypes
from penstock.task_sync import figures
from penstock.task_sync.counting import Counting
from penstock.task_sync.history import History
from penstock.task_sync.ingest import Ingest
from penstock.task_sync.lookout import LookOut
from penstock.task_sync.recheck import Recheck
from penstock.task_sync.release import Release
from penstock.task_sync.settings import TaskSyncSettings

NAME = "task-sync"
# The server keeps 63 characters of a session's name.
LONGEST_HOST = 30


def create_app(settings: TaskSyncSettings) -> process.Service:
    """The service: ingest and release side by side; when one cannot go on, neither does."""

    async def service(stopping: asyncio.Event, ready: process.Ready) -> None:
        async with AsyncExitStack() as stack:
            pool = await stack.enter_async_context(open_pool(settings.postgres, NAME, pooled=settings.pooled))
            # A release that a crash of the server undoes is done again, and the fence sees to the rest: not worth
            # a wait for the disk.
            session = await stack.enter_async_context(
                open_session(settings.sessions, f"{REPLICA_NAME} {_host()}-{os.getpid()}", durable=False)
            )
            producer = await stack.enter_async_context(running(make_producer(settings)))
            offsets = await stack.enter_async_context(running(make_consumer(settings, None)))
            admin = await stack.enter_async_context(admin_client(settings))
            types = KnownTypes(pool)
            gate = Release(settings, session, producer, types, admin, offsets)
            objects = ObjectStore(settings.objects)
            ingest = Ingest(settings, pool, producer, types, objects)
            history = History(settings, objects)
            await session.listen(READY_CHANNEL, gate.heard_ready)
            counting = Counting(settings, pool, gate)
            await session.listen(READY_CHANNEL, counting.heard)
            await session.listen(TYPES_CHANNEL, gate.heard_types)
            await session.listen(DUE_CHANNEL, gate.heard_due)
            await session.listen(REPLICAS_CHANNEL, gate.heard_replicas)
            recheck = Recheck(settings, pool, producer, admin, offsets, gate)
            lookout = LookOut(settings.stall_timeout_s, Observer(offsets, settings.prefix), ingest, gate)
            await stack.enter_async_context(
                serving(
                    settings,
                    NAME,
                    lambda: [
                        *figures.samples(gate),
                        *figures.of_ingest(ingest, lookout.lag),
                        *figures.of_history(history),
                        *counting.samples(),
                    ],
                    {
                        "postgres": partial(postgres_health.probe, pool),
                        "session": session.probe,
                        "kafka": partial(kafka_health.probe, producer, settings.kafka),
                        "group": ingest.probe,
                    },
                )
            )
            ready()
            await process.leading(
                process.together(gate.run(stopping), ingest.run(stopping)),
                recheck.run(),
                history.run(),
                counting.run(),
                lookout.look(),
                lookout.measure(),
            )

    return service


def _host() -> str:
    """The host's name, as far as the server keeps it."""
    return socket.gethostname()[:LONGEST_HOST]


def main() -> int:
    """Runs the service with settings from the environment."""
    return process.run(NAME, create_app(TaskSyncSettings.load()), stall_s=process.STALL_S)
